//! The guard against double clicks, for a form that sends no key: same user, same order, within ten
//! seconds.
//!
//!     ./with-postgres cargo run --example double_click
//!
//!     order() { curl -si localhost:8080/orders -H "X-User: ${2:-alice}" -H 'Content-Type: application/json' \
//!       -d '{"sku": "'$1'", "clickedAt": '$RANDOM'}'; echo; }
//!
//!     order tea & sleep 1; order tea; wait    # 201, and for the second click 409 while the first runs
//!     order tea                               # 409: done already
//!     order cake; order tea bob               # another order, another user: 201
//!     sleep 10; order tea                     # after the window it is a new order: 201

use std::{env, time::Duration};

use actix_idempotency::{
    Code, Fields, IdemTx, Idempotency, KeySource, OnCompleted, Policy, Refusal, Wording, migrations, pool,
};
use actix_web::{
    App, HttpMessage, HttpResponse, HttpServer, Result,
    body::BoxBody,
    dev::{ServiceRequest, ServiceResponse},
    middleware::{Next, from_fn},
    post,
    rt::time::sleep,
    web,
};
use diesel::prelude::*;
use diesel_async::{RunQueryDsl, SimpleAsyncConnection};
use serde::Deserialize;

diesel::table! {
    clicked_orders (id) {
        id -> BigInt,
        sku -> Text,
    }
}

#[derive(Clone)]
struct User(String);

/// Outside of Idempotency. A demo: whoever `X-User` names.
async fn authenticate(request: ServiceRequest, next: Next<BoxBody>) -> Result<ServiceResponse<BoxBody>> {
    let name = request.headers().get("x-user").and_then(|name| name.to_str().ok());
    let Some(name) = name.map(str::to_owned) else {
        return Ok(request.into_response(HttpResponse::Unauthorized().finish()));
    };
    request.extensions_mut().insert(User(name));
    next.call(request).await
}

/// What Java services write as
/// `@Idempotent(key = "#user + ':' + #req.sku", expireSeconds = 10, message = "订单处理中,请勿重复提交")`.
fn once_per_click() -> Idempotency {
    let message = || Wording::new().language("zh-CN").detail("订单处理中,请勿重复提交");
    Idempotency::from_app_data().with(
        Policy::new()
            .keys([KeySource::digest(Fields::all_but(["/clickedAt"]))])
            .principal(|request| request.extensions().get::<User>().map(|user| user.0.clone()))
            .retention(Duration::from_secs(10))
            .on_completed(OnCompleted::Reject)
            .wording(Code::Outstanding, message())
            .wording(Code::AlreadyCompleted, message()),
    )
}

#[derive(Deserialize)]
struct NewOrder {
    sku: String,
}

#[post("/orders", wrap = "once_per_click()")]
async fn create(mut tx: IdemTx, new: web::Json<NewOrder>) -> Result<HttpResponse> {
    let id: i64 = diesel::insert_into(clicked_orders::table)
        .values(clicked_orders::sku.eq(&new.sku))
        .returning(clicked_orders::id)
        .get_result(&mut *tx)
        .await
        .map_err(Refusal::from)?;
    // Slow enough for a second click.
    sleep(Duration::from_secs(2)).await;
    Ok(HttpResponse::Created().json(id))
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this by ./with-postgres")?;
    let bind = env::var("BIND").unwrap_or_else(|_| "127.0.0.1:8080".into());
    migrations::run(&url).await?;
    let pool = pool(&url)?;
    let table = "CREATE TABLE IF NOT EXISTS clicked_orders \
                 (id bigint GENERATED ALWAYS AS IDENTITY, sku text NOT NULL)";
    pool.get().await?.batch_execute(table).await?;

    let idempotency = Idempotency::postgres(pool);
    let server = HttpServer::new(move || {
        App::new()
            .app_data(web::Data::new(idempotency.clone()))
            .service(web::scope("").wrap(from_fn(authenticate)).service(create))
    })
    .bind(bind)?;
    println!("listening on http://{}", server.addrs()[0]);
    server.run().await?;
    Ok(())
}
