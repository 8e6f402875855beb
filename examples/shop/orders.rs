//! Orders: made once, listed, shown.

use actix_idempotency::PgPool;
use actix_web::{
    HttpRequest, HttpResponse, Result,
    error::{ErrorInternalServerError, ErrorNotFound, ErrorUnauthorized, ErrorUnprocessableEntity},
    get,
    http::header,
    post, web,
};
use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use serde::{Deserialize, Serialize};

use crate::demo;

diesel::table! {
    orders (id) {
        id -> BigInt,
        customer -> Text,
        product_id -> BigInt,
        quantity -> Integer,
        status -> Text,
        version -> Integer,
    }
}

#[derive(Deserialize)]
struct NewOrder {
    product_id: i64,
    quantity: i32,
}

#[derive(Serialize, Queryable, Selectable)]
struct Order {
    id: i64,
    product_id: i64,
    quantity: i32,
    status: String,
    version: i32,
}

#[post("/orders")]
pub async fn create(request: HttpRequest, pool: web::Data<PgPool>, new: web::Json<NewOrder>) -> Result<HttpResponse> {
    let customer = customer(&request)?;
    if new.quantity < 1 {
        return Err(ErrorUnprocessableEntity("quantity must be at least 1"));
    }
    let order = {
        let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
        diesel::insert_into(orders::table)
            .values((
                orders::customer.eq(customer),
                orders::product_id.eq(new.product_id),
                orders::quantity.eq(new.quantity),
            ))
            .returning(Order::as_returning())
            .get_result(&mut conn)
            .await
            .map_err(ErrorInternalServerError)?
    };
    demo::misbehave(&request).await?;
    Ok(HttpResponse::Created().insert_header((header::LOCATION, format!("/orders/{}", order.id))).json(order))
}

#[get("/orders")]
pub async fn list(request: HttpRequest, pool: web::Data<PgPool>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let orders = orders::table
        .filter(orders::customer.eq(customer(&request)?))
        .order(orders::id)
        .select(Order::as_select())
        .load(&mut conn)
        .await
        .map_err(ErrorInternalServerError)?;
    Ok(HttpResponse::Ok().json(orders))
}

#[get("/orders/{id}")]
pub async fn show(request: HttpRequest, pool: web::Data<PgPool>, id: web::Path<i64>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let order = orders::table
        .find(*id)
        .filter(orders::customer.eq(customer(&request)?))
        .select(Order::as_select())
        .first(&mut conn)
        .await
        .optional()
        .map_err(ErrorInternalServerError)?
        .ok_or_else(|| ErrorNotFound("no such order"))?;
    Ok(HttpResponse::Ok().json(order))
}

/// Whoever `Authorization: Bearer NAME` names: a demo, without a password.
fn customer(request: &HttpRequest) -> Result<String> {
    request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "))
        .map(str::to_owned)
        .ok_or_else(|| ErrorUnauthorized("say who you are: Authorization: Bearer NAME"))
}
