//! The promises, over real sockets and a real Postgres: `./with-postgres cargo test`.

mod concurrency;
mod failure;
mod fingerprint;
mod idem_tx;
mod integration;
mod keys;
mod replay;
mod security;
mod smoke;
mod support;
