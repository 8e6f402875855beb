//! Why a row was not moved.

use std::fmt;

use actix_web::{HttpResponse, ResponseError, body::BoxBody, http::StatusCode};
use diesel::result::Error as QueryError;

use super::{State, UnknownState};
use crate::{
    error::{code_of, refuse},
    refusal::{Code, Refusal},
    telemetry,
    version::{Race, Retryable},
};

/// Why a row was not moved. Nothing was written, and a transaction around it can go on, but for
/// [`Query`](Self::Query).
///
/// | | with `?` in a handler |
/// |---|---|
/// | `Elsewhere` | 409 `elsewhere`; its `detail` says where |
/// | `Gone` | 404 `not-found` |
/// | `NotAllowed` | 409 `move-not-allowed` |
/// | `Overflow` | 409 `version-overflow` |
/// | `UnknownState` | 500 `state-unknown`, and a log line |
/// | `SetsItself` | 500 `misconfigured`, and a log line |
/// | `Query` | 409 `serialization` or `constraint-violated`, 503 `store-unavailable`, else 500 `query-failed` |
#[derive(Debug)]
#[non_exhaustive]
pub enum TransitionError<S> {
    /// The row is neither where the move starts nor where it ends.
    Elsewhere {
        /// Where it is.
        current: S,
    },
    /// There is no such row.
    Gone,
    /// The machine has no such move: nothing was sent.
    NotAllowed {
        /// From here.
        from: S,
        /// To there.
        to: S,
    },
    /// The version that is raised along is the largest its column can hold.
    Overflow,
    /// The column holds a text that is no state.
    UnknownState(UnknownState),
    /// The other changes assign to the state, or to the version that is raised.
    SetsItself {
        /// The column.
        field: &'static str,
    },
    /// A statement failed. In a transaction of the caller's, Postgres takes no other until that is
    /// rolled back, unless something was to follow the move: then it was undone by itself.
    Query(QueryError),
}

impl<S: State> fmt::Display for TransitionError<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elsewhere { current } => write!(f, "the row is in the state {}", current.label()),
            Self::Gone => f.write_str("there is no such row"),
            Self::NotAllowed { from, to } => write!(f, "there is no move from {} to {}", from.label(), to.label()),
            Self::Overflow => f.write_str("the row has the largest version its column can hold"),
            Self::UnknownState(unknown) => unknown.fmt(f),
            Self::SetsItself { field } => write!(f, "the other changes set `{field}`, which the move sets itself"),
            Self::Query(_) => f.write_str("the statement failed"),
        }
    }
}

impl<S: State> std::error::Error for TransitionError<S> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::UnknownState(unknown) => Some(unknown),
            Self::Query(error) => Some(error),
            _ => None,
        }
    }
}

impl<S> From<QueryError> for TransitionError<S> {
    fn from(error: QueryError) -> Self {
        Self::Query(error)
    }
}

/// In [`Retry`](crate::version::Retry), only what a new transaction helps against: the row does not come
/// back from elsewhere.
impl<S> Retryable for TransitionError<S> {
    fn lost_race(&self) -> Option<Race> {
        match self {
            Self::Query(error) => error.lost_race(),
            _ => None,
        }
    }

    fn failed(error: QueryError) -> Self {
        Self::Query(error)
    }
}

impl<S> TransitionError<S> {
    fn code(&self) -> Code {
        match self {
            Self::Elsewhere { .. } => Code::Elsewhere,
            Self::Gone => Code::NotFound,
            Self::NotAllowed { .. } => Code::MoveNotAllowed,
            Self::Overflow => Code::VersionOverflow,
            Self::UnknownState(_) => Code::StateUnknown,
            Self::SetsItself { .. } => Code::Misconfigured,
            Self::Query(error) => code_of(error),
        }
    }
}

impl<S: State> ResponseError for TransitionError<S> {
    fn status_code(&self) -> StatusCode {
        self.code().status()
    }

    fn error_response(&self) -> HttpResponse<BoxBody> {
        let refusal = Refusal::new(self.code());
        match self {
            Self::Elsewhere { .. } | Self::NotAllowed { .. } => {
                refusal.detailed(format!("Nothing was done: {self}.")).error_response()
            }
            Self::UnknownState(_) | Self::SetsItself { .. } => {
                telemetry::misconfigured(&self.to_string());
                refusal.error_response()
            }
            Self::Query(error) => refuse("a transition failed", error).error_response(),
            _ => refusal.error_response(),
        }
    }
}
