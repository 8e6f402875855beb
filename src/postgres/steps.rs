//! The steps of an operation: what is done, and its result.

use diesel::{
    QueryResult,
    sql_types::{Binary, Nullable, Text},
};
use diesel_async::RunQueryDsl;

use super::{AsyncPgConnection, statement};

statement! {
    struct Find { id: [u8], seed: [u8], name: str }
    returns Nullable<Binary>;
    [
        "SELECT result FROM idempotency_steps WHERE id = ", (id: Binary), " AND seed = ", (seed: Binary),
        " AND name = ", (name: Text),
    ]
}

/// The result of a step that was done; `Some(None)` where it was too large to keep.
pub(crate) async fn find(
    conn: &mut AsyncPgConnection,
    id: &[u8],
    seed: &[u8],
    name: &str,
) -> QueryResult<Option<Option<Vec<u8>>>> {
    let rows: Vec<Option<Vec<u8>>> = Find { id, seed, name }.load(conn).await?;
    Ok(rows.into_iter().next())
}

statement! {
    /// Locks no more than the foreign key does: a takeover that has been committed is seen, one that is on its
    /// way comes after the step. A step that is there already is the same one, sent again.
    struct Store { id: [u8], owner: [u8], name: str, result: Option<&'a [u8]> }
    [
        "INSERT INTO idempotency_steps (id, seed, name, result, done_at) SELECT id, seed, ", (name: Text), ", ",
        (result: Nullable<Binary>), ", clock_timestamp() FROM idempotency_keys WHERE id = ", (id: Binary),
        " AND owner = ", (owner: Binary), " AND state = 'outstanding' FOR KEY SHARE \
         ON CONFLICT (id, seed, name) DO UPDATE SET result = excluded.result, done_at = excluded.done_at",
    ]
}

/// Whether the step is stored; `false`: the lease was lost.
pub(crate) async fn store(
    conn: &mut AsyncPgConnection,
    id: &[u8],
    owner: &[u8],
    name: &str,
    result: Option<&[u8]>,
) -> QueryResult<bool> {
    Ok(Store { id, owner, name, result: &result }.execute(conn).await? == 1)
}
