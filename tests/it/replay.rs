//! What a retry is told: the first answer, as it was.

use std::{
    collections::HashSet,
    io,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use actix_idempotency::{IdemKey, Keep, PgPool, Policy};
use actix_web::{
    Error, HttpRequest, HttpResponse, Result,
    body::{BoxBody, MessageBody, SizedStream},
    dev::{ServiceRequest, ServiceResponse},
    http::{StatusCode, header},
    middleware::{Next, from_fn},
    web::{self, Bytes, Data},
};
use futures_util::{Stream, StreamExt, stream};
use serde_json::{Value, json};

use crate::support::{
    app::{effect, order, routes},
    client::{Answer, RequestExt, post},
    db::{LAPSED, THREE_DAYS_LATER},
    gate::Gate,
    rig::Rig,
};

/// Asks `/echo` for an answer, twice.
async fn echoed(rig: &Rig, key: &str, wanted: Value) -> (Answer, Answer) {
    let post = || rig.post("/echo").key(key).json(&wanted).answer();
    let first = post().await;
    (first, post().await)
}

/// The same POST of `/x`.
async fn again(rig: &Rig, key: &str) -> Answer {
    rig.post("/x").key(key).answer().await
}

/// Status and headers told a second time, and that there was a body.
#[track_caller]
fn assert_omitted(first: &Answer, replay: &Answer) {
    assert!(!first.is_replay() && replay.is_replay(), "{replay:?}");
    assert_eq!(replay.status, first.status);
    assert_eq!(replay.header("content-type"), first.header("content-type"));
    assert_eq!(replay.header("x-a"), first.header("x-a"));
    assert_eq!(first.header("idempotency-body-omitted"), None);
    assert_eq!(replay.header("idempotency-body-omitted"), Some("true"));
    assert_eq!((replay.body.len(), replay.header("content-length")), (0, Some("0")));
}

/// R01
#[actix_web::test]
async fn every_status_is_replayed_as_it_was() {
    let rig = Rig::with(Policy::new().anonymous().keep(Keep::Everything)).await;
    let statuses = [200, 201, 202, 203, 204, 205, 206, 207, 299, 301, 302, 303, 307, 400, 404, 409, 422, 451, 500, 599];
    for status in statuses {
        let body = if matches!(status, 204 | 205) { "" } else { "{\"a\": [1, \"\u{e9}\"]}" };
        let wanted = json!({"status": status, "headers": [["location", "/a"], ["x-a", "1"]], "body": body.as_bytes()});
        let (first, replay) = echoed(&rig, &format!("k{status}"), wanted).await;
        assert_eq!((first.status.as_u16(), first.text().as_str()), (status, body));
        first.assert_replayed_by(&replay);
    }
    assert_eq!(rig.db.effects("echo").await, statuses.len() as i64);
}

/// R01
#[actix_web::test]
async fn a_304_is_replayed_with_what_it_says_about_the_body() {
    let rig = Rig::start().await;
    let (first, replay) =
        echoed(&rig, "x", json!({"status": 304, "headers": [["etag", "\"1\""], ["content-length", "9"]]})).await;
    assert_eq!(first.header("content-length"), Some("9"));
    first.assert_replayed_by(&replay);
}

/// R01
#[actix_web::test]
async fn bodies_are_bytes() {
    let rig = Rig::start().await;
    let every_byte: Vec<u8> = (0..=255).collect();
    for (key, body) in [("empty", vec![]), ("nul", vec![0]), ("bytes", every_byte), ("large", vec![7; 100_000])] {
        let wanted = json!({"status": 200, "headers": [["content-encoding", "identity"]], "body": body});
        let (first, replay) = echoed(&rig, key, wanted).await;
        assert_eq!(first.body, body);
        first.assert_replayed_by(&replay);
        assert_eq!(replay.header("content-length"), Some(body.len().to_string().as_str()));
    }
}

/// R01
#[actix_web::test]
async fn a_custom_reason_phrase_becomes_the_standard_one() {
    async fn handler() -> HttpResponse {
        HttpResponse::Created().reason("Fine By Me").body("a")
    }
    let rig = Rig::builder().handler(handler).await;
    for line in ["HTTP/1.1 201 Fine By Me\r\n", "HTTP/1.1 201 Created\r\n"] {
        let mut raw = rig.raw().await;
        raw.send(post("/x", "x", "a")).await.unwrap();
        let head = raw.head().await;
        assert!(head.starts_with(line), "{head}");
    }
}

/// R02
#[actix_web::test]
async fn headers_of_the_answer_are_replayed() {
    let rig = Rig::start().await;
    let headers = [
        ("location", "/orders/1"),
        ("etag", "W/\"1\""),
        ("last-modified", "Thu, 01 Jan 1970 00:00:00 GMT"),
        ("link", "</orders?page=2>; rel=\"next\""),
        ("link", "</orders>; rel=\"first\""),
        ("content-language", "de, en"),
        ("content-disposition", "attachment; filename=\"a,b.txt\""),
        ("cache-control", "private"),
        ("x-empty", ""),
    ];
    let (first, replay) = echoed(&rig, "x", json!({"status": 201, "headers": headers, "body": [1]})).await;
    first.assert_replayed_by(&replay);
    for name in headers.map(|(name, _)| name).into_iter().collect::<HashSet<_>>() {
        let values = |answer: &Answer| -> Vec<_> {
            answer.headers.get_all(name).iter().map(|value| value.to_str().unwrap().to_owned()).collect()
        };
        let sent: Vec<_> = headers.iter().filter(|(sent, _)| *sent == name).map(|(_, value)| *value).collect();
        assert_eq!(values(&replay), sent, "{name}");
    }
}

/// R02
#[actix_web::test]
async fn header_values_outside_ascii_are_replayed_as_they_are() {
    async fn handler() -> HttpResponse {
        let value = header::HeaderValue::from_bytes(b"caf\xe9").unwrap();
        HttpResponse::Created().insert_header(("x-latin", value)).finish()
    }
    let rig = Rig::builder().handler(handler).await;
    again(&rig, "x").await.assert_replayed_by(&again(&rig, "x").await);
    assert_eq!(again(&rig, "x").await.headers["x-latin"].as_bytes(), b"caf\xe9");
}

/// R03
#[actix_web::test]
async fn headers_of_one_exchange_are_not_replayed() {
    let rig = Rig::with(Policy::new().anonymous().never_store_header("X-Debug")).await;
    let of_one_exchange = [
        ("set-cookie", "s=1"),
        ("set-cookie", "t=2"),
        ("x-request-id", "r1"),
        ("x-ratelimit-remaining", "9"),
        ("ratelimit-reset", "1"),
        ("server-timing", "db;dur=53"),
        ("traceparent", "00-1-1-01"),
        ("www-authenticate", "Basic"),
        ("proxy-authenticate", "Basic"),
        ("authorization", "Bearer a"),
        ("keep-alive", "timeout=5"),
        ("trailer", "x"),
        ("te", "trailers"),
        ("x-debug", "1"),
    ];
    let mut headers = of_one_exchange.to_vec();
    headers.extend([("date", "Thu, 01 Jan 1970 00:00:00 GMT"), ("x-lasts", "1")]);
    let (first, replay) = echoed(&rig, "x", json!({"status": 201, "headers": headers, "body": [1]})).await;
    for (name, _) in of_one_exchange {
        assert!(first.headers.contains_key(name), "{name}");
        assert!(!replay.headers.contains_key(name), "{name}");
    }
    let stored = rig.db.text("SELECT array_to_string(header_names, ' ') AS value FROM idempotency_keys").await;
    assert_eq!(stored.unwrap(), "x-lasts", "nor are they stored");
    assert_eq!(replay.header("x-lasts"), Some("1"));
    assert_eq!(replay.headers.get_all("date").iter().count(), 1);
    assert!(first.header("date").unwrap().contains("1970") && !replay.header("date").unwrap().contains("1970"));
}

/// R03
#[actix_web::test]
async fn headers_that_connection_names_are_not_replayed() {
    let rig = Rig::start().await;
    let headers = [("connection", "close, X-Hop"), ("x-hop", "1"), ("x-lasts", "1")];
    let (first, replay) = echoed(&rig, "x", json!({"status": 200, "headers": headers})).await;
    assert_eq!((first.header("x-hop"), first.header("x-lasts")), (Some("1"), Some("1")));
    assert_eq!((replay.header("x-hop"), replay.header("x-lasts")), (None, Some("1")));
    assert_eq!(replay.header("connection"), None);
}

/// R07
#[actix_web::test]
async fn the_content_type_is_that_of_the_first_answer() {
    let rig = Rig::start().await;
    for (n, content_type) in
        [Some("text/csv; charset=utf-8"), Some("application/problem+json"), None].into_iter().enumerate()
    {
        let headers: Vec<_> = content_type.iter().map(|value| ("content-type", value)).collect();
        let (first, replay) =
            echoed(&rig, &format!("k{n}"), json!({"status": 200, "headers": headers, "body": [1]})).await;
        assert_eq!(first.header("content-type"), content_type);
        first.assert_replayed_by(&replay);
    }
}

/// One chunk at once, another when the gate lets it go.
fn in_two_parts(gate: Data<Gate>) -> impl Stream<Item = io::Result<Bytes>> {
    let rest = stream::once(async move {
        gate.pass().await;
        Ok(Bytes::from_static(b"second"))
    });
    stream::once(async { Ok(Bytes::from_static(b"first")) }).chain(rest)
}

/// The first caller reads the first part, a retry is told that the body is not kept, and then the
/// first caller reads the rest.
async fn assert_passed_on(rig: &Rig) {
    let mut first = rig.post("/x").key("x").send().await.unwrap();
    assert_eq!(first.chunk().await.unwrap().unwrap(), "first");
    rig.gate.entered(1).await;
    assert_eq!(rig.db.state("x").await.unwrap(), "completed");
    assert!(rig.db.is("(SELECT body_omitted AND body IS NULL FROM idempotency_keys)").await);
    let head = Answer { status: first.status(), headers: first.headers().clone(), body: Vec::new() };
    assert_omitted(&head, &again(rig, "x").await);
    rig.gate.open(1);
    assert_eq!(first.chunk().await.unwrap().unwrap(), "second");
    assert_eq!(first.chunk().await.unwrap(), None);
    assert_omitted(&head, &again(rig, "x").await);
    assert_eq!(rig.gate.count(), 1, "it ran once");
}

/// R08
#[actix_web::test]
async fn an_event_stream_is_passed_on_at_once() {
    async fn handler(gate: Data<Gate>) -> HttpResponse {
        HttpResponse::Ok().content_type("text/event-stream").insert_header(("x-a", "1")).streaming(in_two_parts(gate))
    }
    let never = Duration::from_secs(3600);
    let rig = Rig::builder().policy(Policy::new().anonymous().stream_timeout(never)).handler(handler).await;
    assert_passed_on(&rig).await;
}

/// R08
#[actix_web::test]
async fn a_stream_that_takes_long_is_passed_on() {
    async fn handler(gate: Data<Gate>) -> HttpResponse {
        HttpResponse::Ok().content_type("text/csv").insert_header(("x-a", "1")).streaming(in_two_parts(gate))
    }
    let soon = Duration::from_millis(100);
    let rig = Rig::builder().policy(Policy::new().anonymous().stream_timeout(soon)).handler(handler).await;
    assert_passed_on(&rig).await;
}

/// R08
#[actix_web::test]
async fn a_stream_that_ends_in_time_is_kept() {
    async fn handler(pool: Data<PgPool>) -> Result<HttpResponse> {
        effect(&pool, "x").await?;
        let parts = ["a", "", "b", "c"].map(|part| io::Result::Ok(Bytes::from(part)));
        Ok(HttpResponse::Ok().content_type("text/csv").streaming(stream::iter(parts)))
    }
    let rig = Rig::builder().handler(handler).await;
    let (first, replay) = (again(&rig, "x").await, again(&rig, "x").await);
    assert_eq!((first.text(), replay.text()), ("abc".to_owned(), "abc".to_owned()));
    assert!(!first.is_replay() && replay.is_replay());
    assert_eq!(replay.header("content-type"), Some("text/csv"));
    assert_eq!(replay.header("idempotency-body-omitted"), None);
    assert_eq!(rig.db.effects("x").await, 1);
}

/// R08
#[actix_web::test]
async fn a_stream_that_fails_before_it_is_kept_releases_the_key() {
    static FAILED: AtomicBool = AtomicBool::new(false);
    async fn handler() -> HttpResponse {
        let second = if FAILED.swap(true, Ordering::SeqCst) { Ok("b") } else { Err(io::Error::other("secret")) };
        HttpResponse::Ok().streaming(stream::iter([Ok("a"), second]).map(|part| part.map(Bytes::from)))
    }
    let rig = Rig::builder().handler(handler).await;
    let failed = again(&rig, "x").await;
    assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "body-failed"));
    assert!(!failed.text().contains("secret"));
    assert_eq!(rig.db.state("x").await.unwrap(), "released");
    let second = again(&rig, "x").await;
    assert_eq!((second.status.as_u16(), second.text().as_str()), (200, "ab"));
    assert!(!second.is_replay());
}

/// R08
#[actix_web::test]
async fn a_body_that_panics_before_it_is_kept_releases_the_key() {
    static PANICKED: AtomicBool = AtomicBool::new(false);
    async fn handler() -> HttpResponse {
        let body = stream::once(async {
            assert!(PANICKED.swap(true, Ordering::SeqCst), "the first body panics");
            io::Result::Ok(Bytes::from("b"))
        });
        HttpResponse::Ok().streaming(body)
    }
    let rig = Rig::builder().handler(handler).await;
    let failed = again(&rig, "x").await;
    assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "body-failed"));
    let second = again(&rig, "x").await;
    assert_eq!((second.status.as_u16(), second.text().as_str()), (200, "b"));
    second.assert_replayed_by(&again(&rig, "x").await);
}

/// R08
#[actix_web::test]
async fn a_stream_that_fails_or_is_left_once_it_is_passed_on_is_not_run_again() {
    async fn handler(gate: Data<Gate>, request: HttpRequest) -> HttpResponse {
        let fails = request.headers().contains_key("x-fails");
        let rest = stream::once(async move {
            gate.pass().await;
            if fails { Err(io::Error::other("failed")) } else { Ok(Bytes::from("second")) }
        });
        let first = stream::once(async { Ok(Bytes::from("first")) });
        HttpResponse::Ok().content_type("text/event-stream").insert_header(("x-a", "1")).streaming(first.chain(rest))
    }
    let rig = Rig::builder().handler(handler).await;
    let mut fails = rig.post("/x").key("fails").header("x-fails", "1").send().await.unwrap();
    let mut left = rig.post("/x").key("left").send().await.unwrap();
    assert_eq!(fails.chunk().await.unwrap().unwrap(), "first");
    assert_eq!(left.chunk().await.unwrap().unwrap(), "first");
    let head = Answer { status: fails.status(), headers: fails.headers().clone(), body: Vec::new() };
    rig.gate.entered(2).await;
    drop(left);
    rig.gate.open(2);
    assert!(fails.chunk().await.is_err(), "the first caller sees that it was cut");
    for key in ["fails", "left"] {
        assert_omitted(&head, &again(&rig, key).await);
    }
    assert_eq!(rig.gate.count(), 2);
}

/// R09
#[actix_web::test]
async fn an_answer_above_the_limit_is_sent_whole_and_kept_without_its_body() {
    const LIMIT: usize = 64 * 1024;
    let rig = Rig::with(Policy::new().anonymous().response_limit(LIMIT)).await;
    for size in [LIMIT, LIMIT + 1, 10 * 1024 * 1024] {
        let wanted =
            json!({"status": 201, "headers": [["x-a", "1"], ["content-type", "a/b"]], "body": [7], "repeat": size});
        let (first, replay) = echoed(&rig, &format!("k{size}"), wanted).await;
        assert_eq!(first.body, vec![7; size]);
        if size > LIMIT {
            assert_omitted(&first, &replay);
        } else {
            first.assert_replayed_by(&replay);
        }
    }
    assert_eq!(rig.db.effects("echo").await, 3);
}

/// R09
#[actix_web::test]
async fn a_stream_above_the_limit_is_sent_whole_and_kept_without_its_body() {
    const LIMIT: usize = 64 * 1024;
    async fn handler(body: web::Json<(usize, bool)>) -> HttpResponse {
        let (size, sized) = *body;
        let chunks = (0..size).step_by(1000).map(move |at| Bytes::from(vec![b'x'; 1000.min(size - at)]));
        let chunks = stream::iter(chunks.map(io::Result::Ok));
        let mut response = HttpResponse::Created();
        response.content_type("a/b").insert_header(("x-a", "1"));
        if sized { response.body(SizedStream::new(size as u64, chunks)) } else { response.streaming(chunks) }
    }
    let rig = Rig::builder().policy(Policy::new().anonymous().response_limit(LIMIT)).handler(handler).await;
    for size in [LIMIT, LIMIT + 1, 10 * 1024 * 1024] {
        for sized in [false, true] {
            let post = || rig.post("/x").key(&format!("k{size}{sized}")).json(&(size, sized)).answer();
            let (first, replay) = (post().await, post().await);
            assert!(first.body.iter().all(|byte| *byte == b'x') && first.body.len() == size);
            if size > LIMIT {
                assert_omitted(&first, &replay);
            } else {
                assert!(replay.is_replay());
                assert_eq!(first.body, replay.body);
            }
        }
    }
}

/// R09
#[actix_web::test]
async fn an_omitted_body_leaves_no_encoding_behind() {
    let rig = Rig::with(Policy::new().anonymous().response_limit(1)).await;
    let headers = [("content-encoding", "gzip"), ("content-type", "a/b"), ("x-a", "1")];
    let (first, replay) = echoed(&rig, "x", json!({"status": 200, "headers": headers, "body": [1, 2]})).await;
    assert_omitted(&first, &replay);
    assert_eq!((first.header("content-encoding"), replay.header("content-encoding")), (Some("gzip"), None));
}

/// R12
#[actix_web::test]
async fn only_a_replay_is_marked() {
    let rig = Rig::start().await;
    let headers = [("idempotency-replayed", "true"), ("idempotency-body-omitted", "true")];
    let (first, replay) = echoed(&rig, "x", json!({"status": 200, "headers": headers, "body": [1]})).await;
    assert_eq!((first.header("idempotency-replayed"), first.header("idempotency-body-omitted")), (None, None));
    assert_eq!(replay.headers.get_all("idempotency-replayed").iter().count(), 1);
    assert_eq!(replay.header("idempotency-body-omitted"), None);
    first.assert_replayed_by(&replay);
    // Not on an answer that is not kept, either, and on no refusal.
    let (failed, _) = echoed(&rig, "y", json!({"status": 500, "headers": headers, "body": [1]})).await;
    let (refused, _) = echoed(&rig, "x", json!({"status": 200, "headers": headers})).await;
    assert_eq!((failed.status.as_u16(), refused.status.as_u16()), (500, 422));
    assert!(!failed.is_replay() && !refused.is_replay());
}

/// R12
#[actix_web::test]
async fn the_mark_can_have_another_name() {
    let rig = Rig::with(Policy::new().anonymous().replay_marker("X-Again")).await;
    let headers = [("x-again", "true"), ("idempotency-replayed", "no")];
    let (first, replay) = echoed(&rig, "x", json!({"status": 200, "headers": headers, "body": [1]})).await;
    assert_eq!((first.header("x-again"), replay.header("x-again")), (None, Some("true")));
    assert_eq!(replay.headers.get_all("x-again").iter().count(), 1);
    // It is a header like any other then.
    assert_eq!(replay.header("idempotency-replayed"), Some("no"));
    assert_eq!(first.body, replay.body);
}

/// R14
#[actix_web::test]
async fn what_an_outer_middleware_makes_of_the_answer_is_not_kept() {
    async fn spoils_the_first(
        request: ServiceRequest,
        next: Next<impl MessageBody + 'static>,
    ) -> Result<ServiceResponse<BoxBody>, Error> {
        static SPOILT: AtomicBool = AtomicBool::new(false);
        let response = next.call(request).await?.map_into_boxed_body();
        if SPOILT.swap(true, Ordering::SeqCst) {
            return Ok(response);
        }
        Ok(response.into_response(HttpResponse::BadGateway().body("the proxy has a bad day")))
    }
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            let inner = web::scope("").wrap(from_fn(spoils_the_first));
            let idempotency = idempotency.clone();
            config.service(inner.configure(move |config| routes(config, &idempotency)));
        })
        .await;
    let spoilt = rig.post("/orders").key("x").json(&order("x")).answer().await;
    assert_eq!((spoilt.status.as_u16(), spoilt.text().as_str()), (502, "the proxy has a bad day"));
    let retry = rig.post("/orders").key("x").json(&order("x")).answer().await;
    assert!(retry.status == 201 && retry.is_replay());
    assert_eq!(retry.header("location"), Some(format!("/orders/{}", retry.json()["id"]).as_str()));
    assert_eq!(rig.db.effects("x").await, 1);
}

/// Says what the request names, in its order, and answers with the status that it names. The body
/// tells what the handler knows.
async fn says(key: IdemKey, request: HttpRequest) -> HttpResponse {
    let named = |name: &str| request.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    for say in named("x-say").unwrap_or_default().split(' ') {
        match say {
            "keep" => key.keep(),
            "release" => key.release(),
            "keep_without_body" => key.keep_without_body(),
            _ => {}
        }
    }
    let status: StatusCode = named("x-status").unwrap_or_else(|| "201".into()).parse().unwrap();
    HttpResponse::build(status).insert_header(("x-a", "1")).json(json!({
        "key": key.key().as_str(),
        "resource": key.scope().resource(),
        "attempt": key.attempt(),
        "charge": key.derive("charge"),
        "mail": key.derive("mail"),
    }))
}

/// A POST to it.
async fn said(rig: &Rig, key: &str, body: &'static str, say: &str, status: u16) -> Answer {
    rig.post("/x").key(key).header("x-say", say).header("x-status", status.to_string()).body(body).answer().await
}

#[actix_web::test]
async fn a_handler_knows_its_key() {
    let rig = Rig::builder().handler(says).await;
    let answer = said(&rig, "\"abc\"", "", "", 201).await.json();
    assert_eq!(
        (&answer["key"], &answer["resource"], &answer["attempt"]),
        (&json!("abc"), &json!("POST /x"), &json!(1))
    );
}

#[actix_web::test]
async fn a_handler_may_keep_an_answer_that_the_policy_would_not() {
    let rig = Rig::builder().handler(says).await;
    let first = said(&rig, "x", "", "keep", 500).await;
    assert_eq!(first.status, 500);
    first.assert_replayed_by(&said(&rig, "x", "", "", 201).await);
}

#[actix_web::test]
async fn a_handler_may_release_a_key_that_the_policy_would_keep() {
    let rig = Rig::builder().policy(Policy::new().anonymous().keep(Keep::Everything)).handler(says).await;
    for attempt in 1..=3 {
        let answer = said(&rig, "x", "", "release", 201).await;
        assert_eq!((answer.status.as_u16(), answer.is_replay()), (201, false));
        assert_eq!(answer.json()["attempt"], attempt);
        assert_eq!(rig.db.state("x").await.unwrap(), "released");
    }
    // It said that nothing was done: so another request may use the key.
    let corrected = said(&rig, "x", "corrected", "", 201).await;
    assert_eq!(corrected.json()["attempt"], 1);
    corrected.assert_replayed_by(&said(&rig, "x", "corrected", "", 201).await);
}

#[actix_web::test]
async fn a_handler_may_keep_its_answer_without_the_body() {
    let rig = Rig::builder().handler(says).await;
    for status in [201, 500] {
        let key = format!("k{status}");
        let first = said(&rig, &key, "", "keep_without_body", status).await;
        assert!(first.status == status && !first.body.is_empty());
        assert_omitted(&first, &said(&rig, &key, "", "", 201).await);
    }
    assert!(rig.db.is("(SELECT every(body_omitted AND body IS NULL) FROM idempotency_keys)").await);
}

#[actix_web::test]
async fn the_last_that_a_handler_says_counts() {
    let rig = Rig::builder().handler(says).await;
    assert!(!said(&rig, "a", "", "keep release", 201).await.is_replay());
    assert!(!said(&rig, "a", "", "keep_without_body release keep", 500).await.is_replay());
    let replay = said(&rig, "a", "", "", 201).await;
    assert!(replay.is_replay() && replay.status == 500 && replay.json()["attempt"] == 2);
}

#[actix_web::test]
async fn derived_keys_are_the_same_for_every_attempt_and_differ_otherwise() {
    let rig = Rig::builder().handler(says).await;
    let derived = |answer: &Answer| (answer.json()["charge"].clone(), answer.json()["mail"].clone());
    let mut all = HashSet::new();
    let mut new = |answer: &Answer| {
        let (charge, mail) = derived(answer);
        assert!(all.insert(charge.to_string()) && all.insert(mail.to_string()), "{answer:?}");
        assert_eq!(charge.as_str().unwrap().len(), 64);
    };

    // It says each time that nothing was done, or the key would stay that of this request.
    let first = said(&rig, "x", "a", "release", 400).await;
    new(&first);
    let retried = said(&rig, "x", "a", "release", 503).await;
    assert_eq!((derived(&first), json!(2)), (derived(&retried), retried.json()["attempt"].clone()));
    // The process died.
    rig.db.run(LAPSED).await;
    let taken_over = said(&rig, "x", "a", "release", 400).await;
    assert_eq!((derived(&first), json!(3)), (derived(&taken_over), taken_over.json()["attempt"].clone()));

    let corrected = said(&rig, "x", "b", "", 201).await;
    new(&corrected);
    assert_eq!(derived(&corrected), derived(&said(&rig, "x", "b", "", 201).await));
    // Under a retention of one.
    rig.db.run(THREE_DAYS_LATER).await;
    let later = said(&rig, "x", "b", "", 201).await;
    assert!(!later.is_replay());
    assert_eq!(later.json()["attempt"], 1);
    new(&later);
    new(&said(&rig, "y", "b", "", 201).await);
}

#[actix_web::test]
async fn a_handler_that_needs_a_key_refuses_to_run_without_one() {
    async fn optional(key: Option<IdemKey>) -> String {
        format!("{:?}", key.map(|key| key.attempt()))
    }
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            config
                .service(web::resource("/x").wrap(idempotency.clone()).route(web::post().to(says)))
                .service(web::resource("/optional").wrap(idempotency.clone()).route(web::post().to(optional)))
                .service(web::resource("/bare").route(web::post().to(says)));
        })
        .await;
    let missing = rig.post("/x").answer().await;
    assert_eq!((missing.status.as_u16(), missing.code().as_str()), (400, "key-missing"));
    assert_eq!(rig.post("/optional").answer().await.text(), "None");
    assert_eq!(rig.post("/optional").key("x").answer().await.text(), "Some(1)");
    let bare = rig.post("/bare").key("x").answer().await;
    assert_eq!((bare.status.as_u16(), bare.code().as_str()), (500, "misconfigured"));
}
