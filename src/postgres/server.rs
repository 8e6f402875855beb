//! What the check at start-up asks of the server.

use diesel::{
    QueryResult, Queryable,
    sql_types::{BigInt, Bool, Integer, Text},
};
use diesel_async::{RunQueryDsl, SimpleAsyncConnection};

use super::{AsyncPgConnection, statement};

/// Fails unless the table is there with every column that this version uses.
pub(crate) async fn table_is_there(conn: &mut AsyncPgConnection) -> QueryResult<()> {
    diesel::sql_query(
        "SELECT id, domain, tenant, principal, resource, key, fingerprint, recipe, recipe_version, state, owner, \
         attempt, seed, created_at, leased_until, completed_at, expires_at, status, header_names, header_values, body, \
         body_omitted, snapshot_version FROM idempotency_keys LIMIT 0",
    )
    .execute(conn)
    .await
    .map(drop)
}

/// Whether the role may do everything that a claim, a completion and the sweeper do.
pub(crate) async fn may_write(conn: &mut AsyncPgConnection) -> QueryResult<bool> {
    diesel::select(diesel::dsl::sql::<Bool>(
        "has_table_privilege('idempotency_keys', 'SELECT') AND has_table_privilege('idempotency_keys', 'INSERT') \
         AND has_table_privilege('idempotency_keys', 'UPDATE') AND has_table_privilege('idempotency_keys', 'DELETE')",
    ))
    .get_result(conn)
    .await
}

/// Whether the table has the constraint that the newest migration of this version has given it.
pub(crate) async fn has_constraint(conn: &mut AsyncPgConnection, name: &str) -> QueryResult<bool> {
    diesel::select(
        diesel::dsl::sql::<Bool>(
            "EXISTS (SELECT FROM pg_constraint WHERE conrelid = 'idempotency_keys'::regclass AND conname = ",
        )
        .bind::<Text, _>(name)
        .sql(")"),
    )
    .get_result(conn)
    .await
}

pub(crate) async fn is_replica(conn: &mut AsyncPgConnection) -> QueryResult<bool> {
    diesel::select(diesel::dsl::sql::<Bool>("pg_is_in_recovery()")).get_result(conn).await
}

pub(crate) async fn is_read_only(conn: &mut AsyncPgConnection) -> QueryResult<bool> {
    diesel::select(diesel::dsl::sql::<Bool>("current_setting('transaction_read_only')::boolean")).get_result(conn).await
}

statement! {
    /// The process that serves this connection, by a statement that is prepared under a name.
    struct Backend { nothing: i32 }
    returns Integer;
    ["SELECT pg_backend_pid() + ", (nothing: Integer)]
}

pub(crate) async fn backend(conn: &mut AsyncPgConnection) -> QueryResult<i32> {
    Backend { nothing: &0 }.get_result(conn).await
}

statement! {
    /// A transaction that has written anything waits for the disk when it commits, as far as the
    /// server's `synchronous_commit` says; all that was committed before it is on disk then.
    struct Flush { nothing: str }
    ["SELECT pg_logical_emit_message(true, 'actix_idempotency', ", (nothing: Text), ")"]
}

pub(crate) async fn flush(conn: &mut AsyncPgConnection) -> QueryResult<()> {
    Flush { nothing: "" }.execute(conn).await.map(drop)
}

/// Settings as this connection has them.
#[derive(Debug, Queryable)]
pub(crate) struct Settings {
    pub(crate) synchronous_commit: String,
    pub(crate) fsync: bool,
    pub(crate) full_page_writes: bool,
    pub(crate) autovacuum: bool,
    pub(crate) track_counts: bool,
    /// Unless a transaction says otherwise.
    pub(crate) isolation: String,
}

statement! {
    struct AskSettings { nothing: str }
    returns (Text, Bool, Bool, Bool, Bool, Text);
    [
        "SELECT current_setting('synchronous_commit'), current_setting('fsync')::boolean, \
         current_setting('full_page_writes')::boolean, current_setting('autovacuum')::boolean, \
         current_setting('track_counts')::boolean, current_setting('default_transaction_isolation') || ",
        (nothing: Text),
    ]
}

pub(crate) async fn settings(conn: &mut AsyncPgConnection) -> QueryResult<Settings> {
    AskSettings { nothing: "" }.get_result(conn).await
}

statement! {
    struct AskTime { nothing: i64 }
    returns BigInt;
    ["SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + ", (nothing: BigInt)]
}

/// What its clock says: microseconds since 1970.
pub(crate) async fn time_us(conn: &mut AsyncPgConnection) -> QueryResult<i64> {
    AskTime { nothing: &0 }.get_result(conn).await
}

/// Begins a transaction that the caller ends by closing the connection: through a pooler it holds a
/// server connection for itself.
pub(crate) async fn hold(conn: &mut AsyncPgConnection) -> QueryResult<()> {
    conn.batch_execute("BEGIN").await
}

/// Whether it is our turn to migrate, until the end of the transaction. The number is this crate's own. Nobody waits in
/// a statement, or does nothing with a snapshot: an index that is built concurrently by whoever has the turn waits for
/// every snapshot there is. Whoever comes later must see what was done meanwhile, whatever the server's default isolation
/// is.
pub(crate) fn lock_migrations(
    conn: &mut impl diesel::connection::LoadConnection<Backend = diesel::pg::Pg>,
) -> QueryResult<bool> {
    conn.batch_execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")?;
    let lock = diesel::dsl::sql::<Bool>("pg_try_advisory_xact_lock(4826201893301942)");
    let is_ours = diesel::RunQueryDsl::get_result(diesel::select(lock), conn)?;
    // The portal of a statement keeps its snapshot until the next one; that of a simple query is gone with it.
    conn.batch_execute("SET LOCAL idle_in_transaction_session_timeout = 0")?;
    Ok(is_ours)
}
