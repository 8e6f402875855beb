//! Why an event was not published.

use std::{error::Error as StdError, fmt};

use actix_web::{HttpResponse, ResponseError, body::BoxBody, http::StatusCode};
use diesel::result::Error as QueryError;

use super::MAX_PAYLOAD_LENGTH;
use crate::{
    error::{code_of, refuse},
    inbox::InvalidMessageId,
    refusal::{Code, Refusal},
    telemetry,
    version::{Race, Retryable},
};

/// Why an event was not published. Nothing was written, and the transaction can go on, but for
/// [`Query`](Self::Query).
///
/// | | with `?` in a handler |
/// |---|---|
/// | `InvalidName`, `PayloadTooLarge`, `NoTransaction` | 500 `misconfigured`, and a log line |
/// | `KeyBusy` | 409 `serialization` |
/// | `Query` | 409 `serialization`, 503 `store-unavailable`, else 500 `query-failed` |
#[derive(Debug)]
#[non_exhaustive]
pub enum OutboxError {
    /// The topic or the key is none: both obey the rules of a message id.
    InvalidName(InvalidMessageId),
    /// The payload is larger than [`MAX_PAYLOAD_LENGTH`].
    PayloadTooLarge,
    /// Outside a transaction: the event would be there whatever becomes of what it tells of.
    NoTransaction,
    /// Other transactions that have published under this key were not done within
    /// [`TURN_TIMEOUT`](super::TURN_TIMEOUT).
    KeyBusy,
    /// The statement failed. Postgres takes no other until the transaction is rolled back.
    Query(QueryError),
}

impl fmt::Display for OutboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidName(invalid) => {
                write!(f, "the topic or the key of an event obeys the rules of a message id: {invalid}")
            }
            Self::PayloadTooLarge => write!(f, "the payload of an event is larger than {MAX_PAYLOAD_LENGTH} bytes"),
            Self::NoTransaction => f.write_str("an event can only be published inside a transaction"),
            Self::KeyBusy => f.write_str("other transactions publish under this key"),
            Self::Query(_) => f.write_str("the statement failed"),
        }
    }
}

impl StdError for OutboxError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::InvalidName(invalid) => Some(invalid),
            Self::Query(error) => Some(error),
            _ => None,
        }
    }
}

impl From<QueryError> for OutboxError {
    fn from(error: QueryError) -> Self {
        Self::Query(error)
    }
}

impl Retryable for OutboxError {
    fn lost_race(&self) -> Option<Race> {
        match self {
            Self::KeyBusy => Some(Race::Transaction),
            Self::Query(error) => error.lost_race(),
            _ => None,
        }
    }

    fn failed(error: QueryError) -> Self {
        error.into()
    }
}

impl OutboxError {
    fn code(&self) -> Code {
        match self {
            Self::InvalidName(_) | Self::PayloadTooLarge | Self::NoTransaction => Code::Misconfigured,
            Self::KeyBusy => Code::Serialization,
            Self::Query(error) => code_of(error),
        }
    }
}

impl ResponseError for OutboxError {
    fn status_code(&self) -> StatusCode {
        self.code().status()
    }

    fn error_response(&self) -> HttpResponse<BoxBody> {
        match self {
            Self::Query(error) => refuse("an event could not be published", error).error_response(),
            Self::KeyBusy => Refusal::new(self.code()).error_response(),
            _ => {
                telemetry::misconfigured(&self.to_string());
                Refusal::new(self.code()).error_response()
            }
        }
    }
}
