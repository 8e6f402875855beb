//! The promises, over real sockets and a real Postgres: `./with-postgres cargo test`.

mod duplicate;
mod guarded;
mod idem_tx;
mod smoke;
mod support;
mod transition;
mod version;
