//! Expired rows go, a batch at a time.

use diesel::{QueryResult, sql_types::BigInt};
use diesel_async::RunQueryDsl;

use super::{AsyncPgConnection, statement};

statement! {
    /// `expires_at` is a lower bound that the index finds, by `now()`: a time that moves on within the
    /// statement would be compared with every row of it. The second condition decides. An outstanding row
    /// expires by the end of its lease, so that a live one is never touched.
    struct DeleteExpired { limit: i64 }
    [
        "WITH expired AS MATERIALIZED (SELECT id FROM idempotency_keys WHERE expires_at <= now() \
         AND coalesce(completed_at, leased_until) + (expires_at - created_at) <= clock_timestamp() \
         ORDER BY expires_at LIMIT ", (limit: BigInt), " FOR UPDATE SKIP LOCKED) \
         DELETE FROM idempotency_keys AS k USING expired WHERE k.id = expired.id",
    ]
}

/// How many rows went, at most `limit`. Rows that somebody holds are left for the next time.
///
/// It reads a stretch of an index that every claim adds to, and writes: where the default isolation is
/// SERIALIZABLE, on a busy table, it would hardly ever succeed. Whether a row has expired needs no more
/// than READ COMMITTED.
pub(crate) async fn delete_expired(conn: &mut AsyncPgConnection, limit: i64) -> QueryResult<usize> {
    conn.build_transaction()
        .read_committed()
        .run(async |conn| DeleteExpired { limit: &limit }.execute(conn).await)
        .await
}
