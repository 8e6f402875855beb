//! The promises, over real sockets and a real Postgres: `./with-postgres cargo test`.

mod architecture;
mod atomic;
mod campaign;
mod cleanup;
mod complete_in;
mod concurrency;
mod crash;
mod dropped;
mod failure;
mod fingerprint;
mod idem_tx;
mod integration;
mod interrupted;
mod keys;
mod migrations;
mod observe;
mod pools;
mod proxy;
mod replay;
mod schedules;
mod security;
mod settings;
mod support;
mod tls;
