//! Work that nobody retries: keys whose attempt has died, or has failed half-way, are taken over and brought to an end.
//!
//! A lapsed lease is taken over by the next retry of its client, and so is a key that was given back. Where no client
//! retries (a job, a message that was acknowledged, a browser that was closed) the key stays as it is until it expires, and
//! the work half done. A [`Completer`] looks for such keys and hands each to a function of yours, as the next attempt: with
//! its steps, its derived keys and its lease.
//!
//! # Which keys
//!
//! Those of its resource that have not expired and have had fewer attempts than [`max_attempts`](Completer::max_attempts):
//!
//! - outstanding ones whose lease is over: their attempt has died;
//! - released ones with [steps](crate::IdemKey::step), whatever the last attempt has answered, unless its handler has
//!   [said](crate::IdemKey::release) that nothing was done;
//! - released ones without steps whose attempts have [derived](crate::IdemKey::derive) a key, have begun a step or were sure
//!   of a success that was not committed, if the last one has ended by a failure (500 and more, a panic, an end without an
//!   answer) or by a COMMIT that was refused (409). A handler that has derived a key and then answers 402 has decided: its
//!   client was told so, and nobody does it behind its back.
//!
//! Each only when the [grace](Completer::grace) is over, counted from the end of the lease or from the release, so that a
//! client that retries comes first. An attempt of a completer that fails keeps its key for a lease, and the grace begins after
//! that: a function that always fails is called once in a lease and a grace, and after the last attempt no more.
//! What is never brought to an end [is told of](crate::sweeper#half-done-keys) when it expires.
//!
//! # Do I need this?
//!
//! Not where all of the work is one transaction ([`IdemTx`](crate::IdemTx)): an attempt that dies there has done
//! nothing. It is for effects outside the database that must not stay half done.
//!
//! # Deployment caveat
//!
//! With [`OUTSTANDING_INDEX`](crate::migrations::OUTSTANDING_INDEX) each round is a short look into its two indexes, whose
//! price every completion pays. Without it a round walks [`STRETCH`] rows of the table on by its primary key, so that
//! it comes to every key once in (rows of the table / `STRETCH`) rounds.

use std::{
    fmt,
    num::NonZeroU32,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture, future::join_all};
use serde::Serialize;
use tokio::{task::JoinHandle, time::sleep};

use crate::{
    ask::Ask,
    engine::{
        Engine,
        ending::millis,
        leases::Owner,
        store::{Checkout, in_time},
    },
    error::Error,
    extract::IdemKey,
    fingerprint::{Fingerprint, RECIPE_VERSION},
    idempotency::Idempotency,
    key::IdempotencyKey,
    lease::Lease,
    once::{Once, Run, json_of},
    policy::{Policy, Return},
    postgres::{
        lapsed::{self, Lapsed, Stretch, Stretches, Wanted},
        steps,
    },
    scope::{Domain, KeyId, Scope, readable},
    snapshot::ResponseSnapshot,
    sweeper::jittered,
    telemetry::{self, Event},
};

/// How often a completer looks: every half a minute, as long as a default lease.
pub const DEFAULT_COMPLETER_INTERVAL: Duration = Duration::from_secs(30);
/// How long after its lease, or its release, a key is left to its own client: as long as a default lease.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// How many keys are taken over in a round, and run at once: as many as a small pool bears.
pub const DEFAULT_COMPLETER_BATCH: u32 = 10;
/// How many attempts a key gets, all that were made before included: what has failed ten times is for somebody to
/// look at.
pub const DEFAULT_MAX_ATTEMPTS: u32 = 10;
/// How many rows are walked in a round where there is no index of those that are outstanding.
pub const STRETCH: u32 = 10_000;

type Work = Arc<dyn Fn(IdemKey) -> BoxFuture<'static, Option<ResponseSnapshot>> + Send + Sync>;

/// Takes over keys whose lease has lapsed, or that were given back half-done, and hands them to a function.
///
/// ```no_run
/// use actix_idempotency::{Completer, IdemKey, Once};
///
/// # struct Unreachable;
/// # async fn send_invoices(month: &str, key: &IdemKey) -> Result<u32, Unreachable> { Ok(0) }
/// # fn example(once: Once) {
/// let completing = Completer::of_work(&once, "monthly-invoices", |key: IdemKey| async move {
///     send_invoices(key.key().as_str(), &key).await
/// })
/// .spawn();
/// # }
/// ```
///
/// The function gets the key and nothing else: the input is not stored. What it needs stands in rows of yours that the
/// key leads to, or in the results of [steps](IdemKey::step). Its result is stored as that of the work, fenced: an
/// earlier attempt that wakes up after all stores nothing. Where it fails, the key stays outstanding, and the next
/// attempt comes when this lease has lapsed, up to [`max_attempts`](Self::max_attempts); the last one that fails is
/// the event `given-up`.
///
/// Any number of completers work side by side, in one process or many; each key is handed to one of them. A client
/// that retries meanwhile finds it outstanding.
#[derive(Clone)]
pub struct Completer {
    engine: Arc<Engine>,
    policy: Arc<Policy>,
    domain: Domain,
    resource: String,
    work: Work,
    interval: Duration,
    grace: Duration,
    batch: NonZeroU32,
    max_attempts: u32,
    /// Where the last round has ended its walk.
    walked_to: Arc<Mutex<Vec<u8>>>,
}

/// What a round has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Round {
    /// So many keys are completed.
    pub completed: usize,
    /// So many attempts have failed, or were overtaken.
    pub failed: usize,
}

impl Completer {
    /// For the work that [`Once::run`] does under this name ([`Scope::once`]), with the lease and the limits of its
    /// settings.
    #[must_use]
    pub fn of_work<T, E, Fut>(
        once: &Once,
        resource: &str,
        work: impl Fn(IdemKey) -> Fut + Send + Sync + 'static,
    ) -> Self
    where
        T: Serialize,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        let work = move |key| {
            let done = work(key);
            async move { done.await.ok().map(|value| json_of(&value)) }.boxed()
        };
        Self::new(once.engine(), once.policy(), Domain::Once, resource.into(), Arc::new(work))
    }

    /// For requests: `method` and `pattern` are those of the protected resource, or `resource` the name that its
    /// policy gives it. The answer that the function returns is the one that a retry of the client gets.
    ///
    /// ```no_run
    /// use actix_idempotency::{Completer, IdemKey, Idempotency, ResponseSnapshot};
    /// use actix_web::http::StatusCode;
    ///
    /// # struct Unreachable;
    /// # async fn charge(key: IdemKey) -> Result<String, Unreachable> { Ok(String::new()) }
    /// # fn example(idempotency: Idempotency) {
    /// let completing = Completer::of_requests(&idempotency, "POST /payments", |key: IdemKey| async move {
    ///     let charge = charge(key).await?;
    ///     Ok::<_, Unreachable>(ResponseSnapshot::new(StatusCode::CREATED).with_body(charge))
    /// })
    /// .spawn();
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// For [`Idempotency::from_app_data`], which has no engine.
    #[track_caller]
    #[must_use]
    pub fn of_requests<E, Fut>(
        idempotency: &Idempotency,
        resource: &str,
        work: impl Fn(IdemKey) -> Fut + Send + Sync + 'static,
    ) -> Self
    where
        Fut: Future<Output = Result<ResponseSnapshot, E>> + Send + 'static,
    {
        let engine = idempotency.engine().expect("Completer: Idempotency::from_app_data() has no engine of its own");
        let policy = idempotency.policy().unwrap_or_default();
        let work = move |key| {
            let done = work(key);
            async move { done.await.ok() }.boxed()
        };
        Self::new(&engine, &policy, Domain::Http, resource.into(), Arc::new(work))
    }

    fn new(engine: &Arc<Engine>, policy: &Arc<Policy>, domain: Domain, resource: String, work: Work) -> Self {
        Self {
            engine: Arc::clone(engine),
            policy: Arc::clone(policy),
            domain,
            resource,
            work,
            interval: DEFAULT_COMPLETER_INTERVAL,
            grace: DEFAULT_GRACE,
            batch: NonZeroU32::new(DEFAULT_COMPLETER_BATCH).unwrap_or(NonZeroU32::MIN),
            max_attempts: DEFAULT_MAX_ATTEMPTS,
            walked_to: Arc::default(),
        }
    }

    /// The time between two rounds, give or take a fifth. Default: [`DEFAULT_COMPLETER_INTERVAL`].
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// How long a lease must have been over, or a key released, so that a client that retries comes first. Default:
    /// [`DEFAULT_GRACE`].
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// How many keys a round takes over, and runs at once. Default: [`DEFAULT_COMPLETER_BATCH`].
    #[must_use]
    pub fn batch(mut self, keys: NonZeroU32) -> Self {
        self.batch = keys;
        self
    }

    /// How many attempts a key gets, those of its clients included. Default: [`DEFAULT_MAX_ATTEMPTS`].
    #[must_use]
    pub fn max_attempts(mut self, attempts: NonZeroU32) -> Self {
        self.max_attempts = attempts.get();
        self
    }

    /// Takes over one batch and waits until all of it has been run. Dropped before that, the runs go on; after
    /// [`Drain`](crate::Drain) has begun, it takes nothing.
    ///
    /// # Errors
    ///
    /// Where the store fails.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub async fn complete_once(&self) -> Result<Round, Error> {
        if self.engine.is_draining() {
            return Ok(Round::default());
        }
        let owner = rand::random();
        let taken = in_time(self.policy.store_timeout, self.take(&owner)).await?;
        let runs: Vec<_> = taken
            .into_iter()
            .filter_map(|key| self.lease(key, owner))
            .map(|(ask, lease)| {
                let run = self.clone().complete(ask, lease);
                tokio::spawn(self.engine.tasks.track_future(run))
            })
            .collect();
        let ended = join_all(runs).await;
        let completed = ended.iter().filter(|ended| matches!(ended, Ok(true))).count();
        Ok(Round { completed, failed: ended.len() - completed })
    }

    async fn take(&self, owner: &Owner) -> Result<Vec<Lapsed>, Error> {
        let mut conn = self.engine.store.connection().await?;
        let indexed = (lapsed::is_indexed(&mut conn).await?, lapsed::is_released_indexed(&mut conn).await?);
        let walked = match indexed {
            (true, true) => None,
            _ => Some(self.stretch(&mut conn).await?),
        };
        let stretch = |is_indexed: bool| walked.clone().filter(|_| !is_indexed).unwrap_or_else(Stretch::whole);
        let stretches = Stretches {
            lapsed: stretch(indexed.0),
            released: stretch(indexed.1),
            sees_steps: steps::may_be_read(&mut conn).await?,
        };
        let wanted = Wanted {
            domain: self.domain.as_str(),
            resource: &readable(&self.resource),
            grace_ms: millis(self.grace),
            max_attempts: i32::try_from(self.max_attempts).unwrap_or(i32::MAX),
            recipe_version: RECIPE_VERSION,
            limit: self.batch.get().into(),
            owner,
            lease_ms: millis(self.policy.lease),
        };
        let taken = lapsed::take(&mut conn, &wanted, &stretches).await?;
        conn.give_back();
        // A full batch may have left some of this stretch.
        if let Some(walked) = walked.filter(|_| taken.len() < self.batch.get() as usize) {
            *self.walked_to.lock().unwrap_or_else(PoisonError::into_inner) = walked.to;
        }
        Ok(taken)
    }

    /// The next one; behind the last key comes the first.
    async fn stretch(&self, conn: &mut Checkout) -> Result<Stretch, Error> {
        let after = self.walked_to.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(to) = lapsed::end(conn, &after, STRETCH.into()).await? {
            return Ok(Stretch { after, to });
        }
        let to = lapsed::end(conn, &[], STRETCH.into()).await?.unwrap_or_default();
        Ok(Stretch { after: Vec::new(), to })
    }

    /// `None` where the row was not written by this crate.
    fn lease(&self, taken: Lapsed, owner: Owner) -> Option<(Ask, Lease)> {
        let fingerprint = Fingerprint::stored(taken.fingerprint.try_into().ok()?, taken.recipe.try_into().ok()?);
        let ask = Ask {
            id: KeyId(taken.id.try_into().ok()?),
            key: IdempotencyKey::try_from(taken.key).ok()?,
            scope: Scope::shown(self.domain, taken.tenant, taken.principal, &self.resource),
            fingerprint,
            not_after: None,
            request_id: None,
        };
        let event = if taken.was_released { Event::Retried } else { Event::TakenOver };
        telemetry::joined(event, &ask.id, taken.request_id.as_deref());
        let lease = Lease::resumed(&ask, owner, taken.seed.try_into().ok()?, taken.attempt, &self.engine, &self.policy);
        Some((ask, lease))
    }

    /// Whether the key is completed now.
    async fn complete(self, ask: Ask, lease: Lease) -> bool {
        let (id, attempt) = (ask.id, lease.attempt.unsigned_abs());
        let run = Run::new(&self.engine, &self.policy, ask);
        let work = async |key| (self.work)(key).await.ok_or(Failed);
        // A failure keeps the key outstanding, and so in sight of the next round.
        match run.under(lease, Return::HoldLease, work, ResponseSnapshot::clone).await {
            Ok(Some(_)) => true,
            Ok(None) => {
                telemetry::event(Event::LeaseLost, &id);
                false
            }
            Err(error) => {
                run.report::<(), Failed>(&Err(error));
                if attempt >= self.max_attempts {
                    telemetry::event(Event::GivenUp, &id);
                }
                false
            }
        }
    }

    /// Goes on by itself on the current tokio runtime until the handle is stopped or dropped. An error of the store
    /// is logged and the loop goes on.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    #[must_use = "dropping the handle stops the completer"]
    pub fn spawn(self) -> Completing {
        let task = tokio::spawn(async move {
            loop {
                sleep(jittered(self.interval)).await;
                if let Err(error) = self.complete_once().await {
                    telemetry::store_failed("keys that nobody retries could not be taken over", &error);
                }
            }
        });
        Completing { task }
    }
}

impl fmt::Debug for Completer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completer")
            .field("resource", &self.resource)
            .field("interval", &self.interval)
            .field("grace", &self.grace)
            .field("batch", &self.batch)
            .field("max_attempts", &self.max_attempts)
            .finish_non_exhaustive()
    }
}

/// What the function has failed with is its own affair.
struct Failed;

/// A completer at work. Dropping it stops it; what it has taken over is run to its end.
#[derive(Debug)]
pub struct Completing {
    task: JoinHandle<()>,
}

impl Completing {
    /// Stops it and waits until it takes over nothing more.
    pub async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Completing {
    fn drop(&mut self) {
        self.task.abort();
    }
}
