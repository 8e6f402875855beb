//! A payment in steps: charged, then delivered, each once, whatever dies in between; and brought to an end though
//! nobody asks again.
//!
//!     ./with-postgres bash
//!     cargo run --example steps &
//!
//!     pay() { curl -si localhost:8080/payments -H "Idempotency-Key: $1" -d "$2"; echo; }
//!     pay p1 ok            # 201: charged, delivered
//!     pay p1 ok            # a replay
//!     pay p2 lost          # 502: charged, and the delivery failed
//!     pay p2 lost          # 201: only delivered; the server's output shows one charge
//!     pay p3 crash         # the process dies between charge and delivery
//!
//!     cargo run --example steps &     # a few seconds later it delivers p3 by itself:
//!     pay p3 crash                    # a replay of the answer that was made meanwhile

use std::{env, num::NonZeroU32, process, time::Duration};

use actix_idempotency::{Completer, IdemKey, Idempotency, Policy, ResponseSnapshot, migrations, pool};
use actix_web::{App, HttpServer, Result, error::InternalError, http::StatusCode, web};

/// What is left of a payment: all of it for the first attempt.
async fn pay(key: IdemKey, happens: &str) -> Result<ResponseSnapshot> {
    // The provider is given a key too, for a crash between its charge and our record of it.
    let charge: String = key.step("charge", async || charge(&key.derive("charge")).await).await?;
    let is_first = key.attempt() == 1;
    match happens {
        "lost" if is_first => return Err(InternalError::new("no delivery today", StatusCode::BAD_GATEWAY).into()),
        "crash" if is_first => process::abort(),
        _ => {}
    }
    key.step("delivery", async || deliver(&charge).await).await?;
    Ok(ResponseSnapshot::json(StatusCode::CREATED, &charge)?)
}

async fn charge(key: &str) -> Result<String> {
    println!("charged under {}…", &key[..8]);
    Ok(format!("charge-{}", &key[..8]))
}

async fn deliver(charge: &str) -> Result<()> {
    println!("delivered for {charge}");
    Ok(())
}

async fn create(key: IdemKey, happens: String) -> Result<ResponseSnapshot> {
    pay(key, &happens).await
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this by ./with-postgres")?;
    let bind = env::var("BIND").unwrap_or_else(|_| "127.0.0.1:8080".into());
    migrations::run(&url).await?;

    // A short lease and no grace, so that the demo is short too.
    let policy = Policy::new().require_key().anonymous().lease(Duration::from_secs(3));
    let idempotency = Idempotency::postgres(pool(&url)?).with(policy);
    let _completing = Completer::of_requests(&idempotency, "POST /payments", |key| async move { pay(key, "ok").await })
        .grace(Duration::ZERO)
        .interval(Duration::from_secs(1))
        .max_attempts(NonZeroU32::new(5).expect("five"))
        .spawn();

    let server = HttpServer::new(move || {
        App::new().service(web::resource("/payments").wrap(idempotency.clone()).route(web::post().to(create)))
    })
    .bind(bind)?;
    println!("listening on http://{}", server.addrs()[0]);
    server.run().await?;
    Ok(())
}
