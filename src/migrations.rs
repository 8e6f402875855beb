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
//!
//! The optional indexes ([`PRINCIPAL_INDEX`], [`OUTSTANDING_INDEX`]) are built `CONCURRENTLY`: requests go on meanwhile.
//! Such a build waits for every transaction of the database that is older than itself. Where it is interrupted, an index is
//! left that is not valid and counts as made: [`check`](crate::check) finds it as `index-invalid` and names the `REINDEX INDEX
//! CONCURRENTLY` that finishes it, and until then everything here goes on as if there were none. Because they cannot run in a
//! transaction, a harness of your own must not hold one around them.

use std::{thread, time::Duration};

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

/// Before it is asked again whose turn it is.
const PAUSE: Duration = Duration::from_millis(50);

/// For a `MigrationHarness` of your own.
pub const MIGRATIONS: EmbeddedMigrations = embed_migrations!("migrations");

/// An index on the principal, for [`Policy::quota`](crate::Policy::quota): optional, because every
/// claim pays for it. Run it by [`run_pending`], or copy it from `migrations-optional/` into yours.
pub const PRINCIPAL_INDEX: EmbeddedMigrations = embed_migrations!("migrations-optional/principal");

/// Indexes of the keys that are outstanding, and of those that were given back half-done, for
/// [`Completer`](crate::Completer) and [`Admin`](crate::Admin): optional, because every completion pays for it (it is no heap-only update any
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
/// and processes that start together must not migrate at once. All of them run in one transaction, unless the
/// `metadata.toml` of one says `run_in_transaction = false`, as those of the optional indexes do: then each is on its
/// own, and those before one that fails stay.
///
/// # Errors
///
/// As [`run`].
pub async fn run_pending<S>(url: &str, migrations: S) -> Result<(), Error>
where
    S: MigrationSource<Pg> + Send + 'static,
{
    pool::parse(url)?;
    let (conn, turn) = (pool::connect(url).await?, pool::connect(url).await?);
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| {
        Error::new(ErrorKind::Migration, "the tables could not be brought up to date").because(error)
    };
    // The harness is synchronous; it must not block the runtime that drives the connections.
    let migrating = tokio::task::spawn_blocking(move || migrate(conn, turn, migrations));
    migrating.await.map_err(|error| failed(error.into()))?.map_err(failed)
}

/// Whose turn it is, is said on a connection beside: what runs outside transactions can hold no lock of one.
fn migrate(
    conn: AsyncPgConnection,
    turn: AsyncPgConnection,
    migrations: impl MigrationSource<Pg>,
) -> migration::Result<()> {
    let mut conn = AsyncConnectionWrapper::<AsyncPgConnection>::from(conn);
    let mut turn = AsyncConnectionWrapper::<AsyncPgConnection>::from(turn);
    let whole = migrations.migrations()?.iter().all(|migration| migration.metadata().run_in_transaction());
    let mut migrations = Some(migrations);
    loop {
        let is_done = turn.transaction(|turn| -> migration::Result<bool> {
            if !lock_migrations(turn)? {
                return Ok(false);
            }
            let Some(migrations) = migrations.take() else { return Ok(true) };
            if whole {
                conn.transaction(|conn| conn.run_pending_migrations(migrations).map(drop))?;
            } else {
                conn.run_pending_migrations(migrations)?;
            }
            Ok(true)
        })?;
        if is_done {
            return Ok(());
        }
        thread::sleep(PAUSE);
    }
}
