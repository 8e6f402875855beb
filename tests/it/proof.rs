//! Proofs of one's own endpoints: what is right passes, and each flaw is found out at its stage, in words.

use std::{
    future::IntoFuture,
    num::NonZero,
    panic::AssertUnwindSafe,
    time::{Duration, Instant},
};

use actix_idempotency::{
    IdemTx, Idempotency, OnCompleted, OnFailure, OnOutstanding, PgPool, Policy,
    testing::{AfterFailure, Proof, Report, Request, Stage, Verdict, idempotency_proof},
};
use actix_web::{
    App, HttpRequest, HttpResponse, Result,
    error::ErrorBadGateway,
    rt::{spawn, time::sleep},
    web::{self, Data},
};
use futures_util::FutureExt;
use serde_json::json;
use tokio::net::TcpStream;

use crate::support::{
    app::{created, effect_in},
    cluster::free_port,
    db::Db,
    eventually,
    example::Example,
    flawed::{Endpoint, Flaw, WINDOW, app},
    gate::Gate,
};

const ALL: [Stage; 6] = [Stage::Repeat, Stage::Concurrent, Stage::OtherBody, Stage::Reset, Stage::Failing, Stage::Slow];

fn order() -> Request {
    Request::post("/orders").json(&json!({"product_id": 1, "quantity": 1}))
}

/// Every stage, for an endpoint that forgets after [`WINDOW`] if it forgets.
fn proof_of(endpoint: &Data<Endpoint>) -> Proof {
    let endpoint = endpoint.clone();
    idempotency_proof(move || app(endpoint.clone()), order())
        .failing(|request| request.header("x-fail", "1"))
        .slower_than(WINDOW, |request| request.header("x-slow-ms", "700"))
        .patience(Duration::from_secs(20))
}

async fn report_on(flaw: Flaw) -> Report {
    let endpoint = Endpoint::new(flaw);
    proof_of(&endpoint).counting(async || endpoint.effects()).await
}

fn failed(report: &Report) -> Vec<Stage> {
    with(report, Verdict::Failed)
}

fn with(report: &Report, verdict: Verdict) -> Vec<Stage> {
    report.entries().iter().filter(|entry| entry.verdict() == verdict).map(|entry| entry.stage()).collect()
}

/// What it says is in the report, on any line.
#[track_caller]
fn assert_says(report: &Report, sentences: &[&str]) {
    let text = report.to_string();
    for sentence in sentences {
        assert!(text.contains(sentence), "{sentence:?} is not in\n{text}");
    }
}

#[actix_web::test]
async fn an_endpoint_that_is_right_passes_every_stage_whoever_made_it() {
    let endpoint = Endpoint::new(Flaw::None);
    let report = proof_of(&endpoint).assert_one_effect(async || endpoint.effects()).await;
    assert_eq!(with(&report, Verdict::Passed), ALL, "{report}");
    let concurrent = report.entry(Stage::Concurrent);
    assert_eq!(concurrent.statuses().values().sum::<usize>(), 101, "{report}");
    assert_eq!((concurrent.answers(), concurrent.keys(), concurrent.effects()), (1, 1, Some(1)), "{report}");
    // Its own connections, one of them in the middle of the slow handler.
    assert_eq!((report.entry(Stage::Reset).keys(), report.entry(Stage::Reset).effects()), (10, Some(10)), "{report}");
    assert_says(&report, &["POST /orders", "100 at once, then again: ", "409 without Retry-After", "1 effect\n"]);
}

/// The shop of this crate, as a process of its own.
async fn shop(environment: &[(&str, &str)]) -> (Db, Example) {
    let db = Db::empty().await;
    let shop = Example::start("shop", &db.url, environment);
    (db, shop)
}

fn proof_of_the_shop(shop: &Example) -> Proof {
    idempotency_proof(shop.address.as_str(), order().header("Authorization", "Bearer alice"))
        .failing(|request| request.header("X-Demo-Fail", "500"))
        .slower_than(Duration::from_secs(1), |request| request.header("X-Demo-Slow-Ms", "2500"))
}

#[actix_web::test]
async fn the_shop_is_proved_by_its_url() {
    let (db, shop) = shop(&[]).await;
    let report = proof_of_the_shop(&shop)
        .assert_one_effect(async || db.number("SELECT count(*) AS value FROM orders").await)
        .await;
    assert_eq!(with(&report, Verdict::Passed), ALL, "{report}");
    assert!(report.entry(Stage::Concurrent).replays() > 0, "{report}");
    assert_eq!(db.number("SELECT (1000 - stock)::bigint AS value FROM products WHERE id = 1").await, 15, "{report}");
}

/// In a runtime without actix, too.
#[tokio::test]
async fn a_shop_that_holds_its_keys_by_leases_outlives_them() {
    let (db, shop) = shop(&[("LEASE_SECONDS", "1")]).await;
    let report = proof_of_the_shop(&shop)
        .assert_one_effect(async || db.number("SELECT count(*) AS value FROM orders").await)
        .await;
    assert_eq!(with(&report, Verdict::Passed), ALL, "{report}");
}

/// One effect, with the answer in one transaction.
async fn buy(request: HttpRequest, mut tx: IdemTx) -> Result<HttpResponse> {
    let id = effect_in(&mut tx, "proof").await?;
    if let Some(ms) = request.headers().get("x-slow-ms") {
        sleep(Duration::from_millis(ms.to_str().unwrap().parse().unwrap())).await;
    }
    if request.headers().contains_key("x-fail") {
        return Err(ErrorBadGateway("failed"));
    }
    Ok(created(id))
}

fn protected(pool: &PgPool, policy: Policy) -> Idempotency {
    Idempotency::postgres(pool.clone()).with(policy.anonymous().lease(Duration::from_secs(1)))
}

/// A proof of an `App` under this policy, in a database of its own.
async fn proof_under(policy: Policy) -> (Db, Proof) {
    let db = Db::read_committed().await;
    let idempotency = protected(&db.pool(10), policy);
    let factory =
        move || App::new().service(web::resource("/orders").wrap(idempotency.clone()).route(web::post().to(buy)));
    let proof = idempotency_proof(factory, order())
        .failing(|request| request.header("x-fail", "1"))
        .slower_than(Duration::from_secs(1), |request| request.header("x-slow-ms", "2500"));
    (db, proof)
}

#[actix_web::test]
async fn an_app_is_proved_without_a_server_under_every_policy_that_says_what_it_does() {
    let (db, proof) = proof_under(Policy::new()).await;
    let report = proof.assert_one_effect(async || db.all_effects().await).await;
    assert_eq!(with(&report, Verdict::Passed), ALL, "{report}");

    let waits = Policy::new()
        .on_outstanding(OnOutstanding::Wait(Duration::from_secs(20)))
        .max_waiting(NonZero::new(200).unwrap());
    let (db, proof) = proof_under(waits).await;
    let report = proof.duplicates_get([]).assert_one_effect(async || db.all_effects().await).await;
    assert_eq!(report.entry(Stage::Concurrent).statuses().keys().collect::<Vec<_>>(), [&201], "{report}");

    let (db, proof) = proof_under(Policy::new().on_failure(OnFailure::Store)).await;
    let report = proof.after_failure(AfterFailure::IsKept).assert_one_effect(async || db.all_effects().await).await;
    assert_eq!(report.entry(Stage::Failing).effects(), Some(0), "{report}");

    let (db, proof) = proof_under(Policy::new().on_failure(OnFailure::HoldRetention)).await;
    let report = proof.after_failure(AfterFailure::StaysTaken).assert_one_effect(async || db.all_effects().await).await;
    assert_eq!(report.entry(Stage::Failing).effects(), Some(0), "{report}");
}

#[actix_web::test]
async fn repeats_may_be_refused_where_that_is_said() {
    let (db, proof) = proof_under(Policy::new().on_completed(OnCompleted::Reject)).await;
    let report = proof.repeats_get([409]).assert_one_effect(async || db.all_effects().await).await;
    assert_eq!(with(&report, Verdict::NotAskedFor), [Stage::Reset], "{report}");
    assert_eq!(report.entry(Stage::Repeat).statuses().iter().collect::<Vec<_>>(), [(&201, &1), (&409, &1)], "{report}");
}

/// Its policy differs, and the proof was not told.
#[actix_web::test]
async fn what_a_policy_does_otherwise_fails_until_it_is_said() {
    let (_db, proof) = proof_under(Policy::new().on_failure(OnFailure::Store)).await;
    let report = proof.await;
    assert_eq!(failed(&report), [Stage::Failing], "{report}");
    assert_says(&report, &["came      the failure again (502)", "the failure was kept like an answer"]);
}

#[actix_web::test]
async fn an_endpoint_without_protection_runs_for_every_request() {
    let report = report_on(Flaw::Unprotected).await;
    assert_eq!(failed(&report), ALL, "{report}");
    assert_eq!(report.entry(Stage::Concurrent).effects(), Some(101), "{report}");
    let sentences = [
        "came      201, with another body",
        "it does not look at the key, or keeps no answer for it",
        "101 × 201, 101 answers, 0 replays marked, 101 effects",
        "came      100 different answers below 400",
        "expected  1 effect, one for each key that got an answer below 400",
        "came      101 effects for 1 key",
        "it ran under a key that was used",
    ];
    assert_says(&report, &sentences);
}

#[actix_web::test]
async fn a_check_before_the_act_is_raced() {
    let report = report_on(Flaw::CheckThenAct).await;
    assert!(failed(&report).contains(&Stage::Concurrent), "{report}");
    assert_eq!(report.entry(Stage::Repeat).verdict(), Verdict::Passed, "{report}");
    assert_says(
        &report,
        &[
            "different answers below 400",
            "Requests pass between a check of the key and the note that it is taken",
            "one statement must do both",
        ],
    );
}

#[actix_web::test]
async fn work_that_ends_with_its_connection_and_is_done_again_shows_in_its_effects() {
    let report = report_on(Flaw::RunsAgainAfterReset).await;
    assert_eq!(failed(&report), [Stage::Reset], "{report}");
    assert_says(&report, &["effects for 10 keys", "by an attempt that was cut off"]);
    // The answers alone tell nothing of it.
    let endpoint = Endpoint::new(Flaw::RunsAgainAfterReset);
    assert!(proof_of(&endpoint).await.passed());
    // And no slow handler is needed to reset a connection in the middle of it.
    let factory = {
        let endpoint = endpoint.clone();
        move || app(endpoint.clone())
    };
    let report = idempotency_proof(factory, order()).counting(async || endpoint.effects()).await;
    assert_eq!(failed(&report), [Stage::Reset], "{report}");
}

#[actix_web::test]
async fn a_key_that_is_lost_with_its_connection_is_waited_for_and_no_longer() {
    let endpoint = Endpoint::new(Flaw::LosesItsKey);
    let began = Instant::now();
    let report = proof_of(&endpoint).patience(Duration::from_secs(3)).await;
    assert_eq!(failed(&report), [Stage::Reset], "{report}");
    assert_says(&report, &["a retry gets an answer below 400 within 3 s", "came      409", "the key stays taken"]);
    assert!(began.elapsed() < Duration::from_secs(20), "{report}");
}

#[actix_web::test]
async fn another_request_that_is_told_the_first_answer_is_seen() {
    let report = report_on(Flaw::ComparesKeysOnly).await;
    assert_eq!(failed(&report), [Stage::OtherBody], "{report}");
    let sentences = [
        "expected  another request under the key is refused with 422",
        "came      201",
        "another request was told the first one's answer: the key alone was compared",
    ];
    assert_says(&report, &sentences);
    // Unless that is what it is meant to do.
    let endpoint = Endpoint::new(Flaw::ComparesKeysOnly);
    proof_of(&endpoint).reuse_gets([201]).assert_one_effect(async || endpoint.effects()).await;
}

#[actix_web::test]
async fn a_failure_that_is_told_for_ever_is_seen() {
    let report = report_on(Flaw::KeepsFailures).await;
    assert_eq!(failed(&report), [Stage::Failing], "{report}");
    assert_says(&report, &["came      the failure again (500)", "is told until the key expires"]);
}

#[actix_web::test]
async fn a_key_that_is_forgotten_while_its_handler_runs_is_seen() {
    let report = report_on(Flaw::ForgetsWhileItRuns).await;
    assert!(failed(&report).contains(&Stage::Slow), "{report}");
    for stage in [Stage::Repeat, Stage::Concurrent, Stage::OtherBody, Stage::Failing] {
        assert_eq!(report.entry(stage).verdict(), Verdict::Passed, "{report}");
    }
    assert_says(&report, &["it was forgotten while its handler still ran", "2 effects for 1 key"]);
}

#[actix_web::test]
async fn work_that_is_done_twice_behind_one_answer_is_counted() {
    let endpoint = Endpoint::new(Flaw::WorksTwice);
    assert!(proof_of(&endpoint).await.passed(), "the answers are as they should be");
    let report = report_on(Flaw::WorksTwice).await;
    assert_eq!(failed(&report), ALL, "{report}");
    assert_says(&report, &["came      2 effects for 1 key", "work was done that no answer tells of"]);
}

#[actix_web::test]
async fn a_success_without_an_effect_is_counted_too() {
    let endpoint = Endpoint::new(Flaw::None);
    let report = proof_of(&endpoint).counting(async || 0_u8).await;
    assert_eq!(failed(&report), ALL, "{report}");
    assert_says(&report, &["came      0 effects for 1 key", "a success was told of work that is not there"]);
}

#[actix_web::test]
async fn duplicates_that_fail_in_the_handler_are_no_refusals() {
    let report = report_on(Flaw::FailsDuplicates).await;
    assert!(failed(&report).contains(&Stage::Concurrent), "{report}");
    assert_says(&report, &["came      500", "the duplicate reached the handler and failed there"]);
    assert!(!report.to_string().contains("the key stays taken"), "{report}");
}

#[actix_web::test]
async fn answers_that_tell_nothing_prove_nothing_unless_effects_are_counted() {
    let endpoint = Endpoint::new(Flaw::TellsNothing);
    let report = proof_of(&endpoint).await;
    assert!(failed(&report).is_empty() && !report.passed(), "{report}");
    assert_says(&report, &["nothing is proved: every key got the same answer", "assert_one_effect"]);
    proof_of(&endpoint).assert_one_effect(async || endpoint.effects()).await;
}

#[actix_web::test]
async fn an_endpoint_that_does_not_answer_ends_the_proof_in_time() {
    let began = Instant::now();
    let endpoint = Endpoint::new(Flaw::Hangs);
    let report = proof_of(&endpoint).patience(Duration::from_millis(500)).await;
    assert_eq!(with(&report, Verdict::NotReached), ALL, "{report}");
    assert!(!report.passed());
    assert_says(&report, &["nothing more could be asked: the first request got no answer in time"]);

    let endpoint = Endpoint::new(Flaw::HangsForDuplicates);
    let report = proof_of(&endpoint).patience(Duration::from_secs(2)).await;
    assert!(failed(&report).contains(&Stage::Concurrent), "{report}");
    assert!(report.entry(Stage::Concurrent).unanswered() > 0, "{report}");
    assert_says(&report, &["came      no answer in time", "the endpoint hangs, or its handler has panicked"]);
    assert!(began.elapsed() < Duration::from_secs(30), "{report}");
}

#[actix_web::test]
async fn whoever_cannot_be_asked_is_said_and_not_passed() {
    let nobody = format!("http://127.0.0.1:{}", free_port());
    let refuses = || App::new().route("/orders", web::post().to(|| async { HttpResponse::Forbidden().body("no") }));
    let reports = [
        (idempotency_proof(nobody, order()).await, "the first request got no connection"),
        (idempotency_proof("orders", order()).await, "the URL of the service cannot be read"),
        (idempotency_proof("https://localhost", order()).await, "http:// only"),
        (idempotency_proof("http://alice:secret@localhost", order()).await, "belongs into a header"),
        (idempotency_proof("http://localhost/?a=b", order()).await, "belong to the request"),
        (idempotency_proof(refuses, order()).await, "the first request got 403 Forbidden: no"),
    ];
    for (report, words) in reports {
        assert!(!report.passed() && !report.to_string().contains("secret"), "{report}");
        assert_eq!(with(&report, Verdict::NotReached), ALL, "{report}");
        assert_says(&report, &[words]);
    }
}

#[actix_web::test]
async fn an_app_that_cannot_be_made_is_said() {
    let endpoint = Endpoint::new(Flaw::None);
    let factory = move || {
        assert!(endpoint.effects() > 0, "this app cannot be made");
        app(endpoint.clone())
    };
    let report = idempotency_proof(factory, order()).await;
    assert_says(&report, &["nothing more could be asked: the App cannot be served"]);
}

#[actix_web::test]
async fn a_hook_that_does_nothing_fails_its_stage_and_none_is_no_pass() {
    let endpoint = Endpoint::new(Flaw::None);
    let factory = move || app(endpoint.clone());
    let same = |request: Request| request;
    let report = idempotency_proof(factory.clone(), order()).failing(same).slower_than(WINDOW, same).await;
    assert_eq!(failed(&report), [Stage::Failing, Stage::Slow], "{report}");
    assert_says(
        &report,
        &["the hook of `.failing(…)` makes nothing fail", "the hook of `.slower_than(…)` does not make it slow enough"],
    );
    let report = idempotency_proof(factory, Request::post("/orders").body("a")).assert().await;
    assert_eq!(with(&report, Verdict::NotAskedFor), [Stage::OtherBody, Stage::Failing, Stage::Slow], "{report}");
    assert_says(&report, &["not asked for  failing     give `.failing(…)`"]);
}

#[actix_web::test]
async fn what_is_not_proved_panics_with_the_report_and_its_place() {
    let endpoint = Endpoint::new(Flaw::ComparesKeysOnly);
    let proof = proof_of(&endpoint).assert_one_effect(async || endpoint.effects());
    let panic = AssertUnwindSafe(proof).catch_unwind().await.unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    for words in ["tests/it/proof.rs:", "not proved", "FAIL           other body  a request, another under its key"] {
        assert!(message.contains(words), "{message}");
    }
    // Whoever prints a report by `{:?}` sees numbers, too.
    let report = format!("{:?}", report_on(Flaw::None).await);
    assert!(report.contains("Answer(201 Created, 1 bytes)") && !report.contains("content-length"), "{report}");
}

#[actix_web::test]
async fn a_key_may_be_a_field_of_the_business() {
    let db = Db::read_committed().await;
    let policy = Policy::new().keys([actix_idempotency::KeySource::json(["/out_trade_no"])]).require_key();
    let idempotency = protected(&db.pool(10), policy);
    let factory =
        move || App::new().service(web::resource("/orders").wrap(idempotency.clone()).route(web::post().to(buy)));
    let request = order().key_in(|request, key| request.json_field("out_trade_no", key));
    let report =
        idempotency_proof(factory, request).requests(20).assert_one_effect(async || db.all_effects().await).await;
    assert_eq!(report.entry(Stage::OtherBody).verdict(), Verdict::Passed, "{report}");
}

/// Where the handler that was reached is served.
type Address = Data<tokio::sync::watch::Sender<Option<String>>>;

async fn is_asked(request: HttpRequest, address: Address, gate: Data<Gate>) -> HttpResponse {
    address.send_replace(Some(request.connection_info().host().to_owned()));
    gate.pass().await;
    HttpResponse::Created().finish()
}

#[actix_web::test]
async fn what_was_served_for_a_proof_is_gone_when_it_ends_panics_or_is_dropped() {
    let (address, gate) = (Address::new(tokio::sync::watch::channel(None).0), Data::new(Gate::new()));
    let factory = {
        let (address, gate) = (address.clone(), gate.clone());
        move || App::new().app_data(address.clone()).app_data(gate.clone()).route("/orders", web::post().to(is_asked))
    };
    let served = || async { address.subscribe().wait_for(Option::is_some).await.unwrap().clone().unwrap() };
    let is_gone = async |address: &str| {
        eventually("nobody listens", || async { TcpStream::connect(address).await.is_err() }).await;
        assert!(!address.is_empty());
    };

    // Dropped while its first request is held.
    let proof = spawn(idempotency_proof(factory.clone(), order()).into_future());
    let at = served().await;
    proof.abort();
    is_gone(&at).await;

    address.send_replace(None);
    gate.open(1000);
    let counts = std::cell::Cell::new(0);
    let count = async || {
        counts.set(counts.get() + 1);
        assert!(counts.get() == 1, "the table has gone");
        0
    };
    let proof = idempotency_proof(factory.clone(), order()).assert_one_effect(count);
    assert!(AssertUnwindSafe(proof).catch_unwind().await.is_err());
    is_gone(&served().await).await;

    address.send_replace(None);
    idempotency_proof(factory, order()).await;
    let at = served().await;
    assert!(TcpStream::connect(&at).await.is_err(), "it has stopped when the report is there");
}
