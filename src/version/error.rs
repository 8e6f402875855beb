//! Why a row was not changed.

use std::fmt;

use actix_web::{HttpResponse, ResponseError, body::BoxBody, http::StatusCode};
use diesel::result::Error as QueryError;

use super::{IfMatch, InvalidIfMatch, etag};
use crate::{
    error::{code_of, refuse},
    refusal::{Code, Refusal},
    telemetry,
};

/// The version that a change expects: a number, or what a client sent as `If-Match`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// Read before, by the caller.
    Version(i64),
    /// From the request.
    IfMatch(IfMatch),
}

impl From<i32> for Expected {
    fn from(version: i32) -> Self {
        Self::Version(version.into())
    }
}

impl From<i64> for Expected {
    fn from(version: i64) -> Self {
        Self::Version(version)
    }
}

impl From<IfMatch> for Expected {
    fn from(if_match: IfMatch) -> Self {
        Self::IfMatch(if_match)
    }
}

impl From<&IfMatch> for Expected {
    fn from(if_match: &IfMatch) -> Self {
        Self::IfMatch(if_match.clone())
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => version.fmt(f),
            Self::IfMatch(if_match) => if_match.fmt(f),
        }
    }
}

/// Why a row was not changed. Nothing was written, and a transaction around it can go on, but for
/// [`Query`](Self::Query).
///
/// | | with `?` in a handler |
/// |---|---|
/// | `Stale` | 412 `if-match-failed` with the current `ETag` where [`IfMatch`] was expected, else 409 `stale` |
/// | `Gone` | 404 `not-found` |
/// | `Overflow` | 409 `version-overflow` |
/// | `InvalidIfMatch` | 400 `if-match-invalid` |
/// | `SetsVersion` | 500 `misconfigured`, and a log line |
/// | `Query` | 409 `serialization` or `constraint-violated`, 503 `store-unavailable`, else 500 `query-failed` |
#[derive(Debug)]
#[non_exhaustive]
pub enum VersionError {
    /// The row has another version by now.
    Stale {
        /// What was asked for.
        expected: Expected,
        /// What is there.
        current: i64,
    },
    /// There is no such row.
    Gone,
    /// The row has the largest version that its column can hold: it can be deleted, not changed.
    Overflow,
    /// The `If-Match` of the request cannot be read. It is not the same as none.
    InvalidIfMatch(InvalidIfMatch),
    /// The changeset assigns to the version, which is raised for it: leave the field out of the
    /// struct, or mark it `#[diesel(skip_update)]`.
    SetsVersion {
        /// The column.
        field: &'static str,
    },
    /// The statement failed. In a transaction of the caller's, Postgres takes no other until that is
    /// rolled back.
    Query(QueryError),
}

impl fmt::Display for VersionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stale { expected, current } => {
                write!(f, "stale: version {expected} was expected, {current} is there")
            }
            Self::Gone => f.write_str("there is no such row"),
            Self::Overflow => f.write_str("the row has the largest version its column can hold"),
            Self::InvalidIfMatch(invalid) => invalid.fmt(f),
            Self::SetsVersion { field } => {
                write!(f, "the changeset sets `{field}`, which is raised for it: leave it out, or skip it in updates")
            }
            Self::Query(_) => f.write_str("the statement failed"),
        }
    }
}

impl std::error::Error for VersionError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::InvalidIfMatch(invalid) => Some(invalid),
            Self::Query(error) => Some(error),
            _ => None,
        }
    }
}

impl From<QueryError> for VersionError {
    fn from(error: QueryError) -> Self {
        Self::Query(error)
    }
}

impl From<InvalidIfMatch> for VersionError {
    fn from(invalid: InvalidIfMatch) -> Self {
        Self::InvalidIfMatch(invalid)
    }
}

impl VersionError {
    pub(super) fn code(&self) -> Code {
        match self {
            Self::Stale { expected: Expected::IfMatch(_), .. } => Code::IfMatchFailed,
            Self::Stale { .. } => Code::Stale,
            Self::Gone => Code::NotFound,
            Self::Overflow => Code::VersionOverflow,
            Self::InvalidIfMatch(_) => Code::IfMatchInvalid,
            Self::SetsVersion { .. } => Code::Misconfigured,
            Self::Query(error) => code_of(error),
        }
    }
}

impl ResponseError for VersionError {
    fn status_code(&self) -> StatusCode {
        self.code().status()
    }

    fn error_response(&self) -> HttpResponse<BoxBody> {
        match self {
            Self::Stale { expected: Expected::IfMatch(_), current } => {
                Refusal::new(Code::IfMatchFailed).with_etag(etag(*current)).error_response()
            }
            Self::SetsVersion { .. } => {
                telemetry::misconfigured(&self.to_string());
                Refusal::new(Code::Misconfigured).error_response()
            }
            Self::InvalidIfMatch(invalid) => Refusal::new(Code::IfMatchInvalid)
                .detailed(format!("{invalid}. {}", Code::IfMatchInvalid.detail()))
                .error_response(),
            Self::Query(error) => refuse("a versioned change failed", error).error_response(),
            _ => Refusal::new(self.code()).error_response(),
        }
    }
}
