//! The callback of a payment provider, which knows its own order number only and repeats itself until it
//! hears of success: a repeat gets that, never an error that makes it retry harder.
//!
//!     ./with-postgres cargo run --example callback
//!
//!     notify() { curl -si localhost:8080/payments/notify -H 'Content-Type: application/json' \
//!       -d '{"out_trade_no": "'$1'", "amount": '${2:-100}', "notify_time": '$RANDOM'}'; echo; }
//!
//!     notify T1; notify T1                     # success, and success again: a replay
//!     notify T2 & notify T2; wait              # at the same time: one waits for the other
//!     notify T1 101                            # another amount under that number: 422
//!     curl -s localhost:8080/payments          # each of them once

use std::{env, time::Duration};

use actix_idempotency::{
    Fields, IdemTx, Idempotency, KeySource, OnOutstanding, PgPool, Policy, Refusal, migrations, pool,
};
use actix_web::{App, HttpResponse, HttpServer, Result, get, post, rt::time::sleep, web};
use diesel::prelude::*;
use diesel_async::{RunQueryDsl, SimpleAsyncConnection};
use serde::{Deserialize, Serialize};

diesel::table! {
    notified_payments (out_trade_no) {
        out_trade_no -> Text,
        amount -> BigInt,
    }
}

#[derive(Deserialize, Serialize, Insertable, Queryable)]
#[diesel(table_name = notified_payments)]
struct Payment {
    out_trade_no: String,
    amount: i64,
}

/// The number says which payment it is; the rest, but for the time, must be the same.
fn once_per_payment() -> Idempotency {
    Idempotency::from_app_data().with(
        Policy::new()
            .keys([KeySource::json(["/out_trade_no"])])
            .require_key()
            .compare(Fields::all_but(["/notify_time"]))
            // Check the provider's signature in a middleware outside this one.
            .anonymous()
            .retention(Duration::from_secs(7 * 24 * 60 * 60))
            .on_outstanding(OnOutstanding::Wait(Duration::from_secs(10)))
            .atomic(),
    )
}

#[post("/payments/notify", wrap = "once_per_payment()")]
async fn notify(mut tx: IdemTx, payment: web::Json<Payment>) -> Result<HttpResponse> {
    // Keys expire; the number of a payment does not.
    diesel::insert_into(notified_payments::table)
        .values(&*payment)
        .on_conflict_do_nothing()
        .execute(&mut *tx)
        .await
        .map_err(Refusal::from)?;
    // Slow enough for a repeat.
    sleep(Duration::from_secs(1)).await;
    Ok(HttpResponse::Ok().body("success"))
}

#[get("/payments")]
async fn list(pool: web::Data<PgPool>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(Refusal::from)?;
    let payments: Vec<Payment> = notified_payments::table.load(&mut conn).await.map_err(Refusal::from)?;
    Ok(HttpResponse::Ok().json(payments))
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this by ./with-postgres")?;
    let bind = env::var("BIND").unwrap_or_else(|_| "127.0.0.1:8080".into());
    migrations::run(&url).await?;
    let pool = pool(&url)?;
    let table = "CREATE TABLE IF NOT EXISTS notified_payments (out_trade_no text PRIMARY KEY, amount bigint NOT NULL)";
    pool.get().await?.batch_execute(table).await?;

    let idempotency = Idempotency::postgres(pool.clone());
    let server = HttpServer::new(move || {
        App::new()
            .app_data(web::Data::new(pool.clone()))
            .app_data(web::Data::new(idempotency.clone()))
            .service(notify)
            .service(list)
    })
    .bind(bind)?;
    println!("listening on http://{}", server.addrs()[0]);
    server.run().await?;
    Ok(())
}
