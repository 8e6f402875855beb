//! What a client can ask: what has become of its key, and what the rules are.

use std::time::Duration;

use actix_idempotency::{
    Fields, Idempotency, Keep, KeySource, OnCompleted, OnFailure, OnOutstanding, Part, PgPool, Policy, Quota,
};
use actix_web::{
    HttpRequest, HttpResponse, Result, rt,
    web::{self, Data, ServiceConfig},
};
use serde_json::{Value, json};

use crate::support::{
    app::{created, effect},
    client::{Answer, RequestExt},
    gate::Gate,
    rig::Rig,
};

/// `x-hold` holds it; `x-fail` makes it fail.
async fn submit(request: HttpRequest, pool: Data<PgPool>, gate: Data<Gate>) -> Result<HttpResponse> {
    if request.headers().contains_key("x-hold") {
        gate.pass().await;
    }
    let id = effect(&pool, "submit").await?;
    let fails = request.headers().contains_key("x-fail");
    Ok(if fails { HttpResponse::Conflict().finish() } else { created(id) })
}

fn routes(config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool) {
    config
        .route("/orders/keys/{key}", idempotency.status("POST", "/orders"))
        .service(
            web::resource("/orders")
                .wrap(idempotency.clone())
                .route(web::post().to(submit))
                .route(web::patch().to(submit)),
        )
        .service(web::resource("/refunds").wrap(idempotency.clone()).route(web::post().to(submit)));
}

async fn rig(policy: Policy) -> Rig {
    Rig::builder().policy(policy).serve(routes).await
}

#[track_caller]
fn assert_unknown(answer: &Answer) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (404, "key-unknown"));
}

/// The stored answer, which nobody keeps by the address that it was asked for at.
#[track_caller]
fn assert_told(first: &Answer, mut told: Answer) {
    assert_eq!(told.header("cache-control"), Some("no-store"));
    told.headers.remove("cache-control");
    first.assert_replayed_by(&told);
}

#[actix_web::test]
async fn what_a_newer_version_has_written_is_told_by_it() {
    let rig = rig(Policy::new().anonymous()).await;
    assert_eq!(rig.post("/orders").key("x").answer().await.status, 201);
    rig.db.run("UPDATE idempotency_keys SET snapshot_version = 999").await;
    for query in ["", "?answer=true"] {
        let answer = rig.get(&format!("/orders/keys/x{query}")).answer().await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (503, "newer-version"));
        assert!(answer.retry_after().is_some());
    }
}

#[actix_web::test]
async fn whoever_sent_a_key_can_ask_what_has_become_of_it() {
    for policy in [Policy::new(), Policy::new().atomic()] {
        let rig = rig(policy).await;
        let ask = |user: &str, query: &str| rig.get(&format!("/orders/keys/x{query}")).user(user).answer();
        let unknown = ask("a", "").await;
        assert_unknown(&unknown);

        let held = rt::spawn(rig.post("/orders").user("a").key("x").header("x-hold", "1").answer());
        rig.gate.entered(1).await;
        for query in ["", "?answer=true"] {
            let outstanding = ask("a", query).await;
            assert_eq!((outstanding.status.as_u16(), outstanding.retry_after()), (202, Some(1)));
            assert_eq!(outstanding.json(), json!({"state": "outstanding"}));
            assert_eq!(outstanding.header("cache-control"), Some("no-store"));
        }
        rig.gate.open(1);
        let first = held.await.unwrap();
        assert_eq!(first.status, 201);

        let completed = ask("a", "").await;
        assert_eq!((completed.status.as_u16(), completed.header("cache-control")), (200, Some("no-store")));
        let told = completed.json();
        assert_eq!((&told["state"], &told["status"]), (&json!("completed"), &json!(201)));
        let headers = told["headers"].as_array().unwrap();
        assert!(headers.contains(&json!(["location", first.header("location").unwrap()])), "{headers:?}");
        assert!(told.get("body").is_none());
        assert_told(&first, ask("a", "?answer=true").await);

        // Of another's key there is nothing to be learned.
        for query in ["", "?answer=true"] {
            let other = ask("b", query).await;
            assert_unknown(&other);
            assert_eq!(other.body, unknown.body);
            let names = |answer: &Answer| {
                let mut names: Vec<_> = answer.headers.keys().map(ToString::to_string).collect();
                names.sort();
                names
            };
            assert_eq!(names(&other), names(&unknown));
        }
        assert_unknown(&rig.get("/orders/keys/x").answer().await);

        // Asking changes nothing, and after its time the key is unknown.
        assert_eq!((rig.db.effects("submit").await, rig.db.keys().await), (1, 1));
        rig.db.age("x", "2 days").await;
        assert_unknown(&ask("a", "").await);
        assert_unknown(&ask("a", "?answer=true").await);
    }
}

#[actix_web::test]
async fn a_key_that_was_given_back_is_unknown_and_one_that_is_held_is_told_as_such() {
    let rig = rig(Policy::new().anonymous()).await;
    assert_eq!(rig.post("/orders").key("x").header("x-fail", "1").answer().await.status, 409);
    assert_unknown(&rig.get("/orders/keys/x").answer().await);

    let holding = rig.twin_serving(Policy::new().anonymous().on_failure(OnFailure::HoldRetention), routes);
    assert_eq!(holding.post("/orders").key("y").header("x-fail", "1").answer().await.status, 409);
    let held = rig.get("/orders/keys/y").answer().await;
    assert_eq!((held.status.as_u16(), held.json()["state"].as_str()), (202, Some("held")));
    assert_eq!(held.retry_after(), None);
}

#[actix_web::test]
async fn the_status_is_of_one_resource_and_one_method() {
    let rig = rig(Policy::new().anonymous()).await;
    rig.post("/refunds").key("x").answer().await;
    rig.request(reqwest::Method::PATCH, "/orders").key("x").answer().await;
    assert_unknown(&rig.get("/orders/keys/x").answer().await);
    rig.post("/orders").key("x").answer().await;
    assert_eq!(rig.get("/orders/keys/x").answer().await.status, 200);
    // A name in place of the route is the same on both sides.
    let named = rig.twin_serving(Policy::new().anonymous().resource("orders"), routes);
    assert_unknown(&named.get("/orders/keys/x").answer().await);
    named.post("/orders").key("x").answer().await;
    assert_eq!(named.get("/orders/keys/x").answer().await.status, 200);
}

#[actix_web::test]
async fn a_key_in_the_path_is_read_as_it_was_sent() {
    let rig = rig(Policy::new().anonymous()).await;
    for (key, path) in [("a/b+c%d:e", "a%2Fb+c%25d:e"), ("%2F", "%252F"), ("a=?", "a=%3F"), ("z", "%7A")] {
        assert_eq!(rig.post("/orders").key(key).answer().await.status, 201);
        assert_eq!(rig.get(&format!("/orders/keys/{path}")).answer().await.status, 200, "{key}");
    }
    for malformed in ["%20", "a%20b", "a%00", "%22x%22", "%C3%BC", &"k".repeat(256)] {
        let answer = rig.get(&format!("/orders/keys/{malformed}")).answer().await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (400, "key-invalid"), "{malformed}");
    }
}

#[actix_web::test]
async fn keys_of_every_source_can_be_asked_for() {
    let policy = Policy::new()
        .keys([KeySource::header(), KeySource::json(["/user", "/no"]), KeySource::query(["no"])])
        .anonymous();
    let rig = rig(policy).await;
    let status = async |key: &str| rig.get(&format!("/orders/keys/{key}")).answer().await.status.as_u16();
    rig.post("/orders").json(&json!({"user": 7, "no": "T/1"})).answer().await;
    assert_eq!((status("7:T%2F1").await, status("7").await), (200, 404));
    rig.post("/orders?no=Q1").answer().await;
    assert_eq!(status("Q1").await, 200);
    rig.post("/orders").key("H1").answer().await;
    assert_eq!(status("H1").await, 200);
}

#[actix_web::test]
async fn the_status_asks_the_same_of_the_caller_as_a_replay() {
    let may = |request: &HttpRequest| request.headers().contains_key("x-role");
    let rig = rig(Policy::new().refuse_anonymous().authorize_replay("With the role.", may)).await;
    assert_eq!(rig.get("/orders/keys/x").answer().await.code(), "principal-missing");
    let first = rig.post("/orders").user("a").key("x").answer().await;
    for query in ["", "?answer=true"] {
        let ask = || rig.get(&format!("/orders/keys/x{query}")).user("a");
        assert_eq!(ask().answer().await.code(), "replay-forbidden");
        assert_eq!(ask().header("x-role", "1").answer().await.status, if query.is_empty() { 200 } else { 201 });
    }
    assert_told(&first, rig.get("/orders/keys/x?answer=true").user("a").header("x-role", "1").answer().await);
}

#[actix_web::test]
async fn of_a_guarded_key_the_status_tells_that_it_was_done_and_no_more() {
    let rig = rig(Policy::new().anonymous().on_completed(OnCompleted::Reject)).await;
    rig.post("/orders").key("x").answer().await;
    let told = rig.get("/orders/keys/x").answer().await;
    assert_eq!((told.status.as_u16(), told.json()), (200, json!({"state": "completed", "status": 201})));
}

#[actix_web::test]
async fn without_its_engine_the_status_says_that_the_service_is_set_up_wrong() {
    let rig = Rig::builder()
        .serve(|config, _, _| {
            config.route("/keys/{key}", Idempotency::from_app_data().status("POST", "/orders"));
        })
        .await;
    assert_eq!(rig.get("/keys/x").answer().await.code(), "misconfigured");
}

/// The document of a policy, as JSON and as a page.
async fn documents(policy: Policy) -> (Value, String) {
    let rig = Rig::builder()
        .serve(move |config, _, _| {
            config.service(Idempotency::document(&policy, "/docs/keys"));
        })
        .await;
    let json = rig.get("/docs/keys").header("accept", "application/json").answer().await;
    assert_eq!((json.status.as_u16(), json.header("content-type")), (200, Some("application/json")));
    let html = rig.get("/docs/keys").header("accept", "text/html,application/xhtml+xml,*/*;q=0.8").answer().await;
    let plain = rig.get("/docs/keys").answer().await;
    assert_eq!((html.status.as_u16(), html.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert_eq!(html.body, plain.body);
    (json.json(), html.text())
}

#[actix_web::test]
async fn the_document_of_the_default_policy() {
    let (json, html) = documents(Policy::new()).await;
    assert_eq!(json["header"], "Idempotency-Key");
    assert_eq!((&json["required"], &json["methods"]), (&json!(false), &json!(["POST", "PATCH"])));
    assert_eq!(json["key_sources"], json!(["header Idempotency-Key"]));
    assert_eq!(json["expiry_seconds"], 86_400);
    assert_eq!(json["request_limit_bytes"], 1_048_576);
    assert_eq!(json["kept"], "answers below 400");
    assert_eq!(json["scope"], json!(["the resource: method and route", "the caller: the credential in Authorization"]));
    for words in ["<html lang=\"en\">", "<title>Idempotency keys</title>", "1 day after completion", "1048576 bytes"] {
        assert!(html.contains(words), "{words}: {html}");
    }
}

#[actix_web::test]
async fn the_document_tells_what_the_policy_says() {
    let one = 1.try_into().unwrap();
    let policy = Policy::new()
        .keys([KeySource::header(), KeySource::json(["/a<b"]), KeySource::digest(Fields::all_but(["/nonce"]))])
        .require_key()
        .uuid_keys()
        .principal(|_| None)
        .tenant(|_| None)
        .skip(|_| false)
        .describe(Part::Principal, "the user of the session & nobody else")
        .describe(Part::Tenant, "the shop")
        .describe(Part::Skip, "Dry runs are exempt.")
        .describe(Part::Keep, "answers that are not 404")
        .authorize_replay("The caller may still see the order.", |_| true)
        .fingerprint_header("x-api-version")
        .keep(Keep::when(|_| true))
        .retain_forever()
        .on_outstanding(OnOutstanding::Wait(Duration::from_secs(5)))
        .on_completed(OnCompleted::Reject)
        .on_failure(OnFailure::HoldLease)
        .quota(Quota { outstanding: Some(one), live: None })
        .replay_marker("x-replayed");
    let (json, html) = documents(policy).await;
    assert_eq!((&json["required"], &json["expiry_seconds"]), (&json!(true), &Value::Null));
    assert_eq!(json["key_sources"][1], "json /a<b");
    assert!(json["key_sources"][2].as_str().unwrap().contains("without these fields: /nonce"));
    assert_eq!(json["key_format"][1], "The key is a UUID.");
    assert_eq!(
        json["scope"],
        json!(["the resource: method and route", "the user of the session & nobody else", "the shop"])
    );
    let compared = json["compared"].as_str().unwrap();
    assert!(compared.contains("x-api-version") && compared.contains("/nonce"), "{compared}");
    assert_eq!(json["kept"], "answers that are not 404");
    assert_eq!(json["while_outstanding"], "the answer, if it comes within 5 seconds; else 409 with Retry-After");
    assert_eq!((&json["after_completion"], &json["replay_marker"]), (&json!("409"), &json!("x-replayed")));
    let notes = json["notes"].to_string();
    for note in ["Dry runs are exempt.", "are outstanding at a time: at most 1;", "The caller may still see the order."]
    {
        assert!(notes.contains(note), "{note}: {notes}");
        assert!(html.contains(note), "{note}: {html}");
    }
    // What is said in it is text.
    assert!(html.contains("json /a&lt;b") && html.contains("&amp; nobody else") && html.contains("never"), "{html}");
}

/// C09
#[actix_web::test]
async fn every_refusal_links_to_the_document() {
    let rig = Rig::builder()
        .serve(|config, idempotency, pool| {
            let policy = Policy::new().anonymous().require_key().documentation("/docs/keys");
            config.service(Idempotency::document(&policy, "/docs/keys"));
            routes(config, &idempotency.with(policy), pool);
        })
        .await;
    let post = |body: &'static str| rig.post("/orders").key("x").body(body);
    let held = rt::spawn(post("a").header("x-hold", "1").answer());
    rig.gate.entered(1).await;
    let refusals = [
        (rig.post("/orders").answer().await, 400, "key-missing", false),
        (rig.post("/orders").key("a b").answer().await, 400, "key-invalid", false),
        (post("a").answer().await, 409, "outstanding", true),
        (post("b").answer().await, 422, "key-reused", false),
        (rig.get("/orders/keys/y").answer().await, 404, "key-unknown", false),
    ];
    for (refusal, status, code, waits) in refusals {
        assert_eq!((refusal.status.as_u16(), refusal.code().as_str()), (status, code));
        assert_eq!(refusal.retry_after().is_some(), waits, "{code}");
        let link = refusal.json()["type"].as_str().unwrap().to_owned();
        assert_eq!(refusal.header("link"), Some(&*format!("<{link}>; rel=\"describedby\"; type=\"text/html\"")));
        let document = rig.get(&link).answer().await;
        assert!(document.status == 200 && document.text().contains("Required</th><td>yes"), "{code}");
    }
    rig.gate.open(1);
    assert_eq!(held.await.unwrap().status, 201);
}
