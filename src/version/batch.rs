//! Many rows, all or nothing.

use std::fmt::{self, Debug};

use actix_web::{HttpResponse, ResponseError, body::BoxBody, http::StatusCode};
use diesel::result::Error as QueryError;
use diesel_async::AsyncPgConnection;

use super::{Change, VersionError};
use crate::{
    error::{code_of, refuse},
    postgres::savepoint,
    refusal::{Code, Refusal},
};

/// Changes many rows, all or nothing, and returns what each change returns, in the order given.
///
/// ```no_run
/// # use actix_idempotency::{Versioned, version::{self, BatchError}, versioned};
/// # use diesel::prelude::*;
/// # use diesel_async::AsyncPgConnection;
/// # diesel::table! { cards (id) { id -> BigInt, position -> Integer, version -> Integer, } }
/// # versioned!(cards.version);
/// # struct Card { id: i64, position: i32, version: i32 }
/// # async fn example(conn: &mut AsyncPgConnection, cards: &[Card]) -> Result<(), BatchError<i64>> {
/// let moved = cards.iter().map(|card| {
///     cards::table.at(card.id, card.version).set(cards::position.eq(card.position + 1))
/// });
/// let versions: Vec<i64> = version::batch(conn, moved).await?;
/// # Ok(())
/// # }
/// ```
///
/// It is a transaction of its own, or a savepoint in the caller's. Rows are changed in the order of their
/// primary keys, whatever order they are given in, so that two batches never wait for each other in a
/// circle. A row may be in it once: a second change would find the version raised by the first, and be
/// stale.
///
/// # Errors
///
/// [`BatchError::Lost`] names every row that could not be changed, and why; then none is.
pub async fn batch<C, U>(
    conn: &mut AsyncPgConnection,
    changes: impl IntoIterator<Item = C>,
) -> Result<Vec<U>, BatchError<C::Key>>
where
    C: Change<U>,
    C::Key: Ord + Clone,
{
    let mut changes: Vec<(usize, C)> = changes.into_iter().enumerate().collect();
    changes.sort_by(|(_, a), (_, b)| a.key().cmp(b.key()));
    savepoint::begin(conn).await?;
    let outcome = change_all(conn, &changes).await;
    savepoint::end(conn, outcome).await
}

async fn change_all<C, U>(conn: &mut AsyncPgConnection, changes: &[(usize, C)]) -> Result<Vec<U>, BatchError<C::Key>>
where
    C: Change<U>,
    C::Key: Clone,
{
    let (mut changed, mut lost) = (Vec::with_capacity(changes.len()), Vec::new());
    for (place, change) in changes {
        match change.send(conn).await {
            Ok(row) => changed.push((*place, row)),
            Err(VersionError::Query(error)) => return Err(BatchError::Query(error)),
            Err(error) => lost.push(Lost { key: change.key().clone(), error }),
        }
    }
    if lost.is_empty() {
        changed.sort_by_key(|(place, _)| *place);
        Ok(changed.into_iter().map(|(_, row)| row).collect())
    } else {
        Err(BatchError::Lost(lost))
    }
}

/// A row that a [`batch`] could not change.
#[derive(Debug)]
#[non_exhaustive]
pub struct Lost<K> {
    /// Its primary key.
    pub key: K,
    /// Why.
    pub error: VersionError,
}

/// Why a [`batch`] changed nothing. A transaction around it can go on.
///
/// With `?` in a handler, `Lost` answers what its first row would answer alone, and its `detail` names the
/// rows by their keys.
#[derive(Debug)]
#[non_exhaustive]
pub enum BatchError<K> {
    /// These rows are stale or gone, in the order of their keys.
    Lost(Vec<Lost<K>>),
    /// A statement failed.
    Query(QueryError),
}

impl<K: Debug> fmt::Display for BatchError<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(lost) => {
                f.write_str("nothing was changed, because of")?;
                lost.iter().try_for_each(|Lost { key, error }| write!(f, " {key:?} ({error});"))
            }
            Self::Query(_) => f.write_str("a statement of the batch failed"),
        }
    }
}

impl<K: Debug> std::error::Error for BatchError<K> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Lost(_) => None,
            Self::Query(error) => Some(error),
        }
    }
}

impl<K> From<QueryError> for BatchError<K> {
    fn from(error: QueryError) -> Self {
        Self::Query(error)
    }
}

impl<K: Debug> ResponseError for BatchError<K> {
    fn status_code(&self) -> StatusCode {
        match self {
            Self::Lost(lost) => lost.first().map_or(StatusCode::CONFLICT, |lost| lost.error.status_code()),
            Self::Query(error) => code_of(error).status(),
        }
    }

    fn error_response(&self) -> HttpResponse<BoxBody> {
        match self {
            Self::Lost(lost) => {
                let keys: Vec<String> = lost.iter().map(|lost| format!("{:?}", lost.key)).collect();
                let code = lost.first().map_or(Code::Stale, |lost| lost.error.code());
                let detail = format!("Nothing was changed, because of: {}.", keys.join(", "));
                Refusal::new(code).detailed(detail).error_response()
            }
            Self::Query(error) => refuse("a batch failed", error).error_response(),
        }
    }
}
