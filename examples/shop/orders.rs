//! Orders: made once, listed, shown, changed by whoever has seen them as they are.

use actix_idempotency::{Decrement, IdemTx, IfMatch, PgPool, Versioned, version::etag};
use actix_web::{HttpResponse, get, http::header, post, put, web};
use diesel::prelude::*;
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use serde::{Deserialize, Serialize};

use crate::{
    customer::Customer,
    demo::Knobs,
    error::ShopError,
    schema::{Status, orders, products},
};

#[derive(Deserialize)]
struct NewOrder {
    product_id: i64,
    quantity: i32,
    campaign_id: Option<i64>,
}

#[derive(Deserialize)]
struct Change {
    quantity: i32,
}

#[derive(Serialize, Queryable, Selectable)]
pub struct Order {
    id: i64,
    product_id: i64,
    quantity: i32,
    status: Status,
    version: i32,
}

/// The stock, the order and the answer commit together, or not at all.
#[post("/orders")]
pub async fn create(
    customer: web::ReqData<Customer>,
    knobs: Knobs,
    mut tx: IdemTx,
    new: web::Json<NewOrder>,
) -> Result<HttpResponse, ShopError> {
    if new.quantity < 1 {
        return Err(ShopError::Quantity);
    }
    // Only where there is enough: the condition is in the UPDATE.
    products::stock.decrement(new.product_id, new.quantity).raise_version().execute(&mut tx).await?;
    let order: Order = diesel::insert_into(orders::table)
        .values((
            orders::customer.eq(&customer.0),
            orders::product_id.eq(new.product_id),
            orders::quantity.eq(new.quantity),
            orders::campaign_id.eq(new.campaign_id),
        ))
        .returning(Order::as_returning())
        .get_result(&mut *tx)
        .await?;
    knobs.misbehave().await?;
    Ok(HttpResponse::Created()
        .insert_header((header::LOCATION, format!("/orders/{}", order.id)))
        .insert_header(etag(order.version))
        .json(order))
}

#[get("/orders")]
pub async fn list(customer: web::ReqData<Customer>, pool: web::Data<PgPool>) -> Result<HttpResponse, ShopError> {
    let mut conn = pool.get().await.map_err(|_| ShopError::NoConnection)?;
    let orders = orders::table
        .filter(orders::customer.eq(&customer.0))
        .order(orders::id)
        .select(Order::as_select())
        .load(&mut conn)
        .await?;
    Ok(HttpResponse::Ok().json(orders))
}

#[get("/orders/{id}")]
pub async fn show(
    customer: web::ReqData<Customer>,
    pool: web::Data<PgPool>,
    id: web::Path<i64>,
) -> Result<HttpResponse, ShopError> {
    let mut conn = pool.get().await.map_err(|_| ShopError::NoConnection)?;
    let order: Order = orders::table
        .find(*id)
        .filter(orders::customer.eq(&customer.0))
        .select(Order::as_select())
        .first(&mut conn)
        .await?;
    Ok(HttpResponse::Ok().insert_header(etag(order.version)).json(order))
}

/// `If-Match` says which version the customer has seen. Whoever has missed a change is told, and changes nothing.
#[put("/orders/{id}")]
pub async fn change(
    customer: web::ReqData<Customer>,
    knobs: Knobs,
    mut tx: IdemTx,
    id: web::Path<i64>,
    if_match: IfMatch,
    change: web::Json<Change>,
) -> Result<HttpResponse, ShopError> {
    if change.quantity < 1 {
        return Err(ShopError::Quantity);
    }
    if_match.readable()?;
    // Locked, so that the stock moves by the difference from what the order really was.
    let before: Order = orders::table
        .find(*id)
        .filter(orders::customer.eq(&customer.0))
        .for_update()
        .select(Order::as_select())
        .get_result(&mut *tx)
        .await?;
    if before.status == Status::Paid {
        return Err(ShopError::Paid);
    }
    let order: Order = orders::table
        .at(before.id, if_match)
        .set(orders::quantity.eq(change.quantity))
        .returning(Order::as_returning())
        .get_result(&mut tx)
        .await?;
    match order.quantity - before.quantity {
        0 => {}
        more @ 1.. => {
            products::stock.decrement(order.product_id, more).raise_version().execute(&mut tx).await?;
        }
        less => give_back(&mut tx, order.product_id, -less).await?,
    }
    knobs.misbehave().await?;
    Ok(HttpResponse::Ok().insert_header(etag(order.version)).json(order))
}

async fn give_back(conn: &mut AsyncPgConnection, product_id: i64, pieces: i32) -> QueryResult<()> {
    diesel::update(products::table.find(product_id))
        .set((products::stock.eq(products::stock + pieces), products::version.eq(products::version + 1)))
        .execute(conn)
        .await
        .map(drop)
}
