//! The promises, over real sockets and a real Postgres: `./with-postgres cargo test`.

mod atomic;
mod campaign;
mod complete_in;
mod dropped;
mod idem_tx;
mod interrupted;
mod proxy;
mod smoke;
mod support;
