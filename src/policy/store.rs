//! How long things last, and how the store is used.

use super::*;

impl Policy {
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

    /// How long the store may take for what a request asks of it: the claim, and again the completion,
    /// each with its wait for a connection. Past it a claim is answered with 503 `store-unavailable`,
    /// and a completion goes on in the background. A statement waits a fifth of it for a row that
    /// somebody has locked. A retry of a key that this process has met may look together with others before
    /// that, for a tenth of it and half a second at most. Default: [`DEFAULT_STORE_TIMEOUT`].
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
    /// for cannot be seen before it commits. Who waits, and who asks for a [status](crate::Idempotency::status),
    /// reads `pg_locks`, as every role may unless that was revoked. An answer of 400 and more leaves no row, unless
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
    /// Within a second of that its place in the pool, and among those who may hold a transaction, is given to others,
    /// also where its handler still has it; so it is after so long a time since the last use of one that was ended
    /// otherwise (`pg_terminate_backend`). The handler's next use of it fails, and its answer is an error. A
    /// single statement that takes longer than this goes on undisturbed, on a connection beside the pool's count.
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
}
