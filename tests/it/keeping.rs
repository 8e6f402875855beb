//! What of an answer is kept, and what never is.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use actix_idempotency::{Code, IdemKey, IdemTx, Idempotency, Keep, OnFailure, Policy, Refusal, ResponseSnapshot};
use actix_web::{
    HttpRequest, HttpResponse, Result,
    rt::spawn,
    web::{self, Bytes, Data, ServiceConfig},
};
use futures_util::{StreamExt, stream};

use crate::support::{
    app::{effect, effect_in},
    client::RequestExt,
    eventually,
    gate::Gate,
    rig::Rig,
};

/// Twice would show.
fn closing(snapshot: ResponseSnapshot) -> ResponseSnapshot {
    match snapshot.body() {
        Some(body) => {
            let sealed = [&body[..], b"."].concat();
            snapshot.with_body(sealed)
        }
        None => snapshot,
    }
}

async fn plain() -> HttpResponse {
    HttpResponse::Created().body("x")
}

async fn in_transaction(mut tx: IdemTx) -> Result<HttpResponse> {
    effect_in(&mut tx, "x").await?;
    Ok(HttpResponse::Created().body("x"))
}

async fn rejected(_: IdemTx) -> HttpResponse {
    HttpResponse::NotFound().body("x")
}

fn routes(config: &mut ServiceConfig, idempotency: &Idempotency) {
    config.service(
        web::scope("")
            .wrap(idempotency.clone())
            .route("/plain", web::post().to(plain))
            .route("/in-transaction", web::post().to(in_transaction))
            .route("/rejected", web::post().to(rejected))
            .route("/complete-in", web::post().to(complete_in)),
    );
}

async fn complete_in(key: IdemKey, pool: Data<actix_idempotency::PgPool>) -> Result<ResponseSnapshot, Refusal> {
    let mut conn = pool.get().await?;
    let answer = ResponseSnapshot::new(actix_web::http::StatusCode::CREATED).with_body("x");
    key.complete_in(&mut conn, answer.clone()).await?;
    Ok(answer)
}

#[actix_web::test]
async fn what_is_changed_before_it_is_stored_is_changed_once() {
    let policy = Policy::new().anonymous().redact(closing).keep(Keep::Everything);
    for (policy, paths) in [
        (policy.clone(), &["/plain", "/in-transaction", "/rejected", "/complete-in"][..]),
        (policy.atomic(), &["/plain", "/in-transaction", "/rejected"]),
    ] {
        let rig = Rig::builder().policy(policy).serve(|config, idempotency, _| routes(config, idempotency)).await;
        for path in paths {
            assert_eq!(rig.post(path).key("a").answer().await.text(), "x", "{path}");
            assert_eq!(rig.post(path).key("a").answer().await.text(), "x.", "{path}");
        }
    }
}

/// Says that it may go well another time, and that its answer is to be kept where it is asked to.
async fn busy(request: HttpRequest, key: IdemKey, pool: Data<actix_idempotency::PgPool>) -> Result<HttpResponse> {
    effect(&pool, "busy").await?;
    if request.headers().contains_key("x-keep") {
        key.keep();
    }
    Err(Refusal::from(Code::Serialization).into())
}

#[actix_web::test]
async fn what_says_that_a_retry_may_go_well_is_never_kept() {
    let policy = Policy::new().anonymous();
    for policy in [
        policy.clone().keep(Keep::Everything),
        policy.clone().keep(Keep::when(|_| true)),
        policy.clone().on_failure(OnFailure::Store),
        policy,
    ] {
        let rig = Rig::builder().policy(policy).handler(busy).await;
        for n in 1..=3 {
            let answer = rig.post("/x").key("a").header("x-keep", "1").answer().await;
            assert_eq!((answer.status.as_u16(), answer.code().as_str()), (409, "serialization"));
            assert!(!answer.is_replay());
            assert_eq!(rig.db.effects("busy").await, n);
        }
    }
}

#[actix_web::test]
async fn a_closure_of_the_policy_that_panics_costs_what_a_panic_of_the_handler_costs() {
    async fn work(pool: Data<actix_idempotency::PgPool>) -> Result<HttpResponse> {
        effect(&pool, "work").await?;
        Ok(HttpResponse::Created().body("done"))
    }
    let policy = Policy::new().anonymous();
    let panics: [fn(Policy) -> Policy; 2] =
        [|policy| policy.redact(|_| panic!("as asked")), |policy| policy.keep(Keep::when(|_| panic!("as asked")))];
    for panicking in panics {
        let rig = Rig::builder().policy(panicking(policy.clone())).handler(work).await;
        let panicked = rig.post("/x").key("a").body("1").answer().await;
        assert_eq!((panicked.status.as_u16(), panicked.code().as_str()), (500, "handler-panicked"));
        // The handler has done its work: nobody else may have the key.
        assert_eq!(rig.post("/x").key("a").body("2").answer().await.code(), "key-reused");
        assert_eq!(rig.db.state("a").await.as_deref(), Some("released"));

        let holding = panicking(policy.clone()).on_failure(OnFailure::HoldRetention);
        let rig = Rig::builder().policy(holding).handler(work).await;
        assert_eq!(rig.post("/x").key("a").answer().await.status, 500);
        assert_eq!(rig.post("/x").key("a").answer().await.code(), "held");
        assert_eq!(rig.db.effects("work").await, 1);
    }
    // What stores failures stores this one too, and says nothing of a key that is free.
    let rig =
        Rig::builder().policy(policy.on_failure(OnFailure::Store).redact(|_| panic!("as asked"))).handler(work).await;
    let first = rig.post("/x").key("a").answer().await;
    assert_eq!(first.code(), "handler-panicked");
    let again = rig.post("/x").key("a").answer().await;
    assert!(
        again.is_replay() && again.code() == "handler-panicked" && !again.text().contains("retry"),
        "{}",
        again.text()
    );
    assert_eq!(rig.db.effects("work").await, 1);
}

/// One part at once, and the next when the gate is open.
async fn parts(request: HttpRequest, gate: Data<Gate>) -> HttpResponse {
    let media_type = request.headers().get("x-type").unwrap().to_str().unwrap().to_owned();
    let rest = stream::once(async move {
        gate.pass().await;
        Ok::<_, actix_web::Error>(Bytes::from_static(b"two\n"))
    });
    let parts = stream::iter([Ok(Bytes::from_static(b"one\n"))]).chain(rest);
    HttpResponse::Ok().content_type(media_type).streaming(Box::pin(parts))
}

#[actix_web::test]
async fn the_first_part_of_an_event_stream_does_not_wait_for_the_second() {
    // Whoever waited for the deadline would wait for longer than a test may take.
    let policy = Policy::new().anonymous().stream_timeout(Duration::from_secs(3600)).event_stream("application/vnd.x");
    let rig = Rig::builder().policy(policy).handler(parts).await;
    for media_type in [
        "text/event-stream",
        "application/x-ndjson",
        "application/jsonl; charset=utf-8",
        "Application/JSON-seq",
        "multipart/x-mixed-replace; boundary=b",
        "application/vnd.x",
    ] {
        let key = media_type.replace([' ', ';', '=', '/'], "-");
        let response = rig.post("/x").key(&key).header("x-type", media_type).send().await.unwrap();
        let mut parts = response.bytes_stream();
        assert_eq!(parts.next().await.unwrap().unwrap(), "one\n", "{media_type}");
        // It was marked as omitted before it left.
        let retry = rig.post("/x").key(&key).header("x-type", media_type).answer().await;
        assert_eq!(retry.header("idempotency-body-omitted"), Some("true"));
        rig.gate.open(1);
        assert_eq!(parts.next().await.unwrap().unwrap(), "two\n");
    }
}

#[actix_web::test]
async fn whoever_waits_for_a_key_is_told_when_it_is_held() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    async fn holds(key: IdemKey, gate: Data<Gate>) -> HttpResponse {
        RUNS.fetch_add(1, Ordering::Relaxed);
        gate.pass().await;
        key.hold();
        HttpResponse::BadGateway().finish()
    }
    let waits = actix_idempotency::OnOutstanding::Wait(Duration::from_secs(3600));
    let policy = Policy::new().anonymous().on_outstanding(waits);
    let rig = Rig::builder().policy(policy.clone()).handler(holds).await;
    let twin = rig.twin_serving(policy, |config, idempotency, _| {
        config.service(web::resource("/x").wrap(idempotency.clone()).route(web::post().to(holds)));
    });
    let first = spawn(rig.post("/x").key("a").answer());
    rig.gate.entered(1).await;
    let waiting = [spawn(rig.post("/x").key("a").answer()), spawn(twin.post("/x").key("a").answer())];
    eventually("both wait", async || rig.db.is("EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE '%AS waited (id, lock)%' AND pid <> pg_backend_pid())").await).await;
    rig.gate.open(1);
    assert_eq!(first.await.unwrap().status, 502);
    for waited in waiting {
        let told = waited.await.unwrap();
        assert_eq!((told.status.as_u16(), told.code().as_str()), (409, "held"));
    }
    assert_eq!(RUNS.load(Ordering::Relaxed), 1);
}

/// Compressed by itself, whatever the request accepts.
async fn compressed(request: HttpRequest) -> HttpResponse {
    use std::io::Write;
    let coding = request.headers().get("x-coding").unwrap().to_str().unwrap().to_owned();
    let text = "plain ".repeat(100);
    let body = match coding.as_str() {
        "gzip" => {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            gzip.write_all(text.as_bytes()).unwrap();
            gzip.finish().unwrap()
        }
        "deflate" => {
            let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
            zlib.write_all(text.as_bytes()).unwrap();
            zlib.finish().unwrap()
        }
        // Far more than any answer that is kept.
        "x-gzip" => {
            let mut bomb = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
            (0..64).for_each(|_| bomb.write_all(&[0; 1024 * 1024]).unwrap());
            bomb.finish().unwrap()
        }
        _ => b"who knows".to_vec(),
    };
    HttpResponse::Created()
        .insert_header(("content-encoding", coding))
        .insert_header(("etag", "\"1\""))
        .insert_header(("content-digest", "sha-256=:AAAA:"))
        .body(body)
}

#[actix_web::test]
async fn nobody_is_sent_bytes_that_he_cannot_read() {
    let rig = Rig::builder().policy(Policy::new().anonymous().response_limit(1024 * 1024)).handler(compressed).await;
    for coding in ["gzip", "deflate", "x-gzip", "zstd"] {
        let send = |accepted: Option<&'static str>| {
            let request = rig.post("/x").key(coding).header("x-coding", coding);
            match accepted {
                Some(accepted) => request.header("accept-encoding", accepted),
                None => request,
            }
            .answer()
        };
        let first = send(Some(coding)).await;
        assert_eq!(first.status, 201);
        for same in [Some(coding), Some("*"), Some("identity;q=0, *;q=0.1"), None] {
            first.assert_replayed_by(&send(same).await);
        }
        for other in ["identity", "*;q=0", "", "br;q=1.0"] {
            let retry = send(Some(other)).await;
            if ["gzip", "deflate"].contains(&coding) {
                assert!(retry.is_replay() && retry.status == 201);
                assert_eq!(retry.text(), "plain ".repeat(100), "{coding} for {other:?}");
                assert_eq!((retry.header("content-encoding"), retry.header("content-digest")), (None, None));
                assert_eq!(retry.header("etag"), Some("W/\"1\""));
            } else {
                assert_eq!((retry.status.as_u16(), retry.code().as_str()), (406, "coding-not-accepted"));
            }
        }
        // It stays what it was.
        first.assert_replayed_by(&send(Some(coding)).await);
    }
}
