//! The policy: which requests are protected, and how. A value with chained setters; every default
//! is a constant that states its reason.

use std::{
    collections::HashMap,
    fmt,
    num::{NonZeroU32, NonZeroUsize},
    ops::RangeInclusive,
    sync::Arc,
    time::Duration,
};

use actix_web::{
    HttpRequest,
    http::{Method, StatusCode, header::HeaderName},
};

use serde::de::DeserializeOwned;

use crate::{
    header,
    isolation::Isolation,
    keep::Keep,
    key::{InvalidKey, MAX_KEY_LENGTH},
    refusal::{Code, Refusal, Wording},
    request_id::RequestId,
    secret::Secret,
    selection::Fields,
    snapshot::ResponseSnapshot,
    source::{Found, KeySource},
    token::FormTokens,
};

mod answer;
mod choice;
mod defaults;
mod request;
mod store;

pub use self::{choice::*, defaults::*};

type Settings = Vec<(String, String)>;
type Closure<T> = Arc<dyn Fn(&HttpRequest) -> T + Send + Sync>;

/// How a key is given back whose answer is not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Return {
    Release,
    HoldLease,
    HoldRetention,
}

/// A rule, and how it reads.
#[derive(Clone)]
pub(crate) struct KeyRule {
    pub(crate) text: String,
    allows: Arc<dyn Fn(&str) -> bool + Send + Sync>,
}

/// A closure, and how it reads in the published document.
#[derive(Clone)]
pub(crate) struct Described<T> {
    pub(crate) text: String,
    pub(crate) closure: Closure<T>,
}

type Redact = Arc<dyn Fn(ResponseSnapshot) -> ResponseSnapshot + Send + Sync>;

/// Whether keys may belong to nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Anonymous {
    /// Refused by whoever has a principal closure; otherwise they may, and the log warns of it.
    Unsaid,
    Allowed,
    Refused,
}

/// What names a request in the logs.
#[derive(Clone)]
pub(crate) enum Naming {
    Headers,
    By(Closure<Option<String>>),
    Nothing,
}

/// Which requests are protected, and how.
///
/// ```
/// use std::time::Duration;
/// use actix_idempotency::{Keep, OnOutstanding, Policy};
///
/// // The default: POST and PATCH with an `Idempotency-Key` header; answers below 400 are kept for a day.
/// let default = Policy::new();
///
/// // Payments: no key, no payment; keys belong to the user of the session; duplicates wait.
/// let payments = Policy::new()
///     .require_key()
///     .principal(|req| req.headers().get("x-user")?.to_str().ok().map(str::to_owned))
///     .retention(Duration::from_secs(7 * 24 * 60 * 60))
///     .keep(Keep::Draft)
///     .on_outstanding(OnOutstanding::Wait(Duration::from_secs(10)))
///     .documentation("https://api.example.com/docs/idempotency");
/// ```
///
/// # Panics
///
/// A setter panics, naming itself, when its value can never work: when the program starts, not at the
/// first request.
#[derive(Clone)]
pub struct Policy {
    pub(crate) methods: Vec<Method>,
    pub(crate) key_required: bool,
    pub(crate) skip: Option<Closure<bool>>,
    pub(crate) tenant: Option<Closure<Option<String>>>,
    pub(crate) principal: Option<Closure<Option<String>>>,
    pub(crate) anonymous: Anonymous,
    pub(crate) resource: Option<String>,
    pub(crate) request_id: Naming,
    pub(crate) fingerprinted_headers: Vec<HeaderName>,
    pub(crate) streams_body: bool,
    pub(crate) keys: Vec<KeySource>,
    pub(crate) key_rules: Vec<KeyRule>,
    pub(crate) compare: Option<Fields>,
    pub(crate) fingerprint_keys: Vec<Secret>,
    pub(crate) wordings: HashMap<Code, Arc<Wording>>,
    pub(crate) on_completed: OnCompleted,
    pub(crate) on_failure: OnFailure,
    pub(crate) quota: Quota,
    pub(crate) may_replay: Option<Described<bool>>,
    pub(crate) redact: Option<Redact>,
    pub(crate) tells_attempt: bool,
    pub(crate) tells_expiry: bool,
    pub(crate) descriptions: HashMap<Part, String>,
    pub(crate) retention: Option<Duration>,
    pub(crate) lease: Duration,
    pub(crate) max_run: Option<Duration>,
    pub(crate) request_limit: usize,
    pub(crate) response_limit: usize,
    pub(crate) body_timeout: Duration,
    pub(crate) store_timeout: Duration,
    pub(crate) is_atomic: bool,
    pub(crate) durable_claims: bool,
    pub(crate) isolation: Isolation,
    pub(crate) idle_in_transaction: Duration,
    pub(crate) set_local: Option<Closure<Settings>>,
    pub(crate) stream_timeout: Duration,
    pub(crate) event_streams: Vec<String>,
    pub(crate) max_running: usize,
    pub(crate) max_waiting: usize,
    pub(crate) retry_after: Duration,
    pub(crate) keep: Keep,
    pub(crate) on_outstanding: OnOutstanding,
    pub(crate) unstored_headers: Vec<HeaderName>,
    pub(crate) replay_marker: HeaderName,
    pub(crate) documentation: Option<Arc<str>>,
}

impl Policy {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self {
            methods: vec![Method::POST, Method::PATCH],
            key_required: false,
            skip: None,
            tenant: None,
            principal: None,
            anonymous: Anonymous::Unsaid,
            resource: None,
            request_id: Naming::Headers,
            fingerprinted_headers: Vec::new(),
            streams_body: false,
            keys: vec![KeySource::header()],
            key_rules: Vec::new(),
            compare: None,
            fingerprint_keys: Vec::new(),
            wordings: HashMap::new(),
            on_completed: OnCompleted::Replay,
            on_failure: OnFailure::Release,
            quota: Quota::default(),
            may_replay: None,
            redact: None,
            tells_attempt: false,
            tells_expiry: false,
            descriptions: HashMap::new(),
            retention: Some(DEFAULT_RETENTION),
            lease: DEFAULT_LEASE,
            max_run: None,
            request_limit: DEFAULT_REQUEST_LIMIT,
            response_limit: DEFAULT_RESPONSE_LIMIT,
            body_timeout: DEFAULT_BODY_TIMEOUT,
            store_timeout: DEFAULT_STORE_TIMEOUT,
            is_atomic: false,
            durable_claims: false,
            isolation: Isolation::Default,
            idle_in_transaction: DEFAULT_IDLE_IN_TRANSACTION,
            set_local: None,
            stream_timeout: DEFAULT_STREAM_TIMEOUT,
            event_streams: Vec::new(),
            max_running: DEFAULT_MAX_RUNNING,
            max_waiting: DEFAULT_MAX_WAITING,
            retry_after: DEFAULT_RETRY_AFTER,
            keep: Keep::Success,
            on_outstanding: OnOutstanding::Conflict,
            unstored_headers: Vec::new(),
            replay_marker: header::IDEMPOTENCY_REPLAYED,
            documentation: None,
        }
    }

    /// Fails for settings that contradict each other.
    #[track_caller]
    pub(crate) fn assert_consistent(&self) {
        for tokens in self.keys.iter().filter_map(KeySource::tokens) {
            self.assert_fits(tokens);
        }
        let computed = self.keys.iter().find(|source| !source.is_header() && source.tokens().is_none());
        if let Some(source) = computed
            && self.principal.is_none()
        {
            self.assert_fits_everybody(source);
        }
        assert!(
            !(self.streams_body && self.is_atomic),
            "Policy: under Policy::atomic() the transaction is open from the claim on, and Policy::stream_body lets the \
             client take its time meanwhile: leave one of them out"
        );
        if let Some(source) = self.keys.iter().find(|source| source.reads_body())
            && self.streams_body
        {
            panic!("Policy: {source:?} needs the body, and Policy::stream_body lets it through unread");
        }
        assert!(
            !(self.streams_body && self.compare.is_some()),
            "Policy: Policy::compare needs the body, and Policy::stream_body lets it through unread"
        );
        let holds = matches!(self.on_failure, OnFailure::HoldLease | OnFailure::HoldRetention);
        assert!(
            !(self.is_atomic && holds),
            "Policy: under Policy::atomic() an attempt that fails leaves no row that OnFailure could hold"
        );
    }

    /// A key that anybody can compute, and that belongs to nobody.
    #[track_caller]
    fn assert_fits_everybody(&self, source: &KeySource) {
        assert!(
            self.anonymous == Anonymous::Allowed,
            "Policy: keys from {source:?} are computed from what anybody may send: say whose they are by \
             Policy::principal, or that they are everybody's by Policy::anonymous()"
        );
        let keeps_errors = self.keep.keeps_errors() || self.on_failure == OnFailure::Store;
        assert!(
            !keeps_errors && self.on_failure != OnFailure::HoldRetention,
            "Policy: keys from {source:?} are everybody's by Policy::anonymous(), and what is answered to a forged request \
             would be kept against the real one: keep no errors (Keep::Success, and OnFailure::Release or HoldLease), or \
             say by Policy::principal whose keys they are, such as the sender that a middleware outside has verified"
        );
    }

    #[track_caller]
    fn assert_fits(&self, tokens: &FormTokens) {
        assert!(
            (self.principal.is_none() || tokens.has_principal()) && (self.tenant.is_none() || tokens.has_tenant()),
            "Policy: form tokens are signed for whom FormTokens::principal and FormTokens::tenant name; a policy that \
             names them too has to have its closures there as well"
        );
        assert!(
            !(self.anonymous == Anonymous::Refused && tokens.may_be_anonymous()),
            "Policy: form tokens are issued to anybody by FormTokens::anonymous(), and Policy::refuse_anonymous() accepts \
             none of theirs"
        );
        let lifetime = tokens.lifetime_of_tokens();
        assert!(
            self.retention.is_none_or(|retention| retention >= lifetime),
            "Policy: a form token lives for {lifetime:?} (FormTokens::lifetime) and its answer no longer than \
             Policy::retention: it could be used again"
        );
    }

    pub(crate) fn allows_key(&self, found: &Found) -> Result<(), Refusal> {
        let from_header = found.source.is_empty();
        match self.key_rules.iter().find(|rule| from_header && !(rule.allows)(found.key.as_str())) {
            Some(rule) => Err(Refusal::from(InvalidKey::Form).detailed(rule.text.as_str())),
            None => Ok(()),
        }
    }

    /// What a request without a key is told to send.
    pub(crate) fn key_missing(&self) -> Refusal {
        if self.keys.iter().all(|source| source.tokens().is_some()) {
            return Code::TokenMissing.into();
        }
        let refusal = Refusal::new(Code::KeyMissing);
        if self.keys.iter().any(KeySource::is_header) {
            return refusal;
        }
        let sources: Vec<_> = self.keys.iter().map(KeySource::name).collect();
        refusal.detailed(format!("The key is made of this part of the request: {}.", sources.join(", else ")))
    }

    /// What becomes of a key whose handler has left no answer.
    pub(crate) fn without_answer(&self) -> Return {
        match self.on_failure {
            OnFailure::Release | OnFailure::Store => Return::Release,
            OnFailure::HoldLease => Return::HoldLease,
            OnFailure::HoldRetention => Return::HoldRetention,
        }
    }

    /// What of it is stored.
    pub(crate) fn stored(&self, snapshot: ResponseSnapshot) -> ResponseSnapshot {
        let snapshot = match &self.redact {
            Some(redact) => redact(snapshot),
            None => snapshot,
        };
        if self.on_completed == OnCompleted::Reject { snapshot.bare() } else { snapshot }
    }

    /// Whether a request is this policy's business at all.
    pub(crate) fn applies_to(&self, request: &HttpRequest) -> bool {
        self.methods.contains(request.method()) && !self.skip.as_ref().is_some_and(|skip| skip(request))
    }

    /// By what the logs know the request.
    pub(crate) fn id_of(&self, request: &HttpRequest) -> Option<RequestId> {
        match &self.request_id {
            Naming::Headers => RequestId::of(request),
            Naming::By(name) => RequestId::new(&name(request)?),
            Naming::Nothing => None,
        }
    }

    pub(crate) fn keeps(&self, status: StatusCode) -> bool {
        self.keep.keeps(status)
    }

    pub(crate) fn settings(&self, request: &HttpRequest) -> Settings {
        self.set_local.as_ref().map(|settings| settings(request)).unwrap_or_default()
    }

    /// How long a request waits for another's answer.
    pub(crate) fn patience(&self) -> Duration {
        match self.on_outstanding {
            OnOutstanding::Conflict => Duration::ZERO,
            OnOutstanding::Wait(patience) => patience,
        }
    }

    /// Whether a request with a key has to name somebody. A closure that finds nobody stands inside the
    /// authentication, or there is none: then anybody could have the answers of anybody.
    pub(crate) fn refuses_anonymous(&self) -> bool {
        match self.anonymous {
            Anonymous::Unsaid => self.finds_principals(),
            Anonymous::Allowed => false,
            Anonymous::Refused => true,
        }
    }

    /// Whether a closure names principals, and nobody has said that it may find nobody.
    pub(crate) fn finds_principals(&self) -> bool {
        self.principal.is_some() && self.anonymous == Anonymous::Unsaid
    }

    pub(crate) fn warns_of_anonymous(&self) -> bool {
        self.anonymous == Anonymous::Unsaid
    }

    /// How long a statement may wait for a row that somebody has locked.
    pub(crate) fn lock_timeout(&self) -> Duration {
        self.store_timeout / 5
    }

    pub(crate) fn run_limit(&self) -> Duration {
        self.max_run.unwrap_or(self.lease.saturating_mul(DEFAULT_MAX_RUN_LEASES))
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy")
            .field("methods", &self.methods)
            .field("atomic", &self.is_atomic)
            .field("key_required", &self.key_required)
            .field("retention", &self.retention)
            .field("lease", &self.lease)
            .field("keep", &self.keep)
            .field("on_outstanding", &self.on_outstanding)
            .finish_non_exhaustive()
    }
}

#[track_caller]
fn in_range(setting: &str, value: Duration, min: Duration) {
    let max = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    assert!((min..=max).contains(&value), "Policy::{setting}: {value:?} is not between {min:?} and 100 years");
}

#[track_caller]
fn header_name(setting: &str, name: &str) -> HeaderName {
    match HeaderName::from_bytes(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("Policy::{setting}: {name:?} is no header name"),
    }
}
