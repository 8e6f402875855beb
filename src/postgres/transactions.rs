//! Transactions that a handler writes in, and the finished row that commits with it.
//!
//! A mark that is local to the transaction (`actix_idempotency.owner`) tells that it is still the one
//! that was begun: after a COMMIT that the handler sent by itself, whatever asks for the mark
//! changes nothing.

use diesel::{
    QueryResult,
    sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, SmallInt, Text},
};
use diesel_async::{AnsiTransactionManager, AsyncConnection, RunQueryDsl, SimpleAsyncConnection, TransactionManager};
use futures_util::future::join;

use super::{
    AsyncPgConnection,
    ending::Answer,
    keys::NewClaim,
    row::{ROW_COLUMNS, Row, RowColumns},
    statement,
};

type Manager = <AsyncPgConnection as AsyncConnection>::TransactionManager;

/// What every connection of a pool starts a transaction with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) role: String,
    pub(crate) search_path: String,
    pub(crate) isolation: String,
}

statement! {
    struct AskSession { nothing: str }
    returns (Text, Text, Text);
    [
        "SELECT current_setting('role'), current_setting('search_path'), \
         current_setting('default_transaction_isolation') || ", (nothing: Text)
    ]
}

pub(crate) async fn session(conn: &mut AsyncPgConnection) -> QueryResult<Session> {
    let (role, search_path, isolation) = AskSession { nothing: "" }.get_result(conn).await?;
    Ok(Session { role, search_path, isolation })
}

/// Begins through diesel's transaction manager, so that a connection whose transaction was dropped is
/// not used again. `mark` is hexadecimal; `isolation` is SQL of ours, or empty for the server's default.
pub(crate) async fn begin(
    conn: &mut AsyncPgConnection,
    isolation: &str,
    idle_timeout_ms: i64,
    mark: &str,
) -> QueryResult<()> {
    let sql = format!(
        "BEGIN {isolation}; SET LOCAL idle_in_transaction_session_timeout = {idle_timeout_ms}; \
         SET LOCAL actix_idempotency.owner = '{mark}'"
    );
    AnsiTransactionManager::begin_transaction_sql(conn, &sql).await
}

/// Begins once nobody else is in a transaction with the same turn, which ends with it. What follows sees what they
/// have done, whatever the server's default isolation is.
pub(crate) async fn begin_in_turn(
    conn: &mut AsyncPgConnection,
    turn: i64,
    patience_ms: i64,
    idle_timeout_ms: i64,
) -> QueryResult<()> {
    let sql = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = {idle_timeout_ms}; \
         SET LOCAL lock_timeout = {patience_ms}; SELECT pg_advisory_xact_lock({turn})"
    );
    AnsiTransactionManager::begin_transaction_sql(conn, &sql).await
}

pub(crate) async fn rollback(conn: &mut AsyncPgConnection) -> QueryResult<()> {
    Manager::rollback_transaction(conn).await
}

/// Only right after a statement that was checked: COMMIT of an aborted transaction says OK and rolls back.
pub(crate) async fn commit(conn: &mut AsyncPgConnection) -> QueryResult<()> {
    Manager::commit_transaction(conn).await
}

/// How deep transactions nest here: 1 is a transaction, more has savepoints in it. `None` where the
/// manager has lost track, as when a future was dropped while its SAVEPOINT was on its way.
pub(crate) fn depth(conn: &mut AsyncPgConnection) -> Option<u32> {
    // With nothing but that against it: an open transaction would count as broken as well.
    let status = std::mem::take(Manager::transaction_manager_status_mut(conn));
    let lost_track = Manager::is_broken_transaction_manager(conn);
    let depth = status.transaction_depth().ok().map(|depth| depth.map_or(0, u32::from));
    *Manager::transaction_manager_status_mut(conn) = status;
    depth.filter(|_| !lost_track)
}

statement! {
    struct SetLocal { names: &'a [String], values: &'a [String] }
    returns Text;
    [
        "SELECT set_config(setting.name, setting.value, true) FROM unnest(",
        (names: Array<Text>), ", ", (values: Array<Text>), ") AS setting (name, value)",
    ]
}

/// `SET LOCAL` for each.
pub(crate) async fn set_local(conn: &mut AsyncPgConnection, names: &[String], values: &[String]) -> QueryResult<()> {
    SetLocal { names: &names, values: &values }.load::<String>(conn).await.map(drop)
}

statement! {
    struct Pin { id: [u8], owner: [u8] }
    returns Integer;
    [
        "SELECT attempt FROM idempotency_keys WHERE id = ", (id: Binary), " AND owner = ", (owner: Binary),
        " AND state = 'outstanding' FOR NO KEY UPDATE",
    ]
}

/// Locks the row of a claim in a transaction whose snapshot never changes: a renewal meanwhile would
/// make its completion fail. `false`: somebody else has the key.
pub(crate) async fn pin(conn: &mut AsyncPgConnection, id: &[u8], owner: &[u8]) -> QueryResult<bool> {
    let rows: Vec<i32> = Pin { id, owner }.load(conn).await?;
    Ok(!rows.is_empty())
}

statement! {
    /// Whether role and search path are those that the transaction began with; and from now on nobody waits
    /// longer than this for a row that somebody has locked.
    struct Prepare { lock_timeout_ms: i64, role: str, search_path: str }
    returns Bool;
    [
        "SELECT set_config('lock_timeout', ", (lock_timeout_ms: BigInt), "::text, true) IS NOT NULL \
         AND current_setting('role') = ", (role: Text), " AND current_setting('search_path') = ", (search_path: Text)
    ]
}

/// Undoes `SET LOCAL ROLE` and `SET LOCAL search_path` of the handler's: the statements after it mean our
/// table, and need our rights. Asked first, because to set them costs more than to ask.
async fn prepare(conn: &AsyncPgConnection, session: &Session, lock_timeout_ms: i64) -> QueryResult<()> {
    let Session { role, search_path, .. } = session;
    let mut line = conn;
    let as_begun: bool = Prepare { lock_timeout_ms: &lock_timeout_ms, role, search_path }.get_result(&mut line).await?;
    if as_begun {
        return Ok(());
    }
    let path = if search_path.is_empty() { "''" } else { search_path };
    let role = role.replace('\'', "''");
    line.batch_execute(&format!("SET LOCAL ROLE '{role}'; SET LOCAL search_path TO {path}")).await
}

statement! {
    /// As [`complete`](super::ending::complete), in the transaction that bears the mark.
    struct CompleteWithin {
        id: [u8], owner: [u8], mark: str, status: i16, header_names: &'a [&'a str], header_values: &'a [&'a [u8]],
        body: Option<&'a [u8]>, body_omitted: bool, snapshot_version: i16,
    }
    [
        "UPDATE idempotency_keys SET state = 'completed', completed_at = greatest(created_at, clock_timestamp()), \
         status = ",
        (status: SmallInt), ", header_names = ", (header_names: Array<Text>), ", header_values = ",
        (header_values: Array<Binary>), ", body = ", (body: Nullable<Binary>), ", body_omitted = ",
        (body_omitted: Bool), ", snapshot_version = ", (snapshot_version: SmallInt),
        " WHERE id = ", (id: Binary), " AND owner = ", (owner: Binary), " AND state = 'outstanding' \
         AND (", (mark: Text), " = '' OR current_setting('actix_idempotency.owner', true) = ", (mark: Text), ")",
    ]
}

fn complete_statement<'a>(
    id: &'a [u8],
    owner: &'a [u8],
    mark: &'a str,
    answer: &'a Answer<'a>,
    omitted: &'a bool,
) -> CompleteWithin<'a> {
    CompleteWithin {
        id,
        owner,
        mark,
        status: &answer.status,
        header_names: &answer.header_names,
        header_values: &answer.header_values,
        body: &answer.body,
        body_omitted: omitted,
        snapshot_version: &answer.snapshot_version,
    }
}

/// Completes in the transaction that bears the mark. `false`: the lease was lost, or this is no longer
/// that transaction.
pub(crate) async fn complete_within(
    conn: &AsyncPgConnection,
    session: &Session,
    id: &[u8],
    owner: &[u8],
    mark: &str,
    answer: &Answer<'_>,
    lock_timeout_ms: i64,
) -> QueryResult<bool> {
    let omitted = answer.body.is_none();
    let statement = complete_statement(id, owner, mark, answer, &omitted);
    let mut line = conn;
    prepare(conn, session, lock_timeout_ms).await?;
    Ok(statement.execute(&mut line).await? == 1)
}

/// Completes in a transaction of the caller's own, whatever it has set there.
pub(crate) async fn complete_in(
    conn: &mut AsyncPgConnection,
    id: &[u8],
    owner: &[u8],
    answer: &Answer<'_>,
) -> QueryResult<bool> {
    let omitted = answer.body.is_none();
    Ok(complete_statement(id, owner, "", answer, &omitted).execute(conn).await? == 1)
}

statement! {
    struct AskMark { mark: str }
    returns Bool;
    ["SELECT coalesce(current_setting('actix_idempotency.owner', true) = ", (mark: Text), ", false)"]
}

/// Whether this is still the transaction that bears the mark; fails where it is aborted.
pub(crate) async fn is_marked(conn: &AsyncPgConnection, mark: &str) -> QueryResult<bool> {
    let mut line = conn;
    AskMark { mark }.get_result(&mut line).await
}

statement! {
    /// The ticket is a mark in the transaction by which the look tells that it came later.
    struct TryLock { ticket: str, over: bool, id: [u8], lock: i64 }
    returns (Text, Nullable<Bool>);
    [
        "SELECT set_config('actix_idempotency.ticket', ", (ticket: Text), ", true), CASE WHEN NOT ", (over: Bool),
        " AND EXISTS (SELECT FROM idempotency_keys WHERE id = ", (id: Binary),
        ") THEN NULL ELSE pg_try_advisory_xact_lock(", (lock: BigInt), ") END",
    ]
}

statement! {
    struct LookAfter { ticket: str, id: [u8], not_after_ms: Option<i64> }
    returns (Bool, Integer, Bool, Nullable<RowColumns>);
    [
        "SELECT coalesce(current_setting('actix_idempotency.ticket', true) = ", (ticket: Text),
        ", false), pg_backend_pid(), coalesce(timestamptz 'epoch' + ", (not_after_ms: Nullable<BigInt>),
        " * interval '1 millisecond' > clock_timestamp(), true), ", ROW_COLUMNS,
        " FROM (SELECT) AS one LEFT JOIN idempotency_keys AS k ON k.id = ", (id: Binary),
    ]
}

/// What a transaction knows of a key before it runs anything.
pub(crate) struct Looked {
    /// Whether the lock is ours until the end of the transaction. `None`: there is a row, and the lock was not asked for.
    pub(crate) locked: Option<bool>,
    /// Whether there still is time to claim the key.
    pub(crate) in_good_time: bool,
    pub(crate) row: Option<Row>,
    /// The process that serves this connection.
    pub(crate) backend: i32,
}

/// Asks for the lock, and then looks, in one flight: where transactions are READ COMMITTED, what was committed before the
/// lock was free is seen. Waits for nobody. `over` a row too; otherwise whoever finds one has no lock that
/// another would miss, while he is told what the row says.
pub(crate) async fn lock_and_look(
    conn: &AsyncPgConnection,
    lock: i64,
    id: &[u8],
    not_after_ms: Option<i64>,
    over: bool,
) -> QueryResult<Looked> {
    let ticket = hex::encode(rand::random::<[u8; 8]>());
    let asked = TryLock { ticket: &ticket, over: &over, id, lock: &lock };
    let look = || LookAfter { ticket: &ticket, id, not_after_ms: &not_after_ms };
    let (mut first, mut second) = (conn, conn);
    let (asked, looked) = join(asked.get_result(&mut first), look().get_result(&mut second)).await;
    let (_, locked): (String, Option<bool>) = asked?;
    let mut looked: (bool, i32, bool, Option<Row>) = looked?;
    if !looked.0 {
        // It had to be prepared less, and has overtaken.
        looked = look().get_result(&mut first).await?;
    }
    let (_, backend, in_good_time, row) = looked;
    Ok(Looked { locked, in_good_time, row, backend })
}

/// How a finished row is written, over nothing or over the row that was seen.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) owner: Vec<u8>,
    pub(crate) state: String,
}

impl Seen {
    pub(crate) fn of(row: &Row) -> Self {
        Self { owner: row.owner.clone(), state: row.state.clone() }
    }
}

statement! {
    /// One row version, written once. Over a row that has expired or was released it replaces exactly
    /// the one that was seen; without one the second condition of DO UPDATE matches nothing.
    struct Finish {
        id: [u8], domain: str, tenant: Option<&'a str>, principal: Option<&'a str>, resource: str, key: str,
        fingerprint: [u8], recipe: [u8], recipe_version: i16, owner: [u8], seed: [u8], retention_ms: Option<i64>,
        not_after_ms: Option<i64>, request_id: Option<&'a str>, status: i16, header_names: &'a [&'a str],
        header_values: &'a [&'a [u8]], body: Option<&'a [u8]>, body_omitted: bool, snapshot_version: i16, mark: str, seen_owner: Option<&'a [u8]>, seen_state: Option<&'a str>,
    }
    [
        "INSERT INTO idempotency_keys AS k (id, domain, tenant, principal, resource, key, fingerprint, recipe, \
         recipe_version, state, owner, attempt, seed, created_at, leased_until, completed_at, expires_at, status, \
         header_names, header_values, body, body_omitted, snapshot_version, request_id) SELECT ",
        (id: Binary), ", ", (domain: Text), ", ", (tenant: Nullable<Text>), ", ", (principal: Nullable<Text>), ", ",
        (resource: Text), ", ", (key: Text), ", ", (fingerprint: Binary), ", ", (recipe: Binary), ", ",
        (recipe_version: SmallInt), ", 'completed', ", (owner: Binary), ", 1, ", (seed: Binary),
        ", t.now, t.now, t.now, greatest(t.now + ", (retention_ms: Nullable<BigInt>),
        " * interval '1 millisecond', CASE WHEN ", (retention_ms: Nullable<BigInt>),
        " IS NOT NULL THEN timestamptz 'epoch' + ", (not_after_ms: Nullable<BigInt>),
        " * interval '1 millisecond' END), ",
        (status: SmallInt), ", ", (header_names: Array<Text>), ", ", (header_values: Array<Binary>), ", ",
        (body: Nullable<Binary>), ", ", (body_omitted: Bool), ", ", (snapshot_version: SmallInt),
        ", ", (request_id: Nullable<Text>), " FROM (SELECT clock_timestamp() AS now) AS t WHERE ", (mark: Text),
        " = '' OR current_setting('actix_idempotency.owner', true) = ", (mark: Text),
        " ON CONFLICT (id) DO UPDATE SET fingerprint = excluded.fingerprint, recipe = excluded.recipe, \
         recipe_version = excluded.recipe_version, state = excluded.state, owner = excluded.owner, \
         attempt = excluded.attempt, seed = excluded.seed, created_at = excluded.created_at, \
         leased_until = excluded.leased_until, completed_at = excluded.completed_at, \
         expires_at = excluded.expires_at, status = excluded.status, header_names = excluded.header_names, \
         header_values = excluded.header_values, body = excluded.body, body_omitted = excluded.body_omitted, \
         snapshot_version = excluded.snapshot_version, request_id = excluded.request_id, acted = excluded.acted \
         WHERE k.owner = ", (seen_owner: Nullable<Binary>), " AND k.state = ", (seen_state: Nullable<Text>),
    ]
}

/// Whether the finished row is now there as ours; `false`: somebody was first, or the mark is gone.
///
/// `marked` where this is the transaction of a handler's `IdemTx`.
pub(crate) async fn finish(
    conn: &AsyncPgConnection,
    new: &NewClaim<'_>,
    answer: &Answer<'_>,
    marked: Option<(&Session, &str)>,
    seen: Option<&Seen>,
) -> QueryResult<bool> {
    let mark = marked.map_or("", |(_, mark)| mark);
    let seen_owner = seen.map(|seen| &seen.owner[..]);
    let seen_state = seen.map(|seen| &seen.state[..]);
    let omitted = answer.body.is_none();
    let finish = Finish {
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
        retention_ms: &new.retention_ms,
        not_after_ms: &new.not_after_ms,
        request_id: &new.request_id,
        status: &answer.status,
        header_names: &answer.header_names,
        header_values: &answer.header_values,
        body: &answer.body,
        body_omitted: &omitted,
        snapshot_version: &answer.snapshot_version,
        mark,
        seen_owner: &seen_owner,
        seen_state: &seen_state,
    };
    let mut line = conn;
    if let Some((session, _)) = marked {
        prepare(conn, session, new.lock_timeout_ms).await?;
    }
    Ok(finish.execute(&mut line).await? == 1)
}
