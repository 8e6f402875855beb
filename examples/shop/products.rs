//! Products, and what is left of them.

use actix_idempotency::PgPool;
use actix_web::{HttpResponse, get, web};
use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use serde::Serialize;

use crate::{error::ShopError, schema::products};

#[derive(Serialize, Queryable, Selectable)]
struct Product {
    id: i64,
    name: String,
    stock: i32,
    version: i32,
}

#[get("/products/{id}")]
pub async fn show(pool: web::Data<PgPool>, id: web::Path<i64>) -> Result<HttpResponse, ShopError> {
    let mut conn = pool.get().await.map_err(|_| ShopError::NoConnection)?;
    let product = products::table.find(*id).select(Product::as_select()).first(&mut conn).await?;
    Ok(HttpResponse::Ok().json(product))
}
