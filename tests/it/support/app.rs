//! The service under test: the routes that PROMISES speak of.
//!
//! Every handler that does business writes a row to `effects` through a connection of the pool, which it
//! gives back before it goes on.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use actix_idempotency::{Idempotency, PgPool};
use actix_web::{
    HttpRequest, HttpResponse, HttpResponseBuilder, Result,
    error::{ErrorInternalServerError, InternalError},
    http::{StatusCode, header},
    rt::time::sleep,
    web::{self, Bytes, Data, Json, Query},
};
use diesel::{
    QueryableByName,
    sql_types::{BigInt, Text},
};
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use serde::Deserialize;
use serde_json::{Value, json};

use super::gate::Gate;

#[derive(Deserialize)]
pub struct NewOrder {
    pub sku: String,
    pub qty: i64,
}

/// All of them under one wrap.
pub fn routes(config: &mut web::ServiceConfig, idempotency: &Idempotency) {
    config.service(
        web::scope("")
            .wrap(idempotency.clone())
            .service(web::resource("/orders").route(web::post().to(create)).route(web::get().to(list)))
            .route("/refunds", web::post().to(create))
            .route("/slow", web::post().to(slow))
            .route("/held", web::post().to(held))
            .route("/connected", web::post().to(connected))
            .route("/blocked", web::post().to(blocked))
            .route("/flaky", web::post().to(flaky))
            .route("/echo", web::post().to(echo)),
    );
}

#[derive(QueryableByName)]
struct Id {
    #[diesel(sql_type = BigInt)]
    id: i64,
}

/// Business code ran.
pub async fn effect(pool: &PgPool, tag: &str) -> Result<i64> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    effect_in(&mut conn, tag).await
}

/// The same through this connection.
pub async fn effect_in(conn: &mut AsyncPgConnection, tag: &str) -> Result<i64> {
    let row: Id = diesel::sql_query("INSERT INTO effects (tag) VALUES ($1) RETURNING id")
        .bind::<Text, _>(tag)
        .get_result(conn)
        .await
        .map_err(ErrorInternalServerError)?;
    Ok(row.id)
}

/// 201 with Location, ETag and a body with a random value, so that a replay can be told from a second run.
pub fn created(id: i64) -> HttpResponse {
    HttpResponse::Created()
        .insert_header((header::LOCATION, format!("/orders/{id}")))
        .insert_header((header::ETAG, format!("\"{id}\"")))
        .json(json!({"id": id, "random": rand::random::<u64>().to_string()}))
}

async fn create(pool: Data<PgPool>, order: Json<NewOrder>) -> Result<HttpResponse> {
    assert!(order.qty >= 0, "no test orders less than nothing");
    Ok(created(effect(&pool, &order.sku).await?))
}

async fn list(pool: Data<PgPool>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let rows: Vec<Id> = diesel::sql_query("SELECT id FROM effects ORDER BY id")
        .load(&mut conn)
        .await
        .map_err(ErrorInternalServerError)?;
    Ok(HttpResponse::Ok().json(rows.iter().map(|row| row.id).collect::<Vec<_>>()))
}

#[derive(Deserialize)]
struct Slow {
    ms: u64,
}

/// The effect, then a sleep. `tag` is the body.
async fn slow(pool: Data<PgPool>, query: Query<Slow>, tag: String) -> Result<HttpResponse> {
    let id = effect(&pool, if tag.is_empty() { "slow" } else { &tag }).await?;
    sleep(Duration::from_millis(query.ms)).await;
    Ok(created(id))
}

#[derive(Deserialize)]
struct Held {
    /// The gate, then the effect.
    #[serde(default)]
    gate_first: bool,
}

/// The effect, then the gate.
async fn held(pool: Data<PgPool>, gate: Data<Gate>, query: Query<Held>, tag: String) -> Result<HttpResponse> {
    if query.gate_first {
        gate.pass().await;
    }
    let id = effect(&pool, if tag.is_empty() { "held" } else { &tag }).await?;
    if !query.gate_first {
        gate.pass().await;
    }
    Ok(created(id))
}

/// The gate with a connection of the pool in hand, then the effect. `tag` is the body.
async fn connected(pool: Data<PgPool>, gate: Data<Gate>, tag: String) -> Result<HttpResponse> {
    let conn = pool.get().await.map_err(ErrorInternalServerError)?;
    gate.pass().await;
    drop(conn);
    Ok(created(effect(&pool, &tag).await?))
}

/// The gate, at which it blocks its worker, then the effect. `tag` is the body.
async fn blocked(pool: Data<PgPool>, gate: Data<Gate>, tag: String) -> Result<HttpResponse> {
    gate.block();
    Ok(created(effect(&pool, &tag).await?))
}

/// Which first calls have misbehaved already, by key.
#[derive(Clone, Default)]
pub struct Misbehaved(Arc<Mutex<HashMap<String, u32>>>);

#[derive(Deserialize)]
struct Flaky {
    mode: String,
}

/// Misbehaves on the first call with its key only, then does as `/orders`.
async fn flaky(
    request: HttpRequest,
    pool: Data<PgPool>,
    misbehaved: Data<Misbehaved>,
    gate: Data<Gate>,
    query: Query<Flaky>,
) -> Result<HttpResponse> {
    let key = request.headers().get("idempotency-key").map(|key| key.to_str().unwrap().to_owned()).unwrap_or_default();
    let first = {
        let mut calls = misbehaved.0.lock().unwrap();
        let calls = calls.entry(key).or_default();
        *calls += 1;
        *calls == 1
    };
    if first {
        match query.mode.as_str() {
            "err" => return Err(ErrorInternalServerError("flaky")),
            "err_after_gate" => {
                gate.pass().await;
                return Err(ErrorInternalServerError("flaky"));
            }
            "panic" => panic!("flaky"),
            "panic_after_write" => {
                effect(&pool, "flaky").await?;
                panic!("flaky");
            }
            "err_after_write" => {
                effect(&pool, "flaky").await?;
                return Err(InternalError::new("flaky", StatusCode::CONFLICT).into());
            }
            status => {
                let status: u16 = status.strip_prefix('r').unwrap().parse().unwrap();
                return Ok(HttpResponse::build(StatusCode::from_u16(status).unwrap()).body("flaky"));
            }
        }
    }
    Ok(created(effect(&pool, "flaky").await?))
}

/// The status, headers and body bytes that the request names:
/// `{"status": 201, "headers": [["a", "b"]], "body": [1, 2], "repeat": 1000}`.
#[derive(Deserialize)]
struct Wanted {
    status: u16,
    #[serde(default)]
    headers: Vec<(String, String)>,
    #[serde(default)]
    body: Vec<u8>,
    repeat: Option<usize>,
}

async fn echo(pool: Data<PgPool>, body: Bytes) -> Result<HttpResponse> {
    let wanted: Wanted = serde_json::from_slice(&body)?;
    effect(&pool, "echo").await?;
    let mut response: HttpResponseBuilder = HttpResponse::build(StatusCode::from_u16(wanted.status).unwrap());
    for (name, value) in wanted.headers {
        response.append_header((name, value));
    }
    Ok(match (wanted.body.is_empty(), wanted.repeat) {
        (true, _) => response.finish(),
        (false, Some(times)) => response.body(wanted.body.repeat(times)),
        (false, None) => response.body(wanted.body),
    })
}

/// A body for `/orders`.
pub fn order(sku: &str) -> Value {
    json!({"sku": sku, "qty": 1})
}
