//! What `check()` finds in a store that can be used, each on a server that is really set so. What makes a store useless
//! is in `migrations.rs` and `pools.rs`.

use std::{collections::BTreeMap, time::Duration};

use actix_idempotency::{
    Idempotency, PoolBuilder,
    check::{Finding, MAX_SKEW, Report, Severity},
    migrations::{OUTSTANDING_INDEX, run_pending},
};

use actix_web::rt::spawn;
use diesel_async::SimpleAsyncConnection;

use crate::support::{
    cluster::Cluster,
    db::{Db, pool},
    eventually,
    forms::{db_with_a_clock, set_clock},
    log,
};

async fn check(url: &str) -> Report {
    Idempotency::postgres(pool(url, 2)).check().await.unwrap()
}

/// The findings of this name, and whom they are about.
fn found<'a>(report: &'a Report, name: &str) -> Vec<(&'a str, Severity)> {
    let found = report.findings.iter().filter(|finding| finding.name == name);
    found.map(|finding| (finding.about.as_deref().unwrap_or("server"), finding.severity)).collect()
}

#[track_caller]
fn named<'a>(report: &'a Report, name: &str) -> &'a Finding {
    report.findings.iter().find(|finding| finding.name == name).unwrap_or_else(|| panic!("{name} in {report}"))
}

/// `ALTER DATABASE … SET`, for every connection from now on.
async fn set(db: &Db, setting: &str, value: &str) {
    db.run(&format!("ALTER DATABASE {} SET {setting} = {value}", db.name)).await;
}

async fn default(db: &Db, setting: &str) {
    db.run(&format!("ALTER DATABASE {} SET {setting} = DEFAULT", db.name)).await;
}

#[track_caller]
fn assert_advises(finding: &Finding, words: &[&str]) {
    for word in words {
        assert!(finding.to_string().contains(word), "{finding} should say {word}");
    }
}

#[actix_web::test]
async fn a_server_as_it_is_installed_is_found_to_be_in_order() {
    let cluster = Cluster::start(&[]);
    let db = Db::on(&cluster.url()).await;
    let report = check(&db.url).await;
    assert_eq!((report.findings.as_slice(), report.worst()), (&[][..], None));
    // The clock is that of the same machine.
    assert!(report.skew.ahead_ms.unsigned_abs() <= report.skew.within_ms + 1000, "{report}");
    assert!(report.to_string().contains("the database's clock is"), "{report}");
}

#[actix_web::test]
async fn a_server_that_does_not_keep_what_it_commits_is_found() {
    let cluster =
        Cluster::start(&["synchronous_commit = off", "fsync = off", "full_page_writes = off", "autovacuum = off"]);
    let db = Db::on(&cluster.url()).await;
    let report = check(&db.url).await;
    let names: BTreeMap<_, _> = report.findings.iter().map(|finding| (finding.name, finding.severity)).collect();
    let expected = [
        ("synchronous-commit-off", Severity::Danger),
        ("fsync-off", Severity::Danger),
        ("full-page-writes-off", Severity::Danger),
        ("autovacuum-off", Severity::Warning),
    ];
    assert_eq!(names, BTreeMap::from(expected));
    assert_eq!((report.findings.len(), report.worst()), (4, Some(Severity::Danger)));
    // The worst come first.
    assert_eq!(report.findings[3].name, "autovacuum-off");
    assert_advises(&report.findings[3], &["warning", "postgresql.conf"]);

    // What the role has counts, not what the server says.
    set(&db, "synchronous_commit", "on").await;
    assert_eq!(found(&check(&db.url).await, "synchronous-commit-off"), []);
}

#[actix_web::test]
async fn synchronous_commit_is_found_off_wherever_it_was_switched_off() {
    let db = Db::new().await;
    let off = [("server", Severity::Danger)];
    assert_eq!(found(&check(&db.url).await, "synchronous-commit-off"), []);
    set(&db, "synchronous_commit", "off").await;
    let report = check(&db.url).await;
    assert_eq!(found(&report, "synchronous-commit-off"), off);
    assert_advises(named(&report, "synchronous-commit-off"), &["danger", "can lose an answer", "ALTER ROLE"]);
    default(&db, "synchronous_commit").await;

    let role = db.service_role().await;
    db.run(&format!("ALTER ROLE {} SET synchronous_commit = off", role.name)).await;
    assert_eq!(found(&check(&role.url).await, "synchronous-commit-off"), off);
    assert_eq!(found(&check(&db.url).await, "synchronous-commit-off"), []);

    // Weaker than the default, but it waits for the disk.
    set(&db, "synchronous_commit", "local").await;
    assert_eq!(found(&check(&db.url).await, "synchronous-commit-off"), []);

    let mark = if db.url.contains('?') { '&' } else { '?' };
    let by_url = PoolBuilder::new(format!("{}{mark}options=-c%20synchronous_commit%3Doff", db.url)).build().unwrap();
    assert_eq!(found(&Idempotency::postgres(by_url).check().await.unwrap(), "synchronous-commit-off"), off);
}

#[actix_web::test]
async fn every_table_is_asked_whether_a_crash_empties_it_and_whether_it_is_vacuumed() {
    let db = Db::new().await;
    let tables = ["idempotency_steps", "idempotency_inbox", "idempotency_inbox_attempts", "idempotency_outbox"];
    for table in tables {
        db.run(&format!("ALTER TABLE {table} SET UNLOGGED")).await;
        let report = check(&db.url).await;
        assert_eq!(found(&report, "unlogged-table"), [(table, Severity::Danger)]);
        assert_advises(named(&report, "unlogged-table"), &[&format!("ALTER TABLE {table} SET LOGGED")]);
        db.run(&format!("ALTER TABLE {table} SET LOGGED")).await;
    }
    // A table that others refer to may not be less durable than they are.
    db.run("ALTER TABLE idempotency_steps SET UNLOGGED; ALTER TABLE idempotency_keys SET UNLOGGED").await;
    assert_eq!(found(&check(&db.url).await, "unlogged-table").len(), 2);
    db.run("ALTER TABLE idempotency_keys SET LOGGED; ALTER TABLE idempotency_steps SET LOGGED").await;
    assert_eq!(found(&check(&db.url).await, "unlogged-table"), []);

    for (table, option, off) in [
        ("idempotency_keys", "autovacuum_enabled", "false"),
        ("idempotency_keys", "toast.autovacuum_enabled", "off"),
        ("idempotency_outbox", "autovacuum_enabled", "0"),
        ("idempotency_inbox", "autovacuum_enabled", "no"),
    ] {
        db.run(&format!("ALTER TABLE {table} SET ({option} = {off})")).await;
        let report = check(&db.url).await;
        assert_eq!(found(&report, "autovacuum-off"), [(table, Severity::Warning)], "{option} = {off}");
        db.run(&format!("ALTER TABLE {table} SET ({option} = true)")).await;
        assert_eq!(found(&check(&db.url).await, "autovacuum-off"), []);
    }
}

#[actix_web::test]
async fn what_autovacuum_does_not_learn_and_how_transactions_are_isolated_is_found() {
    let db = Db::read_committed().await;
    assert_eq!(
        (found(&check(&db.url).await, "track-counts-off"), found(&check(&db.url).await, "isolation")),
        (vec![], vec![])
    );
    set(&db, "track_counts", "off").await;
    assert_eq!(found(&check(&db.url).await, "track-counts-off"), [("server", Severity::Warning)]);
    for level in ["repeatable read", "serializable"] {
        set(&db, "default_transaction_isolation", &format!("'{level}'")).await;
        let report = check(&db.url).await;
        assert_eq!(found(&report, "isolation"), [("server", Severity::Notice)]);
        assert_advises(named(&report, "isolation"), &[level, "409", "Policy::isolation"]);
    }
}

#[actix_web::test]
async fn what_a_feature_lacks_is_found_and_no_error_for_those_who_do_not_use_it() {
    let db = Db::new().await;
    // The role of a service that has keys and nothing else.
    let role = db.service_role().await;
    let others = ["idempotency_steps", "idempotency_inbox", "idempotency_inbox_attempts", "idempotency_outbox"];
    let all = others.map(|table| (table, Severity::Notice));
    let report = check(&role.url).await;
    assert_eq!(found(&report, "table-forbidden"), all);
    let steps = report.findings.iter().find(|finding| finding.about.as_deref() == Some("idempotency_steps")).unwrap();
    assert_advises(steps, &["GRANT SELECT, INSERT, UPDATE ON idempotency_steps"]);
    // What it advises is enough.
    for finding in &report.findings {
        if finding.name == "table-forbidden" {
            db.run(&finding.advice.replace("the role of the service", &role.name)).await;
        }
    }
    assert_eq!(found(&check(&role.url).await, "table-forbidden"), []);

    for (table, constraint) in [
        ("idempotency_steps", "idempotency_steps_name_check"),
        ("idempotency_inbox", "idempotency_inbox_times_check"),
        ("idempotency_inbox_attempts", "idempotency_inbox_attempts_times_check"),
        ("idempotency_outbox", "idempotency_outbox_parked_check"),
    ] {
        db.run(&format!("ALTER TABLE {table} DROP CONSTRAINT {constraint}")).await;
        assert!(found(&check(&db.url).await, "table-outdated").contains(&(table, Severity::Warning)));
    }
    db.run("DROP TABLE idempotency_steps, idempotency_inbox, idempotency_inbox_attempts, idempotency_outbox").await;
    let report = check(&db.url).await;
    assert_eq!((found(&report, "table-missing"), found(&report, "table-outdated")), (all.to_vec(), vec![]));
}

#[actix_web::test]
async fn an_index_that_was_not_finished_is_found() {
    let db = Db::new().await;
    run_pending(&db.url, OUTSTANDING_INDEX).await.unwrap();
    assert_eq!(found(&check(&db.url).await, "index-invalid"), []);
    // It fails for what is in the table: twice the same.
    let rows =
        "INSERT INTO idempotency_inbox (consumer, message_id, handled_at) VALUES ('c', 'a', now()), ('c', 'b', now())";
    db.run(rows).await;
    let mut conn = db.connect().await;
    let unique = "CREATE UNIQUE INDEX CONCURRENTLY one_per_consumer ON idempotency_inbox (consumer)";
    let failed = conn.batch_execute(unique).await;
    assert!(failed.is_err());
    let report = check(&db.url).await;
    assert_eq!(found(&report, "index-invalid"), [("one_per_consumer", Severity::Warning)]);
    db.run("DELETE FROM idempotency_inbox WHERE message_id = 'b'").await;
    db.run(named(&report, "index-invalid").advice.split(": ").nth(1).unwrap()).await;
    assert_eq!(found(&check(&db.url).await, "index-invalid"), []);
}

#[actix_web::test]
async fn an_optional_index_whose_build_was_interrupted_is_found_and_finished() {
    let db = Db::new().await;
    let mut old = db.connect().await;
    old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM idempotency_keys").await.unwrap();
    let url = db.url.clone();
    let building = spawn(async move { run_pending(&url, OUTSTANDING_INDEX).await });
    eventually("the build waits", async || db.blocked("INDEX CONCURRENTLY IF NOT EXISTS").await).await;
    db.run(
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE datname = current_database() \
         AND wait_event_type = 'Lock' AND query LIKE '%INDEX CONCURRENTLY IF NOT EXISTS%'",
    )
    .await;
    assert!(building.await.unwrap().is_err());
    old.batch_execute("COMMIT").await.unwrap();
    let report = check(&db.url).await;
    assert_eq!(found(&report, "index-invalid"), [("idempotency_keys_outstanding_idx", Severity::Warning)]);
    // It counts as made, and the rest of the migrations goes on.
    run_pending(&db.url, OUTSTANDING_INDEX).await.unwrap();
    let report = check(&db.url).await;
    assert_eq!(found(&report, "index-invalid"), [("idempotency_keys_outstanding_idx", Severity::Warning)]);
    db.run(named(&report, "index-invalid").advice.split(": ").nth(1).unwrap()).await;
    assert_eq!(found(&check(&db.url).await, "index-invalid"), []);
}

/// The database's clock is set, and the process's is right.
#[actix_web::test]
async fn clocks_that_are_apart_are_shown_and_found_beyond_what_a_set_clock_shows() {
    let db = db_with_a_clock().await;
    let seconds = |report: &Report| report.skew.ahead_ms as f64 / 1000.0;
    for (shift, is_found) in [(0, false), (2, false), (-2, false), (60, true), (-3600, true)] {
        set_clock(&db, &format!("{shift} s")).await;
        let report = check(&db.url).await;
        // Both are on this machine: what is left is the round trip.
        let doubt = report.skew.within_ms as f64 / 1000.0 + 0.5;
        assert!((seconds(&report) - f64::from(shift)).abs() <= doubt, "{shift} s: {report}");
        let expected: &[_] = if is_found { &[("server", Severity::Warning)] } else { &[] };
        assert_eq!(found(&report, "clock-skew"), expected, "{shift} s");
        assert!(report.to_string().contains(if shift < 0 { "behind" } else { "ahead" }) || shift == 0, "{report}");
    }
    assert_eq!(MAX_SKEW, Duration::from_secs(5));
}

#[actix_web::test]
async fn what_is_more_than_a_notice_is_said_once_in_the_log() {
    log::listen();
    let db = Db::new().await;
    set(&db, "synchronous_commit", "off").await;
    db.run("DROP TABLE idempotency_outbox").await;
    let idempotency = Idempotency::postgres(db.pool(2));
    let said = || {
        let lines = log::on(&log::thread()).into_iter().filter(|line| line.get("event") == Some("advice"));
        lines.map(|line| (line.level, line.get("message").unwrap().to_owned())).collect::<Vec<_>>()
    };
    let report = idempotency.check().await.unwrap();
    idempotency.clone().check().await.unwrap();
    let finding = named(&report, "synchronous-commit-off");
    let about_commits: Vec<_> =
        said().into_iter().filter(|(_, text)| text.contains("synchronous-commit-off")).collect();
    assert_eq!(about_commits, [(tracing::Level::WARN, finding.to_string())]);
    assert!(said().iter().all(|(_, text)| !text.contains("outbox")), "a notice is not news");
    // What comes later is said as well.
    db.run("ALTER TABLE idempotency_inbox SET UNLOGGED").await;
    idempotency.check().await.unwrap();
    assert_eq!(said().iter().filter(|(_, text)| text.contains("idempotency_inbox is unlogged")).count(), 1);
}

#[actix_web::test]
async fn a_report_is_json_for_operators() {
    let db = Db::new().await;
    db.run("ALTER TABLE idempotency_outbox SET UNLOGGED").await;
    let report = check(&db.url).await;
    let json = serde_json::to_value(&report).unwrap();
    let findings = json["findings"].as_array().unwrap();
    let finding = findings.iter().find(|finding| finding["name"] == "unlogged-table").unwrap();
    assert_eq!(finding["severity"], "danger");
    assert_eq!(finding["about"], "idempotency_outbox");
    assert!(json["skew"]["ahead_ms"].is_i64() && json["skew"]["within_ms"].is_u64(), "{json}");
    assert!(finding["advice"].as_str().unwrap().contains("SET LOGGED"));
}
