//! The promises, over real sockets and a real Postgres: `./with-postgres cargo test`.

mod fingerprint;
mod keys;
mod smoke;
mod support;
