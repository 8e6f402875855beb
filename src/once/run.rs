//! One run, from the claim to the stored result, in a task of its own.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Instant};

use actix_web::http::StatusCode;
use futures_util::FutureExt;
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::timeout;
use tracing::{Instrument, Span};

use super::{OnceError, Outcome};
use crate::{
    ask::Ask,
    claim::{self, Claim},
    engine::Engine,
    extract::{IdemKey, Verdict},
    failpoint,
    lease::{Ended, Lease},
    policy::{Policy, Return},
    refusal::Code,
    snapshot::ResponseSnapshot,
    telemetry::{self, Event},
    told::Told,
};

/// Work that is to run under a key.
#[derive(Clone)]
pub(crate) struct Run {
    engine: Arc<Engine>,
    policy: Arc<Policy>,
    ask: Ask,
    span: Span,
    began: Instant,
}

/// What came of a claim.
pub(super) enum Turn<T, F> {
    Done(Outcome<T>),
    Told(F, Told),
}

impl Run {
    pub(crate) fn new(engine: &Arc<Engine>, policy: &Arc<Policy>, ask: Ask) -> Self {
        let span = telemetry::span(&ask.scope, &ask.id, &ask.fingerprint, ask.request_id.as_ref());
        Self { engine: Arc::clone(engine), policy: Arc::clone(policy), ask, span, began: Instant::now() }
    }

    pub(super) fn ask(&self) -> &Ask {
        &self.ask
    }

    /// What is told without a claim.
    pub(super) async fn look(&self) -> Option<Told> {
        claim::look(&self.engine, &self.ask, &self.policy).instrument(self.span.clone()).await
    }

    /// The outcome for whom the work is not run.
    pub(super) fn told<T: DeserializeOwned, E>(&self, told: Told) -> Result<Outcome<T>, OnceError<E>> {
        let outcome = self.span.in_scope(|| self.answered(told));
        self.report(&outcome);
        outcome
    }

    /// From the claim on in a task of its own: whoever waits for it may go.
    pub(super) async fn spawn<T, E, F, Fut>(&self, work: F) -> Result<Turn<T, F>, OnceError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        F: FnOnce(IdemKey) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        let (run, span) = (self.clone(), self.span.clone());
        let turn = self.engine.tasks.track_future(async move { run.turn(work).await }.instrument(span));
        let turn = failpoint::cuttable(self.ask.key.as_str(), turn);
        // Where it is gone, the runtime is going down.
        tokio::spawn(turn).await.unwrap_or(Err(Code::OutcomeUnknown.into()))
    }

    async fn turn<T, E, F, Fut>(&self, work: F) -> Result<Turn<T, F>, OnceError<E>>
    where
        T: Serialize + DeserializeOwned,
        F: FnOnce(IdemKey) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        failpoint::reach("before-claim");
        let began = Instant::now();
        let claim = claim::claim(&self.engine, &self.ask, &self.policy).await;
        telemetry::claimed(began);
        let outcome = match claim {
            Ok(Claim::Fresh(lease)) => {
                let failed = self.policy.without_answer();
                match self.under(lease, failed, work, json_of).await {
                    Ok(Some(value)) => Ok(Outcome::Ran(value)),
                    Ok(None) => self.overtaken().await,
                    Err(error) => Err(error),
                }
            }
            Ok(Claim::Told(told)) => return Ok(Turn::Told(work, told)),
            Err(error) => {
                telemetry::store_failed("work could not be claimed", &error);
                Err(OnceError::Store(error))
            }
        };
        self.report(&outcome);
        outcome.map(Turn::Done)
    }

    /// The work, and what becomes of its result. `None`: somebody else has the key by now.
    pub(crate) async fn under<T, E, Fut>(
        &self,
        mut lease: Lease,
        failed: Return,
        work: impl FnOnce(IdemKey) -> Fut,
        snapshot: impl FnOnce(&T) -> ResponseSnapshot,
    ) -> Result<Option<T>, OnceError<E>>
    where
        Fut: Future<Output = Result<T, E>>,
    {
        lease.start(failed);
        let key = IdemKey::leased(&self.ask, &lease, &self.engine, &self.policy);
        self.span.record("attempt", key.attempt());
        failpoint::reach("after-claim");
        let working = AssertUnwindSafe(async { work(key.clone()).await }).catch_unwind();
        let began = Instant::now();
        let worked = timeout(self.policy.run_limit(), working).await;
        telemetry::handled(began);
        key.believe();
        let (event, code) = match worked {
            Ok(Ok(Ok(value))) => return self.keep(lease, &key, value, snapshot).await,
            Ok(Ok(Err(error))) => {
                let how = match key.said() {
                    Some(Verdict::Back(how)) => how,
                    _ => failed,
                };
                self.give_back(lease, &key, how).await;
                return Err(OnceError::Failed(error));
            }
            Ok(Err(_panic)) => (Event::Panicked, Code::HandlerPanicked),
            Err(_elapsed) => (Event::Aborted, Code::OutcomeUnknown),
        };
        telemetry::event(event, &self.ask.id);
        self.give_back(lease, &key, failed).await;
        Err(code.into())
    }

    async fn keep<T, E>(
        &self,
        lease: Lease,
        key: &IdemKey,
        value: T,
        snapshot: impl FnOnce(&T) -> ResponseSnapshot,
    ) -> Result<Option<T>, OnceError<E>> {
        if key.completed().is_some() {
            return self.confirm(lease).await.map(|ours| ours.then_some(value));
        }
        let stored = match key.said().unwrap_or(Verdict::Keep) {
            Verdict::Keep => self.policy.stored(snapshot(&value).fit_for(&self.policy)),
            Verdict::KeepWithoutBody => self.policy.stored(snapshot(&value).fit_for(&self.policy).without_body()),
            Verdict::Back(how) => {
                let ended = lease.give_back(StatusCode::OK, how).await;
                return Ok((ended != Ended::Lost).then_some(value));
            }
        };
        let began = Instant::now();
        let ended = lease.complete(stored).await;
        telemetry::completed(began);
        Ok((ended != Ended::Lost).then_some(value))
    }

    /// Of work that has stored its result in a transaction of its own: whether that was committed.
    async fn confirm<E>(&self, lease: Lease) -> Result<bool, OnceError<E>> {
        match self.engine.look(&self.ask.id, &self.policy).await {
            Ok(Some(row)) if row.owner == lease.owner && row.state == "completed" => {
                lease.confirm();
                Ok(true)
            }
            Ok(Some(row)) if row.owner == lease.owner => {
                telemetry::misconfigured("work has succeeded, and the transaction of its complete_in was rolled back");
                let code = Code::TransactionMisused;
                lease.give_back(code.status(), self.policy.without_answer()).await;
                Err(code.into())
            }
            Ok(_) => {
                lease.confirm();
                Ok(false)
            }
            Err(error) => {
                telemetry::store_failed("whether the transaction of some work was committed cannot be told", &error);
                lease.abandon();
                Err(Code::OutcomeUnknown.into())
            }
        }
    }

    /// After an error; unless it has stored its result before that.
    async fn give_back(&self, lease: Lease, key: &IdemKey, how: Return) {
        if key.completed().is_some() && self.is_completed_by(&lease).await {
            return lease.confirm();
        }
        lease.give_back(StatusCode::INTERNAL_SERVER_ERROR, how).await;
    }

    async fn is_completed_by(&self, lease: &Lease) -> bool {
        let row = self.engine.look(&self.ask.id, &self.policy).await;
        row.is_ok_and(|row| row.is_some_and(|row| row.owner == lease.owner && row.state == "completed"))
    }

    /// Somebody else has the key: what they stored is the result.
    async fn overtaken<T: DeserializeOwned, E>(&self) -> Result<Outcome<T>, OnceError<E>> {
        telemetry::event(Event::LeaseLost, &self.ask.id);
        match claim::look_again(&self.engine, &self.ask, &self.policy).await {
            Ok(Some(told)) => self.answered(told),
            Ok(None) => Err(Code::LeaseLost.into()),
            Err(error) => {
                telemetry::store_failed("an attempt was overtaken, and by what is unknown", &error);
                Err(Code::OutcomeUnknown.into())
            }
        }
    }

    /// What somebody is told who is not to run.
    pub(super) fn answered<T: DeserializeOwned, E>(&self, told: Told) -> Result<Outcome<T>, OnceError<E>> {
        let code = match told {
            Told::Replay(stored) => {
                telemetry::joined(Event::Replayed, &self.ask.id, stored.first_request.as_deref());
                let json = stored.snapshot.body().ok_or(OnceError::Omitted)?;
                return serde_json::from_slice(json).map(Outcome::Replayed).map_err(|_| OnceError::Shape);
            }
            Told::Outstanding(ahead) => {
                telemetry::joined(Event::Outstanding, &self.ask.id, ahead.first_request.as_deref());
                return Ok(Outcome::Outstanding(self.policy.retry_after.min(ahead.lease_left)));
            }
            Told::KeyReused { first_request } => {
                telemetry::joined(Event::KeyReused, &self.ask.id, first_request.as_deref());
                Code::KeyReused
            }
            Told::Held => Code::Held,
            Told::AlreadyCompleted => Code::AlreadyCompleted,
            Told::NewerVersion => Code::NewerVersion,
            Told::Draining => Code::ShuttingDown,
            // Settings that lead here are refused when they are made.
            Told::QuotaExceeded => Code::QuotaExceeded,
            Told::TokenUsed | Told::TokenExpired => Code::Misconfigured,
        };
        telemetry::rejected(code.as_str());
        Err(code.into())
    }

    pub(crate) fn report<T, E>(&self, outcome: &Result<Outcome<T>, OnceError<E>>) {
        let outcome = match outcome {
            Ok(Outcome::Ran(_)) => "fresh",
            Ok(Outcome::Replayed(_)) => "replayed",
            Ok(Outcome::Outstanding(_)) => "outstanding",
            Err(OnceError::Failed(_)) => "released",
            Err(error) => error.code().as_str(),
        };
        telemetry::outcome(&self.span, outcome, self.began);
    }
}

/// What is stored of a result. One that is no JSON was made all the same, and must not be made again.
pub(crate) fn json_of<T: Serialize>(value: &T) -> ResponseSnapshot {
    ResponseSnapshot::json(StatusCode::OK, value).unwrap_or_else(|_| {
        telemetry::advise("a result cannot be written as JSON: that the work is done is kept, its result is not");
        ResponseSnapshot::new(StatusCode::OK).without_body()
    })
}
