//! Does a service keep to the IETF draft *The Idempotency-Key HTTP Header Field* (-07), and to common practice?
//!
//!     ./with-postgres cargo run --example shop                                   # in another terminal
//!     cargo run --example conformance -- http://localhost:8080/orders            # all pass
//!
//!     cargo run --example conformance -- http://localhost:3000/payments \
//!       --header 'Authorization: Bearer sk_test_1' --other-user 'Authorization: Bearer sk_test_2' \
//!       --body '{"amount": 100}' --other-body '{"amount": 200}' --required
//!
//! It sends about fifty requests, and those that are accepted are carried out: run it against a test system. It prints
//! a table; its exit status is 1 where a row fails, and 2 where nothing could be judged.
//!
//! What no request shows is not in the table: that there was one effect and not two (count your rows), and that a key
//! is forgotten when its time is over.

mod keys;
mod options;
mod problems;
mod retries;
mod service;
mod table;

use std::{env, process::ExitCode};

use crate::{
    options::{Options, USAGE},
    service::{Ground, Service},
    table::Table,
};

#[actix_web::main]
async fn main() -> ExitCode {
    let options = match Options::parse(env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let service = Service::new(options);
    println!("{} {}\n", service.options.method, service.options.url);
    let ground = match service.ground().await {
        Ok(ground) => ground,
        Err(error) => {
            eprintln!("nothing can be judged: {error}");
            return ExitCode::from(2);
        }
    };
    let table = conformance(&service, &ground).await;
    print!("{table}");
    if table.fails() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// In the order in which a client meets them.
async fn conformance(service: &Service, ground: &Ground) -> Table {
    let mut table = Table::default();
    retries::replayed(service, ground, &mut table).await;
    let reused = retries::reused(service, ground, &mut table).await;
    let outstanding = retries::concurrent(service, ground, &mut table).await;
    retries::reset(service, ground, &mut table).await;
    retries::failed(service, &mut table).await;
    let missing = keys::missing(service, &mut table).await;
    let malformed = keys::malformed(service, &mut table).await;
    keys::other_user(service, ground, &mut table).await;
    keys::safe_methods(service, ground, &mut table).await;
    problems::described(&[(400, missing.or(malformed)), (409, outstanding), (422, reused)], service, &mut table).await;
    table
}
