//! A request that has a key, and what it is told: a stored answer, or why there is none.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use actix_web::{HttpRequest, HttpResponse, ResponseError, body::BoxBody, http::header::HeaderMap};
use tracing::Span;

use crate::{
    ask::Ask,
    claim, coding,
    engine::Engine,
    error::Error,
    header::{IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_KEY_EXPIRES_IN},
    policy::Policy,
    refusal::{Code, Refusal},
    telemetry::{self, Event},
    told::{Ahead, Stored, Told},
};

/// One request with a key, as those who answer it see it.
pub(crate) struct Case {
    pub(crate) engine: Arc<Engine>,
    pub(crate) policy: Arc<Policy>,
    pub(crate) ask: Ask,
    pub(crate) span: Span,
    began: Instant,
}

impl Case {
    pub(crate) fn new(engine: Arc<Engine>, policy: Arc<Policy>, ask: Ask) -> Self {
        let span = telemetry::span(&ask.scope, &ask.id, &ask.fingerprint, ask.request_id.as_ref());
        Self { engine, policy, ask, span, began: Instant::now() }
    }

    /// Somebody else has the key: what they stored is the answer.
    pub(crate) async fn overtaken(&self) -> HttpResponse<BoxBody> {
        telemetry::event(Event::LeaseLost, &self.ask.id);
        match claim::look_again(&self.engine, &self.ask, &self.policy).await {
            Ok(Some(told)) => self.answer(told),
            Ok(None) => self.refusal(Code::LeaseLost.into()),
            Err(error) => {
                telemetry::store_failed("an attempt was overtaken, and by what is unknown", &error);
                self.refusal(Code::OutcomeUnknown.into())
            }
        }
    }

    /// What this request is told; a stored answer only if it may still see it.
    pub(crate) fn told(&self, request: &HttpRequest, told: Told) -> HttpResponse<BoxBody> {
        match (told, &self.policy.may_replay) {
            (Told::Replay(_), Some(may)) if !(may.closure)(request) => self.refusal(Code::ReplayForbidden.into()),
            (Told::Replay(mut stored), _) => match coding::fit(stored.snapshot, request, &self.policy) {
                Ok(snapshot) => {
                    stored.snapshot = snapshot;
                    self.replayed(stored)
                }
                Err(code) => self.refusal(code.into()),
            },
            (told, _) => self.answer(told),
        }
    }

    fn answer(&self, told: Told) -> HttpResponse<BoxBody> {
        let code = match told {
            Told::Replay(stored) => return self.replayed(stored),
            Told::Outstanding(ahead) => return self.outstanding(ahead),
            Told::KeyReused { first_request } => return self.key_reused(first_request),
            Told::QuotaExceeded => {
                return self.refusal(Refusal::new(Code::QuotaExceeded).retry_after(self.policy.retry_after));
            }
            Told::Held => Code::Held,
            Told::AlreadyCompleted => Code::AlreadyCompleted,
            Told::TokenUsed => Code::TokenUsed,
            Told::TokenExpired => Code::TokenExpired,
            Told::NewerVersion => Code::NewerVersion,
            Told::Draining => Code::ShuttingDown,
        };
        self.refusal(code.into())
    }

    fn replayed(&self, stored: Stored) -> HttpResponse<BoxBody> {
        telemetry::joined(Event::Replayed, &self.ask.id, stored.first_request.as_deref());
        self.report("replayed");
        let mut response = stored.snapshot.replay(&self.policy);
        self.tell(response.headers_mut(), stored.attempt, stored.expires_in);
        response
    }

    /// What the policy tells about the key beside the answer.
    pub(crate) fn tell(&self, headers: &mut HeaderMap, attempt: i32, expires_in: Option<Duration>) {
        if self.policy.tells_attempt {
            headers.insert(IDEMPOTENCY_ATTEMPT, attempt.into());
        }
        if let (true, Some(left)) = (self.policy.tells_expiry, expires_in) {
            headers.insert(IDEMPOTENCY_KEY_EXPIRES_IN, left.as_secs().into());
        }
    }

    fn key_reused(&self, first_request: Option<String>) -> HttpResponse<BoxBody> {
        telemetry::joined(Event::KeyReused, &self.ask.id, first_request.as_deref());
        let refusal = Refusal::new(Code::KeyReused);
        self.refusal(if self.ask.is_of_a_form() {
            refusal.detailed(
                "The form was sent with other contents, and what became of that is not known yet. Load it again.",
            )
        } else {
            refusal
        })
    }

    pub(crate) fn unavailable(&self, error: &Error) -> HttpResponse<BoxBody> {
        telemetry::store_failed("a request could not be claimed", error);
        self.refusal(Code::StoreUnavailable.into())
    }

    fn outstanding(&self, ahead: Ahead) -> HttpResponse<BoxBody> {
        telemetry::joined(Event::Outstanding, &self.ask.id, ahead.first_request.as_deref());
        let wait = self.policy.retry_after.min(ahead.lease_left);
        self.refusal(Refusal::new(Code::Outstanding).retry_after(wait))
    }

    pub(crate) fn refusal(&self, refusal: Refusal) -> HttpResponse<BoxBody> {
        self.report(refusal.code().as_str());
        telemetry::rejected(refusal.code().as_str());
        refusal.under(&self.policy).error_response()
    }

    pub(crate) fn report(&self, outcome: &str) {
        telemetry::outcome(&self.span, outcome, self.began);
    }
}
