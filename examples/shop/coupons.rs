//! Coupons: claimed by a form that has no key.

use std::time::Duration;

use actix_idempotency::{Code, Fields, IdemTx, Idempotency, KeySource, OnCompleted, Policy, Wording};
use actix_web::{HttpResponse, post, web};
use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use serde::{Deserialize, Serialize};

use crate::{customer::Customer, demo::Knobs, error::ShopError, schema::coupons};

#[derive(Deserialize)]
struct Wanted {
    coupon: String,
}

#[derive(Serialize, Queryable, Selectable)]
struct Coupon {
    id: i64,
    coupon: String,
}

/// The same customer, the same coupon, within 15 seconds: a double click.
fn once_per_coupon() -> Idempotency {
    let told = || Wording::new().detail("Your coupon is being claimed. There is no need to click again.");
    Idempotency::from_app_data().with(
        Policy::new()
            .keys([KeySource::digest(Fields::only(["/coupon"]))])
            .principal(Customer::principal)
            .retention(Duration::from_secs(15))
            .on_completed(OnCompleted::Reject)
            .wording(Code::Outstanding, told())
            .wording(Code::AlreadyCompleted, told())
            .atomic(),
    )
}

#[post("/coupons", wrap = "once_per_coupon()")]
pub async fn claim(
    customer: web::ReqData<Customer>,
    knobs: Knobs,
    mut tx: IdemTx,
    wanted: web::Json<Wanted>,
) -> Result<HttpResponse, ShopError> {
    let coupon = diesel::insert_into(coupons::table)
        .values((coupons::customer.eq(&customer.0), coupons::coupon.eq(&wanted.coupon)))
        .returning(Coupon::as_returning())
        .get_result(&mut *tx)
        .await?;
    knobs.misbehave().await?;
    Ok(HttpResponse::Created().json(coupon))
}
