//! Rows that many want to change: by versions, by locks, by one guarded statement.

use std::sync::atomic::{AtomicI32, Ordering};

use actix_idempotency::{Decrement, PgPool, VersionError, Versioned, versioned};
use actix_web::{
    HttpResponse, Result,
    error::ErrorInternalServerError,
    web::{self, Data, Path},
};
use diesel::{
    pg::Pg,
    prelude::*,
    query_builder::{AstPass, Query, QueryFragment, QueryId},
    sql_types::{BigInt, Integer},
};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, TransactionManager};

use crate::by_hand::prepared;

type Manager = <AsyncPgConnection as AsyncConnection>::TransactionManager;

diesel::table! {
    bench_rows (id) {
        id -> BigInt,
        value -> Integer,
        version -> Integer,
    }
}
versioned!(bench_rows.version);

/// Rows for all, from 1 on, and a row for each client, below 0.
pub const TABLE: &str = "DROP TABLE IF EXISTS bench_rows;
    CREATE TABLE bench_rows (id bigint PRIMARY KEY, value integer NOT NULL, version integer NOT NULL DEFAULT 1)
        WITH (fillfactor = 50);
    INSERT INTO bench_rows (id, value) SELECT id, 1000000000 FROM generate_series(-1000, 100000) AS id;
    ANALYZE bench_rows";

/// The versions that the clients have seen of their own rows.
pub struct Seen([AtomicI32; 1000]);

impl Seen {
    pub fn new() -> Self {
        Self([const { AtomicI32::new(1) }; 1000])
    }
}

/// A connection for each client: who waits for one does not meet the others at the row.
pub struct Crowd(pub PgPool);

prepared! { Change(id: i64 as BigInt, version: i32 as Integer, value: i32 as Integer) -> Integer {
    "UPDATE bench_rows SET value = " (value as Integer) ", version = version + 1 WHERE id = " (id as BigInt)
    " AND version = " (version as Integer) " RETURNING version"
} }
prepared! { Write(id: i64 as BigInt, value: i32 as Integer) {
    "UPDATE bench_rows SET value = " (value as Integer) " WHERE id = " (id as BigInt)
} }

pub fn routes(config: &mut web::ServiceConfig) {
    config
        .route("/update-by-hand/{client}", web::put().to(by_hand))
        .route("/update-prepared/{client}", web::put().to(by_hand_prepared))
        .route("/update-versioned/{client}", web::put().to(versioned))
        .route("/rows-locked/{rows}", web::put().to(locked))
        .route("/rows-versioned/{rows}", web::put().to(seen_and_changed))
        .route("/rows-guarded/{rows}", web::put().to(guarded));
}

async fn by_hand(pool: Data<PgPool>, seen: Data<Seen>, client: Path<usize>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let (id, seen) = own(&seen, *client);
    let row = bench_rows::table.find(id).filter(bench_rows::version.eq(seen.load(Ordering::Relaxed)));
    let version: i32 = diesel::update(row)
        .set((bench_rows::value.eq(7), bench_rows::version.eq(bench_rows::version + 1)))
        .returning(bench_rows::version)
        .get_result(&mut conn)
        .await
        .map_err(ErrorInternalServerError)?;
    seen.store(version, Ordering::Relaxed);
    Ok(HttpResponse::Ok().finish())
}

async fn by_hand_prepared(pool: Data<PgPool>, seen: Data<Seen>, client: Path<usize>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let (id, seen) = own(&seen, *client);
    let change = Change { id: &id, version: &seen.load(Ordering::Relaxed), value: &7 };
    let version: i32 = change.get_result(&mut conn).await.map_err(ErrorInternalServerError)?;
    seen.store(version, Ordering::Relaxed);
    Ok(HttpResponse::Ok().finish())
}

async fn versioned(pool: Data<PgPool>, seen: Data<Seen>, client: Path<usize>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let (id, seen) = own(&seen, *client);
    let change = bench_rows::table.at(id, seen.load(Ordering::Relaxed)).set(bench_rows::value.eq(7));
    let version = change.execute(&mut conn).await?;
    seen.store(version.try_into().map_err(ErrorInternalServerError)?, Ordering::Relaxed);
    Ok(HttpResponse::Ok().finish())
}

fn own(seen: &Seen, client: usize) -> (i64, &AtomicI32) {
    (-1 - client as i64, &seen.0[client])
}

fn any_of(rows: i64) -> i64 {
    rand::random_range(1..=rows)
}

async fn locked(pool: Data<Crowd>, rows: Path<i64>) -> Result<HttpResponse> {
    let mut conn = pool.0.get().await.map_err(ErrorInternalServerError)?;
    let id = any_of(*rows);
    Manager::begin_transaction(&mut *conn).await.map_err(ErrorInternalServerError)?;
    let value: i32 = bench_rows::table
        .find(id)
        .select(bench_rows::value)
        .for_update()
        .get_result(&mut conn)
        .await
        .map_err(ErrorInternalServerError)?;
    Write { id: &id, value: &(value - 1) }.execute(&mut conn).await.map_err(ErrorInternalServerError)?;
    Manager::commit_transaction(&mut *conn).await.map_err(ErrorInternalServerError)?;
    Ok(HttpResponse::Ok().finish())
}

/// Whoever is stale looks again at once.
async fn seen_and_changed(pool: Data<Crowd>, rows: Path<i64>) -> Result<HttpResponse> {
    let mut conn = pool.0.get().await.map_err(ErrorInternalServerError)?;
    let id = any_of(*rows);
    loop {
        let (value, version): (i32, i32) = bench_rows::table
            .find(id)
            .select((bench_rows::value, bench_rows::version))
            .get_result(&mut conn)
            .await
            .map_err(ErrorInternalServerError)?;
        let change = bench_rows::table.at(id, version).set(bench_rows::value.eq(value - 1));
        match change.execute(&mut conn).await {
            Ok(_) => return Ok(HttpResponse::Ok().finish()),
            Err(VersionError::Stale { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

async fn guarded(pool: Data<Crowd>, rows: Path<i64>) -> Result<HttpResponse> {
    let mut conn = pool.0.get().await.map_err(ErrorInternalServerError)?;
    bench_rows::value.decrement(any_of(*rows), 1).execute(&mut conn).await?;
    Ok(HttpResponse::Ok().finish())
}
