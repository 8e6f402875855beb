//! A transaction, or a savepoint inside the caller's: what fails in it leaves the caller's as it was.
//!
//! Through diesel's transaction manager only: a connection whose future is dropped half-way is not
//! used again.

use diesel::{
    QueryResult,
    result::Error as QueryError,
    sql_types::{Integer, Text},
};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, TransactionManager};

use super::statement;

type Manager = <AsyncPgConnection as AsyncConnection>::TransactionManager;

pub(crate) async fn begin(conn: &mut AsyncPgConnection) -> QueryResult<()> {
    Manager::begin_transaction(conn).await
}

/// Ends what [`begin`] began: commits a success, rolls back a failure.
pub(crate) async fn end<T, E>(conn: &mut AsyncPgConnection, outcome: Result<T, E>) -> Result<T, E>
where
    E: From<QueryError>,
{
    match outcome {
        Ok(value) => {
            commit(conn).await?;
            Ok(value)
        }
        Err(error) => {
            roll_back(conn).await?;
            Err(error)
        }
    }
}

/// Keeps what was done since [`begin`].
pub(crate) async fn commit(conn: &mut AsyncPgConnection) -> QueryResult<()> {
    Manager::commit_transaction(conn).await
}

/// Undoes what was done since [`begin`].
pub(crate) async fn roll_back(conn: &mut AsyncPgConnection) -> QueryResult<()> {
    match Manager::rollback_transaction(conn).await {
        // Whatever broke it is the error to be told.
        Err(QueryError::BrokenTransactionManager) => Ok(()),
        other => other,
    }
}

statement! {
    struct Alive { nothing: str }
    returns Integer;
    ["SELECT length(", (nothing: Text), ")"]
}

/// Fails in an aborted transaction. Where code of the caller's has run, an error may have been
/// swallowed, and COMMIT would say OK and roll back.
pub(crate) async fn check(conn: &mut AsyncPgConnection) -> QueryResult<()> {
    Alive { nothing: "" }.get_result::<i32>(conn).await.map(drop)
}
