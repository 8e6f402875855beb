//! Retries of finished keys, and those who ask what has become of one, under `Policy::atomic()`: every process
//! tells them what is so, and they are in nobody's way.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use actix_idempotency::{IdemTx, Idempotency, Isolation, PgPool, Policy};
use actix_web::{
    HttpRequest, HttpResponse, Result,
    error::ErrorInternalServerError,
    guard, rt,
    web::{self, Data, ServiceConfig},
};
use diesel::sql_types::Text;
use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use reqwest::{Client, RequestBuilder};
use serde_json::json;
use tokio::sync::Barrier;

use crate::support::{
    app::created,
    client::{RequestExt, client},
    db::{Db, pool},
    eventually,
    gate::Gate,
    proxy::{Do, Proxy},
    repeat,
    rig::Server,
};

const ISOLATIONS: [Isolation; 3] = [Isolation::Default, Isolation::RepeatableRead, Isolation::Serializable];

/// The statement that asks for the lock, and the look behind it.
const LOCK: &str = "pg_try_advisory_xact_lock";
const LOOK: &str = "LEFT JOIN idempotency_keys AS k ON k.id";

/// With `x-hold` it waits at the gate, with `x-fail` it fails.
async fn buy(
    mut tx: IdemTx,
    request: HttpRequest,
    gate: Data<Gate>,
    runs: Data<AtomicUsize>,
    tag: String,
) -> Result<HttpResponse> {
    // Not for the whole file: there a number is loaded as well.
    use diesel_async::RunQueryDsl;

    runs.fetch_add(1, Ordering::SeqCst);
    diesel::sql_query("INSERT INTO effects (tag) VALUES ($1)")
        .bind::<Text, _>(tag)
        .execute(&mut *tx)
        .await
        .map_err(ErrorInternalServerError)?;
    if request.headers().contains_key("x-hold") {
        gate.pass().await;
    }
    Ok(if request.headers().contains_key("x-fail") { HttpResponse::InternalServerError().finish() } else { created(1) })
}

/// Its engine and its pool are its own, as another process's are.
struct Process {
    server: Server,
    gate: Gate,
    runs: Data<AtomicUsize>,
    client: Client,
}

impl Process {
    fn start(url: &str, connections: u32, isolation: Isolation) -> Self {
        let pool = pool(url, connections);
        let idempotency = Idempotency::postgres(pool.clone()).without_sweeper();
        let (gate, runs) = (Gate::new(), Data::new(AtomicUsize::new(0)));
        let counted = runs.clone();
        let routes = move |config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool| {
            let policy = Policy::new().anonymous().isolation(isolation);
            let leased = idempotency.with(policy.clone());
            let atomic = idempotency.with(policy.atomic());
            config
                .app_data(counted.clone())
                .route("/orders/keys/{key}", atomic.status("POST", "/orders"))
                .service(
                    web::resource("/orders")
                        .guard(guard::Header("x-policy", "leased"))
                        .wrap(leased)
                        .route(web::post().to(buy)),
                )
                .service(web::resource("/orders").wrap(atomic).route(web::post().to(buy)));
        };
        let server = Server::start(2, pool, idempotency, gate.clone(), routes);
        Self { server, gate, runs, client: client() }
    }

    fn order(&self, key: &str, tag: &str) -> RequestBuilder {
        self.client.post(self.server.url("/orders")).key(key).body(tag.to_owned())
    }

    fn status(&self, key: &str) -> RequestBuilder {
        self.client.get(self.server.url(&format!("/orders/keys/{key}")))
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

/// Takes the finished rows away, so that they can come [back](bring_back) at a chosen moment.
async fn take_away(db: &Db) {
    db.run("CREATE TABLE away AS TABLE idempotency_keys; DELETE FROM idempotency_keys").await;
}

async fn bring_back(db: &Db) {
    db.run("INSERT INTO idempotency_keys TABLE away; DROP TABLE away").await;
}

#[actix_web::test]
async fn a_crowd_of_retries_gets_the_answer_from_a_process_that_has_not_met_the_key() {
    for isolation in ISOLATIONS {
        let db = Db::new().await;
        let first = Process::start(&db.url, 5, isolation).order("k", "x").answer().await;
        assert_eq!(first.status, 201, "{}", first.text());
        for connections in (1..=5).cycle().take(repeat(50, 5)) {
            let other = Process::start(&db.url, connections, isolation);
            let together = Arc::new(Barrier::new(24));
            let crowd = join_all((0..24).map(async |_| {
                together.wait().await;
                for _ in 0..4 {
                    first.assert_replayed_by(&other.order("k", "x").answer().await);
                }
            }));
            crowd.await;
            assert_eq!(other.runs(), 0, "{isolation:?}");
        }
        assert_eq!(db.effects("x").await, 1);
    }
}

/// It is told that the key was used for something else, and asks for no lock that another would miss.
#[actix_web::test]
async fn whoever_is_not_to_run_is_in_nobodys_way() {
    for isolation in ISOLATIONS {
        let db = Db::new().await;
        let proxy = Proxy::before(&db.url);
        let (process, late) =
            (Process::start(&db.url, 5, isolation), Process::start(&proxy.url(&db.url), 5, isolation));
        let failed = process.order("k", "x").header("x-policy", "leased").header("x-fail", "1").answer().await;
        assert_eq!((failed.status.as_u16(), db.state("k").await.as_deref()), (500, Some("released")));
        let asked = proxy.next(LOCK, Do::HoldAnswer);
        let other = rt::spawn(late.order("k", "y").answer());
        asked.happened().await;
        let retry = process.order("k", "x").answer().await;
        assert_eq!((retry.status.as_u16(), retry.is_replay()), (201, false), "{}", retry.text());
        asked.let_go();
        assert_eq!(other.await.unwrap().code(), "key-reused");
        assert_eq!((process.runs(), late.runs()), (2, 0), "{isolation:?}");
    }
}

#[actix_web::test]
async fn a_row_that_is_completed_before_the_lock_is_free_is_replayed_and_nothing_runs() {
    for isolation in ISOLATIONS {
        let db = Db::new().await;
        let proxy = Proxy::before(&db.url);
        let first = Process::start(&db.url, 5, isolation).order("k", "x").answer().await;
        // One connection, on which both statements are prepared.
        let other = Process::start(&proxy.url(&db.url), 1, isolation);
        assert_eq!(other.order("another", "y").answer().await.status, 201);
        take_away(&db).await;
        let look = proxy.next(LOOK, Do::HoldRequest);
        let retry = rt::spawn(other.order("k", "x").answer());
        look.happened().await;
        let locked = "EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted \
                      AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";
        eventually("it has the lock, and has seen no row", || db.is(locked)).await;
        bring_back(&db).await;
        look.let_go();
        first.assert_replayed_by(&retry.await.unwrap());
        assert_eq!(other.runs(), 1, "{isolation:?}: of the other key");
    }
}

#[actix_web::test]
async fn a_duplicate_is_told_that_a_handler_runs_while_it_does() {
    let db = Db::new().await;
    let (process, other) =
        (Process::start(&db.url, 5, Isolation::Default), Process::start(&db.url, 5, Isolation::Default));
    let held = rt::spawn(process.order("k", "x").header("x-hold", "1").answer());
    process.gate.entered(1).await;
    for server in [&process, &other] {
        let duplicate = server.order("k", "x").answer().await;
        assert_eq!((duplicate.code().as_str(), duplicate.retry_after()), ("outstanding", Some(1)));
        let status = server.status("k").answer().await;
        assert_eq!((status.status.as_u16(), status.json()), (202, json!({"state": "outstanding"})));
    }
    process.gate.open(1);
    let first = held.await.unwrap();
    assert_eq!(first.status, 201);
    for server in [&process, &other] {
        assert_eq!(server.status("k").answer().await.json()["state"], "completed");
        first.assert_replayed_by(&server.order("k", "x").answer().await);
    }
    assert_eq!((process.runs(), other.runs()), (1, 0));
}

/// Those who come while the first one asks the store wait for what that finds, and for no connection.
#[actix_web::test]
async fn of_a_crowd_of_first_requests_all_but_one_are_told_while_that_one_has_the_only_connection() {
    let db = Db::new().await;
    let process = Process::start(&db.url, 1, Isolation::Default);
    let crowd = (0..12).map(|_| rt::spawn(process.order("k", "x").header("x-hold", "1").answer()));
    let mut crowd: FuturesUnordered<_> = crowd.collect();
    for _ in 1..12 {
        assert_eq!(crowd.next().await.unwrap().unwrap().code(), "outstanding");
    }
    process.gate.open(1);
    assert_eq!(crowd.next().await.unwrap().unwrap().status, 201);
    assert_eq!(process.runs(), 1);
}

/// Whatever it has locked by that, it would still have.
#[actix_web::test]
async fn whoever_asks_what_has_become_of_a_key_is_in_no_claims_way() {
    let db = Db::new().await;
    let proxy = Proxy::before(&db.url);
    let (process, other) =
        (Process::start(&db.url, 5, Isolation::Default), Process::start(&proxy.url(&db.url), 5, Isolation::Default));
    let asked = proxy.next("pg_locks", Do::HoldSync);
    let status = rt::spawn(other.status("k").answer());
    asked.happened().await;
    let carried_out = "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' \
                       AND wait_event = 'ClientRead' AND query LIKE '%AS held%')";
    eventually("it has asked", || db.is(carried_out)).await;
    let fresh = process.order("k", "x").answer().await;
    assert_eq!(fresh.status, 201, "{}", fresh.text());
    asked.let_go();
    assert_eq!(status.await.unwrap().json()["state"], "completed");
}

#[actix_web::test]
async fn a_key_that_is_completed_while_somebody_asks_is_not_unknown() {
    let db = Db::new().await;
    let proxy = Proxy::before(&db.url);
    let (process, other) =
        (Process::start(&db.url, 5, Isolation::Default), Process::start(&proxy.url(&db.url), 5, Isolation::Default));
    let asked = proxy.next("pg_locks", Do::HoldRequest);
    let status = rt::spawn(other.status("k").answer());
    asked.happened().await;
    assert_eq!(process.order("k", "x").answer().await.status, 201);
    asked.let_go();
    let status = status.await.unwrap();
    assert_eq!((status.status.as_u16(), &status.json()["state"]), (200, &json!("completed")));
}
