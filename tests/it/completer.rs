//! Work that nobody retries is brought to an end.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use actix_idempotency::{
    Completer, IdemKey, Idempotency, Once, OnceError, Outcome, PgPool, Policy, ResponseSnapshot, Scope,
    completer::{Round, STRETCH},
    migrations,
};
use actix_web::http::StatusCode;
use futures_util::future::join_all;

use crate::support::{
    app::effect,
    client::{Raw, RequestExt, client, post},
    db::{Db, LAPSED, assert_usable},
    eventually,
    gate::Gate,
    log,
    process::Setup,
    rig::Rig,
};

/// Those whose lease is over, at once.
fn eager(completer: Completer) -> Completer {
    completer.grace(Duration::ZERO).interval(Duration::from_millis(20))
}

/// Completes jobs with the effect `done KEY`.
fn finisher(once: &Once, pool: &PgPool) -> Completer {
    let pool = pool.clone();
    eager(Completer::of_work(once, "job", move |key: IdemKey| {
        let (pool, tag) = (pool.clone(), format!("done {}", key.key().as_str()));
        async move { effect(&pool, &tag).await.map_err(|error| error.to_string()) }
    }))
}

fn completed(keys: usize) -> Round {
    Round { completed: keys, failed: 0 }
}

async fn job(once: &Once, key: &str) -> Result<Outcome<i64>, OnceError<String>> {
    once.run(Scope::once("job"), key, &(), |_| async { Ok(-1) }).await
}

/// A database with lapsed jobs, as a process that has died leaves them.
async fn with_lapsed(keys: &[&str]) -> (Db, PgPool, Once) {
    let db = Db::new().await;
    let pool = db.pool(5);
    let once = Once::postgres(pool.clone());
    for key in keys {
        assert!(matches!(job(&once, key).await, Ok(Outcome::Ran(-1))));
    }
    db.run(LAPSED).await;
    (db, pool, once)
}

// --- it is brought to an end --------------------------------------------------------------------------------

#[actix_web::test]
async fn the_job_of_a_killed_process_is_completed_though_nobody_asks_again() {
    let db = Db::new().await;
    let pool = db.pool(5);
    let once = Once::postgres(pool.clone());
    let mut doomed = Setup { lease: Duration::from_millis(300), ..Setup::new(&db.url) }.start();
    doomed.stop_at("in-job", 1).await;
    let mut request = Raw::connect(doomed.address).await;
    request.send(post("/jobs/a", "unused", "1")).await.unwrap();
    doomed.stopped_at("in-job").await;
    doomed.kill();

    let completing = finisher(&once, &pool).spawn();
    eventually("the job is completed", async || db.state("a").await.as_deref() == Some("completed")).await;
    completing.stop().await;
    assert_eq!((db.effects("a").await, db.effects("done a").await), (1, 1));
    // Whoever asks after all gets the result.
    let again = Setup::new(&db.url).start();
    let answer = client().post(again.url("/jobs/a")).body("1").answer().await.json();
    assert!(answer["replayed"].is_i64(), "{answer}");
}

#[actix_web::test]
async fn a_request_gets_the_answer_that_was_made_without_it() {
    let rig = Rig::start().await;
    assert_eq!(rig.post("/slow?ms=0").key("a").body("x").answer().await.status, 201);
    rig.db.run(LAPSED).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&seen);
    let completer = eager(Completer::of_requests(&rig.idempotency, "POST /slow", move |key: IdemKey| {
        told.lock().unwrap().push((key.key().as_str().to_owned(), key.attempt(), key.scope().resource().to_owned()));
        async { Ok::<_, String>(ResponseSnapshot::new(StatusCode::ACCEPTED).with_body("finished")) }
    }));
    assert_eq!(completer.complete_once().await.unwrap(), completed(1));
    assert_eq!(completer.complete_once().await.unwrap(), completed(0));
    assert_eq!(*seen.lock().unwrap(), [("a".to_owned(), 2, "POST /slow".to_owned())]);
    let retry = rig.post("/slow?ms=0").key("a").body("x").answer().await;
    assert_eq!((retry.status.as_u16(), retry.text(), retry.is_replay()), (202, "finished".into(), true));
    assert_eq!(rig.db.effects("x").await, 1);
    // It is still the key of that request.
    assert_eq!(rig.post("/slow?ms=0").key("a").body("y").answer().await.code(), "key-reused");
}

#[actix_web::test]
async fn it_goes_on_with_the_steps_and_derived_keys_of_the_attempt_that_died() {
    let db = Db::new().await;
    let pool = db.pool(5);
    let once = Once::postgres(pool.clone());
    let keys = Arc::new(Mutex::new(Vec::new()));
    let work = {
        let (pool, keys) = (pool.clone(), Arc::clone(&keys));
        move |key: IdemKey| {
            let (pool, keys) = (pool.clone(), Arc::clone(&keys));
            async move {
                keys.lock().unwrap().push(key.derive("charge"));
                let charge = async || effect(&pool, "charge").await.map_err(|error| error.to_string());
                key.step("charge", charge).await.map_err(|error| error.to_string())
            }
        }
    };
    let first = once.run(Scope::once("job"), "a", &(), work.clone()).await;
    assert!(matches!(first, Ok(Outcome::Ran(_))), "{first:?}");
    db.run(LAPSED).await;
    assert_eq!(eager(Completer::of_work(&once, "job", work)).complete_once().await.unwrap(), completed(1));
    assert_eq!(db.effects("charge").await, 1);
    let keys = keys.lock().unwrap();
    assert_eq!((keys.len(), &keys[0]), (2, &keys[1]));
}

// --- nothing else is touched --------------------------------------------------------------------------------

#[actix_web::test]
async fn what_runs_has_ended_expired_or_is_somebody_elses_is_left_alone() {
    let (db, pool, once) = with_lapsed(&["lapsed", "expired", "other", "fresh"]).await;
    db.age("expired", "40 days").await;
    db.run("UPDATE idempotency_keys SET resource = 'another' WHERE key = 'other'").await;
    db.run("UPDATE idempotency_keys SET leased_until = now() + interval '1 minute' WHERE key = 'fresh'").await;
    assert!(matches!(job(&once, "done").await, Ok(Outcome::Ran(_))));
    assert_eq!(finisher(&once, &pool).complete_once().await.unwrap(), completed(1));
    assert_eq!(db.all_effects().await, 1);
    assert_eq!(db.effects("done lapsed").await, 1);
    for key in ["expired", "other", "fresh"] {
        assert_eq!(db.state(key).await.as_deref(), Some("outstanding"), "{key}");
    }
}

#[actix_web::test]
async fn a_client_that_retries_comes_first() {
    let (db, pool, once) = with_lapsed(&["a"]).await;
    let patient = finisher(&once, &pool).grace(Duration::from_secs(120));
    assert_eq!(patient.complete_once().await.unwrap(), completed(0));
    assert!(matches!(job(&once, "a").await, Ok(Outcome::Ran(_))));
    assert_eq!(finisher(&once, &pool).complete_once().await.unwrap(), completed(0));
    assert_eq!(db.all_effects().await, 0);
}

#[actix_web::test]
async fn any_number_of_completers_hand_each_key_to_one() {
    let names: Vec<String> = (0..50).map(|n| format!("job-{n}")).collect();
    let (db, pool, once) = with_lapsed(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let other = Once::postgres(db.pool(5));
    let completers: Vec<_> = (0..8).map(|n| finisher(if n % 2 == 0 { &once } else { &other }, &pool)).collect();
    let mut done = 0;
    while done < 50 {
        let rounds = join_all(completers.iter().map(Completer::complete_once)).await;
        let rounds: Vec<Round> = rounds.into_iter().map(Result::unwrap).collect();
        assert!(rounds.iter().all(|round| round.failed == 0 && round.completed <= 10), "{rounds:?}");
        let completed: usize = rounds.iter().map(|round| round.completed).sum();
        assert!(completed > 0, "{done} are done, and nobody finds the rest");
        done += completed;
    }
    assert_eq!((done, db.all_effects().await), (50, 50));
    assert_usable(&pool, 5).await;
}

#[actix_web::test]
async fn without_an_index_every_key_of_a_large_table_is_come_to_and_with_one_at_once() {
    let (db, pool, once) = with_lapsed(&["a"]).await;
    // Completed rows before, around and behind it.
    let rows = i64::from(STRETCH) * 2 + 500;
    db.run(&format!(
        "INSERT INTO idempotency_keys (id, domain, resource, key, fingerprint, recipe, recipe_version, state, owner, \
         attempt, seed, created_at, leased_until, completed_at, expires_at, status, header_names, header_values, body, \
         snapshot_version) SELECT sha256(n::text::bytea), domain, resource, n::text, fingerprint, recipe, recipe_version, \
         'completed', owner, 1, seed, now(), now(), now(), now() + interval '1 day', 200, '{{}}', '{{}}', '1', 1 \
         FROM idempotency_keys, generate_series(1, {rows}) AS n"
    ))
    .await;
    let completer = finisher(&once, &pool);
    let mut rounds = 0;
    while completer.complete_once().await.unwrap() == completed(0) {
        rounds += 1;
        assert!(rounds <= 3, "a walk through the table takes three rounds");
    }
    assert_eq!(db.effects("done a").await, 1);
    // And around again.
    db.lapse("a").await;
    for _ in 0..4 {
        completer.complete_once().await.unwrap();
    }
    assert_eq!(db.effects("done a").await, 2);

    migrations::run_pending(&db.url, migrations::OUTSTANDING_INDEX).await.unwrap();
    for again in 3..6 {
        db.lapse("a").await;
        assert_eq!(completer.complete_once().await.unwrap(), completed(1));
        assert_eq!(db.effects("done a").await, again);
    }
}

// --- what fails -----------------------------------------------------------------------------------------------

#[actix_web::test]
async fn what_fails_stays_outstanding_and_after_the_last_attempt_is_left_for_somebody_to_look_at() {
    log::listen();
    let db = Db::new().await;
    let once = Once::postgres(db.pool(5)).with(Policy::new().lease(Duration::from_millis(100)));
    assert!(matches!(job(&once, "given-up").await, Ok(Outcome::Ran(_))));
    db.run(LAPSED).await;
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&attempts);
    let failing = eager(Completer::of_work(&once, "job", move |key: IdemKey| {
        told.lock().unwrap().push(key.attempt());
        let panics = key.attempt() == 3;
        async move {
            assert!(!panics, "on purpose");
            Err::<i64, _>("unreachable")
        }
    }))
    .max_attempts(4.try_into().unwrap());
    let completing = failing.clone().spawn();
    let id = db.id("given-up").await;
    eventually("it is given up", async || log::count(&id, "given-up") == 1).await;
    completing.stop().await;
    db.lapse("given-up").await;
    assert_eq!(failing.complete_once().await.unwrap(), completed(0));
    assert_eq!(*attempts.lock().unwrap(), [2, 3, 4]);
    assert_eq!(db.state("given-up").await.as_deref(), Some("outstanding"));
}

#[actix_web::test]
async fn an_attempt_that_wakes_up_late_stores_nothing() {
    let db = Db::new().await;
    let pool = db.pool(5);
    let once = Once::postgres(pool.clone());
    let gate = Gate::new();
    let late = once.run(Scope::once("job"), "a", &(), {
        let gate = gate.clone();
        |_| async move {
            gate.pass().await;
            Ok::<i64, String>(-1)
        }
    });
    let other = Once::postgres(db.pool(5));
    let completed_by = async {
        gate.entered(1).await;
        db.run(LAPSED).await;
        assert_eq!(finisher(&other, &pool).complete_once().await.unwrap(), completed(1));
        gate.open(1);
    };
    let (late, ()) = futures_util::join!(late, completed_by);
    assert!(matches!(late, Ok(Outcome::Replayed(id)) if id > 0), "{late:?}");
}

#[actix_web::test]
async fn a_completer_that_is_stopped_or_drains_takes_nothing_and_leaves_nothing_half_done() {
    let (db, pool, _) = with_lapsed(&["a", "b"]).await;
    let idempotency = Idempotency::postgres(pool.clone());
    let once = Once::of(&idempotency);
    let gate = Gate::new();
    let held = {
        let (gate, pool) = (gate.clone(), pool.clone());
        Completer::of_work(&once, "job", move |key: IdemKey| {
            let (gate, pool, tag) = (gate.clone(), pool.clone(), key.key().as_str().to_owned());
            async move {
                gate.pass().await;
                effect(&pool, &tag).await.map_err(|error| error.to_string())
            }
        })
    };
    let completing = eager(held.clone()).batch(1.try_into().unwrap()).spawn();
    gate.entered(1).await;
    completing.stop().await;
    gate.open(1);
    eventually("what it had taken is done", async || {
        db.number("SELECT count(*) AS value FROM idempotency_keys WHERE state = 'completed'").await == 1
    })
    .await;
    assert!(gate.nobody_enters(Duration::from_millis(100)).await);

    idempotency.drain().on(async {}).await;
    assert_eq!(eager(held).complete_once().await.unwrap(), completed(0));
    assert_eq!(db.all_effects().await, 1);
}
