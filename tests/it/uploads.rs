//! Bodies that are streamed through: nobody holds a transaction while a client takes its time.

use actix_idempotency::{IdemTx, Idempotency, Policy};
use actix_multipart::Multipart;
use actix_web::{
    FromRequest, HttpRequest, HttpResponse, Result,
    web::{self, Payload, ServiceConfig},
};
use futures_util::{StreamExt, future::join_all};

use crate::support::{
    app::{created, effect_in},
    client::{Answer, Raw, RequestExt},
    eventually,
    rig::Rig,
};

/// Reads the body, then writes.
async fn upload(request: HttpRequest, mut body: Payload) -> Result<HttpResponse> {
    while let Some(piece) = body.next().await {
        piece?;
    }
    write(&request).await
}

async fn write(request: &HttpRequest) -> Result<HttpResponse> {
    let mut tx = IdemTx::extract(request).await?;
    Ok(created(effect_in(&mut tx, "uploaded").await?))
}

/// A form is read to its last boundary, and nobody asks what comes after it.
async fn form(request: HttpRequest, mut form: Multipart) -> Result<HttpResponse> {
    while let Some(field) = form.next().await {
        let mut field = field?;
        while let Some(piece) = field.next().await {
            piece?;
        }
    }
    let answer = write(&request).await;
    drop(form);
    answer
}

/// Holds a transaction before the body is there.
async fn beside(mut tx: IdemTx, _body: Payload) -> Result<HttpResponse> {
    Ok(created(effect_in(&mut tx, "beside").await?))
}

/// Goes on without what it could not have.
async fn optional(tx: Option<IdemTx>, _body: Payload) -> HttpResponse {
    HttpResponse::Ok().body(tx.is_some().to_string())
}

async fn order(mut tx: IdemTx) -> Result<HttpResponse> {
    Ok(created(effect_in(&mut tx, "order").await?))
}

fn routes(config: &mut ServiceConfig, idempotency: &Idempotency) {
    let streams = idempotency.with(Policy::new().anonymous().stream_body());
    config
        .service(web::resource("/orders").wrap(idempotency.clone()).route(web::post().to(order)))
        .service(web::resource("/upload").wrap(streams.clone()).route(web::post().to(upload)))
        .service(web::resource("/form").wrap(streams.clone()).route(web::post().to(form)))
        .service(web::resource("/beside").wrap(streams.clone()).route(web::post().to(beside)))
        .service(web::resource("/optional").wrap(streams).route(web::post().to(optional)));
}

async fn rig() -> Rig {
    Rig::builder().serve(|config, idempotency, _| routes(config, idempotency)).await
}

/// The head and the first byte of ten; the others are the test's to send.
async fn begin(rig: &Rig, path: &str, key: Option<&str>) -> Raw {
    let key = key.map(|key| format!("idempotency-key: {key}\r\n")).unwrap_or_default();
    let mut raw = rig.raw().await;
    raw.send(format!("POST {path} HTTP/1.1\r\nhost: test\r\n{key}content-length: 10\r\n\r\n0")).await.unwrap();
    raw
}

/// 201, from a pool of five.
async fn assert_orders_are_answered(rig: &Rig) {
    let orders = (0..5).map(|n| rig.post("/orders").key(&format!("order-{n}")).answer());
    let answers: Vec<Answer> = join_all(orders).await;
    assert!(answers.iter().all(|answer| answer.status == 201), "{answers:?}");
}

#[actix_web::test]
async fn slow_uploads_hold_no_transaction_and_starve_nobody() {
    let rig = rig().await;
    let mut clients = Vec::new();
    for n in 0..8 {
        let key = format!("upload-{n}");
        clients.push(begin(&rig, "/upload", Some(&key)).await);
        eventually("it runs", async || rig.db.state(&key).await.is_some_and(|state| state == "outstanding")).await;
    }
    let in_transaction = "SELECT count(*) AS value FROM pg_stat_activity WHERE datname = current_database() \
                          AND state LIKE 'idle in transaction%'";
    assert_eq!(rig.db.number(in_transaction).await, 0);
    assert_orders_are_answered(&rig).await;
    for client in &mut clients {
        client.send("123456789").await.unwrap();
        assert_eq!(client.answer().await.status, 201);
    }
    assert_eq!((rig.db.effects("uploaded").await, rig.db.effects("order").await), (8, 5));
}

#[actix_web::test]
async fn a_transaction_beside_a_body_that_is_on_its_way_is_refused_and_the_key_is_free() {
    let rig = rig().await;
    for path in ["/beside", "/optional"] {
        for key in [None, Some("slow"), Some("slow")] {
            // Nobody waits for the rest of the body.
            let answer = begin(&rig, path, key).await.answer().await;
            assert_eq!((answer.status.as_u16(), answer.code().as_str()), (500, "misconfigured"), "{path} {key:?}");
        }
    }
    assert_orders_are_answered(&rig).await;
    assert_eq!(rig.db.effects("beside").await, 0);
    assert_eq!(rig.db.state("slow").await.as_deref(), Some("released"));
}

#[actix_web::test]
async fn a_body_that_is_empty_has_been_read() {
    let rig = rig().await;
    for key in ["none", "again"] {
        assert_eq!(rig.post("/beside").key(key).answer().await.status, 201);
        assert_eq!(rig.post("/upload").key(key).answer().await.status, 201);
    }
    assert_eq!(rig.post("/beside").body("").answer().await.status, 201);
    assert_eq!(rig.post("/optional").answer().await.text(), "true");
}

#[actix_web::test]
async fn a_form_has_been_read_at_its_last_boundary() {
    let rig = rig().await;
    let send = || {
        let file = "7".repeat(300_000);
        let body = format!("--b\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\n{file}\r\n--b--\r\n");
        rig.post("/form").key("x").header("content-type", "multipart/form-data; boundary=b").body(body).answer()
    };
    let first = send().await;
    assert_eq!((first.status.as_u16(), rig.db.effects("uploaded").await), (201, 1));
    let again = send().await;
    assert!(again.is_replay() && again.body == first.body, "{again:?}");
}
