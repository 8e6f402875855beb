//! Orders of events that broke earlier drafts of the protocol, each brought about on purpose: a session of
//! the test's own plays the other process, statement by statement, beside real requests.
//!
//! How far the clocks of the processes are apart is no schedule, because none of them is read; the last
//! test sees to that.

use std::{
    fs,
    num::NonZeroU32,
    path::Path,
    time::{Duration, Instant},
};

use actix_idempotency::{Policy, Sweeper};
use actix_web::rt::{
    self,
    time::{sleep, timeout},
};
use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
use futures_util::future::join_all;

use crate::support::{
    PATIENCE,
    app::order,
    client::{Answer, RequestExt},
    db::Db,
    eventually, repeat,
    rig::Rig,
};

const SECOND: Duration = Duration::from_secs(1);

fn policy() -> Policy {
    Policy::new().anonymous()
}

/// A transaction that another process has open.
struct Session(AsyncPgConnection);

impl Session {
    async fn begin(db: &Db, statement: &str) -> Self {
        let mut session = Self(db.connect().await);
        session.run(&format!("BEGIN ISOLATION LEVEL READ COMMITTED; {statement}")).await;
        session
    }

    async fn run(&mut self, statement: &str) {
        self.0.batch_execute(statement).await.unwrap();
    }

    async fn commit(mut self) {
        self.run("COMMIT").await;
    }

    async fn roll_back(mut self) {
        self.run("ROLLBACK").await;
    }
}

/// What a completion does to the row of this key.
fn complete(key: &str) -> String {
    format!(
        "UPDATE idempotency_keys SET state = 'completed', completed_at = clock_timestamp(), status = 201, \
         header_names = '{{}}', header_values = '{{}}', body = 'stored', snapshot_version = 1 WHERE key = '{key}'"
    )
}

fn lock(key: &str) -> String {
    format!("SELECT FROM idempotency_keys WHERE key = '{key}' FOR UPDATE")
}

async fn lease_ends(db: &Db, key: &str) -> String {
    let ends = format!("SELECT leased_until::text AS value FROM idempotency_keys WHERE key = '{key}'");
    db.text(&ends).await.unwrap()
}

/// Whether the attempt of this key was completed or claimed no earlier than this.
async fn began_at_or_after(db: &Db, key: &str, time: &str) -> bool {
    let began = "leased_until - interval '30 s'";
    db.is(&format!("(SELECT {began} >= '{time}'::timestamptz FROM idempotency_keys WHERE key = '{key}')")).await
}

async fn lease_is_live(db: &Db, key: &str) -> bool {
    db.is(&format!("(SELECT leased_until > clock_timestamp() FROM idempotency_keys WHERE key = '{key}')")).await
}

// --- takeovers -----------------------------------------------------------------------------------------------

/// Two corrected requests have seen the same released row. The first takes it over and fails; the second
/// must not go by what it saw.
#[actix_web::test]
async fn a_takeover_is_pinned_to_the_owner_that_was_seen() {
    let rig = Rig::start().await;
    let send = |sku: &str| rig.post("/flaky?mode=r400").key("x").json(&order(sku)).answer();
    assert_eq!(send("a").await.status, 400);
    // Reading goes on under this lock, writing waits.
    let mut first = Session::begin(&rig.db, "LOCK TABLE idempotency_keys IN EXCLUSIVE MODE").await;
    let second = rt::spawn(send("b"));
    eventually("the second has looked and would take over", || rig.db.blocked("WITH seen AS")).await;
    first
        .run(
            "UPDATE idempotency_keys SET owner = decode(md5('first'), 'hex'), fingerprint = sha256('first'), status = 500 \
             WHERE key = 'x'",
        )
        .await;
    first.commit().await;
    assert_eq!(second.await.unwrap().code(), "key-reused");
    assert_eq!(rig.db.all_effects().await, 0);
}

#[actix_web::test]
async fn a_takeover_gives_way_to_a_renewal_that_it_has_not_seen() {
    let rig = Rig::start().await;
    let send = || rig.post("/orders").key("x").json(&order("x")).answer();
    assert_eq!(send().await.status, 201);
    rig.db.lapse("x").await;
    let mut owner = Session::begin(&rig.db, "LOCK TABLE idempotency_keys IN EXCLUSIVE MODE").await;
    let retry = rt::spawn(send());
    eventually("the retry has looked and would take over", || rig.db.blocked("WITH seen AS")).await;
    // Short, so that a takeover that comes a little too early would be seen.
    owner.run("UPDATE idempotency_keys SET leased_until = clock_timestamp() + interval '2 s'").await;
    owner.commit().await;
    let ends = lease_ends(&rig.db, "x").await;
    let answer = retry.await.unwrap();
    if answer.status == 201 {
        // This machine was busy for all of that time.
        return assert!(began_at_or_after(&rig.db, "x", &ends).await, "taken over before the lease had ended");
    }
    assert_eq!(answer.code(), "outstanding");
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn a_lease_is_taken_over_as_soon_as_it_has_ended_and_not_before() {
    let rig = Rig::start().await;
    let send = || rig.post("/orders").key("x").json(&order("x")).answer();
    assert_eq!(send().await.status, 201);
    rig.db.lapse("x").await;
    rig.db.run("UPDATE idempotency_keys SET leased_until = clock_timestamp() + interval '2 s'").await;
    let ends = lease_ends(&rig.db, "x").await;
    eventually("it is taken over", async || {
        let answer = send().await;
        assert!(answer.status == 201 || answer.code() == "outstanding", "{}", answer.text());
        answer.status == 201
    })
    .await;
    assert!(began_at_or_after(&rig.db, "x", &ends).await, "taken over before the lease had ended");
    assert_eq!(rig.db.all_effects().await, 2);
}

/// One statement renews all leases of a process; one of them is another's by now.
#[actix_web::test]
async fn a_late_owner_does_not_renew_the_lease_of_whoever_has_taken_its_key() {
    let rig = Rig::with(policy().lease(SECOND)).await;
    let mut held = Vec::new();
    for (nth, key) in ["x", "y"].into_iter().enumerate() {
        held.push(rt::spawn(rig.post("/held").key(key).body(key).answer()));
        rig.gate.entered(nth + 1).await;
    }
    rig.db
        .run(
            "UPDATE idempotency_keys SET owner = decode(md5('another'), 'hex'), \
             leased_until = clock_timestamp() - interval '1 ms' WHERE key = 'x'",
        )
        .await;
    let ends = lease_ends(&rig.db, "x").await;
    // From one renewal of the other lease to the one after that, both were due.
    for _ in 0..3 {
        let before = lease_ends(&rig.db, "y").await;
        eventually("the process renews", async || lease_ends(&rig.db, "y").await != before).await;
    }
    assert_eq!(lease_ends(&rig.db, "x").await, ends, "it is not its lease");
    rig.gate.open(2);
    let told: Vec<_> = join_all(held).await.into_iter().map(|answer| answer.unwrap().status.as_u16()).collect();
    assert_eq!(told, [409, 201], "and its answer is not stored");
}

#[actix_web::test]
async fn of_many_corrected_requests_one_runs() {
    let rig = Rig::start().await;
    let other = rig.other(policy());
    for round in 0..repeat(50, 5) {
        let key = format!("{round}");
        let path = "/flaky?mode=r400";
        assert_eq!(rig.post(path).key(&key).json(&order("wrong")).answer().await.status, 400);
        // The other server has not met the key, and would misbehave once more.
        assert_eq!(other.post(path).key(&key).json(&order("wrong")).answer().await.status, 400);
        let racers = (0..16).map(|n| {
            let request = if n % 2 == 0 { rig.post(path) } else { other.post(path) };
            request.key(&key).json(&order(&format!("{n}"))).answer()
        });
        let answers = join_all(racers).await;
        let ran = answers.iter().filter(|answer| answer.status == 201).count();
        let refused = answers.iter().filter(|answer| answer.status == 422).count();
        assert_eq!((ran, refused), (1, 15), "{answers:?}");
        assert_eq!(rig.db.all_effects().await, round as i64 + 1);
    }
}

#[actix_web::test]
async fn of_many_racers_for_a_lapsed_lease_one_runs() {
    let rig = Rig::start().await;
    let other = rig.other(policy());
    for round in 0..repeat(300, 10) {
        let key = format!("{round}");
        assert_eq!(rig.post("/orders").key(&key).json(&order(&key)).answer().await.status, 201);
        rig.db.lapse(&key).await;
        let racers = (0..16).map(|n| {
            let request = if n % 2 == 0 { rig.post("/orders") } else { other.post("/orders") };
            request.key(&key).json(&order(&key)).answer()
        });
        let answers = join_all(racers).await;
        assert!(answers.iter().all(|answer| answer.status == 201 || answer.code() == "outstanding"), "{answers:?}");
        assert_eq!(answers.iter().filter(|answer| answer.status == 201 && !answer.is_replay()).count(), 1);
        assert_eq!(rig.db.effects(&key).await, 2);
        let attempt = format!("SELECT attempt::bigint AS value FROM idempotency_keys WHERE key = '{key}'");
        assert_eq!(rig.db.number(&attempt).await, 2);
    }
}

// --- the end of an attempt against another's write -----------------------------------------------------------

/// The completion has run in a transaction whose COMMIT is in flight, and the task that waits for it fails.
#[actix_web::test]
async fn a_release_that_meets_a_completing_row_leaves_it_completed() {
    let rig = Rig::start().await;
    let send = || rig.post("/flaky?mode=err_after_gate").key("x").answer();
    let failing = rt::spawn(send());
    rig.gate.entered(1).await;
    let completing = Session::begin(&rig.db, &complete("x")).await;
    rig.gate.open(1);
    eventually("the release waits", || rig.db.blocked("leased_until = least(")).await;
    completing.commit().await;

    // What is stored counts, not what the attempt was about to say.
    for answer in [failing.await.unwrap(), send().await] {
        assert_eq!((answer.status.as_u16(), answer.text().as_str(), answer.is_replay()), (201, "stored", true));
    }
    assert_eq!(rig.db.all_effects().await, 0);
}

#[actix_web::test]
async fn a_release_that_waits_in_vain_for_a_completing_row_leaves_it_completed() {
    let rig = Rig::with(policy().store_timeout(SECOND)).await;
    let failing = rt::spawn(rig.post("/flaky?mode=err_after_gate").key("x").answer());
    rig.gate.entered(1).await;
    let completing = Session::begin(&rig.db, &complete("x")).await;
    rig.gate.open(1);
    assert_eq!(failing.await.unwrap().status, 500);
    completing.commit().await;
    rig.idempotency.drain().on(async {}).await;
    let retry = rig.other(policy()).post("/flaky?mode=err_after_gate").key("x").answer().await;
    assert_eq!((retry.status.as_u16(), retry.text().as_str(), retry.is_replay()), (201, "stored", true));
}

/// A completion waits for a row lock no longer than its time, then goes on in the background.
#[actix_web::test]
async fn a_completion_that_meets_a_locked_row_is_stored_when_the_lock_is_gone() {
    let rig = Rig::with(policy().store_timeout(SECOND)).await;
    let first = rt::spawn(rig.post("/held").key("x").body("x").answer());
    rig.gate.entered(1).await;
    let locking = Session::begin(&rig.db, &lock("x")).await;
    rig.gate.open(1);
    let first = first.await.unwrap();
    assert_eq!(first.status, 201);
    let other = rig.other(policy());
    assert_eq!(other.post("/held").key("x").body("x").answer().await.code(), "outstanding");
    locking.roll_back().await;
    rig.idempotency.drain().on(async {}).await;
    first.assert_replayed_by(&other.post("/held").key("x").body("x").answer().await);
    assert_eq!(rig.db.effects("x").await, 1);
}

// --- renewal -------------------------------------------------------------------------------------------------

/// One statement renews all leases of a process: a row that somebody has locked must not hold up the others.
#[actix_web::test]
async fn a_locked_row_holds_up_no_renewal_but_its_own() {
    let rig = Rig::with(policy().lease(2 * SECOND).max_run(60 * SECOND)).await;
    let [locked, completing, free] = ["locked", "completing", "free"];
    let requests = [locked, completing, free].map(|key| rt::spawn(rig.post("/held").key(key).body(key).answer()));
    rig.gate.entered(3).await;
    let locking = Session::begin(&rig.db, &lock(locked)).await;
    let storing = Session::begin(&rig.db, &complete(completing)).await;

    let other = rig.other(policy());
    let began = Instant::now();
    while began.elapsed() < 5 * SECOND {
        assert!(lease_is_live(&rig.db, free).await);
        sleep(SECOND / 10).await;
    }
    assert!(!lease_is_live(&rig.db, locked).await);
    // Nobody takes it over while it is locked, either.
    assert_eq!(other.post("/held").key(locked).body(locked).answer().await.code(), "outstanding");
    locking.roll_back().await;
    eventually("the lease that was locked is renewed", || lease_is_live(&rig.db, locked)).await;

    // A row that is no longer outstanding holds up nobody, too.
    storing.commit().await;
    let began = Instant::now();
    while began.elapsed() < 3 * SECOND {
        assert!(lease_is_live(&rig.db, free).await && lease_is_live(&rig.db, locked).await);
        sleep(SECOND / 10).await;
    }
    rig.gate.open(3);
    let [first, overtaken, third] = requests;
    assert!(!first.await.unwrap().is_replay() && !third.await.unwrap().is_replay());
    assert_eq!(overtaken.await.unwrap().text(), "stored");
    for key in [locked, completing, free] {
        assert_eq!(rig.db.effects(key).await, 1);
    }
}

// --- locked rows ---------------------------------------------------------------------------------------------

/// Whoever locks a row, and for however long: duplicates are told to wait, soon.
#[actix_web::test]
async fn a_request_never_hangs_on_a_locked_row() {
    let rig = Rig::start().await;
    // This engine has met the keys and looks first; the other inserts first.
    let other = rig.other(policy());
    let send = |key: &str| rig.post("/orders").key(key).json(&order(key)).answer();
    let to_other = |key: &str| other.post("/orders").key(key).json(&order(key)).answer();
    for key in ["completed", "updated", "lapsed", "expired", "deleted", "inserted"] {
        assert_eq!(send(key).await.status, 201);
    }
    rig.db.lapse("lapsed").await;
    rig.db.age("expired", "2 days").await;
    rig.db.age("deleted", "2 days").await;
    rig.db.run("CREATE TABLE inserted AS SELECT * FROM idempotency_keys WHERE key = 'inserted'").await;
    rig.db.run("DELETE FROM idempotency_keys WHERE key = 'inserted'").await;
    let release = || rig.post("/flaky?mode=err").key("released").answer();
    assert_eq!(release().await.status, 500);

    let mut sessions = Vec::new();
    for key in ["completed", "lapsed", "expired", "released"] {
        sessions.push(Session::begin(&rig.db, &lock(key)).await);
    }
    sessions.push(Session::begin(&rig.db, &complete("updated")).await);
    sessions.push(Session::begin(&rig.db, "DELETE FROM idempotency_keys WHERE key = 'deleted'").await);
    sessions.push(Session::begin(&rig.db, "INSERT INTO idempotency_keys SELECT * FROM inserted").await);

    for key in ["lapsed", "expired", "deleted", "inserted"] {
        for answer in [in_time(send(key)).await, in_time(to_other(key)).await] {
            assert_eq!(answer.code(), "outstanding", "{key}");
            assert!(answer.retry_after().is_some());
        }
    }
    assert_eq!(in_time(release()).await.code(), "outstanding");
    for key in ["completed", "updated"] {
        assert!(in_time(send(key)).await.is_replay() && in_time(to_other(key)).await.is_replay(), "{key}");
    }
    assert_eq!(rig.db.all_effects().await, 6);

    for session in sessions {
        session.roll_back().await;
    }
    for key in ["lapsed", "expired", "deleted", "inserted"] {
        assert_eq!((send(key).await.status.as_u16(), rig.db.effects(key).await), (201, 2), "{key}");
    }
    assert_eq!(release().await.status, 201);
}

/// A statement waits a second for a lock; as long as the test holds that would be for ever.
async fn in_time(answer: impl Future<Output = Answer>) -> Answer {
    timeout(PATIENCE, answer).await.expect("nobody waits for whoever holds the row")
}

// --- the sweeper ---------------------------------------------------------------------------------------------

#[actix_web::test]
async fn a_claim_that_meets_a_row_on_its_way_out_waits_for_it_and_runs() {
    let rig = Rig::start().await;
    let other = rig.other(policy());
    let sweep = |key: &str| format!("DELETE FROM idempotency_keys WHERE key = '{key}'");
    for (key, commits) in [("swept", true), ("kept", false)] {
        for (effects, server) in [(1, &rig.server), (3, &other.server)] {
            let send = || rig.client.post(server.url("/orders")).key(key).json(&order(key)).answer();
            assert_eq!(send().await.status, 201);
            rig.db.age(key, "2 days").await;
            let sweeping = Session::begin(&rig.db, &sweep(key)).await;
            let claiming = rt::spawn(send());
            eventually("the claim waits", || rig.db.blocked("INSERT INTO idempotency_keys")).await;
            if commits {
                sweeping.commit().await
            } else {
                sweeping.roll_back().await
            }
            let answer = claiming.await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.is_replay()), (201, false), "{key}: {answer:?}");
            assert_eq!(rig.db.effects(key).await, effects + 1);
            // Out of the next server's way.
            rig.db.age(key, "2 days").await;
        }
    }
}

#[actix_web::test]
async fn claims_and_sweepers_on_the_same_rows_lose_and_repeat_nothing() {
    const KEYS: i64 = 10;
    let rig = Rig::start().await;
    let sweeper = Sweeper::new(rig.pool.clone()).batch(NonZeroU32::new(3).unwrap());
    let mut swept = 0;
    for round in 1..=repeat(200, 20) {
        let claims = join_all((0..2 * KEYS).map(|n| {
            let key = format!("{}", n / 2);
            rig.post("/orders").key(&key).json(&order("x")).answer()
        }));
        let (one, another, answers) = tokio::join!(sweeper.sweep_once(), sweeper.sweep_once(), claims);
        swept += one.unwrap() + another.unwrap();
        for answer in &answers {
            assert!(answer.status == 201 || answer.code() == "outstanding", "{answer:?}");
        }
        assert_eq!(rig.db.all_effects().await, KEYS * round as i64);
        assert_eq!(rig.db.keys().await, KEYS);
        // Where 40001 is usual, an answer may be stored a little after it is sent.
        eventually("all are stored", || rig.db.is("(SELECT bool_and(state = 'completed') FROM idempotency_keys)"))
            .await;
        for key in 0..KEYS {
            rig.db.age(&format!("{key}"), "2 days").await;
        }
    }
    // Neither side was there alone.
    assert!(swept > 0);
}

// --- clocks --------------------------------------------------------------------------------------------------

/// So that it does not matter how wrong the clock of a process is: only the database's decides. Form tokens are issued
/// without the database, and it judges them all the same; and `check()` tells how far the two are apart.
#[test]
fn this_machine_is_never_asked_what_time_it_is() {
    fn look(directory: &Path) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                look(&path);
                continue;
            }
            if path.ends_with("src/token/mod.rs") || path.ends_with("src/check/skew.rs") {
                continue;
            }
            let source = fs::read_to_string(&path).unwrap();
            for clock in ["SystemTime::now", "UNIX_EPOCH", "Utc::now", "Local::now"] {
                // There the times of rows, and those that are looked for, are written as numbers.
                let writes_numbers = path.ends_with("src/inspector/words.rs") || path.ends_with("src/admin/search.rs");
                if clock == "UNIX_EPOCH" && writes_numbers {
                    continue;
                }
                assert!(!source.contains(clock), "{} says {clock}", path.display());
            }
        }
    }
    look(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
}
