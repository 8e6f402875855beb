//! Which requests are protected, by which key, and whose.

use super::*;

impl Policy {
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

    /// The key is a form token for this action, and a request without one is refused: short for
    /// [`keys`](Self::keys) with [`KeySource::form_token`] alone, and [`require_key`](Self::require_key). See
    /// [the module](crate::form_token).
    #[must_use]
    pub fn form_token(self, tokens: &FormTokens, action: impl Into<String>) -> Self {
        self.keys([KeySource::form_token(tokens, action)]).require_key()
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

    /// How many keys a principal may have; more are 429 `quota-exceeded`. Default: any number.
    #[must_use]
    pub fn quota(mut self, quota: Quota) -> Self {
        self.quota = quota;
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
    /// is two keys. `None` is nobody: 401 `principal-missing`, unless the policy says
    /// [`anonymous`](Self::anonymous).
    ///
    /// Default: a digest of the credential in `Authorization: Basic` or `Bearer`. It is per token: a
    /// service that rotates tokens between retries gives a closure instead. Authenticate in a
    /// middleware outside this one (a later `.wrap`): this closure only reads what that one found. Inside
    /// it has found nobody yet, and every request with a key is refused.
    #[must_use]
    pub fn principal(mut self, principal: impl Fn(&HttpRequest) -> Option<String> + Send + Sync + 'static) -> Self {
        self.principal = Some(Arc::new(principal));
        self
    }

    /// Lets requests without a principal share one anonymous principal, silently: whoever guesses another's
    /// key gets its answer. Default: they are refused where there is a [`principal`](Self::principal)
    /// closure; without one, where no credential says who asks, they share it, and one warning says so, at the first such
    /// request.
    #[must_use]
    pub fn anonymous(mut self) -> Self {
        self.anonymous = Anonymous::Allowed;
        self
    }

    /// Answers 401 `principal-missing` to a request with a key and without a principal. With a
    /// [`principal`](Self::principal) closure that is the default.
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

    /// By what the logs know a request: it is stored with the first request of a key and told on its replays, so that
    /// the log lines of the one lead to those of the other ([`telemetry`](crate::telemetry)). A retry, and an attempt
    /// that takes over, leave that of the first in the row. It decides nothing. Under [`atomic`](Self::atomic) a request
    /// that runs has no row yet, so that a 409 meanwhile cannot tell it.
    ///
    /// Default: the header `x-request-id`, which gateways set and applications log, else `traceparent`, which is there
    /// wherever requests are traced. Both are what the client says: an id that a middleware of yours has drawn takes a
    /// closure. What is stored, and lands in logs, is visible ASCII of at most
    /// [`MAX_REQUEST_ID_LENGTH`](crate::MAX_REQUEST_ID_LENGTH) bytes; anything else is ignored, and no request is refused for it.
    ///
    /// ```
    /// use actix_idempotency::Policy;
    /// use actix_web::HttpMessage;
    ///
    /// struct RequestId(String);
    ///
    /// let drawn = Policy::new().request_id(|req| req.extensions().get::<RequestId>().map(|id| id.0.clone()));
    /// let trusts_no_client = Policy::new().without_request_id();
    /// # drop((drawn, trusts_no_client));
    /// ```
    #[must_use]
    pub fn request_id(mut self, name: impl Fn(&HttpRequest) -> Option<String> + Send + Sync + 'static) -> Self {
        self.request_id = Naming::By(Arc::new(name));
        self
    }

    /// Stores and tells no request id.
    #[must_use]
    pub fn without_request_id(mut self) -> Self {
        self.request_id = Naming::Nothing;
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
    /// not apply. How long the body takes is for the handler to bound: [`body_timeout`](Self::body_timeout) does not
    /// apply either. An [`IdemTx`](crate::IdemTx) is taken once the body has been read; with [`atomic`](Self::atomic),
    /// whose transaction is open before, the policy does not build.
    #[must_use]
    pub fn stream_body(mut self) -> Self {
        self.streams_body = true;
        self
    }

    /// The largest request body, in bytes; over it 413 `body-too-large`, with nothing claimed. Default:
    /// [`DEFAULT_REQUEST_LIMIT`]. The limits of extractors apply as well.
    #[must_use]
    pub fn request_limit(mut self, bytes: usize) -> Self {
        self.request_limit = bytes;
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

    /// How many protected requests may run at once in this process, counted over all policies; beyond
    /// it 503 `busy`. A retry of a key that this process has met is told what is stored all the same. Default:
    /// [`DEFAULT_MAX_RUNNING`].
    #[must_use]
    pub fn max_running(mut self, requests: NonZeroUsize) -> Self {
        self.max_running = requests.get();
        self
    }
}
