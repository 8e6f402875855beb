//! Our own failures, as the program that uses this crate sees them. A client never sees one: it gets
//! a [`Refusal`](crate::Refusal).

pub(crate) mod words;

use std::{error::Error as StdError, fmt};

use diesel::result::{ConnectionError, DatabaseErrorKind, Error as QueryError};
use diesel_async::pooled_connection::{PoolError, bb8::RunError};

use crate::{
    refusal::{Code, Refusal},
    telemetry,
};

type Cause = Box<dyn StdError + Send + Sync>;

/// Something of ours failed: [`kind`](Self::kind) for programs, `Display` for people, the cause in
/// `source`.
pub struct Error {
    kind: ErrorKind,
    message: String,
    cause: Option<Cause>,
}

/// What failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The connection string, or what it asks for, cannot be used.
    Configuration,
    /// No connection, or it was lost: the outcome of what was sent is unknown.
    Connection,
    /// No connection or no answer within the deadline: the outcome is unknown.
    Timeout,
    /// 40001 or 40P01: another transaction was first. Trying again is right.
    Serialization,
    /// 55P03: somebody held a lock for longer than `lock_timeout`. Trying again is right.
    LockTimeout,
    /// Class 23: a unique, foreign key, check, not-null or exclusion constraint.
    Constraint,
    /// The database is read-only, a replica for example.
    ReadOnly,
    /// The table is missing or not the one this version needs, or a statement names what is not there.
    Schema,
    /// A pooler loses prepared statements.
    Pooler,
    /// The database refused a statement for another reason.
    Database,
    /// A migration failed.
    Migration,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), cause: None }
    }

    pub(crate) fn because(mut self, cause: impl Into<Cause>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    /// What failed.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether sending the same again may end otherwise: all but what a constraint, the schema or a setting
    /// forbids. A lock, a full disk, a statement that somebody cancelled are a wait.
    pub(crate) fn is_transient(&self) -> bool {
        use ErrorKind as K;
        !matches!(self.kind, K::Constraint | K::Schema | K::Configuration | K::Migration | K::Pooler)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// With the chain of causes. None of them carries a connection string, a key or a body.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)?;
        let mut next = self.source();
        while let Some(cause) = next {
            write!(f, ": {cause}")?;
            next = cause.source();
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.cause.as_deref().map(|cause| cause as _)
    }
}

impl From<QueryError> for Error {
    fn from(error: QueryError) -> Self {
        Self::of(&error)
    }
}

impl Error {
    fn of(error: &QueryError) -> Self {
        use DatabaseErrorKind as D;
        let kind = match error {
            error if words::is_lost_race(error) => ErrorKind::Serialization,
            error if words::is_lock_timeout(error) => ErrorKind::LockTimeout,
            error if words::is_misfit(error) => ErrorKind::Schema,
            QueryError::DatabaseError(D::ReadOnlyTransaction, _) => ErrorKind::ReadOnly,
            QueryError::DatabaseError(
                D::UniqueViolation
                | D::ForeignKeyViolation
                | D::RestrictViolation
                | D::NotNullViolation
                | D::CheckViolation
                | D::ExclusionViolation,
                _,
            ) => ErrorKind::Constraint,
            QueryError::DatabaseError(D::ClosedConnection | D::UnableToSendCommand, _)
            | QueryError::BrokenTransactionManager => ErrorKind::Connection,
            _ => ErrorKind::Database,
        };
        Self::new(kind, "the store failed").because(Sanitized::of(error))
    }

    /// What a client is told where a statement of a handler's failed.
    fn code(&self) -> Code {
        match self.kind {
            ErrorKind::Serialization | ErrorKind::LockTimeout => Code::Serialization,
            ErrorKind::Constraint => Code::ConstraintViolated,
            ErrorKind::Connection | ErrorKind::Timeout | ErrorKind::ReadOnly => Code::StoreUnavailable,
            _ => Code::QueryFailed,
        }
    }
}

/// What a client is told where this failed.
pub(crate) fn code_of(error: &QueryError) -> Code {
    Error::of(error).code()
}

/// The same as an answer. What only happens in a race is told to the client, the rest to the log too.
pub(crate) fn refuse(what: &str, error: &QueryError) -> Refusal {
    let error = Error::of(error);
    let code = error.code();
    if code.status().is_server_error() {
        telemetry::store_failed(what, &error);
    }
    code.into()
}

/// For handlers that return a [`Refusal`] and have a statement fail: 409 `serialization` for a lost race and 409
/// `constraint-violated` for a constraint, 503 `store-unavailable` where the connection was lost, else 500 `query-failed`.
/// The log is told what the server said, and the client is not.
impl From<QueryError> for Refusal {
    fn from(error: QueryError) -> Self {
        refuse("a statement failed", &error)
    }
}

/// For handlers that take a connection of the pool: 503 `store-unavailable`.
impl From<RunError> for Refusal {
    fn from(error: RunError) -> Self {
        telemetry::store_failed("a handler got no connection", &error.into());
        Code::StoreUnavailable.into()
    }
}

/// What the server said, without its DETAIL line: that one quotes values of the row.
#[derive(Debug)]
struct Sanitized(String);

impl Sanitized {
    fn of(error: &QueryError) -> Self {
        match error {
            QueryError::DatabaseError(_, info) => {
                let constraint = info.constraint_name().map(|name| format!(" ({name})")).unwrap_or_default();
                Self(format!("{}{constraint}", info.message()))
            }
            other => Self(other.to_string()),
        }
    }
}

impl fmt::Display for Sanitized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Sanitized {}

impl From<ConnectionError> for Error {
    fn from(error: ConnectionError) -> Self {
        let kind = match &error {
            ConnectionError::InvalidConnectionUrl(_) => ErrorKind::Configuration,
            _ => ErrorKind::Connection,
        };
        Self::new(kind, "no connection to the store").because(error)
    }
}

impl From<PoolError> for Error {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::ConnectionError(error) => error.into(),
            PoolError::QueryError(error) => error.into(),
        }
    }
}

impl From<RunError> for Error {
    fn from(error: RunError) -> Self {
        match error {
            RunError::User(error) => error.into(),
            RunError::TimedOut => Self::new(ErrorKind::Timeout, "no free connection within the deadline"),
        }
    }
}
