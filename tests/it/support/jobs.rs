//! Work in steps, and work without a request: the routes by which a server process is made to do it.

use actix_idempotency::{IdemKey, Idempotency, Once, OnceError, Outcome, PgPool, Policy, Scope};
use actix_web::{
    HttpResponse, Result,
    error::InternalError,
    http::StatusCode,
    web::{self, Data, Path, ServiceConfig},
};
use serde_json::json;

use super::{
    app::{created, effect},
    points,
};

pub fn routes(config: &mut ServiceConfig, idempotency: &Idempotency, policy: &Policy) {
    config.app_data(Data::new(Once::of(idempotency).with(policy.clone()))).service(
        web::scope("/jobs")
            .service(web::resource("/steps").wrap(idempotency.clone()).route(web::post().to(in_steps)))
            .service(web::resource("/charge").wrap(idempotency.clone()).route(web::post().to(charge)))
            .route("/{key}", web::post().to(job)),
    );
}

/// A payment: charged, then mailed. `fail` as its body makes the first attempt fail in between.
async fn in_steps(key: IdemKey, pool: Data<PgPool>, body: String) -> Result<HttpResponse> {
    let name = key.key().as_str().to_owned();
    let charge: i64 = key.step("charge", async || effect(&pool, &format!("charge {name}")).await).await?;
    points::reach("between-steps");
    if body == "fail" && key.attempt() == 1 {
        return Err(InternalError::new("no mail today", StatusCode::BAD_GATEWAY).into());
    }
    key.step("mail", async || effect(&pool, &format!("mail {name}")).await.map(drop)).await?;
    Ok(created(charge))
}

/// A payment, which the provider recognises by the derived key: that is its tag.
pub async fn charge(key: IdemKey, pool: Data<PgPool>) -> Result<HttpResponse> {
    Ok(created(effect(&pool, &key.derive("charge")).await?))
}

/// `Once`, and what it says.
async fn job(once: Data<Once>, pool: Data<PgPool>, key: Path<String>, body: String) -> HttpResponse {
    let (name, pool) = (key.clone(), pool.into_inner());
    let ran = once
        .run(Scope::once("job"), &key, &body, |_| async move {
            let id = effect(&pool, &name).await.map_err(|error| error.to_string())?;
            points::reach("in-job");
            Ok::<_, String>(id)
        })
        .await;
    HttpResponse::Ok().json(match ran {
        Ok(Outcome::Ran(id)) => json!({"ran": id}),
        Ok(Outcome::Replayed(id)) => json!({"replayed": id}),
        Ok(Outcome::Outstanding(wait)) => json!({"outstanding": wait.as_millis() as u64}),
        Err(OnceError::Refused(code)) => json!({"refused": code.as_str()}),
        Err(error) => json!({"failed": error.to_string()}),
    })
}
