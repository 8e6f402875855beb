//! The server under test, in a process of its own.

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::Child,
};

use actix_idempotency::{IdemTx, Idempotency, Once, PgPool, Policy, PoolBuilder, migrations, pool};
use actix_web::{
    App, HttpResponse, HttpServer, Result,
    error::ErrorInternalServerError,
    web::{self, Data, Json},
};
use diesel::prelude::*;
use diesel_async::{
    AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection, TransactionManager,
    pooled_connection::{AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod},
};
use serde::{Deserialize, Serialize};

use crate::{by_hand, forms, inbox, once, rows};

diesel::table! {
    bench_orders (id) {
        id -> BigInt,
        customer -> Text,
        product_id -> BigInt,
        quantity -> Integer,
    }
}

#[derive(Deserialize)]
pub struct NewOrder {
    product_id: i64,
    quantity: i32,
}

#[derive(Serialize, Deserialize, Queryable, Selectable)]
#[diesel(table_name = bench_orders)]
pub struct Order {
    id: i64,
    product_id: i64,
    quantity: i32,
}

pub async fn prepare(url: &str) {
    migrations::run(url).await.expect("the tables");
    let mut conn = AsyncPgConnection::establish(url).await.expect("a connection");
    conn.batch_execute(
        "DROP TABLE IF EXISTS bench_orders; CREATE TABLE bench_orders (id bigint GENERATED ALWAYS AS IDENTITY \
         PRIMARY KEY, customer text NOT NULL, product_id bigint NOT NULL, quantity integer NOT NULL); \
         INSERT INTO bench_orders (customer, product_id, quantity) VALUES ('alice', 1, 2); TRUNCATE idempotency_keys CASCADE",
    )
    .await
    .expect("the tables of the bench");
    conn.batch_execute(rows::TABLE).await.expect("the rows of the bench");
}

pub fn address_of(server: &mut Child) -> SocketAddr {
    let mut line = String::new();
    let stdout = server.stdout.take().expect("its output");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    line.trim().parse().expect("an address")
}

pub async fn insert_order(conn: &mut AsyncPgConnection, new: &NewOrder) -> Result<Order> {
    diesel::insert_into(bench_orders::table)
        .values((
            bench_orders::customer.eq("alice"),
            bench_orders::product_id.eq(new.product_id),
            bench_orders::quantity.eq(new.quantity),
        ))
        .returning(Order::as_returning())
        .get_result(conn)
        .await
        .map_err(ErrorInternalServerError)
}

pub fn answer(order: &Order) -> HttpResponse {
    HttpResponse::Created().json(order)
}

async fn hello() -> HttpResponse {
    HttpResponse::Ok().body("hello")
}

async fn select(pool: Data<PgPool>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let order: Order = bench_orders::table
        .find(1)
        .select(Order::as_select())
        .first(&mut conn)
        .await
        .map_err(ErrorInternalServerError)?;
    Ok(HttpResponse::Ok().json(order))
}

/// The request of an order, answered by what is there already.
async fn select_for_order(pool: Data<PgPool>, _new: Json<NewOrder>) -> Result<HttpResponse> {
    select(pool).await
}

async fn order(pool: Data<PgPool>, new: Json<NewOrder>) -> Result<HttpResponse> {
    let order = {
        let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
        insert_order(&mut conn, &new).await?
    };
    Ok(answer(&order))
}

async fn order_tx(pool: Data<PgPool>, new: Json<NewOrder>) -> Result<HttpResponse> {
    type Manager = <AsyncPgConnection as AsyncConnection>::TransactionManager;
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    Manager::begin_transaction(&mut *conn).await.map_err(ErrorInternalServerError)?;
    let order = insert_order(&mut conn, &new).await?;
    Manager::commit_transaction(&mut *conn).await.map_err(ErrorInternalServerError)?;
    Ok(answer(&order))
}

async fn order_idemtx(mut tx: IdemTx, new: Json<NewOrder>) -> Result<HttpResponse> {
    let order = insert_order(&mut tx, &new).await?;
    Ok(answer(&order))
}

/// As a user makes one: each connection is driven by the worker that opened it.
fn pool_of_the_workers(url: &str) -> PgPool {
    let mut config = ManagerConfig::default();
    config.recycling_method = RecyclingMethod::Fast;
    PgPool::builder()
        .max_size(10)
        .test_on_check_out(false)
        .build_unchecked(AsyncDieselConnectionManager::new_with_config(url, config))
}

pub fn serve(url: &str) {
    let url = url.to_owned();
    actix_web::rt::System::new().block_on(async move {
        let pool = pool(&url).expect("a pool");
        let engine = Idempotency::postgres(pool.clone());
        let crowd = PoolBuilder::new(&url).max_size(32.try_into().expect("more than none")).build().expect("a pool");
        let (crowd, seen) = (Data::new(rows::Crowd(crowd)), Data::new(rows::Seen::new()));
        let workers = Idempotency::postgres(pool_of_the_workers(&url)).with(Policy::new().atomic());
        let server = HttpServer::new(move || {
            App::new()
                .app_data(Data::new(pool.clone()))
                .app_data(Data::new(Once::of(&engine)))
                .app_data(crowd.clone())
                .app_data(seen.clone())
                .service(
                    web::scope("/bare")
                        .route("/hello", web::get().to(hello))
                        .route("/select", web::get().to(select))
                        .route("/select", web::post().to(select_for_order))
                        .route("/order", web::post().to(order))
                        .route("/order-tx", web::post().to(order_tx))
                        .route("/order-by-hand", web::post().to(by_hand::order))
                        .route("/default-by-hand", web::post().to(by_hand::default))
                        .route("/atomic-by-hand", web::post().to(by_hand::atomic))
                        .configure(once::routes)
                        .configure(rows::routes),
                )
                .service(
                    web::scope("/wrapped")
                        .wrap(engine.clone())
                        .route("/hello", web::get().to(hello))
                        .route("/order", web::post().to(order))
                        .route("/order-idemtx", web::post().to(order_idemtx)),
                )
                .configure(|config| forms::configure(config, &engine, web::post().to(order_idemtx)))
                .service(
                    web::scope("/atomic")
                        .wrap(engine.with(Policy::new().atomic()))
                        .route("/order-idemtx", web::post().to(order_idemtx)),
                )
                .service(web::scope("/inbox").configure(inbox::routes))
                .service(
                    web::scope("/workers").wrap(workers.clone()).route("/order-idemtx", web::post().to(order_idemtx)),
                )
        })
        .workers(2)
        .bind(("127.0.0.1", 0))
        .expect("a port");
        println!("{}", server.addrs()[0]);
        server.run().await.expect("to serve");
    });
}
