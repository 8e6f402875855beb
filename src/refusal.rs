//! What a client is told when there is no answer: `application/problem+json` (RFC 9457) with a stable
//! `code`.
//!
//! | status | `code` | when | `Retry-After` |
//! |---|---|---|---|
//! | 400 | `key-missing` | the policy requires a key | |
//! | 400 | `key-invalid` | the key cannot be read | |
//! | 400 | `body-truncated` | the body was cut off | |
//! | 401 | `principal-missing` | the policy wants to know who asks | |
//! | 404 | `key-unknown` | asked for its status: nothing is known of it, or no longer | |
//! | 408 | `body-timeout` | the body did not arrive in time | |
//! | 409 | `outstanding` | the first request still runs | yes |
//! | 409 | `lease-lost` | this attempt was overtaken by another | yes |
//! | 409 | `serialization` | the transaction lost against another one (40001) | yes |
//! | 409 | `constraint-violated` | a deferred constraint failed at COMMIT | |
//! | 400 | `if-match-invalid` | the `If-Match` cannot be read | |
//! | 403 | `replay-forbidden` | the policy does not let this request see the stored answer | |
//! | 404 | `not-found` | there is no such row, or none that the caller may see | |
//! | 409 | `already-completed` | by policy: it was done, and the answer is not told again | |
//! | 409 | `stale` | the row has another version than the caller expected | |
//! | 409 | `version-overflow` | the row has the largest version there is | |
//! | 409 | `not-enough` | less is left than is asked for | |
//! | 409 | `elsewhere` | the row is in another state than the move starts from | |
//! | 409 | `move-not-allowed` | no such move is declared | |
//! | 409 | `duplicate`, or one of the service's own | a unique constraint | |
//! | 412 | `if-match-failed` | none of the versions in `If-Match` is the current one, which `ETag` tells | |
//! | 413 | `body-too-large` | the body is over the request limit | |
//! | 422 | `key-reused` | same key, other request | |
//! | 422 | `amount-invalid` | an amount that is not positive or too large to be one | |
//! | 428 | `if-match-missing` | the request must say which version it is about | |
//! | 429 | `quota-exceeded` | too many keys of this principal; never for a retry | yes |
//! | 500 | `handler-panicked` | the handler panicked; the key is released | |
//! | 500 | `body-failed` | the body of the answer failed before it was kept; the key is released | |
//! | 500 | `transaction-aborted` | the handler swallowed the error of a statement; rolled back | |
//! | 500 | `transaction-misused` | see [`IdemTx`](crate::IdemTx); what the handler has committed by itself stays, and is not run again | |
//! | 500 | `misconfigured` | the service is set up wrong; its log says how | |
//! | 500 | `query-failed` | a statement failed; its log says why | |
//! | 500 | `state-unknown` | the row is in a state that this version of the service does not know | |
//! | 503 | `store-unavailable` | no store, no execution | yes |
//! | 503 | `busy` | too many requests run already | yes |
//! | 503 | `shutting-down` | this process takes no new work | yes |
//! | 503 | `newer-version` | the row was written by a newer version of this crate | yes |
//! | 503 | `outcome-unknown` | it may have been executed: retry with the same key | yes |
//!
//! Nothing was executed for any of them but `lease-lost`, `handler-panicked`, `body-failed`,
//! `transaction-misused` and `outcome-unknown`, or it was rolled back. What a handler did outside its
//! transaction before that is done.
//! SQL, hosts and causes go to the log, never into a body.

use std::{fmt, sync::Arc, time::Duration};

use actix_web::{
    HttpResponse, ResponseError,
    body::BoxBody,
    http::{
        StatusCode,
        header::{self, ETag, HeaderName, HeaderValue},
    },
    web::Bytes,
};
use serde::Serialize;

use crate::{key::InvalidKey, policy::Policy, snapshot::ResponseSnapshot};

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
    /// 403: the policy does not let this request see the stored answer.
    ReplayForbidden,
    /// 404: asked for its status: nothing is known of the key, or no longer.
    KeyUnknown,
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
    /// 409: by policy: it was done, and the answer is not told again.
    AlreadyCompleted,
    /// 400: the `If-Match` cannot be read.
    IfMatchInvalid,
    /// 404: no such row.
    NotFound,
    /// 409: the row has another version than the caller expected.
    Stale,
    /// 409: the row has the largest version there is.
    VersionOverflow,
    /// 409: less is left than is asked for.
    NotEnough,
    /// 409: the row is in another state than the move starts from.
    Elsewhere,
    /// 409: no such move is declared.
    MoveNotAllowed,
    /// 409: a unique constraint. A service may send it under a code of its own.
    Duplicate,
    /// 412: the `If-Match` does not name the current version.
    IfMatchFailed,
    /// 413: the body is over the request limit.
    BodyTooLarge,
    /// 422: same key, other request.
    KeyReused,
    /// 429: too many keys of this principal.
    QuotaExceeded,
    /// 422: an amount that is not positive, or too large.
    AmountInvalid,
    /// 428: no `If-Match`.
    IfMatchMissing,
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
    /// 500: a statement failed.
    QueryFailed,
    /// 500: the row is in a state that the service does not know.
    StateUnknown,
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

    pub(crate) fn detail(self) -> &'static str {
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
            Self::ReplayForbidden => ("replay-forbidden", S::FORBIDDEN, "The stored answer is not for this request",
                "The request with this key was answered, and you may not see the answer now."),
            Self::KeyUnknown => ("key-unknown", S::NOT_FOUND, "Nothing is known of this Idempotency-Key",
                "No request of yours with this key runs or has been completed, or it has expired."),
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
            Self::AlreadyCompleted => ("already-completed", S::CONFLICT, "This was done already",
                "The same request was completed a moment ago; it was not done again."),
            Self::QuotaExceeded => ("quota-exceeded", S::TOO_MANY_REQUESTS, "Too many idempotency keys",
                "Nothing was done; let earlier requests end, and retry with the same key."),
            Self::IfMatchInvalid => ("if-match-invalid", S::BAD_REQUEST, "If-Match is invalid",
                "Send the ETag that a GET of the resource answered with."),
            Self::NotFound => ("not-found", S::NOT_FOUND, "There is no such resource",
                "Nothing was done: it does not exist, or no longer."),
            Self::Stale => ("stale", S::CONFLICT, "The resource has changed",
                "Somebody else was first. Nothing was done: read the resource again and decide anew."),
            Self::VersionOverflow => ("version-overflow", S::CONFLICT, "The resource cannot be changed any more",
                "Nothing was done: it has the largest version there is."),
            Self::NotEnough => ("not-enough", S::CONFLICT, "There is not enough left",
                "Nothing was done: less is left than was asked for."),
            Self::Elsewhere => ("elsewhere", S::CONFLICT, "The resource is in another state",
                "Nothing was done: from its present state it cannot go there."),
            Self::MoveNotAllowed => ("move-not-allowed", S::CONFLICT, "There is no such move",
                "Nothing was done: the resource never goes from the one state to the other."),
            Self::Duplicate => ("duplicate", S::CONFLICT, "It exists already",
                "Nothing was done: there can be only one of it."),
            Self::IfMatchFailed => ("if-match-failed", S::PRECONDITION_FAILED, "The resource has changed",
                "It has another version than If-Match names; ETag tells the current one. Nothing was done: read it again and decide anew."),
            Self::BodyTooLarge => ("body-too-large", S::PAYLOAD_TOO_LARGE, "The request body is too large",
                "Nothing was done."),
            Self::KeyReused => ("key-reused", S::UNPROCESSABLE_ENTITY, "Idempotency-Key is already used",
                "This key was used with another request. Send the request it was used with, or use a new key."),
            Self::AmountInvalid => ("amount-invalid", S::UNPROCESSABLE_ENTITY, "The amount is invalid",
                "Nothing was done: an amount is 1 or more, and no more than there can be."),
            Self::IfMatchMissing => ("if-match-missing", S::PRECONDITION_REQUIRED, "If-Match is missing",
                "Send If-Match with the ETag that a GET of the resource answered with."),
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
            Self::QueryFailed => ("query-failed", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The request failed; the log of the service says why."),
            Self::StateUnknown => ("state-unknown", S::INTERNAL_SERVER_ERROR, "Internal server error",
                "The resource is in a state that this version of the service does not know. Nothing was done."),
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
    wording: Option<Arc<Wording>>,
    /// The version that is there.
    etag: Option<ETag>,
}

/// A refusal in a policy's own words: [`Policy::wording`](crate::Policy::wording). What is not said
/// stays as it is.
///
/// ```
/// use actix_idempotency::{Code, Policy, Wording};
///
/// let policy = Policy::new().wording(
///     Code::Outstanding,
///     Wording::new().language("zh-CN").detail("订单处理中,请勿重复提交"),
/// );
/// ```
#[derive(Debug, Clone, Default)]
pub struct Wording {
    status: Option<StatusCode>,
    code: Option<String>,
    title: Option<String>,
    detail: Option<String>,
    language: Option<HeaderValue>,
    body: Option<(HeaderValue, Bytes)>,
}

impl Wording {
    /// Says nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Another status.
    #[must_use]
    pub fn status(mut self, status: StatusCode) -> Self {
        self.status = Some(status);
        self
    }

    /// Another `code`.
    #[must_use]
    pub fn code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// Another `title`.
    #[must_use]
    pub fn title(mut self, title: impl Into<String>) -> Self {
        self.title = Some(title.into());
        self
    }

    /// Another `detail`: what the client is to do, in its language.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// The `Content-Language`; `en` where nothing is said.
    ///
    /// # Panics
    ///
    /// For what cannot stand in a header.
    #[track_caller]
    #[must_use]
    pub fn language(mut self, language: &str) -> Self {
        let Ok(language) = HeaderValue::from_str(language) else {
            panic!("Wording::language: {language:?} cannot stand in a header")
        };
        self.language = Some(language);
        self
    }

    /// A body in place of the problem document: a page for people, for example.
    ///
    /// # Panics
    ///
    /// For a content type that cannot stand in a header.
    #[track_caller]
    #[must_use]
    pub fn body(mut self, content_type: &str, body: impl Into<Bytes>) -> Self {
        let Ok(content_type) = HeaderValue::from_str(content_type) else {
            panic!("Wording::body: {content_type:?} cannot stand in a header")
        };
        self.body = Some((content_type, body.into()));
        self
    }
}

impl Refusal {
    pub(crate) fn new(code: Code) -> Self {
        let retry_after = (code.status() == StatusCode::SERVICE_UNAVAILABLE
            || matches!(code, Code::LeaseLost | Code::Serialization | Code::QuotaExceeded))
        .then_some(Duration::from_secs(1));
        Self { code, detail: None, retry_after, documentation: None, wording: None, etag: None }
    }

    /// Whole seconds, rounded up, on the wire.
    pub(crate) fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// In the words of a policy, with its link.
    pub(crate) fn under(mut self, policy: &Policy) -> Self {
        self.documentation = policy.documentation.clone();
        self.wording = policy.wordings.get(&self.code).cloned();
        self
    }

    /// What happened here, in place of what the code says.
    pub(crate) fn detailed(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Under a code of the service's own.
    pub(crate) fn coded(mut self, code: &'static str) -> Self {
        self.wording = Some(Arc::new(Wording::new().code(code)));
        self
    }

    pub(crate) fn with_etag(mut self, etag: ETag) -> Self {
        self.etag = Some(etag);
        self
    }

    fn problem(&self) -> Problem<'_> {
        let wording = self.wording.as_ref();
        Problem {
            r#type: self.documentation.as_deref().unwrap_or("about:blank"),
            title: wording.and_then(|wording| wording.title.as_deref()).unwrap_or(self.code.title()),
            status: self.status_code().as_u16(),
            detail: wording
                .and_then(|wording| wording.detail.as_deref())
                .or(self.detail.as_deref())
                .unwrap_or(self.code.detail()),
            code: wording.and_then(|wording| wording.code.as_deref()).unwrap_or(self.code.as_str()),
        }
    }

    /// Those that do not depend on the moment.
    fn headers(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        let language = self.wording.as_ref().and_then(|wording| wording.language.clone()).unwrap_or(ENGLISH);
        let link = self
            .documentation
            .as_ref()
            .and_then(|link| HeaderValue::try_from(format!("<{link}>; rel=\"describedby\"; type=\"text/html\"")).ok());
        let lasting = [(header::CONTENT_LANGUAGE, language), (header::CACHE_CONTROL, NO_STORE)];
        lasting.into_iter().chain(link.map(|link| (header::LINK, link)))
    }

    fn body(&self) -> (HeaderValue, Bytes) {
        match self.wording.as_ref().and_then(|wording| wording.body.clone()) {
            Some(body) => body,
            None => (PROBLEM_JSON, serde_json::to_vec(&self.problem()).unwrap_or_default().into()),
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
        Self::new(Code::KeyInvalid).detailed(match invalid {
            InvalidKey::Body | InvalidKey::Field => format!("{invalid}."),
            _ => format!("{invalid}. {}", Code::KeyInvalid.detail()),
        })
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.code.title())
    }
}

impl std::error::Error for Refusal {}

/// A refusal that is kept: what was done must not be done again.
pub(crate) fn snapshot(code: Code, policy: &Policy) -> ResponseSnapshot {
    let refusal = Refusal::new(code).under(policy);
    let (content_type, body) = refusal.body();
    let snapshot = ResponseSnapshot::new(refusal.status_code()).with_body(body);
    let headers = refusal.headers().chain([(header::CONTENT_TYPE, content_type)]);
    headers.fold(snapshot, |snapshot, (name, value)| snapshot.with_header(name, value))
}

const ENGLISH: HeaderValue = HeaderValue::from_static("en");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");
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
        self.wording.as_ref().and_then(|wording| wording.status).unwrap_or(self.code.status())
    }

    fn error_response(&self) -> HttpResponse<BoxBody> {
        let mut response = HttpResponse::build(self.status_code());
        self.headers().for_each(|header| {
            response.insert_header(header);
        });
        if let Some(wait) = self.retry_after {
            response.insert_header((header::RETRY_AFTER, wait.as_millis().div_ceil(1000).max(1).to_string()));
        }
        if let Some(etag) = &self.etag {
            response.insert_header(etag.clone());
        }
        let (content_type, body) = self.body();
        response.insert_header((header::CONTENT_TYPE, content_type)).body(body)
    }
}
