//! The life of a row until it ends: claimed, looked at, renewed, taken over.
//!
//! Only the database's clock decides. Every write after the claim is fenced (`id`, `owner`) and
//! pinned (`state`): 0 rows is an answer, and says that somebody else was first. Nothing here waits
//! for ever: what can meet a row lock passes it by (SKIP LOCKED) or sets `lock_timeout` for the one
//! transaction that the statement is.

use diesel::{
    QueryResult,
    sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, SmallInt, Text},
};
use diesel_async::RunQueryDsl;

use super::{
    AsyncPgConnection,
    row::{NOBODY, ROW_COLUMNS, Row, RowColumns},
    statement,
};

/// What a claim writes.
#[derive(Clone, Copy)]
pub(crate) struct NewClaim<'a> {
    pub(crate) id: &'a [u8],
    pub(crate) domain: &'a str,
    pub(crate) tenant: Option<&'a str>,
    pub(crate) principal: Option<&'a str>,
    pub(crate) resource: &'a str,
    pub(crate) key: &'a str,
    pub(crate) fingerprint: &'a [u8],
    pub(crate) recipe: &'a [u8],
    pub(crate) recipe_version: i16,
    pub(crate) owner: &'a [u8],
    pub(crate) seed: &'a [u8],
    pub(crate) lease_ms: i64,
    /// `None`: for ever.
    pub(crate) retention_ms: Option<i64>,
    /// When it can no longer be claimed, in milliseconds since 1970; the row lives longer. `None`: it always can.
    pub(crate) not_after_ms: Option<i64>,
    /// Of the request; for the logs.
    pub(crate) request_id: Option<&'a str>,
    pub(crate) lock_timeout_ms: i64,
    /// Whether the commit waits for the disk.
    pub(crate) is_durable: bool,
}

statement! {
    /// The settings are local to the transaction that this statement is; the join makes them take effect
    /// before the row is inserted.
    struct Insert {
        lock_timeout_ms: i64, is_durable: bool, id: [u8], domain: str, tenant: Option<&'a str>, principal: Option<&'a str>,
        resource: str, key: str, fingerprint: [u8], recipe: [u8], recipe_version: i16, owner: [u8],
        seed: [u8], lease_ms: i64, retention_ms: Option<i64>, not_after_ms: Option<i64>, request_id: Option<&'a str>,
    }
    [
        "WITH lock AS MATERIALIZED (SELECT set_config('lock_timeout', ", (lock_timeout_ms: BigInt), "::text, true) || \
         set_config('synchronous_commit', CASE WHEN ", (is_durable: Bool),
        " THEN current_setting('synchronous_commit') ELSE 'off' END, true) AS set) \
         INSERT INTO idempotency_keys (id, domain, tenant, principal, resource, key, fingerprint, recipe, \
         recipe_version, state, owner, attempt, seed, created_at, leased_until, expires_at, request_id) SELECT ",
        (id: Binary), ", ", (domain: Text), ", ", (tenant: Nullable<Text>), ", ", (principal: Nullable<Text>), ", ",
        (resource: Text), ", ", (key: Text), ", ", (fingerprint: Binary), ", ", (recipe: Binary), ", ",
        (recipe_version: SmallInt), ", 'outstanding', ", (owner: Binary), ", 1, ", (seed: Binary), ", now(), now() + ",
        (lease_ms: BigInt), " * interval '1 millisecond', greatest(now() + ",
        (retention_ms: Nullable<BigInt>), " * interval '1 millisecond', CASE WHEN ", (retention_ms: Nullable<BigInt>),
        " IS NOT NULL THEN timestamptz 'epoch' + ", (not_after_ms: Nullable<BigInt>), " * interval '1 millisecond' END), ",
        (request_id: Nullable<Text>), " FROM lock WHERE lock.set IS NOT NULL \
         AND coalesce(timestamptz 'epoch' + ", (not_after_ms: Nullable<BigInt>),
        " * interval '1 millisecond' > clock_timestamp(), true) ON CONFLICT (id) DO NOTHING",
    ]
}

/// Whether the row is now ours; `false` where there is one already, and where it is too late to claim it.
pub(crate) async fn insert(conn: &mut AsyncPgConnection, new: &NewClaim<'_>) -> QueryResult<bool> {
    let rows = Insert {
        lock_timeout_ms: &new.lock_timeout_ms,
        is_durable: &new.is_durable,
        id: new.id,
        domain: new.domain,
        tenant: &new.tenant,
        principal: &new.principal,
        resource: new.resource,
        key: new.key,
        fingerprint: new.fingerprint,
        recipe: new.recipe,
        recipe_version: &new.recipe_version,
        owner: new.owner,
        seed: new.seed,
        lease_ms: &new.lease_ms,
        retention_ms: &new.retention_ms,
        not_after_ms: &new.not_after_ms,
        request_id: &new.request_id,
    }
    .execute(conn)
    .await?;
    Ok(rows == 1)
}

statement! {
    struct AskIfPast { at_ms: i64 }
    returns Bool;
    ["SELECT clock_timestamp() >= timestamptz 'epoch' + ", (at_ms: BigInt), " * interval '1 millisecond'"]
}

/// Whether this time, in milliseconds since 1970, has come.
pub(crate) async fn is_past(conn: &mut AsyncPgConnection, at_ms: i64) -> QueryResult<bool> {
    AskIfPast { at_ms: &at_ms }.get_result(conn).await
}

statement! {
    struct Look { id: [u8] }
    returns RowColumns;
    ["SELECT ", ROW_COLUMNS, " FROM idempotency_keys AS k WHERE k.id = ", (id: Binary)]
}

/// Never waits for a lock, and writes nothing.
pub(crate) async fn look(conn: &mut AsyncPgConnection, id: &[u8]) -> QueryResult<Option<Row>> {
    let rows: Vec<Row> = Look { id }.load(conn).await?;
    Ok(rows.into_iter().next())
}

statement! {
    /// LIMIT makes it one look for each id, planned as that of [`Look`] is: a join would be planned for the
    /// size of the table at that time, and kept.
    struct LookAtAll { ids: &'a [&'a [u8]] }
    returns (Binary, RowColumns);
    [
        "SELECT k.id, ", ROW_COLUMNS, " FROM unnest((SELECT ", (ids: Array<Binary>), ")) AS asked (id), \
         LATERAL (SELECT * FROM idempotency_keys AS k WHERE k.id = asked.id LIMIT 1) AS k",
    ]
}

/// As [`look`], at several rows; those that are not there are missing in what is returned.
pub(crate) async fn look_at_all(conn: &mut AsyncPgConnection, ids: &[&[u8]]) -> QueryResult<Vec<(Vec<u8>, Row)>> {
    LookAtAll { ids: &ids }.load(conn).await
}

statement! {
    /// One statement for every way of taking over: expired, released, lapsed. Which of them the caller
    /// saw is pinned by `owner` and `state`; that one of them still holds is asked again here. What an attempt that
    /// has died has done is unknown from then on.
    struct TakeOver {
        id: [u8], seen_owner: [u8], seen_state: str, owner: [u8], attempt: i32, seed: [u8], fingerprint: [u8],
        recipe: [u8], recipe_version: i16, lease_ms: i64, retention_ms: Option<i64>, not_after_ms: Option<i64>,
        request_id: Option<&'a str>, anew: bool, again: bool,
    }
    [
        "WITH seen AS MATERIALIZED (SELECT id FROM idempotency_keys WHERE id = ", (id: Binary),
        " AND owner = ", (seen_owner: Binary), " AND state = ", (seen_state: Text),
        " AND (state = 'released' OR state = 'outstanding' AND leased_until <= clock_timestamp() \
         OR coalesce(completed_at, leased_until) + (expires_at - created_at) <= clock_timestamp() OR ", (again: Bool),
        ") AND coalesce(timestamptz 'epoch' + ", (not_after_ms: Nullable<BigInt>),
        " * interval '1 millisecond' > clock_timestamp(), true) FOR NO KEY UPDATE SKIP LOCKED) \
         UPDATE idempotency_keys AS k SET state = 'outstanding', owner = ", (owner: Binary),
        ", attempt = ", (attempt: Integer), ", seed = ", (seed: Binary), ", fingerprint = ", (fingerprint: Binary),
        ", recipe = ", (recipe: Binary), ", recipe_version = ", (recipe_version: SmallInt),
        ", leased_until = now() + ", (lease_ms: BigInt), " * interval '1 millisecond', \
         created_at = CASE WHEN ", (anew: Bool), " THEN now() ELSE created_at END, \
         expires_at = CASE WHEN ", (anew: Bool), " THEN greatest(now() + ", (retention_ms: Nullable<BigInt>),
        " * interval '1 millisecond', CASE WHEN ", (retention_ms: Nullable<BigInt>), " IS NOT NULL THEN \
         timestamptz 'epoch' + ", (not_after_ms: Nullable<BigInt>), " * interval '1 millisecond' END) ELSE expires_at END, \
         request_id = CASE WHEN ", (anew: Bool), " THEN ", (request_id: Nullable<Text>),
        " ELSE k.request_id END, acted = (k.acted OR k.state = 'outstanding') AND NOT ", (anew: Bool), ", completed_at = NULL, status = NULL, header_names = NULL, header_values = NULL, body = NULL, \
         body_omitted = false, snapshot_version = NULL \
         FROM seen WHERE k.id = seen.id AND k.owner = ", (seen_owner: Binary), " AND k.state = ", (seen_state: Text),
    ]
}

/// How a row is taken over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Takeover<'a> {
    pub(crate) seen_owner: &'a [u8],
    pub(crate) seen_state: &'a str,
    pub(crate) attempt: i32,
    pub(crate) seed: &'a [u8],
    /// Another operation than the row was about: its retention starts now.
    pub(crate) anew: bool,
    /// Also where the row is completed and has not expired.
    pub(crate) again: bool,
}

/// Whether the row is now ours. Of any number of racers one wins; the others find another owner.
pub(crate) async fn take_over(
    conn: &mut AsyncPgConnection,
    new: &NewClaim<'_>,
    over: &Takeover<'_>,
) -> QueryResult<bool> {
    let rows = TakeOver {
        id: new.id,
        seen_owner: over.seen_owner,
        seen_state: over.seen_state,
        owner: new.owner,
        attempt: &over.attempt,
        seed: over.seed,
        fingerprint: new.fingerprint,
        recipe: new.recipe,
        recipe_version: &new.recipe_version,
        lease_ms: &new.lease_ms,
        retention_ms: &new.retention_ms,
        not_after_ms: &new.not_after_ms,
        request_id: &new.request_id,
        anew: &over.anew,
        again: &over.again,
    }
    .execute(conn)
    .await?;
    Ok(rows == 1)
}

statement! {
    struct StillOutstanding { ids: &'a [&'a [u8]], owners: &'a [&'a [u8]] }
    returns (Binary, Binary);
    [
        "SELECT claim.id, claim.owner FROM unnest((SELECT ", (ids: Array<Binary>), "), (SELECT ",
        (owners: Array<Binary>), ")) AS claim (id, owner), LATERAL (SELECT FROM idempotency_keys AS k \
         WHERE k.id = claim.id AND k.owner = claim.owner AND k.state = 'outstanding' LIMIT 1) AS k",
    ]
}

/// Which of these claims are there.
pub(crate) async fn still_outstanding(
    conn: &mut AsyncPgConnection,
    ids: &[&[u8]],
    owners: &[&[u8]],
) -> QueryResult<Vec<(Vec<u8>, Vec<u8>)>> {
    StillOutstanding { ids: &ids, owners: &owners }.load(conn).await
}

statement! {
    /// A row that is locked is passed by: it is renewed the next time, and holds up no other. One that is
    /// held for longer, by an attempt that has just failed, stays so.
    struct Renew { ids: &'a [&'a [u8]], owners: &'a [&'a [u8]], lease_ms: &'a [i64] }
    returns Binary;
    [
        "WITH due AS MATERIALIZED (SELECT k.id, lease.ms FROM unnest(", (ids: Array<Binary>), ", ",
        (owners: Array<Binary>), ", ", (lease_ms: Array<BigInt>), ") AS lease (id, owner, ms) \
         JOIN idempotency_keys AS k ON k.id = lease.id AND k.owner = lease.owner AND k.state = 'outstanding' \
         FOR NO KEY UPDATE OF k SKIP LOCKED) \
         UPDATE idempotency_keys AS k SET leased_until = \
         greatest(k.leased_until, clock_timestamp() + due.ms * interval '1 millisecond') \
         FROM due WHERE k.id = due.id AND k.state = 'outstanding' RETURNING k.id",
    ]
}

/// The ids of the leases that go on. Of the others somebody holds the row, or has it.
pub(crate) async fn renew(
    conn: &mut AsyncPgConnection,
    ids: &[&[u8]],
    owners: &[&[u8]],
    lease_ms: &[i64],
) -> QueryResult<Vec<Vec<u8>>> {
    Renew { ids: &ids, owners: &owners, lease_ms: &lease_ms }.load(conn).await
}

/// The locks under which keys run without a row, as numbers. Read from the list of all locks, which every role may read:
/// whoever asked by trying one would have it for a moment, and a claim would miss it.
const HELD: &str = "SELECT (held.classid::bigint << 32) | held.objid::bigint FROM pg_locks AS held \
     WHERE held.locktype = 'advisory' AND held.objsubid = 1 AND held.mode = 'ExclusiveLock' AND held.granted \
     AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())";

statement! {
    struct IsHeld { lock: i64 }
    returns Bool;
    ["SELECT ", (lock: BigInt), " IN (", HELD, ")"]
}

/// Whether somebody runs the key of this lock.
pub(crate) async fn is_held(conn: &mut AsyncPgConnection, lock: i64) -> QueryResult<bool> {
    IsHeld { lock: &lock }.get_result(conn).await
}

statement! {
    struct IsHeldBy { lock: i64, backend: i32 }
    returns Bool;
    ["SELECT ", (lock: BigInt), " IN (", HELD, " AND held.pid = ", (backend: Integer), ")"]
}

/// Whether the transaction of this backend still has the lock.
pub(crate) async fn is_held_by(conn: &mut AsyncPgConnection, lock: i64, backend: i32) -> QueryResult<bool> {
    IsHeldBy { lock: &lock, backend: &backend }.get_result(conn).await
}

statement! {
    /// The locks are read once for all, and only where one of the keys has no row that tells.
    struct Settled { ids: &'a [&'a [u8]], locks: &'a [Option<i64>], nobody: [u8] }
    returns Binary;
    [
        "SELECT waited.id FROM unnest(", (ids: Array<Binary>), ", ", (locks: Array<Nullable<BigInt>>),
        ") AS waited (id, lock) LEFT JOIN idempotency_keys AS k ON k.id = waited.id \
         WHERE k.state = 'completed' OR k.owner = ", (nobody: Binary), " OR (k.id IS NULL OR k.state <> 'outstanding' \
         OR k.leased_until <= clock_timestamp()) \
         AND (waited.lock IS NULL OR waited.lock NOT IN (", HELD, "))",
    ]
}

/// Which of these keys somebody who waits for them should look at again. The lock is that of a request that may run
/// without a row. Nobody misses it for this.
pub(crate) async fn settled(
    conn: &mut AsyncPgConnection,
    ids: &[&[u8]],
    locks: &[Option<i64>],
) -> QueryResult<Vec<Vec<u8>>> {
    Settled { ids: &ids, locks: &locks, nobody: &NOBODY }.load(conn).await
}

statement! {
    struct Count { tenant: Option<&'a str>, principal: Option<&'a str> }
    returns (BigInt, BigInt);
    [
        "SELECT count(*) FILTER (WHERE state = 'outstanding' AND leased_until > clock_timestamp()), count(*) \
         FROM idempotency_keys WHERE domain IN ('http', 'token') AND (principal = ", (principal: Nullable<Text>),
        " OR principal IS NULL AND ", (principal: Nullable<Text>), " IS NULL) AND tenant IS NOT DISTINCT FROM ",
        (tenant: Nullable<Text>),
        " AND coalesce(coalesce(completed_at, leased_until) + (expires_at - created_at) > clock_timestamp(), true)",
    ]
}

/// How many keys of a principal are outstanding, and how many have not expired.
pub(crate) async fn count(
    conn: &mut AsyncPgConnection,
    tenant: Option<&str>,
    principal: Option<&str>,
) -> QueryResult<(i64, i64)> {
    Count { tenant: &tenant, principal: &principal }.get_result(conn).await
}
