//! Log lines that lead from a replay to the request that was run.

use std::time::Duration;

use actix_idempotency::{Admin, Completer, IdemKey, IdemTx, OnCompleted, Once, Outcome, Policy, Scope, admin::Search};
use actix_web::{HttpMessage, HttpRequest, HttpResponse, Result, rt::spawn};

use crate::support::{
    app::{created, effect_in, order},
    client::{Answer, RequestExt},
    db::{Db, LAPSED, THREE_DAYS_LATER},
    eventually,
    log::{self, Line},
    rig::Rig,
};

/// What is stored of it in the row with this key.
async fn stored(db: &Db, key: &str) -> Option<String> {
    db.text(&format!("SELECT request_id AS value FROM idempotency_keys WHERE key = '{key}'")).await
}

/// The first request as the events of this name tell it.
fn told(id: &str, event: &str) -> Vec<Option<String>> {
    let is_one = |line: &&std::sync::Arc<Line>| line.get("event") == Some(event);
    log::events(id).iter().filter(is_one).map(|line| line.get("first_request").map(str::to_owned)).collect()
}

fn some(id: &str) -> Option<String> {
    Some(id.to_owned())
}

async fn send(rig: &Rig, path: &str, key: &str, request_id: &str, sku: &str) -> Answer {
    rig.post(path).key(key).header("x-request-id", request_id).json(&order(sku)).answer().await
}

async fn insert(mut tx: IdemTx) -> Result<HttpResponse> {
    Ok(created(effect_in(&mut tx, "x").await?))
}

#[actix_web::test]
async fn a_replay_and_a_reused_key_tell_the_first_request_under_every_policy() {
    log::listen();
    let policy = || Policy::new().anonymous();
    for (key, policy, in_tx) in [
        ("joined", policy(), false),
        ("joined-tx", policy(), true),
        ("joined-atomic", policy().atomic(), true),
        ("joined-stored-without", policy().atomic(), false),
    ] {
        let rig = if in_tx { Rig::builder().policy(policy).handler(insert).await } else { Rig::with(policy).await };
        let path = if in_tx { "/x" } else { "/orders" };
        let first = send(&rig, path, key, "first", "x").await;
        first.assert_replayed_by(&send(&rig, path, key, "second", "x").await);
        assert_eq!(send(&rig, path, key, "third", "y").await.code(), "key-reused");
        assert_eq!(stored(&rig.db, key).await, some("first"), "{key}");
        let id = rig.db.id(key).await;
        assert_eq!(told(&id, "replayed"), [some("first")], "{key}");
        assert_eq!(told(&id, "key-reused"), [some("first")], "{key}");
        // Each request says its own in its span.
        eventually("all spans have ended", async || log::spans(&id).len() == 3).await;
        let own: Vec<_> = log::spans(&id).into_iter().map(|span| span["request_id"].clone()).collect();
        assert_eq!(own, ["first", "second", "third"], "{key}");
        let entry = &Admin::of(&rig.idempotency).search(&Search::new().key(key)).await.unwrap().entries[0];
        assert_eq!(entry.request_id, some("first"), "{key}");
    }
}

#[actix_web::test]
async fn whoever_meets_a_running_request_tells_which_one_it_is() {
    log::listen();
    let rig = Rig::start().await;
    let post = |id: &'static str| rig.post("/held").key("joined-held").header("x-request-id", id).body("a").answer();
    let first = spawn(post("runs"));
    rig.gate.entered(1).await;
    assert_eq!(post("comes-too-early").await.code(), "outstanding");
    rig.gate.open(1);
    assert_eq!(first.await.unwrap().status, 201);
    assert_eq!(told(&rig.db.id("joined-held").await, "outstanding"), [some("runs")]);
}

#[actix_web::test]
async fn a_retry_and_a_takeover_leave_the_first_request_in_the_row_and_a_new_operation_does_not() {
    log::listen();
    let rig = Rig::start().await;
    let key = "joined-again";
    let malformed = |request_id: &'static str| {
        let request = rig.post("/orders").key(key).header("x-request-id", request_id);
        request.header("content-type", "application/json").body("{").answer()
    };
    assert_eq!(malformed("one").await.status, 400);
    assert_eq!(malformed("two").await.status, 400);
    let id = rig.db.id(key).await;
    assert_eq!((stored(&rig.db, key).await, told(&id, "retried")), (some("one"), vec![some("one")]));
    rig.db.run(LAPSED).await;
    assert_eq!(malformed("three").await.status, 400);
    assert_eq!((stored(&rig.db, key).await, told(&id, "taken-over")), (some("one"), vec![some("one")]));

    // A corrected request asks for something else, and so does one after the retention.
    let key = "joined-corrected";
    let rejected =
        rig.post("/orders").key(key).header("x-request-id", "three").header("content-type", "application/json");
    assert_eq!(rejected.body("{").answer().await.status, 400);
    let id = rig.db.id(key).await;
    assert_eq!(send(&rig, "/orders", key, "four", "x").await.status, 201);
    assert_eq!((stored(&rig.db, key).await, told(&id, "retried").pop()), (some("four"), Some(None)));
    rig.db.run(THREE_DAYS_LATER).await;
    assert_eq!(send(&rig, "/orders", key, "five", "y").await.status, 201);
    assert_eq!((stored(&rig.db, key).await, told(&id, "expired")), (some("five"), vec![None]));
    let again = rig.twin(Policy::new().anonymous().on_completed(OnCompleted::RunAgain));
    let request = again.post("/orders").key(key).header("x-request-id", "six").json(&order("y"));
    assert_eq!(request.answer().await.status, 201);
    assert_eq!(stored(&rig.db, key).await, some("six"));
    // Under a policy that writes the finished row in place of the one that it saw.
    rig.db.run(THREE_DAYS_LATER).await;
    let atomic = rig.twin(Policy::new().anonymous().atomic());
    let request = atomic.post("/orders").key(key).header("x-request-id", "seven").json(&order("y"));
    assert_eq!(request.answer().await.status, 201);
    assert_eq!(stored(&rig.db, key).await, some("seven"));
}

#[actix_web::test]
async fn a_trace_names_the_request_where_nothing_else_does_and_what_is_no_id_is_ignored() {
    let rig = Rig::start().await;
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let (longest, too_long) = ("x".repeat(128), "x".repeat(129));
    let secret = "two words";
    for (key, headers, expected) in [
        ("none", vec![], None),
        ("trace", vec![("traceparent", trace)], Some(trace)),
        ("both", vec![("traceparent", trace), ("x-request-id", "r1")], Some("r1")),
        ("longest", vec![("x-request-id", longest.as_str())], Some(longest.as_str())),
        ("too-long", vec![("x-request-id", too_long.as_str())], None),
        ("blank", vec![("x-request-id", secret)], None),
        ("empty", vec![("x-request-id", "")], None),
        ("tab", vec![("x-request-id", "a\tb"), ("traceparent", trace)], Some(trace)),
    ] {
        let request = rig.post("/orders").key(key).json(&order("x"));
        let request = headers.into_iter().fold(request, |request, (name, value)| request.header(name, value));
        assert_eq!(request.answer().await.status, 201, "{key}: no request is refused for it");
        assert_eq!(stored(&rig.db, key).await.as_deref(), expected, "{key}");
    }
    let raw = rig.post("/orders").key("bytes").header("x-request-id", &b"\xff\xfe"[..]).json(&order("x"));
    assert_eq!((raw.answer().await.status.as_u16(), stored(&rig.db, "bytes").await), (201, None));
}

#[actix_web::test]
async fn a_closure_names_the_request_or_nothing_does() {
    struct Drawn(String);
    let from_extensions = |request: &HttpRequest| request.extensions().get::<Drawn>().map(|drawn| drawn.0.clone());
    let rig = Rig::with(Policy::new().anonymous().request_id(|_| Some("drawn here".into()))).await;
    assert_eq!(send(&rig, "/orders", "bounded", "theirs", "x").await.status, 201);
    assert_eq!(stored(&rig.db, "bounded").await, None, "a closure is bounded as well");
    for (key, policy, expected) in [
        ("own", Policy::new().request_id(|_| Some("drawn-here".into())), some("drawn-here")),
        ("absent", Policy::new().request_id(from_extensions), None),
        ("off", Policy::new().without_request_id(), None),
    ] {
        let twin = rig.twin(policy.anonymous());
        let request = twin.post("/orders").key(key).header("x-request-id", "theirs").json(&order("x"));
        assert_eq!(request.answer().await.status, 201);
        assert_eq!(stored(&rig.db, key).await, expected, "{key}");
    }
}

#[actix_web::test]
async fn a_row_without_one_is_replayed_as_ever() {
    log::listen();
    let rig = Rig::start().await;
    let first = send(&rig, "/orders", "joined-old", "r1", "x").await;
    rig.db.run("UPDATE idempotency_keys SET request_id = NULL").await;
    first.assert_replayed_by(&send(&rig, "/orders", "joined-old", "r2", "x").await);
    rig.db.run(LAPSED).await;
    assert_eq!(send(&rig, "/orders", "joined-old", "r3", "x").await.status, 201);
    let id = rig.db.id("joined-old").await;
    assert_eq!((told(&id, "replayed"), told(&id, "taken-over")), (vec![None], vec![None]));
    // Which request was the first is not known, and no other takes its place.
    assert_eq!(stored(&rig.db, "joined-old").await, None);
}

#[actix_web::test]
async fn work_without_a_request_may_be_named_too() {
    log::listen();
    let db = Db::new().await;
    let once = Once::postgres(db.pool(5)).with(Policy::new().retention(Duration::from_secs(3600)));
    let run = async |once: Once, key: &'static str| {
        once.run(Scope::once("joined"), key, &(), async |_| Ok::<_, String>(7)).await.unwrap()
    };
    assert!(matches!(run(once.request_id("job-1"), "joined-once").await, Outcome::Ran(7)));
    let named = once.request_id("job-2").with(Policy::new());
    assert!(matches!(run(named, "joined-once").await, Outcome::Replayed(7)));
    let id = db.id("joined-once").await;
    assert_eq!((stored(&db, "joined-once").await, told(&id, "replayed")), (some("job-1"), vec![some("job-1")]));
    assert!(matches!(run(once.request_id("no id"), "joined-nothing").await, Outcome::Ran(7)));
    assert_eq!(stored(&db, "joined-nothing").await, None);

    let mut conn = db.connect().await;
    let once = once.request_id("job-3");
    let within = once.run_in(&mut conn, Scope::once("joined"), "joined-in", &(), async |_| Ok::<_, String>(8)).await;
    assert!(matches!(within.unwrap(), Outcome::Ran(8)));
    assert_eq!(stored(&db, "joined-in").await, some("job-3"));

    // What nobody retries is taken over by a completer, which tells it too.
    db.run(LAPSED).await;
    let completer = Completer::of_work(&once, "joined", async |_: IdemKey| Ok::<_, String>(7)).grace(Duration::ZERO);
    completer.complete_once().await.unwrap();
    assert_eq!((told(&id, "taken-over"), stored(&db, "joined-once").await), (vec![some("job-1")], some("job-1")));
}
