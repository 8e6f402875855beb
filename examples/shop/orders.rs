//! Orders: made once, listed, shown.

use actix_idempotency::{IdemTx, PgPool};
use actix_web::{FromRequest, HttpRequest, HttpResponse, dev::Payload, get, http::header, post, web};
use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use serde::{Deserialize, Serialize};
use std::future::{Ready, ready};

use crate::{
    demo::Knobs,
    error::ShopError,
    schema::{orders, products},
};

#[derive(Deserialize)]
struct NewOrder {
    product_id: i64,
    quantity: i32,
    campaign_id: Option<i64>,
}

#[derive(Serialize, Queryable, Selectable)]
struct Order {
    id: i64,
    product_id: i64,
    quantity: i32,
    status: String,
    version: i32,
}

/// The stock, the order and the answer commit together, or not at all.
#[post("/orders")]
pub async fn create(
    customer: Customer,
    knobs: Knobs,
    mut tx: IdemTx,
    new: web::Json<NewOrder>,
) -> Result<HttpResponse, ShopError> {
    if new.quantity < 1 {
        return Err(ShopError::Quantity);
    }
    // The condition is in the UPDATE: whoever would take the stock below zero changes no row.
    let taken = diesel::update(products::table.find(new.product_id).filter(products::stock.ge(new.quantity)))
        .set((products::stock.eq(products::stock - new.quantity), products::version.eq(products::version + 1)))
        .execute(&mut *tx)
        .await?;
    if taken == 0 {
        products::table.find(new.product_id).select(products::id).first::<i64>(&mut *tx).await?;
        return Err(ShopError::OutOfStock);
    }
    let order = diesel::insert_into(orders::table)
        .values((
            orders::customer.eq(customer.0),
            orders::product_id.eq(new.product_id),
            orders::quantity.eq(new.quantity),
            orders::campaign_id.eq(new.campaign_id),
        ))
        .returning(Order::as_returning())
        .get_result(&mut *tx)
        .await?;
    knobs.misbehave().await?;
    Ok(HttpResponse::Created().insert_header((header::LOCATION, format!("/orders/{}", order.id))).json(order))
}

#[get("/orders")]
pub async fn list(customer: Customer, pool: web::Data<PgPool>) -> Result<HttpResponse, ShopError> {
    let mut conn = pool.get().await.map_err(|_| ShopError::NoConnection)?;
    let orders = orders::table
        .filter(orders::customer.eq(customer.0))
        .order(orders::id)
        .select(Order::as_select())
        .load(&mut conn)
        .await?;
    Ok(HttpResponse::Ok().json(orders))
}

#[get("/orders/{id}")]
pub async fn show(customer: Customer, pool: web::Data<PgPool>, id: web::Path<i64>) -> Result<HttpResponse, ShopError> {
    let mut conn = pool.get().await.map_err(|_| ShopError::NoConnection)?;
    let order = orders::table
        .find(*id)
        .filter(orders::customer.eq(customer.0))
        .select(Order::as_select())
        .first(&mut conn)
        .await?;
    Ok(HttpResponse::Ok().json(order))
}

/// Whoever `Authorization: Bearer NAME` names: a demo, without a password.
pub struct Customer(pub String);

impl FromRequest for Customer {
    type Error = ShopError;
    type Future = Ready<Result<Self, ShopError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(Self::name(request).map(Self).ok_or(ShopError::Anonymous))
    }
}

impl Customer {
    pub fn name(request: &HttpRequest) -> Option<String> {
        let value = request.headers().get(header::AUTHORIZATION)?.to_str().ok()?;
        value.strip_prefix("Bearer ").map(str::to_owned)
    }
}
