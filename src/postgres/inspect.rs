//! What people who run the service ask about rows. Every look is bounded.

use std::time::{Duration, SystemTime};

use diesel::{
    QueryResult, Queryable,
    sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, SmallInt, Text, Timestamp},
};
use diesel_async::{RunQueryDsl, SimpleAsyncConnection};

use super::{AsyncPgConnection, statement, unfinished::FINISHED};

/// What every later write names.
#[derive(Debug, Queryable)]
pub(crate) struct Pin {
    pub(crate) id: Vec<u8>,
    pub(crate) owner: Vec<u8>,
    /// As it is stored.
    pub(crate) state: String,
}

/// What the table shows to people.
#[derive(Queryable)]
pub(crate) struct Shown {
    pub(crate) domain: String,
    pub(crate) tenant: Option<String>,
    pub(crate) principal: Option<String>,
    pub(crate) resource: String,
    pub(crate) key: String,
    pub(crate) request_id: Option<String>,
}

/// How far it has come.
#[derive(Debug, Queryable)]
pub(crate) struct Life {
    /// `lapsed` and `expired` are computed.
    pub(crate) state: String,
    pub(crate) attempt: i32,
    pub(crate) created_at: SystemTime,
    /// `None`: not by time.
    pub(crate) leased_until: Option<SystemTime>,
    pub(crate) completed_at: Option<SystemTime>,
    /// `None`: it does not end by time.
    pub(crate) lease_left_ms: Option<i64>,
    /// `None`: never.
    pub(crate) expires_in_ms: Option<i64>,
    /// When it was looked at.
    pub(crate) seen_at: SystemTime,
}

/// What is said of the answer without telling it.
#[derive(Debug, Queryable)]
pub(crate) struct Kept {
    pub(crate) status: Option<i16>,
    pub(crate) header_names: Option<Vec<String>>,
    pub(crate) body_size: Option<i32>,
    pub(crate) body_omitted: bool,
    pub(crate) acted: bool,
}

pub(crate) type Row = (Pin, Shown, Life, Kept);

statement! {
    /// One by one, through the primary key. The size of a body is known without reading it. Times in UTC, whatever
    /// the session's zone: as diesel reads them into a `SystemTime`.
    struct Rows { ids: &'a [&'a [u8]] }
    returns (
        (Binary, Binary, Text),
        (Text, Nullable<Text>, Nullable<Text>, Text, Text, Nullable<Text>),
        (Text, Integer, Timestamp, Nullable<Timestamp>, Nullable<Timestamp>, Nullable<BigInt>, Nullable<BigInt>, Timestamp),
        (Nullable<SmallInt>, Nullable<Array<Text>>, Nullable<Integer>, Bool, Bool),
    );
    [
        "SELECT k.id, k.owner, k.state, k.domain, k.tenant, k.principal, k.resource, k.key, k.request_id, \
         CASE WHEN t.expires_at <= t.now THEN 'expired' WHEN k.state = 'outstanding' AND k.leased_until <= t.now \
         THEN 'lapsed' ELSE k.state END, k.attempt, k.created_at AT TIME ZONE 'UTC', \
         CASE WHEN isfinite(k.leased_until) THEN k.leased_until AT TIME ZONE 'UTC' END, \
         k.completed_at AT TIME ZONE 'UTC', \
         CASE WHEN isfinite(k.leased_until) THEN ceil(extract(epoch FROM k.leased_until - t.now) * 1000)::bigint END, \
         CASE WHEN isfinite(t.expires_at) THEN ceil(extract(epoch FROM t.expires_at - t.now) * 1000)::bigint END, \
         t.now AT TIME ZONE 'UTC', k.status, k.header_names, octet_length(k.body), k.body_omitted, k.acted \
         FROM unnest(", (ids: Array<Binary>), ") AS wanted (id) \
         CROSS JOIN LATERAL (SELECT * FROM idempotency_keys WHERE id = wanted.id LIMIT 1) AS k \
         CROSS JOIN LATERAL (SELECT clock_timestamp() AS now, \
         coalesce(k.completed_at, k.leased_until) + (k.expires_at - k.created_at) AS expires_at) AS t",
    ]
}

/// Whatever is asked next, until [`end`], is a look: it writes nothing, fails no transaction of anybody above READ
/// COMMITTED, and is given up by the server too when nobody waits for it any more.
pub(crate) async fn begin(conn: &mut AsyncPgConnection, deadline: Duration) -> QueryResult<()> {
    let deadline = deadline.as_millis();
    conn.batch_execute(&format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; SET LOCAL statement_timeout = {deadline}"
    ))
    .await
}

/// The look is over.
pub(crate) async fn end(conn: &mut AsyncPgConnection) -> QueryResult<()> {
    conn.batch_execute("COMMIT").await
}

/// Those of these that there are, in no order.
pub(crate) async fn rows(conn: &mut AsyncPgConnection, ids: &[&[u8]]) -> QueryResult<Vec<Row>> {
    Rows { ids: &ids }.load(conn).await
}

statement! {
    struct InRange { first: [u8], last: [u8], limit: i64 }
    returns Binary;
    [
        "SELECT id FROM idempotency_keys WHERE id >= ", (first: Binary), " AND id <= ", (last: Binary),
        " ORDER BY id LIMIT ", (limit: BigInt),
    ]
}

/// The ids from the one to the other.
pub(crate) async fn in_range(
    conn: &mut AsyncPgConnection,
    first: &[u8],
    last: &[u8],
    limit: i64,
) -> QueryResult<Vec<Vec<u8>>> {
    InRange { first, last, limit: &limit }.load(conn).await
}

/// Which rows are looked through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// Those behind an id.
    Id,
    /// Those that are outstanding, by the index of them.
    Outstanding,
    /// Those of a principal, by the index of it.
    Principal,
    /// Those that expire last, by the index that every table has; of these, what was claimed within the last hour.
    Lately,
}

/// Which of them are wanted.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) domain: Option<&'a str>,
    pub(crate) key: Option<&'a str>,
    pub(crate) tenant: Option<&'a str>,
    pub(crate) no_tenant: bool,
    pub(crate) principal: Option<&'a str>,
    pub(crate) resource: Option<&'a str>,
    /// Only those, and the oldest first; the newest otherwise.
    pub(crate) outstanding: bool,
    /// As it is computed.
    pub(crate) state: Option<&'a str>,
    /// From the one to the other.
    pub(crate) status: Option<(i32, i32)>,
    /// When it was claimed first: not before, and before.
    pub(crate) from_ms: Option<i64>,
    pub(crate) before_ms: Option<i64>,
    pub(crate) limit: i64,
}

/// What was come to.
#[derive(Debug, Queryable)]
pub(crate) struct Looked {
    /// So many rows were looked through.
    pub(crate) rows: i64,
    /// The last of them; `None` where there were none.
    pub(crate) end: Option<Vec<u8>>,
    /// Those that are wanted.
    pub(crate) ids: Vec<Vec<u8>>,
}

/// What is asked of the rows that are looked through.
const SEEN: &str = "id, domain, key, tenant, principal, resource, state, status, created_at, leased_until, \
     completed_at, expires_at FROM idempotency_keys WHERE ";

statement! {
    /// One of the parts runs, the others are not begun.
    struct Find {
        by: str, after: [u8], rows: i64, domain: Option<&'a str>, key: Option<&'a str>, tenant: Option<&'a str>,
        no_tenant: bool, principal: Option<&'a str>, resource: Option<&'a str>, outstanding: bool, state: Option<&'a str>,
        status_from: Option<i32>, status_to: Option<i32>, from_ms: Option<i64>, before_ms: Option<i64>, limit: i64,
    }
    returns (BigInt, Nullable<Binary>, Array<Binary>);
    [
        "WITH seen AS MATERIALIZED ((SELECT ", SEEN, (by: Text), " = 'id' AND id > ", (after: Binary), " ORDER BY id LIMIT ",
        (rows: BigInt), ") UNION ALL (SELECT ", SEEN, (by: Text), " = 'outstanding' AND state = 'outstanding' \
         ORDER BY leased_until LIMIT ", (rows: BigInt), ") UNION ALL (SELECT ", SEEN, (by: Text), " = 'principal' AND principal = ",
        (principal: Nullable<Text>), " LIMIT ", (rows: BigInt), ") UNION ALL (SELECT ", SEEN, (by: Text), " = 'lately' AND expires_at IS NOT NULL ORDER BY expires_at DESC LIMIT ", (rows: BigInt), ")) \
         SELECT (SELECT count(*) FROM seen), (SELECT id FROM seen ORDER BY id DESC LIMIT 1), \
         ARRAY(SELECT id FROM seen WHERE (", (by: Text), " <> 'lately' OR created_at > now() - interval '1 hour') \
         AND (", (domain: Nullable<Text>), " IS NULL OR domain = ", (domain: Nullable<Text>),
        ") AND (", (key: Nullable<Text>), " IS NULL OR key = ", (key: Nullable<Text>),
        ") AND (", (tenant: Nullable<Text>), " IS NULL OR tenant = ", (tenant: Nullable<Text>),
        ") AND (tenant IS NULL OR NOT ", (no_tenant: Bool),
        ") AND (", (principal: Nullable<Text>), " IS NULL OR principal = ", (principal: Nullable<Text>),
        ") AND (", (resource: Nullable<Text>), " IS NULL OR resource = ", (resource: Nullable<Text>),
        ") AND (state = 'outstanding' OR NOT ", (outstanding: Bool),
        ") AND (", (state: Nullable<Text>), " IS NULL OR CASE \
         WHEN coalesce(completed_at, leased_until) + (expires_at - created_at) <= clock_timestamp() THEN 'expired' \
         WHEN state = 'outstanding' AND leased_until <= clock_timestamp() THEN 'lapsed' ELSE state END = ",
        (state: Nullable<Text>), ") AND (", (status_from: Nullable<Integer>), " IS NULL OR status >= ",
        (status_from: Nullable<Integer>), ") AND (", (status_to: Nullable<Integer>), " IS NULL OR status <= ",
        (status_to: Nullable<Integer>), ") AND (", (from_ms: Nullable<BigInt>), " IS NULL OR created_at >= \
         timestamptz 'epoch' + ", (from_ms: Nullable<BigInt>), " * interval '1 millisecond') AND (",
        (before_ms: Nullable<BigInt>), " IS NULL OR created_at < timestamptz 'epoch' + ",
        (before_ms: Nullable<BigInt>), " * interval '1 millisecond') ORDER BY CASE WHEN ", (outstanding: Bool),
        " THEN created_at END, created_at DESC, id LIMIT ", (limit: BigInt), ")",
    ]
}

/// Looks through so many rows at most.
pub(crate) async fn find(
    conn: &mut AsyncPgConnection,
    by: By,
    after: &[u8],
    rows: i64,
    wanted: Wanted<'_>,
) -> QueryResult<Looked> {
    let find = Find {
        by: match by {
            By::Id => "id",
            By::Outstanding => "outstanding",
            By::Principal => "principal",
            By::Lately => "lately",
        },
        after,
        rows: &rows,
        domain: &wanted.domain,
        key: &wanted.key,
        tenant: &wanted.tenant,
        no_tenant: &wanted.no_tenant,
        principal: &wanted.principal,
        resource: &wanted.resource,
        outstanding: &wanted.outstanding,
        state: &wanted.state,
        status_from: &wanted.status.map(|(from, _)| from),
        status_to: &wanted.status.map(|(_, to)| to),
        from_ms: &wanted.from_ms,
        before_ms: &wanted.before_ms,
        limit: &wanted.limit,
    };
    find.get_result(conn).await
}

statement! {
    struct IsIndexed { name: str }
    returns Bool;
    ["SELECT EXISTS (SELECT FROM pg_index WHERE indexrelid = to_regclass(", (name: Text), ") AND indisvalid)"]
}

/// Whether there is an index for this way, and finished; those of ids and of expiry are always there.
pub(crate) async fn is_indexed(conn: &mut AsyncPgConnection, by: By) -> QueryResult<bool> {
    let name = match by {
        By::Id | By::Lately => return Ok(true),
        By::Outstanding => "idempotency_keys_outstanding_idx",
        By::Principal => "idempotency_keys_principal_idx",
    };
    IsIndexed { name }.get_result(conn).await
}

/// The table in figures.
#[derive(Debug, Queryable)]
pub(crate) struct Figures {
    pub(crate) bytes: i64,
    pub(crate) live_rows: Option<i64>,
    pub(crate) dead_rows: Option<i64>,
    /// So many rows were looked through for those that are outstanding.
    pub(crate) looked_through: i64,
    pub(crate) outstanding: i64,
    pub(crate) oldest_outstanding_ms: Option<i64>,
    pub(crate) oldest_expired_ms: Option<i64>,
}

statement! {
    /// Those that have expired by their lower bound are found by the index; a few rows tell which is the oldest.
    struct Count { indexed: bool, rows: i64 }
    returns (BigInt, Nullable<BigInt>, Nullable<BigInt>, BigInt, BigInt, Nullable<BigInt>, Nullable<BigInt>);
    [
        "WITH seen AS MATERIALIZED ((SELECT state, created_at FROM idempotency_keys WHERE ", (indexed: Bool),
        " AND state = 'outstanding' LIMIT ", (rows: BigInt), ") UNION ALL (SELECT state, created_at \
         FROM idempotency_keys WHERE NOT ", (indexed: Bool), " LIMIT ", (rows: BigInt), ")), \
         expired AS MATERIALIZED (SELECT coalesce(completed_at, leased_until) + (expires_at - created_at) AS at \
         FROM idempotency_keys WHERE expires_at <= now() AND ", FINISHED, " ORDER BY expires_at LIMIT 1000) \
         SELECT pg_total_relation_size('idempotency_keys'::regclass), t.n_live_tup, t.n_dead_tup, \
         (SELECT count(*) FROM seen), (SELECT count(*) FROM seen WHERE state = 'outstanding'), \
         (SELECT ceil(extract(epoch FROM clock_timestamp() - min(created_at)) * 1000)::bigint FROM seen \
         WHERE state = 'outstanding'), \
         (SELECT ceil(extract(epoch FROM clock_timestamp() - min(at)) * 1000)::bigint FROM expired \
         WHERE at <= clock_timestamp()) \
         FROM (SELECT) AS one LEFT JOIN pg_stat_user_tables AS t ON t.relid = 'idempotency_keys'::regclass",
    ]
}

/// Looks through so many rows at most.
pub(crate) async fn figures(conn: &mut AsyncPgConnection, indexed: bool, rows: i64) -> QueryResult<Figures> {
    Count { indexed: &indexed, rows: &rows }.get_result(conn).await
}
