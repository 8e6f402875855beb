//! The order as work under a key of its own.

use actix_idempotency::{IdemKey, Once, Outcome, PgPool, Scope};
use actix_web::{
    HttpRequest, HttpResponse, Result,
    error::{ErrorConflict, ErrorInternalServerError},
    web::{Data, Json, ServiceConfig, post},
};

use crate::server::{NewOrder, Order, answer, insert_order};

pub fn routes(config: &mut ServiceConfig) {
    config.route("/once", post().to(run)).route("/once-in-tx", post().to(run_in));
}

fn key(request: &HttpRequest) -> &str {
    request.headers().get("idempotency-key").and_then(|key| key.to_str().ok()).unwrap_or_default()
}

fn told(outcome: Outcome<Order>) -> Result<HttpResponse> {
    let order = outcome.into_inner().ok_or_else(|| ErrorConflict("outstanding"))?;
    Ok(answer(&order))
}

async fn run(request: HttpRequest, once: Data<Once>, pool: Data<PgPool>, new: Json<NewOrder>) -> Result<HttpResponse> {
    let work = move |_: IdemKey| async move {
        let mut conn = pool.get().await.map_err(|error| error.to_string())?;
        insert_order(&mut conn, &new).await.map_err(|error| error.to_string())
    };
    let outcome = once.run(Scope::once("bench"), key(&request), &(), work).await;
    told(outcome.map_err(ErrorInternalServerError)?)
}

async fn run_in(
    request: HttpRequest,
    once: Data<Once>,
    pool: Data<PgPool>,
    new: Json<NewOrder>,
) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let work = async |conn: &mut _| insert_order(conn, &new).await;
    told(once.run_in(&mut conn, Scope::once("bench"), key(&request), &(), work).await?)
}
