//! What is worth knowing of a store that can be used: settings of the server, and its tables.

use super::report::{
    Finding,
    Severity::{self, Danger, Notice, Warning},
};
use crate::{
    error::Error,
    postgres::{
        AsyncPgConnection,
        server::{self, Settings},
        tables::{self, EXPECTED, Expected, Table},
    },
};

/// All of them.
pub(super) async fn findings(conn: &mut AsyncPgConnection) -> Result<Vec<Finding>, Error> {
    let mut findings = of_settings(&server::settings(conn).await?);
    for table in tables::tables(conn).await? {
        let expected = EXPECTED.iter().find(|expected| expected.name == table.name);
        findings.extend(expected.into_iter().flat_map(|expected| of_table(&table, expected)));
    }
    Ok(findings)
}

fn finding(severity: Severity, name: &'static str, text: &str, advice: &str) -> Finding {
    Finding { severity, name, about: None, text: text.to_owned(), advice: advice.to_owned() }
}

fn of_settings(settings: &Settings) -> Vec<Finding> {
    let mut found = Vec::new();
    if settings.synchronous_commit == "off" {
        found.push(finding(
            Danger,
            "synchronous-commit-off",
            "synchronous_commit is off for this role in this database: a crash of the database can lose an answer that was \
             sent, together with what was written with it",
            "set it to on for the server, the database or the role (ALTER ROLE … SET synchronous_commit), or in the \
             connection string",
        ));
    }
    if !settings.fsync {
        found.push(finding(
            Danger,
            "fsync-off",
            "fsync is off: a crash of the machine can lose anything, and leave the database unreadable",
            "set fsync = on in postgresql.conf",
        ));
    }
    if !settings.full_page_writes {
        found.push(finding(
            Danger,
            "full-page-writes-off",
            "full_page_writes is off: a crash of the machine can leave half-written pages",
            "set full_page_writes = on in postgresql.conf, unless the file system writes pages whole",
        ));
    }
    if !settings.autovacuum {
        found.push(finding(
            Warning,
            "autovacuum-off",
            "autovacuum is off: every key leaves dead rows, and the tables grow without end",
            "set autovacuum = on in postgresql.conf",
        ));
    }
    if !settings.track_counts {
        found.push(finding(
            Warning,
            "track-counts-off",
            "track_counts is off for this role in this database: autovacuum does not learn of the rows that it should \
             remove",
            "set it to on for the server, the database and the role",
        ));
    }
    if !matches!(settings.isolation.as_str(), "read committed" | "read uncommitted") {
        found.push(Finding {
            text: format!(
                "default_transaction_isolation is {}: a transaction of a handler's that loses a race is rolled back, and \
                 its client is told 409 serialization and to retry",
                settings.isolation
            ),
            ..finding(
                Notice,
                "isolation",
                "",
                "leave it where your own transactions need it; or set read committed for the role, or \
                 Policy::isolation for IdemTx",
            )
        });
    }
    found
}

fn of_table(table: &Table, expected: &Expected) -> Vec<Finding> {
    let about = |severity, name, text: &str, advice: String| Finding {
        severity,
        name,
        about: Some(table.name.clone()),
        text: format!("{} {text}", table.name),
        advice,
    };
    if !table.is_there {
        return vec![about(
            Notice,
            "table-missing",
            "is not there, which only matters where its feature is used",
            "run the migrations (migrations::run or `diesel migration run`), and look at search_path".to_owned(),
        )];
    }
    let mut found = Vec::new();
    if !table.is_newest {
        let text = "is of an older version: its feature will fail";
        found.push(about(Warning, "table-outdated", text, "run the migrations of this version".to_owned()));
    }
    if !table.may_be_used {
        found.push(about(
            Notice,
            "table-forbidden",
            "may not be used by this role, which only matters where its feature is",
            format!("GRANT {} ON {} TO the role of the service", expected.needs.replace(' ', ", "), table.name),
        ));
    }
    if table.is_unlogged {
        found.push(about(
            Danger,
            "unlogged-table",
            "is unlogged: a crash of the database empties it, and what was done is done again",
            format!("run ALTER TABLE {} SET LOGGED", table.name),
        ));
    }
    if table.autovacuum_is_off {
        found.push(about(
            Warning,
            "autovacuum-off",
            "has autovacuum switched off: every row that is written leaves dead ones, and it grows without end",
            format!("run ALTER TABLE {} RESET (autovacuum_enabled, toast.autovacuum_enabled)", table.name),
        ));
    }
    found.extend(table.invalid_indexes.iter().map(|index| Finding {
        about: Some(index.clone()),
        ..about(
            Warning,
            "index-invalid",
            &format!("has an index that was not finished: {index} is written by every statement and read by none"),
            format!("unless somebody is building it right now: REINDEX INDEX CONCURRENTLY {index}"),
        )
    }));
    found
}
