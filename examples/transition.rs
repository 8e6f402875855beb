//! A callback that comes twice, and another that comes too late: a state machine whose repeat is success.
//!
//!     ./with-postgres cargo run --example transition
//!
//!     curl -i -X POST localhost:8080/payments/1/paid        # 200 "paid now": PENDING → PAID, one row of history
//!     curl -i -X POST localhost:8080/payments/1/paid        # 200 "paid before": a repeat, no second row
//!     curl -i -X POST localhost:8080/payments/1/cancelled   # 409 elsewhere: it is PAID
//!     curl -i -X POST localhost:8080/payments/9/paid        # 404
//!     curl -s localhost:8080/history                        # [[1,"PAID"]]
//!
//! Forty of them at once, and still one winner:
//!
//!     for n in $(seq 20); do for to in paid cancelled; do
//!         curl -s -X POST localhost:8080/payments/2/$to & done; done; wait; curl -s localhost:8080/history

use std::env;

use actix_idempotency::{Machine, PgPool, Refusal, Transition, pool, states};
use actix_web::{App, HttpResponse, HttpServer, Result, get, post, web};
use diesel::prelude::*;
use diesel_async::{RunQueryDsl, SimpleAsyncConnection};

diesel::table! {
    payments (id) {
        id -> BigInt,
        state -> Text,
        callbacks -> Integer,
    }
}

diesel::table! {
    history (id) {
        id -> BigInt,
        payment_id -> BigInt,
        state -> Text,
    }
}

states! {
    enum State for payments.state {
        Pending = "PENDING",
        Paid = "PAID",
        Cancelled = "CANCELLED",
    }
}
use State::{Cancelled, Paid, Pending};

const TABLES: &str = "DROP TABLE IF EXISTS payments, history;
    CREATE TABLE payments (id bigint PRIMARY KEY, state text NOT NULL DEFAULT 'PENDING', callbacks int NOT NULL DEFAULT 0);
    CREATE TABLE history (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payment_id bigint NOT NULL, state text NOT NULL
    );
    INSERT INTO payments (id) VALUES (1), (2);";

/// Both callbacks: one statement decides, and only its winner writes history.
async fn settle(pool: &PgPool, machine: &Machine<State>, id: i64, to: State) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(Refusal::from)?;
    let settled = machine
        .transition(id, Pending, to)
        .set(payments::callbacks.eq(payments::callbacks + 1))
        .record(
            diesel::insert_into(history::table).values((history::payment_id.eq(id), history::state.eq(to.to_string()))),
        )
        .execute(&mut conn)
        .await?;
    let when = match settled {
        Transition::Applied(()) => "now",
        Transition::Already(()) => "before",
    };
    Ok(HttpResponse::Ok().body(format!("{} {when}", to.to_string().to_lowercase())))
}

#[post("/payments/{id}/paid")]
async fn paid(pool: web::Data<PgPool>, machine: web::Data<Machine<State>>, id: web::Path<i64>) -> Result<HttpResponse> {
    settle(&pool, &machine, *id, Paid).await
}

#[post("/payments/{id}/cancelled")]
async fn cancelled(
    pool: web::Data<PgPool>,
    machine: web::Data<Machine<State>>,
    id: web::Path<i64>,
) -> Result<HttpResponse> {
    settle(&pool, &machine, *id, Cancelled).await
}

#[get("/history")]
async fn list(pool: web::Data<PgPool>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(Refusal::from)?;
    let rows: Vec<(i64, String)> = history::table
        .order(history::id)
        .select((history::payment_id, history::state))
        .load(&mut conn)
        .await
        .map_err(Refusal::from)?;
    Ok(HttpResponse::Ok().json(rows))
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this by ./with-postgres")?;
    let bind = env::var("BIND").unwrap_or_else(|_| "127.0.0.1:8080".into());
    let pool = pool(&url)?;
    pool.get().await?.batch_execute(TABLES).await?;

    // A machine that makes no sense stops the program here.
    let machine = web::Data::new(
        Machine::starting_at(Pending).allow(Pending, [Paid, Cancelled]).ending_at([Paid, Cancelled]).build(),
    );

    let server = HttpServer::new(move || {
        App::new()
            .app_data(web::Data::new(pool.clone()))
            .app_data(machine.clone())
            .service(paid)
            .service(cancelled)
            .service(list)
    })
    .bind(bind)?;
    println!("listening on http://{}", server.addrs()[0]);
    server.run().await?;
    Ok(())
}
