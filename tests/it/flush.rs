//! Claims that are lost before they are on the disk: a handler that takes `IdemKey` does not act under one.

use std::process::Command;

use actix_idempotency::Policy;
use actix_web::rt;
use diesel_async::{AsyncConnection, AsyncPgConnection};

use crate::support::{
    client::{Answer, RequestExt, client},
    cluster::Cluster,
    db::{Db, pool},
    eventually,
    jobs::charge,
    process::Setup,
    proxy::{Do, Proxy},
    rig::Rig,
};

const FLUSH: &str = "pg_logical_emit_message";
const LOOK: &str = "AS claim (id, owner)";

#[track_caller]
fn assert_lost(answer: &Answer) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (409, "lease-lost"));
    assert!(answer.retry_after().is_some());
}

#[actix_web::test]
async fn a_handler_does_not_get_the_key_of_a_claim_that_is_gone_or_anothers() {
    const GONE: &str = "DELETE FROM idempotency_keys";
    const ANOTHERS: &str = "UPDATE idempotency_keys SET owner = decode(md5('another'), 'hex')";
    for lost in [GONE, ANOTHERS] {
        for when in [FLUSH, LOOK] {
            let db = Db::new().await;
            let proxy = Proxy::before(&db.url);
            let pool = pool(&proxy.url(&db.url), 5);
            let rig = Rig::builder().on(db, pool).handler(charge).await;
            let send = || rig.post("/x").key("a").answer();
            let flush = proxy.next(when, Do::HoldRequest);
            let first = rt::spawn(send());
            flush.happened().await;
            rig.db.run(lost).await;
            flush.let_go();
            assert_lost(&first.await.unwrap());
            assert_eq!(rig.db.all_effects().await, 0, "{lost}, {when}");
            if lost == ANOTHERS {
                rig.db.run(GONE).await;
            }
            let retry = send().await;
            assert_eq!(retry.status, 201, "{}", retry.text());
            retry.assert_replayed_by(&send().await);
            assert_eq!(rig.db.all_effects().await, 1);
        }
    }
}

/// Of those who ask for it together, those whose claims are there go on.
#[actix_web::test]
async fn one_claim_that_is_gone_keeps_nobody_else_from_the_key() {
    let db = Db::new().await;
    let proxy = Proxy::before(&db.url);
    let pool = pool(&proxy.url(&db.url), 5);
    let rig = Rig::builder().policy(Policy::new().anonymous()).on(db, pool).handler(charge).await;
    let first = proxy.next(FLUSH, Do::HoldRequest);
    let mut all = vec![rt::spawn(rig.post("/x").key("k0").answer())];
    first.happened().await;
    all.extend((1..10).map(|n| rt::spawn(rig.post("/x").key(&format!("k{n}")).answer())));
    eventually("they have claimed", async || rig.db.keys().await == 10).await;
    rig.db.run("DELETE FROM idempotency_keys WHERE key IN ('k0', 'k3', 'k6')").await;
    first.let_go();
    for (n, answer) in all.into_iter().enumerate() {
        let answer = answer.await.unwrap();
        if n % 3 == 0 && n < 9 { assert_lost(&answer) } else { assert_eq!(answer.status, 201, "{}", answer.text()) }
    }
    assert_eq!(rig.db.all_effects().await, 7);
}

/// A crash of the database between the claim and the flush, which forgets the claim.
#[actix_web::test]
async fn a_claim_that_a_crash_of_the_database_has_taken_away_is_not_acted_under() {
    // Nobody but those who wait for the disk writes the log of changes, and the writer of that is stopped.
    let settings =
        ["autovacuum = off", "wal_writer_delay = 10s", "checkpoint_timeout = 1h", "bgwriter_lru_maxpages = 0"];
    let cluster = Cluster::start(&settings);
    let db = Db::on(&cluster.url()).await;
    let mut server = Setup::new(&db.url).start();
    let client = client();
    let url = server.url("/jobs/charge");
    let send = || client.post(&url).key("a").answer();
    server.stop_at("after-claim", 1).await;
    let writer = db.number("SELECT pid::bigint AS value FROM pg_stat_activity WHERE backend_type = 'walwriter'").await;
    let signal = |name: &str| {
        let sent = Command::new("kill").args([name, &writer.to_string()]).status().unwrap();
        assert!(sent.success());
    };
    signal("-STOP");
    let first = rt::spawn(send());
    server.stopped_at("after-claim").await;
    assert_eq!(db.keys().await, 1, "it is claimed");
    // Postgres ends all its processes when one of them dies like this, and recovers from what is on the disk.
    signal("-KILL");
    eventually("the database is back", async || {
        let down = db.url.clone();
        AsyncPgConnection::establish(&down).await.is_ok()
    })
    .await;
    eventually("the claim is lost", async || db.keys().await == 0).await;
    server.go_on();
    assert_lost(&first.await.unwrap());
    assert_eq!(db.all_effects().await, 0, "nothing was charged under a key that nobody can derive again");

    let retry = send().await;
    assert_eq!(retry.status, 201, "{}", retry.text());
    retry.assert_replayed_by(&send().await);
    assert_eq!(db.all_effects().await, 1);
}
