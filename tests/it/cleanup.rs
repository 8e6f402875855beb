//! Expiry and what clears it away; and what the table costs.

use std::{
    cell::Cell,
    num::NonZeroU32,
    time::{Duration, Instant},
};

use actix_idempotency::{Policy, Sweeper};
use actix_web::rt::{self, time::sleep};
use futures_util::future::join_all;

use crate::support::{
    app::order,
    client::{Answer, RequestExt},
    cluster::Cluster,
    db::Db,
    eventually, repeat,
    rig::Rig,
};

const SECOND: Duration = Duration::from_secs(1);

fn policy() -> Policy {
    Policy::new().anonymous()
}

fn batch(rows: u32) -> NonZeroU32 {
    NonZeroU32::new(rows).unwrap()
}

async fn orders(rig: &Rig, keys: std::ops::Range<usize>) -> Vec<Answer> {
    join_all(keys.map(|n| rig.post("/orders").key(&format!("{n}")).json(&order("x")).answer())).await
}

/// Moves every row into the past.
async fn age_all(db: &Db) {
    db.run(
        "UPDATE idempotency_keys SET created_at = created_at - interval '2 days', \
         leased_until = leased_until - interval '2 days', completed_at = completed_at - interval '2 days', \
         expires_at = expires_at - interval '2 days'",
    )
    .await;
}

/// So that what they counted can be read: a session reports when it ends.
async fn end_all_sessions(db: &Db) {
    db.run(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
         WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    .await;
}

// --- sweeping ------------------------------------------------------------------------------------------------

/// How long the requests of twenty clients take, each of whom goes on as long as this is so of the number it
/// has been served.
async fn serve(rig: &Rig, tag: &str, goes_on: impl Fn(usize) -> bool) -> Vec<Duration> {
    let clients = (0..20).map(|client| {
        let goes_on = &goes_on;
        async move {
            let mut times = Vec::new();
            while goes_on(times.len()) {
                let key = format!("{tag}-{client}-{}", times.len());
                let began = Instant::now();
                assert_eq!(rig.post("/orders").key(&key).json(&order(tag)).answer().await.status, 201);
                times.push(began.elapsed());
            }
            times
        }
    });
    join_all(clients).await.into_iter().flatten().collect()
}

fn p99(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort();
    times[times.len() * 99 / 100]
}

/// B01
#[actix_web::test]
async fn a_mountain_of_expired_rows_goes_in_small_batches_while_clients_claim() {
    const ROWS: u64 = 200_000;
    let rig = Rig::builder().pool_size(10).start().await;
    let _ = rig.idempotency.clone().without_sweeper();
    rig.db
        .run(&format!(
            "INSERT INTO idempotency_keys (id, domain, resource, key, fingerprint, recipe, recipe_version, state, owner, \
             attempt, seed, created_at, leased_until, completed_at, expires_at, status, header_names, header_values, body, \
             snapshot_version) \
             SELECT sha256(n::text::bytea), 'http', 'POST /orders', 'old-' || n, sha256('f'), '12345678', 1, 'completed', \
             decode(md5(n::text), 'hex'), 1, sha256('s'), t, t + interval '30 s', t + interval '1 s', t + interval '1 day', \
             201, '{{location}}', '{{/orders/1}}', 'ok', 1 \
             FROM (SELECT n, now() - interval '3 days' + n * interval '1 ms' AS t FROM generate_series(1, {ROWS}) AS n) AS old"
        ))
        .await;
    rig.db
        .run(
            "CREATE TABLE batches (rows bigint NOT NULL, xid xid8 NOT NULL);
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO batches SELECT count(*), pg_current_xact_id() FROM gone;
                 RETURN NULL;
             END $$;
             CREATE TRIGGER note AFTER DELETE ON idempotency_keys REFERENCING OLD TABLE AS gone
                 FOR EACH STATEMENT EXECUTE FUNCTION note();",
        )
        .await;
    let before = p99(&serve(&rig, "before", |served| served < 20).await);
    let sweeping = rt::spawn({
        let sweeper = Sweeper::new(rig.pool.clone()).batch(batch(1000));
        async move { sweeper.sweep_once().await }
    });
    let times = serve(&rig, "during", |_| !sweeping.is_finished()).await;
    assert_eq!(sweeping.await.unwrap().unwrap(), ROWS);
    // Nobody waits for the sweeper, beyond what it takes of the machine.
    let during = p99(&times);
    assert!(during < (before * 10).max(SECOND), "{before:?} before, {during:?} during, of {} requests", times.len());
    assert_eq!(rig.db.keys().await, 20 * 20 + times.len() as i64);
    let most = "SELECT max(rows) AS value FROM (SELECT sum(rows)::bigint AS rows FROM batches GROUP BY xid) AS b";
    assert_eq!(rig.db.number(most).await, 1000);
}

/// B03
#[actix_web::test]
async fn sweeping_starts_by_itself() {
    let rig = Rig::with(policy().retention(SECOND)).await;
    for tens in 0..10 {
        let answers = orders(&rig, tens * 10..tens * 10 + 10).await;
        assert!(answers.iter().all(|answer| answer.status == 201), "{answers:?}");
    }
    assert_eq!(rig.db.all_effects().await, 100);
    eventually("all rows are gone", || async { rig.db.keys().await == 0 }).await;
}

/// The other half of B03: for those who sweep elsewhere.
#[actix_web::test]
async fn without_a_sweeper_rows_stay() {
    let rig = Rig::with(policy().retention(SECOND / 2)).await;
    let _ = rig.idempotency.clone().without_sweeper();
    orders(&rig, 0..10).await;
    sleep(3 * SECOND).await;
    assert_eq!(rig.db.keys().await, 10);
    assert_eq!(Sweeper::new(rig.pool.clone()).sweep_once().await.unwrap(), 10);
}

/// B04
#[actix_web::test]
async fn an_expired_row_is_as_good_as_absent_though_nobody_sweeps() {
    let rig = Rig::start().await;
    let _ = rig.idempotency.clone().without_sweeper();
    let other = rig.other(policy());
    let _ = other.idempotency.clone().without_sweeper();
    for round in 1..=repeat(50, 5) {
        rig.post("/orders").key("x").json(&order("old")).answer().await;
        rig.db.age("x", "2 days").await;
        let racers = (0..20).map(|n| {
            let request = if n % 2 == 0 { rig.post("/orders") } else { other.post("/orders") };
            request.key("x").json(&order("new")).answer()
        });
        let answers = join_all(racers).await;
        assert!(answers.iter().all(|answer| answer.status == 201 || answer.code() == "outstanding"), "{answers:?}");
        assert_eq!(answers.iter().filter(|answer| answer.status == 201 && !answer.is_replay()).count(), 1);
        let effects = (rig.db.effects("old").await, rig.db.effects("new").await);
        assert_eq!(effects, (round as i64, round as i64));
        rig.db.age("x", "2 days").await;
    }
    assert_eq!(rig.db.keys().await, 1);
}

/// B07
#[actix_web::test]
async fn a_sweeper_leaves_alone_what_runs_and_what_has_just_ended() {
    let rig = Rig::with(policy().retention(2 * SECOND).lease(10 * SECOND)).await;
    let _ = rig.idempotency.clone().without_sweeper();
    let sweeper = Sweeper::new(rig.pool.clone());
    let running = rt::spawn(rig.post("/held").key("x").body("x").answer());
    let failing = rt::spawn(rig.post("/flaky?mode=err_after_gate").key("y").answer());
    rig.gate.entered(2).await;
    let past = "(SELECT bool_and(expires_at + interval '500 ms' < clock_timestamp()) FROM idempotency_keys)";
    eventually("the retention has passed", || async {
        assert_eq!(sweeper.sweep_once().await.unwrap(), 0);
        rig.db.is(past).await
    })
    .await;
    for (path, key, body) in [("/held", "x", "x"), ("/flaky?mode=err_after_gate", "y", "")] {
        assert_eq!(rig.post(path).key(key).body(body).answer().await.code(), "outstanding");
    }

    let ends = Instant::now();
    rig.gate.open(2);
    let first = running.await.unwrap();
    assert_eq!(failing.await.unwrap().status, 500);
    let swept = sweeper.sweep_once().await.unwrap();
    let replay = rig.post("/held").key("x").body("x").answer().await;
    if ends.elapsed() < 2 * SECOND {
        assert_eq!(swept, 0);
        first.assert_replayed_by(&replay);
    }
    eventually("both have expired", || async {
        sweeper.sweep_once().await.unwrap();
        rig.db.keys().await == 0
    })
    .await;
    assert!(ends.elapsed() >= 2 * SECOND, "too early: {:?}", ends.elapsed());
}

#[actix_web::test]
async fn what_is_kept_for_ever_is_never_swept() {
    let rig = Rig::with(policy().retain_forever()).await;
    let first = orders(&rig, 0..3).await;
    rig.db.lapse("1").await;
    rig.db
        .run(
            "UPDATE idempotency_keys SET created_at = created_at - interval '50 years', \
             leased_until = leased_until - interval '50 years', completed_at = completed_at - interval '50 years'",
        )
        .await;
    assert_eq!(Sweeper::new(rig.pool.clone()).sweep_once().await.unwrap(), 0);
    first[0].assert_replayed_by(&orders(&rig, 0..1).await[0]);
    assert_eq!(rig.db.keys().await, 3);
}

#[actix_web::test]
async fn a_sweeper_of_ones_own_goes_on_until_it_is_stopped() {
    let rig = Rig::start().await;
    let _ = rig.idempotency.clone().without_sweeper();
    let sweeping = Sweeper::new(rig.pool.clone()).interval(SECOND / 2).batch(batch(3)).spawn();
    for _ in 0..2 {
        orders(&rig, 0..10).await;
        age_all(&rig.db).await;
        eventually("all rows are gone", || async { rig.db.keys().await == 0 }).await;
    }
    sweeping.stop().await;
    orders(&rig, 0..10).await;
    age_all(&rig.db).await;
    sleep(2 * SECOND).await;
    assert_eq!(rig.db.keys().await, 10);

    // Dropping the handle stops it, too.
    drop(Sweeper::new(rig.pool.clone()).interval(SECOND / 2).spawn());
    sleep(2 * SECOND).await;
    assert_eq!(rig.db.keys().await, 10);
}

#[actix_web::test]
async fn a_sweeper_survives_an_error() {
    let rig = Rig::start().await;
    let _ = rig.idempotency.clone().without_sweeper();
    orders(&rig, 0..10).await;
    age_all(&rig.db).await;
    rig.db.run("ALTER TABLE idempotency_keys RENAME TO elsewhere").await;
    assert!(Sweeper::new(rig.pool.clone()).sweep_once().await.is_err());
    let failed = async || {
        let rolled_back = "SELECT xact_rollback AS value FROM pg_stat_database WHERE datname = current_database()";
        rig.db.number(rolled_back).await
    };
    let before = failed().await;
    let sweeping = Sweeper::new(rig.pool.clone()).interval(SECOND / 2).spawn();
    eventually("it has failed again and again", async || failed().await >= before + 2).await;
    rig.db.run("ALTER TABLE elsewhere RENAME TO idempotency_keys").await;
    eventually("all rows are gone", || async { rig.db.keys().await == 0 }).await;
    sweeping.stop().await;
}

#[actix_web::test]
async fn sweepers_and_claims_on_the_same_rows_do_not_deadlock() {
    let cluster = Cluster::start(&[]);
    let db = Db::on(&cluster.url()).await;
    let connections = db.pool(10);
    let rig = Rig::builder().on(db, connections).start().await;
    let _ = rig.idempotency.clone().without_sweeper();
    let until = Instant::now() + SECOND * repeat(10, 3) as u32;
    let sweeper = Sweeper::new(rig.pool.clone()).batch(batch(7));
    let done = Cell::new(false);
    let sweepers = join_all((0..2).map(|_| async {
        let mut swept = 0;
        loop {
            let last = done.get();
            swept += sweeper.sweep_once().await.unwrap();
            if last {
                return swept;
            }
        }
    }));
    let claims = async {
        while Instant::now() < until {
            for answer in orders(&rig, 0..30).await {
                assert!(answer.status == 201 || answer.code() == "outstanding", "{answer:?}");
            }
            age_all(&rig.db).await;
        }
        done.set(true);
    };
    let (swept, ()) = tokio::join!(sweepers, claims);
    assert!(swept.iter().sum::<u64>() > 0);
    let log = cluster.log();
    let errors: Vec<_> = log.lines().filter(|line| line.contains("ERROR")).collect();
    assert!(errors.is_empty(), "{errors:?}");
}

// --- what it costs -------------------------------------------------------------------------------------------

#[actix_web::test]
async fn a_replay_writes_nothing() {
    let rig = Rig::start().await;
    let other = rig.other(policy());
    orders(&rig, 0..1).await;
    let row = "SELECT xmin || ' ' || xmax || ' ' || ctid || ' ' || (k.*)::text AS value FROM idempotency_keys AS k";
    let before = rig.db.text(row).await;
    for _ in 0..10 {
        // One engine looks first, the other inserts first; and a refusal costs no more.
        assert!(orders(&rig, 0..1).await[0].is_replay());
        assert_eq!(rig.post("/orders").key("0").json(&order("y")).answer().await.code(), "key-reused");
    }
    assert!(other.post("/orders").key("0").json(&order("x")).answer().await.is_replay());
    assert_eq!(rig.db.text(row).await, before);
    end_all_sessions(&rig.db).await;
    let written =
        "SELECT n_tup_ins + n_tup_upd + n_tup_del AS value FROM pg_stat_user_tables WHERE relname = 'idempotency_keys'";
    // The claim and the completion of the first.
    assert_eq!(rig.db.number(written).await, 2);
}

#[actix_web::test]
async fn a_completion_touches_no_index() {
    let rig = Rig::start().await;
    for n in 0..30 {
        assert_eq!(orders(&rig, n..n + 1).await[0].status, 201);
    }
    end_all_sessions(&rig.db).await;
    let updates =
        |which: &str| format!("SELECT {which} AS value FROM pg_stat_user_tables WHERE relname = 'idempotency_keys'");
    assert_eq!(rig.db.number(&updates("n_tup_upd")).await, 30);
    assert_eq!(rig.db.number(&updates("n_tup_hot_upd")).await, 30);
}
