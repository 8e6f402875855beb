//! What can be known at start-up about the store, and what to change.
//!
//! [`Idempotency::check`](crate::Idempotency::check) is an error for what no request could be served with: no connection, a
//! replica, a server that may not be written to, a table of keys that is missing, older or forbidden, a pooler that loses
//! prepared statements. Everything else is a [`Finding`] of its [`Report`]. Warnings and dangers are said in the log as
//! well, each once to an engine, as the event `advice`.
//!
//! | `name` | severity | what is so |
//! |---|---|---|
//! | `synchronous-commit-off` | danger | commits do not wait for the disk: a crash of the database loses answers that were sent |
//! | `fsync-off` | danger | nothing waits for the disk: a crash of the machine loses anything |
//! | `full-page-writes-off` | danger | a crash of the machine can leave half-written pages |
//! | `unlogged-table` | danger | a crash of the database empties a table of this crate |
//! | `autovacuum-off` | warning | switched off for the server, or for a table of this crate: it grows without end |
//! | `track-counts-off` | warning | autovacuum does not learn what it should remove |
//! | `clock-skew` | warning | the clocks of database and process are more than [`MAX_SKEW`] apart |
//! | `table-outdated` | warning | a table of steps, inbox or outbox is of an older version |
//! | `index-invalid` | warning | an index was not finished, as by a `CREATE INDEX CONCURRENTLY` that failed |
//! | `table-missing` | notice | there is no table for steps, inbox or outbox |
//! | `table-forbidden` | notice | this role may not use it |
//! | `isolation` | notice | transactions are REPEATABLE READ or SERIALIZABLE unless they say otherwise |
//!
//! Settings are those that a connection of the pool really gets, from the server, the database, the role or the
//! connection string.

mod looks;
mod report;
mod skew;

use std::time::Duration;

use diesel::result::{DatabaseErrorKind, Error as QueryError};
use tokio::time::timeout;

pub use self::{
    report::{Finding, Report, Severity},
    skew::{MAX_SKEW, Skew},
};
use crate::{
    error::{Error, ErrorKind},
    postgres::{AsyncPgConnection, PgPool, server, tables::NEWEST},
};

/// An error is the first thing that makes the store useless.
pub(crate) async fn check(pool: &PgPool) -> Result<Report, Error> {
    let deadline = Duration::from_secs(10);
    match timeout(deadline, looks(pool)).await {
        Ok(found) => found,
        Err(_) => Err(Error::new(ErrorKind::Timeout, "the database did not answer the check within 10 s")),
    }
}

async fn looks(pool: &PgPool) -> Result<Report, Error> {
    let mut conn = pool.dedicated_connection().await?;
    pooler(pool, &mut conn).await?;
    primary(&mut conn).await?;
    table(&mut conn).await?;
    let mut findings = looks::findings(&mut conn).await?;
    let skew = skew::measure(&mut conn).await?;
    findings.extend(skew.finding());
    Ok(Report::new(findings, skew))
}

async fn table(conn: &mut AsyncPgConnection) -> Result<(), Error> {
    let schema = |advice: &str| Error::new(ErrorKind::Schema, advice);
    server::table_is_there(conn).await.map_err(|error| {
        schema(
            "the table idempotency_keys is missing, has other columns or may not be read: run \
             actix_idempotency::migrations::run(url) or `diesel migration run`, and look at search_path and GRANTs",
        )
        .because(Error::from(error))
    })?;
    if !server::has_constraint(conn, NEWEST).await? {
        return Err(schema("the table idempotency_keys is of an older version: run the migrations of this one"));
    }
    if !server::may_write(conn).await? {
        return Err(schema(
            "this role may not write to idempotency_keys: GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_keys",
        ));
    }
    Ok(())
}

async fn primary(conn: &mut AsyncPgConnection) -> Result<(), Error> {
    if server::is_replica(conn).await? {
        return Err(Error::new(ErrorKind::ReadOnly, "the database is a replica: connect to the primary"));
    }
    if server::is_read_only(conn).await? {
        return Err(Error::new(
            ErrorKind::ReadOnly,
            "transactions are read-only here: look at default_transaction_read_only of the role and the database",
        ));
    }
    Ok(())
}

/// A prepared statement must be found again by the connection that made it. Through a pooler in
/// transaction mode the second use meets another server connection, if the first one is taken
/// meanwhile.
async fn pooler(pool: &PgPool, conn: &mut AsyncPgConnection) -> Result<(), Error> {
    let lost = |error: QueryError| match error {
        QueryError::DatabaseError(DatabaseErrorKind::Unknown, _) => Error::new(
            ErrorKind::Pooler,
            "prepared statements do not survive the pooler in front of the database: use its session mode, or for \
             PgBouncer 1.21 and later set max_prepared_statements",
        )
        .because(Error::from(error)),
        error => error.into(),
    };
    server::backend(conn).await.map_err(lost)?;
    let mut holders = Vec::new();
    // Whichever server connection was used before is among those that are held now.
    for _ in 0..2 {
        let mut holder = pool.dedicated_connection().await?;
        server::hold(&mut holder).await?;
        holders.push(holder);
    }
    server::backend(conn).await.map(drop).map_err(lost)
}
