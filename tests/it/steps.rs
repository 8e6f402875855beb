//! Steps: what an attempt has done is not done again by the next one, whatever ended the first.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use actix_idempotency::{
    Code, IdemKey, IdemTx, Isolation, MAX_STEP_NAME, MAX_STEP_RESULT, Once, OnceError, Outcome, PgPool, Policy, Scope,
    StepError,
};
use actix_web::{
    HttpResponse, Result,
    error::InternalError,
    http::StatusCode,
    web::{self, Data, ServiceConfig},
};

use crate::support::{
    app::{created, effect, effect_in},
    client::{Answer, Raw, RequestExt, client, post},
    db::{Db, LAPSED},
    eventually,
    gate::Gate,
    jobs,
    process::Setup,
    rig::Rig,
};

const LEASE: Duration = Duration::from_millis(300);

async fn desk() -> Rig {
    let policy = Policy::new().anonymous();
    Rig::builder()
        .policy(policy.clone())
        .serve(move |config: &mut ServiceConfig, idempotency, _| jobs::routes(config, idempotency, &policy))
        .await
}

async fn charged(db: &Db, key: &str) -> (i64, i64) {
    (db.effects(&format!("charge {key}")).await, db.effects(&format!("mail {key}")).await)
}

// --- the next attempt goes on -----------------------------------------------------------------------------

#[actix_web::test]
async fn a_retry_after_a_failure_does_only_what_is_left() {
    let rig = desk().await;
    let pay = async || rig.post("/jobs/steps").key("a").body("fail").answer().await;
    assert_eq!(pay().await.status, 502);
    assert_eq!(charged(&rig.db, "a").await, (1, 0));
    let paid = pay().await;
    assert_eq!(paid.status, 201);
    assert_eq!(charged(&rig.db, "a").await, (1, 1));
    paid.assert_replayed_by(&pay().await);
    // Another key has steps of its own.
    assert_eq!(rig.post("/jobs/steps").key("b").body("").answer().await.status, 201);
    assert_eq!(charged(&rig.db, "b").await, (1, 1));
}

/// Killed after each point: what was stored is not done again. What was done and not stored yet is: at least
/// once, as the docs say.
#[actix_web::test]
async fn a_takeover_after_a_kill_does_only_what_is_left() {
    let db = Db::new().await;
    let points = [
        ("before-step", 1, (1, 1)),
        ("after-step", 1, (2, 1)),
        ("after-step-stored", 1, (1, 1)),
        ("between-steps", 1, (1, 1)),
        ("before-step", 2, (1, 1)),
        ("after-step", 2, (1, 2)),
        ("after-step-stored", 2, (1, 1)),
    ];
    for (point, nth, effects) in points {
        let key = format!("{point}-{nth}");
        let setup = Setup { lease: LEASE, ..Setup::new(&db.url) };
        let mut doomed = setup.start();
        doomed.stop_at(point, nth).await;
        let mut request = Raw::connect(doomed.address).await;
        request.send(post("/jobs/steps", &key, "1")).await.unwrap();
        doomed.stopped_at(point).await;
        doomed.kill();

        let next = setup.start();
        let pay = async || {
            client()
                .post(next.url("/jobs/steps"))
                .key(&key)
                .body("1")
                .header("content-type", "application/json")
                .answer()
                .await
        };
        eventually("the payment is made", async || pay().await.status == 201).await;
        assert_eq!(charged(&db, &key).await, effects, "killed at {key}");
    }
}

#[actix_web::test]
async fn a_corrected_request_starts_without_steps_where_the_handler_says_that_nothing_was_done() {
    let rig = with_handler(|key, pool, _, body| async move {
        let done: String = key.step("one", async || effect(&pool, &body).await.map(|_| body.clone())).await?;
        if body == "bad" {
            key.release();
        }
        let status = if body == "good" { StatusCode::CREATED } else { StatusCode::BAD_REQUEST };
        Ok(HttpResponse::build(status).body(done))
    })
    .await;
    let send = async |body: &'static str| rig.post("/").key("a").body(body).answer().await;
    assert_eq!(send("bad").await.text(), "bad");
    assert_eq!(send("bad").await.text(), "bad");
    assert_eq!(rig.db.effects("bad").await, 1, "the same request again");
    let good = send("good").await;
    assert_eq!((good.status.as_u16(), good.text()), (201, "good".into()));
    assert_eq!(rig.db.effects("good").await, 1);
}

#[actix_web::test]
async fn steps_go_with_their_key() {
    let rig = desk().await;
    assert_eq!(rig.post("/jobs/steps").key("a").body("").answer().await.status, 201);
    let steps = "SELECT count(*) AS value FROM idempotency_steps";
    assert_eq!(rig.db.number(steps).await, 2);
    rig.db.age("a", "2 days").await;
    // Expired and not swept: a later operation is a new one.
    assert_eq!(rig.post("/jobs/steps").key("a").body("").answer().await.status, 201);
    assert_eq!(charged(&rig.db, "a").await, (2, 2));
    rig.db.age("a", "2 days").await;
    assert_eq!(actix_idempotency::Sweeper::new(rig.pool.clone()).sweep_once().await.unwrap(), 1);
    assert_eq!(rig.db.number(steps).await, 0);
}

#[actix_web::test]
async fn plain_functions_have_steps_too() {
    let db = Db::new().await;
    let (pool, once) = (db.pool(5), Once::postgres(db.pool(5)));
    let run = async |fail: bool| {
        let pool = pool.clone();
        once.run(Scope::once("job"), "a", &(), move |key: IdemKey| async move {
            let id: i64 = key
                .step("charge", async || effect(&pool, "charge").await.map_err(|error| error.to_string()))
                .await
                .map_err(|error| error.to_string())?;
            if fail { Err("later".to_owned()) } else { Ok(id) }
        })
        .await
    };
    assert!(matches!(run(true).await, Err(OnceError::Failed(_))));
    assert!(matches!(run(true).await, Err(OnceError::Failed(_))));
    assert!(matches!(run(false).await, Ok(Outcome::Ran(_))));
    assert_eq!(db.effects("charge").await, 1);
}

// --- what a step can come to --------------------------------------------------------------------------------

type Said = Arc<std::sync::Mutex<Vec<String>>>;

/// A rig with one handler, which gets the key, the pool, the gate and the body.
async fn with_handler<F, Fut>(handler: F) -> Rig
where
    F: Fn(IdemKey, Data<PgPool>, Data<Gate>, String) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = Result<HttpResponse>> + 'static,
{
    with_policy(Policy::new().anonymous(), handler).await
}

async fn with_policy<F, Fut>(policy: Policy, handler: F) -> Rig
where
    F: Fn(IdemKey, Data<PgPool>, Data<Gate>, String) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = Result<HttpResponse>> + 'static,
{
    Rig::builder()
        .policy(policy)
        .serve(move |config: &mut ServiceConfig, idempotency, _| {
            config.service(web::resource("/").wrap(idempotency.clone()).route(web::post().to(handler.clone())));
        })
        .await
}

#[actix_web::test]
async fn a_name_stands_for_one_step_of_an_attempt() {
    let said = Said::default();
    let told = Arc::clone(&said);
    let rig = with_handler(move |key, _, _, _| {
        let told = Arc::clone(&told);
        async move {
            let failed = key.step("one", async || Err::<(), _>("not yet")).await;
            assert!(matches!(failed, Err(StepError::Failed("not yet"))), "{failed:?}");
            {
                let mut dropped =
                    Box::pin(key.step("one", async || std::future::pending::<Result<(), String>>().await));
                assert!(futures_util::poll!(&mut dropped).is_pending());
            }
            // Nothing was done: the same step may be tried again.
            key.step("one", async || Ok::<_, String>(1)).await.unwrap();
            let repeated = key.step("one", async || Ok::<_, String>(2)).await;
            assert!(matches!(repeated, Err(StepError::Repeated)), "{repeated:?}");
            for name in ["", "a\nb", "a\0b", &"x".repeat(MAX_STEP_NAME + 1)] {
                let unnamed = key.step(name, async || Ok::<_, String>(1)).await;
                assert!(matches!(unnamed, Err(StepError::Name)), "{name:?}");
            }
            key.step(&"x".repeat(MAX_STEP_NAME), async || Ok::<_, String>(1)).await.unwrap();
            told.lock().unwrap().push("all".into());
            Ok(created(1))
        }
    })
    .await;
    assert_eq!(rig.post("/").key("a").answer().await.status, 201);
    assert_eq!(*said.lock().unwrap(), ["all"]);
}

/// What the second attempt gets for a step, as `Debug`.
async fn second_attempt_gets(first: impl serde::Serialize + Clone + Send + Sync + 'static) -> (String, u32) {
    let first = serde_json::to_value(first).unwrap();
    let said = Said::default();
    let runs = Arc::new(AtomicU32::new(0));
    let (told, counted) = (Arc::clone(&said), Arc::clone(&runs));
    let rig = with_handler(move |key, _, _, _| {
        let (first, told, counted) = (first.clone(), Arc::clone(&told), Arc::clone(&counted));
        async move {
            let count = async |value| {
                counted.fetch_add(1, Ordering::Relaxed);
                Ok::<_, String>(value)
            };
            if key.attempt() == 1 {
                key.step("one", async || count(first).await).await.unwrap();
                return Err(InternalError::new("again", StatusCode::BAD_GATEWAY).into());
            }
            let second: std::result::Result<u32, _> = key.step("one", async || count(7.into()).await.map(|_| 7)).await;
            told.lock().unwrap().push(format!("{second:?}"));
            Ok(created(1))
        }
    })
    .await;
    assert_eq!(rig.post("/").key("a").answer().await.status, 502);
    assert_eq!(rig.post("/").key("a").answer().await.status, 201);
    (said.lock().unwrap().remove(0), runs.load(Ordering::Relaxed))
}

#[actix_web::test]
async fn a_result_that_cannot_be_read_again_is_a_typed_error_and_the_step_is_not_repeated() {
    assert_eq!(second_attempt_gets(3).await, ("Ok(3)".into(), 1));
    let (second, runs) = second_attempt_gets("three").await;
    assert_eq!((second.as_str(), runs), ("Err(Shape)", 1));
    assert_eq!(second_attempt_gets("x".repeat(MAX_STEP_RESULT)).await, ("Err(Omitted)".into(), 1));
    let fits = "x".repeat(MAX_STEP_RESULT - 2);
    assert_eq!(second_attempt_gets(fits).await, ("Err(Shape)".into(), 1));
}

#[actix_web::test]
async fn an_attempt_that_was_taken_over_stores_no_step() {
    let said = Said::default();
    let told = Arc::clone(&said);
    let rig = with_handler(move |key, _, gate, _| {
        let told = Arc::clone(&told);
        async move {
            let attempt = key.attempt();
            let step = key.step("one", async || {
                if attempt == 1 {
                    gate.pass().await;
                }
                Ok::<_, String>(attempt)
            });
            match step.await {
                Ok(value) => Ok(HttpResponse::Created().json(value)),
                Err(error) => {
                    told.lock().unwrap().push(format!("{error:?}"));
                    Err(actix_web::error::ErrorInternalServerError("overtaken"))
                }
            }
        }
    })
    .await;
    let late = async { rig.post("/").key("a").answer().await };
    let next = async {
        rig.gate.entered(1).await;
        rig.db.run(LAPSED).await;
        let next = rig.post("/").key("a").answer().await;
        rig.gate.open(1);
        next
    };
    let (late, next): (Answer, Answer) = futures_util::join!(late, next);
    assert_eq!((next.status.as_u16(), next.text()), (201, "2".into()));
    next.assert_replayed_by(&late);
    assert_eq!(*said.lock().unwrap(), [format!("{:?}", StepError::<String>::Refused(Code::LeaseLost))]);
    let stored = "SELECT convert_from(result, 'UTF8') AS value FROM idempotency_steps";
    assert_eq!(rig.db.text(stored).await.as_deref(), Some("2"));
}

#[actix_web::test]
async fn where_every_effect_is_in_the_transaction_there_are_no_steps() {
    let rig = with_policy(Policy::new().anonymous().atomic(), |key, pool, _, _| async move {
        key.step("one", async || effect(&pool, "one").await).await?;
        Ok(created(1))
    })
    .await;
    let answer = rig.post("/").key("a").answer().await;
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (500, "misconfigured"));
    assert_eq!(rig.db.all_effects().await, 0);
}

/// The store fails after the step: the client is told to come back, and nothing claims to know better.
#[actix_web::test]
async fn a_step_whose_result_cannot_be_stored_is_503() {
    let rig = with_handler(|key, pool, _, _| async move {
        key.step("one", async || effect(&pool, "one").await.map(drop)).await?;
        Ok(created(1))
    })
    .await;
    rig.db.run("ALTER TABLE idempotency_steps RENAME TO elsewhere").await;
    let answer = rig.post("/").key("a").answer().await;
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (503, "store-unavailable"));
    rig.db.run("ALTER TABLE elsewhere RENAME TO idempotency_steps").await;
    assert_eq!(rig.post("/").key("a").answer().await.status, 201);
    assert_eq!(rig.db.effects("one").await, 2, "at least once");
}

/// Above READ COMMITTED `IdemTx` locks the row of the key, to which a step refers.
#[actix_web::test]
async fn a_step_waits_for_no_transaction_of_its_own_handler() {
    async fn both(key: IdemKey, mut tx: IdemTx, pool: Data<PgPool>) -> Result<HttpResponse> {
        let id = effect_in(&mut tx, "in the transaction").await?;
        key.step("one", async || effect(&pool, "step").await.map(drop)).await?;
        if key.attempt() == 1 {
            return Err(InternalError::new("again", StatusCode::BAD_GATEWAY).into());
        }
        Ok(created(id))
    }
    for isolation in [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable] {
        let rig = Rig::builder()
            .policy(Policy::new().anonymous().isolation(isolation))
            .serve(|config: &mut ServiceConfig, idempotency, _| {
                config.service(web::resource("/").wrap(idempotency.clone()).route(web::post().to(both)));
            })
            .await;
        for status in [502, 201] {
            let answer = rig.post("/").key("a").answer().await;
            assert_eq!(answer.status, status, "{isolation:?}: {}", answer.text());
        }
        assert!(rig.post("/").key("a").answer().await.is_replay());
        let effects = (rig.db.effects("step").await, rig.db.effects("in the transaction").await);
        assert_eq!(effects, (1, 1), "{isolation:?}");
    }
}

#[actix_web::test]
async fn under_serializable_transactions_steps_are_stored_all_the_same() {
    let db = Db::new().await;
    let pool = db.serializable_pool(5);
    let policy = Policy::new().anonymous();
    let rig = Rig::builder()
        .policy(policy.clone())
        .on(db, pool)
        .serve(move |config: &mut ServiceConfig, idempotency, _| jobs::routes(config, idempotency, &policy))
        .await;
    let pay = async |key: &str| rig.post("/jobs/steps").key(key).body("fail").answer().await;
    for key in ["a", "b", "c"] {
        assert_eq!((pay(key).await.status.as_u16(), pay(key).await.status.as_u16()), (502, 201));
        assert_eq!(charged(&rig.db, key).await, (1, 1));
    }
}
