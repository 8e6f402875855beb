//! The inspector: what is going on, what is stuck, and how to get it going again.
//!
//!     ./with-postgres cargo run --example inspector
//!
//!     order() { curl -si localhost:8080/orders -H "Idempotency-Key: $1" -d "$2"; echo; }
//!     ask() { curl -si -u operator:secret "localhost:8080/idempotency/$1"; echo; }
//!
//!     order k1 tea; order k1 tea; order k1 coffee     # 201, the same again, and 422
//!     order k2 fails                                  # 500: the key is given back
//!     curl -si localhost:8080/idempotency/overview    # 401: who are you?
//!     ask overview.json                               # all of that, in figures
//!     ask 'search.json?key=k1'                        # where a key stands
//!     ask 'key?id=k1'                                 # 400: a key is shown by the id of its row
//!
//! Then, in a browser, `http://localhost:8080/idempotency`: the operator's password is `secret`. An order of
//! `slow` takes a minute; take its key away meanwhile. `INSPECTOR_PASSWORD` is another password.

use std::{env, time::Duration};

use actix_idempotency::{
    Idempotency, Inspector, Policy,
    migrations::{self, OUTSTANDING_INDEX},
    pool,
};
use actix_web::{
    App, Error, HttpResponse, HttpServer,
    body::MessageBody,
    dev::{ServiceRequest, ServiceResponse},
    error::InternalError,
    http::header,
    middleware::{Next, from_fn},
    rt::time::sleep,
    web::{self, Data},
};
use base64::prelude::{BASE64_STANDARD, Engine};

async fn order(what: String) -> HttpResponse {
    match what.as_str() {
        "fails" => return HttpResponse::InternalServerError().finish(),
        "slow" => sleep(Duration::from_secs(60)).await,
        _ => {}
    }
    HttpResponse::Created().body(what)
}

/// What `Authorization` has to say.
struct Operator(String);

/// Whatever logs in your operators belongs here: this is HTTP Basic, which needs TLS in front of it.
async fn operators_only(
    request: ServiceRequest,
    next: Next<impl MessageBody>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let said = request.headers().get(header::AUTHORIZATION);
    let operator = request.app_data::<Data<Operator>>();
    if said.zip(operator).is_none_or(|(said, operator)| said.as_bytes() != operator.0.as_bytes()) {
        let ask = (header::WWW_AUTHENTICATE, "Basic realm=\"operators\"");
        let answer = HttpResponse::Unauthorized().insert_header(ask).finish();
        return Err(InternalError::from_response("not an operator", answer).into());
    }
    next.call(request).await
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this by ./with-postgres")?;
    let bind = env::var("BIND").unwrap_or_else(|_| "127.0.0.1:8080".into());
    let password = env::var("INSPECTOR_PASSWORD").unwrap_or_else(|_| "secret".into());
    migrations::run(&url).await?;
    // So that all keys that are outstanding are listed; every completion pays a little for it.
    migrations::run_pending(&url, OUTSTANDING_INDEX).await?;

    let idempotency = Idempotency::postgres(pool(&url)?).with(Policy::new().anonymous());
    // The middleware around the scope says who may come. What these orders answer is no secret.
    let inspector =
        Inspector::new(&idempotency).protected_elsewhere().show_bodies(|key| key.resource == "POST /orders");
    let operator = Data::new(Operator(format!("Basic {}", BASE64_STANDARD.encode(format!("operator:{password}")))));
    let server = HttpServer::new(move || {
        App::new()
            .app_data(operator.clone())
            .service(web::resource("/orders").wrap(idempotency.clone()).route(web::post().to(order)))
            .service(inspector.scope("/idempotency").wrap(from_fn(operators_only)))
    })
    .bind(bind)?;
    println!("listening on http://{}", server.addrs()[0]);
    server.run().await?;
    Ok(())
}
