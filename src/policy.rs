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
    secret::Secret,
    selection::Fields,
    snapshot::ResponseSnapshot,
    source::{Found, KeySource},
};

/// How long an answer is kept, and its key with it, from its completion: a day, as Stripe keeps a key
/// at least and most others do: long enough for a retry on the next morning's shift.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// How long a key stays outstanding after its process has died: longer than a renewal may be late on
/// a busy database (renewals are due after a third), short enough for a client that waits.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);
/// How many leases a handler may run before it is aborted: a handler that is still not done after
/// five minutes (at the default lease) hangs more likely than it works.
pub const DEFAULT_MAX_RUN_LEASES: u32 = 10;
/// The largest request body that is read, in bytes: 1 MiB. It is held in memory while the handler runs.
pub const DEFAULT_REQUEST_LIMIT: usize = 1024 * 1024;
/// The largest answer that is kept with its body, in bytes: 1 MiB.
pub const DEFAULT_RESPONSE_LIMIT: usize = 1024 * 1024;
/// How long a request body may take to arrive: what a slow phone needs for 1 MiB, and too little for
/// a client that sends a byte a minute.
pub const DEFAULT_BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// How long an answer that is a stream may take until its body counts as not to be kept.
pub const DEFAULT_STREAM_TIMEOUT: Duration = Duration::from_secs(1);
/// How many protected requests run at once in a process: what a process survives rather than what it
/// should serve, since a handler whose client has gone goes on.
pub const DEFAULT_MAX_RUNNING: usize = 10_000;
/// How many requests wait at once in a process for another to finish: each holds its body, so that
/// with the default limit it is 256 MiB at worst.
pub const DEFAULT_MAX_WAITING: usize = 256;
/// What `Retry-After` says while a key is outstanding, unless its lease ends sooner.
pub const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

/// How long the store may take for what a request asks of it, the wait for a connection included: five
/// seconds, longer than a failover within a healthy network, shorter than a client's patience.
pub const DEFAULT_STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a transaction may be idle before Postgres ends it: thirty seconds, as the lease, so that
/// the locks of an owner that has stalled or been cut off go away when its key does.
pub const DEFAULT_IDLE_IN_TRANSACTION: Duration = Duration::from_secs(30);

/// The shortest lease: a renewal is due after a third of it, and must not come late on a busy machine.
pub const MIN_LEASE: Duration = Duration::from_millis(100);

type Settings = Vec<(String, String)>;
type Closure<T> = Arc<dyn Fn(&HttpRequest) -> T + Send + Sync>;

/// What a request gets whose key is outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnOutstanding {
    /// 409 with `Retry-After`, at once. The default: a client that waits costs the client; one that is
    /// made to wait costs the server.
    Conflict,
    /// Wait up to this long for the answer, then 409. No connection to the database is held meanwhile.
    Wait(Duration),
}

/// What a request gets whose key is completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnCompleted {
    /// The stored answer. The default: a retry is harmless and gets what it came for.
    Replay,
    /// 409 `already-completed`: the plain guard against a second submit. No answer is stored. Under a
    /// short [`Policy::retention`] that is the window of the guard.
    Reject,
    /// **Runs the handler again**: gives up the promise of one effect, and guards only against requests
    /// at the same time.
    RunAgain,
}

/// What becomes of a key whose answer is not kept: an error, a panic, an aborted handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnFailure {
    /// It is free at once. The default: nothing was done, so that the next attempt may be made now.
    Release,
    /// It stays outstanding until its lease ends: a pause before the next attempt.
    HoldLease,
    /// It stays outstanding for the retention: for what must not be tried again soon, such as a payment
    /// whose outcome somebody has to look at.
    HoldRetention,
    /// The failure is stored and replayed.
    Store,
}

/// How many keys a principal may have. Counted in the table before a new key is claimed, so that
/// requests at the same time may exceed it by their number; a retry of a key that exists is never
/// refused. Counting wants an index: [`migrations::PRINCIPAL_INDEX`](crate::migrations::PRINCIPAL_INDEX).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Quota {
    /// Keys whose requests run. Default: any number. Not counted under [`Policy::atomic`], where they
    /// have no row yet.
    pub outstanding: Option<NonZeroU32>,
    /// Keys that have not expired. Default: any number.
    pub live: Option<NonZeroU32>,
}

/// A part of a policy that is a closure, of which the published document cannot tell by itself what it
/// does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Part {
    /// [`Policy::principal`].
    Principal,
    /// [`Policy::tenant`].
    Tenant,
    /// [`Policy::skip`].
    Skip,
    /// [`Keep::When`].
    Keep,
}

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

/// Who keys belong to where a request carries no credential and the policy has no closure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Anonymous {
    Warned,
    Allowed,
    Refused,
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
            anonymous: Anonymous::Warned,
            resource: None,
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

    /// The methods that are protected. Default: POST and PATCH, the two that HTTP does not already
    /// call idempotent (IETF draft -07, section 1). PUT and DELETE can be named.
    ///
    /// # Panics
    ///
    /// For GET, HEAD, OPTIONS and TRACE: they change nothing, and a stored answer to a GET is a stale one.
    #[track_caller]
    #[must_use]
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.methods = methods.into_iter().collect();
        assert!(!self.methods.is_empty(), "Policy::methods: name at least one method");
        if let Some(safe) = self.methods.iter().find(|method| method.is_safe()) {
            panic!("Policy::methods: {safe} is safe and must not be answered from the store");
        }
        self
    }

    /// Answers 400 `key-missing` to a request without a key. Default: it passes through unprotected
    /// and leaves no trace in the table.
    #[must_use]
    pub fn require_key(mut self) -> Self {
        self.key_required = true;
        self
    }

    /// Where the key comes from: the first source that has one. Default: the header alone.
    ///
    /// # Panics
    ///
    /// For an empty chain.
    #[track_caller]
    #[must_use]
    pub fn keys(mut self, sources: impl IntoIterator<Item = KeySource>) -> Self {
        self.keys = sources.into_iter().collect();
        assert!(!self.keys.is_empty(), "Policy::keys: name at least one source");
        self
    }

    /// The key is made of the body as a type of your own: short for [`keys`](Self::keys) with
    /// [`KeySource::typed`] alone.
    #[must_use]
    pub fn key_from_json<T: DeserializeOwned>(self, key: impl Fn(T) -> String + Send + Sync + 'static) -> Self {
        self.keys([KeySource::typed(key)])
    }

    /// Asks for keys of a certain form, beyond what every key must be; others are 400 `key-invalid`.
    /// `text` says which, to the client and in the published document. It applies to keys from the
    /// header.
    ///
    /// ```
    /// use actix_idempotency::Policy;
    ///
    /// let policy = Policy::new().key_rule("The key starts with the shop's number.", |key| key.starts_with("s1-"));
    /// ```
    #[must_use]
    pub fn key_rule(mut self, text: impl Into<String>, allows: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.key_rules.push(KeyRule { text: text.into(), allows: Arc::new(allows) });
        self
    }

    /// Asks for a UUID (RFC 9562), with hyphens, as the IETF draft recommends (-07, section 2.2).
    #[must_use]
    pub fn uuid_keys(self) -> Self {
        self.key_rule("The key is a UUID.", |key| key.len() == 36 && uuid::Uuid::try_parse(key).is_ok())
    }

    /// Asks for keys of at least and at most so many bytes.
    ///
    /// # Panics
    ///
    /// For an empty range, and beyond [`MAX_KEY_LENGTH`].
    #[track_caller]
    #[must_use]
    pub fn key_length(self, bytes: RangeInclusive<usize>) -> Self {
        assert!(!bytes.is_empty() && *bytes.end() <= MAX_KEY_LENGTH, "Policy::key_length: {bytes:?} allows no key");
        self.key_rule(format!("The key has {} to {} bytes.", bytes.start(), bytes.end()), move |key| {
            bytes.contains(&key.len())
        })
    }

    /// Which fields tell a retry from another request under the same key: 422 `key-reused`. Not to be
    /// mixed up with what identifies the operation ([`keys`](Self::keys)): a provider may send the same
    /// order number with another time stamp. Default: the whole body, or what a
    /// [`KeySource::digest`] is made of.
    #[must_use]
    pub fn compare(mut self, fields: Fields) -> Self {
        self.compare = Some(fields);
        self
    }

    /// Makes fingerprints by HMAC, so that nobody who reads the table can try out what was sent, a PIN
    /// for example. The first secret makes new ones; the others are those used before, and are needed
    /// for as long as rows live.
    ///
    /// # Panics
    ///
    /// For no secret at all.
    #[track_caller]
    #[must_use]
    pub fn fingerprint_secrets(mut self, secrets: impl IntoIterator<Item = Secret>) -> Self {
        self.fingerprint_keys = secrets.into_iter().collect();
        assert!(!self.fingerprint_keys.is_empty(), "Policy::fingerprint_secrets: give at least one secret");
        self
    }

    /// What a refusal says, in words of your own: what a form shows for a second click, in any language.
    #[must_use]
    pub fn wording(mut self, code: Code, wording: Wording) -> Self {
        self.wordings.insert(code, Arc::new(wording));
        self
    }

    /// What a request gets whose key is completed. Default: [`OnCompleted::Replay`].
    #[must_use]
    pub fn on_completed(mut self, on_completed: OnCompleted) -> Self {
        self.on_completed = on_completed;
        self
    }

    /// What becomes of a key whose answer is not kept. Default: [`OnFailure::Release`]. A handler may
    /// decide otherwise through [`IdemKey`](crate::IdemKey).
    #[must_use]
    pub fn on_failure(mut self, on_failure: OnFailure) -> Self {
        self.on_failure = on_failure;
        self
    }

    /// How many keys a principal may have; more are 429 `quota-exceeded`. Default: any number.
    #[must_use]
    pub fn quota(mut self, quota: Quota) -> Self {
        self.quota = quota;
        self
    }

    /// Asks again whether a request may see a stored answer, for rights that were taken away meanwhile;
    /// `false` is 403 `replay-forbidden`. Default: whoever reaches this middleware with the principal of
    /// the key may. `text` stands in the published document.
    #[must_use]
    pub fn authorize_replay(
        mut self,
        text: impl Into<String>,
        may: impl Fn(&HttpRequest) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.may_replay = Some(Described { text: text.into(), closure: Arc::new(may) });
        self
    }

    /// Changes an answer before it is stored: the first client gets all of it, a replay what is left.
    #[must_use]
    pub fn redact(mut self, redact: impl Fn(ResponseSnapshot) -> ResponseSnapshot + Send + Sync + 'static) -> Self {
        self.redact = Some(Arc::new(redact));
        self
    }

    /// Tells which attempt has made an answer:
    /// [`Idempotency-Attempt`](crate::header::IDEMPOTENCY_ATTEMPT).
    #[must_use]
    pub fn tell_attempt(mut self) -> Self {
        self.tells_attempt = true;
        self
    }

    /// Tells when the key of an answer that is kept expires:
    /// [`Idempotency-Key-Expires-In`](crate::header::IDEMPOTENCY_KEY_EXPIRES_IN).
    #[must_use]
    pub fn tell_expiry(mut self) -> Self {
        self.tells_expiry = true;
        self
    }

    /// Says in the published document what a closure does.
    #[must_use]
    pub fn describe(mut self, part: Part, text: impl Into<String>) -> Self {
        self.descriptions.insert(part, text.into());
        self
    }

    /// Lets the requests for which the closure says `true` pass through as if this middleware were
    /// not there.
    #[must_use]
    pub fn skip(mut self, skip: impl Fn(&HttpRequest) -> bool + Send + Sync + 'static) -> Self {
        self.skip = Some(Arc::new(skip));
        self
    }

    /// Which tenant a request is for, where one principal acts for several. Default: none.
    #[must_use]
    pub fn tenant(mut self, tenant: impl Fn(&HttpRequest) -> Option<String> + Send + Sync + 'static) -> Self {
        self.tenant = Some(Arc::new(tenant));
        self
    }

    /// Who asks: a user id from the session, the subject of a token. The same key from two principals
    /// is two keys. `None` makes the request anonymous.
    ///
    /// Default: a digest of the credential in `Authorization: Basic` or `Bearer`. It is per token: a
    /// service that rotates tokens between retries gives a closure instead. Authenticate in a
    /// middleware outside this one (a later `.wrap`): this closure only reads what that one found.
    #[must_use]
    pub fn principal(mut self, principal: impl Fn(&HttpRequest) -> Option<String> + Send + Sync + 'static) -> Self {
        self.principal = Some(Arc::new(principal));
        self
    }

    /// Lets requests without a principal share one anonymous principal, silently. Default: they share
    /// it, and one warning says so, at the first such request: whoever guesses another's key gets its answer.
    #[must_use]
    pub fn anonymous(mut self) -> Self {
        self.anonymous = Anonymous::Allowed;
        self
    }

    /// Answers 401 `principal-missing` to a request with a key and without a principal.
    #[must_use]
    pub fn refuse_anonymous(mut self) -> Self {
        self.anonymous = Anonymous::Refused;
        self
    }

    /// Names the resource in the scope of its keys, in place of method and route pattern: a name that
    /// survives a renamed route. Keys of two routes with the same name are the same keys.
    ///
    /// # Panics
    ///
    /// For an empty name, and one longer than 255 bytes.
    #[track_caller]
    #[must_use]
    pub fn resource(mut self, name: impl Into<String>) -> Self {
        let name = name.into();
        assert!((1..=255).contains(&name.len()), "Policy::resource: a name has 1 to 255 bytes");
        self.resource = Some(name);
        self
    }

    /// Makes a request header part of the fingerprint. Default: none, because a retry through another
    /// gateway has other headers.
    ///
    /// # Panics
    ///
    /// For what is no header name.
    #[track_caller]
    #[must_use]
    pub fn fingerprint_header(mut self, name: &str) -> Self {
        self.fingerprinted_headers.push(header_name("fingerprint_header", name));
        self.fingerprinted_headers.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        self.fingerprinted_headers.dedup();
        self
    }

    /// Streams the request body through to the handler, for uploads too large to hold: only method,
    /// path, query and named headers tell a retry from another request, and the request limit does
    /// not apply.
    #[must_use]
    pub fn stream_body(mut self) -> Self {
        self.streams_body = true;
        self
    }

    /// How long a key and its answer are kept, from its completion, by the database's clock. Default:
    /// [`DEFAULT_RETENTION`]. Publish it: after that a retry is a first request (IETF draft -07,
    /// section 2.3).
    ///
    /// # Panics
    ///
    /// Below one millisecond and beyond 100 years; see [`retain_forever`](Self::retain_forever).
    #[track_caller]
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        in_range("retention", retention, Duration::from_millis(1));
        self.retention = Some(retention);
        self
    }

    /// Keeps keys for ever, for what must never happen twice. The table grows by a row for each.
    #[must_use]
    pub fn retain_forever(mut self) -> Self {
        self.retention = None;
        self
    }

    /// How long a key stays outstanding once its process no longer renews it. It is renewed while the
    /// handler runs, so that it says nothing about how long a handler may take; see
    /// [`max_run`](Self::max_run). Default: [`DEFAULT_LEASE`].
    ///
    /// # Panics
    ///
    /// Below [`MIN_LEASE`] and beyond 100 years.
    #[track_caller]
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        in_range("lease", lease, MIN_LEASE);
        self.lease = lease;
        self
    }

    /// How long a handler may run; then its future is dropped, its key released, and the client told
    /// 503 `outcome-unknown`. Default: [`DEFAULT_MAX_RUN_LEASES`] leases. A handler that blocks its
    /// thread cannot be dropped: its key is not released, and its lease is renewed no longer. What a
    /// handler has moved to threads or tasks of its own goes on unseen.
    ///
    /// # Panics
    ///
    /// Below one millisecond and beyond 100 years.
    #[track_caller]
    #[must_use]
    pub fn max_run(mut self, max_run: Duration) -> Self {
        in_range("max_run", max_run, Duration::from_millis(1));
        self.max_run = Some(max_run);
        self
    }

    /// The largest request body, in bytes; over it 413 `body-too-large`, with nothing claimed. Default:
    /// [`DEFAULT_REQUEST_LIMIT`]. The limits of extractors apply as well.
    #[must_use]
    pub fn request_limit(mut self, bytes: usize) -> Self {
        self.request_limit = bytes;
        self
    }

    /// The largest answer that is kept with its body, in bytes. Of a larger one status and headers are
    /// kept and the body is marked omitted: the first client gets all of it, a retry is told so, and
    /// nothing runs twice. Default: [`DEFAULT_RESPONSE_LIMIT`].
    ///
    /// # Panics
    ///
    /// Beyond 256 MiB: Postgres could not store it.
    #[track_caller]
    #[must_use]
    pub fn response_limit(mut self, bytes: usize) -> Self {
        assert!(bytes <= 256 * 1024 * 1024, "Policy::response_limit: at most 256 MiB");
        self.response_limit = bytes;
        self
    }

    /// How long a request body may take to arrive; then 408 `body-timeout`, with nothing claimed.
    /// Default: [`DEFAULT_BODY_TIMEOUT`].
    ///
    /// # Panics
    ///
    /// Below one millisecond and beyond 100 years.
    #[track_caller]
    #[must_use]
    pub fn body_timeout(mut self, timeout: Duration) -> Self {
        in_range("body_timeout", timeout, Duration::from_millis(1));
        self.body_timeout = timeout;
        self
    }

    /// How long the body of an answer may take to be produced before it is passed on as a stream and
    /// counts as omitted. Event streams are passed on at once. Default: [`DEFAULT_STREAM_TIMEOUT`].
    ///
    /// # Panics
    ///
    /// Below one millisecond and beyond 100 years.
    #[track_caller]
    #[must_use]
    pub fn stream_timeout(mut self, timeout: Duration) -> Self {
        in_range("stream_timeout", timeout, Duration::from_millis(1));
        self.stream_timeout = timeout;
        self
    }

    /// How long the store may take for what a request asks of it: the claim, and again the completion,
    /// each with its wait for a connection. Past it a claim is answered with 503 `store-unavailable`,
    /// and a completion goes on in the background. A statement waits a fifth of it for a row that
    /// somebody has locked. Default: [`DEFAULT_STORE_TIMEOUT`].
    ///
    /// # Panics
    ///
    /// Below ten milliseconds and beyond 100 years.
    #[track_caller]
    #[must_use]
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        in_range("store_timeout", timeout, Duration::from_millis(10));
        self.store_timeout = timeout;
        self
    }

    /// For handlers whose only effects are what they write through [`IdemTx`](crate::IdemTx): the whole
    /// request is one transaction. No claim is written first and no lease kept: one commit, one row
    /// version, and a process that is killed frees its key when its connection ends.
    ///
    /// While it runs, other requests with the key get 409, or wait, whatever they ask for: what it asks
    /// for cannot be seen before it commits. An answer of 400 and more leaves no row, unless
    /// [`keep`](Self::keep) keeps it. The connection is held from the claim on, by at most
    /// [`Idempotency::max_transactions`](crate::Idempotency::max_transactions) requests at a time.
    /// [`IdemKey::derive`](crate::IdemKey::derive) is refused: it is for effects outside the database.
    #[must_use]
    pub fn atomic(mut self) -> Self {
        self.is_atomic = true;
        self
    }

    /// Waits for the disk when a key is claimed. Default: no, which saves the handler one flush; a claim
    /// that a crash of the *database* loses (made within about three times its `wal_writer_delay`
    /// before) leaves the key free while its handler may still be running. Nothing that is answered
    /// depends on it: a completion waits for the disk, as far as the server's `synchronous_commit` says,
    /// and carries its claim with it. Neither does [`IdemKey`](crate::IdemKey): its extraction waits for
    /// the disk, so that derived keys survive. Say this where handlers act outside the database without
    /// taking it.
    #[must_use]
    pub fn durable_claims(mut self) -> Self {
        self.durable_claims = true;
        self
    }

    /// The isolation level of [`IdemTx`](crate::IdemTx). Default: what the server says.
    #[must_use]
    pub fn isolation(mut self, isolation: Isolation) -> Self {
        self.isolation = isolation;
        self
    }

    /// How long a transaction may be idle before Postgres ends it
    /// (`idle_in_transaction_session_timeout`, for it alone). Default: [`DEFAULT_IDLE_IN_TRANSACTION`].
    ///
    /// # Panics
    ///
    /// Below ten milliseconds and beyond 24 days, Postgres' own limit.
    #[track_caller]
    #[must_use]
    pub fn idle_in_transaction(mut self, timeout: Duration) -> Self {
        let max = Duration::from_millis(i32::MAX.unsigned_abs().into());
        assert!(
            (Duration::from_millis(10)..=max).contains(&timeout),
            "Policy::idle_in_transaction: {timeout:?} is not between 10 ms and 24 days"
        );
        self.idle_in_transaction = timeout;
        self
    }

    /// Settings for [`IdemTx`](crate::IdemTx), as by `SET LOCAL`: for row-level security, for example.
    /// They end with the transaction; `role` and `search_path` are set back before the answer is
    /// stored. A name or value that Postgres refuses makes the extraction fail.
    ///
    /// ```
    /// use actix_idempotency::Policy;
    ///
    /// let policy = Policy::new().set_local(|req| {
    ///     let tenant = req.headers().get("x-tenant").and_then(|value| value.to_str().ok()).unwrap_or("");
    ///     vec![("app.tenant".to_owned(), tenant.to_owned())]
    /// });
    /// ```
    #[must_use]
    pub fn set_local(
        mut self,
        settings: impl Fn(&HttpRequest) -> Vec<(String, String)> + Send + Sync + 'static,
    ) -> Self {
        self.set_local = Some(Arc::new(settings));
        self
    }

    /// How many protected requests may run at once in this process, counted over all policies; beyond
    /// it 503 `busy`. Default: [`DEFAULT_MAX_RUNNING`].
    #[must_use]
    pub fn max_running(mut self, requests: NonZeroUsize) -> Self {
        self.max_running = requests.get();
        self
    }

    /// How many requests may wait at once in this process, counted over all policies; beyond it 409
    /// at once. Default: [`DEFAULT_MAX_WAITING`].
    #[must_use]
    pub fn max_waiting(mut self, requests: NonZeroUsize) -> Self {
        self.max_waiting = requests.get();
        self
    }

    /// What `Retry-After` says while a key is outstanding; never more than is left of the lease, and in
    /// whole seconds, rounded up. Default: [`DEFAULT_RETRY_AFTER`].
    #[must_use]
    pub fn retry_after(mut self, seconds: NonZeroU32) -> Self {
        self.retry_after = Duration::from_secs(seconds.get().into());
        self
    }

    /// Which answers are kept. Default: [`Keep::Success`].
    #[must_use]
    pub fn keep(mut self, keep: Keep) -> Self {
        self.keep = keep;
        self
    }

    /// What a request gets whose key is outstanding. Default: [`OnOutstanding::Conflict`].
    ///
    /// # Panics
    ///
    /// For a wait below one millisecond and beyond 100 years.
    #[track_caller]
    #[must_use]
    pub fn on_outstanding(mut self, on_outstanding: OnOutstanding) -> Self {
        if let OnOutstanding::Wait(wait) = on_outstanding {
            in_range("on_outstanding", wait, Duration::from_millis(1));
        }
        self.on_outstanding = on_outstanding;
        self
    }

    /// Keeps a response header out of the store, beside those that belong to one exchange (see
    /// [`ResponseSnapshot`]).
    ///
    /// # Panics
    ///
    /// For what is no header name.
    #[track_caller]
    #[must_use]
    pub fn never_store_header(mut self, name: &str) -> Self {
        self.unstored_headers.push(header_name("never_store_header", name));
        self
    }

    /// The name of the header that marks a replay. Default:
    /// [`Idempotency-Replayed`](crate::header::IDEMPOTENCY_REPLAYED).
    ///
    /// # Panics
    ///
    /// For what is no header name.
    #[track_caller]
    #[must_use]
    pub fn replay_marker(mut self, name: &str) -> Self {
        self.replay_marker = header_name("replay_marker", name);
        self
    }

    /// A link to what this API publishes about its keys, for the `type` and `Link` of refusals
    /// (IETF draft -07, section 2.7). Default: none, and `type` is `about:blank`.
    ///
    /// # Panics
    ///
    /// For what cannot stand in a `Link` header.
    #[track_caller]
    #[must_use]
    pub fn documentation(mut self, link: &str) -> Self {
        assert!(
            !link.is_empty() && link.bytes().all(|b| b.is_ascii_graphic() && b != b'<' && b != b'>'),
            "Policy::documentation: a URI has visible ASCII characters only"
        );
        self.documentation = Some(link.into());
        self
    }

    /// Fails for settings that contradict each other.
    #[track_caller]
    pub(crate) fn assert_consistent(&self) {
        let computed = self.keys.iter().find(|source| !source.is_header());
        if let Some(source) = computed
            && self.principal.is_none()
            && self.anonymous != Anonymous::Allowed
        {
            panic!(
                "Policy: keys from {source:?} are computed from what anybody may send: say whose they are by \
                 Policy::principal, or that they are everybody's by Policy::anonymous()"
            );
        }
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

    pub(crate) fn allows_key(&self, found: &Found) -> Result<(), Refusal> {
        let from_header = found.source.is_empty();
        match self.key_rules.iter().find(|rule| from_header && !(rule.allows)(found.key.as_str())) {
            Some(rule) => Err(Refusal::from(InvalidKey::Form).detailed(rule.text.as_str())),
            None => Ok(()),
        }
    }

    /// What a request without a key is told to send.
    pub(crate) fn key_missing(&self) -> Refusal {
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

    pub(crate) fn warns_of_anonymous(&self) -> bool {
        self.anonymous == Anonymous::Warned
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
