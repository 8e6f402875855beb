//! Why a message was not taken, or not handled.

use std::{error::Error as StdError, fmt};

use actix_web::{HttpResponse, ResponseError, body::BoxBody, http::StatusCode};
use diesel::result::Error as QueryError;

use super::InvalidMessageId;
use crate::{
    error::{code_of, refuse, words::is_lost_race},
    refusal::{Code, Refusal},
    telemetry,
    version::{Race, Retryable},
};

/// Why a message was not taken. Nothing was written, and a transaction around it can go on, but for
/// [`Query`](Self::Query) where the connection is lost.
///
/// | | the consumer should | with `?` in a handler |
/// |---|---|---|
/// | `InvalidId` | decide: handle it without protection, or park it | 400 `message-id-invalid` |
/// | `Mismatch` | park it: somebody uses one id for two messages | 422 `message-id-reused` |
/// | `InProgress` | give it back, for later | 409 `outstanding` |
/// | `Serialization` | give it back, for at once | 409 `serialization` |
/// | `NoTransaction` | be corrected | 500 `misconfigured`, and a log line |
/// | `TransactionMisused` | be corrected | 500 `transaction-misused`, and a log line |
/// | `Query` | give it back | 409 `constraint-violated`, 503 `store-unavailable`, else 500 `query-failed` |
#[derive(Debug)]
#[non_exhaustive]
pub enum InboxError {
    /// The id is none.
    InvalidId(InvalidMessageId),
    /// The id is known, with another content.
    Mismatch,
    /// Another copy of the message is being handled, and was not done within
    /// [`Inbox::wait`](super::Inbox::wait).
    InProgress,
    /// Another transaction was first. Above READ COMMITTED, a caller's transaction cannot see what it did: a
    /// new one can.
    Serialization,
    /// `receive` outside a transaction: the mark would be there before what it stands for.
    NoTransaction,
    /// The closure has ended the transaction by itself, or left a savepoint open.
    TransactionMisused,
    /// A statement failed.
    Query(QueryError),
}

impl fmt::Display for InboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidId(invalid) => invalid.fmt(f),
            Self::Mismatch => f.write_str("the message id is known, with another content"),
            Self::InProgress => f.write_str("another copy of the message is being handled"),
            Self::Serialization => f.write_str("another transaction was first"),
            Self::NoTransaction => f.write_str("a message can only be received inside a transaction"),
            Self::TransactionMisused => {
                f.write_str("the closure has ended its transaction by itself, or left a savepoint open")
            }
            Self::Query(_) => f.write_str("the statement failed"),
        }
    }
}

impl StdError for InboxError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::InvalidId(invalid) => Some(invalid),
            Self::Query(error) => Some(error),
            _ => None,
        }
    }
}

impl From<InvalidMessageId> for InboxError {
    fn from(invalid: InvalidMessageId) -> Self {
        Self::InvalidId(invalid)
    }
}

impl From<QueryError> for InboxError {
    fn from(error: QueryError) -> Self {
        if is_lost_race(&error) { Self::Serialization } else { Self::Query(error) }
    }
}

impl Retryable for InboxError {
    fn lost_race(&self) -> Option<Race> {
        match self {
            Self::Serialization => Some(Race::Transaction),
            Self::Query(error) => error.lost_race(),
            _ => None,
        }
    }

    fn failed(error: QueryError) -> Self {
        error.into()
    }
}

impl InboxError {
    /// Whether it is the message, or what was done with it, that failed: not a race, and not the store.
    pub(super) fn is_the_messages(&self) -> bool {
        match self {
            Self::TransactionMisused => true,
            Self::Query(error) => !matches!(code_of(error), Code::StoreUnavailable | Code::Serialization),
            _ => false,
        }
    }

    fn code(&self) -> Code {
        match self {
            Self::InvalidId(_) => Code::MessageIdInvalid,
            Self::Mismatch => Code::MessageIdReused,
            Self::InProgress => Code::Outstanding,
            Self::Serialization => Code::Serialization,
            Self::NoTransaction => Code::Misconfigured,
            Self::TransactionMisused => Code::TransactionMisused,
            Self::Query(error) => code_of(error),
        }
    }
}

impl ResponseError for InboxError {
    fn status_code(&self) -> StatusCode {
        self.code().status()
    }

    fn error_response(&self) -> HttpResponse<BoxBody> {
        match self {
            Self::Query(error) => refuse("a message could not be taken", error).error_response(),
            Self::NoTransaction | Self::TransactionMisused => {
                telemetry::misconfigured(&self.to_string());
                Refusal::new(self.code()).error_response()
            }
            _ => Refusal::new(self.code()).error_response(),
        }
    }
}

/// Why a message was not handled. Nothing of it was committed, unless the connection was lost at COMMIT: then
/// the next delivery tells.
///
/// | | the consumer should |
/// |---|---|
/// | `Inbox` | see [`InboxError`] |
/// | `Failed` | give it back |
/// | `Park` | put it aside, for people to look at, and acknowledge it |
#[derive(Debug)]
#[non_exhaustive]
pub enum HandleError<E> {
    /// It was not taken, or lost a race. This is no attempt of the message's, and not counted.
    Inbox(InboxError),
    /// The closure failed, or what it did could not be committed.
    Failed {
        /// The closure's error, or ours in its form.
        error: E,
        /// The failed attempts so far, this one included. `None` where it could not be counted.
        attempts: Option<u32>,
    },
    /// It has failed as often as it may.
    Park {
        /// Of this attempt. `None` where none was made: it had been told to be parked before.
        error: Option<E>,
        /// The failed attempts.
        attempts: u32,
    },
}

impl<E> HandleError<E> {
    /// Whether to give the message back is useless: it has failed as often as it may, its id is none, or its id is
    /// that of another message.
    #[must_use]
    pub fn is_to_be_parked(&self) -> bool {
        matches!(self, Self::Park { .. } | Self::Inbox(InboxError::InvalidId(_) | InboxError::Mismatch))
    }
}

impl<E: fmt::Display> fmt::Display for HandleError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inbox(error) => error.fmt(f),
            Self::Failed { error, .. } => write!(f, "the message could not be handled: {error}"),
            Self::Park { error: Some(error), attempts } => {
                write!(f, "the message failed {attempts} times, and is to be parked: {error}")
            }
            Self::Park { error: None, attempts } => {
                write!(f, "the message failed {attempts} times before, and is to be parked")
            }
        }
    }
}

impl<E: StdError + 'static> StdError for HandleError<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Inbox(error) => Some(error),
            Self::Failed { error, .. } | Self::Park { error: Some(error), .. } => Some(error),
            Self::Park { error: None, .. } => None,
        }
    }
}

impl<E> From<InboxError> for HandleError<E> {
    fn from(error: InboxError) -> Self {
        Self::Inbox(error)
    }
}
