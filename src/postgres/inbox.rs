//! The marks of handled messages, and how often a message has failed.

use std::collections::HashMap;

use diesel::{
    QueryResult,
    sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, Text},
};
use diesel_async::RunQueryDsl;

use super::{AsyncPgConnection, statement};

/// What the marks of a consumer have in common.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Marks<'a> {
    pub(crate) consumer: &'a str,
    /// `None`: for ever.
    pub(crate) retention_ms: Option<i64>,
    /// How long each of them waits for somebody who has written the same and not committed yet.
    pub(crate) patience_ms: i64,
    /// How long the transaction, which is ours then, may be idle; `None`: as long as it may be now.
    pub(crate) idle_ms: Option<i64>,
}

statement! {
    /// The patience ends with the statement: what `lock_timeout` was before is set again as its last act,
    /// which needs all marks to be written. Where it fails, the rollback sets it back.
    ///
    /// In the order given, one after the other: whoever sorts them never waits in a circle.
    struct Mark {
        patience_ms: i64, idle_ms: Option<i64>, consumer: str, retention_ms: Option<i64>, ids: &'a [&'a str],
        fingerprints: &'a [Option<&'a [u8]>],
    }
    returns (Array<Text>, Array<Nullable<Integer>>, Text);
    [
        "WITH before AS MATERIALIZED (SELECT current_setting('lock_timeout') AS value), \
         patience AS MATERIALIZED (SELECT set_config('lock_timeout', ", (patience_ms: BigInt),
        "::text, true) || set_config('idle_in_transaction_session_timeout', coalesce(", (idle_ms: Nullable<BigInt>),
        "::text, current_setting('idle_in_transaction_session_timeout')), true) AS value FROM before), \
         mark AS (INSERT INTO idempotency_inbox (consumer, message_id, fingerprint, handled_at, expires_at) \
         SELECT ", (consumer: Text), ", m.id, m.fingerprint, t.now, t.now + ", (retention_ms: Nullable<BigInt>),
        " * interval '1 millisecond' FROM patience CROSS JOIN (SELECT clock_timestamp() AS now) AS t CROSS JOIN unnest((SELECT ",
        (ids: Array<Text>), "), (SELECT ", (fingerprints: Array<Nullable<Binary>>),
        ")) WITH ORDINALITY AS m (id, fingerprint, place) WHERE patience.value IS NOT NULL ORDER BY m.place \
         ON CONFLICT (consumer, message_id) DO NOTHING RETURNING message_id), \
         marked AS MATERIALIZED (SELECT coalesce(array_agg(m.message_id), '{}') AS ids, \
         coalesce(array_agg(a.attempts), '{}') AS attempts FROM mark AS m LEFT JOIN LATERAL (SELECT attempts \
         FROM idempotency_inbox_attempts WHERE consumer = ", (consumer: Text),
        " AND message_id = m.message_id LIMIT 1) AS a ON true) \
         SELECT marked.ids, marked.attempts, \
         set_config('lock_timeout', CASE WHEN marked.ids IS NOT NULL THEN before.value END, true) FROM marked, before",
    ]
}

/// Those that are marked now, with their failed attempts; the others were marked before.
pub(crate) async fn mark(
    conn: &mut AsyncPgConnection,
    marks: Marks<'_>,
    ids: &[&str],
    fingerprints: &[Option<&[u8]>],
) -> QueryResult<HashMap<String, i32>> {
    let Marks { consumer, retention_ms, patience_ms, idle_ms } = marks;
    let statement = Mark {
        patience_ms: &patience_ms,
        idle_ms: &idle_ms,
        consumer,
        retention_ms: &retention_ms,
        ids: &ids,
        fingerprints: &fingerprints,
    };
    let (ids, attempts, _): (Vec<String>, Vec<Option<i32>>, String) = statement.get_result(conn).await?;
    Ok(ids.into_iter().zip(attempts.into_iter().map(Option::unwrap_or_default)).collect())
}

statement! {
    /// One by one, through the index: a plan for the whole list would be made while the table is small, and kept.
    struct Look { consumer: str, ids: &'a [&'a str] }
    returns (Text, Nullable<Binary>);
    [
        "SELECT m.id, i.fingerprint FROM unnest((SELECT ", (ids: Array<Text>), ")) AS m (id) CROSS JOIN LATERAL \
         (SELECT fingerprint FROM idempotency_inbox WHERE consumer = ", (consumer: Text),
        " AND message_id = m.id LIMIT 1) AS i",
    ]
}

/// Those of these that are marked, with their fingerprints.
pub(crate) async fn look(
    conn: &mut AsyncPgConnection,
    consumer: &str,
    ids: &[&str],
) -> QueryResult<HashMap<String, Option<Vec<u8>>>> {
    let rows: Vec<(String, Option<Vec<u8>>)> = Look { consumer, ids: &ids }.load(conn).await?;
    Ok(rows.into_iter().collect())
}

statement! {
    /// Where a mark is missing nothing is forgotten: this may no longer be a transaction. A count that somebody
    /// else holds is passed by, and expires by itself.
    struct Done { consumer: str, ids: &'a [&'a str] }
    returns Bool;
    [
        "WITH marked AS MATERIALIZED (SELECT count((SELECT 1 FROM idempotency_inbox WHERE consumer = ",
        (consumer: Text), " AND message_id = m.id)) = cardinality(", (ids: Array<Text>), ") AS are_all FROM unnest((SELECT ",
        (ids: Array<Text>), ")) AS m (id)), \
         failed AS MATERIALIZED (SELECT a.message_id FROM unnest((SELECT ", (ids: Array<Text>), ")) AS m (id) \
         CROSS JOIN LATERAL (SELECT message_id FROM idempotency_inbox_attempts WHERE consumer = ", (consumer: Text),
        " AND message_id = m.id LIMIT 1 FOR UPDATE SKIP LOCKED) AS a), \
         done AS (DELETE FROM idempotency_inbox_attempts AS a USING failed, marked WHERE a.consumer = ",
        (consumer: Text), " AND a.message_id = failed.message_id AND marked.are_all) SELECT are_all FROM marked",
    ]
}

/// The last statement before COMMIT: forgets the failed attempts. `false` where a mark is missing: this is no
/// longer the transaction that has made it. Fails where the transaction is aborted.
pub(crate) async fn done(conn: &mut AsyncPgConnection, consumer: &str, ids: &[&str]) -> QueryResult<bool> {
    Done { consumer, ids: &ids }.get_result(conn).await
}

statement! {
    /// Not where the message has been handled meanwhile, by another copy. Patient as [`Mark`] is.
    struct Count { patience_ms: i64, consumer: str, id: str, retention_ms: Option<i64> }
    returns (Nullable<Integer>, Text);
    [
        "WITH before AS MATERIALIZED (SELECT current_setting('lock_timeout') AS value), \
         patience AS MATERIALIZED (SELECT set_config('lock_timeout', ", (patience_ms: BigInt),
        "::text, true) AS value FROM before), \
         counted AS (INSERT INTO idempotency_inbox_attempts AS a (consumer, message_id, attempts, failed_at, expires_at) \
         SELECT ", (consumer: Text), ", ", (id: Text), ", 1, t.now, t.now + ", (retention_ms: Nullable<BigInt>),
        " * interval '1 millisecond' FROM patience CROSS JOIN (SELECT clock_timestamp() AS now) AS t \
         WHERE patience.value IS NOT NULL \
         AND NOT EXISTS (SELECT FROM idempotency_inbox WHERE consumer = ", (consumer: Text), " AND message_id = ",
        (id: Text), ") ON CONFLICT (consumer, message_id) DO UPDATE SET \
         attempts = least(a.attempts::bigint + 1, 2147483647)::integer, failed_at = excluded.failed_at, \
         expires_at = excluded.expires_at RETURNING attempts), \
         count AS MATERIALIZED (SELECT coalesce(max(attempts), 0) AS attempts FROM counted) \
         SELECT count.attempts, \
         set_config('lock_timeout', CASE WHEN count.attempts >= 0 THEN before.value END, true) FROM count, before",
    ]
}

/// Counts a failed attempt: how many there are now, 0 where the message has been handled meanwhile.
pub(crate) async fn count(conn: &mut AsyncPgConnection, marks: Marks<'_>, id: &str) -> QueryResult<i32> {
    let Marks { consumer, retention_ms, patience_ms, .. } = marks;
    let statement = Count { patience_ms: &patience_ms, consumer, id, retention_ms: &retention_ms };
    let (attempts, _): (Option<i32>, String) = statement.get_result(conn).await?;
    Ok(attempts.unwrap_or_default())
}

statement! {
    struct Forgive { consumer: str, id: str }
    [
        "DELETE FROM idempotency_inbox_attempts WHERE consumer = ", (consumer: Text), " AND message_id = ", (id: Text),
    ]
}

/// Whether there was something to forgive.
pub(crate) async fn forgive(conn: &mut AsyncPgConnection, consumer: &str, id: &str) -> QueryResult<bool> {
    Ok(Forgive { consumer, id }.execute(conn).await? > 0)
}

statement! {
    struct Exists { nothing: str }
    returns Bool;
    [
        "SELECT to_regclass('idempotency_inbox') IS NOT NULL AND to_regclass('idempotency_inbox_attempts') IS NOT NULL \
         AND coalesce(has_table_privilege(to_regclass('idempotency_inbox'), 'DELETE'), false) \
         AND coalesce(has_table_privilege(to_regclass('idempotency_inbox_attempts'), 'DELETE'), false) AND '' = ",
        (nothing: Text),
    ]
}

/// Whether there is an inbox, and this role may delete what has expired in it.
pub(crate) async fn may_be_swept(conn: &mut AsyncPgConnection) -> QueryResult<bool> {
    Exists { nothing: "" }.get_result(conn).await
}

statement! {
    /// `now()`, which stands still and can be looked up in the index; the transaction has just begun.
    struct DeleteMarks { limit: i64 }
    [
        "WITH expired AS MATERIALIZED (SELECT consumer, message_id FROM idempotency_inbox WHERE expires_at <= now() \
         ORDER BY expires_at LIMIT ", (limit: BigInt), " FOR UPDATE SKIP LOCKED) \
         DELETE FROM idempotency_inbox AS i USING expired AS e \
         WHERE i.consumer = e.consumer AND i.message_id = e.message_id",
    ]
}

statement! {
    struct DeleteAttempts { limit: i64 }
    [
        "WITH expired AS MATERIALIZED (SELECT consumer, message_id FROM idempotency_inbox_attempts \
         WHERE expires_at <= now() ORDER BY expires_at LIMIT ", (limit: BigInt), " FOR UPDATE SKIP LOCKED) \
         DELETE FROM idempotency_inbox_attempts AS i USING expired AS e \
         WHERE i.consumer = e.consumer AND i.message_id = e.message_id",
    ]
}

/// How many marks went, at most `limit`; those that somebody holds stay.
pub(crate) async fn delete_expired(conn: &mut AsyncPgConnection, limit: i64) -> QueryResult<usize> {
    conn.build_transaction().read_committed().run(async |conn| DeleteMarks { limit: &limit }.execute(conn).await).await
}

/// The same for counts of failed attempts.
pub(crate) async fn delete_expired_attempts(conn: &mut AsyncPgConnection, limit: i64) -> QueryResult<usize> {
    conn.build_transaction()
        .read_committed()
        .run(async |conn| DeleteAttempts { limit: &limit }.execute(conn).await)
        .await
}
