//! What a repeat gets: the guard against double clicks, windows, and what becomes of a key whose attempt
//! has failed.

use std::time::Duration;

use actix_idempotency::{
    Code, Fields, IdemKey, IdemTx, Idempotency, Keep, KeySource, OnCompleted, OnFailure, OnOutstanding, PgPool, Policy,
    Wording,
};
use actix_web::{
    HttpRequest, HttpResponse, Result,
    error::ErrorInternalServerError,
    http::StatusCode,
    rt,
    web::{self, Bytes, Data, ServiceConfig},
};
use diesel_async::SimpleAsyncConnection;
use futures_util::{StreamExt, future::join_all, stream};
use reqwest::RequestBuilder;
use serde_json::{Value, json};

use crate::support::{
    PATIENCE,
    app::{created, effect, effect_in},
    client::{Answer, RequestExt},
    eventually,
    gate::Gate,
    rig::Rig,
};

fn header<'a>(request: &'a HttpRequest, name: &str) -> Option<&'a str> {
    request.headers().get(name).map(|value| value.to_str().unwrap())
}

/// An effect in the transaction of the answer. `x-hold` holds it; `x-fail` (a status, or `panic`) makes
/// the attempt fail afterwards. Headers are no part of what is asked for.
async fn submit(request: HttpRequest, mut tx: IdemTx, gate: Data<Gate>) -> Result<HttpResponse> {
    let id = effect_in(&mut tx, "submit").await?;
    if header(&request, "x-hold").is_some() {
        gate.pass().await;
    }
    match header(&request, "x-fail") {
        None => Ok(created(id)),
        Some("panic") => panic!("as asked"),
        Some(status) => Ok(HttpResponse::build(status.parse().unwrap()).body("failed")),
    }
}

fn routes(config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool) {
    config.service(web::resource("/x").wrap(idempotency.clone()).route(web::post().to(submit)));
}

async fn rig(policy: Policy) -> Rig {
    Rig::builder().policy(policy).serve(routes).await
}

/// Whoever `Authorization: Bearer` names.
fn of_users(policy: Policy) -> Policy {
    policy.principal(|request| header(request, "authorization")?.strip_prefix("Bearer ").map(str::to_owned))
}

/// The guard of the articles: same user, same parameters, a window and a message.
fn guard() -> Policy {
    of_users(Policy::new()).keys([KeySource::digest(Fields::all())]).on_completed(OnCompleted::Reject)
}

/// What holds under both.
fn both(policy: Policy) -> [Policy; 2] {
    [policy.clone(), policy.atomic()]
}

fn click(rig: &Rig, user: &str, order: &Value) -> RequestBuilder {
    rig.post("/x").user(user).json(order)
}

#[track_caller]
fn assert_first(answer: &Answer) {
    assert!(answer.status == 201 && !answer.is_replay(), "{answer:?}");
}

#[track_caller]
fn assert_rejected(answer: &Answer) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (409, "already-completed"));
    assert!(answer.retry_after().is_none() && !answer.is_replay());
}

/// Nobody runs it, and nobody is told to ask again soon.
#[track_caller]
fn assert_held(answer: &Answer) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (409, "held"));
    assert_eq!(answer.retry_after(), None);
    assert!(!answer.text().contains("still runs"));
}

#[track_caller]
fn assert_outstanding(answer: &Answer) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (409, "outstanding"));
    assert!(answer.retry_after().is_some());
}

#[actix_web::test]
async fn the_same_user_with_the_same_parameters_is_rejected_within_the_window() {
    for policy in both(guard()) {
        let rig = rig(policy).await;
        let order = json!({"sku": "a", "qty": 1});
        assert_first(&click(&rig, "alice", &order).answer().await);
        for _ in 0..2 {
            assert_rejected(&click(&rig, "alice", &order).answer().await);
        }
        // The order of members is none of the parameters.
        let sorted_otherwise = rig.post("/x").user("alice").header("content-type", "application/json");
        assert_rejected(&sorted_otherwise.body(r#"{ "qty": 1, "sku": "a" }"#).answer().await);

        // What it wrote is there; its answer is not.
        assert_eq!(rig.db.effects("submit").await, 1);
        let bare = "SELECT count(*) AS value FROM idempotency_keys WHERE state = 'completed' AND status = 201 \
                    AND body IS NULL AND body_omitted AND header_names = '{}'";
        assert_eq!((rig.db.keys().await, rig.db.number(bare).await), (1, 1));
    }
}

#[actix_web::test]
async fn other_parameters_and_other_users_pass() {
    for policy in both(guard()) {
        let rig = rig(policy).await;
        let order = json!({"sku": "a", "qty": 1});
        for user in ["alice", "bob"] {
            for order in [&order, &json!({"sku": "a", "qty": 2}), &json!({"sku": "b", "qty": 1})] {
                assert_first(&click(&rig, user, order).answer().await);
            }
        }
        assert_first(&rig.post("/x?gift=1").user("alice").json(&order).answer().await);
        assert_eq!(rig.db.effects("submit").await, 7);
        assert_rejected(&click(&rig, "bob", &order).answer().await);
    }
}

#[actix_web::test]
async fn a_repeat_is_told_so_in_the_words_of_the_policy() {
    let message = "订单处理中,请勿重复提交";
    let policy = guard()
        .wording(Code::Outstanding, Wording::new().language("zh-CN").detail(message).title("请稍候"))
        .wording(Code::AlreadyCompleted, Wording::new().status(StatusCode::OK).code("DUPLICATE").detail(message));
    for policy in both(policy) {
        let rig = rig(policy).await;
        let order = json!({"sku": "a"});
        let first = rt::spawn(click(&rig, "alice", &order).header("x-hold", "1").answer());
        rig.gate.entered(1).await;
        let second = click(&rig, "alice", &order).answer().await;
        assert_outstanding(&second);
        assert_eq!(second.header("content-language"), Some("zh-CN"));
        assert_eq!((&second.json()["detail"], &second.json()["title"]), (&json!(message), &json!("请稍候")));
        rig.gate.open(1);
        assert_first(&first.await.unwrap());

        let third = click(&rig, "alice", &order).answer().await;
        assert_eq!((third.status.as_u16(), third.code().as_str()), (200, "DUPLICATE"));
        assert_eq!((third.header("content-language"), third.retry_after()), (Some("en"), None));
        assert_eq!(
            (&third.json()["detail"], &third.json()["title"]),
            (&json!(message), &json!("This was done already"))
        );
    }
}

#[actix_web::test]
async fn whoever_waits_for_a_guarded_request_is_told_that_it_was_done() {
    for policy in both(guard().on_outstanding(OnOutstanding::Wait(PATIENCE))) {
        let rig = rig(policy).await;
        let order = json!({"sku": "a"});
        let first = rt::spawn(click(&rig, "alice", &order).header("x-hold", "1").answer());
        rig.gate.entered(1).await;
        let second = rt::spawn(click(&rig, "alice", &order).answer());
        assert!(rig.gate.nobody_enters(Duration::from_millis(200)).await);
        rig.gate.open(1);
        assert_first(&first.await.unwrap());
        assert_rejected(&second.await.unwrap());
        assert_eq!(rig.db.effects("submit").await, 1);
    }
}

#[actix_web::test]
async fn a_repeat_can_be_shown_a_page() {
    let page = "<p>Danke, die Bestellung ist eingegangen.</p>";
    let wording = Wording::new().status(StatusCode::OK).language("de").body("text/html; charset=utf-8", page);
    let rig = rig(guard().documentation("https://shop.example/keys").wording(Code::AlreadyCompleted, wording)).await;
    assert_first(&click(&rig, "alice", &json!(1)).answer().await);
    let repeat = click(&rig, "alice", &json!(1)).answer().await;
    assert_eq!((repeat.status.as_u16(), repeat.text().as_str()), (200, page));
    assert_eq!(repeat.header("content-type"), Some("text/html; charset=utf-8"));
    assert_eq!((repeat.header("content-language"), repeat.header("cache-control")), (Some("de"), Some("no-store")));
    assert!(repeat.header("link").unwrap().contains("https://shop.example/keys"));
}

#[actix_web::test]
async fn after_the_window_the_same_request_is_a_first_one_with_and_without_a_sweeper() {
    for policy in both(guard().retention(Duration::from_secs(1))) {
        for sweeps in [true, false] {
            let rig = Rig::builder()
                .policy(policy.clone())
                .serve(move |config, idempotency, pool| {
                    let idempotency = if sweeps { idempotency.clone() } else { idempotency.clone().without_sweeper() };
                    routes(config, &idempotency, pool);
                })
                .await;
            let order = json!({"sku": "a"});
            assert_first(&click(&rig, "alice", &order).answer().await);
            eventually("the window has passed", async || {
                let answer = click(&rig, "alice", &order).answer().await;
                assert!(answer.status == 201 || answer.code() == "already-completed");
                answer.status == 201
            })
            .await;
            assert_eq!(rig.db.effects("submit").await, 2);
            let over_a_second = "SELECT count(*) AS value FROM idempotency_keys WHERE expires_at - created_at <> '1 s'";
            assert_eq!(rig.db.number(over_a_second).await, 0);
        }
    }
}

#[actix_web::test]
async fn of_a_hundred_in_parallel_one_runs() {
    for policy in both(guard()) {
        let rig = rig(policy.clone()).await;
        let other = rig.twin_serving(policy, routes);
        let order = json!({"sku": "a"});
        let answers = join_all((0..100).map(|n| {
            let request = if n % 2 == 0 { rig.post("/x") } else { other.post("/x") };
            request.user("alice").json(&order).answer()
        }))
        .await;
        let ran = answers.iter().filter(|answer| answer.status == 201).count();
        assert_eq!((ran, rig.db.effects("submit").await), (1, 1));
        for answer in answers.iter().filter(|answer| answer.status != 201) {
            assert!(["outstanding", "already-completed"].contains(&answer.code().as_str()), "{answer:?}");
        }
        assert_rejected(&click(&rig, "alice", &order).answer().await);
    }
}

#[actix_web::test]
async fn where_the_first_attempt_fails_the_second_succeeds() {
    for policy in both(guard()) {
        let rig = rig(policy).await;
        for (n, (fail, status)) in [("400", 400), ("500", 500), ("panic", 500)].into_iter().enumerate() {
            let order = json!({"n": n});
            for _ in 0..2 {
                let failed = click(&rig, "alice", &order).header("x-fail", fail).answer().await;
                assert_eq!(failed.status, status);
            }
            assert_first(&click(&rig, "alice", &order).answer().await);
            assert_rejected(&click(&rig, "alice", &order).answer().await);
        }
        assert_eq!(rig.db.effects("submit").await, 3);
    }
}

/// X02
#[actix_web::test]
async fn while_a_handler_is_slower_than_the_window_its_lease_protects_and_the_window_counts_from_its_end() {
    let window = Duration::from_secs(2);
    for policy in both(guard().retention(window).lease(Duration::from_secs(1))) {
        let rig = rig(policy).await;
        let order = json!({"sku": "a"});
        let first = rt::spawn(click(&rig, "alice", &order).header("x-hold", "1").answer());
        rig.gate.entered(1).await;
        rt::time::sleep(window + Duration::from_millis(300)).await;
        assert_outstanding(&click(&rig, "alice", &order).answer().await);
        rig.gate.open(1);
        assert_first(&first.await.unwrap());
        assert_rejected(&click(&rig, "alice", &order).answer().await);
        eventually("the window has passed", async || click(&rig, "alice", &order).answer().await.status == 201).await;
        assert_eq!(rig.db.effects("submit").await, 2);
    }
}

#[actix_web::test]
async fn what_runs_again_is_guarded_only_against_requests_at_the_same_time() {
    for policy in both(Policy::new().anonymous().on_completed(OnCompleted::RunAgain)) {
        let rig = rig(policy).await;
        let post = |body: &'static str| rig.post("/x").key("x").body(body);
        let one = post("a").answer().await;
        let two = post("a").answer().await;
        assert_first(&one);
        assert_first(&two);
        assert_ne!(one.body, two.body);
        // Another request under the key is no more than another run.
        assert_first(&post("b").answer().await);
        assert_eq!(post("b").header("x-fail", "500").answer().await.status, 500);

        let held = rt::spawn(post("b").header("x-hold", "1").answer());
        rig.gate.entered(1).await;
        assert_outstanding(&post("b").answer().await);
        rig.gate.open(1);
        assert_first(&held.await.unwrap());
        assert_eq!((rig.db.effects("submit").await, rig.db.keys().await), (4, 1));

        // Of racers one runs at a time.
        let answers = join_all((0..20).map(|_| post("b").answer())).await;
        let ran = answers.iter().filter(|answer| answer.status == 201).count() as i64;
        assert!(answers.iter().all(|answer| answer.status == 201 || answer.code() == "outstanding"), "{answers:?}");
        assert!(ran >= 1);
        assert_eq!(rig.db.effects("submit").await, 4 + ran);
    }
}

#[actix_web::test]
async fn what_must_never_happen_twice_is_kept_for_ever() {
    let forever = |on_completed| both(Policy::new().anonymous().retain_forever().on_completed(on_completed));
    for policy in forever(OnCompleted::Replay).into_iter().chain(forever(OnCompleted::Reject)) {
        let rig = rig(policy).await;
        let post = || rig.post("/x").key("x").answer();
        let first = post().await;
        assert_first(&first);
        rig.db.age("x", "200 years").await;
        assert_eq!(actix_idempotency::Sweeper::new(rig.pool.clone()).sweep_once().await.unwrap(), 0);
        let repeat = post().await;
        assert!(repeat.is_replay() || repeat.code() == "already-completed", "{repeat:?}");
        assert_eq!(rig.db.effects("submit").await, 1);
    }
}

const FAILURES: [(&str, u16); 3] = [("400", 400), ("500", 500), ("panic", 500)];

/// P04
#[actix_web::test]
async fn a_failure_frees_the_key_at_once_unless_the_policy_says_otherwise() {
    for policy in both(Policy::new().anonymous().on_failure(OnFailure::Release)) {
        let rig = rig(policy).await;
        for (fail, status) in FAILURES {
            assert_eq!(rig.post("/x").key(fail).header("x-fail", fail).answer().await.status, status);
            assert_first(&rig.post("/x").key(fail).answer().await);
        }
        assert_eq!(rig.db.effects("submit").await, 3);
    }
}

#[actix_web::test]
async fn a_failure_can_hold_the_key_until_its_lease_ends() {
    let policy = Policy::new().anonymous().on_failure(OnFailure::HoldLease).lease(Duration::from_secs(3));
    let rig = rig(policy).await;
    let post = |key: &str| rig.post("/x").key(key).body("a");
    for (fail, status) in FAILURES {
        assert_eq!(post(fail).header("x-fail", fail).answer().await.status, status);
        assert_held(&post(fail).answer().await);
        assert_eq!(rig.post("/x").key(fail).body("b").answer().await.code(), "key-reused");
    }
    for (fail, _) in FAILURES {
        // It is renewed no longer.
        eventually("its lease has ended", async || post(fail).answer().await.status == 201).await;
    }
    assert_eq!(rig.db.effects("submit").await, 3);
}

#[actix_web::test]
async fn a_failure_can_hold_the_key_for_its_retention() {
    let hold = Policy::new().anonymous().on_failure(OnFailure::HoldRetention).lease(Duration::from_millis(200));
    for (policy, ends) in [(hold.clone().retention(Duration::from_secs(3600)), true), (hold.retain_forever(), false)] {
        let rig = rig(policy).await;
        for (fail, status) in FAILURES {
            let post = || rig.post("/x").key(fail);
            assert_eq!(post().header("x-fail", fail).answer().await.status, status);
            let lease_is_over =
                format!("(SELECT clock_timestamp() > created_at + '1 s' FROM idempotency_keys WHERE key = '{fail}')");
            eventually("its lease would have ended", async || rig.db.is(&lease_is_over).await).await;
            let repeat = post().answer().await;
            assert_held(&repeat);
            assert_eq!(rig.db.effects("submit").await, 0);
        }
        if ends {
            for (n, (fail, _)) in FAILURES.into_iter().enumerate() {
                rig.db.age(fail, "59 minutes").await;
                assert_held(&rig.post("/x").key(fail).answer().await);
                rig.db.age(fail, "2 minutes").await;
                assert_first(&rig.post("/x").key(fail).answer().await);
                assert_eq!(rig.db.effects("submit").await, n as i64 + 1);
            }
        } else {
            assert!(rig.db.is("NOT EXISTS (SELECT FROM idempotency_keys WHERE leased_until <> 'infinity')").await);
        }
    }
}

#[actix_web::test]
async fn a_failure_can_be_stored_and_replayed() {
    let store = Policy::new()
        .anonymous()
        .on_failure(OnFailure::Store)
        .documentation("https://shop.example/keys")
        .wording(Code::HandlerPanicked, Wording::new().language("de").detail("Das war nichts."));
    for policy in both(store) {
        let rig = rig(policy).await;
        for (fail, status) in FAILURES {
            let post = || rig.post("/x").key(fail);
            let first = post().header("x-fail", fail).answer().await;
            assert_eq!(first.status, status);
            first.assert_replayed_by(&post().answer().await);
            assert_eq!(rig.post("/x").key(fail).body("other").answer().await.code(), "key-reused");
        }
        let panicked = rig.post("/x").key("panic").answer().await;
        assert_eq!(
            (panicked.code().as_str(), panicked.json()["detail"].as_str()),
            ("handler-panicked", Some("Das war nichts."))
        );
        assert_eq!(panicked.json()["type"], "https://shop.example/keys");
        // What they wrote is not there.
        assert_eq!(rig.db.effects("submit").await, 0);
    }
}

/// A commit that fails, a body that breaks off and a handler that is dropped are failures, too: it may have
/// locked the stock elsewhere.
#[actix_web::test]
async fn what_holds_a_failure_holds_a_commit_that_fails_and_a_body_that_breaks_off() {
    async fn deferred(mut tx: IdemTx) -> Result<HttpResponse> {
        effect_in(&mut tx, "deferred").await?;
        tx.batch_execute("INSERT INTO deferred VALUES (1), (1)").await.map_err(ErrorInternalServerError)?;
        Ok(HttpResponse::Ok().finish())
    }
    async fn broken(pool: Data<PgPool>) -> Result<HttpResponse> {
        effect(&pool, "broken").await?;
        let chunks = [Ok(Bytes::from_static(b"half")), Err(ErrorInternalServerError("broken"))];
        Ok(HttpResponse::Ok().streaming(stream::iter(chunks).boxed_local()))
    }
    let rig = Rig::builder()
        .policy(Policy::new().anonymous().on_failure(OnFailure::HoldRetention))
        .serve(|config, idempotency, _| {
            config.service(
                web::scope("")
                    .wrap(idempotency.clone())
                    .route("/deferred", web::post().to(deferred))
                    .route("/broken", web::post().to(broken)),
            );
        })
        .await;
    rig.db.run("CREATE TABLE deferred (id bigint UNIQUE DEFERRABLE INITIALLY DEFERRED)").await;
    for (path, code) in [("/deferred", "constraint-violated"), ("/broken", "body-failed")] {
        assert_eq!(rig.post(path).key("x").answer().await.code(), code);
        assert_held(&rig.post(path).key("x").answer().await);
    }
    assert_eq!((rig.db.effects("deferred").await, rig.db.effects("broken").await), (0, 1));
    let held = "SELECT count(*) AS value FROM idempotency_keys WHERE state = 'outstanding' \
                AND leased_until > now() + '23 hours'";
    assert_eq!(rig.db.number(held).await, 2);
}

#[actix_web::test]
async fn what_holds_a_failure_holds_a_handler_that_is_dropped_with_its_worker() {
    let rig = rig(Policy::new().anonymous().on_failure(OnFailure::HoldRetention)).await;
    let cut_off = rt::spawn(rig.post("/x").key("x").header("x-hold", "1").try_answer());
    rig.gate.entered(1).await;
    rig.server.handle.stop(false).await;
    assert!(!cut_off.await.unwrap().is_ok_and(|answer| answer.status.is_success()));
    let held =
        "EXISTS (SELECT FROM idempotency_keys WHERE state = 'outstanding' AND leased_until > now() + '23 hours')";
    eventually("its key is held", async || rig.db.is(held).await).await;
    let other = rig.twin_serving(Policy::new().anonymous(), routes);
    assert_held(&other.post("/x").key("x").answer().await);
}

/// Says of its key what `x-say` says, and answers with `x-status`.
async fn say(request: HttpRequest, key: IdemKey, pool: Data<PgPool>) -> Result<HttpResponse> {
    let id = effect(&pool, "say").await?;
    match header(&request, "x-say") {
        Some("hold") => key.hold(),
        Some("release") => key.release(),
        Some("keep") => key.keep(),
        _ => {}
    }
    let status: StatusCode = header(&request, "x-status").unwrap_or("201").parse().unwrap();
    Ok(HttpResponse::build(status).body(id.to_string()))
}

#[actix_web::test]
async fn a_handler_has_the_last_word_on_its_key() {
    let outcomes = [OnFailure::Release, OnFailure::HoldLease, OnFailure::HoldRetention, OnFailure::Store];
    for on_failure in outcomes {
        let rig = Rig::builder().policy(Policy::new().anonymous().on_failure(on_failure)).handler(say).await;
        for status in ["201", "400", "500"] {
            let post = |say: &str| {
                rig.post("/x").key(&format!("{say}{status}")).header("x-say", say).header("x-status", status).answer()
            };
            // Held, whatever it says: at least until the lease ends.
            assert_eq!(post("hold").await.status.as_str(), status);
            assert_held(&post("hold").await);
            // Free at once.
            let first = post("release").await;
            let second = post("release").await;
            assert!(first.status.as_str() == status && second.status.as_str() == status && first.body != second.body);
            // Kept.
            post("keep").await.assert_replayed_by(&post("keep").await);
        }
        assert_eq!(rig.db.effects("say").await, 3 + 6 + 3);
    }
}

/// P01, P02
#[actix_web::test]
async fn a_corrected_request_may_use_the_business_key_of_a_rejected_one_and_a_failed_one_may_be_repeated() {
    let policy = Policy::new().keys([KeySource::json(["/order_no"])]).anonymous();
    for policy in both(policy) {
        let rig = rig(policy.clone()).await;
        let post = |no: &str, email: &str| rig.post("/x").json(&json!({"order_no": no, "email": email}));
        for _ in 0..2 {
            assert_eq!(post("1", "nonsense").header("x-fail", "400").answer().await.status, 400);
        }
        let corrected = post("1", "a@b.example").answer().await;
        assert_first(&corrected);
        corrected.assert_replayed_by(&post("1", "a@b.example").answer().await);
        assert_eq!(post("1", "nonsense").answer().await.code(), "key-reused");

        assert_eq!(post("2", "a@b.example").header("x-fail", "503").answer().await.status, 503);
        let second = post("2", "a@b.example").answer().await;
        assert_first(&second);
        second.assert_replayed_by(&post("2", "a@b.example").answer().await);

        // Whose key it is must be known where errors are kept.
        let everything = rig.twin_serving(of_users(policy.keep(Keep::Everything)), routes);
        let post = || everything.post("/x").user("a").json(&json!({"order_no": "3"}));
        post().header("x-fail", "503").answer().await.assert_replayed_by(&post().answer().await);
        assert_eq!(rig.db.effects("submit").await, 2);
    }
}

/// F01
#[actix_web::test]
async fn the_order_of_members_counts_only_where_the_policy_says_so() {
    let raw = Policy::new().anonymous().compare(Fields::raw());
    for (policy, counts) in [(Policy::new().anonymous(), false), (raw, true)] {
        for policy in both(policy) {
            let rig = rig(policy).await;
            let types = ["application/json", "application/json; charset=utf-8", "application/vnd.shop+json"];
            for (n, content_type) in types.into_iter().enumerate() {
                let post = |body: &'static str| {
                    rig.post("/x").key(&n.to_string()).header("content-type", content_type).body(body).answer()
                };
                let first = post(r#"{"sku":"a","qty":1}"#).await;
                assert_first(&first);
                let other = post(r#"{ "qty":1, "sku":"a" }"#).await;
                if counts {
                    assert_eq!(other.code(), "key-reused");
                } else {
                    first.assert_replayed_by(&other);
                }
            }
            assert_eq!(rig.db.effects("submit").await, 3);
        }
    }
}

/// F06
#[actix_web::test]
async fn what_every_attempt_draws_anew_does_not_count_where_the_policy_says_so() {
    for policy in both(Policy::new().anonymous().compare(Fields::all_but(["/id", "/meta/sent_at"]))) {
        let rig = rig(policy).await;
        let post = |id: u32, qty: u32| {
            let body = json!({"id": id, "qty": qty, "meta": {"sent_at": id, "app": 1}});
            rig.post("/x")
                .key("x")
                .header("traceparent", id)
                .header("user-agent", format!("a/{id}"))
                .json(&body)
                .answer()
        };
        let first = post(1, 1).await;
        assert_first(&first);
        first.assert_replayed_by(&post(2, 1).await);
        assert_eq!(post(2, 2).await.code(), "key-reused");
        assert_eq!(rig.db.effects("submit").await, 1);
    }
}

#[actix_web::test]
async fn what_identifies_an_operation_and_what_is_compared_are_two_choices() {
    let policy =
        Policy::new().keys([KeySource::json(["/out_trade_no"])]).compare(Fields::all_but(["/notify_time"])).anonymous();
    for policy in both(policy) {
        let rig = rig(policy).await;
        let notify = |no: &str, amount: u32, time: u32| {
            rig.post("/x").json(&json!({"out_trade_no": no, "amount": amount, "notify_time": time})).answer()
        };
        let first = notify("T1", 100, 1).await;
        assert_first(&first);
        first.assert_replayed_by(&notify("T1", 100, 2).await);
        assert_eq!(notify("T1", 101, 1).await.code(), "key-reused");
        assert_first(&notify("T2", 101, 1).await);
        assert_eq!(rig.db.effects("submit").await, 2);
    }
}
