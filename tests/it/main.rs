//! The promises, over real sockets and a real Postgres: `./with-postgres cargo test`.

mod guarded;
mod idem_tx;
mod smoke;
mod support;
mod transition;
mod version;
