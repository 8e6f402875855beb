//! Steps: what an attempt has done already is not done again by the next one.

use std::{
    collections::HashSet,
    fmt,
    sync::{Mutex, PoisonError},
};

use actix_web::Error as ActixError;
use serde::{Serialize, de::DeserializeOwned};

use super::{IdemKey, idem_key::Held};
use crate::{
    engine::store::in_time,
    error::{Error, ErrorKind},
    failpoint,
    postgres::steps,
    refusal::{Code, Refusal},
    telemetry,
};

/// The longest name of a step, in bytes.
pub const MAX_STEP_NAME: usize = 255;
/// The largest result of a step that is kept, in bytes of its JSON: 64 KiB. A step keeps what later steps need
/// of it, an id of the provider's for example, rather than all that came back.
pub const MAX_STEP_RESULT: usize = 64 * 1024;

/// How often a statement is sent again whose connection has died, or that lost against a renewal.
const TRIES: u32 = 3;

/// The steps that one attempt has come to.
#[derive(Debug, Default)]
pub(super) struct Steps(Mutex<HashSet<String>>);

impl Steps {
    /// `None` where this attempt has come to it before.
    fn enter<'a>(&'a self, name: &'a str) -> Option<Entered<'a>> {
        let is_new = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
        is_new.then_some(Entered { steps: self, name, done: false })
    }

    fn leave(&self, name: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

/// A step on its way. Dropped before it is done, it may be tried again.
struct Entered<'a> {
    steps: &'a Steps,
    name: &'a str,
    done: bool,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.steps.leave(self.name);
        }
    }
}

impl IdemKey {
    /// Does something once for all attempts at this operation: its result is stored under the key as soon as it
    /// is there, and an attempt that takes over after a crash, or tries again after a release, gets the stored
    /// one and does not do it.
    ///
    /// ```no_run
    /// use actix_idempotency::IdemKey;
    /// use actix_web::{HttpResponse, Result, post};
    ///
    /// #[post("/payments")]
    /// async fn pay(key: IdemKey) -> Result<HttpResponse> {
    ///     let charge: String = key.step("charge", async || charge(&key.derive("charge")).await).await?;
    ///     let receipt: String = key.step("receipt", async || receipt(&charge).await).await?;
    ///     Ok(HttpResponse::Created().body(receipt))
    /// }
    /// # async fn charge(key: &str) -> Result<String> { Ok(String::new()) }
    /// # async fn receipt(charge: &str) -> Result<String> { Ok(String::new()) }
    /// ```
    ///
    /// A name stands for one step of a key, in whatever order the steps come; a loop names each of its rounds.
    /// Results are JSON, of at most [`MAX_STEP_RESULT`] bytes; a larger one is returned and not kept, and a later
    /// attempt is told so rather than doing the step again. Once there is a step the key is the same request's, however
    /// an attempt ends, unless the handler says by [`release`](Self::release) that nothing was done; a corrected request,
    /// and a later operation under the same key once that has expired, start without steps. They go with their key when it is swept.
    ///
    /// It is stored by a short statement of its own on a connection of the pool: no transaction is open
    /// meanwhile, so take [`IdemTx`](crate::IdemTx) after the steps, not before.
    ///
    /// # Deployment caveat
    ///
    /// A step is *at least once*: a process that dies after the effect and before its result is stored leaves
    /// nothing, and the next attempt does the step again. [`derive`](Self::derive) closes that: with the same key
    /// the provider recognises the second as the first.
    ///
    /// # Errors
    ///
    /// See [`StepError`]. What `work` returns as an error is not stored: the next attempt tries again, and so may
    /// this one.
    pub async fn step<T, E>(&self, name: &str, work: impl AsyncFnOnce() -> Result<T, E>) -> Result<T, StepError<E>>
    where
        T: Serialize + DeserializeOwned,
    {
        let Some(held) = self.held() else {
            telemetry::misconfigured("steps are for effects outside the database, and Policy::atomic() is for none");
            return Err(StepError::Refused(Code::Misconfigured));
        };
        if name.is_empty() || name.len() > MAX_STEP_NAME || name.chars().any(char::is_control) {
            return Err(StepError::Name);
        }
        let mut entered = held.steps.enter(name).ok_or(StepError::Repeated)?;
        // Also where an attempt before has done it, and died without a word.
        held.acted.set();
        // The first attempt finds none: the seed is its own.
        if self.attempt() > 1
            && let Some(stored) = held.find(name).await.map_err(StepError::Store)?
        {
            entered.done = true;
            let result = stored.ok_or(StepError::Omitted)?;
            return serde_json::from_slice(&result).map_err(|_| StepError::Shape);
        }
        failpoint::reach("before-step");
        let value = work().await.map_err(StepError::Failed)?;
        entered.done = true;
        failpoint::reach("after-step");
        let result = fit_to_keep(&value);
        let stored = held.store(name, result.as_deref()).await.map_err(StepError::Store)?;
        failpoint::reach("after-step-stored");
        if stored { Ok(value) } else { Err(StepError::Refused(Code::LeaseLost)) }
    }
}

/// As JSON; `None` where that is too large, or there is none.
fn fit_to_keep(value: &impl Serialize) -> Option<Vec<u8>> {
    let result = serde_json::to_vec(value).ok().filter(|json| json.len() <= MAX_STEP_RESULT);
    if result.is_none() {
        telemetry::advise("the result of a step is larger than 64 KiB, or no JSON: later attempts will not get it");
    }
    result
}

impl Held {
    async fn find(&self, name: &str) -> Result<Option<Option<Vec<u8>>>, Error> {
        let mut tries = 0;
        loop {
            tries += 1;
            let find = async {
                let mut conn = self.engine.store.connection().await?;
                let found = steps::find(&mut conn, &self.id.0, &self.seed, name).await?;
                conn.give_back();
                Ok(found)
            };
            match in_time(self.policy.store_timeout, find).await {
                Err(error) if tries < TRIES && may_succeed(&error) => {}
                found => return found,
            }
        }
    }

    /// `false`: the lease was lost. That it is sent again changes nothing: it says the same.
    async fn store(&self, name: &str, result: Option<&[u8]>) -> Result<bool, Error> {
        let mut tries = 0;
        loop {
            tries += 1;
            let store = async {
                let mut conn = self.engine.store.connection().await?;
                let stored = steps::store(&mut conn, &self.id.0, &self.owner, name, result).await?;
                conn.give_back();
                Ok(stored)
            };
            match in_time(self.policy.store_timeout, store).await {
                Err(error) if tries < TRIES && may_succeed(&error) => {}
                stored => return stored,
            }
        }
    }
}

/// On another connection where one has died; and where a renewal of the lease came in between.
fn may_succeed(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Connection | ErrorKind::Serialization)
}

/// Why a step has no result.
///
/// | | with `?` in a handler |
/// |---|---|
/// | `Failed` | the answer of that error |
/// | `Refused` | that refusal: 409 `lease-lost`, 500 `misconfigured` |
/// | `Store` | 503 `store-unavailable` |
/// | `Name`, `Repeated`, `Omitted`, `Shape` | 500 `misconfigured` |
#[derive(Debug)]
#[non_exhaustive]
pub enum StepError<E> {
    /// What it was to do failed. Nothing is stored.
    Failed(E),
    /// [`Code::LeaseLost`]: another attempt has the key; the step is done, and its result not stored.
    /// [`Code::Misconfigured`]: under [`Policy::atomic`](crate::Policy::atomic) there are no steps.
    Refused(Code),
    /// The name is empty, longer than [`MAX_STEP_NAME`] or has a control character. Nothing was done.
    Name,
    /// This attempt has come to a step of that name before. Nothing was done.
    Repeated,
    /// An earlier attempt has done it, and its result was too large to keep.
    Omitted,
    /// An earlier attempt has done it, and its result is of another shape: another version of the program wrote
    /// it. What is stored stays; it is not shown here.
    Shape,
    /// The store failed. Where that was after the step, it is done and its result may not be stored.
    Store(Error),
}

impl<E> StepError<E> {
    fn code(&self) -> Code {
        match self {
            Self::Refused(code) => *code,
            Self::Store(_) => Code::StoreUnavailable,
            _ => Code::Misconfigured,
        }
    }

    fn words(&self) -> &'static str {
        match self {
            Self::Failed(_) => "what the step was to do failed",
            Self::Refused(code) => code.as_str(),
            Self::Name => "a step has a name of 1 to 255 bytes without control characters",
            Self::Repeated => "this attempt has come to a step of that name before",
            Self::Omitted => "the step was done, and its result was too large to keep",
            Self::Shape => "the step was done, and its result is of another shape",
            Self::Store(_) => "the store failed before or after a step",
        }
    }
}

impl<E> fmt::Display for StepError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

impl<E: std::error::Error + 'static> std::error::Error for StepError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Failed(error) => Some(error),
            Self::Store(error) => Some(error),
            _ => None,
        }
    }
}

impl<E: Into<ActixError>> From<StepError<E>> for ActixError {
    fn from(error: StepError<E>) -> Self {
        match &error {
            StepError::Failed(_) | StepError::Refused(_) => {}
            StepError::Store(cause) => telemetry::store_failed(error.words(), cause),
            _ => telemetry::misconfigured(error.words()),
        }
        match error {
            StepError::Failed(error) => error.into(),
            error => Refusal::new(error.code()).into(),
        }
    }
}
