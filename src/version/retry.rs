//! Losing is normal: look again, and try again.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use diesel::result::Error as QueryError;
use diesel_async::AsyncPgConnection;

use super::{BatchError, Expected, VersionError};
use crate::{
    duplicate::{DuplicateError, InsertError},
    error::words::is_lost_race,
    guarded::GuardedError,
    postgres::{guarded::is_in_transaction, savepoint},
};

/// How often [`Retry`] tries: five times. Who loses five times in a row to others writes to a row that
/// needs another shape (see [`version`](crate::version)).
pub const DEFAULT_TRIES: usize = 5;

/// Reads, decides and writes again where somebody else was first.
///
/// ```no_run
/// # use actix_idempotency::{Versioned, version::{Retry, VersionError}, versioned};
/// # use diesel::prelude::*;
/// # use diesel_async::{AsyncPgConnection, RunQueryDsl};
/// # diesel::table! { counters (id) { id -> BigInt, value -> BigInt, version -> Integer, } }
/// # versioned!(counters.version);
/// # async fn example(conn: &mut AsyncPgConnection) -> Result<(), VersionError> {
/// let version = Retry::new()
///     .run(conn, async |conn| {
///         let (value, version): (i64, i32) =
///             counters::table.find(1).select((counters::value, counters::version)).get_result(conn).await?;
///         counters::table.at(1, version).set(counters::value.eq(value + 1)).execute(conn).await
///     })
///     .await?;
/// # Ok(())
/// # }
/// ```
///
/// Every attempt is a transaction of its own, so that it reads what is there now; between two, a random
/// wait of 5 ms to 200 ms, longer each time. In a transaction of the caller's, an attempt is a savepoint:
/// that helps against staleness under READ COMMITTED only, and 40001 and deadlocks, which end the caller's
/// transaction, are not retried.
///
/// A stale `If-Match` is not retried: a client that named a version has decided on what it saw, and must be
/// told.
///
/// What is retried is any other stale version, 40001 and 40P01 (deadlock), as [`Retryable`] tells; whatever else
/// fails, fails at once. What the closure does outside the database happens once for each attempt.
///
/// # Errors
///
/// The error of the last attempt. An `Ok` of a closure that has swallowed the error of a statement is the
/// error that Postgres has for the next one: nothing is committed.
#[derive(Debug, Clone)]
pub struct Retry {
    tries: usize,
}

impl Default for Retry {
    fn default() -> Self {
        Self::new()
    }
}

impl Retry {
    /// [`DEFAULT_TRIES`] attempts.
    #[must_use]
    pub fn new() -> Self {
        Self { tries: DEFAULT_TRIES }
    }

    /// So many attempts, the first one included.
    ///
    /// # Panics
    ///
    /// With none.
    #[track_caller]
    #[must_use]
    pub fn tries(mut self, tries: usize) -> Self {
        assert!(tries > 0, "Retry::tries: at least one attempt");
        self.tries = tries;
        self
    }

    /// Runs `attempt` until it succeeds, fails for good, or has failed often enough.
    pub async fn run<T, E, F>(&self, conn: &mut AsyncPgConnection, mut attempt: F) -> Result<T, E>
    where
        F: AsyncFnMut(&mut AsyncPgConnection) -> Result<T, E>,
        E: Retryable,
    {
        let is_nested = is_in_transaction(conn);
        let mut waits = backoff(self.tries - 1);
        loop {
            let error = match once(conn, &mut attempt).await {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            let may_help = match error.lost_race() {
                Some(Race::Stale) => true,
                Some(Race::Transaction) => !is_nested,
                None => false,
            };
            match waits.next() {
                Some(wait) if may_help => tokio::time::sleep(wait).await,
                _ => return Err(error),
            }
        }
    }
}

/// With jitter: those who met once do not meet again.
fn backoff(times: usize) -> impl Iterator<Item = Duration> {
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(5))
        .with_max_delay(Duration::from_millis(100))
        .with_max_times(times)
        .with_jitter()
        .build()
}

async fn once<T, E, F>(conn: &mut AsyncPgConnection, attempt: &mut F) -> Result<T, E>
where
    F: AsyncFnMut(&mut AsyncPgConnection) -> Result<T, E>,
    E: Retryable,
{
    savepoint::begin(conn).await.map_err(E::failed)?;
    let mut outcome = attempt(conn).await.map_err(Attempt::Theirs);
    if outcome.is_ok()
        && let Err(error) = savepoint::check(conn).await
    {
        outcome = Err(Attempt::Ours(error));
    }
    savepoint::end(conn, outcome).await.map_err(|error| match error {
        Attempt::Theirs(error) => error,
        Attempt::Ours(error) => E::failed(error),
    })
}

/// How an attempt failed.
enum Attempt<E> {
    Theirs(E),
    Ours(QueryError),
}

impl<E> From<QueryError> for Attempt<E> {
    fn from(error: QueryError) -> Self {
        Self::Ours(error)
    }
}

/// A race that an attempt has lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Race {
    /// The row was changed by somebody else: reading it again helps.
    Stale,
    /// 40001 or 40P01: a new transaction helps.
    Transaction,
}

/// An error that tells whether another attempt may end otherwise.
pub trait Retryable {
    /// The race that was lost, if that is what happened.
    fn lost_race(&self) -> Option<Race>;

    /// The error for a statement of [`Retry`] itself, BEGIN or COMMIT, that failed.
    fn failed(error: QueryError) -> Self;
}

impl Retryable for QueryError {
    fn lost_race(&self) -> Option<Race> {
        is_lost_race(self).then_some(Race::Transaction)
    }

    fn failed(error: QueryError) -> Self {
        error
    }
}

impl Retryable for VersionError {
    fn lost_race(&self) -> Option<Race> {
        match self {
            Self::Stale { expected: Expected::Version(_), .. } => Some(Race::Stale),
            Self::Query(error) => error.lost_race(),
            _ => None,
        }
    }

    fn failed(error: QueryError) -> Self {
        Self::Query(error)
    }
}

impl<K> Retryable for BatchError<K> {
    fn lost_race(&self) -> Option<Race> {
        match self {
            Self::Lost(lost) => lost.iter().all(|lost| lost.error.lost_race().is_some()).then_some(Race::Stale),
            Self::Query(error) => error.lost_race(),
        }
    }

    fn failed(error: QueryError) -> Self {
        Self::Query(error)
    }
}

/// A handler's error is what it was made from, if that is one of ours.
impl Retryable for actix_web::Error {
    fn lost_race(&self) -> Option<Race> {
        if let Some(error) = self.as_error::<VersionError>() {
            error.lost_race()
        } else if let Some(error) = self.as_error::<GuardedError>() {
            error.lost_race()
        } else if let Some(error) = self.as_error::<InsertError>() {
            error.lost_race()
        } else {
            self.as_error::<DuplicateError>()?.lost_race()
        }
    }

    fn failed(error: QueryError) -> Self {
        VersionError::Query(error).into()
    }
}
