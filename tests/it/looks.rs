//! Retries of keys that a process knows: it looks at their rows for all who ask at the same time.

use std::time::{Duration, Instant};

use actix_idempotency::Policy;
use actix_web::rt::time::sleep;
use diesel_async::SimpleAsyncConnection;
use futures_util::future::{join_all, select};

use crate::support::{
    app::order,
    client::{Answer, RequestExt, post},
    cluster::Cluster,
    db::{Db, backend},
    eventually, repeat,
    rig::Rig,
    statements::counting,
};

/// The backend of the connection that looks for all. Those of the pool may have looked as well.
async fn looker(rig: &Rig) -> Option<i64> {
    let mut pool = Vec::new();
    for _ in 0..5 {
        pool.push(rig.pool.get().await.unwrap());
    }
    let mut pids = Vec::new();
    for conn in &mut pool {
        pids.push(backend(conn).await.to_string());
    }
    let others = pids.join(", ");
    let looker = format!(
        "SELECT (SELECT max(pid)::text FROM pg_stat_activity WHERE datname = current_database() \
         AND query LIKE 'SELECT k.%' AND pid NOT IN ({others})) AS value"
    );
    rig.db.text(&looker).await.map(|pid| pid.parse().unwrap())
}

async fn send(rig: &Rig, key: &str) -> Answer {
    rig.post("/orders").key(key).json(&order("a")).answer().await
}

/// The answer to this key, which was told again by the connection that looks for all: its backend is told too.
async fn told(rig: &Rig, key: &str) -> (Answer, i64) {
    let first = send(rig, key).await;
    eventually("one looks for all", async || {
        first.assert_replayed_by(&send(rig, key).await);
        looker(rig).await.is_some()
    })
    .await;
    (first, looker(rig).await.unwrap())
}

#[actix_web::test]
async fn in_a_crowd_of_retries_each_gets_the_answer_to_its_own_key() {
    let rig = Rig::start().await;
    let crowd = async || {
        let keys: Vec<_> = (0..120).map(|n| format!("crowd-{}", n % 40)).collect();
        join_all(keys.iter().map(|key| send(&rig, key))).await
    };
    let first = join_all((0..40).map(async |n| send(&rig, &format!("crowd-{n}")).await)).await;
    for _ in 0..repeat(100, 3) {
        for (n, answer) in crowd().await.into_iter().enumerate() {
            first[n % 40].assert_replayed_by(&answer);
        }
    }
    // Known, and not there any more.
    rig.db.run("DELETE FROM idempotency_keys WHERE key LIKE 'crowd-1%'").await;
    let gone = |n: usize| format!("crowd-{n}").starts_with("crowd-1");
    for (n, answer) in crowd().await.into_iter().enumerate().filter(|(n, _)| !gone(n % 40)) {
        first[n % 40].assert_replayed_by(&answer);
    }
    assert_eq!(rig.db.all_effects().await, 40 + (0..40).filter(|n| gone(*n)).count() as i64);
}

#[actix_web::test]
async fn an_answer_that_was_sent_is_what_a_retry_gets_however_many_look_at_the_time() {
    let rig = Rig::start().await;
    send(&rig, "known").await;
    let crowd = join_all((0..4).map(async |_| {
        loop {
            assert!(send(&rig, "known").await.is_replay());
        }
    }));
    let one_by_one = async {
        for n in 0..repeat(1000, 30) {
            let key = format!("new-{n}");
            send(&rig, &key).await.assert_replayed_by(&send(&rig, &key).await);
        }
    };
    select(Box::pin(one_by_one), Box::pin(async { drop(crowd.await) })).await;
}

#[actix_web::test]
async fn a_crowd_of_retries_costs_a_fraction_of_its_looks() {
    let Some((_cluster, db)) = counting().await else { return };
    let rig = Rig::builder().database(db).start().await;
    let first = send(&rig, "a").await;
    let mut looks = Vec::new();
    // On a machine that is busy with something else a statement may serve one at a time; alone each would always.
    while looks.len() < 5 {
        let before = rig.db.calls("SELECT k.%").await;
        let crowd = join_all((0..50).map(async |_| {
            for _ in 0..20 {
                first.assert_replayed_by(&send(&rig, "a").await);
            }
        }));
        crowd.await;
        looks.push(rig.db.calls("SELECT k.%").await - before);
        if looks.iter().any(|looks| *looks <= 500) {
            return assert_eq!(rig.db.calls("%INSERT INTO%").await, 1);
        }
    }
    panic!("{looks:?} statements for 1000 retries each");
}

#[actix_web::test]
async fn a_stored_answer_is_told_while_the_pool_is_used_up() {
    for policy in [Policy::new(), Policy::new().atomic()] {
        let rig = Rig::builder().policy(policy.anonymous()).start().await;
        let (first, _) = told(&rig, "done").await;
        let users = join_all((0..5).map(|_| rig.pool.get())).await;
        first.assert_replayed_by(&send(&rig, "done").await);
        assert!(users.iter().all(Result::is_ok));
    }
}

#[actix_web::test]
async fn a_row_that_cannot_be_read_is_a_trouble_of_its_own_key_alone() {
    let rig = Rig::start().await;
    let (first, _) = told(&rig, "good").await;
    send(&rig, "bad").await;
    rig.db.run("UPDATE idempotency_keys SET header_names[1] = NULL WHERE key = 'bad'").await;
    let keys: Vec<_> = (0..60).map(|n| if n % 3 == 0 { "bad" } else { "good" }).collect();
    for (key, answer) in keys.iter().zip(join_all(keys.iter().map(|key| send(&rig, key))).await) {
        if *key == "good" {
            first.assert_replayed_by(&answer);
        } else {
            assert_eq!((answer.status.as_u16(), answer.code().as_str()), (503, "store-unavailable"));
        }
    }
}

#[actix_web::test]
async fn whoever_hangs_up_costs_no_connection() {
    let rig = Rig::start().await;
    let (first, before) = told(&rig, "x").await;
    let mut conn = rig.db.connect().await;
    for _ in 0..3 {
        conn.batch_execute("BEGIN; LOCK TABLE idempotency_keys IN ACCESS EXCLUSIVE MODE").await.unwrap();
        let mut raw = rig.raw().await;
        raw.send(post("/orders", "x", &order("a").to_string())).await.unwrap();
        eventually("it looks", async || rig.db.blocked("SELECT k.").await).await;
        raw.reset();
        conn.batch_execute("ROLLBACK").await.unwrap();
        first.assert_replayed_by(&send(&rig, "x").await);
    }
    assert_eq!(looker(&rig).await, Some(before));
}

#[actix_web::test]
async fn retries_are_answered_when_the_connection_that_looks_has_died() {
    let rig = Rig::start().await;
    let (first, dead) = told(&rig, "x").await;
    rig.db.run(&format!("SELECT pg_terminate_backend({dead})")).await;
    for answer in join_all((0..10).map(|_| send(&rig, "x"))).await {
        first.assert_replayed_by(&answer);
    }
    eventually("another looks", async || {
        first.assert_replayed_by(&send(&rig, "x").await);
        looker(&rig).await.is_some_and(|pid| pid != dead)
    })
    .await;
}

/// A process that goes on when this is dropped.
struct Stopped(String);

impl Stopped {
    fn new(pid: i64) -> Self {
        let stopped = Self(pid.to_string());
        stopped.signal("-STOP");
        stopped
    }

    fn signal(&self, name: &str) {
        assert!(std::process::Command::new("kill").args([name, &self.0]).status().unwrap().success());
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.signal("-CONT");
    }
}

#[actix_web::test]
async fn retries_are_answered_while_the_connection_that_looks_hangs() {
    let cluster = Cluster::start(&[]);
    let rig = Rig::builder().database(Db::on(&cluster.url()).await).start().await;
    let (first, pid) = told(&rig, "x").await;
    let stopped = Stopped::new(pid);
    let began = Instant::now();
    for _ in 0..120 {
        first.assert_replayed_by(&send(&rig, "x").await);
    }
    // Only the first of them finds out that it hangs: half a second. Each in turn would be a minute, on any machine.
    assert!(began.elapsed() < Duration::from_secs(55), "{:?}", began.elapsed());
    drop(stopped);
}

#[actix_web::test]
async fn the_connection_that_looks_is_closed_when_there_are_no_retries() {
    for _ in 0..repeat(1, 0) {
        let rig = Rig::start().await;
        let (first, _) = told(&rig, "x").await;
        let began = Instant::now();
        while looker(&rig).await.is_some() {
            assert!(began.elapsed() < Duration::from_secs(90), "a minute without a retry");
            sleep(Duration::from_secs(1)).await;
        }
        first.assert_replayed_by(&send(&rig, "x").await);
    }
}
