//! What the people who run a service see of it, and what the clients do not.

use std::{collections::BTreeSet, time::Duration};

use actix_idempotency::{Idempotency, OnOutstanding, PgPool, Policy, Sweeper};
use actix_web::{
    HttpResponse,
    rt::spawn,
    web::{self, Data, ServiceConfig},
};
use futures_util::{future::join_all, stream};
use serde_json::json;
use tracing::Level;

use crate::support::{
    PATIENCE,
    app::{order, routes},
    client::{Answer, RequestExt},
    db::{LAPSED, THREE_DAYS_LATER},
    eventually,
    gate::Gate,
    log,
    rig::Rig,
};

/// The events about a row by name.
fn events(id: &str) -> Vec<(String, Level)> {
    log::events(id).iter().map(|line| (line.get("event").unwrap().into(), line.level)).collect()
}

#[track_caller]
fn assert_said(id: &str, event: &str, level: Level) {
    assert!(events(id).contains(&(event.into(), level)), "{event} in {:?}", events(id));
}

/// The outcomes of the requests for a row.
fn outcomes(id: &str) -> Vec<String> {
    log::spans(id).iter().map(|span| span["outcome"].clone()).collect()
}

/// M04
#[actix_web::test]
async fn a_hundred_duplicates_are_no_error() {
    log::listen();
    let rig = Rig::start().await;
    let first = spawn(rig.post("/held").key("hundred").body("a").answer());
    rig.gate.entered(1).await;
    let duplicates = |_| spawn(rig.post("/held").key("hundred").body("a").answer());
    let conflicts = join_all((0..50).map(duplicates)).await;
    assert!(conflicts.into_iter().all(|answer| answer.unwrap().status == 409));
    rig.gate.open(1);
    let first = first.await.unwrap();
    for replay in join_all((0..50).map(duplicates)).await {
        first.assert_replayed_by(&replay.unwrap());
    }
    let id = rig.db.id("hundred").await;
    assert_eq!((log::count(&id, "outstanding"), log::count(&id, "replayed")), (50, 50));
    let loud: Vec<_> = events(&id).into_iter().filter(|(_, level)| *level <= Level::INFO).collect();
    assert!(loud.is_empty(), "{loud:?}");
}

/// M04
#[actix_web::test]
async fn a_refusal_tells_nothing_about_the_store() {
    log::listen();
    let rig = Rig::start().await;
    let post = || rig.post("/orders").key("tells-nothing").json(&order("x")).answer();
    assert_eq!(post().await.status, 201);
    let id = rig.db.id("tells-nothing").await;
    rig.db.run("ALTER TABLE idempotency_keys RENAME TO away").await;
    let refused = post().await;
    assert_eq!(refused.code(), "store-unavailable");
    let text = format!("{:?} {}", refused.headers, refused.text()).to_lowercase();
    for secret in ["idempotency_keys", "select", "relation", "postgres", "127.0.0.1", &rig.db.name, "diesel", "src/"] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
    // Whoever runs the service is told.
    let told = log::events(&id).into_iter().find(|line| line.get("event") == Some("store-unavailable")).unwrap();
    assert_eq!(told.level, Level::ERROR);
    assert!(told.get("error").unwrap().contains("idempotency_keys"), "{told:?}");
    rig.db.run("ALTER TABLE away RENAME TO idempotency_keys").await;
}

#[actix_web::test]
async fn the_span_of_a_request_finds_its_row_and_names_nobody() {
    log::listen();
    let tenant = |_: &actix_web::HttpRequest| Some("acme".to_owned());
    let principal = |_: &actix_web::HttpRequest| Some("alice".to_owned());
    let rig = Rig::with(Policy::new().tenant(tenant).principal(principal)).await;
    let post = |path: &'static str, sku: &str| rig.post(path).key("the-span").json(&order(sku)).answer();
    post("/orders", "x").await;
    post("/orders", "x").await;
    post("/orders", "y").await;
    let id = rig.db.id("the-span").await;
    eventually("all spans have ended", async || log::spans(&id).len() == 3).await;
    let spans = log::spans(&id);
    let names: BTreeSet<_> = spans[0].keys().map(String::as_str).collect();
    let promised = ["attempt", "elapsed_ms", "fingerprint", "id", "outcome", "principal", "resource", "tenant"];
    assert_eq!(names, BTreeSet::from(promised));
    assert_eq!((spans[0]["resource"].as_str(), spans[0]["attempt"].as_str()), ("POST /orders", "1"));
    let fingerprint = "SELECT encode(substr(fingerprint, 1, 6), 'hex') AS value FROM idempotency_keys";
    assert_eq!(spans[0]["fingerprint"], rig.db.text(fingerprint).await.unwrap());
    assert_ne!(spans[2]["fingerprint"], spans[0]["fingerprint"]);
    assert!(spans[0]["elapsed_ms"].parse::<u64>().unwrap() < 30_000);
    // Digests: the same for the same, and no name.
    for part in ["tenant", "principal"] {
        assert!(spans.iter().all(|span| span[part] == spans[0][part]));
        assert_eq!(spans[0][part].len(), 12);
        assert!(spans[0][part].bytes().all(|byte| byte.is_ascii_hexdigit()), "{}", spans[0][part]);
    }
    assert_eq!(outcomes(&id), ["fresh", "replayed", "key-reused"]);
}

#[actix_web::test]
async fn what_happens_to_a_key_is_said_in_the_words_of_the_protocol() {
    log::listen();
    let rig = Rig::start().await;
    let twin = rig.twin(Policy::new().anonymous().fingerprint_header("x-api-version"));
    let post = async |key: &str, sku: &str| rig.post("/orders").key(key).json(&order(sku)).answer().await;

    post("words", "x").await;
    let id = rig.db.id("words").await;
    assert_said(&id, "fresh", Level::DEBUG);
    post("words", "x").await;
    assert_said(&id, "replayed", Level::DEBUG);
    post("words", "y").await;
    assert_said(&id, "key-reused", Level::INFO);
    assert!(twin.post("/orders").key("words").json(&order("x")).answer().await.is_replay());
    assert_said(&id, "recipe-changed", Level::WARN);
    rig.db.run(THREE_DAYS_LATER).await;
    assert_eq!(post("words", "z").await.status, 201);
    assert_said(&id, "expired", Level::DEBUG);

    let malformed = |body: &'static str| {
        rig.post("/orders").key("words-released").header("content-type", "application/json").body(body).answer()
    };
    assert_eq!(malformed("{").await.status, 400);
    let id = rig.db.id("words-released").await;
    assert_said(&id, "released", Level::DEBUG);
    assert_eq!(malformed("{").await.status, 400);
    assert_said(&id, "retried", Level::DEBUG);
    rig.db.run(LAPSED).await;
    assert_eq!(malformed("{").await.status, 400);
    assert_said(&id, "taken-over", Level::WARN);
    assert_eq!(outcomes(&id), ["released", "released", "released"]);
    let attempts: Vec<_> = log::spans(&id).iter().map(|span| span["attempt"].clone()).collect();
    assert_eq!(attempts, ["1", "2", "3"]);

    let panics = json!({"sku": "x", "qty": -1});
    assert_eq!(rig.post("/orders").key("words-panic").json(&panics).answer().await.status, 500);
    let id = rig.db.id("words-panic").await;
    assert_said(&id, "panicked", Level::ERROR);
    assert_said(&id, "released", Level::DEBUG);
    assert_eq!(outcomes(&id), ["handler-panicked"]);
}

#[actix_web::test]
async fn what_happens_to_a_running_request_is_said_too() {
    async fn held(gate: Data<Gate>) -> &'static str {
        gate.pass().await;
        "done"
    }
    log::listen();
    let policy = Policy::new().anonymous().lease(Duration::from_secs(3)).max_run(PATIENCE);
    let policy = policy.on_outstanding(OnOutstanding::Wait(Duration::from_millis(200)));
    let rig = Rig::builder().policy(policy).handler(held).await;
    let send = |key: &'static str| spawn(rig.post("/x").key(key).answer());

    let first = send("said-waited");
    rig.gate.entered(1).await;
    assert_eq!(send("said-waited").await.unwrap().status, 409);
    let id = rig.db.id("said-waited").await;
    assert_said(&id, "waited", Level::DEBUG);
    assert_said(&id, "outstanding", Level::DEBUG);
    // Somebody else takes it meanwhile.
    rig.db
        .run(
            "UPDATE idempotency_keys SET owner = decode(repeat('00', 16), 'hex'), \
             leased_until = now() + interval '1 hour'",
        )
        .await;
    eventually("it cannot renew its lease", async || log::count(&id, "not-renewed") > 0).await;
    assert_said(&id, "not-renewed", Level::WARN);
    rig.gate.open(1);
    let overtaken: Answer = first.await.unwrap();
    assert_eq!((overtaken.status.as_u16(), overtaken.code().as_str()), (409, "lease-lost"));
    assert_eq!(overtaken.retry_after(), Some(1));
    assert_said(&id, "lease-lost", Level::WARN);
    assert_eq!(outcomes(&id), ["outstanding", "lease-lost"]);
}

#[actix_web::test]
async fn a_handler_that_runs_too_long_is_said_to_be_aborted() {
    log::listen();
    let policy = Policy::new().anonymous().max_run(Duration::from_millis(100));
    let rig = Rig::with(policy).await;
    let aborted = rig.post("/held").key("said-aborted").body("a").answer().await;
    assert_eq!((aborted.status.as_u16(), aborted.code().as_str()), (503, "outcome-unknown"));
    let id = rig.db.id("said-aborted").await;
    assert_said(&id, "aborted", Level::WARN);
    assert_said(&id, "released", Level::DEBUG);
    assert_eq!(outcomes(&id), ["outcome-unknown"]);
}

/// Tells which thread it runs on.
async fn thread() -> String {
    log::thread()
}

#[actix_web::test]
async fn what_is_refused_before_a_claim_is_said_with_its_code() {
    log::listen();
    let rig = Rig::builder().policy(Policy::new().anonymous().require_key()).workers(1).handler(thread).await;
    let worker = rig.post("/x").key("x").answer().await.text();
    rig.post("/x").answer().await;
    rig.post("/x").key("").answer().await;
    let rejected: Vec<_> = log::on(&worker).into_iter().filter(|line| line.get("event") == Some("rejected")).collect();
    let codes: Vec<_> = rejected.iter().map(|line| (line.get("code").unwrap(), line.level)).collect();
    assert_eq!(codes, [("key-missing", Level::DEBUG), ("key-invalid", Level::DEBUG)]);
}

#[actix_web::test]
async fn a_body_that_fails_is_said_with_its_reason() {
    async fn handler() -> HttpResponse {
        HttpResponse::Ok().streaming(stream::iter([Err::<web::Bytes, _>(std::io::Error::other("the disk is gone"))]))
    }
    log::listen();
    let rig = Rig::builder().handler(handler).await;
    assert_eq!(rig.post("/x").key("said-body").answer().await.code(), "body-failed");
    let id = rig.db.id("said-body").await;
    assert_said(&id, "body-failed", Level::ERROR);
    let reasons = log::events(&id);
    assert!(reasons.iter().any(|line| line.get("error").is_some_and(|error| error.contains("the disk is gone"))));
}

#[actix_web::test]
async fn an_answer_that_is_stored_late_is_said_to_be() {
    log::listen();
    let rig = Rig::with(Policy::new().anonymous().store_timeout(Duration::from_secs(1))).await;
    let first = spawn(rig.post("/held").key("said-late").body("a").answer());
    rig.gate.entered(1).await;
    let id = rig.db.id("said-late").await;
    rig.db.run("ALTER TABLE idempotency_keys RENAME TO away").await;
    rig.gate.open(1);
    let first = first.await.unwrap();
    assert_eq!(first.status, 201, "the client gets its answer");
    rig.db.run("ALTER TABLE away RENAME TO idempotency_keys").await;
    eventually("it is stored", async || log::count(&id, "ended-late") == 1).await;
    assert_said(&id, "ended-late", Level::INFO);
    first.assert_replayed_by(&rig.post("/held").key("said-late").body("a").answer().await);
}

/// Z02
#[actix_web::test]
async fn one_warning_says_that_the_keys_of_nobody_are_shared() {
    log::listen();
    let rig = Rig::builder().policy(Policy::new()).workers(1).handler(thread).await;
    let worker = rig.post("/x").key("a").user("alice").answer().await.text();
    let warnings = || {
        let advice = log::on(&worker).into_iter().filter(|line| line.get("event") == Some("advice"));
        advice.map(|line| (line.level, line.get("message").unwrap().contains("names nobody"))).collect::<Vec<_>>()
    };
    rig.post("/x").answer().await;
    assert_eq!(warnings(), []);
    for key in ["a", "b", "c"] {
        assert_eq!(rig.post("/x").key(key).answer().await.status, 200);
    }
    assert_eq!(warnings(), [(Level::WARN, true)]);
}

#[actix_web::test]
async fn a_sweep_says_how_many_rows_went() {
    log::listen();
    let rig = Rig::start().await;
    rig.post("/orders").key("x").json(&order("x")).answer().await;
    rig.db.run(THREE_DAYS_LATER).await;
    let rows = Sweeper::new(rig.pool.clone()).sweep_once().await.unwrap();
    assert_eq!((rows, rig.db.keys().await), (1, 0));
    let said = log::on(&log::thread()).into_iter().filter(|line| line.get("event") == Some("swept"));
    let said: Vec<_> = said.map(|line| (line.get("rows").map(str::to_owned), line.level)).collect();
    assert_eq!(said, [(Some("1".to_owned()), Level::DEBUG)]);
}

#[actix_web::test]
async fn two_wraps_around_one_route_are_worth_a_warning() {
    log::listen();
    let rig = Rig::builder()
        .serve(|config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool| {
            let inner = idempotency.clone();
            config.service(web::scope("").wrap(idempotency.clone()).configure(move |config| routes(config, &inner)));
        })
        .await;
    rig.post("/orders").key("said-two").json(&order("x")).answer().await;
    let id = rig.db.id("said-two").await;
    let advice: Vec<_> = log::events(&id).into_iter().filter(|line| line.get("event") == Some("advice")).collect();
    assert!(advice.len() == 1 && advice[0].level == Level::WARN, "{advice:?}");
    assert!(advice[0].get("message").unwrap().contains("two Idempotency wraps"));
}
