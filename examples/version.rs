//! Nobody overwrites what they have not seen: `ETag` and `If-Match` from a version column.
//!
//!     ./with-postgres cargo run --example version
//!
//!     curl -i localhost:8080/notes/1                                        # ETag: "1"
//!     curl -i -X PUT localhost:8080/notes/1 -H 'If-Match: "1"' -d 'mine'    # 200, ETag: "2"
//!     curl -i -X PUT localhost:8080/notes/1 -H 'If-Match: "1"' -d 'yours'   # 412, ETag: "2": somebody was first
//!     curl -i -X PUT localhost:8080/notes/1 -d 'yours'                      # 428: say which version you have seen
//!     curl -i -X PUT localhost:8080/notes/1 -H 'If-Match: "2' -d 'yours'    # 400: unreadable is not absent
//!     curl -i -X DELETE localhost:8080/notes/1 -H 'If-Match: *'             # 204: whatever it is, if it is there
//!     curl -i -X POST localhost:8080/notes/2/views                          # counts, however many ask at once

use std::env;

use actix_idempotency::{IfMatch, PgPool, Refusal, Retry, VersionError, Versioned, pool, version::etag, versioned};
use actix_web::{App, HttpResponse, HttpServer, Result, delete, error::ErrorNotFound, get, post, put, web};
use diesel::prelude::*;
use diesel_async::{RunQueryDsl, SimpleAsyncConnection};

diesel::table! {
    notes (id) {
        id -> BigInt,
        text -> Text,
        views -> Integer,
        version -> Integer,
    }
}
// The one line that makes `notes::table.at(id, version)` of it.
versioned!(notes.version);

const TABLE: &str = "DROP TABLE IF EXISTS notes;
    CREATE TABLE notes (
        id bigint PRIMARY KEY, text text NOT NULL, views int NOT NULL DEFAULT 0, version int NOT NULL DEFAULT 1
    );
    INSERT INTO notes VALUES (1, 'first'), (2, 'second');";

#[get("/notes/{id}")]
async fn show(pool: web::Data<PgPool>, id: web::Path<i64>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(Refusal::from)?;
    let (text, version): (String, i32) = notes::table
        .find(*id)
        .select((notes::text, notes::version))
        .get_result(&mut conn)
        .await
        .optional()
        .map_err(Refusal::from)?
        .ok_or_else(|| ErrorNotFound("no such note"))?;
    Ok(HttpResponse::Ok().insert_header(etag(version)).body(text))
}

#[put("/notes/{id}")]
async fn write(pool: web::Data<PgPool>, id: web::Path<i64>, if_match: IfMatch, text: String) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(Refusal::from)?;
    let version = notes::table.at(*id, if_match).set(notes::text.eq(text)).execute(&mut conn).await?;
    Ok(HttpResponse::Ok().insert_header(etag(version)).finish())
}

#[delete("/notes/{id}")]
async fn remove(pool: web::Data<PgPool>, id: web::Path<i64>, if_match: IfMatch) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(Refusal::from)?;
    notes::table.at(*id, if_match).delete().execute(&mut conn).await?;
    Ok(HttpResponse::NoContent().finish())
}

/// Here no client has an opinion about the version: who loses looks again.
#[post("/notes/{id}/views")]
async fn view(pool: web::Data<PgPool>, id: web::Path<i64>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(Refusal::from)?;
    let views = Retry::new()
        .tries(20)
        .run(&mut conn, async |conn| {
            let (views, version): (i32, i32) =
                notes::table.find(*id).select((notes::views, notes::version)).get_result(conn).await?;
            let counted = notes::table.at(*id, version).set(notes::views.eq(views + 1)).returning(notes::views);
            counted.get_result::<i32>(conn).await
        })
        .await
        .map_err(|error| match error {
            VersionError::Query(diesel::NotFound) => VersionError::Gone,
            other => other,
        })?;
    Ok(HttpResponse::Ok().json(views))
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this by ./with-postgres")?;
    let bind = env::var("BIND").unwrap_or_else(|_| "127.0.0.1:8080".into());
    let pool = pool(&url)?;
    pool.get().await?.batch_execute(TABLE).await?;

    let server = HttpServer::new(move || {
        App::new().app_data(web::Data::new(pool.clone())).service(show).service(write).service(remove).service(view)
    })
    .bind(bind)?;
    println!("listening on http://{}", server.addrs()[0]);
    server.run().await?;
    Ok(())
}
