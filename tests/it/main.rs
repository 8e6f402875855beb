//! The promises, over real sockets and a real Postgres: `./with-postgres cargo test`.

mod cleanup;
mod concurrency;
mod crash;
mod failure;
mod fingerprint;
mod hooks;
mod idem_tx;
mod integration;
mod keys;
mod migrations;
mod pools;
mod repeats;
mod replay;
mod schedules;
mod security;
mod settings;
mod smoke;
mod sources;
mod status;
mod support;
mod tls;
