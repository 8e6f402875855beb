//! Three routes, three policies, each said where the route is; the status of a key, and the published
//! rules.
//!
//!     ./with-postgres cargo run --example policies
//!
//!     post() { curl -si -X POST localhost:8080/$1 -H 'Authorization: Bearer alice' \
//!       -H 'Content-Type: application/json' "${@:2}"; echo; }
//!
//!     key=$(cat /proc/sys/kernel/random/uuid)
//!     post orders -d '{"sku": "tea"}'                                     # 400: this one requires a key
//!     post orders -d '{"sku": "tea"}' -H "Idempotency-Key: $key"          # 201, and on a retry a replay
//!     curl -si localhost:8080/orders/keys/$key -H 'Authorization: Bearer alice'    # what has become of it
//!     curl -s localhost:8080/docs/orders                                  # what every refusal links to
//!
//!     post likes -d '{"article": 7}'; post likes -d '{"article": 7}'      # 201, and 200 with a message
//!
//!     post payouts/7 -H 'X-Fail: 1'; post payouts/7                       # 502, and then 409: look first

use std::{env, time::Duration};

use actix_idempotency::{
    Code, IdemKey, IdemTx, Idempotency, Keep, KeySource, OnCompleted, OnFailure, Policy, Refusal, Wording, migrations,
    pool,
};
use actix_web::{
    App, HttpMessage, HttpRequest, HttpResponse, HttpServer, Result,
    body::BoxBody,
    dev::{ServiceRequest, ServiceResponse},
    error::ErrorBadGateway,
    http::{StatusCode, header},
    middleware::{Next, from_fn},
    post, web,
};
use diesel::prelude::*;
use diesel_async::{RunQueryDsl, SimpleAsyncConnection};
use serde::Deserialize;

diesel::table! {
    things_done (id) {
        id -> BigInt,
        what -> Text,
    }
}

async fn done(tx: &mut IdemTx, what: String) -> Result<i64, Refusal> {
    diesel::insert_into(things_done::table)
        .values(things_done::what.eq(what))
        .returning(things_done::id)
        .get_result(&mut **tx)
        .await
        .map_err(Refusal::from)
}

#[derive(Clone)]
struct User(String);

/// Whose keys they are: whoever was let in.
fn user(request: &HttpRequest) -> Option<String> {
    request.extensions().get::<User>().map(|user| user.0.clone())
}

/// Outside of every Idempotency. A demo: whoever `Authorization: Bearer` names.
async fn authenticate(request: ServiceRequest, next: Next<BoxBody>) -> Result<ServiceResponse<BoxBody>> {
    let bearer =
        request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let Some(name) = bearer.map(str::to_owned) else {
        return Ok(request.into_response(HttpResponse::Unauthorized().finish()));
    };
    request.extensions_mut().insert(User(name));
    next.call(request).await
}

/// Clients that can send keys must: UUIDs, kept for a week.
fn orders() -> Policy {
    Policy::new()
        .require_key()
        .uuid_keys()
        .principal(user)
        .retention(Duration::from_secs(7 * 24 * 60 * 60))
        .keep(Keep::Draft)
        .documentation("/docs/orders")
        .tell_attempt()
        .tell_expiry()
}

fn once_per_order() -> Idempotency {
    Idempotency::from_app_data().with(orders())
}

#[derive(Deserialize)]
struct NewOrder {
    sku: String,
}

#[post("/orders", wrap = "once_per_order()")]
async fn create_order(mut tx: IdemTx, new: web::Json<NewOrder>) -> Result<HttpResponse> {
    Ok(HttpResponse::Created().json(done(&mut tx, format!("order of {}", new.sku)).await?))
}

#[derive(Deserialize)]
struct Like {
    article: i64,
}

/// A user likes an article once, for ever; a second time is no reason for an error.
fn once_per_article() -> Idempotency {
    let told = Wording::new().status(StatusCode::OK).code("liked").title("You like this already");
    Idempotency::from_app_data().with(
        Policy::new()
            .key_from_json::<Like>(|liked| liked.article.to_string())
            .principal(user)
            .retain_forever()
            .on_completed(OnCompleted::Reject)
            .wording(Code::AlreadyCompleted, told)
            .atomic(),
    )
}

#[post("/likes", wrap = "once_per_article()")]
async fn like_article(mut tx: IdemTx, like: web::Json<Like>) -> Result<HttpResponse> {
    Ok(HttpResponse::Created().json(done(&mut tx, format!("like of {}", like.article)).await?))
}

/// What may have moved money is not tried again before somebody has looked.
fn once_per_payout() -> Idempotency {
    Idempotency::from_app_data().with(
        Policy::new()
            .keys([KeySource::path(["id"])])
            .principal(user)
            .on_failure(OnFailure::HoldRetention)
            .wording(Code::Outstanding, Wording::new().detail("This payout runs, or has failed and is looked into.")),
    )
}

#[post("/payouts/{id}", wrap = "once_per_payout()")]
async fn pay_out(request: HttpRequest, key: IdemKey) -> Result<HttpResponse> {
    // The bank sees this key from every attempt at this payout.
    let charge = key.derive("bank");
    if request.headers().contains_key("x-fail") {
        return Err(ErrorBadGateway("the bank did not answer"));
    }
    Ok(HttpResponse::Created().json(charge))
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this by ./with-postgres")?;
    let bind = env::var("BIND").unwrap_or_else(|_| "127.0.0.1:8080".into());
    migrations::run(&url).await?;
    let pool = pool(&url)?;
    let table = "CREATE TABLE IF NOT EXISTS things_done \
                 (id bigint GENERATED ALWAYS AS IDENTITY, what text NOT NULL)";
    pool.get().await?.batch_execute(table).await?;

    let idempotency = Idempotency::postgres(pool);
    let server = HttpServer::new(move || {
        App::new()
            .app_data(web::Data::new(idempotency.clone()))
            .service(Idempotency::document(&orders(), "/docs/orders"))
            .service(
                web::scope("")
                    .wrap(from_fn(authenticate))
                    .service(create_order)
                    .route("/orders/keys/{key}", idempotency.with(orders()).status("POST", "/orders"))
                    .service(like_article)
                    .service(pay_out),
            )
    })
    .bind(bind)?;
    println!("listening on http://{}", server.addrs()[0]);
    server.run().await?;
    Ok(())
}
