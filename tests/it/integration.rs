//! The middleware among what else there is in actix: extractors, wraps, other middleware, bad input.

use std::{collections::HashMap, io::Read, panic::catch_unwind, time::Duration};

use actix_idempotency::{IdemKey, Idempotency, OnOutstanding, PgPool, Policy};
use actix_multipart::Multipart;
use actix_web::{
    App, Either, Error, HttpResponse, HttpServer, Result,
    body::MessageBody,
    dev::{ServiceRequest, ServiceResponse},
    http::{Method, header},
    middleware::{Compress, Logger, Next, NormalizePath, from_fn},
    post,
    rt::spawn,
    web::{self, Bytes, Data, Form, FormConfig, Json, JsonConfig, Payload, PayloadConfig, ServiceConfig},
};
use flate2::read::GzDecoder;
use futures_util::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};

use crate::support::{
    PATIENCE,
    app::{created, effect, order, routes},
    client::{Answer, Raw, RequestExt, client, post},
    db::Db,
    eventually,
    gate::Gate,
    log,
    rig::{Rig, Server},
};

/// What a client sends beside its key.
type Sent<'a> = (&'a str, Vec<u8>);

mod reads {
    //! Every way of reading a body; each answers with what it has read.

    use super::*;

    pub async fn json(value: Json<Value>) -> String {
        value.to_string()
    }

    pub async fn form(form: Form<HashMap<String, String>>) -> String {
        let mut pairs: Vec<_> = form.iter().collect();
        pairs.sort();
        format!("{pairs:?}")
    }

    pub async fn bytes(bytes: Bytes) -> Bytes {
        bytes
    }

    pub async fn string(text: String) -> String {
        text
    }

    pub async fn payload(payload: Payload) -> Result<Bytes> {
        let mut body = web::BytesMut::new();
        let mut payload = payload;
        while let Some(chunk) = payload.next().await {
            body.extend_from_slice(&chunk?);
        }
        Ok(body.freeze())
    }

    pub async fn multipart(mut form: Multipart) -> Result<String> {
        let mut read = String::new();
        while let Some(mut field) = form.try_next().await? {
            let name = field.name().unwrap_or_default().to_owned();
            let mut length = 0;
            while let Some(chunk) = field.try_next().await? {
                length += chunk.len();
            }
            read += &format!("{name}: {length} bytes\n");
        }
        Ok(read)
    }

    pub async fn either(body: Either<Json<Value>, Bytes>) -> String {
        match body {
            Either::Left(json) => format!("json {json}"),
            Either::Right(bytes) => format!("bytes {}", bytes.len()),
        }
    }
}

fn readers(config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool) {
    const LIMIT: usize = 200_000;
    config.service(
        web::scope("")
            .wrap(idempotency.clone())
            .app_data(JsonConfig::default().limit(LIMIT))
            .app_data(FormConfig::default().limit(LIMIT))
            .app_data(PayloadConfig::new(LIMIT))
            .route("/json", web::post().to(reads::json))
            .route("/form", web::post().to(reads::form))
            .route("/bytes", web::post().to(reads::bytes))
            .route("/string", web::post().to(reads::string))
            .route("/payload", web::post().to(reads::payload))
            .route("/multipart", web::post().to(reads::multipart))
            .route("/either", web::post().to(reads::either)),
    );
}

fn multipart(size: usize) -> Vec<u8> {
    let file = "x".repeat(size);
    format!(
        "--b\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n1\r\n\
         --b\r\ncontent-disposition: form-data; name=\"f\"; filename=\"f\"\r\n\r\n{file}\r\n--b--\r\n"
    )
    .into_bytes()
}

/// A01
#[actix_web::test]
async fn every_extractor_finds_the_body_as_it_came() {
    let rig = Rig::builder().serve(readers).await;
    let large = "x".repeat(100 * 1024);
    let bodies: Vec<(&str, Sent<'_>)> = vec![
        ("json", ("application/json", b"".to_vec())),
        ("json", ("application/json", b"1".to_vec())),
        ("json", ("application/json", b"{\"a\": [1, 2.50, \"\\u00e9\"]}".to_vec())),
        ("json", ("application/json", b"{\"a\": ".to_vec())),
        ("json", ("application/json", format!("\"{large}\"").into_bytes())),
        ("json", ("text/plain", b"1".to_vec())),
        ("form", ("application/x-www-form-urlencoded", b"".to_vec())),
        ("form", ("application/x-www-form-urlencoded", b"a".to_vec())),
        ("form", ("application/x-www-form-urlencoded", b"a=1&b=%20+%C3%A9".to_vec())),
        ("form", ("application/x-www-form-urlencoded", format!("a={large}").into_bytes())),
        ("bytes", ("application/octet-stream", b"".to_vec())),
        ("bytes", ("application/octet-stream", b"\0".to_vec())),
        ("bytes", ("application/octet-stream", large.clone().into_bytes())),
        ("bytes", ("application/octet-stream", vec![0; 200_001])),
        ("string", ("text/plain; charset=iso-8859-1", b"".to_vec())),
        ("string", ("text/plain; charset=iso-8859-1", b"\xe9".to_vec())),
        ("string", ("text/plain", b"\xff".to_vec())),
        ("string", ("text/plain", large.clone().into_bytes())),
        ("payload", ("application/octet-stream", b"".to_vec())),
        ("payload", ("application/octet-stream", b"\0".to_vec())),
        ("payload", ("application/octet-stream", large.clone().into_bytes())),
        ("multipart", ("multipart/form-data; boundary=b", b"".to_vec())),
        ("multipart", ("multipart/form-data; boundary=b", multipart(0))),
        ("multipart", ("multipart/form-data; boundary=b", multipart(100 * 1024))),
        ("multipart", ("multipart/form-data; boundary=other", multipart(1))),
        ("multipart", ("multipart/form-data", multipart(1))),
        ("either", ("application/json", b"{\"a\": 1}".to_vec())),
        ("either", ("application/json", b"{\"a\": ".to_vec())),
        ("either", ("application/octet-stream", b"1".to_vec())),
    ];
    for (n, (reader, (content_type, body))) in bodies.into_iter().enumerate() {
        let (path, whole, in_bits) = (format!("/{reader}"), format!("{n}-whole"), format!("{n}-in-bits"));
        let post = |key: Option<&str>| {
            let request = rig.post(&path).header("content-type", content_type).body(body.clone());
            key.into_iter().fold(request, RequestExt::key).answer()
        };
        // Without a key nothing is read by the middleware.
        let untouched = post(None).await;
        for (key, protected) in [
            (&whole, post(Some(&whole)).await),
            (&in_bits, send_in_bits(&rig, &path, content_type, &in_bits, &body).await),
        ] {
            let told = |answer: &Answer| (answer.status, String::from_utf8_lossy(&answer.body).into_owned());
            assert_eq!(told(&protected), told(&untouched), "{path} {key}");
            assert_eq!(protected.headers.get("content-type"), untouched.headers.get("content-type"), "{path} {key}");
            if protected.status == 200 {
                protected.assert_replayed_by(&post(Some(key)).await);
            }
        }
    }
}

/// One byte to a chunk.
async fn send_in_bits(rig: &Rig, path: &str, content_type: &str, key: &str, body: &[u8]) -> Answer {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\nidempotency-key: {key}\r\ncontent-type: {content_type}\r\n\
         transfer-encoding: chunked\r\n\r\n"
    );
    let mut request = head.into_bytes();
    body.iter().for_each(|byte| request.extend([b'1', b'\r', b'\n', *byte, b'\r', b'\n']));
    request.extend(b"0\r\n\r\n");
    let mut raw = rig.raw().await;
    // Whoever refuses it may not have read all of it.
    let _ = raw.send(request).await;
    raw.answer().await
}

/// A01
#[actix_web::test]
async fn trailers_change_nothing() {
    let rig = Rig::builder().serve(readers).await;
    let chunked = |key: &str, trailers: &str| {
        format!(
            "POST /bytes HTTP/1.1\r\nhost: test\r\n{key}transfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n{trailers}\r\n"
        )
    };
    let mut answers = Vec::new();
    for key in ["", "idempotency-key: x\r\n"] {
        let mut raw = rig.raw().await;
        raw.send(chunked(key, "x-trailer: 1\r\n")).await.unwrap();
        let answer = raw.answer().await;
        answers.push((answer.status.as_u16(), answer.text()));
    }
    assert_eq!(answers[0], (200, "ab".into()));
    assert_eq!(answers[0], answers[1]);
}

/// A01
#[actix_web::test]
async fn the_connection_goes_on_after_every_kind_of_answer() {
    let rig = Rig::start().await;
    let mut raw = rig.raw().await;
    let body = order("x").to_string();
    // A first answer, a replay, another request, a bad key, and a first answer again.
    for (key, body, status) in
        [("a", &*body, 201), ("a", &body, 201), ("a", "{}", 422), ("\"a", &body, 400), ("b", &body, 201)]
    {
        raw.send(post("/orders", key, body)).await.unwrap();
        let answer = raw.answer().await;
        assert_eq!(answer.status, status);
        if answer.header("connection") == Some("close") {
            raw = rig.raw().await;
        }
    }
    // Two at once, answered in their order.
    raw.send(post("/orders", "a", &body) + &post("/orders", "c", &body)).await.unwrap();
    assert!(raw.answer().await.is_replay());
    assert!(!raw.answer().await.is_replay());
    assert_eq!(rig.db.effects("x").await, 3);
}

/// A01
#[actix_web::test]
async fn a_client_that_expects_100_continue_is_told_to_go_on() {
    let rig = Rig::start().await;
    let body = order("x").to_string();
    let request = post("/orders", "x", &body).replacen("\r\n", "\r\nexpect: 100-continue\r\n", 1);
    let (head, _) = request.split_at(request.len() - body.len());
    let mut raw = rig.raw().await;
    for replayed in [false, true] {
        raw.send(head).await.unwrap();
        assert_eq!(raw.head().await, "HTTP/1.1 100 Continue\r\n\r\n");
        raw.send(&body).await.unwrap();
        let answer = raw.answer().await;
        assert_eq!((answer.status.as_u16(), answer.is_replay()), (201, replayed));
    }
}

/// Under a wrap on a resource, a scope and a route.
#[actix_web::test]
async fn it_wraps_resources_scopes_and_routes() {
    async fn handler(pool: Data<PgPool>, id: web::Path<String>) -> Result<HttpResponse> {
        Ok(created(effect(&pool, &id).await?))
    }
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            config
                .service(web::resource("/resource/{id}").wrap(idempotency.clone()).route(web::post().to(handler)))
                .service(web::scope("/scope").wrap(idempotency.clone()).route("/{id}", web::post().to(handler)))
                .route("/route/{id}", web::post().to(handler).wrap(idempotency.clone()));
        })
        .await;
    for place in ["resource", "scope", "route"] {
        let post = |id: &str| rig.post(&format!("/{place}/{id}")).key("x").answer();
        let first = post("1").await;
        assert_eq!(first.status, 201, "{place}");
        first.assert_replayed_by(&post("1").await);
        // The resource is the pattern, so that this is the same key with another request.
        assert_eq!(post("2").await.code(), "key-reused", "{place}");
    }
    let resources = "SELECT string_agg(resource, ', ' ORDER BY resource) AS value FROM idempotency_keys";
    assert_eq!(rig.db.text(resources).await.unwrap(), "POST /resource/{id}, POST /route/{id}, POST /scope/{id}");
}

/// A server whose `App` the test makes itself.
macro_rules! serve {
    ($app:expr) => {{
        let server = HttpServer::new(move || $app)
            .workers(2)
            .client_request_timeout(PATIENCE)
            .disable_signals()
            .bind(("127.0.0.1", 0))
            .unwrap();
        let address = server.addrs()[0];
        let running = server.run();
        let handle = running.handle();
        spawn(running);
        Server { address, handle }
    }};
}

#[actix_web::test]
async fn it_wraps_a_whole_app_inside_of_other_middleware() {
    async fn handler(pool: Data<PgPool>, id: web::Path<String>) -> Result<HttpResponse> {
        Ok(created(effect(&pool, &id).await?))
    }
    let db = Db::new().await;
    let pool = db.pool(5);
    let idempotency = Idempotency::postgres(pool.clone()).with(Policy::new().anonymous());
    let server = serve!(
        App::new()
            .app_data(Data::new(pool.clone()))
            .wrap(idempotency.clone())
            .wrap(NormalizePath::trim())
            .wrap(Compress::default())
            .wrap(Logger::default())
            .route("/orders/{id}", web::post().to(handler))
    );
    let post = |path: &str| client().post(server.url(path)).key("x").answer();
    let first = post("/orders/1").await;
    assert_eq!(first.status, 201);
    first.assert_replayed_by(&post("/orders/1").await);
    first.assert_replayed_by(&post("/orders/1/").await);
    assert_eq!(post("/orders/2").await.code(), "key-reused");
    assert_eq!(post("/nowhere").await.status, 404);
    assert_eq!(db.all_effects().await, 1);
}

#[post("/attribute", wrap = "Idempotency::from_app_data()")]
async fn attribute(pool: Data<PgPool>, key: Option<IdemKey>) -> Result<HttpResponse> {
    let id = effect(&pool, "attribute").await?;
    Ok(HttpResponse::Created().body(format!("{id} {}", key.is_some())))
}

#[post("/required", wrap = "Idempotency::from_app_data().with(Policy::new().anonymous().require_key())")]
async fn required(pool: Data<PgPool>) -> Result<HttpResponse> {
    Ok(created(effect(&pool, "required").await?))
}

#[actix_web::test]
async fn a_route_attribute_finds_the_engine_and_its_policy_in_the_app_data() {
    let policy = Policy::new().anonymous().replay_marker("x-again");
    let rig = Rig::builder()
        .policy(policy)
        .serve(|config, idempotency, _| {
            config.app_data(Data::new(idempotency.clone())).service(attribute).service(required);
        })
        .await;
    let first = rig.post("/attribute").key("x").answer().await;
    assert_eq!((first.status.as_u16(), first.text().ends_with(" true")), (201, true));
    let replay = rig.post("/attribute").key("x").answer().await;
    assert_eq!((replay.header("x-again"), replay.text()), (Some("true"), first.text()));
    assert_eq!(rig.post("/attribute").answer().await.status, 201);
    // A policy of its own.
    assert_eq!(rig.post("/required").answer().await.code(), "key-missing");
    let first = rig.post("/required").key("x").answer().await;
    first.assert_replayed_by(&rig.post("/required").key("x").answer().await);
}

#[actix_web::test]
async fn a_route_attribute_without_an_engine_runs_nothing_and_says_what_is_missing() {
    log::listen();
    let rig = Rig::builder()
        .serve(|config, _, _| {
            config.service(attribute);
        })
        .await;
    for key in [Some("x"), None] {
        let refused = key.into_iter().fold(rig.post("/attribute"), RequestExt::key).answer().await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (500, "misconfigured"));
    }
    assert_eq!((rig.db.all_effects().await, rig.db.keys().await), (0, 0));
    let advice = ".app_data(web::Data::new(Idempotency::postgres(pool)))";
    assert!(log::all().iter().any(|line| line.get("message").is_some_and(|message| message.contains(advice))));
}

#[actix_web::test]
async fn of_two_wraps_around_one_route_the_inner_one_passes() {
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            // It would refuse what it sees, if it looked.
            let inner = idempotency.with(Policy::new().refuse_anonymous().require_key());
            let outer = web::scope("").wrap(idempotency.clone());
            config.service(outer.configure(move |config| routes(config, &inner)));
        })
        .await;
    let post = || rig.post("/orders").key("x").json(&order("x")).answer();
    let first = post().await;
    assert_eq!(first.status, 201);
    first.assert_replayed_by(&post().await);
    assert_eq!((rig.db.effects("x").await, rig.db.keys().await), (1, 1));
}

#[actix_web::test]
async fn what_the_outer_wrap_leaves_alone_the_inner_one_protects() {
    let skips = Policy::new().anonymous().skip(|request| request.headers().contains_key("x-skip"));
    let rig = Rig::builder()
        .policy(skips)
        .serve(|config, idempotency, _| {
            let inner = idempotency.with(Policy::new().anonymous().replay_marker("x-inner"));
            let outer = web::scope("").wrap(idempotency.clone());
            config.service(outer.configure(move |config| routes(config, &inner)));
        })
        .await;
    let post = || rig.post("/orders").key("x").header("x-skip", "1").json(&order("x")).answer();
    let (first, replay) = (post().await, post().await);
    assert_eq!((replay.header("x-inner"), &replay.body), (Some("true"), &first.body));
}

#[actix_web::test]
async fn a_request_that_the_policy_skips_passes_as_if_nothing_were_there() {
    let skips = Policy::new().anonymous().require_key().skip(|request| request.query_string() == "skip");
    let rig = Rig::with(skips).await;
    for key in ["x", "x", "\"unreadable"] {
        let answer = rig.post("/orders?skip").key(key).json(&order("skipped")).answer().await;
        assert!(answer.status == 201 && !answer.is_replay());
    }
    assert_eq!(rig.post("/orders?skip").json(&order("skipped")).answer().await.status, 201);
    assert_eq!((rig.db.effects("skipped").await, rig.db.keys().await), (4, 0));
    assert_eq!(rig.post("/orders").json(&order("x")).answer().await.code(), "key-missing");
}

#[actix_web::test]
async fn each_route_can_have_a_policy_of_its_own_on_one_engine() {
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            let strict = idempotency.with(Policy::new().anonymous().require_key().request_limit(10));
            config
                .service(web::resource("/strict").wrap(strict).route(web::post().to(reads::bytes)))
                .service(web::resource("/lax").wrap(idempotency.clone()).route(web::post().to(reads::bytes)));
        })
        .await;
    assert_eq!(rig.post("/strict").answer().await.code(), "key-missing");
    assert_eq!(rig.post("/lax").answer().await.status, 200);
    assert_eq!(rig.post("/strict").key("x").body("01234567890").answer().await.code(), "body-too-large");
    assert_eq!(rig.post("/lax").key("x").body("01234567890").answer().await.status, 200);
}

/// A body in two parts, of which the second waits for the gate.
fn upload(size: usize, gate: &Gate) -> reqwest::Body {
    let gate = gate.clone();
    let half = move || Ok::<_, std::io::Error>(vec![b'x'; size / 2]);
    let rest = stream::once(async move {
        gate.pass().await;
        half()
    });
    reqwest::Body::wrap_stream(stream::iter([half()]).chain(rest))
}

#[actix_web::test]
async fn an_upload_streams_through_where_the_policy_says_so() {
    const SIZE: usize = 4 * 1024 * 1024;
    async fn handler(pool: Data<PgPool>, mut payload: Payload) -> Result<HttpResponse> {
        effect(&pool, "began").await?;
        let mut size = 0;
        while let Some(chunk) = payload.next().await {
            size += chunk?.len();
        }
        effect(&pool, "done").await?;
        Ok(HttpResponse::Created().body(size.to_string()))
    }
    let policy = Policy::new().anonymous().stream_body().request_limit(1000).body_timeout(Duration::from_millis(1));
    let rig = Rig::builder().policy(policy).handler(handler).await;
    let sending = Gate::new();
    let first = spawn(rig.post("/x").key("x").body(upload(SIZE, &sending)).answer());
    sending.entered(1).await;
    // The handler runs before the body is all there.
    eventually("it runs", async || rig.db.effects("began").await == 1).await;
    assert_eq!(rig.post("/x").key("x").body("").answer().await.code(), "outstanding");
    sending.open(1);
    let first = first.await.unwrap();
    assert_eq!((first.status.as_u16(), first.text()), (201, SIZE.to_string()));
    // Neither the body nor its size tells requests apart.
    first.assert_replayed_by(&rig.post("/x").key("x").body("other").answer().await);
    assert_eq!(rig.post("/x?other").key("x").answer().await.code(), "key-reused");
    assert_eq!((rig.db.effects("began").await, rig.db.effects("done").await), (1, 1));
}

#[actix_web::test]
async fn an_upload_that_is_cut_off_releases_its_key() {
    let rig = Rig::builder().policy(Policy::new().anonymous().stream_body()).handler(reads::bytes).await;
    let mut raw = rig.raw().await;
    raw.send("POST /x HTTP/1.1\r\nhost: test\r\nidempotency-key: x\r\ncontent-length: 10\r\n\r\n01234").await.unwrap();
    eventually("it runs", async || rig.db.state("x").await.is_some_and(|state| state == "outstanding")).await;
    raw.finish().await;
    eventually("it is released", async || rig.db.state("x").await.is_some_and(|state| state == "released")).await;
    let retry = rig.post("/x").key("x").body("0123456789").answer().await;
    assert_eq!((retry.status.as_u16(), retry.text().as_str()), (200, "0123456789"));
}

/// As CORS does: a header for every answer, and none for an error that it is handed instead.
async fn adds_a_header(
    request: ServiceRequest,
    next: Next<impl MessageBody>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let mut response = next.call(request).await?;
    response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, header::HeaderValue::from_static("*"));
    Ok(response)
}

#[actix_web::test]
async fn refusals_are_answers_to_the_middleware_outside() {
    let limits = Policy::new().anonymous().require_key().request_limit(1000).body_timeout(Duration::from_millis(200));
    let rig = Rig::builder()
        .policy(limits.documentation("https://example.com/keys"))
        .serve(|config, idempotency, _| {
            let idempotency = idempotency.clone();
            let outside = web::scope("").wrap(from_fn(adds_a_header));
            config.service(outside.configure(move |config| routes(config, &idempotency)));
        })
        .await;
    let check = |answer: Answer, code: &str| {
        assert_eq!(answer.code(), code);
        assert_eq!(answer.header("access-control-allow-origin"), Some("*"), "{code}");
        assert_eq!(answer.json()["type"], "https://example.com/keys", "{code}");
        let link = "<https://example.com/keys>; rel=\"describedby\"; type=\"text/html\"";
        assert_eq!(answer.header("link"), Some(link), "{code}");
        assert_eq!((answer.header("cache-control"), answer.header("content-language")), (Some("no-store"), Some("en")));
    };
    check(rig.post("/orders").json(&order("x")).answer().await, "key-missing");
    check(rig.post("/orders").key(",").json(&order("x")).answer().await, "key-invalid");
    check(rig.post("/orders").key("x").body("x".repeat(1001)).answer().await, "body-too-large");
    check(unfinished(&rig, "content-length: 10", "01234").await.answer().await, "body-timeout");
    let held = spawn(rig.post("/held").key("x").body("a").answer());
    rig.gate.entered(1).await;
    check(rig.post("/held").key("x").body("a").answer().await, "outstanding");
    check(rig.post("/held").key("x").body("b").answer().await, "key-reused");
    rig.gate.open(1);
    held.await.unwrap();
    rig.db.run("DROP TABLE idempotency_keys CASCADE").await;
    check(rig.post("/held").key("x").body("a").answer().await, "store-unavailable");
}

/// A request whose body is not all there.
async fn unfinished(rig: &Rig, head: &str, body: &str) -> Raw {
    let mut raw = rig.raw().await;
    let head = format!("POST /orders HTTP/1.1\r\nhost: test\r\nidempotency-key: x\r\n{head}\r\n\r\n{body}");
    raw.send(head).await.unwrap();
    raw
}

#[actix_web::test]
async fn a_body_that_is_cut_off_is_refused_and_nothing_is_claimed() {
    let rig = Rig::start().await;
    for (head, body) in [
        ("content-length: 10", "{\"sku\""),
        ("content-length: 1", ""),
        ("transfer-encoding: chunked", "5\r\n{\"sku"),
        ("transfer-encoding: chunked", "5\r\n{\"sku\r\n"),
        ("transfer-encoding: chunked", ""),
    ] {
        let mut raw = unfinished(&rig, head, body).await;
        raw.finish().await;
        let refused = raw.answer().await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (400, "body-truncated"), "{head}: {body:?}");
    }
    // Not what a chunk looks like.
    let mut raw = unfinished(&rig, "transfer-encoding: chunked", "no\r\n").await;
    assert_eq!(raw.answer().await.status, 400);
    assert_eq!((rig.db.keys().await, rig.db.all_effects().await), (0, 0));
}

#[actix_web::test]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let rig = Rig::with(Policy::new().anonymous().body_timeout(Duration::from_millis(200))).await;
    for (head, body) in [
        ("content-length: 10", "{\"sku\""),
        ("content-length: 10", ""),
        ("transfer-encoding: chunked", "5\r\n{\"sku"),
        ("transfer-encoding: chunked", "5\r\n{\"sku\r\n"),
    ] {
        let mut raw = unfinished(&rig, head, body).await;
        let refused = raw.answer().await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (408, "body-timeout"), "{head}: {body:?}");
    }
    assert_eq!((rig.db.keys().await, rig.db.all_effects().await), (0, 0));
}

#[actix_web::test]
async fn half_a_body_holds_neither_a_connection_nor_a_key() {
    let rig = Rig::builder().pool_size(1).start().await;
    let mut halves = Vec::new();
    for _ in 0..10 {
        halves.push(unfinished(&rig, "content-length: 100", "{\"sku\"").await);
    }
    assert_eq!(rig.post("/orders").key("x").json(&order("x")).answer().await.status, 201);
    halves.into_iter().for_each(Raw::reset);
    assert_eq!(rig.post("/orders").key("y").json(&order("x")).answer().await.status, 201);
    assert_eq!(rig.db.keys().await, 2);
}

#[actix_web::test]
async fn a_length_that_lies_claims_nothing() {
    let rig = Rig::start().await;
    for (head, body) in [
        ("content-length: -1", "{}"),
        ("content-length: 1e3", "{}"),
        ("content-length: 2, 2", "{}"),
        ("content-length: 2\r\ncontent-length: 3", "{}"),
        ("content-length: 99999999999999999999", "{}"),
        ("content-length: 2\r\ntransfer-encoding: chunked", "2\r\n{}\r\n0\r\n\r\n"),
        ("transfer-encoding: gzip", "{}"),
    ] {
        let mut raw = unfinished(&rig, head, body).await;
        let answer = raw.head().await;
        assert!(answer.starts_with("HTTP/1.1 4"), "{head}: {answer}");
    }
    assert_eq!(rig.db.all_effects().await, 0);
    // Shorter than the body: the rest is the next request, and none that can be read.
    let mut raw = rig.raw().await;
    raw.send(post("/orders", "y", &order("x").to_string()) + "{\"sku\": \"y\"}\r\n\r\n").await.unwrap();
    assert_eq!(raw.answer().await.status, 201);
    assert!(raw.head().await.starts_with("HTTP/1.1 400"));
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn what_is_compressed_outside_is_kept_as_it_was() {
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            let idempotency = idempotency.clone();
            let outside = web::scope("").wrap(Compress::default());
            config.service(outside.configure(move |config| routes(config, &idempotency)));
        })
        .await;
    let body = "compressible ".repeat(100);
    let wanted = json!({"status": 200, "headers": [["content-type", "text/plain"]], "body": body.as_bytes()});
    let post = async |key: &str, encoding: &str| {
        let answer = rig.post("/echo").key(key).header("accept-encoding", encoding).json(&wanted).answer().await;
        let encoded = answer.header("content-encoding").map(str::to_owned);
        let mut text = String::new();
        match encoded.as_deref() {
            Some("gzip") => GzDecoder::new(&answer.body[..]).read_to_string(&mut text).map(drop).unwrap(),
            None => text = answer.text(),
            Some(other) => panic!("{other}"),
        }
        (encoded, text, answer.is_replay())
    };
    let (gzip, plain) = (Some("gzip".to_owned()), None);
    for (key, one, other) in
        [("a", ("gzip", &gzip), ("identity", &plain)), ("b", ("identity", &plain), ("gzip", &gzip))]
    {
        assert_eq!(post(key, one.0).await, (one.1.clone(), body.clone(), false));
        assert_eq!(post(key, other.0).await, (other.1.clone(), body.clone(), true));
        assert_eq!(post(key, one.0).await, (one.1.clone(), body.clone(), true));
    }
    let stored = rig.db.text("SELECT convert_from(body, 'UTF8') AS value FROM idempotency_keys LIMIT 1").await;
    assert_eq!(stored.unwrap(), body);
}

#[test]
fn a_bad_setting_fails_when_it_is_made_and_names_itself() {
    type Setting = (&'static str, fn() -> Policy);
    const ZERO: Duration = Duration::ZERO;
    let bad: [Setting; 17] = [
        ("methods", || Policy::new().methods([Method::POST, Method::GET])),
        ("methods", || Policy::new().methods([])),
        ("resource", || Policy::new().resource("")),
        ("resource", || Policy::new().resource("x".repeat(256))),
        ("fingerprint_header", || Policy::new().fingerprint_header("a b")),
        ("never_store_header", || Policy::new().never_store_header("")),
        ("replay_marker", || Policy::new().replay_marker("\u{e9}")),
        ("documentation", || Policy::new().documentation("https://example.com/>; rel=\"next\"")),
        ("retention", || Policy::new().retention(ZERO)),
        ("retention", || Policy::new().retention(Duration::MAX)),
        ("lease", || Policy::new().lease(Duration::from_millis(99))),
        ("max_run", || Policy::new().max_run(ZERO)),
        ("body_timeout", || Policy::new().body_timeout(ZERO)),
        ("stream_timeout", || Policy::new().stream_timeout(ZERO)),
        ("store_timeout", || Policy::new().store_timeout(ZERO)),
        ("on_outstanding", || Policy::new().on_outstanding(OnOutstanding::Wait(ZERO))),
        ("response_limit", || Policy::new().response_limit(usize::MAX)),
    ];
    for (setting, make) in bad {
        let panic = catch_unwind(make).expect_err(setting);
        let message = panic.downcast_ref::<String>().cloned().or(panic.downcast_ref::<&str>().map(|&text| text.into()));
        let message: String = message.unwrap();
        assert!(message.starts_with(&format!("Policy::{setting}: ")), "{message}");
    }
}
