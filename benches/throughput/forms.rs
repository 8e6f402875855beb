//! Form tokens: issued by the server without its database, and submitted.

use actix_idempotency::{FormTokens, Idempotency, Policy, Secret};
use actix_web::{
    HttpRequest, Route,
    http::header,
    test::TestRequest,
    web::{self, ServiceConfig},
};

fn tokens() -> FormTokens {
    FormTokens::new([Secret::new([7; 32])])
}

/// `submit` is what a submit runs.
pub fn configure(config: &mut ServiceConfig, engine: &Idempotency, submit: Route) {
    let wrap = engine.with(Policy::new().form_token(&tokens(), "order").atomic());
    config.route("/form/token", tokens().route("order")).service(web::resource("/form/order").wrap(wrap).route(submit));
}

/// A token for the client, made here so that the submit alone is measured.
pub fn issue() -> String {
    thread_local! {
        static ALICE: (FormTokens, HttpRequest) = (
            tokens(),
            TestRequest::get().insert_header((header::AUTHORIZATION, "Bearer alice")).to_http_request(),
        );
    }
    ALICE.with(|(tokens, alice)| tokens.issue(alice, "order").expect("a token").as_str().to_owned())
}
