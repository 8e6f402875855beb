//! What can be observed: one vocabulary for events, spans and metrics.
//!
//! Every request that has a key runs in a span `idempotency` with the fields `resource`, `tenant`,
//! `principal`, `id`, `fingerprint`, `request_id`, `attempt`, `outcome` and `elapsed_ms`. The outcome is `fresh`,
//! `replayed`, `released`, or the [`Code`](crate::Code) of a refusal. Tenant and principal are
//! digests, `id` and `fingerprint` the first six bytes, in hex: a log line finds its row by
//! `where encode(id, 'hex') like '…%'`, and the key itself stays out of the logs.
//!
//! `request_id` is that of the request itself, where it has one
//! ([`Policy::request_id`](crate::Policy::request_id)). `replayed`, `outstanding`, `key-reused`, `taken-over` and `retried`
//! have a field `first_request`: the id of the request that claimed the key first, by which its own log lines are found.
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
//! | `retried` | debug | a released key was claimed again, by a retry or a `Completer` |
//! | `run-again` | debug | a completed key was claimed again, as `OnCompleted::RunAgain` asks |
//! | `taken-over` | warn | a lapsed lease was taken over: the attempt before it died |
//! | `lease-lost` | warn | an attempt found itself overtaken when it was done |
//! | `not-renewed` | warn | a lease could not be renewed: its row is locked, or somebody else's |
//! | `aborted` | warn | a handler ran longer than it may and was dropped |
//! | `panicked` | error | a handler panicked |
//! | `recipe-changed` | warn | an answer was replayed though its fingerprint can no longer be compared |
//! | `given-up` | warn | the last attempt that a `Completer` makes at a key has failed |
//! | `ended-late` | info | an answer was stored, or a key released, after the store had failed |
//! | `completion-retried` | warn | so many `answers` that clients have had wait to be stored: the store has failed |
//! | `completion-lost` | warn | an answer could not be stored: another attempt may run |
//! | `atomic-without-tx` | warn | a success under `Policy::atomic()` whose handler never took `IdemTx` |
//! | `store-unavailable` | error | the store failed |
//! | `body-failed` | error | the body of an answer failed before it was kept |
//! | `swept` | debug | expired rows were deleted |
//! | `abandoned` | warn | a half-done key was deleted: it had expired, been kept for longer, and nobody has brought it to an end (`resource`, `state`, `status`, `attempt`); or another operation has begun under it |
//! | `sweeping-late` | warn | a row has been expired for `oldest_s` seconds and is still there: nobody sweeps it |
//! | `released-by-hand` | info | somebody released a lapsed key, by [`Admin`](crate::Admin) |
//! | `force-released` | warn | somebody took a key from the attempt that runs it |
//! | `expired-by-hand` | info | somebody ended the retention of a completed key |
//! | `erased` | info | somebody deleted the keys of a principal (a digest here): `gone` so many, `left` so many |
//! | `message-parked` | error | a message has failed as often as it may |
//! | `event-failed` | warn | an event of the outbox could not be delivered; it will be tried again |
//! | `event-parked` | error | an event of the outbox was tried often enough |
//! | `event-late` | warn | an event was delivered after its lease had lapsed: twice, most likely |
//! | `advice` | warn | something about the set-up that should be changed |
//! | `misconfigured` | error | the set-up, or a handler, is wrong, and a request was refused for it |
//! | `listener-panicked` | error | a function given to [`on_event`] panicked |
//!
//! Losing a race is not an error.
//!
//! Two of them a process says of itself, and not each time that it finds them so. `completion-retried`, of one of the
//! answers, is said at most once a minute. `sweeping-late` is said at most once an hour, when the oldest row has been
//! expired for an hour, or for two days where [`without_sweeper`](crate::Idempotency::without_sweeper) leaves it to a job
//! that may run once a night; an engine that has claimed a key looks every five minutes, or as often as its shortest
//! retention.
//!
//! # Metrics
//!
//! Every event is counted, and what takes time is measured, through the facade crate
//! [`metrics`](https://docs.rs/metrics) 0.24: install a recorder of yours, such as that of
//! `metrics-exporter-prometheus`, before the first engine is made, which is when the names are described and
//! all counters of events begin at zero. Without a recorder all of this is a look at one atomic; the
//! [`Inspector`](crate::Inspector) shows the events of the last quarter of an hour by a count of its own.
//!
//! | metric | kind | unit | labels | what |
//! |---|---|---|---|---|
//! | `idempotency_events_total` | counter | | `event` | events, by the names above |
//! | `idempotency_refusals_total` | counter | | `code` | requests that were refused (`rejected`), by the [`Code`](crate::Code) |
//! | `idempotency_swept_rows_total` | counter | | | expired rows that were deleted |
//! | `idempotency_claim_seconds` | histogram | s | | one look at a key: the claim, or why there is none |
//! | `idempotency_handler_seconds` | histogram | s | | a handler, or the work of a [`Once`](crate::Once), that was run |
//! | `idempotency_completion_seconds` | histogram | s | | an answer that is to be kept: until it is, or turns out not to be |
//! | `idempotency_wait_seconds` | histogram | s | | a wait for another's answer, whatever came of it |
//! | `idempotency_outstanding` | gauge | | | keys that are held by this process now |
//! | `idempotency_oldest_outstanding_seconds` | gauge | s | | the age of the oldest outstanding key in the table |
//! | `idempotency_oldest_expired_seconds` | gauge | s | | for how long the oldest row has been expired that is still there |
//! | `idempotency_unfinished` | gauge | | | half-done keys that have expired and are kept to be looked at, among the thousand rows that expired first |
//! | `idempotency_pool_connections` | gauge | | `state` | connections of the pool: `in-use`, `idle` |
//!
//! No label has values that a client could make up: the resource of a request is none, because it is the path
//! where no route pattern is known. The gauges are those of [`Gauges`](crate::Gauges), and are missing where nobody
//! asks for them.
//!
//! What runs in the caller's transaction ([`Once::run_in`](crate::Once::run_in)), answers that a handler stores by
//! itself ([`IdemKey::complete_in`](crate::IdemKey::complete_in)) and the messages of an inbox are not timed.

mod listener;
mod meter;
mod tally;

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use tracing::{Level, Span, field};

use crate::{
    error::Error,
    fingerprint::Fingerprint,
    request_id::RequestId,
    scope::{self, KeyId, Scope},
};

pub use self::listener::{Notice, on_event};
pub(crate) use self::{
    meter::{claimed, completed, connections, describe, handled, oldest, outstanding, unfinished, waited},
    tally::{Counted, INTERVAL, INTERVALS, tally},
};

/// The names, once: of the events, of what is counted, and of what listeners are told.
macro_rules! events {
    ($($event:ident = $level:ident $name:literal,)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Event {
            $($event,)*
        }

        impl Event {
            const ALL: &[Self] = &[$(Self::$event,)*];

            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Self::$event => $name,)*
                }
            }

            fn level(self) -> Level {
                match self {
                    $(Self::$event => Level::$level,)*
                }
            }

            /// By a key that is made when this is compiled: counting allocates nothing.
            fn counter(self) -> metrics::Counter {
                match self {
                    $(Self::$event => metrics::counter!("idempotency_events_total", "event" => $name),)*
                }
            }
        }
    };
}

events! {
    Fresh = DEBUG "fresh",
    Replayed = DEBUG "replayed",
    Outstanding = DEBUG "outstanding",
    Waited = DEBUG "waited",
    Released = DEBUG "released",
    Rejected = DEBUG "rejected",
    KeyReused = INFO "key-reused",
    Expired = DEBUG "expired",
    Retried = DEBUG "retried",
    RunAgain = DEBUG "run-again",
    TakenOver = WARN "taken-over",
    LeaseLost = WARN "lease-lost",
    NotRenewed = WARN "not-renewed",
    Aborted = WARN "aborted",
    Panicked = ERROR "panicked",
    RecipeChanged = WARN "recipe-changed",
    GivenUp = WARN "given-up",
    EndedLate = INFO "ended-late",
    CompletionRetried = WARN "completion-retried",
    CompletionLost = WARN "completion-lost",
    AtomicWithoutTx = WARN "atomic-without-tx",
    StoreUnavailable = ERROR "store-unavailable",
    BodyFailed = ERROR "body-failed",
    Swept = DEBUG "swept",
    Abandoned = WARN "abandoned",
    SweepingLate = WARN "sweeping-late",
    ReleasedByHand = INFO "released-by-hand",
    ForceReleased = WARN "force-released",
    ExpiredByHand = INFO "expired-by-hand",
    Erased = INFO "erased",
    MessageParked = ERROR "message-parked",
    DeliveryFailed = WARN "event-failed",
    DeliveryParked = ERROR "event-parked",
    DeliveryLate = WARN "event-late",
    Advice = WARN "advice",
    Misconfigured = ERROR "misconfigured",
    ListenerPanicked = ERROR "listener-panicked",
}

/// As `tracing` says it: the macro for the level, the name, then the fields.
macro_rules! say {
    ($level:ident, $event:expr $(, $($field:tt)+)?) => {
        tracing::$level!(target: "actix_idempotency", event = $event.name() $(, $($field)+)?)
    };
}

use say;

/// Counts an event, for the recorder and for the inspector, and tells the listeners.
fn count(event: Event, id: Option<&KeyId>, code: Option<&'static str>) {
    event.counter().increment(1);
    tally().count(event);
    listener::tell(event, id, code);
}

/// Says what happened to a key.
pub(crate) fn event(event: Event, id: &KeyId) {
    joined(event, id, None);
}

/// The same, and which request claimed the key first: where it is known, one log line leads to the other's.
pub(crate) fn joined(event: Event, id: &KeyId, first_request: Option<&str>) {
    match event.level() {
        Level::ERROR => say!(error, event, id = id.prefix(), first_request),
        Level::WARN => say!(warn, event, id = id.prefix(), first_request),
        Level::INFO => say!(info, event, id = id.prefix(), first_request),
        _ => say!(debug, event, id = id.prefix(), first_request),
    }
    count(event, Some(id), None);
}

/// A request was refused.
pub(crate) fn rejected(code: &'static str) {
    say!(debug, Event::Rejected, code);
    metrics::counter!("idempotency_refusals_total", "code" => code).increment(1);
    count(Event::Rejected, None, Some(code));
}

/// The store failed: once here with its cause, nowhere in an answer.
pub(crate) fn store_failed(what: &str, error: &Error) {
    say!(error, Event::StoreUnavailable, error = ?error, "{what}");
    count(Event::StoreUnavailable, None, None);
}

/// The body of an answer failed before all of it was there.
pub(crate) fn body_failed(error: &dyn std::error::Error) {
    say!(error, Event::BodyFailed, error = %error);
    count(Event::BodyFailed, None, None);
}

/// Expired rows went.
pub(crate) fn swept(rows: u64) {
    say!(debug, Event::Swept, rows);
    metrics::counter!("idempotency_swept_rows_total").increment(rows);
    tally().swept(rows);
    count(Event::Swept, None, None);
}

/// A half-done key, as it was last.
#[derive(Clone, Copy)]
pub(crate) struct Abandoned<'a> {
    pub(crate) id: KeyId,
    pub(crate) resource: &'a str,
    pub(crate) state: &'a str,
    pub(crate) status: Option<i16>,
    pub(crate) attempt: i32,
    pub(crate) first_request: Option<&'a str>,
}

/// It went.
pub(crate) fn abandoned(gone: Abandoned<'_>) {
    let Abandoned { id, resource, state, status, attempt, first_request } = gone;
    say!(warn, Event::Abandoned, id = id.prefix(), resource, state, status, attempt, first_request);
    count(Event::Abandoned, Some(&id), None);
}

/// A row is still there that has been expired for so long.
pub(crate) fn sweeping_late(oldest: Duration) {
    say!(warn, Event::SweepingLate, oldest_s = oldest.as_secs());
    count(Event::SweepingLate, None, None);
}

/// So many answers wait to be stored; that of this key was sent again.
pub(crate) fn completion_retried(id: &KeyId, answers: usize) {
    say!(warn, Event::CompletionRetried, id = id.prefix(), answers);
    count(Event::CompletionRetried, Some(id), None);
}

/// The keys of a principal were deleted.
pub(crate) fn erased(principal: &str, gone: u64, left: u64) {
    let principal = scope::redacted(principal);
    say!(info, Event::Erased, principal, gone, left);
    count(Event::Erased, None, None);
}

/// A message has failed as often as it may.
pub(crate) fn message_parked(consumer: &str, attempts: u32) {
    say!(error, Event::MessageParked, consumer, attempts);
    count(Event::MessageParked, None, None);
}

/// An event was not delivered. The error is the user's, in the user's words.
pub(crate) fn event_failed(id: &dyn Display, topic: &str, attempt: u32, error: &dyn Display) {
    say!(warn, Event::DeliveryFailed, event_id = %id, topic, attempt, error = %error);
    count(Event::DeliveryFailed, None, None);
}

/// An event will not be tried again.
pub(crate) fn event_parked(id: &dyn Display, topic: &str, attempts: u32) {
    say!(error, Event::DeliveryParked, event_id = %id, topic, attempts);
    count(Event::DeliveryParked, None, None);
}

/// Events that somebody else has by now.
pub(crate) fn events_late(events: usize) {
    say!(warn, Event::DeliveryLate, events);
    (0..events).for_each(|_| count(Event::DeliveryLate, None, None));
}

/// Something about the set-up that the people who run the service should change.
pub(crate) fn advise(advice: &str) {
    say!(warn, Event::Advice, "{advice}");
    count(Event::Advice, None, None);
}

/// The set-up is wrong and requests are refused for it.
pub(crate) fn misconfigured(advice: &str) {
    say!(error, Event::Misconfigured, "{advice}");
    count(Event::Misconfigured, None, None);
}

/// The span of a protected request.
pub(crate) fn span(scope: &Scope, id: &KeyId, fingerprint: &Fingerprint, request_id: Option<&RequestId>) -> Span {
    tracing::info_span!(
        target: "actix_idempotency",
        "idempotency",
        resource = scope.resource(),
        tenant = scope.tenant().map(scope::redacted),
        principal = scope.principal().map(scope::redacted),
        id = id.prefix(),
        fingerprint = fingerprint.prefix(),
        request_id = request_id.map(RequestId::as_str),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_events_has_each_of_them_once_with_its_level() {
        let docs = include_str!("mod.rs").split("//! # Metrics").next().unwrap();
        let rows = docs.lines().filter(|line| line.starts_with("//! | `") && !line.contains("`event`"));
        let mut told: Vec<_> = rows.map(|row| row.split('|').skip(1).take(2).collect::<Vec<_>>().join("|")).collect();
        let name = |event: &Event| format!(" `{}` | {} ", event.name(), event.level().as_str().to_lowercase());
        let mut all: Vec<_> = Event::ALL.iter().map(name).collect();
        told.sort();
        all.sort();
        assert_eq!(told, all);
    }
}
