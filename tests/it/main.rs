//! The promises, over real sockets and a real Postgres: `./with-postgres cargo test`.

mod cleanup;
mod crash;
mod migrations;
mod pools;
mod schedules;
mod settings;
mod smoke;
mod support;
mod tls;
