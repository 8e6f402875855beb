//! Payments: what the provider calls back to say, more than once.

use std::time::Duration;

use actix_idempotency::{IdemTx, Idempotency, KeySource, OnOutstanding, Policy};
use actix_web::{HttpResponse, post, web};
use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use serde::{Deserialize, Serialize};

use crate::{demo::Knobs, error::ShopError, schema::payments};

#[derive(Deserialize, Serialize, Insertable)]
struct Payment {
    order_id: i64,
    out_trade_no: String,
}

/// The provider knows its own number only, and repeats itself until it hears of success: a repeat gets
/// that, never an error.
fn once_per_payment() -> Idempotency {
    Idempotency::from_app_data().with(
        Policy::new()
            .keys([KeySource::json(["/out_trade_no"])])
            .require_key()
            // A real shop checks the provider's signature in a middleware outside this one.
            .anonymous()
            .on_outstanding(OnOutstanding::Wait(Duration::from_secs(10)))
            .atomic(),
    )
}

#[post("/payments/callback", wrap = "once_per_payment()")]
pub async fn callback(knobs: Knobs, mut tx: IdemTx, payment: web::Json<Payment>) -> Result<HttpResponse, ShopError> {
    // Keys expire; the number of a payment does not.
    diesel::insert_into(payments::table).values(&*payment).on_conflict_do_nothing().execute(&mut *tx).await?;
    knobs.misbehave().await?;
    Ok(HttpResponse::Ok().json(payment))
}
