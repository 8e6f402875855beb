//! The claim as the handler sees it.

use std::{
    fmt,
    future::{Ready, ready},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use actix_web::{
    FromRequest, HttpMessage, HttpRequest,
    dev::{Payload, ServiceRequest},
    http::StatusCode,
};

use crate::{
    claim::{Ask, Lease},
    digest::Digest,
    key::IdempotencyKey,
    policy::Policy,
    refusal::{Code, Refusal},
    scope::Scope,
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
/// # Errors
///
/// The extraction answers 400 `key-missing` to a request without a key, and 500 `misconfigured` where
/// no [`Idempotency`](crate::Idempotency) is wrapped around the route. `Option<IdemKey>` is `None` in
/// both cases.
#[derive(Clone)]
pub struct IdemKey(Arc<Claimed>);

struct Claimed {
    key: IdempotencyKey,
    scope: Scope,
    attempt: u32,
    seed: [u8; 32],
    fingerprint: [u8; 32],
    say: AtomicU8,
}

/// What a handler says about its own answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Say {
    Nothing,
    Keep,
    KeepWithoutBody,
    Release,
}

/// What is done with an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Keep,
    KeepWithoutBody,
    Release,
}

impl IdemKey {
    pub(crate) fn new(ask: &Ask, lease: &Lease) -> Self {
        Self(Arc::new(Claimed {
            key: ask.key.clone(),
            scope: ask.scope.clone(),
            attempt: lease.attempt.unsigned_abs(),
            seed: lease.seed,
            fingerprint: ask.fingerprint.digest,
            say: AtomicU8::new(Say::Nothing as u8),
        }))
    }

    /// The key that the client sent.
    #[must_use]
    pub fn key(&self) -> &IdempotencyKey {
        &self.0.key
    }

    /// Whose key it is, and for what.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        &self.0.scope
    }

    /// Which attempt at the operation this is: 1 for the first, more after a release or a takeover.
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
    #[must_use]
    pub fn derive(&self, name: &str) -> String {
        let mut digest = Digest::new("actix-idempotency derive 1");
        digest.part(self.0.seed).part(self.0.fingerprint).part(name);
        hex::encode(digest.finish())
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
    /// done, and the client may try again with the same key.
    pub fn release(&self) {
        self.say(Say::Release);
    }

    fn say(&self, say: Say) {
        self.0.say.store(say as u8, Ordering::Release);
    }

    /// What is done with an answer of this status: the handler's say, else the policy's.
    pub(crate) fn verdict(&self, status: StatusCode, policy: &Policy) -> Verdict {
        let say = self.0.say.load(Ordering::Acquire);
        if say == Say::KeepWithoutBody as u8 {
            Verdict::KeepWithoutBody
        } else if say == Say::Keep as u8 || say != Say::Release as u8 && policy.keeps(status) {
            Verdict::Keep
        } else {
            Verdict::Release
        }
    }
}

/// `Debug` shows no key.
impl fmt::Debug for IdemKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdemKey")
            .field("scope", &self.0.scope)
            .field("attempt", &self.0.attempt)
            .finish_non_exhaustive()
    }
}

/// What the middleware leaves in the request for those further in.
enum Mark {
    /// It saw the request, which has no key.
    Keyless,
    Claimed(IdemKey),
}

/// Whether a wrap further out has claimed a key for this request.
pub(crate) fn is_claimed(request: &ServiceRequest) -> bool {
    matches!(request.extensions().get::<Mark>(), Some(Mark::Claimed(_)))
}

pub(crate) fn mark_keyless(request: &ServiceRequest) {
    request.extensions_mut().insert(Mark::Keyless);
}

pub(crate) fn mark_claimed(request: &ServiceRequest, key: IdemKey) {
    request.extensions_mut().insert(Mark::Claimed(key));
}

impl FromRequest for IdemKey {
    type Error = Refusal;
    type Future = Ready<Result<Self, Refusal>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(match request.extensions().get::<Mark>() {
            Some(Mark::Claimed(key)) => Ok(key.clone()),
            Some(Mark::Keyless) => Err(Code::KeyMissing.into()),
            None => {
                crate::telemetry::misconfigured(
                    "a handler takes IdemKey, and no Idempotency is wrapped around its route: add \
                     .wrap(Idempotency::postgres(pool)), or a method of the request to Policy::methods",
                );
                Err(Code::Misconfigured.into())
            }
        })
    }
}
