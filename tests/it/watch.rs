//! What a long-running process says of itself: that nobody sweeps, and that answers wait to be stored.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use actix_idempotency::{Idempotency, Policy};
use actix_web::rt::spawn;
use diesel_async::SimpleAsyncConnection;
use futures_util::future::join_all;
use tracing::Level;

use crate::support::{
    PATIENCE,
    app::{order, routes},
    client::RequestExt,
    db::Db,
    eventually,
    log::{self, Line},
    rig::Rig,
};

/// A rig that looks about twice a second, as its retention asks.
async fn rig(by: impl Fn(Idempotency) -> Idempotency + Clone + Send + 'static) -> Rig {
    let policy = Policy::new().anonymous().retention(Duration::from_millis(500));
    let rig = Rig::builder().policy(policy).serve(|config, idempotency, _| routes(config, idempotency)).await;
    by(rig.idempotency.clone());
    rig
}

/// Makes an expired row of one that is there; so many hours ago.
async fn expire(db: &Db, key: &str, hours: i64) {
    db.age(key, &format!("{hours} hours")).await;
}

/// What is said of a row that has been expired for so many hours.
fn said(hours: u64) -> Vec<Arc<Line>> {
    let about = |line: &Arc<Line>| {
        let oldest = line.get("oldest_s").and_then(|oldest| oldest.parse::<u64>().ok());
        oldest.is_some_and(|oldest| oldest / 3600 == hours)
    };
    log::all().into_iter().filter(|line| line.get("event") == Some("sweeping-late")).filter(about).collect()
}

/// How often somebody has read the table of keys: an engine without a sweeper does when it looks. Its connection has
/// then told the statistics, because it closes.
async fn looks(db: &Db) -> i64 {
    let scans = "SELECT coalesce(seq_scan, 0) + coalesce(idx_scan, 0) AS value FROM pg_stat_user_tables";
    db.number(&format!("{scans} WHERE relname = 'idempotency_keys'")).await
}

#[actix_web::test]
async fn rows_that_nobody_sweeps_are_said_to_be_late_where_somebody_else_should() {
    log::listen();
    let rig = rig(Idempotency::without_sweeper).await;
    rig.post("/orders").key("unswept").json(&order("x")).answer().await;
    // A job that sweeps every night may be late by a day.
    expire(&rig.db, "unswept", 30).await;
    let before = looks(&rig.db).await;
    eventually("it has looked a few times", async || looks(&rig.db).await > before + 6).await;
    assert!(said(30).is_empty());
    expire(&rig.db, "unswept", 1000).await;
    eventually("it says so", async || !said(1030).is_empty()).await;
    assert_eq!((said(1030)[0].level, said(1030).len()), (Level::WARN, 1));
    // It goes on looking, and has said it.
    let before = looks(&rig.db).await;
    eventually("it has looked again", async || looks(&rig.db).await > before + 6).await;
    assert_eq!(said(1030).len(), 1);
    assert_eq!(rig.db.keys().await, 1);
}

#[actix_web::test]
async fn a_sweeper_that_cannot_do_its_work_is_noticed() {
    log::listen();
    let rig = rig(|idempotency| idempotency).await;
    rig.other(Policy::new().anonymous()).post("/orders").key("stuck").json(&order("x")).answer().await;
    // Somebody holds the row, so that no sweeper gets it: a lock that lets it be written, but not deleted.
    let mut holder = rig.db.connect().await;
    holder.batch_execute("BEGIN; SELECT FROM idempotency_keys WHERE key = 'stuck' FOR KEY SHARE").await.unwrap();
    expire(&rig.db, "stuck", 2024).await;
    rig.post("/orders").key("starts-the-loops").json(&order("x")).answer().await;
    eventually("it says so", async || !said(2000).is_empty()).await;
    assert_eq!(said(2000).len(), 1);
    holder.batch_execute("ROLLBACK").await.unwrap();
    eventually("it is swept", async || rig.db.keys().await == 0).await;
}

/// The store refuses every answer, and counts how often; what a sequence counts is not rolled back.
const REFUSED: &str = "CREATE SEQUENCE tries;
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM nextval(''tries''); RAISE EXCEPTION ''refused''; END';
    CREATE TRIGGER refuse BEFORE UPDATE ON idempotency_keys FOR EACH ROW
        WHEN (NEW.state = 'completed') EXECUTE FUNCTION refuse()";

#[actix_web::test]
async fn answers_that_wait_to_be_stored_are_said_once_and_not_once_a_try() {
    log::listen();
    let rig = Rig::builder().policy(Policy::new().anonymous().store_timeout(PATIENCE)).start().await;
    let keys: Vec<_> = (0..5).map(|n| format!("waits-{n}")).collect();
    let requests: Vec<_> = keys.iter().map(|key| spawn(rig.post("/held").key(key).body("a").answer())).collect();
    rig.gate.entered(5).await;
    let ids: BTreeSet<_> = join_all(keys.iter().map(|key| rig.db.id(key))).await.into_iter().collect();
    rig.db.run(REFUSED).await;
    rig.gate.open(5);
    for request in requests {
        assert_eq!(request.await.unwrap().status, 201, "every client has its answer");
    }
    // Five first tries, and more than one for each afterwards.
    let tries = || rig.db.number("SELECT last_value AS value FROM tries");
    eventually("they are tried again", async || tries().await >= 12).await;
    rig.db.run("DROP TRIGGER refuse ON idempotency_keys").await;
    let said = |event: &str| ids.iter().map(|id| log::count(id, event)).sum::<usize>();
    eventually("each has ended", async || said("ended-late") + said("completion-lost") == 5).await;
    assert_eq!(said("completion-retried"), 1);
    let lines: Vec<_> = ids.iter().flat_map(|id| log::events(id)).collect();
    let line = lines.iter().find(|line| line.get("event") == Some("completion-retried")).unwrap();
    let answers: usize = line.get("answers").unwrap().parse().unwrap();
    assert!(line.level == Level::WARN && (1..=5).contains(&answers), "{line:?}");
}
