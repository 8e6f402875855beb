//! The promises, over real sockets and a real Postgres: `./with-postgres cargo test`.

mod architecture;
mod cleanup;
mod concurrency;
mod crash;
mod failure;
mod fingerprint;
mod idem_tx;
mod integration;
mod keys;
mod migrations;
mod observe;
mod pools;
mod replay;
mod schedules;
mod security;
mod settings;
mod support;
mod tls;
