//! What somebody is told who does not get the key.

use std::time::Duration;

use crate::{
    ask::Ask,
    decision::{Decision, decide},
    error::{Error, ErrorKind},
    policy::{OnCompleted, Policy},
    postgres::row::Row,
    snapshot::ResponseSnapshot,
    telemetry::{self, Event},
};

/// Why the handler does not run, and what there is instead.
#[derive(Debug)]
pub(crate) enum Told {
    /// Send the stored answer.
    Replay(Stored),
    /// It is done, and the policy tells no more.
    AlreadyCompleted,
    /// The principal has too many keys.
    QuotaExceeded,
    /// Somebody runs it.
    Outstanding(Ahead),
    /// Nobody runs it, and nobody may yet.
    Held,
    /// The key was used for something else, by the request of this id.
    KeyReused { first_request: Option<String> },
    /// The form was sent already, and its answer is not for this request.
    TokenUsed,
    /// The form token was not used in time.
    TokenExpired,
    /// The row was written by a newer version of this crate.
    NewerVersion,
    /// It would have been claimed, but this process is going down.
    Draining,
}

impl Told {
    /// By a row, unless that says that the key may be claimed.
    pub(crate) fn by(row: Row, ask: &Ask, policy: &Policy) -> Result<Option<Self>, Error> {
        match decide(&row, &ask.fingerprint, &[], policy.on_completed) {
            Decision::TakeOver(_) | Decision::Mine => Ok(None),
            decision => Self::of(decision, row, ask, policy).map(Some),
        }
    }

    /// What was decided by a row.
    pub(crate) fn of(decision: Decision, row: Row, ask: &Ask, policy: &Policy) -> Result<Self, Error> {
        let rejects = policy.on_completed == OnCompleted::Reject;
        let was_sent = ask.is_of_a_form() && row.state == "completed";
        Ok(match decision {
            Decision::Replay | Decision::ReplayUncompared if rejects && was_sent => Self::TokenUsed,
            Decision::KeyReused if was_sent => Self::TokenUsed,
            Decision::Replay | Decision::ReplayUncompared if rejects => Self::AlreadyCompleted,
            Decision::Replay => Self::Replay(Stored::of(row)?),
            Decision::ReplayUncompared => {
                let stored = Stored::of(row)?;
                telemetry::event(Event::RecipeChanged, &ask.id);
                Self::Replay(stored)
            }
            Decision::Held => Self::Held,
            Decision::KeyReused => Self::KeyReused { first_request: row.request_id },
            Decision::NewerVersion => Self::NewerVersion,
            Decision::Outstanding | Decision::Mine | Decision::TakeOver(_) => {
                Self::Outstanding(Ahead { lease_left: lease_left(&row), first_request: row.request_id })
            }
        })
    }
}

/// What is known of the attempt that runs.
#[derive(Debug)]
pub(crate) struct Ahead {
    /// The lease ends in so long.
    pub(crate) lease_left: Duration,
    /// The id of the request that claimed the key first, where it is known.
    pub(crate) first_request: Option<String>,
}

impl Ahead {
    /// Whose row nobody has seen.
    pub(crate) fn unseen(lease_left: Duration) -> Told {
        Told::Outstanding(Self { lease_left, first_request: None })
    }
}

/// A stored answer, and what may be told of its key.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) snapshot: ResponseSnapshot,
    pub(crate) attempt: i32,
    /// `None`: never.
    pub(crate) expires_in: Option<Duration>,
    /// The id of the request that claimed the key first, where it is known.
    pub(crate) first_request: Option<String>,
}

impl Stored {
    pub(crate) fn of(row: Row) -> Result<Self, Error> {
        let (Some(status), Some(names), Some(values)) = (row.status, row.header_names, row.header_values) else {
            return Err(unreadable());
        };
        let snapshot = ResponseSnapshot::restore(status, &names, values, row.body).ok_or_else(unreadable)?;
        let expires_in = row.expires_in_ms.map(|ms| Duration::from_millis(ms.max(0).unsigned_abs()));
        Ok(Self { snapshot, attempt: row.attempt, expires_in, first_request: row.request_id })
    }
}

pub(crate) fn unreadable() -> Error {
    Error::new(ErrorKind::Schema, "a row of idempotency_keys cannot be read: it was not written by this crate")
}

fn lease_left(row: &Row) -> Duration {
    Duration::from_millis(row.lease_left_ms.max(0).unsigned_abs())
}
