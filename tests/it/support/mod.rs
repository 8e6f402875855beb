//! What the tests share. A test takes what it needs:
//!
//! - [`db::Db`]: a database of its own, migrated, gone afterwards;
//! - [`rig::Rig`]: a server in this process on a real port, with two workers and the routes of `app.rs`;
//! - [`process::ServerProcess`]: the same server as a process of its own, to be killed;
//! - [`worker::Worker`]: a process that consumes or relays, to be killed; [`queue`]: what it consumes from;
//! - [`cluster::Cluster`]: a Postgres server of its own, to be stopped, configured, or its log read;
//! - [`bouncer::Bouncer`]: a PgBouncer in front of a server;
//! - [`rabbit::Rabbit`]: a RabbitMQ, where one is asked for;
//! - [`browser::Browser`]: a headless Chromium;
//! - [`operator::Operator`]: somebody at the pages of an inspector;
//! - [`tour::tour`]: once through everything, for a store that is set up in its own way;
//! - [`shop::Shop`]: orders and stock, written through `IdemTx` under every policy;
//! - [`jobs`]: work in steps, and without a request, for server processes;
//! - [`example::Example`]: an example of this crate, as a process of its own;
//! - [`flawed::Endpoint`]: an endpoint without this crate, right but for one flaw;
//! - [`forms`]: forms with tokens, and a database whose clock the test sets;
//! - [`proxy::Proxy`]: what goes wrong between the pool and Postgres, at a chosen message;
//! - [`statements::Statements`]: how many a connection sends;
//! - [`client`]: requests and answers; [`gate::Gate`]: handlers held until the test lets them go;
//! - [`log`]: what the crate says through `tracing`.

pub mod app;
pub mod bouncer;
pub mod browser;
pub mod client;
pub mod cluster;
pub mod db;
pub mod example;
pub mod flawed;
pub mod forms;
pub mod gate;
pub mod jobs;
pub mod log;
pub mod operator;
pub mod points;
pub mod process;
pub mod proxy;
pub mod queue;
pub mod rabbit;
pub mod rig;
pub mod shop;
pub mod statements;
pub mod tour;
pub mod worker;

use std::time::{Duration, Instant};

use actix_web::rt::time::sleep;

/// Longer than anything that works takes, on a machine that is busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Asks until the answer is yes; fails the test where it never is.
#[track_caller]
pub fn eventually<F, Fut>(what: &str, mut ask: F) -> impl Future<Output = ()>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = bool>,
{
    let place = std::panic::Location::caller();
    async move {
        let began = Instant::now();
        while !ask().await {
            assert!(began.elapsed() < PATIENCE, "{place}: waited in vain until {what}");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// How often a repeated test runs: `REPEAT=full` by hand, once otherwise.
pub fn repeat(full: usize, short: usize) -> usize {
    if std::env::var("REPEAT").is_ok_and(|value| value == "full") { full } else { short }
}

/// Whether a service that a test needs may be missing: only where IT_REQUIRE does not list it, and
/// then one loud line says so.
pub fn missing(service: &str) -> bool {
    let required = std::env::var("IT_REQUIRE").unwrap_or_default();
    assert!(!required.split([',', ' ']).any(|listed| listed == service), "{service} is required here and missing");
    eprintln!("NOT TESTED: {service} is not installed");
    true
}
