//! What can be known at start-up about the store, and what to change.

use std::time::Duration;

use diesel::result::{DatabaseErrorKind, Error as QueryError};
use tokio::time::timeout;

use crate::{
    error::{Error, ErrorKind},
    postgres::{AsyncPgConnection, PgPool, server},
};

/// A constraint that only the newest migration makes.
const NEWEST: &str = "idempotency_keys_request_id_check";

/// The first thing that is wrong.
pub(crate) async fn check(pool: &PgPool) -> Result<(), Error> {
    let deadline = Duration::from_secs(10);
    match timeout(deadline, looks(pool)).await {
        Ok(found) => found,
        Err(_) => Err(Error::new(ErrorKind::Timeout, "the database did not answer the check within 10 s")),
    }
}

async fn looks(pool: &PgPool) -> Result<(), Error> {
    let mut conn = pool.dedicated_connection().await?;
    pooler(pool, &mut conn).await?;
    primary(&mut conn).await?;
    table(&mut conn).await
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
