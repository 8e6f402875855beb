//! The key, for a handler that wants to know it, or has a say in what becomes of its answer.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
};

use actix_web::{FromRequest, HttpRequest, dev::Payload, http::StatusCode};
use diesel_async::AsyncPgConnection;
use futures_util::{FutureExt, future::LocalBoxFuture};

use super::step::Steps;
use crate::{
    ask::Ask,
    digest::Digest,
    engine::{Engine, leases::Owner},
    error::{Error, ErrorKind},
    key::IdempotencyKey,
    lease::{Acted, Lease},
    policy::{OnFailure, Policy, Return},
    postgres::transactions,
    refusal::{Code, Refusal},
    scope::{KeyId, Scope},
    snapshot::ResponseSnapshot,
    telemetry,
    transaction::Parts,
};

/// The key of this request, which is claimed while the handler runs.
///
/// ```no_run
/// use actix_idempotency::IdemKey;
/// use actix_web::{HttpResponse, post};
///
/// #[post("/payments")]
/// async fn pay(key: IdemKey) -> HttpResponse {
///     // The provider sees the same key from every attempt at this payment.
///     let charge = charge(&key.derive("charge")).await;
///     HttpResponse::Created().body(charge)
/// }
/// # async fn charge(key: &str) -> String { String::new() }
/// ```
///
/// The extraction waits until the claim is on the database's disk and looks whether it is still there, so that keys
/// derived from it are the same after a crash of the database. Requests that do so at the same time share one
/// flush and one look.
///
/// # Errors
///
/// The extraction answers 400 `key-missing` to a request without a key, 500 `misconfigured` where no
/// [`Idempotency`](crate::Idempotency) is wrapped around the route, 503 `store-unavailable` where the claim
/// cannot be brought to the disk, and 409 `lease-lost` where a crash of the database has taken it away, or another
/// attempt has the key. `Option<IdemKey>` is `None` in all these cases: a handler that acts outside the
/// database takes `IdemKey` itself.
#[derive(Clone)]
pub struct IdemKey(Arc<Claimed>);

struct Claimed {
    ask: Ask,
    attempt: u32,
    say: AtomicU8,
    /// `None` under `Policy::atomic()`, where there is no row yet.
    held: Option<Held>,
    completed: Mutex<Option<ResponseSnapshot>>,
}

/// What the claim of a lease adds.
pub(super) struct Held {
    pub(super) engine: Arc<Engine>,
    pub(super) policy: Arc<Policy>,
    pub(super) id: KeyId,
    pub(super) owner: Owner,
    pub(super) seed: [u8; 32],
    /// Of the first attempt, however its digest was made.
    fingerprint: [u8; 32],
    is_durable: bool,
    pub(super) acted: Acted,
    /// The names of the steps that this attempt has come to.
    pub(super) steps: Steps,
}

/// What a handler says about its own answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Say {
    Nothing,
    Keep,
    KeepWithoutBody,
    Release,
    Hold,
}

/// What is done with an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Keep,
    KeepWithoutBody,
    Back(Return),
}

impl IdemKey {
    pub(crate) fn leased(ask: &Ask, lease: &Lease, engine: &Arc<Engine>, policy: &Arc<Policy>) -> Self {
        let held = Held {
            engine: Arc::clone(engine),
            policy: Arc::clone(policy),
            id: lease.id,
            owner: lease.owner,
            seed: lease.seed,
            fingerprint: lease.fingerprint,
            is_durable: lease.is_durable,
            acted: lease.acted.clone(),
            steps: Steps::default(),
        };
        Self::new(ask, lease.attempt.unsigned_abs(), Some(held))
    }

    /// Under `Policy::atomic()`.
    pub(crate) fn atomic(ask: &Ask) -> Self {
        Self::new(ask, 1, None)
    }

    fn new(ask: &Ask, attempt: u32, held: Option<Held>) -> Self {
        let say = AtomicU8::new(Say::Nothing as u8);
        Self(Arc::new(Claimed { ask: ask.clone(), attempt, say, held, completed: Mutex::default() }))
    }

    pub(super) fn held(&self) -> Option<&Held> {
        self.0.held.as_ref()
    }

    /// The key that the client sent.
    #[must_use]
    pub fn key(&self) -> &IdempotencyKey {
        &self.0.ask.key
    }

    /// Whose key it is, and for what.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        &self.0.ask.scope
    }

    /// Which attempt at the operation this is: 1 for the first, more after a release or a takeover. Under
    /// [`Policy::atomic`], where an attempt that fails leaves nothing behind, always 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.0.attempt
    }

    /// A key for a downstream service, 64 hexadecimal digits: the same for every attempt at this
    /// operation and the same `name`, another for a corrected request, and for a later operation under
    /// the same key once that has expired.
    ///
    /// What a handler does outside the database happens *at least once*: its process may die after the
    /// payment and before the answer is stored, and the next attempt pays again. With this key the
    /// provider recognises the second payment as the first.
    ///
    /// # Panics
    ///
    /// Under [`Policy::atomic`], which is for handlers without effects outside the database: an attempt
    /// that dies leaves nothing from which the next one could derive the same key.
    #[track_caller]
    #[must_use]
    pub fn derive(&self, name: &str) -> String {
        let Some(held) = &self.0.held else {
            panic!("IdemKey::derive is for effects outside the database, and Policy::atomic() is for handlers without");
        };
        held.acted.set();
        let mut digest = Digest::new("actix-idempotency derive 1");
        digest.part(held.seed).part(held.fingerprint).part(name);
        hex::encode(digest.finish())
    }

    /// Stores the answer in a transaction of the handler's own: the last statement before COMMIT. What is
    /// stored is what is sent afterwards, whatever the handler returns; where that transaction is rolled
    /// back, the key is released, and a success that the handler claims becomes 500
    /// `transaction-misused`.
    ///
    /// Until the transaction ends, duplicates of the key meet its row lock and wait a fifth of
    /// [`Policy::store_timeout`] before they get their 409.
    ///
    /// ```no_run
    /// use actix_idempotency::{IdemKey, PgPool, ResponseSnapshot};
    /// use actix_web::{Result, error::ErrorInternalServerError, http::StatusCode, web::Data};
    /// use diesel_async::{AsyncConnection, AsyncPgConnection};
    ///
    /// async fn create_order(key: IdemKey, pool: Data<PgPool>) -> Result<ResponseSnapshot> {
    ///     let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    ///     let answer = conn
    ///         .transaction(async |conn| {
    ///             let id = insert_order(conn).await?;
    ///             let answer = ResponseSnapshot::json(StatusCode::CREATED, &id)?;
    ///             key.complete_in(conn, answer.clone()).await?;
    ///             Ok::<_, Box<dyn std::error::Error + Send + Sync>>(answer)
    ///         })
    ///         .await
    ///         .map_err(ErrorInternalServerError)?;
    ///     Ok(answer)
    /// }
    /// # async fn insert_order(_: &mut AsyncPgConnection) -> diesel::QueryResult<i64> { Ok(1) }
    /// ```
    ///
    /// # Errors
    ///
    /// 409 `lease-lost` where another attempt has the key (roll back), 409 `serialization`, 500
    /// `transaction-aborted` for any other failure of the statement, and 500 `misconfigured` under
    /// [`Policy::atomic`].
    pub async fn complete_in(&self, conn: &mut AsyncPgConnection, snapshot: ResponseSnapshot) -> Result<(), Refusal> {
        let Some(held) = &self.0.held else {
            telemetry::misconfigured("IdemKey::complete_in needs a lease: use IdemTx under Policy::atomic()");
            return Err(Code::Misconfigured.into());
        };
        let snapshot = snapshot.fit_for(&held.policy);
        let stored = held.policy.stored(snapshot.clone());
        let parts = Parts::of(&stored);
        let answer = parts.answer(&stored);
        match transactions::complete_in(conn, &self.0.ask.id.0, &held.owner, &answer).await.map_err(Error::from) {
            Ok(true) => {
                *self.0.completed.lock().unwrap_or_else(PoisonError::into_inner) = Some(snapshot);
                Ok(())
            }
            Ok(false) => Err(Code::LeaseLost.into()),
            Err(error) if error.kind() == ErrorKind::Serialization => Err(Code::Serialization.into()),
            Err(error) => {
                telemetry::store_failed("an answer could not be stored in the handler's transaction", &error);
                Err(Code::TransactionAborted.into())
            }
        }
    }

    /// Where the handler says that nothing was done, it is believed.
    pub(crate) fn believe(&self) {
        if self.said() == Some(Verdict::Back(Return::Release)) {
            self.0.held.iter().for_each(|held| held.acted.deny());
        }
    }

    /// The handler was sure of its success, and gets another answer.
    pub(crate) fn mark_acted(&self) {
        self.0.held.iter().for_each(|held| held.acted.set());
    }

    /// What [`complete_in`](Self::complete_in) has stored, if that transaction was committed.
    pub(crate) fn completed(&self) -> Option<ResponseSnapshot> {
        self.0.completed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A claim is committed without waiting for the disk. Whoever takes the key may derive others from
    /// it, and those must be the same after a crash of the database. A claim that a crash has taken away is no
    /// longer this attempt's, whether or not another one has the key by now.
    async fn outlive_a_crash(&self) -> Result<(), Code> {
        let Some(held) = self.0.held.as_ref().filter(|held| !held.is_durable) else { return Ok(()) };
        match held.engine.flush(held.id, held.owner, &held.policy).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(Code::LeaseLost),
            Err(error) => {
                telemetry::store_failed("a claim could not be made durable", &error);
                Err(Code::StoreUnavailable)
            }
        }
    }

    /// Keeps this handler's answer, whatever its status and the policy. The last say counts.
    pub fn keep(&self) {
        self.say(Say::Keep);
    }

    /// Keeps status and headers of this handler's answer, and marks the body omitted: for a body that
    /// must not be stored, and one that is too large anyway.
    pub fn keep_without_body(&self) {
        self.say(Say::KeepWithoutBody);
    }

    /// Gives the key back, whatever the status of this handler's answer and the policy: nothing was
    /// done, and the client may try again with the same key, or send a corrected request under it. That
    /// counts also where this attempt has [derived](Self::derive) a key or come to a [step](Self::step); without it
    /// such a key goes back to the same request only, because what was done is unknown.
    pub fn release(&self) {
        self.say(Say::Release);
    }

    /// Keeps the key outstanding until its lease ends, whatever the status of this handler's answer and the
    /// policy: the answer is not kept, nobody tries again before that, and a retry gets 409 `held`. Under [`Policy::atomic`],
    /// where there is no lease, it is given back.
    pub fn hold(&self) {
        self.say(Say::Hold);
    }

    fn say(&self, say: Say) {
        self.0.say.store(say as u8, Ordering::Release);
    }

    /// What the handler has said of its own answer, if anything.
    pub(crate) fn said(&self) -> Option<Verdict> {
        let say = self.0.say.load(Ordering::Acquire);
        if say == Say::Keep as u8 {
            Some(Verdict::Keep)
        } else if say == Say::KeepWithoutBody as u8 {
            Some(Verdict::KeepWithoutBody)
        } else if say == Say::Release as u8 {
            Some(Verdict::Back(Return::Release))
        } else {
            (say == Say::Hold as u8).then_some(Verdict::Back(Return::HoldLease))
        }
    }

    /// What is done with an answer of this status: the handler's say, else the policy's.
    pub(crate) fn verdict(&self, status: StatusCode, policy: &Policy) -> Verdict {
        self.said().unwrap_or_else(|| {
            if policy.keeps(status) || policy.on_failure == OnFailure::Store {
                Verdict::Keep
            } else {
                Verdict::Back(policy.without_answer())
            }
        })
    }
}

/// `Debug` shows no key.
impl fmt::Debug for IdemKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdemKey")
            .field("scope", &self.0.ask.scope)
            .field("attempt", &self.0.attempt)
            .finish_non_exhaustive()
    }
}

impl FromRequest for IdemKey {
    type Error = Refusal;
    type Future = LocalBoxFuture<'static, Result<Self, Refusal>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let found = super::marked(request, "IdemKey", |mark| (mark.key.clone(), mark.slot.clone()));
        async move {
            let (key, slot) = found?;
            let key = key.ok_or(Code::KeyMissing)?;
            if let Err(code) = key.outlive_a_crash().await {
                // Behind `Option<IdemKey>` this would pass for a request without a key.
                slot.fail(code);
                return Err(code.into());
            }
            Ok(key)
        }
        .boxed_local()
    }
}
