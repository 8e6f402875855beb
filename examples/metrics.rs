//! What is going on, as numbers for Prometheus: counters, how long things take, what is held and how old it is.
//!
//!     ./with-postgres cargo run --example metrics
//!
//!     order() { curl -si localhost:8080/orders -H "Idempotency-Key: $1" -d "$2"; echo; }
//!
//!     order k1 tea; order k1 tea                  # fresh, and replayed
//!     order k1 coffee                             # 422: key-reused
//!     order k2 fails; order k2 fails              # 500 twice: released, retried
//!     order k3 slow & sleep 1; order k3 slow; wait   # one runs, one waits for its answer
//!     curl -s localhost:8080/metrics              # all of that
//!
//! `examples/metrics-dashboard.json` is a dashboard for Grafana (Dashboards, New, Import) that shows these names.

use std::{env, time::Duration};

use actix_idempotency::{
    Gauges, Idempotency, OnOutstanding, Policy,
    migrations::{self, OUTSTANDING_INDEX},
    pool,
};
use actix_web::{App, HttpResponse, HttpServer, get, post, rt::time::sleep, web};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// From the fastest claim to the longest wait. Without buckets the exporter makes summaries, which cannot be added up
/// over the processes of a service.
const SECONDS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0];

fn once_per_key() -> Idempotency {
    let wait = OnOutstanding::Wait(Duration::from_secs(10));
    Idempotency::from_app_data().with(Policy::new().anonymous().on_outstanding(wait))
}

#[post("/orders", wrap = "once_per_key()")]
async fn order(what: String) -> HttpResponse {
    match what.as_str() {
        "fails" => return HttpResponse::InternalServerError().finish(),
        // Slow enough for a second request.
        "slow" => sleep(Duration::from_secs(3)).await,
        _ => {}
    }
    HttpResponse::Created().body(what)
}

/// In a real service: where only Prometheus comes.
#[get("/metrics")]
async fn metrics(gauges: web::Data<Gauges>, recorded: web::Data<PrometheusHandle>) -> HttpResponse {
    // An error is a store that does not answer. What is known without it has been set.
    let _ = gauges.sample_once().await;
    HttpResponse::Ok().content_type("text/plain; version=0.0.4").body(recorded.render())
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this by ./with-postgres")?;
    let bind = env::var("BIND").unwrap_or_else(|_| "127.0.0.1:8080".into());
    migrations::run(&url).await?;
    // For the age of the oldest key that is outstanding; every completion pays a little for it.
    migrations::run_pending(&url, OUTSTANDING_INDEX).await?;

    // Before the first engine, which tells the recorder what the names mean.
    let recorded = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS)?
        .install_recorder()?;
    let idempotency = Idempotency::postgres(pool(&url)?);
    let gauges = Gauges::of(&idempotency);
    let server = HttpServer::new(move || {
        App::new()
            .app_data(web::Data::new(idempotency.clone()))
            .app_data(web::Data::new(gauges.clone()))
            .app_data(web::Data::new(recorded.clone()))
            .service(order)
            .service(metrics)
    })
    .bind(bind)?;
    println!("listening on http://{}", server.addrs()[0]);
    server.run().await?;
    Ok(())
}
