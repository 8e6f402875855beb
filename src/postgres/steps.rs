//! The steps of an operation: what is done, and its result.

use std::time::SystemTime;

use diesel::{
    QueryResult, Queryable,
    sql_types::{Binary, Bool, Integer, Nullable, Text, Timestamp},
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

statement! {
    struct MayBeRead { table: str }
    returns Bool;
    ["SELECT coalesce(has_table_privilege(to_regclass(", (table: Text), "), 'SELECT'), false)"]
}

/// Whether there is a table of steps that this role may read.
pub(crate) async fn may_be_read(conn: &mut AsyncPgConnection) -> QueryResult<bool> {
    MayBeRead { table: "idempotency_steps" }.get_result(conn).await
}

/// A step without its result.
#[derive(Debug, Queryable)]
pub(crate) struct DoneStep {
    pub(crate) name: String,
    pub(crate) done_at: SystemTime,
    /// `None`: too large to keep.
    pub(crate) result_size: Option<i32>,
}

statement! {
    struct OfKey { id: [u8] }
    returns (Text, Timestamp, Nullable<Integer>);
    [
        "SELECT s.name, s.done_at AT TIME ZONE 'UTC', octet_length(s.result) FROM idempotency_steps AS s \
         JOIN idempotency_keys AS k ON k.id = s.id AND k.seed = s.seed WHERE s.id = ", (id: Binary),
        " ORDER BY s.done_at, s.name",
    ]
}

/// Those of the operation that the key is about, in the order in which they were done.
pub(crate) async fn of_key(conn: &mut AsyncPgConnection, id: &[u8]) -> QueryResult<Vec<DoneStep>> {
    OfKey { id }.load(conn).await
}
