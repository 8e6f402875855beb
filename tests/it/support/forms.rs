//! A service whose forms carry tokens, and a database whose clock the test sets.

use std::time::Duration;

use actix_idempotency::{FormTokens, IdemTx, Idempotency, PgPool, Policy, Secret, TokenIssuer};
use actix_web::{
    FromRequest, HttpRequest, HttpResponse, Result,
    http::StatusCode,
    web::{self, Data, Form, Payload},
};
use futures_util::StreamExt;
use reqwest::RequestBuilder;
use serde::Deserialize;

use super::{
    app::{created, effect_in},
    client::{Answer, RequestExt},
    db::Db,
    gate::Gate,
    rig::{Rig, Twin},
};

pub const FORM: &str = "application/x-www-form-urlencoded";
pub const TEN_MINUTES: Duration = Duration::from_secs(600);

pub fn secret(byte: u8) -> Secret {
    Secret::new([byte; 32])
}

fn user(request: &HttpRequest) -> Option<String> {
    request.headers().get("x-user")?.to_str().ok().map(str::to_owned)
}

/// Of the user that `x-user` names.
pub fn tokens(keys: &[u8]) -> FormTokens {
    FormTokens::new(keys.iter().copied().map(secret)).principal(user)
}

#[derive(Deserialize)]
struct Order {
    sku: String,
}

/// 422 for an empty sku. With `x-hold` it waits at the gate, with `x-fail` it answers with that status.
async fn order(mut tx: IdemTx, request: HttpRequest, gate: Data<Gate>, order: Form<Order>) -> Result<HttpResponse> {
    if order.sku.is_empty() {
        return Ok(HttpResponse::UnprocessableEntity().body("Which one?"));
    }
    let id = effect_in(&mut tx, &order.sku).await?;
    if request.headers().contains_key("x-hold") {
        gate.pass().await;
    }
    Ok(match request.headers().get("x-fail") {
        Some(status) => HttpResponse::build(StatusCode::from_bytes(status.as_bytes()).unwrap()).body("failed"),
        None => created(id),
    })
}

/// Tells how many bytes have come.
async fn upload(request: HttpRequest, mut body: Payload) -> Result<HttpResponse> {
    let mut length = 0;
    while let Some(piece) = body.next().await {
        length += piece?.len();
    }
    let mut tx = IdemTx::extract(&request).await?;
    effect_in(&mut tx, "upload").await?;
    Ok(HttpResponse::Created().body(length.to_string()))
}

async fn page(issuer: TokenIssuer) -> Result<HttpResponse> {
    Ok(HttpResponse::Ok().content_type("text/html").body(issuer.issue("order")?.hidden_input()))
}

/// `/order` and `/other` are forms, and `/order/page` shows the first; `/upload` reads its body, `/stream` has it
/// streamed through. `/tokens/…` issues for each.
pub fn routes(
    policy: Policy,
    tokens: FormTokens,
) -> impl Fn(&mut web::ServiceConfig, &Idempotency, &PgPool) + Clone + Send + 'static {
    move |config, idempotency, _| {
        for action in ["order", "other", "upload", "stream"] {
            // No transaction is open while a body streams through.
            let policy = if action == "stream" { Policy::new().stream_body() } else { policy.clone() };
            let wrap = idempotency.with(policy.form_token(&tokens, action));
            let resource = web::resource(format!("/{action}")).wrap(wrap);
            config.route(&format!("/tokens/{action}"), tokens.route(action)).service(match action {
                "upload" | "stream" => resource.route(web::post().to(upload)),
                _ => resource.route(web::get().to(HttpResponse::Ok)).route(web::post().to(order)),
            });
        }
        config.app_data(Data::new(tokens.clone())).route("/order/page", web::get().to(page));
    }
}

/// Under this policy, with a key of the test's own.
pub async fn rig(policy: Policy) -> Rig {
    rig_on(Db::new().await, policy, tokens(&[1])).await
}

pub async fn rig_on(db: Db, policy: Policy, tokens: FormTokens) -> Rig {
    let pool = db.pool(5);
    Rig::builder().on(db, pool).serve(routes(policy, tokens)).await
}

/// The policies that decide in different ways who runs.
pub fn policies() -> [Policy; 2] {
    [Policy::new(), Policy::new().atomic()]
}

pub trait FormExt {
    /// With these fields as its body.
    fn form(self, fields: &[(&str, &str)]) -> Self;
}

impl FormExt for RequestBuilder {
    fn form(self, fields: &[(&str, &str)]) -> Self {
        self.header("content-type", FORM).body(serde_urlencoded::to_string(fields).unwrap())
    }
}

pub trait Forms {
    fn at(&self, path: &str) -> RequestBuilder;
    fn show(&self, path: &str) -> RequestBuilder;

    /// A token for this action, of alice.
    async fn token(&self, action: &str) -> String {
        self.token_of("alice", action).await
    }

    async fn token_of(&self, user: &str, action: &str) -> String {
        let answer = self.show(&format!("/tokens/{action}")).header("x-user", user).answer().await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["form_token"].as_str().unwrap().to_owned()
    }

    /// The form of `/order`, filled in by alice.
    fn submit(&self, token: &str, sku: &str) -> RequestBuilder {
        self.submit_to("/order", token, sku)
    }

    fn submit_to(&self, path: &str, token: &str, sku: &str) -> RequestBuilder {
        self.at(path).header("x-user", "alice").form(&[("form_token", token), ("sku", sku)])
    }
}

impl Forms for Rig {
    fn at(&self, path: &str) -> RequestBuilder {
        self.post(path)
    }

    fn show(&self, path: &str) -> RequestBuilder {
        self.get(path)
    }
}

impl Forms for Twin {
    fn at(&self, path: &str) -> RequestBuilder {
        self.post(path)
    }

    fn show(&self, path: &str) -> RequestBuilder {
        self.get(path)
    }
}

/// It ran.
#[track_caller]
pub fn assert_first(answer: &Answer) {
    assert!(answer.status == 201 && !answer.is_replay(), "{answer:?}");
}

/// Status and code of a refusal.
#[track_caller]
pub fn assert_refused(answer: &Answer, status: u16, code: &str) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (status, code), "{answer:?}");
}

/// A database whose clock is as far from that of this machine as the test says: functions of the same names stand
/// before the system's own in its search path.
pub async fn db_with_a_clock() -> Db {
    let db = Db::new().await;
    db.run(&format!(
        "CREATE SCHEMA clock; CREATE TABLE clock.shift (by interval NOT NULL); INSERT INTO clock.shift VALUES ('0');
         CREATE FUNCTION clock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
             AS 'SELECT pg_catalog.clock_timestamp() + by FROM clock.shift';
         CREATE FUNCTION clock.now() RETURNS timestamptz LANGUAGE sql STABLE
             AS 'SELECT pg_catalog.now() + by FROM clock.shift';
         ALTER DATABASE {} SET search_path = clock, pg_catalog, public",
        db.name
    ))
    .await;
    db
}

/// Sets it; the clock of the process stays as it is.
pub async fn set_clock(db: &Db, shift: &str) {
    db.run(&format!("UPDATE clock.shift SET by = '{shift}'")).await;
}
