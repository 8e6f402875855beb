//! Checkout: a page for browsers, without a script. Its form has no key of its own, so the shop issues one with it.

use std::time::Duration;

use actix_idempotency::{
    Code, Decrement, FormToken, FormTokens, GuardedError, IdemTx, Idempotency, OnOutstanding, PgPool, Policy, Secret,
    TokenIssuer, Wording,
};
use actix_web::{
    HttpMessage, HttpRequest, HttpResponse, Result,
    body::{EitherBody, MessageBody},
    dev::{ServiceRequest, ServiceResponse},
    http::{StatusCode, header},
    middleware::{Next, from_fn},
    web,
};
use base64::{Engine, prelude::BASE64_STANDARD};
use diesel::prelude::*;
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use html_escape::{encode_double_quoted_attribute, encode_text};
use serde::Deserialize;

use crate::{
    error::ShopError,
    schema::{orders, products},
};

/// A real shop has keys that outlive its processes and are the same in all of them.
pub fn tokens() -> FormTokens {
    FormTokens::new([Secret::new(rand::random::<[u8; 32]>())])
}

pub fn configure(config: &mut web::ServiceConfig, idempotency: &Idempotency, tokens: &FormTokens) {
    let told = |what: &str| {
        let content = format!("<p>{what}</p>\n<p><a href=\"/checkout\">Start again</a></p>");
        Wording::new().body("text/html; charset=utf-8", page(&content))
    };
    let policy = Policy::new()
        .form_token(tokens, "checkout")
        // The second click sees what the first one gets.
        .on_outstanding(OnOutstanding::Wait(Duration::from_secs(10)))
        .wording(
            Code::TokenUsed,
            told("This form was sent already, with another order in it. Nothing more was ordered."),
        )
        .wording(Code::TokenExpired, told("This form was open for too long. Nothing was ordered."))
        .atomic();
    config.app_data(web::Data::new(tokens.clone())).service(
        web::scope("/checkout")
            .wrap(idempotency.with(policy))
            // Outside of it: who is not logged in is asked to, whatever he sends.
            .wrap(from_fn(authenticate))
            .route("", web::get().to(show))
            // A path of its own: of what a POST is sent to, browsers forget the page that the back button would show.
            .route("/order", web::post().to(place)),
    );
}

async fn show(issuer: TokenIssuer, pool: web::Data<PgPool>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(|_| ShopError::NoConnection)?;
    let token = issuer.issue("checkout")?;
    let form = form(&mut conn, &token, "", &Wish { product_id: 1, quantity: "1".into() }).await?;
    Ok(html(StatusCode::OK, &form))
}

/// What somebody has typed.
#[derive(Deserialize)]
struct Wish {
    product_id: i64,
    quantity: String,
}

/// What is wrong with a form is shown above the same form, with the same token; the answer is 422, so that the token
/// is free for the corrected one.
async fn place(
    visitor: web::ReqData<Visitor>,
    token: FormToken,
    mut tx: IdemTx,
    wish: web::Form<Wish>,
) -> Result<HttpResponse> {
    let Some(quantity) = wish.quantity.trim().parse().ok().filter(|quantity: &i32| *quantity >= 1) else {
        let form = form(&mut tx, &token, "How many? At least 1.", &wish).await?;
        return Ok(html(StatusCode::UNPROCESSABLE_ENTITY, &form));
    };
    match products::stock.decrement(wish.product_id, quantity).execute(&mut tx).await {
        Err(GuardedError::NotEnough { left, .. }) => {
            let form = form(&mut tx, &token, &format!("There are {left} left."), &wish).await?;
            return Ok(html(StatusCode::UNPROCESSABLE_ENTITY, &form));
        }
        left => left.map_err(|_| ShopError::NotFound)?,
    };
    let id: i64 = diesel::insert_into(orders::table)
        .values((
            orders::customer.eq(&visitor.0),
            orders::product_id.eq(wish.product_id),
            orders::quantity.eq(quantity),
        ))
        .returning(orders::id)
        .get_result(&mut *tx)
        .await
        .map_err(ShopError::from)?;
    let thanks = format!(
        "<h1>Thank you, {}</h1>\n<p>Your order has the number <b>{id}</b>.</p>\n<p><a href=\"/checkout\">Another one</a></p>",
        encode_text(&visitor.0)
    );
    Ok(html(StatusCode::CREATED, &thanks))
}

async fn form(conn: &mut AsyncPgConnection, token: &FormToken, error: &str, wish: &Wish) -> Result<String> {
    let all: Vec<(i64, String, i32)> = products::table
        .order(products::id)
        .select((products::id, products::name, products::stock))
        .load(conn)
        .await
        .map_err(ShopError::from)?;
    let option = |(id, name, stock): &(i64, String, i32)| {
        let selected = if *id == wish.product_id { " selected" } else { "" };
        format!("<option value=\"{id}\"{selected}>{} ({stock} left)</option>", encode_text(name))
    };
    let message = if error.is_empty() { String::new() } else { format!("<p class=\"error\">{error}</p>") };
    Ok(include_str!("checkout.html")
        .replace("{message}", &message)
        .replace("{token}", &token.hidden_input())
        .replace("{products}", &all.iter().map(option).collect::<String>())
        .replace("{quantity}", &encode_double_quoted_attribute(&wish.quantity)))
}

fn page(content: &str) -> String {
    include_str!("page.html").replace("{content}", content)
}

fn html(status: StatusCode, content: &str) -> HttpResponse {
    HttpResponse::build(status)
        .content_type("text/html; charset=utf-8")
        // Not `no-store`: the back button is to show the form as it was, with its token.
        .insert_header((header::CACHE_CONTROL, "private, no-cache"))
        .body(page(content))
}

/// Whoever logs in by the browser's own dialog: a demo, any password will do. The token belongs to this credential.
#[derive(Clone)]
struct Visitor(String);

impl Visitor {
    fn of(request: &HttpRequest) -> Option<Self> {
        let basic = request.headers().get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Basic ")?;
        let credential = String::from_utf8(BASE64_STANDARD.decode(basic).ok()?).ok()?;
        Some(Self(credential.split_once(':')?.0.to_owned()))
    }
}

async fn authenticate<B: MessageBody>(
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<EitherBody<B>>> {
    if let Some(visitor) = Visitor::of(request.request()) {
        request.extensions_mut().insert(visitor);
        return Ok(next.call(request).await?.map_into_left_body());
    }
    let challenge = (header::WWW_AUTHENTICATE, "Basic realm=\"any name, any password\"");
    let response = HttpResponse::Unauthorized().insert_header(challenge).finish();
    Ok(request.into_response(response).map_into_right_body())
}
