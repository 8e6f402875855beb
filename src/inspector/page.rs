//! What all pages share: their frame, their headers, and what is said where there is none.

use actix_web::{
    HttpRequest, HttpResponse, HttpResponseBuilder,
    http::{StatusCode, header},
};
use maud::{DOCTYPE, Markup, html};
use serde::Serialize;
use serde_json::json;

use crate::{error::Error, telemetry};

/// Nothing but what this scope serves itself; and in nobody's frame.
const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                              img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// Data as a page shows them. Its JSON twin has them as they are.
pub(super) trait View {
    fn title(&self) -> String;

    fn markup(&self) -> Markup;
}

/// Why there is no such page.
#[derive(Debug)]
pub(super) struct Failure {
    status: StatusCode,
    told: &'static str,
}

impl Failure {
    pub(super) fn unreadable(told: &'static str) -> Self {
        Self { status: StatusCode::BAD_REQUEST, told }
    }

    pub(super) fn unknown(told: &'static str) -> Self {
        Self { status: StatusCode::NOT_FOUND, told }
    }

    pub(super) fn foreign() -> Self {
        let told = "This was not sent from a page of the inspector, so nothing was done. Open the page and try again.";
        Self { status: StatusCode::FORBIDDEN, told }
    }

    /// The cause is for the log.
    pub(super) fn store(error: &Error) -> Self {
        telemetry::store_failed("the inspector did not get an answer", error);
        Self { status: StatusCode::SERVICE_UNAVAILABLE, told: "The database does not answer. The log says why." }
    }

    fn title(&self) -> &'static str {
        self.status.canonical_reason().unwrap_or_default()
    }

    /// The table was written, or not.
    pub(super) fn broken_off(error: &Error) -> Self {
        let told = "The database failed meanwhile. What was erased before that stays erased: look, and erase again.";
        Self { told, ..Self::store(error) }
    }

    /// What was under way is unknown.
    pub(super) fn panicked() -> Self {
        let told = "Something of ours broke meanwhile. Look at what has become of it.";
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, told }
    }

    pub(super) fn is_unknown(&self) -> bool {
        self.status == StatusCode::NOT_FOUND
    }

    pub(super) fn page(&self) -> HttpResponse {
        framed(self.status, self.title(), html! { h1 { (self.title()) } p { (self.told) } })
    }
}

pub(super) fn page(view: Result<impl View, Failure>) -> HttpResponse {
    match view {
        Ok(view) => framed(StatusCode::OK, &view.title(), view.markup()),
        Err(failure) => failure.page(),
    }
}

/// A refusal is problem+json (RFC 9457).
pub(super) fn json<V: Serialize>(view: Result<V, Failure>) -> HttpResponse {
    match view {
        Ok(view) => protected(HttpResponse::Ok()).json(view),
        Err(failure) => {
            let problem = json!({
                "type": "about:blank",
                "title": failure.title(),
                "status": failure.status.as_u16(),
                "detail": failure.told,
            });
            protected(HttpResponse::build(failure.status)).content_type("application/problem+json").json(problem)
        }
    }
}

/// With the headers that all answers have.
pub(super) fn protected(mut response: HttpResponseBuilder) -> HttpResponseBuilder {
    response
        .insert_header((header::CONTENT_SECURITY_POLICY, CONTENT_POLICY))
        .insert_header((header::CACHE_CONTROL, "no-store"))
        .insert_header((header::X_CONTENT_TYPE_OPTIONS, "nosniff"))
        // Not `no-referrer`: a form would then be sent with `Origin: null`.
        .insert_header((header::REFERRER_POLICY, "same-origin"));
    response
}

fn framed(status: StatusCode, title: &str, content: Markup) -> HttpResponse {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) " · idempotency" }
                link rel="stylesheet" href="inspector.css";
                script src="inspector.js" defer {}
            }
            body {
                header {
                    nav { a href="overview" { "Overview" } a href="search" { "Search" } }
                    p #pulse role="status" { noscript { "Reload to see what has changed." } }
                }
                main { (content) }
            }
        }
    };
    protected(HttpResponse::build(status)).content_type("text/html; charset=utf-8").body(page.into_string())
}

pub(super) async fn style() -> HttpResponse {
    protected(HttpResponse::Ok()).content_type("text/css; charset=utf-8").body(include_str!("inspector.css"))
}

pub(super) async fn script() -> HttpResponse {
    protected(HttpResponse::Ok()).content_type("text/javascript; charset=utf-8").body(include_str!("inspector.js"))
}

pub(super) async fn nowhere(request: HttpRequest) -> HttpResponse {
    let failure = Failure::unknown("There is no such page here.");
    if request.path().ends_with(".json") { json::<()>(Err(failure)) } else { failure.page() }
}

/// A link to a page beside this one. A pair without a value is left out.
pub(super) fn link(page: &str, query: &[(&str, Option<&str>)]) -> String {
    let pairs: Vec<_> = query.iter().filter_map(|(name, value)| Some((*name, (*value)?))).collect();
    match serde_urlencoded::to_string(pairs) {
        Ok(query) if !query.is_empty() => format!("{page}?{query}"),
        _ => page.to_owned(),
    }
}
