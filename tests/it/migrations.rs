//! The tables: how they are made, what they refuse, who may use them, and what `check()` says of them.

use std::{
    env,
    process::{Child, Command, Stdio},
    thread,
};

use actix_idempotency::{Error, ErrorKind, Idempotency, check::Report, migrations};
use actix_web::rt::{self, System};
use diesel::{QueryResult, migration::MigrationSource, pg::Pg, result::Error as QueryError};
use diesel_async::{
    AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection, async_connection_wrapper::AsyncConnectionWrapper,
};
use diesel_migrations::{EmbeddedMigrations, FileBasedMigrations, MigrationHarness};

use crate::support::{
    app::order,
    client::RequestExt,
    cluster::Cluster,
    db::{Db, pool, with_database},
    eventually, repeat,
    rig::Rig,
    tour::tour,
};

/// All that a database holds outside the system's schemas, but for what diesel remembers of its migrations.
async fn objects(db: &Db) -> Vec<String> {
    let kinds = [
        "SELECT 'relation ' || c.relkind::text || ' ' || c.oid::regclass::text || ' ' || coalesce(c.reloptions::text, '') || ' ' || \
         coalesce(pg_get_indexdef(CASE WHEN c.relkind = 'i' THEN c.oid END), '') AS line \
         FROM pg_class AS c WHERE c.relkind <> 't' AND c.relnamespace = 'public'::regnamespace \
         AND c.relname NOT LIKE '\\_\\_diesel%'",
        "SELECT 'column ' || table_name || '.' || column_name || ' ' || \
         rank() OVER (PARTITION BY table_name ORDER BY ordinal_position) || ' ' || data_type || ' ' || is_nullable || ' ' || coalesce(column_default, '') AS line FROM information_schema.columns \
         WHERE table_schema = 'public' AND table_name NOT LIKE '\\_\\_diesel%'",
        "SELECT 'compression ' || attrelid::regclass::text || '.' || attname || ' ' || attcompression::text AS line \
         FROM pg_attribute JOIN pg_class ON attrelid = pg_class.oid \
         WHERE attcompression <> '' AND relnamespace = 'public'::regnamespace",
        "SELECT 'constraint ' || conrelid::regclass::text || ' ' || conname || ' ' || pg_get_constraintdef(oid) AS line \
         FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text NOT LIKE '\\_\\_diesel%'",
        "SELECT 'function ' || oid::regprocedure::text AS line FROM pg_proc WHERE pronamespace = 'public'::regnamespace",
        "SELECT 'type ' || oid::regtype::text AS line FROM pg_type \
         WHERE typnamespace = 'public'::regnamespace AND typname NOT LIKE '%\\_\\_diesel%'",
        "SELECT 'trigger ' || tgname AS line FROM pg_trigger WHERE NOT tgisinternal",
    ]
    .join(" UNION ALL ");
    let all = format!("SELECT string_agg(line, E'\\n' ORDER BY line) AS value FROM ({kinds}) AS objects");
    db.text(&all).await.unwrap_or_default().lines().map(str::to_owned).collect()
}

// --- made at once by many ------------------------------------------------------------------------------------

/// B11
#[test]
fn processes_that_start_together_may_all_migrate() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for round in 0..repeat(50, 5) {
        let db = runtime().block_on(Db::empty());
        let processes: Vec<Child> = (0..3).map(|_| migrate_elsewhere(&db.url)).collect();
        let threads: Vec<_> = (0..16)
            .map(|n| {
                let url = db.url.clone();
                thread::spawn(move || match n % 2 {
                    // As under #[actix_web::main], and as under #[tokio::main(flavor = "current_thread")].
                    0 => System::new().block_on(migrations::run(&url)),
                    _ => runtime().block_on(migrations::run(&url)),
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap().unwrap_or_else(|error| panic!("round {round}: {error:?}"));
        }
        for mut process in processes {
            assert!(process.wait().unwrap().success(), "round {round}");
        }
        let keys = runtime().block_on(db.keys());
        assert_eq!(keys, 0);
        runtime().block_on(async {
            let all = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations")).unwrap().count();
            assert_eq!(db.number("SELECT count(*) AS value FROM __diesel_schema_migrations").await, all as i64);
        });
    }
}

fn migrate_elsewhere(url: &str) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "migrations::migrate_if_asked"])
        .env("IT_MIGRATE", url)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// The other process. Among the tests it finds no IT_MIGRATE and is done.
#[actix_web::test]
async fn migrate_if_asked() {
    if let Ok(url) = env::var("IT_MIGRATE") {
        migrations::run(&url).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn migrating_works_under_a_runtime_of_many_threads() {
    let db = Db::empty().await;
    migrations::run(&db.url).await.unwrap();
    migrations::run(&db.url).await.unwrap();
    assert_eq!(db.keys().await, 0);
}

#[actix_web::test]
async fn migrating_says_what_is_wrong() {
    let refused = migrations::run("postgres://nobody@127.0.0.1:1/nowhere").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Connection);
    let unreadable = migrations::run("postgres://nobody:secret@127.0.0.1/x?sslmode=perhaps").await.unwrap_err();
    assert_eq!(unreadable.kind(), ErrorKind::Configuration);
    assert!(!format!("{unreadable:?}").contains("secret"));

    // Somebody else's table is in the way: nothing of ours remains.
    let db = Db::empty().await;
    db.run("CREATE TABLE idempotency_keys (theirs text)").await;
    let before = objects(&db).await;
    let failed = migrations::run(&db.url).await.unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Migration);
    assert!(format!("{failed:?}").contains("already exists"), "{failed:?}");
    assert_eq!(objects(&db).await, before);
}

// --- the files -----------------------------------------------------------------------------------------------

/// What the diesel CLI does with `migrations/`.
async fn by_the_files<T: Send + 'static>(
    db: &Db,
    work: impl FnOnce(&mut AsyncConnectionWrapper<AsyncPgConnection>, FileBasedMigrations) -> T + Send + 'static,
) -> T {
    by_files_in("migrations", db, work).await
}

async fn by_files_in<T: Send + 'static>(
    directory: &'static str,
    db: &Db,
    work: impl FnOnce(&mut AsyncConnectionWrapper<AsyncPgConnection>, FileBasedMigrations) -> T + Send + 'static,
) -> T {
    let conn = db.connect().await;
    tokio::task::spawn_blocking(move || {
        let files = FileBasedMigrations::from_path(format!("{}/{directory}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        work(&mut AsyncConnectionWrapper::from(conn), files)
    })
    .await
    .unwrap()
}

#[actix_web::test]
async fn the_migration_files_run_redo_and_revert_without_a_trace() {
    let db = Db::empty().await;
    let nothing = objects(&db).await;
    by_the_files(&db, |conn, files| conn.run_pending_migrations(files).map(|_| ()).unwrap()).await;
    let made = objects(&db).await;
    assert!(made.len() > nothing.len());
    // `diesel migration redo`
    by_the_files(&db, |conn, files| {
        conn.revert_last_migration(files.clone()).unwrap();
        conn.run_pending_migrations(files).map(|_| ()).unwrap();
    })
    .await;
    assert_eq!(objects(&db).await, made);
    by_the_files(&db, |conn, files| conn.revert_all_migrations(files).map(|_| ()).unwrap()).await;
    assert_eq!(objects(&db).await, nothing);

    // What is embedded is the same.
    migrations::run(&db.url).await.unwrap();
    assert_eq!(objects(&db).await, made);
    by_the_files(&db, |conn, files| {
        assert!(conn.pending_migrations(files).unwrap().is_empty());
    })
    .await;
}

#[actix_web::test]
async fn the_optional_indexes_are_built_and_dropped_by_their_files_and_by_what_is_embedded() {
    let db = Db::new().await;
    let before = objects(&db).await;
    for (directory, embedded, indexes) in [
        ("migrations-optional/principal", || migrations::PRINCIPAL_INDEX, 1),
        ("migrations-optional/outstanding", || migrations::OUTSTANDING_INDEX, 2),
    ] as [(_, fn() -> EmbeddedMigrations, _); 2]
    {
        by_files_in(directory, &db, |conn, files| conn.run_pending_migrations(files).map(|_| ()).unwrap()).await;
        let made = objects(&db).await;
        assert_eq!(made.len(), before.len() + indexes, "{directory}");
        assert!(db.is("(SELECT bool_and(indisvalid) FROM pg_index)").await);
        by_files_in(directory, &db, |conn, files| {
            for migration in MigrationSource::<Pg>::migrations(&files).unwrap().iter().rev() {
                conn.revert_migration(migration).unwrap();
            }
        })
        .await;
        assert_eq!(objects(&db).await, before, "{directory}");
        for _ in 0..2 {
            migrations::run_pending(&db.url, embedded()).await.unwrap();
            assert_eq!(objects(&db).await, made, "{directory}");
        }
        by_files_in(directory, &db, |conn, files| {
            assert!(conn.pending_migrations(files.clone()).unwrap().is_empty());
            for migration in MigrationSource::<Pg>::migrations(&files).unwrap().iter().rev() {
                conn.revert_migration(migration).unwrap();
            }
        })
        .await;
    }
}

/// The build is held midway by a transaction that is older and has written to the table.
#[actix_web::test]
async fn requests_go_on_while_an_index_is_built_and_whoever_migrates_waits_its_turn() {
    let rig = Rig::start().await;
    let first = rig.post("/orders").key("old").json(&order("x")).answer().await;
    assert_eq!(first.status, 201);
    let mut old = rig.db.connect().await;
    old.batch_execute("BEGIN; UPDATE idempotency_keys SET status = status").await.unwrap();
    let url = rig.db.url.clone();
    let building = rt::spawn(async move { migrations::run_pending(&url, migrations::OUTSTANDING_INDEX).await });
    eventually("the build waits", async || rig.db.blocked("INDEX CONCURRENTLY IF NOT EXISTS").await).await;
    // Another process starts at this moment, and a second one.
    let urls = [rig.db.url.clone(), rig.db.url.clone()];
    let others = urls.map(|url| {
        rt::spawn(async move {
            migrations::run(&url).await?;
            migrations::run_pending(&url, migrations::OUTSTANDING_INDEX).await
        })
    });
    for key in ["new-1", "new-2"] {
        let answer = rig.post("/orders").key(key).json(&order("x")).answer().await;
        assert_eq!(answer.status, 201, "{answer:?}");
        assert_eq!(rig.db.state(key).await.as_deref(), Some("completed"));
    }
    assert!(rig.db.blocked("INDEX CONCURRENTLY IF NOT EXISTS").await, "it was held all the time");
    old.batch_execute("COMMIT").await.unwrap();
    building.await.unwrap().unwrap();
    for other in others {
        other.await.unwrap().unwrap();
    }
    assert!(rig.db.is("(SELECT bool_and(indisvalid) FROM pg_index)").await);
    assert!(rig.db.is("to_regclass('idempotency_keys_acted_idx') IS NOT NULL").await);
}

/// `diesel migration revert` takes back the user's newest migration, not ours, and so the stamps of ours
/// sort before any date.
#[test]
fn our_stamps_sort_before_any_date() {
    let stamps = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations")).unwrap();
    for stamp in stamps {
        let stamp = stamp.unwrap().file_name().into_string().unwrap();
        assert!(stamp.as_str() < "1970", "{stamp}");
    }
}

// --- what the table refuses ----------------------------------------------------------------------------------

/// A good row of each state, as (column, SQL).
fn row(state: &str) -> Vec<(&'static str, String)> {
    let mut row: Vec<(&'static str, String)> = [
        ("id", "sha256('id')"),
        ("domain", "'http'"),
        ("tenant", "'t'"),
        ("principal", "'p'"),
        ("resource", "'POST /orders'"),
        ("key", "'k'"),
        ("fingerprint", "sha256('f')"),
        ("recipe", "'12345678'"),
        ("recipe_version", "1"),
        ("owner", "decode(md5('o'), 'hex')"),
        ("attempt", "1"),
        ("seed", "sha256('s')"),
        ("created_at", "now()"),
        ("leased_until", "now() + interval '30 s'"),
        ("completed_at", "NULL"),
        ("expires_at", "now() + interval '1 day'"),
        ("status", "NULL"),
        ("header_names", "NULL"),
        ("header_values", "NULL"),
        ("body", "NULL"),
        ("body_omitted", "false"),
        ("snapshot_version", "NULL"),
        ("request_id", "NULL"),
        ("acted", "false"),
    ]
    .map(|(column, value)| (column, value.to_owned()))
    .into();
    row.push(("state", format!("'{state}'")));
    let answer = [
        ("completed_at", "now() + interval '1 s'"),
        ("status", "201"),
        ("header_names", "'{a,b}'"),
        ("header_values", "'{1,2}'"),
        ("body", "'body'"),
        ("snapshot_version", "1"),
    ];
    match state {
        "completed" => answer.iter().for_each(|(column, value)| set(&mut row, column, value)),
        "released" => set(&mut row, "status", "500"),
        _ => {}
    }
    row
}

fn set(row: &mut [(&'static str, String)], column: &str, value: &str) {
    row.iter_mut().find(|(name, _)| *name == column).unwrap().1 = value.to_owned();
}

async fn insert(conn: &mut AsyncPgConnection, row: &[(&'static str, String)]) -> QueryResult<usize> {
    let (columns, values): (Vec<_>, Vec<_>) = row.iter().map(|(column, value)| (*column, value.as_str())).unzip();
    let sql = format!("INSERT INTO idempotency_keys ({}) VALUES ({})", columns.join(", "), values.join(", "));
    diesel::sql_query(sql).execute(conn).await
}

fn violated(error: &QueryError) -> String {
    match error {
        QueryError::DatabaseError(_, info) => {
            info.constraint_name().map(str::to_owned).unwrap_or_else(|| info.message().to_owned())
        }
        other => panic!("{other:?}"),
    }
}

#[actix_web::test]
async fn the_table_states_its_own_rules() {
    let db = Db::new().await;
    let mut conn = db.connect().await;
    let text = |length: usize| format!("repeat('x', {length})");
    let good = [
        ("outstanding", vec![]),
        ("outstanding", vec![("tenant", "NULL".to_owned()), ("principal", "NULL".to_owned())]),
        ("outstanding", vec![("expires_at", "NULL".to_owned())]),
        ("outstanding", vec![("request_id", text(128))]),
        ("outstanding", vec![("key", text(255)), ("resource", text(255)), ("tenant", text(255))]),
        ("released", vec![]),
        ("released", vec![("status", "NULL".to_owned())]),
        ("released", vec![("acted", "true".to_owned())]),
        ("outstanding", vec![("acted", "true".to_owned()), ("attempt", "2".to_owned())]),
        ("completed", vec![]),
        ("completed", vec![("body", "''".to_owned())]),
        ("completed", vec![("body", "NULL".to_owned()), ("body_omitted", "true".to_owned())]),
        ("completed", vec![("header_names", "'{}'".to_owned()), ("header_values", "'{}'".to_owned())]),
    ];
    for (state, changes) in good {
        let mut row = row(state);
        changes.iter().for_each(|(column, value)| set(&mut row, column, value));
        assert_eq!(insert(&mut conn, &row).await.unwrap(), 1, "{state} {changes:?}");
        db.run("DELETE FROM idempotency_keys").await;
    }

    // (state, column, value, the constraint without its prefix; or the column that may not be null)
    let bad = [
        ("outstanding", "id", "'short'", "id_check"),
        ("outstanding", "domain", "'ftp'", "domain_check"),
        ("outstanding", "tenant", "''", "tenant_check"),
        ("outstanding", "tenant", "repeat('x', 256)", "tenant_check"),
        ("outstanding", "tenant", "repeat('é', 128)", "tenant_check"),
        ("outstanding", "principal", "''", "principal_check"),
        ("outstanding", "principal", "repeat('x', 256)", "principal_check"),
        ("outstanding", "resource", "''", "resource_check"),
        ("outstanding", "resource", "repeat('x', 256)", "resource_check"),
        ("outstanding", "key", "''", "key_check"),
        ("outstanding", "key", "repeat('x', 256)", "key_check"),
        ("outstanding", "request_id", "''", "request_id_check"),
        ("outstanding", "request_id", "repeat('x', 129)", "request_id_check"),
        ("outstanding", "fingerprint", "'short'", "fingerprint_check"),
        ("outstanding", "recipe", "'short'", "recipe_check"),
        ("outstanding", "recipe_version", "0", "recipe_check"),
        ("outstanding", "state", "'expired'", "state_check"),
        ("outstanding", "owner", "'short'", "owner_check"),
        ("outstanding", "attempt", "0", "attempt_check"),
        ("outstanding", "acted", "true", "acted_check"),
        ("outstanding", "seed", "'short'", "seed_check"),
        ("released", "status", "99", "status_check"),
        ("released", "status", "1000", "status_check"),
        ("outstanding", "expires_at", "now() - interval '1 s'", "times_check"),
        ("completed", "completed_at", "now() - interval '1 s'", "times_check"),
        ("outstanding", "status", "201", "answer_check"),
        ("outstanding", "completed_at", "now()", "answer_check"),
        ("outstanding", "body", "'early'", "answer_check"),
        ("outstanding", "body_omitted", "true", "answer_check"),
        ("outstanding", "header_names", "'{}'", "answer_check"),
        ("outstanding", "header_values", "'{}'", "answer_check"),
        ("outstanding", "snapshot_version", "1", "answer_check"),
        ("released", "completed_at", "now()", "answer_check"),
        ("released", "body", "'kept'", "answer_check"),
        ("released", "snapshot_version", "1", "answer_check"),
        ("completed", "completed_at", "NULL", "answer_check"),
        ("completed", "status", "NULL", "answer_check"),
        ("completed", "header_names", "NULL", "answer_check"),
        ("completed", "header_values", "NULL", "answer_check"),
        ("completed", "header_values", "'{1}'", "answer_check"),
        ("completed", "body", "NULL", "answer_check"),
        ("completed", "body_omitted", "true", "answer_check"),
        ("completed", "snapshot_version", "NULL", "answer_check"),
        ("completed", "snapshot_version", "0", "answer_check"),
    ];
    for (state, column, value, constraint) in bad {
        let mut row = row(state);
        set(&mut row, column, value);
        let error = insert(&mut conn, &row).await.expect_err(&format!("{state} with {column} = {value}"));
        assert_eq!(violated(&error), format!("idempotency_keys_{constraint}"), "{state} with {column} = {value}");
    }
    let nullable = [
        "tenant",
        "principal",
        "completed_at",
        "expires_at",
        "status",
        "header_names",
        "header_values",
        "body",
        "snapshot_version",
        "request_id",
    ];
    for (column, _) in row("outstanding").into_iter().filter(|(column, _)| !nullable.contains(column)) {
        let mut row = row("outstanding");
        set(&mut row, column, "NULL");
        let error = insert(&mut conn, &row).await.expect_err(column);
        assert!(violated(&error).contains(&format!("\"{column}\"")), "{column}: {error:?}");
    }

    // Each constraint is broken by some row above: none is there unseen.
    let named = db
        .text(
            "SELECT string_agg(conname, ' ' ORDER BY conname) AS value FROM pg_constraint \
             WHERE conrelid = 'idempotency_keys'::regclass AND contype = 'c'",
        )
        .await
        .unwrap();
    for name in named.split(' ') {
        assert!(bad.iter().any(|(.., constraint)| name == format!("idempotency_keys_{constraint}")), "{name}");
    }
    insert(&mut conn, &row("outstanding")).await.unwrap();
    assert_eq!(violated(&insert(&mut conn, &row("completed")).await.unwrap_err()), "idempotency_keys_pkey");
}

// --- who uses it, and where it stands ------------------------------------------------------------------------

/// B11
#[actix_web::test]
async fn the_service_needs_no_more_than_the_grants_of_the_documentation() {
    let db = Db::new().await;
    let role = db.service_role().await;
    let pool = pool(&role.url, 5);
    tour(&Rig::builder().on(db, pool).start().await).await;
}

/// B11
#[actix_web::test]
async fn the_tables_may_stand_in_a_schema_of_their_own() {
    for by_url in [true, false] {
        let mut db = Db::empty().await;
        db.run("CREATE SCHEMA idempotency").await;
        if by_url {
            db.url = format!("{}?options=-c%20search_path%3Didempotency", db.url);
        } else {
            db.run(&format!("ALTER DATABASE {} SET search_path = idempotency", db.name)).await;
        }
        migrations::run(&db.url).await.unwrap();
        db.create_effects().await;
        assert!(db.is("to_regclass('idempotency.idempotency_keys') IS NOT NULL").await);
        assert!(db.is("to_regclass('public.idempotency_keys') IS NULL").await);
        let pool = db.pool(5);
        tour(&Rig::builder().on(db, pool).start().await).await;
    }
}

// --- check() -------------------------------------------------------------------------------------------------

/// `check()` fails with this kind, and its text has these words; protected requests are refused meanwhile.
#[track_caller]
fn says(error: Result<Report, Error>, kind: ErrorKind, words: &[&str]) {
    let error = error.expect_err("the check should fail");
    assert_eq!(error.kind(), kind, "{error:?}");
    for word in words {
        assert!(error.to_string().contains(word), "{error} should say {word}");
    }
}

async fn check(url: &str) -> Result<Report, Error> {
    Idempotency::postgres(pool(url, 2)).check().await
}

#[actix_web::test]
async fn the_check_names_what_is_wrong_with_the_table() {
    let db = Db::empty().await;
    says(
        check(&db.url).await,
        ErrorKind::Schema,
        &["missing", "migrations::run", "diesel migration run", "search_path"],
    );
    migrations::run(&db.url).await.unwrap();
    check(&db.url).await.unwrap();

    let role = db.role().await;
    says(check(&role.url).await, ErrorKind::Schema, &["GRANT"]);
    for privilege in ["SELECT", "INSERT", "UPDATE", "DELETE"] {
        says(check(&role.url).await, ErrorKind::Schema, &["GRANT"]);
        db.run(&format!("GRANT {privilege} ON idempotency_keys TO {}", role.name)).await;
    }
    check(&role.url).await.unwrap();

    // Of the version before: what it has stored is still there.
    db.run("ALTER TABLE idempotency_keys DROP COLUMN acted").await;
    says(check(&db.url).await, ErrorKind::Schema, &["older version", "migrations"]);
    db.run("ALTER TABLE idempotency_keys DROP COLUMN seed").await;
    says(check(&db.url).await, ErrorKind::Schema, &["other columns", "migrations::run"]);
}

#[actix_web::test]
async fn the_check_names_a_server_that_cannot_be_written_to() {
    let db = Db::new().await;
    db.run(&format!("ALTER DATABASE {} SET default_transaction_read_only = on", db.name)).await;
    says(check(&db.url).await, ErrorKind::ReadOnly, &["default_transaction_read_only"]);
    let pool = pool(&db.url, 2);
    let rig = Rig::builder().on(db, pool).start().await;
    assert_eq!(rig.post("/orders").key("x").json(&order("x")).answer().await.code(), "store-unavailable");
    rig.db
        .run(&format!("BEGIN READ WRITE; ALTER DATABASE {} RESET default_transaction_read_only; COMMIT", rig.db.name))
        .await;
    let old = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
               WHERE datname = current_database() AND pid <> pg_backend_pid()";
    rig.db.run(old).await;
    check(&rig.db.url).await.unwrap();
    assert_eq!(rig.post("/orders").key("x").json(&order("x")).answer().await.status, 201);
}

#[actix_web::test]
async fn the_check_names_a_replica() {
    let cluster = Cluster::start(&[]);
    let db = Db::on(&cluster.url()).await;
    check(&db.url).await.unwrap();
    cluster.become_standby();
    says(check(&db.url).await, ErrorKind::ReadOnly, &["replica", "primary"]);
    let pool = pool(&db.url, 2);
    let rig = Rig::builder().on(db, pool).start().await;
    assert_eq!(rig.post("/orders").key("x").json(&order("x")).answer().await.code(), "store-unavailable");
}

#[actix_web::test]
async fn the_check_names_a_server_that_is_not_there() {
    says(check("postgres://postgres@127.0.0.1:1/shop").await, ErrorKind::Connection, &["no connection"]);
    let db = Db::new().await;
    let nowhere = with_database(&db.url, "no_such_database");
    let error = check(&nowhere).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connection);
    assert!(format!("{error:?}").contains("no_such_database"), "{error:?}");
}
