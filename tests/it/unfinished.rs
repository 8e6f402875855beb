//! Half-done keys: given back with effects outside the database, and retried by nobody. Somebody looks after them.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use actix_idempotency::{
    Completer, Gauges, IdemKey, Idempotency, PgPool, Policy, ResponseSnapshot, Sweeper, completer::Round, migrations,
};
use actix_web::{
    HttpResponse, Result,
    error::InternalError,
    http::StatusCode,
    web::{self, Data},
};

use crate::support::{
    app::{created, effect},
    client::{Answer, RequestExt},
    db::{Db, LAPSED, pool},
    log,
    rig::Rig,
};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Charges in a step, or with a derived key, or not at all; then it answers with the status that the body ends in.
async fn pay(key: IdemKey, pool: Data<PgPool>, body: String) -> Result<HttpResponse> {
    let (how, status) = body.split_once('-').unwrap();
    let name = key.key().as_str().to_owned();
    let charge = async || effect(&pool, &format!("charge {name}")).await;
    match how {
        // The first attempt charges and succeeds; any other refuses at once.
        "once" if key.attempt() == 1 => {
            key.step("charge", charge).await.map(drop)?;
            return Ok(created(1));
        }
        "step" => key.step("charge", charge).await.map(drop)?,
        "derive" => {
            let _for_the_provider = key.derive("charge");
            charge().await?;
        }
        _ => {}
    }
    match status {
        "201" => Ok(created(1)),
        status => Err(InternalError::new("no mail today", StatusCode::from_bytes(status.as_bytes()).unwrap()).into()),
    }
}

/// It leaves the sweeping to the test.
async fn desk() -> Rig {
    let rig = Rig::builder()
        .policy(Policy::new().anonymous())
        .serve(|config, idempotency: &Idempotency, _| {
            config.service(web::resource("/pay").wrap(idempotency.clone()).route(web::post().to(pay)));
        })
        .await;
    let _ = rig.idempotency.clone().without_sweeper();
    rig
}

/// The key is the body.
async fn paid(rig: &Rig, key: &str) -> Answer {
    rig.post("/pay").key(key).body(key.to_owned()).answer().await
}

const ALL: [&str; 7] = ["step-201", "step-502", "step-402", "derive-502", "derive-402", "plain-502", "plain-400"];

/// Each of them is given back, but for the first.
async fn all_paid(rig: &Rig) {
    for key in ALL {
        assert_eq!(paid(rig, key).await.status.as_str(), &key[key.len() - 3..]);
    }
}

fn eager(completer: Completer) -> Completer {
    completer.grace(Duration::ZERO)
}

/// Remembers the keys that it has completed, after charging where that was not done yet.
fn finisher(idempotency: &Idempotency, pool: &PgPool, seen: &Arc<Mutex<BTreeSet<String>>>) -> Completer {
    let (pool, seen) = (pool.clone(), Arc::clone(seen));
    eager(Completer::of_requests(idempotency, "POST /pay", move |key: IdemKey| {
        let (pool, seen) = (pool.clone(), Arc::clone(&seen));
        async move {
            let name = key.key().as_str().to_owned();
            if name.starts_with("step") {
                let charge = async || effect(&pool, &format!("charge {name}")).await.map_err(|error| error.to_string());
                key.step("charge", charge).await.map_err(|error| error.to_string())?;
            }
            seen.lock().unwrap().insert(name);
            Ok::<_, String>(ResponseSnapshot::new(StatusCode::CREATED).with_body("finished"))
        }
    }))
}

fn of(keys: &[&str]) -> BTreeSet<String> {
    keys.iter().map(|key| (*key).to_owned()).collect()
}

// --- they are brought to an end -----------------------------------------------------------------------------------

#[actix_web::test]
async fn a_completer_takes_what_was_given_back_half_done_and_nothing_else() {
    for indexed in [false, true] {
        let rig = desk().await;
        all_paid(&rig).await;
        if indexed {
            migrations::run_pending(&rig.db.url, migrations::OUTSTANDING_INDEX).await.unwrap();
        }
        let seen = Arc::default();
        // A client that retries comes first.
        let patient = finisher(&rig.idempotency, &rig.pool, &seen).grace(Duration::from_secs(3600));
        assert_eq!(patient.complete_once().await.unwrap(), Round::default());

        let completer = finisher(&rig.idempotency, &rig.pool, &seen);
        assert_eq!(completer.complete_once().await.unwrap(), Round { completed: 3, failed: 0 });
        assert_eq!(*seen.lock().unwrap(), of(&["step-502", "step-402", "derive-502"]));
        assert_eq!(completer.complete_once().await.unwrap(), Round::default());
        for key in ["step-502", "step-402", "derive-502"] {
            assert_eq!(rig.db.effects(&format!("charge {key}")).await, 1, "{key}");
            let retry = paid(&rig, key).await;
            assert_eq!((retry.status.as_u16(), retry.text(), retry.is_replay()), (201, "finished".into(), true));
        }
        for key in ["derive-402", "plain-502", "plain-400"] {
            assert_eq!(rig.db.state(key).await.as_deref(), Some("released"), "{key}");
        }
    }
}

#[actix_web::test]
async fn who_may_not_read_steps_completes_what_the_key_itself_tells() {
    let rig = desk().await;
    all_paid(&rig).await;
    let role = rig.db.service_role().await;
    let theirs = pool(&role.url, 2);
    let seen: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    let told = Arc::clone(&seen);
    let idempotency = Idempotency::postgres(theirs);
    let completer = eager(Completer::of_requests(&idempotency, "POST /pay", move |key: IdemKey| {
        told.lock().unwrap().insert(key.key().as_str().to_owned());
        async { Ok::<_, String>(ResponseSnapshot::new(StatusCode::CREATED)) }
    }));
    assert_eq!(completer.complete_once().await.unwrap(), Round { completed: 2, failed: 0 });
    assert_eq!(*seen.lock().unwrap(), of(&["step-502", "derive-502"]));
}

#[actix_web::test]
async fn a_function_that_always_fails_is_called_once_in_a_lease_and_not_for_ever() {
    log::listen();
    let rig = desk().await;
    assert_eq!(paid(&rig, "step-502").await.status, 502);
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let failing = eager(Completer::of_requests(&rig.idempotency, "POST /pay", move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        async { Err::<ResponseSnapshot, _>("unreachable") }
    }))
    .max_attempts(3.try_into().unwrap());
    for attempt in [2, 3] {
        assert_eq!(failing.complete_once().await.unwrap(), Round { completed: 0, failed: 1 });
        // It has the key, without doing anything, until its lease is over.
        for _ in 0..3 {
            assert_eq!(failing.complete_once().await.unwrap(), Round::default());
        }
        assert_eq!(calls.load(Ordering::Relaxed), attempt - 1);
        rig.db.run(LAPSED).await;
    }
    assert_eq!(failing.complete_once().await.unwrap(), Round::default());
    assert_eq!(log::count(&rig.db.id("step-502").await, "given-up"), 1);
}

/// Its retry refuses before it comes to anything, and gives the key back as half-done as it was.
#[actix_web::test]
async fn what_an_attempt_that_died_has_done_is_not_forgotten_when_the_next_one_fails_early() {
    let rig = desk().await;
    assert_eq!(paid(&rig, "once-400").await.status, 201);
    rig.db.run(LAPSED).await;
    assert_eq!(paid(&rig, "once-400").await.status, 400);
    let corrected = rig.post("/pay").key("once-400").body("plain-201").answer().await;
    assert_eq!(corrected.code(), "key-reused");
    let completer = finisher(&rig.idempotency, &rig.pool, &Arc::default());
    assert_eq!(completer.complete_once().await.unwrap(), Round { completed: 1, failed: 0 });
    assert_eq!(rig.db.effects("charge once-400").await, 1);
}

// --- or told of ---------------------------------------------------------------------------------------------------

async fn steps(db: &Db) -> i64 {
    db.number("SELECT count(*) AS value FROM idempotency_steps").await
}

#[actix_web::test]
async fn an_expired_half_done_key_is_kept_to_be_looked_at_and_told_of_when_it_goes() {
    log::listen();
    let rig = desk().await;
    all_paid(&rig).await;
    for key in ALL {
        rig.db.age(key, "2 days").await;
    }
    let ids: Vec<String> = {
        let mut ids = Vec::new();
        for key in ["step-502", "step-402", "derive-502"] {
            ids.push(rig.db.id(key).await);
        }
        ids
    };
    let told = || ids.iter().map(|id| log::count(id, "abandoned")).sum::<usize>();
    let sweeper = Sweeper::new(rig.pool.clone());
    assert_eq!(sweeper.sweep_once().await.unwrap(), 4);
    let sample = Gauges::of(&rig.idempotency).sample_once().await.unwrap();
    assert_eq!((sample.unfinished, sample.oldest_expired), (3, Duration::ZERO), "{sample:?}");
    assert_eq!((rig.db.keys().await, steps(&rig.db).await, told()), (3, 2, 0));
    // It has expired all the same: the next request with it is a first one, and says what it has buried.
    assert_eq!(paid(&rig, "derive-502").await.status, 502);
    assert_eq!((rig.db.effects("charge derive-502").await, told()), (2, 1));

    for key in ["step-502", "step-402"] {
        rig.db.age(key, "5 days").await;
    }
    assert_eq!(sweeper.sweep_once().await.unwrap(), 0);
    for key in ["step-502", "step-402"] {
        rig.db.age(key, "1 day").await;
    }
    assert_eq!(sweeper.clone().keep_unfinished(8 * DAY).sweep_once().await.unwrap(), 0);
    assert_eq!(sweeper.sweep_once().await.unwrap(), 2);
    assert_eq!((steps(&rig.db).await, told()), (0, 3));
    let line = log::events(&ids[0]).into_iter().find(|line| line.get("event") == Some("abandoned")).unwrap();
    assert_eq!(
        [line.get("resource"), line.get("state"), line.get("status"), line.get("attempt")],
        [Some("POST /pay"), Some("released"), Some("502"), Some("1")]
    );
    assert_eq!(sweeper.sweep_once().await.unwrap(), 0);
}

#[actix_web::test]
async fn an_attempt_that_died_half_way_is_told_of_too_and_at_once_where_nothing_is_to_be_kept() {
    log::listen();
    let rig = desk().await;
    for key in ["step-201", "plain-201"] {
        assert_eq!(paid(&rig, key).await.status, 201);
    }
    rig.db.run(LAPSED).await;
    let ids = [rig.db.id("step-201").await, rig.db.id("plain-201").await];
    for key in ["step-201", "plain-201"] {
        rig.db.age(key, "2 days").await;
    }
    let sweeper = Sweeper::new(rig.pool.clone()).keep_unfinished(Duration::ZERO);
    assert_eq!(sweeper.sweep_once().await.unwrap(), 2);
    assert_eq!(ids.map(|id| log::count(&id, "abandoned")), [1, 0]);
}

#[actix_web::test]
async fn a_sweeper_that_may_not_read_steps_sweeps_by_what_the_key_itself_tells() {
    let rig = desk().await;
    all_paid(&rig).await;
    for key in ALL {
        rig.db.age(key, "2 days").await;
    }
    let role = rig.db.service_role().await;
    let theirs = pool(&role.url, 2);
    assert_eq!(Sweeper::new(theirs.clone()).sweep_once().await.unwrap(), 5);
    let sample = Gauges::of(&Idempotency::postgres(theirs)).sample_once().await.unwrap();
    assert_eq!(sample.unfinished, 2);
}
