//! How many statements a connection sends, or a server is sent.

use std::{
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use diesel::connection::InstrumentationEvent;
use diesel_async::{AsyncConnection, AsyncPgConnection};

use super::{cluster::Cluster, db::Db, missing};

/// BEGIN and COMMIT count too.
pub struct Statements(Arc<AtomicUsize>);

impl Statements {
    pub fn of(conn: &mut AsyncPgConnection) -> Self {
        let sent = Arc::new(AtomicUsize::new(0));
        conn.set_instrumentation({
            let sent = sent.clone();
            move |event: InstrumentationEvent<'_>| {
                if matches!(event, InstrumentationEvent::StartQuery { .. }) {
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Self(sent)
    }

    /// Since it was last asked.
    pub fn sent(&self) -> usize {
        self.0.swap(0, Ordering::Relaxed)
    }
}

/// A server that counts what it is sent and how often it plans, and a database of it; `None` where it has not the extension for that.
pub async fn counting() -> Option<(Cluster, Db)> {
    let has_extension = std::env::var("POSTGRES_BIN").is_ok_and(|bin| {
        let directory = Command::new(format!("{bin}/pg_config")).arg("--pkglibdir").output();
        let directory = directory.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        directory.is_ok_and(|directory| Path::new(&directory).join("pg_stat_statements.so").exists())
    });
    if !has_extension && missing("pg_stat_statements") {
        return None;
    }
    let cluster =
        Cluster::start(&["shared_preload_libraries = 'pg_stat_statements'", "pg_stat_statements.track_planning = on"]);
    let db = Db::on(&cluster.url()).await;
    db.run("CREATE EXTENSION pg_stat_statements").await;
    Some((cluster, db))
}

impl Db {
    /// How often statements like this one have been sent, by those who use the table.
    pub async fn calls(&self, like: &str) -> i64 {
        self.number(&format!(
            "SELECT coalesce(sum(calls), 0)::bigint AS value FROM pg_stat_statements \
             WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) \
             AND query LIKE '%idempotency%' AND query NOT LIKE '%pg_stat_statements%' AND query LIKE '{like}'"
        ))
        .await
    }
}
