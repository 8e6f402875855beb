//! The engine without HTTP: one result per key, whoever calls and however often.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use actix_idempotency::{
    Code, IdemKey, IdemTx, Idempotency, OnCompleted, OnFailure, OnOutstanding, Once, OnceError, Outcome, PgPool,
    Policy, Quota, ResponseSnapshot, Scope, failpoint,
};
use actix_web::{
    HttpResponse,
    http::StatusCode,
    rt,
    web::{self, Data, Json},
};
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::{
    app::{effect, effect_in},
    client::{Raw, RequestExt, client, post},
    db::{Db, assert_usable},
    eventually,
    gate::Gate,
    process::Setup,
    rig::Rig,
};

type Answered = Result<Outcome<i64>, OnceError<String>>;

/// A database and an engine on it.
struct Desk {
    db: Db,
    pool: PgPool,
    once: Once,
}

impl Desk {
    async fn open() -> Self {
        Self::with(Policy::new()).await
    }

    async fn with(policy: Policy) -> Self {
        let db = Db::new().await;
        let pool = db.pool(5);
        let once = Once::postgres(pool.clone()).with(policy);
        Self { db, pool, once }
    }

    /// As another process would be: an engine and a pool of its own.
    fn other(&self) -> Once {
        Once::postgres(self.db.pool(5))
    }

    /// The effect, and its id.
    async fn book(&self, key: &str) -> Answered {
        book(&self.once, &self.pool, key, &()).await
    }
}

async fn book(once: &Once, pool: &PgPool, key: &str, input: &(impl serde::Serialize + ?Sized)) -> Answered {
    let (pool, tag) = (pool.clone(), key.to_owned());
    once.run(Scope::once("booking"), key, input, |_| async move {
        effect(&pool, &tag).await.map_err(|error| error.to_string())
    })
    .await
}

/// The effect, then the gate.
async fn held(once: &Once, pool: &PgPool, key: &str, gate: &Gate) -> Answered {
    let (pool, tag, gate) = (pool.clone(), key.to_owned(), gate.clone());
    once.run(Scope::once("booking"), key, &(), |_| async move {
        let id = effect(&pool, &tag).await.map_err(|error| error.to_string());
        gate.pass().await;
        id
    })
    .await
}

#[track_caller]
fn ran(answered: Answered) -> i64 {
    match answered {
        Ok(Outcome::Ran(id)) => id,
        other => panic!("should have run: {other:?}"),
    }
}

#[track_caller]
fn replayed(answered: Answered) -> i64 {
    match answered {
        Ok(Outcome::Replayed(id)) => id,
        other => panic!("should have been replayed: {other:?}"),
    }
}

#[track_caller]
fn refused<T: std::fmt::Debug, E: std::fmt::Debug>(answered: Result<Outcome<T>, OnceError<E>>) -> Code {
    match answered {
        Err(OnceError::Refused(code)) => code,
        other => panic!("should have been refused: {other:?}"),
    }
}

// --- one result ------------------------------------------------------------------------------------------

#[actix_web::test]
async fn work_runs_once_and_its_result_comes_back_to_every_later_call() {
    let desk = Desk::open().await;
    let id = ran(desk.book("a").await);
    assert_eq!(replayed(desk.book("a").await), id);
    assert_eq!(replayed(book(&desk.other(), &desk.pool, "a", &()).await), id);
    assert_eq!(desk.db.effects("a").await, 1);
    assert_ne!(ran(desk.book("b").await), id);
    let row = "SELECT domain || ' ' || resource || ' ' || key || ' ' || convert_from(body, 'UTF8') AS value \
               FROM idempotency_keys WHERE key = 'a'";
    assert_eq!(desk.db.text(row).await, Some(format!("once booking a {id}")));
}

#[actix_web::test]
async fn the_same_key_with_another_input_is_refused() {
    let desk = Desk::open().await;
    let first = book(&desk.once, &desk.pool, "a", &json!({"room": 1, "nights": [1, 2]})).await;
    // Compared as JSON: the order of members is nothing.
    let same = HashMap::from([("nights", json!([1, 2])), ("room", json!(1))]);
    assert_eq!(replayed(book(&desk.once, &desk.pool, "a", &same).await), ran(first));
    for other in [json!({"room": 2, "nights": [1, 2]}), json!({"room": 1, "nights": [2, 1]}), json!(null)] {
        assert_eq!(refused(book(&desk.once, &desk.pool, "a", &other).await), Code::KeyReused);
    }
    assert_eq!(desk.db.effects("a").await, 1);
}

#[actix_web::test]
async fn of_any_number_of_calls_at_once_one_runs_and_nobody_fails() {
    let desk = Desk::open().await;
    let other = desk.other();
    for round in 0..5 {
        let (key, gate) = (format!("race-{round}"), Gate::new());
        let calls = (0..40).map(|call| held(if call % 2 == 0 { &desk.once } else { &other }, &desk.pool, &key, &gate));
        let (answers, ()) = futures_util::join!(join_all(calls), async {
            gate.entered(1).await;
            gate.open(1);
        });
        let (mut done, mut outstanding) = (0, 0);
        for answer in answers {
            match answer {
                Ok(Outcome::Ran(_) | Outcome::Replayed(_)) => done += 1,
                Ok(Outcome::Outstanding(wait)) => {
                    assert!(!wait.is_zero() && wait <= Duration::from_secs(1));
                    outstanding += 1;
                }
                Err(error) => panic!("losing is not an error: {error:?}"),
            }
        }
        assert!(done >= 1 && done + outstanding == 40);
        assert_eq!(desk.db.effects(&key).await, 1);
        replayed(desk.book(&key).await);
    }
}

#[actix_web::test]
async fn whoever_waits_gets_the_result_when_it_is_there_and_holds_no_connection() {
    let desk = Desk::with(Policy::new().on_outstanding(OnOutstanding::Wait(Duration::from_secs(30)))).await;
    let elsewhere = desk.other().with(Policy::new().on_outstanding(OnOutstanding::Wait(Duration::from_secs(30))));
    let gate = Gate::new();
    let first = held(&desk.once, &desk.pool, "a", &gate);
    let rest = async {
        gate.entered(1).await;
        let waiting =
            (0..20).map(|call| held(if call % 2 == 0 { &desk.once } else { &elsewhere }, &desk.pool, "a", &gate));
        let (answers, ()) = futures_util::join!(join_all(waiting), async {
            assert_usable(&desk.pool, 5).await;
            gate.open(1);
        });
        answers
    };
    let (first, rest) = futures_util::join!(first, rest);
    let id = ran(first);
    for answer in rest {
        assert_eq!(replayed(answer), id);
    }
    assert_eq!(desk.db.effects("a").await, 1);
}

#[actix_web::test]
async fn under_serializable_transactions_the_same_holds() {
    let db = Db::new().await;
    let pool = db.serializable_pool(5);
    let once = Once::postgres(pool.clone());
    let answers = join_all((0..20).map(|_| book(&once, &pool, "a", &()))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(db.effects("a").await, 1);
    replayed(book(&once, &pool, "a", &()).await);
}

// --- what is not done may be tried again --------------------------------------------------------------------

#[actix_web::test]
async fn an_error_gives_the_key_back_and_the_next_attempt_derives_the_same_keys() {
    let desk = Desk::open().await;
    let attempt = async |fails: bool| {
        let seen = Arc::new(std::sync::Mutex::new(None));
        let told = Arc::clone(&seen);
        let outcome = desk
            .once
            .run(Scope::once("charge"), "a", &7, move |key: IdemKey| async move {
                *told.lock().unwrap() = Some((key.attempt(), key.derive("charge")));
                if fails { Err("declined") } else { Ok(1) }
            })
            .await;
        let seen = seen.lock().unwrap().take();
        (outcome, seen)
    };
    let (outcome, first) = attempt(true).await;
    assert!(matches!(outcome, Err(OnceError::Failed("declined"))), "{outcome:?}");
    let (outcome, second) = attempt(false).await;
    assert!(matches!(outcome, Ok(Outcome::Ran(1))), "{outcome:?}");
    let ((one, key), (two, same)) = (first.unwrap(), second.unwrap());
    assert_eq!((one, two), (1, 2));
    assert_eq!(key, same);
}

#[actix_web::test]
async fn what_becomes_of_a_failed_key_is_for_the_policy_and_the_work_to_say() {
    let desk = Desk::with(Policy::new().on_failure(OnFailure::HoldRetention)).await;
    let failing = async |once: &Once, key: &str, release: bool| {
        once.run(Scope::once("w"), key, &(), move |key: IdemKey| async move {
            if release {
                key.release();
            }
            Err::<(), _>("no")
        })
        .await
    };
    assert!(matches!(failing(&desk.once, "held", false).await, Err(OnceError::Failed("no"))));
    assert_eq!(refused(failing(&desk.once, "held", false).await), Code::Held);
    assert!(matches!(failing(&desk.once, "back", true).await, Err(OnceError::Failed("no"))));
    assert!(matches!(failing(&desk.once, "back", true).await, Err(OnceError::Failed("no"))));

    // A success that is said to be nothing: the result is returned and not kept.
    let released = async || {
        desk.once
            .run(Scope::once("w"), "nothing", &(), |key: IdemKey| async move {
                key.release();
                Ok::<_, String>(1)
            })
            .await
    };
    assert!(matches!(released().await, Ok(Outcome::Ran(1))));
    assert!(matches!(released().await, Ok(Outcome::Ran(1))));
}

#[actix_web::test]
async fn a_panic_is_an_error_and_the_key_is_free() {
    let desk = Desk::open().await;
    let panicked = desk.once.run(Scope::once("booking"), "a", &(), |_| async { panic!("on purpose") }).await;
    assert_eq!(refused::<i64, String>(panicked), Code::HandlerPanicked);
    ran(desk.book("a").await);
    assert_usable(&desk.pool, 5).await;
}

#[actix_web::test]
async fn work_that_takes_too_long_is_dropped_and_its_key_is_free() {
    let desk = Desk::with(Policy::new().max_run(Duration::from_secs(2))).await;
    let hung = desk.once.run(Scope::once("booking"), "a", &(), |_| std::future::pending()).await;
    assert_eq!(refused::<i64, String>(hung), Code::OutcomeUnknown);
    ran(desk.book("a").await);
}

#[actix_web::test]
async fn whoever_loses_interest_does_not_stop_the_work() {
    let desk = Desk::open().await;
    let gate = Gate::new();
    {
        let mut call = Box::pin(held(&desk.once, &desk.pool, "a", &gate));
        futures_util::future::select(&mut call, Box::pin(gate.entered(1))).await;
    }
    assert!(matches!(desk.book("a").await, Ok(Outcome::Outstanding(_))));
    gate.open(1);
    eventually("the result is stored", async || desk.db.state("a").await.as_deref() == Some("completed")).await;
    replayed(desk.book("a").await);
    assert_eq!(desk.db.effects("a").await, 1);
}

#[actix_web::test]
async fn a_stored_result_is_told_while_the_pool_is_used_up() {
    let desk = Desk::open().await;
    assert!(matches!(desk.book("a").await, Ok(Outcome::Ran(_))));
    let users = join_all((0..5).map(|_| desk.pool.get())).await;
    eventually("it is told", async || matches!(desk.book("a").await, Ok(Outcome::Replayed(_)))).await;
    assert!(users.iter().all(Result::is_ok));
    assert_eq!(desk.db.effects("a").await, 1);
}

/// Wherever its task is dropped: the work may be done twice, its result is stored once.
#[actix_web::test]
async fn a_task_that_is_dropped_anywhere_leaves_a_key_that_can_be_used() {
    let desk = Desk::with(Policy::new().lease(Duration::from_millis(200))).await;
    let mut cut = 0;
    for polls in 1..20 {
        for drop in [failpoint::Drop::After(polls), failpoint::Drop::WokenAfter(polls)] {
            let key = format!("{drop:?}").replace(['(', ')'], "-");
            failpoint::cut(&key, drop);
            let first = desk.book(&key).await;
            let was_cut = matches!(first, Err(OnceError::Refused(Code::OutcomeUnknown)));
            assert!(was_cut || matches!(first, Ok(Outcome::Ran(_))), "{drop:?}: {first:?}");
            cut += u32::from(was_cut);
            eventually("the key can be used", async || !matches!(desk.book(&key).await, Ok(Outcome::Outstanding(_))))
                .await;
            let id = replayed(desk.book(&key).await);
            assert_eq!(replayed(book(&desk.other(), &desk.pool, &key, &()).await), id);
            let effects = desk.db.effects(&key).await;
            assert!(effects == 1 || was_cut && effects == 2, "{drop:?}: {effects}");
        }
    }
    assert!(cut >= 6, "{cut} tasks were dropped");
    assert_usable(&desk.pool, 5).await;
}

// --- fencing and takeover -------------------------------------------------------------------------------------

#[actix_web::test]
async fn a_late_owner_stores_nothing_and_gets_what_is_stored() {
    let desk = Desk::open().await;
    let (gate, other) = (Gate::new(), desk.other());
    let late = held(&desk.once, &desk.pool, "a", &gate);
    let meanwhile = async {
        gate.entered(1).await;
        // With an owner of its own: a renewal that is due at this moment changes nothing.
        desk.db.lapse("a").await;
        let id = ran(book(&other, &desk.pool, "a", &()).await);
        gate.open(1);
        id
    };
    let (late, id) = futures_util::join!(late, meanwhile);
    assert_eq!(replayed(late), id);
    assert_eq!(replayed(desk.book("a").await), id);
}

#[actix_web::test]
async fn a_late_owner_is_told_so_while_the_next_one_still_runs() {
    let desk = Desk::open().await;
    let (slow, slower, other) = (Gate::new(), Gate::new(), desk.other());
    let late = held(&desk.once, &desk.pool, "a", &slow);
    let next = async {
        slow.entered(1).await;
        // With an owner of its own: a renewal that is due at this moment changes nothing.
        desk.db.lapse("a").await;
        held(&other, &desk.pool, "a", &slower).await
    };
    let order = async {
        slower.entered(1).await;
        slow.open(1);
    };
    let late = async {
        let late = late.await;
        slower.open(1);
        late
    };
    let (late, next, ()) = futures_util::join!(late, next, order);
    assert_eq!(refused(late), Code::LeaseLost);
    assert_eq!(replayed(desk.book("a").await), ran(next));
}

/// Killed at every point of the path: the work is outstanding until the lease ends, then taken over.
#[actix_web::test]
async fn a_killed_process_leaves_its_work_to_the_next_one() {
    let desk = Desk::open().await;
    for (point, already_done) in [("before-claim", 0), ("after-claim", 0), ("in-job", 1)] {
        let setup = Setup { lease: Duration::from_millis(300), ..Setup::new(&desk.db.url) };
        let mut doomed = setup.start();
        doomed.stop_at(point, 1).await;
        let mut request = Raw::connect(doomed.address).await;
        request.send(post(&format!("/jobs/{point}"), "unused", "1")).await.unwrap();
        doomed.stopped_at(point).await;
        assert_eq!(desk.db.effects(point).await, already_done, "{point}");
        doomed.kill();

        let next = setup.start();
        let ask = async || client().post(next.url(&format!("/jobs/{point}"))).body("1").answer().await.json();
        eventually("the work is done", async || !ask().await["outstanding"].is_u64()).await;
        assert!(ask().await["replayed"].is_i64(), "{point}: {}", ask().await);
        assert_eq!(desk.db.effects(point).await, already_done + 1, "{point}");
    }
}

// --- what is kept -----------------------------------------------------------------------------------------------

#[actix_web::test]
async fn a_result_of_another_shape_is_a_typed_error() {
    let desk = Desk::open().await;
    ran(desk.book("a").await);
    let newer: Result<Outcome<Vec<String>>, OnceError<String>> =
        desk.once.run(Scope::once("booking"), "a", &(), |_| async { Ok(vec![]) }).await;
    assert!(matches!(newer, Err(OnceError::Shape)), "{newer:?}");
    // The stored one is as it was.
    replayed(desk.book("a").await);
}

#[actix_web::test]
async fn a_result_that_cannot_be_kept_is_returned_once_and_never_made_again() {
    let desk = Desk::with(Policy::new().response_limit(100)).await;
    let runs = Arc::new(AtomicU32::new(0));
    let counted = || {
        let runs = Arc::clone(&runs);
        move || runs.fetch_add(1, Ordering::Relaxed)
    };
    for _ in 0..2 {
        let count = counted();
        let large = desk.once.run(Scope::once("w"), "large", &(), |_| async move {
            count();
            Ok::<_, String>("x".repeat(200))
        });
        let large = large.await;
        let count = counted();
        let silent = desk.once.run(Scope::once("w"), "silent", &(), |key: IdemKey| async move {
            count();
            key.keep_without_body();
            Ok::<_, String>(1)
        });
        let silent = silent.await;
        let count = counted();
        let no_json = desk.once.run(Scope::once("w"), "no-json", &(), |_| async move {
            count();
            Ok::<_, String>(HashMap::from([(vec![1], 1)]))
        });
        let no_json = no_json.await;
        let first = matches!(large, Ok(Outcome::Ran(_)));
        if first {
            assert!(matches!((&silent, &no_json), (Ok(Outcome::Ran(1)), Ok(Outcome::Ran(_)))));
        } else {
            assert!(matches!(large, Err(OnceError::Omitted)));
            assert!(matches!(silent, Err(OnceError::Omitted)) && matches!(no_json, Err(OnceError::Omitted)));
        }
    }
    assert_eq!(runs.load(Ordering::Relaxed), 3);
}

#[actix_web::test]
async fn what_a_completed_key_gets_is_for_the_policy_to_say() {
    let desk = Desk::open().await;
    ran(desk.book("a").await);
    let once = |on_completed| desk.once.with(Policy::new().on_completed(on_completed));
    assert_eq!(refused(book(&once(OnCompleted::Reject), &desk.pool, "a", &()).await), Code::AlreadyCompleted);
    ran(book(&once(OnCompleted::RunAgain), &desk.pool, "a", &()).await);
    assert_eq!(desk.db.effects("a").await, 2);
}

#[actix_web::test]
async fn an_expired_key_is_free() {
    let desk = Desk::open().await;
    let id = ran(desk.book("a").await);
    desk.db.age("a", "2 days").await;
    assert_ne!(ran(desk.book("a").await), id);
}

#[actix_web::test]
async fn keys_of_functions_and_of_requests_never_meet() {
    let seen = Arc::new(std::sync::Mutex::new(None));
    let told = Arc::clone(&seen);
    let rig = Rig::builder()
        .serve(move |config, idempotency, _| {
            let told = Arc::clone(&told);
            let handler = move |key: IdemKey| {
                *told.lock().unwrap() = Some(key.scope().clone());
                async { HttpResponse::Created().finish() }
            };
            config.service(web::resource("/things").wrap(idempotency.clone()).route(web::post().to(handler)));
        })
        .await;
    assert_eq!(rig.post("/things").key("k").answer().await.status, 201);
    let scope = seen.lock().unwrap().take().unwrap();
    let once = Once::of(&rig.idempotency);
    let ran = once.run(scope, "k", &(), |_| async { Ok::<_, String>(1) }).await;
    assert!(matches!(ran, Ok(Outcome::Ran(1))), "{ran:?}");
    assert_eq!(rig.db.keys().await, 2);

    // Nor do those of two tenants or two principals.
    for scope in
        [Scope::once("s").for_tenant("1"), Scope::once("s").for_tenant("2"), Scope::once("s").for_principal("1")]
    {
        assert!(matches!(once.run(scope, "k", &(), |_| async { Ok::<_, String>(1) }).await, Ok(Outcome::Ran(1))));
    }
}

// --- what cannot run ------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn bad_keys_and_inputs_are_typed_errors_and_leave_no_row() {
    let desk = Desk::open().await;
    for key in ["", " ", "a b", "a\0b", "a\nb", "é", &"x".repeat(256)] {
        assert!(matches!(desk.book(key).await, Err(OnceError::InvalidKey(_))), "{key:?}");
    }
    let no_json = HashMap::from([(vec![1], 1)]);
    assert!(matches!(book(&desk.once, &desk.pool, "a", &no_json).await, Err(OnceError::Input(_))));
    assert_eq!((desk.db.keys().await, desk.db.all_effects().await), (0, 0));
}

#[actix_web::test]
async fn without_a_store_nothing_runs() {
    let desk = Desk::open().await;
    ran(desk.book("a").await);
    desk.db.run("ALTER TABLE idempotency_keys RENAME TO elsewhere").await;
    for key in ["a", "b"] {
        assert!(matches!(desk.book(key).await, Err(OnceError::Store(_))));
    }
    desk.db.run("ALTER TABLE elsewhere RENAME TO idempotency_keys").await;
    replayed(desk.book("a").await);
    assert_eq!(desk.db.effects("b").await, 0);
}

#[actix_web::test]
async fn while_its_process_shuts_down_nothing_new_runs_and_results_still_come_back() {
    let db = Db::new().await;
    let pool = db.pool(5);
    let idempotency = Idempotency::postgres(pool.clone());
    let once = Once::of(&idempotency);
    ran(book(&once, &pool, "a", &()).await);
    idempotency.drain().on(async {}).await;
    replayed(book(&once, &pool, "a", &()).await);
    assert_eq!(refused(book(&once, &pool, "b", &()).await), Code::ShuttingDown);
    assert_eq!(db.effects("b").await, 0);
}

#[actix_web::test]
async fn settings_that_mean_nothing_for_a_function_are_refused_when_they_are_made() {
    let desk = Desk::open().await;
    let says = |policy: Policy, word: &str| {
        let panic = catch_unwind(AssertUnwindSafe(|| desk.once.with(policy))).unwrap_err();
        let message = panic.downcast_ref::<String>().cloned().or(panic.downcast_ref::<&str>().map(|s| (*s).into()));
        assert!(message.as_ref().is_some_and(|message| message.contains(word)), "{message:?}");
    };
    says(Policy::new().atomic(), "run_in");
    says(Policy::new().on_failure(OnFailure::Store), "OnFailure::Store");
    says(Policy::new().quota(Quota { live: 1.try_into().ok(), outstanding: None }), "quota");
}

// --- in a transaction -----------------------------------------------------------------------------------------------

/// What the work writes, in the caller's transaction.
async fn book_in(once: &Once, conn: &mut AsyncPgConnection, key: &str) -> Answered {
    once.run_in(conn, Scope::once("booking"), key, &(), async |conn| {
        effect_in(conn, key).await.map_err(|error| error.to_string())
    })
    .await
}

#[actix_web::test]
async fn in_a_transaction_writes_and_result_are_there_together_or_not_at_all() {
    let desk = Desk::open().await;
    let mut conn = desk.db.connect().await;
    let rolled_back = conn
        .transaction(async |conn| {
            ran(book_in(&desk.once, conn, "a").await);
            Err::<(), _>(diesel::result::Error::RollbackTransaction)
        })
        .await;
    assert!(rolled_back.is_err());
    assert_eq!((desk.db.keys().await, desk.db.all_effects().await), (0, 0));

    let id = conn
        .transaction(async |conn| Ok::<_, diesel::result::Error>(ran(book_in(&desk.once, conn, "a").await)))
        .await
        .unwrap();
    // Outside one it opens its own.
    assert_eq!(replayed(book_in(&desk.once, &mut conn, "a").await), id);
    assert_eq!(replayed(desk.book("a").await), id);
    ran(book_in(&desk.once, &mut conn, "b").await);
    assert_eq!(replayed(desk.book("b").await), replayed(book_in(&desk.once, &mut conn, "b").await));
    assert_eq!(desk.db.all_effects().await, 2);
}

/// T03
#[actix_web::test]
async fn no_answer_harms_the_transaction_around_it() {
    for isolation in ["read committed", "serializable"] {
        let desk = Desk::open().await;
        let id = ran(desk.book("done").await);
        let gate = Gate::new();
        let running = rt::spawn({
            let (once, pool, gate) = (desk.other(), desk.pool.clone(), gate.clone());
            async move { held(&once, &pool, "running", &gate).await }
        });
        gate.entered(1).await;
        let mut conn = desk.db.connect().await;
        conn.batch_execute(&format!("SET default_transaction_isolation = '{isolation}'")).await.unwrap();
        conn.transaction(async |conn| {
            effect_in(conn, "before").await.unwrap();
            assert_eq!(replayed(book_in(&desk.once, conn, "done").await), id);
            assert!(matches!(book_in(&desk.once, conn, "running").await, Ok(Outcome::Outstanding(_))));
            let other_input =
                desk.once.run_in(conn, Scope::once("booking"), "done", &1, async |_| Ok::<i64, String>(1));
            assert_eq!(refused(other_input.await), Code::KeyReused);
            let failing = desk.once.run_in(conn, Scope::once("booking"), "failing", &(), async |conn| {
                effect_in(conn, "undone").await.unwrap();
                Err::<i64, _>("no")
            });
            assert!(matches!(failing.await, Err(OnceError::Failed("no"))));
            let swallowed = desk.once.run_in(conn, Scope::once("booking"), "swallowed", &(), async |conn| {
                effect_in(conn, "undone").await.unwrap();
                let _ = conn.batch_execute("SELECT 1 / 0").await;
                Ok::<i64, String>(1)
            });
            assert_eq!(refused(swallowed.await), Code::TransactionAborted);
            let invalid = book_in(&desk.once, conn, "").await;
            assert!(matches!(invalid, Err(OnceError::InvalidKey(_))));
            effect_in(conn, "after").await.unwrap();
            Ok::<_, diesel::result::Error>(())
        })
        .await
        .unwrap();
        gate.open(1);
        ran(running.await.unwrap());
        assert_eq!((desk.db.effects("before").await, desk.db.effects("after").await), (1, 1), "{isolation}");
        assert_eq!(desk.db.effects("undone").await, 0);
        assert_eq!(desk.db.state("failing").await, None);
        assert_eq!(desk.db.state("swallowed").await, None);
    }
}

#[actix_web::test]
async fn while_a_transaction_has_the_key_others_are_told_at_once_and_do_not_block() {
    let desk = Desk::open().await;
    let (mut one, mut two) = (desk.db.connect().await, desk.db.connect().await);
    one.transaction(async |conn| {
        ran(book_in(&desk.once, conn, "a").await);
        assert!(matches!(book_in(&desk.once, &mut two, "a").await, Ok(Outcome::Outstanding(_))));
        Ok::<_, diesel::result::Error>(())
    })
    .await
    .unwrap();
    replayed(book_in(&desk.once, &mut two, "a").await);
}

#[actix_web::test]
async fn who_finds_somebody_else_first_at_the_end_is_rolled_back_and_gets_that_result() {
    let desk = Desk::open().await;
    let mut conn = desk.db.connect().await;
    conn.transaction(async |conn| {
        let overtaken = desk.once.run_in(conn, Scope::once("booking"), "a", &(), async |conn| {
            effect_in(conn, "loser").await.unwrap();
            // A claim asks for no lock, and is committed while this one runs.
            ran(desk.book("a").await);
            Ok::<_, String>(-1)
        });
        let id = overtaken.await;
        assert!(replayed(id) > 0);
        effect_in(conn, "after").await.unwrap();
        Ok::<_, diesel::result::Error>(())
    })
    .await
    .unwrap();
    assert_eq!((desk.db.effects("a").await, desk.db.effects("loser").await, desk.db.effects("after").await), (1, 0, 1));
}

#[actix_web::test]
async fn above_read_committed_a_lost_race_is_a_typed_answer_and_the_savepoint_keeps_the_rest() {
    let desk = Desk::open().await;
    let mut conn = desk.db.connect().await;
    conn.batch_execute("SET default_transaction_isolation = 'serializable'").await.unwrap();
    conn.transaction(async |conn| {
        effect_in(conn, "before").await.unwrap();
        let overtaken = desk.once.run_in(conn, Scope::once("booking"), "a", &(), async |conn| {
            effect_in(conn, "loser").await.unwrap();
            ran(desk.book("a").await);
            Ok::<i64, String>(-1)
        });
        assert_eq!(refused(overtaken.await), Code::Serialization);
        effect_in(conn, "after").await.unwrap();
        Ok::<_, diesel::result::Error>(())
    })
    .await
    .unwrap();
    assert_eq!(
        (desk.db.effects("loser").await, desk.db.effects("before").await, desk.db.effects("after").await),
        (0, 1, 1)
    );
}

#[actix_web::test]
async fn work_that_leaves_a_savepoint_open_is_rolled_back() {
    let desk = Desk::open().await;
    let mut conn = desk.db.connect().await;
    let left = desk.once.run_in(&mut conn, Scope::once("booking"), "a", &(), async |conn| {
        use diesel_async::TransactionManager;
        <AsyncPgConnection as AsyncConnection>::TransactionManager::begin_transaction(conn).await.unwrap();
        effect_in(conn, "a").await.map_err(|error| error.to_string())
    });
    assert_eq!(refused(left.await), Code::TransactionMisused);
    drop(conn);
    assert_eq!((desk.db.keys().await, desk.db.all_effects().await), (0, 0));
}

/// Its key is that of the booking; the request has one of its own.
async fn reserve(mut tx: IdemTx, once: Data<Once>, room: Json<Value>) -> actix_web::Result<HttpResponse> {
    let key = format!("room-{}", room["room"]);
    let booked =
        once.run_in(&mut tx, Scope::once("rooms"), &key, &(), async |conn| effect_in(conn, "room").await).await?;
    Ok(match booked {
        Outcome::Ran(id) => HttpResponse::Created().json(id),
        Outcome::Replayed(id) => HttpResponse::Ok().json(id),
        Outcome::Outstanding(_) => HttpResponse::Conflict().finish(),
    })
}

#[actix_web::test]
async fn within_idem_tx_the_booking_commits_with_the_answer_of_the_request() {
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            config
                .app_data(Data::new(Once::of(idempotency)))
                .service(web::resource("/rooms").wrap(idempotency.clone()).route(web::post().to(reserve)));
        })
        .await;
    let first = rig.post("/rooms").key("one").json(&json!({"room": 1})).answer().await;
    assert_eq!(first.status, 201);
    let second = rig.post("/rooms").key("two").json(&json!({"room": 1})).answer().await;
    assert_eq!((second.status.as_u16(), &second.body), (200, &first.body));
    first.assert_replayed_by(&rig.post("/rooms").key("one").json(&json!({"room": 1})).answer().await);
    assert_eq!(rig.db.effects("room").await, 1);
}

// --- a transaction of the work's own ---------------------------------------------------------------------------------

#[actix_web::test]
async fn a_result_stored_in_a_transaction_of_the_works_own_is_the_result() {
    let desk = Desk::open().await;
    let work = async |key: &str, commit: bool, fail: bool| {
        let (pool, tag) = (desk.pool.clone(), key.to_owned());
        desk.once
            .run(Scope::once("own"), key, &(), move |key: IdemKey| async move {
                let mut conn = pool.get().await.unwrap();
                let stored = conn
                    .transaction(async |conn| {
                        let id = effect_in(conn, &tag).await.unwrap();
                        key.complete_in(conn, ResponseSnapshot::json(StatusCode::OK, &id).unwrap()).await.unwrap();
                        if commit { Ok(id) } else { Err(diesel::result::Error::RollbackTransaction) }
                    })
                    .await;
                if fail { Err("too late".to_owned()) } else { Ok(stored.unwrap_or(-1)) }
            })
            .await
    };
    let id = ran(work("kept", true, false).await);
    assert_eq!(replayed(work("kept", true, false).await), id);
    assert_eq!(desk.db.effects("kept").await, 1);
    // An error after the commit undoes nothing.
    assert!(matches!(work("late", true, true).await, Err(OnceError::Failed(_))));
    replayed(work("late", true, false).await);
    assert_eq!(desk.db.effects("late").await, 1);
    // A success without one is none.
    assert_eq!(refused(work("undone", false, false).await), Code::TransactionMisused);
    ran(work("undone", true, false).await);
    assert_eq!(desk.db.effects("undone").await, 1);
}
