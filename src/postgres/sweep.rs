//! Expired rows go, a batch at a time; half-done ones later than the others, and by name.

use diesel::{
    QueryResult, Queryable,
    sql_types::{BigInt, Binary, Integer, Nullable, SmallInt, Text},
};
use diesel_async::RunQueryDsl;

use super::{
    AsyncPgConnection, statement,
    unfinished::{UNFINISHED, UNFINISHED_WITHOUT_STEPS},
};

/// The statements, for rows of which it is asked in this way whether they are half-done.
macro_rules! sweeping {
    ($expired:ident, $abandoned:ident, $unfinished:tt) => {
        statement! {
            /// `expires_at` is a lower bound that the index finds, by `now()`: a time that moves on within the
            /// statement would be compared with every row of it. The second condition decides. An outstanding row
            /// expires by the end of its lease, so that a live one is never touched.
            struct $expired { limit: i64 }
            [
                "WITH expired AS MATERIALIZED (SELECT k.id FROM idempotency_keys AS k WHERE k.expires_at <= now() \
AND coalesce(k.completed_at, k.leased_until) + (k.expires_at - k.created_at) <= clock_timestamp() \
AND NOT ", $unfinished, " ORDER BY k.expires_at LIMIT ", (limit: BigInt),
                " FOR UPDATE OF k SKIP LOCKED) \
DELETE FROM idempotency_keys AS k USING expired WHERE k.id = expired.id",
            ]
        }

        statement! {
            /// Steps go with their key.
            struct $abandoned { kept_ms: i64, limit: i64 }
            returns (Binary, Text, Text, Nullable<SmallInt>, Integer, Nullable<Text>);
            [
                "WITH expired AS MATERIALIZED (SELECT k.id FROM idempotency_keys AS k WHERE k.expires_at <= now() - ",
                (kept_ms: BigInt), " * interval '1 millisecond' \
AND coalesce(k.completed_at, k.leased_until) + (k.expires_at - k.created_at) <= clock_timestamp() - ",
                (kept_ms: BigInt), " * interval '1 millisecond' AND ", $unfinished, " ORDER BY k.expires_at LIMIT ",
                (limit: BigInt), " FOR UPDATE OF k SKIP LOCKED) \
DELETE FROM idempotency_keys AS k USING expired WHERE k.id = expired.id \
RETURNING k.id, k.resource, k.state, k.status, k.attempt, k.request_id",
            ]
        }
    };
}

sweeping!(DeleteExpired, DeleteAbandoned, UNFINISHED);
sweeping!(DeleteExpiredUnseen, DeleteAbandonedUnseen, UNFINISHED_WITHOUT_STEPS);

/// How many rows went, at most `limit`, none of them half-done. Rows that somebody holds are left for the next time.
///
/// It reads a stretch of an index that every claim adds to, and writes: where the default isolation is
/// SERIALIZABLE, on a busy table, it would hardly ever succeed. Whether a row has expired needs no more
/// than READ COMMITTED.
pub(crate) async fn delete_expired(conn: &mut AsyncPgConnection, limit: i64, sees_steps: bool) -> QueryResult<usize> {
    let delete = async |conn: &mut AsyncPgConnection| match sees_steps {
        true => DeleteExpired { limit: &limit }.execute(conn).await,
        false => DeleteExpiredUnseen { limit: &limit }.execute(conn).await,
    };
    conn.build_transaction().read_committed().run(delete).await
}

/// A half-done key that is gone.
#[derive(Debug, Queryable)]
pub(crate) struct Abandoned {
    pub(crate) id: Vec<u8>,
    pub(crate) resource: String,
    pub(crate) state: String,
    pub(crate) status: Option<i16>,
    pub(crate) attempt: i32,
    /// Of the request that claimed it first.
    pub(crate) request_id: Option<String>,
}

/// The half-done keys that have been expired for so long, which are gone now: at most `limit`.
pub(crate) async fn delete_abandoned(
    conn: &mut AsyncPgConnection,
    kept_ms: i64,
    limit: i64,
    sees_steps: bool,
) -> QueryResult<Vec<Abandoned>> {
    let delete = async |conn: &mut AsyncPgConnection| match sees_steps {
        true => DeleteAbandoned { kept_ms: &kept_ms, limit: &limit }.load(conn).await,
        false => DeleteAbandonedUnseen { kept_ms: &kept_ms, limit: &limit }.load(conn).await,
    };
    conn.build_transaction().read_committed().run(delete).await
}
