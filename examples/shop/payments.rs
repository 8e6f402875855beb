//! Payments: what the provider calls back to say, more than once.

use std::time::Duration;

use actix_idempotency::{Fields, IdemTx, Idempotency, KeySource, Machine, OnOutstanding, Policy, Transition};
use actix_web::{HttpResponse, post, web};
use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use serde::Deserialize;

use crate::{
    demo::Knobs,
    error::ShopError,
    orders::Order,
    schema::{
        Status::{self, Paid, Pending},
        order_history, payments,
    },
};

#[derive(Deserialize, Insertable)]
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
            .compare(Fields::only(["/order_id"]))
            .require_key()
            // A real shop checks the provider's signature in a middleware outside this one.
            .anonymous()
            .on_outstanding(OnOutstanding::Wait(Duration::from_secs(10)))
            .atomic(),
    )
}

/// What can become of an order. Built once, where the program starts: it would stop there if it made no sense.
pub fn machine() -> Machine<Status> {
    Machine::starting_at(Pending).allow(Pending, [Paid]).ending_at([Paid]).build()
}

/// Keys expire, and another message can tell of the same payment: the state of the order does not forget.
#[post("/payments/callback", wrap = "once_per_payment()")]
pub async fn callback(
    knobs: Knobs,
    mut tx: IdemTx,
    machine: web::Data<Machine<Status>>,
    payment: web::Json<Payment>,
) -> Result<HttpResponse, ShopError> {
    let entry = (order_history::order_id.eq(payment.order_id), order_history::status.eq(Paid));
    let order: Transition<Order> = machine
        .transition(payment.order_id, Pending, Paid)
        .raise_version()
        .record(diesel::insert_into(order_history::table).values(entry))
        .returning(Order::as_returning())
        .get_result(&mut tx)
        .await?;
    // Also one that comes on top: somebody must pay it back.
    diesel::insert_into(payments::table).values(&*payment).on_conflict_do_nothing().execute(&mut *tx).await?;
    knobs.misbehave().await?;
    Ok(HttpResponse::Ok().json(order.into_inner()))
}
