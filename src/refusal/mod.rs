//! What a client is told when there is no answer: `application/problem+json` (RFC 9457) with a stable
//! `code`.
//!
//! | status | `code` | when | `Retry-After` |
//! |---|---|---|---|
//! | 400 | `key-missing` | the policy requires a key | |
//! | 400 | `key-invalid` | the key cannot be read | |
//! | 400 | `body-truncated` | the body was cut off | |
//! | 400 | `token-missing` | the policy requires a form token | |
//! | 400 | `token-invalid` | what stands for the form token is none, or there are two different ones | |
//! | 401 | `principal-missing` | the policy wants to know who asks | |
//! | 404 | `key-unknown` | asked for its status: nothing is known of it, or no longer | |
//! | 406 | `coding-not-accepted` | the stored answer is compressed, and the request does not accept that; see the feature `decode` | |
//! | 408 | `body-timeout` | the body did not arrive in time | |
//! | 409 | `outstanding` | the first request still runs | yes |
//! | 409 | `held` | an attempt has ended without an answer, and the policy or the handler holds its key: nobody runs it | |
//! | 409 | `lease-lost` | this attempt was overtaken by another | yes |
//! | 409 | `serialization` | the transaction lost against another one (40001, 40P01) | yes |
//! | 409 | `constraint-violated` | a deferred constraint failed at COMMIT | |
//! | 400 | `if-match-invalid` | the `If-Match` cannot be read | |
//! | 403 | `replay-forbidden` | the policy does not let this request see the stored answer | |
//! | 400 | `message-id-invalid` | the id of a message cannot be one | |
//! | 403 | `token-unknown` | the form token was signed with a key that is not in use here | |
//! | 403 | `token-forged` | the signature of the form token is wrong | |
//! | 403 | `token-of-other-action` | the form token is for another form | |
//! | 403 | `token-of-other-principal` | the form token was issued to somebody else | |
//! | 403 | `token-expired` | the form token was not used in time | |
//! | 404 | `not-found` | there is no such row, or none that the caller may see | |
//! | 409 | `already-completed` | by policy: it was done, and the answer is not told again | |
//! | 409 | `token-used` | the form was sent already, with other contents, or the policy does not tell again | |
//! | 409 | `stale` | the row has another version than the caller expected | |
//! | 409 | `version-overflow` | the row has the largest version there is | |
//! | 409 | `not-enough` | less is left than is asked for | |
//! | 409 | `elsewhere` | the row is in another state than the move starts from | |
//! | 409 | `move-not-allowed` | no such move is declared | |
//! | 409 | `duplicate`, or one of the service's own | a unique constraint | |
//! | 412 | `if-match-failed` | none of the versions in `If-Match` is the current one, which `ETag` tells | |
//! | 413 | `body-too-large` | the body is over the request limit | |
//! | 422 | `key-reused` | same key, other request | |
//! | 422 | `message-id-reused` | a message id with another content than before | |
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
//! `held` says that the outcome of an earlier attempt is not known. Those that depend on the moment
//! ([`Code::is_transient`]) are never kept for retries, whatever the policy keeps.
//! SQL, hosts and causes go to the log, never into a body.

mod code;
mod wording;

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

pub use self::{code::Code, wording::Wording};

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
    let refusal = Refusal::new(code);
    let refusal = match code {
        Code::HandlerPanicked => refusal.detailed("The request failed, and that is its answer."),
        _ => refusal,
    };
    let refusal = refusal.under(policy);
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
        // For whoever decides what of it is kept.
        response.extensions_mut().insert(self.code);
        let (content_type, body) = self.body();
        response.insert_header((header::CONTENT_TYPE, content_type)).body(body)
    }
}
