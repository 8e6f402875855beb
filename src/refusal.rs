//! What a client is told when there is no answer: `application/problem+json` (RFC 9457) with a stable
//! `code`.
//!
//! | status | `code` | when | `Retry-After` |
//! |---|---|---|---|
//! | 400 | `key-missing` | the policy requires a key | |
//! | 400 | `key-invalid` | the key cannot be read | |
//! | 400 | `body-truncated` | the body was cut off | |
//! | 401 | `principal-missing` | the policy wants to know who asks | |
//! | 408 | `body-timeout` | the body did not arrive in time | |
//! | 409 | `outstanding` | the first request still runs | yes |
//! | 409 | `lease-lost` | this attempt was overtaken by another | yes |
//! | 409 | `serialization` | the transaction lost against another one (40001) | yes |
//! | 409 | `constraint-violated` | a deferred constraint failed at COMMIT | |
//! | 413 | `body-too-large` | the body is over the request limit | |
//! | 422 | `key-reused` | same key, other request | |
//! | 500 | `handler-panicked` | the handler panicked; the key is released | |
//! | 500 | `body-failed` | the body of the answer failed before it was kept; the key is released | |
//! | 500 | `transaction-aborted` | the handler swallowed the error of a statement; rolled back | |
//! | 500 | `transaction-misused` | see [`IdemTx`](crate::IdemTx); what it has committed by itself stays, and is not run again | |
//! | 500 | `misconfigured` | the service is set up wrong; its log says how | |
//! | 503 | `store-unavailable` | no store, no execution | yes |
//! | 503 | `busy` | too many requests run already | yes |
//! | 503 | `shutting-down` | this process takes no new work | yes |
//! | 503 | `newer-version` | the row was written by a newer version of this crate | yes |
//! | 503 | `outcome-unknown` | it may have been executed: retry with the same key | yes |
//!
//! Nothing was executed for any of them but `lease-lost`, `handler-panicked`, `body-failed`,
//! `transaction-misused` and `outcome-unknown`, or it was rolled back.
//! SQL, hosts and causes go to the log, never into a body.

use std::{fmt, sync::Arc, time::Duration};

use actix_web::{
    HttpResponse, ResponseError,
    body::BoxBody,
    http::{
        StatusCode,
        header::{self, HeaderValue},
    },
};
use serde::Serialize;

use crate::{key::InvalidKey, snapshot::ResponseSnapshot};

/// The stable `code` of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// 400: the policy requires a key.
    KeyMissing,
    /// 400: the key cannot be read.
    KeyInvalid,
    /// 400: the body was cut off.
    BodyTruncated,
    /// 401: the policy wants to know who asks.
    PrincipalMissing,
    /// 408: the body did not arrive in time.
    BodyTimeout,
    /// 409: the first request still runs.
    Outstanding,
    /// 409: this attempt was overtaken by another.
    LeaseLost,
    /// 409: the transaction lost against another one.
    Serialization,
    /// 409: a deferred constraint failed at COMMIT.
    ConstraintViolated,
    /// 413: the body is over the request limit.
    BodyTooLarge,
    /// 422: same key, other request.
    KeyReused,
    /// 500: the handler panicked.
    HandlerPanicked,
    /// 500: the body of the answer failed before it was kept.
    BodyFailed,
    /// 500: the handler swallowed the error of a statement.
    TransactionAborted,
    /// 500: the handler left its transaction as it must not.
    TransactionMisused,
    /// 500: the service is set up wrong.
    Misconfigured,
    /// 503: no store, no execution.
    StoreUnavailable,
    /// 503: too many requests run already.
    Busy,
    /// 503: this process takes no new work.
    ShuttingDown,
    /// 503: the row was written by a newer version of this crate.
    NewerVersion,
    /// 503: it may have been executed.
    OutcomeUnknown,
}

impl Code {
    /// The code on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.row().0
    }

    /// The status it is sent with.
    #[must_use]
    pub fn status(self) -> StatusCode {
        self.row().1
    }

    fn title(self) -> &'static str {
        self.row().2
    }

    fn detail(self) -> &'static str {
        self.row().3
    }

    /// Code, status, title (the draft's own words where it has some: section 2.7) and what to do.
    #[rustfmt::skip]
    fn row(self) -> (&'static str, StatusCode, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Self::KeyMissing => ("key-missing", S::BAD_REQUEST, "Idempotency-Key is missing",
                "Send an Idempotency-Key header: one key for one intent, the same on every retry of it."),
            Self::KeyInvalid => ("key-invalid", S::BAD_REQUEST, "Idempotency-Key is invalid",
                "Send exactly one Idempotency-Key header with 1 to 255 visible ASCII characters, a UUID for example."),
            Self::BodyTruncated => ("body-truncated", S::BAD_REQUEST, "The request body is incomplete",
                "The body was cut off or cannot be read. Nothing was done; retry with the same key."),
            Self::PrincipalMissing => ("principal-missing", S::UNAUTHORIZED, "Authentication is required",
                "Keys belong to somebody here: authenticate and retry with the same key."),
            Self::BodyTimeout => ("body-timeout", S::REQUEST_TIMEOUT, "The request body did not arrive in time",
                "Nothing was done; retry with the same key."),
            Self::Outstanding => ("outstanding", S::CONFLICT, "A request is outstanding for this Idempotency-Key",
                "The first request with this key still runs. Retry with the same key to get its answer."),
            Self::LeaseLost => ("lease-lost", S::CONFLICT, "Another attempt has taken over this Idempotency-Key",
                "This attempt took longer than its lease. Retry with the same key to get the answer of the other one."),
            Self::Serialization => ("serialization", S::CONFLICT, "Another transaction was first",
                "Nothing was done; retry with the same key."),
            Self::ConstraintViolated => ("constraint-violated", S::CONFLICT, "A constraint was violated",
                "Nothing was done: the request contradicts what is stored."),
            Self::BodyTooLarge => ("body-too-large", S::PAYLOAD_TOO_LARGE, "The request body is too large",
                "Nothing was done."),
            Self::KeyReused => ("key-reused", S::UNPROCESSABLE_ENTITY, "Idempotency-Key is already used",
                "This key was used with another request. Send the request it was used with, or use a new key."),
            Self::HandlerPanicked => ("handler-panicked", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The request failed and its key is free: retry with the same key."),
            Self::BodyFailed => ("body-failed", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The answer could not be produced and its key is free: retry with the same key."),
            Self::TransactionAborted => ("transaction-aborted", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The request failed, nothing was done, and its key is free: retry with the same key."),
            Self::TransactionMisused => ("transaction-misused", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The request failed; the log of the service says why."),
            Self::Misconfigured => ("misconfigured", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The service is set up wrong. Nothing was done."),
            Self::StoreUnavailable => ("store-unavailable", S::SERVICE_UNAVAILABLE, "Service unavailable",
                "Nothing was done; retry with the same key."),
            Self::Busy => ("busy", S::SERVICE_UNAVAILABLE, "Service unavailable",
                "Too many requests run already. Nothing was done; retry with the same key."),
            Self::ShuttingDown => ("shutting-down", S::SERVICE_UNAVAILABLE, "Service unavailable",
                "This server is going down. Nothing was done; retry with the same key."),
            Self::NewerVersion => ("newer-version", S::SERVICE_UNAVAILABLE, "Service unavailable",
                "Another version of this service has the answer; retry with the same key."),
            Self::OutcomeUnknown => ("outcome-unknown", S::SERVICE_UNAVAILABLE, "The outcome is unknown",
                "The request may have been executed. Retry with the same key and you will be told."),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A refusal: a [`Code`], and how long to wait. As an actix error it becomes the documented answer.
#[derive(Debug, Clone)]
pub struct Refusal {
    code: Code,
    detail: Option<String>,
    retry_after: Option<Duration>,
    documentation: Option<Arc<str>>,
}

impl Refusal {
    pub(crate) fn new(code: Code) -> Self {
        let retry_after = (code.status() == StatusCode::SERVICE_UNAVAILABLE
            || matches!(code, Code::LeaseLost | Code::Serialization))
        .then_some(Duration::from_secs(1));
        Self { code, detail: None, retry_after, documentation: None }
    }

    /// Whole seconds, rounded up, on the wire.
    pub(crate) fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    pub(crate) fn documented(mut self, link: Option<&Arc<str>>) -> Self {
        self.documentation = link.cloned();
        self
    }

    fn problem(&self) -> Problem<'_> {
        Problem {
            r#type: self.documentation.as_deref().unwrap_or("about:blank"),
            title: self.code.title(),
            status: self.code.status().as_u16(),
            detail: self.detail.as_deref().unwrap_or(self.code.detail()),
            code: self.code.as_str(),
        }
    }

    /// What is refused.
    #[must_use]
    pub fn code(&self) -> Code {
        self.code
    }
}

impl From<Code> for Refusal {
    fn from(code: Code) -> Self {
        Self::new(code)
    }
}

impl From<InvalidKey> for Refusal {
    fn from(invalid: InvalidKey) -> Self {
        let mut refusal = Self::new(Code::KeyInvalid);
        refusal.detail = Some(format!("{invalid}. {}", Code::KeyInvalid.detail()));
        refusal
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.code.title())
    }
}

impl std::error::Error for Refusal {}

/// A refusal that is kept: what was done must not be done again.
pub(crate) fn snapshot(code: Code) -> ResponseSnapshot {
    let refusal = Refusal::new(code);
    ResponseSnapshot::json(code.status(), &refusal.problem())
        .map(|snapshot| snapshot.with_content_type(PROBLEM_JSON))
        .unwrap_or_else(|_| ResponseSnapshot::new(code.status()))
}

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

/// RFC 9457, section 3, with `code` as the extension that programs read.
#[derive(Serialize)]
struct Problem<'a> {
    r#type: &'a str,
    title: &'a str,
    status: u16,
    detail: &'a str,
    code: &'a str,
}

impl ResponseError for Refusal {
    fn status_code(&self) -> StatusCode {
        self.code.status()
    }

    fn error_response(&self) -> HttpResponse<BoxBody> {
        let problem = self.problem();
        let mut response = HttpResponse::build(self.code.status());
        response
            .content_type(PROBLEM_JSON)
            .insert_header((header::CONTENT_LANGUAGE, "en"))
            .insert_header((header::CACHE_CONTROL, "no-store"));
        if let Some(link) = &self.documentation {
            response.insert_header((header::LINK, format!("<{link}>; rel=\"describedby\"; type=\"text/html\"")));
        }
        if let Some(wait) = self.retry_after {
            response.insert_header((header::RETRY_AFTER, wait.as_millis().div_ceil(1000).max(1).to_string()));
        }
        match serde_json::to_vec(&problem) {
            Ok(body) => response.body(body),
            Err(_) => response.finish(),
        }
    }
}
