//! Keys whose attempt has died and that nobody retries, taken over a batch at a time.

use diesel::{
    QueryResult, Queryable,
    sql_types::{BigInt, Binary, Bool, Integer, Nullable, SmallInt, Text},
};
use diesel_async::RunQueryDsl;

use super::{AsyncPgConnection, statement};

/// Which keys are taken over, and for whom.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) domain: &'a str,
    pub(crate) resource: &'a str,
    /// For so long their lease has been over.
    pub(crate) grace_ms: i64,
    /// Those that have had so many attempts are left alone.
    pub(crate) max_attempts: i32,
    pub(crate) recipe_version: i16,
    pub(crate) limit: i64,
    pub(crate) owner: &'a [u8],
    pub(crate) lease_ms: i64,
}

/// A stretch of the table: after the one id, up to the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) after: Vec<u8>,
    pub(crate) to: Vec<u8>,
}

impl Stretch {
    /// All of it: an id has 32 bytes.
    pub(crate) fn whole() -> Self {
        Self { after: Vec::new(), to: vec![u8::MAX; 33] }
    }
}

/// A key that was taken over.
#[derive(Debug, Queryable)]
pub(crate) struct Lapsed {
    pub(crate) id: Vec<u8>,
    pub(crate) tenant: Option<String>,
    pub(crate) principal: Option<String>,
    pub(crate) key: String,
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) recipe: Vec<u8>,
    pub(crate) attempt: i32,
    pub(crate) seed: Vec<u8>,
    /// Of the request that claimed it first.
    pub(crate) request_id: Option<String>,
}

statement! {
    /// As a retry would take it over, but for any number of keys. One that has expired is nobody's.
    struct Take {
        domain: str, resource: str, grace_ms: i64, max_attempts: i32, recipe_version: i16, after: [u8], to: [u8],
        limit: i64, owner: [u8], lease_ms: i64,
    }
    returns (Binary, Nullable<Text>, Nullable<Text>, Text, Binary, Binary, Integer, Binary, Nullable<Text>);
    [
        "WITH lapsed AS MATERIALIZED (SELECT id, owner FROM idempotency_keys WHERE state = 'outstanding' \
         AND leased_until <= now() - ", (grace_ms: BigInt), " * interval '1 millisecond' AND domain = ",
        (domain: Text), " AND resource = ", (resource: Text), " AND attempt < ", (max_attempts: Integer),
        " AND recipe_version <= ", (recipe_version: SmallInt),
        " AND coalesce(leased_until + (expires_at - created_at) > now(), true) AND id > ", (after: Binary),
        " AND id <= ", (to: Binary), " ORDER BY leased_until LIMIT ", (limit: BigInt),
        " FOR NO KEY UPDATE SKIP LOCKED) \
         UPDATE idempotency_keys AS k SET owner = ", (owner: Binary), ", attempt = attempt + 1, \
         leased_until = now() + ", (lease_ms: BigInt), " * interval '1 millisecond' \
         FROM lapsed WHERE k.id = lapsed.id AND k.owner = lapsed.owner AND k.state = 'outstanding' \
         RETURNING k.id, k.tenant, k.principal, k.key, k.fingerprint, k.recipe, k.attempt, k.seed, k.request_id",
    ]
}

/// Takes over what has lapsed, longest first. Whoever else is at it, a client that retries or another
/// process, gets other keys.
///
/// READ COMMITTED whatever the default is: above it every row that somebody has written since would
/// fail the whole batch.
pub(crate) async fn take(
    conn: &mut AsyncPgConnection,
    wanted: &Wanted<'_>,
    stretch: &Stretch,
) -> QueryResult<Vec<Lapsed>> {
    let take = Take {
        domain: wanted.domain,
        resource: wanted.resource,
        grace_ms: &wanted.grace_ms,
        max_attempts: &wanted.max_attempts,
        recipe_version: &wanted.recipe_version,
        after: &stretch.after,
        to: &stretch.to,
        limit: &wanted.limit,
        owner: wanted.owner,
        lease_ms: &wanted.lease_ms,
    };
    conn.build_transaction().read_committed().run(async |conn| take.load(conn).await).await
}

statement! {
    struct IsIndexed { nothing: str }
    returns Bool;
    [
        "SELECT EXISTS (SELECT FROM pg_index WHERE indexrelid = to_regclass('idempotency_keys_outstanding_idx' || ",
        (nothing: Text), ") AND indisvalid)",
    ]
}

/// Whether there is an index of those that are outstanding, and finished.
pub(crate) async fn is_indexed(conn: &mut AsyncPgConnection) -> QueryResult<bool> {
    IsIndexed { nothing: "" }.get_result(conn).await
}

statement! {
    struct End { after: [u8], rows: i64 }
    returns Binary;
    [
        "SELECT id FROM (SELECT id FROM idempotency_keys WHERE id > ", (after: Binary), " ORDER BY id LIMIT ",
        (rows: BigInt), ") AS stretch ORDER BY id DESC LIMIT 1",
    ]
}

/// Where so many rows after this id end; `None` where there are none.
pub(crate) async fn end(conn: &mut AsyncPgConnection, after: &[u8], rows: i64) -> QueryResult<Option<Vec<u8>>> {
    let ends: Vec<Vec<u8>> = End { after, rows: &rows }.load(conn).await?;
    Ok(ends.into_iter().next())
}
