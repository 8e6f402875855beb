//! What can be observed: one vocabulary for events and spans.
//!
//! Every request that has a key runs in a span `idempotency` with the fields `resource`, `tenant`,
//! `principal`, `id`, `fingerprint`, `attempt`, `outcome` and `elapsed_ms`. The outcome is `fresh`,
//! `replayed`, `released`, or the [`Code`](crate::Code) of a refusal. Tenant and principal are
//! digests, `id` and `fingerprint` the first six bytes, in hex: a log line finds its row by
//! `where encode(id, 'hex') like '…%'`, and the key itself stays out of the logs.
//!
//! Events have the target `actix_idempotency` and a field `event`:
//!
//! | `event` | level | when |
//! |---|---|---|
//! | `fresh` | debug | a first request claimed its key |
//! | `replayed` | debug | a stored answer was sent |
//! | `outstanding` | debug | the first request still runs: 409 |
//! | `waited` | debug | a request waited for another's answer |
//! | `released` | debug | an attempt failed and gave its key back |
//! | `rejected` | debug | a request was refused; `code` says why |
//! | `key-reused` | info | the key was used with another request |
//! | `expired` | debug | an expired key was claimed anew |
//! | `retried` | debug | a released key was claimed again |
//! | `run-again` | debug | a completed key was claimed again, as `OnCompleted::RunAgain` asks |
//! | `taken-over` | warn | a lapsed lease was taken over: the attempt before it died |
//! | `lease-lost` | warn | an attempt found itself overtaken when it was done |
//! | `not-renewed` | warn | a lease could not be renewed: its row is locked, or somebody else's |
//! | `aborted` | warn | a handler ran longer than it may and was dropped |
//! | `panicked` | error | a handler panicked |
//! | `recipe-changed` | warn | an answer was replayed though its fingerprint can no longer be compared |
//! | `given-up` | warn | the last attempt that a `Completer` makes at a key has failed |
//! | `ended-late` | info | an answer was stored, or a key released, after the store had failed |
//! | `completion-lost` | warn | an answer could not be stored: another attempt may run |
//! | `atomic-without-tx` | warn | a success under `Policy::atomic()` whose handler never took `IdemTx` |
//! | `store-unavailable` | error | the store failed |
//! | `body-failed` | error | the body of an answer failed before it was kept |
//! | `swept` | debug | expired rows were deleted |
//! | `message-parked` | error | a message has failed as often as it may |
//! | `event-failed` | warn | an event of the outbox could not be delivered; it will be tried again |
//! | `event-parked` | error | an event of the outbox was tried often enough |
//! | `event-late` | warn | an event was delivered after its lease had lapsed: twice, most likely |
//! | `advice` | warn | something about the set-up that should be changed |
//! | `misconfigured` | error | the set-up, or a handler, is wrong, and a request was refused for it |
//!
//! Losing a race is not an error.

use std::{fmt::Display, time::Instant};

use tracing::{Span, field};

use crate::{
    error::Error,
    fingerprint::Fingerprint,
    scope::{self, KeyId, Scope},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Fresh,
    Replayed,
    Outstanding,
    Waited,
    Released,
    KeyReused,
    Expired,
    Retried,
    TakenOver,
    LeaseLost,
    NotRenewed,
    Aborted,
    Panicked,
    RecipeChanged,
    EndedLate,
    CompletionLost,
    AtomicWithoutTx,
    RunAgain,
    GivenUp,
}

/// Says what happened to a key.
pub(crate) fn event(event: Event, id: &KeyId) {
    macro_rules! say {
        ($level:ident, $name:literal) => {
            tracing::$level!(target: "actix_idempotency", event = $name, id = id.prefix())
        };
    }
    match event {
        Event::Fresh => say!(debug, "fresh"),
        Event::Replayed => say!(debug, "replayed"),
        Event::Outstanding => say!(debug, "outstanding"),
        Event::Waited => say!(debug, "waited"),
        Event::Released => say!(debug, "released"),
        Event::KeyReused => say!(info, "key-reused"),
        Event::Expired => say!(debug, "expired"),
        Event::Retried => say!(debug, "retried"),
        Event::TakenOver => say!(warn, "taken-over"),
        Event::LeaseLost => say!(warn, "lease-lost"),
        Event::NotRenewed => say!(warn, "not-renewed"),
        Event::Aborted => say!(warn, "aborted"),
        Event::Panicked => say!(error, "panicked"),
        Event::RecipeChanged => say!(warn, "recipe-changed"),
        Event::EndedLate => say!(info, "ended-late"),
        Event::CompletionLost => say!(warn, "completion-lost"),
        Event::GivenUp => say!(warn, "given-up"),
        Event::RunAgain => say!(debug, "run-again"),
        Event::AtomicWithoutTx => say!(warn, "atomic-without-tx"),
    }
}

/// A request was refused.
pub(crate) fn rejected(code: &'static str) {
    tracing::debug!(target: "actix_idempotency", event = "rejected", code);
}

/// The store failed: once here with its cause, nowhere in an answer.
pub(crate) fn store_failed(what: &str, error: &Error) {
    tracing::error!(target: "actix_idempotency", event = "store-unavailable", error = ?error, "{what}");
}

/// The body of an answer failed before all of it was there.
pub(crate) fn body_failed(error: &dyn std::error::Error) {
    tracing::error!(target: "actix_idempotency", event = "body-failed", error = %error);
}

/// Expired rows went.
pub(crate) fn swept(rows: u64) {
    tracing::debug!(target: "actix_idempotency", event = "swept", rows);
}

/// A message has failed as often as it may.
pub(crate) fn message_parked(consumer: &str, attempts: u32) {
    tracing::error!(target: "actix_idempotency", event = "message-parked", consumer, attempts);
}

/// An event was not delivered. The error is the user's, in the user's words.
pub(crate) fn event_failed(id: &dyn Display, topic: &str, attempt: u32, error: &dyn Display) {
    tracing::warn!(target: "actix_idempotency", event = "event-failed", event_id = %id, topic, attempt, error = %error);
}

/// An event will not be tried again.
pub(crate) fn event_parked(id: &dyn Display, topic: &str, attempts: u32) {
    tracing::error!(target: "actix_idempotency", event = "event-parked", event_id = %id, topic, attempts);
}

/// Events that somebody else has by now.
pub(crate) fn events_late(events: usize) {
    tracing::warn!(target: "actix_idempotency", event = "event-late", events);
}

/// Something about the set-up that the people who run the service should change.
pub(crate) fn advise(advice: &str) {
    tracing::warn!(target: "actix_idempotency", event = "advice", "{advice}");
}

/// The set-up is wrong and requests are refused for it.
pub(crate) fn misconfigured(advice: &str) {
    tracing::error!(target: "actix_idempotency", event = "misconfigured", "{advice}");
}

/// The span of a protected request.
pub(crate) fn span(scope: &Scope, id: &KeyId, fingerprint: &Fingerprint) -> Span {
    tracing::info_span!(
        target: "actix_idempotency",
        "idempotency",
        resource = scope.resource(),
        tenant = scope.tenant().map(scope::redacted),
        principal = scope.principal().map(scope::redacted),
        id = id.prefix(),
        fingerprint = fingerprint.prefix(),
        attempt = field::Empty,
        outcome = field::Empty,
        elapsed_ms = field::Empty,
    )
}

/// How a protected request ended, for its span.
pub(crate) fn outcome(span: &Span, outcome: &str, began: Instant) {
    span.record("outcome", outcome);
    span.record("elapsed_ms", u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
}
