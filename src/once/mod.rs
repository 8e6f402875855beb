//! The engine without HTTP: for services, jobs, cron and command-line tools.

mod outcome;
mod run;
mod within;

use std::{fmt, sync::Arc};

use serde::{Serialize, de::DeserializeOwned};

pub use self::outcome::{OnceError, Outcome};
pub(crate) use self::run::{Run, json_of};
use crate::{
    ask::Ask,
    engine::{Engine, Patience},
    extract::IdemKey,
    fingerprint::Fingerprint,
    idempotency::Idempotency,
    keep::Keep,
    key::IdempotencyKey,
    policy::{OnFailure, Policy, Quota},
    postgres::PgPool,
    refusal::Code,
    request_id::RequestId,
    scope::Scope,
    told::Told,
};

/// Runs a function once per key: one result, however often it is called, by whomever, from however many
/// processes.
///
/// ```no_run
/// use actix_idempotency::{IdemKey, Once, OnceError, Outcome, Scope, pool};
///
/// # #[derive(Debug)] struct Mailed;
/// # async fn send_invoices(month: &str, key: &IdemKey) -> Result<u32, Mailed> { Ok(0) }
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let once = Once::postgres(pool("postgres://localhost/shop")?);
/// let month = "2026-11";
/// let sent = once
///     .run(Scope::once("monthly-invoices"), month, &(), move |key| async move { send_invoices(month, &key).await })
///     .await;
/// match sent {
///     Ok(Outcome::Ran(invoices)) => println!("{invoices} invoices sent"),
///     Ok(Outcome::Replayed(invoices)) => println!("done before: {invoices} invoices"),
///     Ok(Outcome::Outstanding(wait)) => println!("another process is at it, ask again in {wait:?}"),
///     Err(OnceError::Failed(error)) => println!("failed, and may be tried again: {error:?}"),
///     Err(error) => println!("not run: {error}"),
/// }
/// # Ok(())
/// # }
/// ```
///
/// It is the protocol of the middleware: claim, lease, fencing, takeover, replay, retention, events. A result is
/// stored as JSON and comes back to every later call with the key; an error gives the key back. The claim waits for the
/// disk, so that [`IdemKey::derive`] gives every attempt the same keys.
///
/// What a function does outside the database happens *at least once*: see [`IdemKey::step`] and
/// [`IdemKey::derive`]. What it writes in the database happens once where it is written in the transaction that stores the
/// result: [`run_in`](Self::run_in), or [`IdemKey::complete_in`].
///
/// # Settings
///
/// Those of a [`Policy`] that a function has as well as a request: `retention`, `lease`, `max_run`, `store_timeout`,
/// `response_limit` (of the result), `on_outstanding`, `on_completed`, `on_failure`, `retry_after`, `max_running`,
/// `max_waiting`, `fingerprint_secrets`. The rest says nothing here.
///
/// ```no_run
/// use std::time::Duration;
/// use actix_idempotency::{Idempotency, OnOutstanding, Once, Policy};
///
/// # fn example(idempotency: Idempotency) {
/// // Beside a service: its engine, so that one drain, one sweeper and one renewal serve both.
/// let once = Once::of(&idempotency).with(
///     Policy::new()
///         .retention(Duration::from_secs(90 * 24 * 60 * 60))
///         .on_outstanding(OnOutstanding::Wait(Duration::from_secs(10))),
/// );
/// # }
/// ```
#[derive(Clone)]
pub struct Once {
    engine: Arc<Engine>,
    policy: Arc<Policy>,
    request_id: Option<RequestId>,
}

impl Once {
    /// An engine on this pool, with the default settings.
    ///
    /// # Panics
    ///
    /// If the operating system refuses a thread, which the first engine of a process starts.
    #[must_use]
    pub fn postgres(pool: PgPool) -> Self {
        Self::on(Engine::new(pool), Policy::new())
    }

    /// The engine of a middleware, with the default settings.
    ///
    /// # Panics
    ///
    /// For [`Idempotency::from_app_data`], which has none.
    #[track_caller]
    #[must_use]
    pub fn of(idempotency: &Idempotency) -> Self {
        let engine = idempotency.engine().expect("Once::of: Idempotency::from_app_data() has no engine of its own");
        Self::on(engine, Policy::new())
    }

    /// The same engine under other settings; they replace those that were there as a whole.
    ///
    /// # Panics
    ///
    /// For [`Policy::atomic`] (that is [`run_in`](Self::run_in)), [`OnFailure::Store`] (an error that is to be kept is
    /// a part of the result) and [`Policy::quota`] (it counts requests), and for settings that contradict each other.
    #[track_caller]
    #[must_use]
    pub fn with(&self, policy: Policy) -> Self {
        policy.assert_consistent();
        assert!(!policy.is_atomic, "Once::with: Policy::atomic() is for requests; use Once::run_in");
        assert!(
            policy.on_failure != OnFailure::Store,
            "Once::with: OnFailure::Store keeps answers; return what is to be kept as the result"
        );
        assert!(policy.quota == Quota::default(), "Once::with: Policy::quota counts requests");
        Self { request_id: self.request_id.clone(), ..Self::on(Arc::clone(&self.engine), policy) }
    }

    /// For calls on behalf of a request, a message or a job that the logs know by this id: it is stored with the first
    /// call under a key and told on its replays, as [`Policy::request_id`] does for requests, and within the same bounds.
    ///
    /// ```no_run
    /// # async fn example(once: actix_idempotency::Once) -> Result<(), actix_idempotency::OnceError<String>> {
    /// use actix_idempotency::Scope;
    ///
    /// let outcome = once
    ///     .request_id("job-2026-11-30")
    ///     .run(Scope::once("monthly-invoices"), "2026-11", &(), async |_| Ok::<u32, String>(0))
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn request_id(&self, id: &str) -> Self {
        Self { request_id: RequestId::new(id), ..self.clone() }
    }

    fn on(engine: Arc<Engine>, policy: Policy) -> Self {
        // Of what only an answer has, nothing applies to a result.
        let policy = Policy { keep: Keep::Success, redact: None, ..policy.durable_claims() };
        Self { engine, policy: Arc::new(policy), request_id: None }
    }

    /// Runs `work`, unless it was done under this key: then its stored result comes back.
    ///
    /// `input` is what the work is asked for, `&()` where the key says it all: the same key with another input is
    /// [`Code::KeyReused`]. It is compared as JSON, and only a digest of it is stored.
    ///
    /// The work runs in a task of its own on the current tokio runtime: whoever drops this future, or loses interest,
    /// does not stop half-done work. Its lease is renewed while it runs, by a thread of the engine's, up to
    /// [`Policy::max_run`]. A call that waits ([`OnOutstanding::Wait`](crate::OnOutstanding::Wait)) holds no connection.
    ///
    /// # Errors
    ///
    /// See [`OnceError`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub async fn run<T, E, F, Fut>(
        &self,
        scope: Scope,
        key: &str,
        input: &(impl Serialize + ?Sized),
        work: F,
    ) -> Result<Outcome<T>, OnceError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        F: FnOnce(IdemKey) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        let run = Run::new(&self.engine, &self.policy, self.ask(scope, key, input)?);
        let mut patience = Patience::new(&self.policy);
        let mut work = work;
        loop {
            patience.listen();
            let told = match run.look().await {
                Some(told) => told,
                None if self.engine.tasks.len() >= self.policy.max_running => return Err(Code::Busy.into()),
                None => match run.spawn(work).await? {
                    run::Turn::Done(outcome) => return Ok(outcome),
                    run::Turn::Told(back, told) => {
                        work = back;
                        told
                    }
                },
            };
            if !matches!(told, Told::Outstanding(_)) || !patience.wait(&self.engine, run.ask().id, &self.policy).await {
                return run.told(told);
            }
        }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(crate) fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    fn ask<E>(&self, scope: Scope, key: &str, input: &(impl Serialize + ?Sized)) -> Result<Ask, OnceError<E>> {
        let key = IdempotencyKey::try_from(key).map_err(OnceError::InvalidKey)?;
        let input = serde_json::to_vec(input).map_err(OnceError::Input)?;
        let fingerprint = Fingerprint::of_value(&input, &self.policy);
        Ok(Ask::of_function(key, scope.of_functions(), fingerprint, self.request_id.clone()))
    }
}

impl fmt::Debug for Once {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Once").field("policy", &self.policy).finish_non_exhaustive()
    }
}
