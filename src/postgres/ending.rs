//! How an attempt ends: completed, released, or held until it expires. Each of them is fenced (`id`, `owner`)
//! and pinned (`state`), and sets `lock_timeout` for the one transaction that the statement is.

use diesel::{
    QueryResult,
    sql_types::{Array, BigInt, Binary, Bool, Nullable, SmallInt, Text},
};
use diesel_async::RunQueryDsl;

use super::{AsyncPgConnection, row::NOBODY, statement};

/// What a completion stores.
#[derive(Clone, Copy)]
pub(crate) struct Answer<'a> {
    pub(crate) status: i16,
    pub(crate) header_names: &'a [&'a str],
    pub(crate) header_values: &'a [&'a [u8]],
    pub(crate) body: Option<&'a [u8]>,
    pub(crate) snapshot_version: i16,
}

statement! {
    struct Complete {
        lock_timeout_ms: i64, id: [u8], owner: [u8], status: i16, header_names: &'a [&'a str],
        header_values: &'a [&'a [u8]], body: Option<&'a [u8]>, body_omitted: bool, snapshot_version: i16,
    }
    [
        "WITH lock AS MATERIALIZED (SELECT set_config('lock_timeout', ", (lock_timeout_ms: BigInt), "::text, true) AS set) \
         UPDATE idempotency_keys SET state = 'completed', completed_at = greatest(created_at, clock_timestamp()), status = ",
        (status: SmallInt), ", header_names = ", (header_names: Array<Text>), ", header_values = ",
        (header_values: Array<Binary>), ", body = ", (body: Nullable<Binary>), ", body_omitted = ",
        (body_omitted: Bool), ", snapshot_version = ", (snapshot_version: SmallInt),
        " FROM lock WHERE lock.set IS NOT NULL AND id = ", (id: Binary), " AND owner = ", (owner: Binary),
        " AND state = 'outstanding'",
    ]
}

/// Whether the answer is stored; `false`: the lease was lost.
pub(crate) async fn complete(
    conn: &mut AsyncPgConnection,
    id: &[u8],
    owner: &[u8],
    answer: &Answer<'_>,
    lock_timeout_ms: i64,
) -> QueryResult<bool> {
    let rows = Complete {
        lock_timeout_ms: &lock_timeout_ms,
        id,
        owner,
        status: &answer.status,
        header_names: &answer.header_names,
        header_values: &answer.header_values,
        body: &answer.body,
        body_omitted: &answer.body.is_none(),
        snapshot_version: &answer.snapshot_version,
    }
    .execute(conn)
    .await?;
    Ok(rows == 1)
}

statement! {
    struct Release { lock_timeout_ms: i64, id: [u8], owner: [u8], status: Option<i16>, acted: Option<bool> }
    [
        "WITH lock AS MATERIALIZED (SELECT set_config('lock_timeout', ", (lock_timeout_ms: BigInt), "::text, true) AS set) \
         UPDATE idempotency_keys SET state = 'released', \
         leased_until = least(leased_until, clock_timestamp()), status = ",
        (status: Nullable<SmallInt>), ", acted = coalesce(", (acted: Nullable<Bool>), ", acted)",
        " FROM lock WHERE lock.set IS NOT NULL AND id = ", (id: Binary), " AND owner = ", (owner: Binary),
        " AND state = 'outstanding'",
    ]
}

/// Whether the key is free again; `false`: the lease was lost, or the row is completed.
pub(crate) async fn release(
    conn: &mut AsyncPgConnection,
    id: &[u8],
    owner: &[u8],
    status: Option<i16>,
    acted: Option<bool>,
    lock_timeout_ms: i64,
) -> QueryResult<bool> {
    let rows =
        Release { lock_timeout_ms: &lock_timeout_ms, id, owner, status: &status, acted: &acted }.execute(conn).await?;
    Ok(rows == 1)
}

statement! {
    /// Nobody owns it from now on, which is how it is known.
    struct Hold { lock_timeout_ms: i64, id: [u8], owner: [u8], nobody: [u8], for_retention: bool }
    [
        "WITH lock AS MATERIALIZED (SELECT set_config('lock_timeout', ", (lock_timeout_ms: BigInt), "::text, true) AS set) \
         UPDATE idempotency_keys SET owner = ", (nobody: Binary), ", leased_until = CASE WHEN ", (for_retention: Bool),
        " THEN coalesce(clock_timestamp() + (expires_at - created_at), 'infinity'::timestamptz) ELSE leased_until END \
         FROM lock WHERE lock.set IS NOT NULL AND id = ", (id: Binary), " AND owner = ", (owner: Binary),
        " AND state = 'outstanding'",
    ]
}

/// Whether the key now stays outstanding, run by nobody, for its retention or until its lease ends; `false`: the lease was
/// lost.
pub(crate) async fn hold(
    conn: &mut AsyncPgConnection,
    id: &[u8],
    owner: &[u8],
    for_retention: bool,
    lock_timeout_ms: i64,
) -> QueryResult<bool> {
    let hold = Hold { lock_timeout_ms: &lock_timeout_ms, id, owner, nobody: &NOBODY, for_retention: &for_retention };
    Ok(hold.execute(conn).await? == 1)
}
