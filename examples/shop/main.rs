//! A shop whose orders, changes, coupons and payment callbacks are safe to repeat.
//!
//!     ./with-postgres cargo run --release --example shop
//!
//! It prints the curl lines to try once it listens.

mod checkout;
mod coupons;
mod customer;
mod demo;
mod error;
mod orders;
mod payments;
mod products;
mod schema;

use std::{env, time::Duration};

use actix_idempotency::{Idempotency, Policy, migrations, pool};
use actix_web::{
    App, HttpServer,
    http::Method,
    middleware::{Logger, from_fn},
    web,
};
use diesel_migrations::{EmbeddedMigrations, embed_migrations};
use tracing_subscriber::EnvFilter;

/// What clients have to know about keys; refusals link to it.
const DOCUMENTATION: &str = "/docs/idempotency";

const MIGRATIONS: EmbeddedMigrations = embed_migrations!("examples/shop/migrations");

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()))
        .init();
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this by ./with-postgres")?;
    let bind = env::var("BIND").unwrap_or_else(|_| "127.0.0.1:8080".into());

    migrations::run(&url).await?;
    migrations::run_pending(&url, MIGRATIONS).await?;

    let pool = pool(&url)?;
    let policy = policy();
    let idempotency = Idempotency::postgres(pool.clone()).with(policy.clone());
    // An error where the store cannot be used; otherwise what is worth knowing of it.
    println!("{}", idempotency.check().await?);
    let drain = idempotency.drain();
    let machine = web::Data::new(payments::machine());
    let tokens = checkout::tokens();

    let server = HttpServer::new(move || {
        App::new()
            .wrap(Logger::default())
            .app_data(web::Data::new(pool.clone()))
            .app_data(web::Data::new(idempotency.clone()))
            .app_data(machine.clone())
            .service(Idempotency::document(&policy, DOCUMENTATION))
            .service(products::show)
            .service(payments::callback)
            .configure(|config| checkout::configure(config, &idempotency, &tokens))
            .service(
                // Whoever comes here is known, before any key is looked at.
                web::scope("").wrap(from_fn(customer::authenticate)).service(coupons::claim).service(
                    web::scope("")
                        .wrap(idempotency.clone())
                        .service(orders::create)
                        .service(orders::list)
                        .service(orders::show)
                        .service(orders::change),
                ),
            )
    })
    .shutdown_signal(drain)
    .bind(bind)?;

    let address = server.addrs()[0];
    println!("listening on http://{address}");
    demo::explain(address);
    server.run().await?;
    Ok(())
}

/// Orders live in the database alone, so that the whole request can be one transaction. With
/// `LEASE_SECONDS` it is held by a lease instead, as requests with other effects are: to watch a takeover.
fn policy() -> Policy {
    // By default PUT is not protected, since HTTP calls it idempotent; but a change of an order moves stock. What it asks
    // for includes the version that it was decided on.
    let policy = Policy::new()
        .methods([Method::POST, Method::PUT])
        .principal(customer::Customer::principal)
        .fingerprint_header("If-Match")
        .documentation(DOCUMENTATION);
    match env::var("LEASE_SECONDS").ok().and_then(|seconds| seconds.parse().ok()) {
        Some(seconds) => policy.lease(Duration::from_secs(seconds)),
        None => policy.atomic(),
    }
}
