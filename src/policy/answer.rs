//! What a request is answered, and what of it is kept.

use super::*;

impl Policy {
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

    /// How long the body of an answer may take to be produced before it is passed on as a stream and
    /// counts as omitted. [Event streams](Self::event_stream) are passed on at once. Default:
    /// [`DEFAULT_STREAM_TIMEOUT`].
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

    /// Another media type whose streams are passed on at once, body omitted from what is kept: each part of them is meant
    /// to be read as soon as it is there. Parameters do not count. Always: `text/event-stream`, `application/x-ndjson`,
    /// `application/jsonl`, `application/json-seq`, `multipart/x-mixed-replace`.
    ///
    /// # Panics
    ///
    /// For what is no media type.
    #[track_caller]
    #[must_use]
    pub fn event_stream(mut self, media_type: &str) -> Self {
        match media_type.parse::<mime::Mime>() {
            Ok(parsed) => self.event_streams.push(parsed.essence_str().to_owned()),
            Err(_) => panic!("Policy::event_stream: {media_type:?} is no media type"),
        }
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
}
