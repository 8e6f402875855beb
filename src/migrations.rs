//! The tables of this crate, as diesel migrations: embedded here, and as files in `migrations/` for
//! the diesel CLI.
//!
//! Their stamps sort before any date, so that your own newest migration stays the newest.
//!
//! # Deployment caveat
//!
//! The role that runs the service needs no more than
//! `GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_keys TO service`, and for steps
//! `GRANT SELECT, INSERT, UPDATE ON idempotency_steps TO service`. Where it has an [`inbox`](crate::inbox) it needs the
//! same as for keys on `idempotency_inbox` and `idempotency_inbox_attempts`, and on `idempotency_outbox` where it
//! publishes or relays events ([`outbox`](crate::outbox)). Migrations can run under another role. Another schema is
//! chosen by `search_path`, for example
//! `ALTER ROLE service SET search_path = idempotency, public`.

use diesel::{
    Connection,
    migration::{self, MigrationSource},
    pg::Pg,
};
use diesel_async::{AsyncPgConnection, async_connection_wrapper::AsyncConnectionWrapper};
use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};

use crate::{
    error::{Error, ErrorKind},
    pool,
    postgres::server::lock_migrations,
};

/// For a `MigrationHarness` of your own.
pub const MIGRATIONS: EmbeddedMigrations = embed_migrations!("migrations");

/// An index on the principal, for [`Policy::quota`](crate::Policy::quota): optional, because every
/// claim pays for it. Run it by [`run_pending`], or copy it from `migrations-optional/` into yours.
pub const PRINCIPAL_INDEX: EmbeddedMigrations = embed_migrations!("migrations-optional/principal");

/// An index of the keys that are outstanding, for [`Completer`](crate::Completer) and
/// [`Admin`](crate::Admin): optional, because every completion pays for it (it is no heap-only update any
/// more, and writes into every index). Run it by [`run_pending`], or copy it into yours.
pub const OUTSTANDING_INDEX: EmbeddedMigrations = embed_migrations!("migrations-optional/outstanding");

/// Brings the tables of this crate up to date. Any number of processes may do so at once: one
/// migrates, and the others wait for it and find nothing left to do. Works under
/// `#[actix_web::main]` and `#[tokio::main]`, and needs no libpq.
///
/// Which migrations have run is remembered where diesel remembers yours
/// (`__diesel_schema_migrations`).
///
/// # Errors
///
/// [`ErrorKind::Configuration`] for a bad connection string, [`ErrorKind::Connection`] where it
/// leads nowhere, [`ErrorKind::Migration`] where a migration fails: all of them are rolled back.
pub async fn run(url: &str) -> Result<(), Error> {
    run_pending(url, MIGRATIONS).await
}

/// The same for migrations of your own, which meet the same traps: diesel's harness is synchronous,
/// and processes that start together must not migrate at once. All of them run in one transaction.
///
/// # Errors
///
/// As [`run`].
pub async fn run_pending<S>(url: &str, migrations: S) -> Result<(), Error>
where
    S: MigrationSource<Pg> + Send + 'static,
{
    pool::parse(url)?;
    let conn = pool::connect(url).await?;
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| {
        Error::new(ErrorKind::Migration, "the tables could not be brought up to date").because(error)
    };
    // The harness is synchronous; it must not block the runtime that drives the connection.
    let migrating = tokio::task::spawn_blocking(move || migrate(conn, migrations));
    migrating.await.map_err(|error| failed(error.into()))?.map_err(failed)
}

fn migrate(conn: AsyncPgConnection, migrations: impl MigrationSource<Pg>) -> migration::Result<()> {
    let mut conn = AsyncConnectionWrapper::<AsyncPgConnection>::from(conn);
    conn.transaction(|conn| {
        lock_migrations(conn)?;
        conn.run_pending_migrations(migrations).map(drop)
    })
}
