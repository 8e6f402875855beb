//! What is measured, through the facade `metrics`. Names without labels, or with labels that stand here, are keys
//! that are made when this is compiled.

use std::time::{Duration, Instant};

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

use super::Event;

/// With each engine: the recorder may have come after the one before.
pub(crate) fn describe() {
    // From the first engine on.
    super::tally();
    describe_counter!("idempotency_events_total", Unit::Count, "What has happened to keys, by the name of the event");
    describe_counter!("idempotency_refusals_total", Unit::Count, "Requests that were refused, by their code");
    describe_counter!("idempotency_swept_rows_total", Unit::Count, "Expired rows that were deleted");
    describe_histogram!("idempotency_claim_seconds", Unit::Seconds, "One look at a key: claimed, or why not");
    describe_histogram!("idempotency_handler_seconds", Unit::Seconds, "Handlers that were run");
    describe_histogram!("idempotency_completion_seconds", Unit::Seconds, "Answers on their way into the table");
    describe_histogram!("idempotency_wait_seconds", Unit::Seconds, "Waits for the answer of another request");
    describe_gauge!("idempotency_outstanding", Unit::Count, "Keys that this process holds");
    describe_gauge!(
        "idempotency_oldest_outstanding_seconds",
        Unit::Seconds,
        "The age of the oldest outstanding key in the table"
    );
    describe_gauge!(
        "idempotency_oldest_expired_seconds",
        Unit::Seconds,
        "For how long the oldest row has been expired that is still there"
    );
    describe_gauge!("idempotency_unfinished", Unit::Count, "Half-done keys that have expired and are kept");
    describe_gauge!("idempotency_pool_connections", Unit::Count, "Connections of the pool");
    // An alarm on the first of its kind needs a zero before it.
    Event::ALL.iter().for_each(|event| event.counter().increment(0));
    metrics::counter!("idempotency_swept_rows_total").increment(0);
}

pub(crate) fn claimed(began: Instant) {
    histogram!("idempotency_claim_seconds").record(began.elapsed());
}

pub(crate) fn handled(began: Instant) {
    histogram!("idempotency_handler_seconds").record(began.elapsed());
}

pub(crate) fn completed(began: Instant) {
    histogram!("idempotency_completion_seconds").record(began.elapsed());
}

pub(crate) fn waited(time: Duration) {
    histogram!("idempotency_wait_seconds").record(time);
}

pub(crate) fn outstanding(keys: usize) {
    gauge!("idempotency_outstanding").set(keys as f64);
}

pub(crate) fn connections(in_use: u32, idle: u32) {
    gauge!("idempotency_pool_connections", "state" => "in-use").set(in_use);
    gauge!("idempotency_pool_connections", "state" => "idle").set(idle);
}

pub(crate) fn unfinished(keys: u32) {
    gauge!("idempotency_unfinished").set(keys);
}

/// Ages in the table. `outstanding` is `None` where it cannot be told cheaply.
pub(crate) fn oldest(outstanding: Option<Duration>, expired: Duration) {
    if let Some(age) = outstanding {
        gauge!("idempotency_oldest_outstanding_seconds").set(age);
    }
    gauge!("idempotency_oldest_expired_seconds").set(expired);
}
