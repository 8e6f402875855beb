//! A handler that runs its own transaction, and stores its answer in it.
//!
//!     ./with-postgres cargo run --example complete_in
//!
//!     curl -si localhost:8080/notes -H 'Idempotency-Key: n1' -d 'remember the milk'
//!     curl -si localhost:8080/notes -H 'Idempotency-Key: n1' -d 'remember the milk'     # a replay
//!     curl -s localhost:8080/notes                                                       # one note

use std::env;

use actix_idempotency::{IdemKey, Idempotency, PgPool, Policy, Refusal, ResponseSnapshot, migrations, pool};
use actix_web::{App, HttpResponse, HttpServer, Result, http::StatusCode, web};
use diesel::prelude::*;
use diesel_async::{AsyncConnection, RunQueryDsl, SimpleAsyncConnection};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

diesel::table! {
    notes (id) {
        id -> BigInt,
        text -> Text,
    }
}

async fn create(key: IdemKey, pool: web::Data<PgPool>, text: String) -> Result<ResponseSnapshot, Refusal> {
    let mut conn = pool.get().await?;
    conn.transaction(async |conn| {
        let id: i64 = diesel::insert_into(notes::table)
            .values(notes::text.eq(&text))
            .returning(notes::id)
            .get_result(conn)
            .await?;
        let answer = ResponseSnapshot::new(StatusCode::CREATED).with_body(id.to_string());
        // The last statement before COMMIT.
        key.complete_in(conn, answer.clone()).await?;
        Ok(answer)
    })
    .await
}

async fn list(pool: web::Data<PgPool>) -> Result<HttpResponse, Refusal> {
    let mut conn = pool.get().await?;
    let notes: Vec<(i64, String)> = notes::table.load(&mut conn).await?;
    Ok(HttpResponse::Ok().json(notes))
}

#[actix_web::main]
async fn main() -> Result<(), BoxError> {
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this by ./with-postgres")?;
    let bind = env::var("BIND").unwrap_or_else(|_| "127.0.0.1:8080".into());
    migrations::run(&url).await?;
    let pool = pool(&url)?;
    pool.get()
        .await?
        .batch_execute("CREATE TABLE IF NOT EXISTS notes (id bigint GENERATED ALWAYS AS IDENTITY, text text NOT NULL)")
        .await?;

    let idempotency = Idempotency::postgres(pool.clone()).with(Policy::new().anonymous());
    let server = HttpServer::new(move || {
        App::new().app_data(web::Data::new(pool.clone())).service(
            web::resource("/notes").wrap(idempotency.clone()).route(web::post().to(create)).route(web::get().to(list)),
        )
    })
    .bind(bind)?;
    println!("listening on http://{}", server.addrs()[0]);
    server.run().await?;
    Ok(())
}
