//! What people who run the service do to rows. Nothing here waits: a row that somebody holds is passed by.

use diesel::{
    QueryResult,
    sql_types::{BigInt, Binary, Bool, Nullable, Text},
};
use diesel_async::RunQueryDsl;

use super::{AsyncPgConnection, lapsed::Stretch, statement};

statement! {
    /// The new owner is nobody. The state alone fences the last attempt off until the next one claims, and from then
    /// on that one's owner; with an owner of its own the row never again looks like the last attempt's, in
    /// whatever state. No status: what the attempt has done is unknown.
    struct Release { id: [u8], seen: [u8], nobody: [u8], forced: bool }
    [
        "WITH seen AS MATERIALIZED (SELECT id FROM idempotency_keys WHERE id = ", (id: Binary), " AND owner = ",
        (seen: Binary), " AND state = 'outstanding' AND (", (forced: Bool), " OR leased_until <= clock_timestamp()) \
         FOR NO KEY UPDATE SKIP LOCKED) \
         UPDATE idempotency_keys AS k SET state = 'released', owner = ", (nobody: Binary),
        ", leased_until = least(k.leased_until, clock_timestamp()), status = NULL \
         FROM seen WHERE k.id = seen.id AND k.owner = ", (seen: Binary), " AND k.state = 'outstanding'",
    ]
}

/// Whether the key is free now: whose lease has lapsed, or, `forced`, is live.
///
/// READ COMMITTED whatever the default is, as for all writes here: above it a row that somebody has written since
/// is an error instead of an answer.
pub(crate) async fn release(
    conn: &mut AsyncPgConnection,
    id: &[u8],
    seen: &[u8],
    nobody: &[u8],
    forced: bool,
) -> QueryResult<bool> {
    let release = Release { id, seen, nobody, forced: &forced };
    conn.build_transaction().read_committed().run(async |conn| Ok(release.execute(conn).await? == 1)).await
}

statement! {
    /// From now on its retention is nothing. Only a clock that was set back makes a time later than now.
    struct Expire { id: [u8], seen: [u8] }
    [
        "WITH seen AS MATERIALIZED (SELECT id FROM idempotency_keys WHERE id = ", (id: Binary), " AND owner = ",
        (seen: Binary), " AND state = 'completed' FOR NO KEY UPDATE SKIP LOCKED) \
         UPDATE idempotency_keys AS k SET created_at = least(k.created_at, now()), \
         expires_at = least(k.created_at, now()), completed_at = least(k.completed_at, now()) \
         FROM seen WHERE k.id = seen.id AND k.owner = ", (seen: Binary), " AND k.state = 'completed'",
    ]
}

/// Whether a completed key has expired now.
pub(crate) async fn expire(conn: &mut AsyncPgConnection, id: &[u8], seen: &[u8]) -> QueryResult<bool> {
    let expire = Expire { id, seen };
    conn.build_transaction().read_committed().run(async |conn| Ok(expire.execute(conn).await? == 1)).await
}

/// Whose rows are erased.
#[derive(Clone, Copy)]
pub(crate) struct Whose<'a> {
    pub(crate) tenant: Option<&'a str>,
    pub(crate) principal: &'a str,
}

statement! {
    /// Steps go with their key.
    struct Erase { tenant: Option<&'a str>, principal: str, after: [u8], to: [u8], limit: i64 }
    [
        "WITH theirs AS MATERIALIZED (SELECT id FROM idempotency_keys WHERE principal = ", (principal: Text),
        " AND tenant IS NOT DISTINCT FROM ", (tenant: Nullable<Text>), " AND id > ", (after: Binary), " AND id <= ",
        (to: Binary), " AND NOT (state = 'outstanding' AND leased_until > clock_timestamp()) LIMIT ", (limit: BigInt),
        " FOR UPDATE SKIP LOCKED) DELETE FROM idempotency_keys AS k USING theirs WHERE k.id = theirs.id",
    ]
}

/// How many went, at most `limit`. A request that runs keeps its row, and so does whoever writes one now.
pub(crate) async fn erase(
    conn: &mut AsyncPgConnection,
    whose: Whose<'_>,
    stretch: &Stretch,
    limit: i64,
) -> QueryResult<usize> {
    let erase = Erase {
        tenant: &whose.tenant,
        principal: whose.principal,
        after: &stretch.after,
        to: &stretch.to,
        limit: &limit,
    };
    conn.build_transaction().read_committed().run(async |conn| erase.execute(conn).await).await
}

statement! {
    struct Left { tenant: Option<&'a str>, principal: str, after: [u8], to: [u8] }
    returns BigInt;
    [
        "SELECT count(*) FROM idempotency_keys WHERE principal = ", (principal: Text),
        " AND tenant IS NOT DISTINCT FROM ", (tenant: Nullable<Text>), " AND id > ", (after: Binary), " AND id <= ",
        (to: Binary),
    ]
}

/// How many are there still.
pub(crate) async fn left(conn: &mut AsyncPgConnection, whose: Whose<'_>, stretch: &Stretch) -> QueryResult<i64> {
    let left = Left { tenant: &whose.tenant, principal: whose.principal, after: &stretch.after, to: &stretch.to };
    left.get_result(conn).await
}
