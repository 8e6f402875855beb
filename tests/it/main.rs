//! The promises, over real sockets and a real Postgres: `./with-postgres cargo test`.

mod architecture;
mod concurrency;
mod failure;
mod fingerprint;
mod integration;
mod keys;
mod observe;
mod replay;
mod security;
mod support;
