//! IdemTx: the handler's rows and the stored answer commit together, or not at all.

use std::{num::NonZeroUsize, time::Duration};

use actix_idempotency::{IdemKey, IdemTx, Isolation, Keep, OnOutstanding, PgPool, Policy, Refusal};
use actix_web::{
    HttpResponse, Result,
    error::{ErrorConflict, ErrorInternalServerError},
    web::{self, Data, Json, Query},
};
use diesel::sql_types::Text;
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use serde::Deserialize;

use crate::support::{
    PATIENCE,
    app::{created, order},
    client::RequestExt,
    eventually,
    gate::Gate,
    rig::Rig,
};

/// Business code ran, in this transaction.
async fn effect(conn: &mut AsyncPgConnection, tag: &str) -> Result<i64> {
    #[derive(diesel::QueryableByName)]
    struct Id {
        #[diesel(sql_type = diesel::sql_types::BigInt)]
        id: i64,
    }
    let row: Id = diesel::sql_query("INSERT INTO effects (tag) VALUES ($1) RETURNING id")
        .bind::<Text, _>(tag)
        .get_result(conn)
        .await
        .map_err(ErrorInternalServerError)?;
    Ok(row.id)
}

#[derive(Deserialize)]
struct How {
    how: String,
}

/// The effect, and then whatever the query asks for.
async fn act(mut tx: IdemTx, how: Query<How>, gate: Data<Gate>, key: Option<IdemKey>) -> Result<HttpResponse> {
    let id = effect(&mut tx, &how.how).await?;
    let sql = async |tx: &mut IdemTx, sql: &str| tx.batch_execute(sql).await.map_err(ErrorInternalServerError);
    match how.how.as_str() {
        "commit" => {}
        "err" => return Err(ErrorConflict("no")),
        "not-found" => return Ok(HttpResponse::NotFound().body("none")),
        "panic" => panic!("as asked"),
        "hold" => gate.pass().await,
        "swallow" => drop(tx.batch_execute("SELECT 1 / 0").await),
        "savepoint" => {
            let _ = tokio::time::timeout(
                Duration::from_millis(50),
                tx.transaction(async |_| {
                    std::future::pending::<()>().await;
                    Ok::<_, diesel::result::Error>(())
                }),
            )
            .await;
        }
        "nested" => {
            let inner: Result<(), diesel::result::Error> = tx
                .transaction(async |conn| {
                    conn.batch_execute("INSERT INTO effects (tag) VALUES ('undone')").await?;
                    Err(diesel::result::Error::RollbackTransaction)
                })
                .await;
            assert!(inner.is_err());
        }
        "raw-commit" => sql(&mut tx, "COMMIT").await?,
        "raw-commit-and-begin" => sql(&mut tx, "COMMIT; BEGIN").await?,
        "role" => sql(&mut tx, "SET LOCAL ROLE pg_monitor; SET LOCAL search_path = pg_catalog").await?,
        "deferred" => sql(&mut tx, "INSERT INTO deferred VALUES (1), (1)").await?,
        "keep" => {
            let gate = gate.clone();
            actix_web::rt::spawn(async move {
                gate.pass().await;
                drop(tx);
            });
        }
        "release" => key.unwrap().release(),
        other => panic!("{other}?"),
    }
    Ok(created(id))
}

fn routes(config: &mut web::ServiceConfig, idempotency: &actix_idempotency::Idempotency) {
    config.service(
        web::scope("")
            .wrap(idempotency.clone())
            .route("/act", web::post().to(act))
            .route("/twice", web::post().to(twice))
            .route("/optional", web::post().to(optional))
            .route("/json", web::post().to(with_json))
            .route("/both", web::post().to(both)),
    );
}

async fn rig(policy: Policy) -> Rig {
    Rig::builder().policy(policy.anonymous()).serve(|config, idempotency, _| routes(config, idempotency)).await
}

/// Each test of a promise that holds under both.
fn policies() -> [Policy; 2] {
    [Policy::new(), Policy::new().atomic()]
}

#[actix_web::test]
async fn the_answer_and_the_rows_commit_together() {
    for policy in policies() {
        let rig = rig(policy).await;
        let first = rig.post("/act?how=commit").key("a").answer().await;
        assert_eq!(first.status, 201);
        first.assert_replayed_by(&rig.post("/act?how=commit").key("a").answer().await);
        assert_eq!(rig.db.effects("commit").await, 1);
        // One transaction wrote both.
        assert!(rig.db.is("(SELECT xmin FROM effects) = (SELECT xmin FROM idempotency_keys)").await);
    }
}

#[actix_web::test]
async fn an_error_rolls_back_and_gives_the_key_back() {
    for policy in policies() {
        let rig = rig(policy).await;
        for how in ["err", "not-found"] {
            let failed = rig.post(&format!("/act?how={how}")).key(how).answer().await;
            assert!(failed.status.is_client_error(), "{failed:?}");
            assert_eq!(rig.db.all_effects().await, 0);
            let corrected = rig.post("/act?how=commit").key(how).answer().await;
            assert_eq!((corrected.status.as_u16(), corrected.is_replay()), (201, false));
            rig.db.run("DELETE FROM effects").await;
        }
    }
}

#[actix_web::test]
async fn an_error_that_is_kept_leaves_no_rows_either() {
    for policy in policies() {
        let rig = rig(policy.keep(Keep::Draft)).await;
        let first = rig.post("/act?how=not-found").key("a").answer().await;
        assert_eq!(first.status, 404);
        first.assert_replayed_by(&rig.post("/act?how=not-found").key("a").answer().await);
        assert_eq!(rig.db.all_effects().await, 0);
    }
}

/// X06
#[actix_web::test]
async fn a_panic_rolls_back_and_leaves_the_pool_usable() {
    for policy in policies() {
        let rig = Rig::builder()
            .policy(policy.anonymous())
            .pool_size(3)
            .serve(|config, idempotency, _| routes(config, idempotency))
            .await;
        for n in 0..50 {
            let failed = rig.post("/act?how=panic").key(&format!("k{n}")).answer().await;
            assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "handler-panicked"));
        }
        assert_eq!(rig.db.all_effects().await, 0);
        let retry = rig.post("/act?how=panic").key("k0").answer().await;
        assert_eq!(retry.code(), "handler-panicked", "the key is free again");
        assert_eq!(rig.post("/act?how=commit").key("fresh").answer().await.status, 201);
        assert!(rig.db.is(NO_OPEN_TRANSACTION).await);
    }
}

const NO_OPEN_TRANSACTION: &str = "NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
                                   AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%')";

#[actix_web::test]
async fn a_swallowed_error_becomes_500_and_nothing_is_kept() {
    for policy in policies() {
        let rig = rig(policy).await;
        let failed = rig.post("/act?how=swallow").key("a").answer().await;
        assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "transaction-aborted"));
        assert_eq!(rig.db.all_effects().await, 0);
        assert_ne!(rig.db.state("a").await.as_deref(), Some("completed"));
        assert_eq!(rig.post("/act?how=swallow").key("a").answer().await.code(), "transaction-aborted", "it ran again");
    }
}

#[actix_web::test]
async fn a_savepoint_left_open_becomes_500_and_nothing_is_kept() {
    for policy in policies() {
        let rig = rig(policy).await;
        let failed = rig.post("/act?how=savepoint").key("a").answer().await;
        assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "transaction-misused"));
        eventually("the connection is gone", async || rig.db.is(NO_OPEN_TRANSACTION).await).await;
        assert_eq!(rig.db.all_effects().await, 0);
        assert_ne!(rig.db.state("a").await.as_deref(), Some("completed"));
    }
}

#[actix_web::test]
async fn nested_transactions_are_savepoints() {
    for policy in policies() {
        let rig = rig(policy).await;
        assert_eq!(rig.post("/act?how=nested").key("a").answer().await.status, 201);
        assert_eq!((rig.db.effects("nested").await, rig.db.effects("undone").await), (1, 0));
    }
}

#[actix_web::test]
async fn a_raw_commit_becomes_500_and_never_runs_again() {
    for policy in policies() {
        let rig = rig(policy).await;
        for how in ["raw-commit", "raw-commit-and-begin"] {
            let failed = rig.post(&format!("/act?how={how}")).key(how).answer().await;
            assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "transaction-misused"));
            let retry = rig.post(&format!("/act?how={how}")).key(how).answer().await;
            assert!(retry.is_replay());
            assert_eq!(retry.code(), "transaction-misused");
            assert_eq!(rig.db.effects(how).await, 1);
        }
    }
}

#[actix_web::test]
async fn a_role_of_the_handlers_is_undone_before_completing() {
    for policy in policies() {
        let rig = rig(policy).await;
        let first = rig.post("/act?how=role").key("a").answer().await;
        assert_eq!(first.status, 201, "{}", first.text());
        first.assert_replayed_by(&rig.post("/act?how=role").key("a").answer().await);
    }
}

#[actix_web::test]
async fn a_deferred_constraint_is_409_and_releases() {
    for policy in policies() {
        let rig = rig(policy).await;
        rig.db.run("CREATE TABLE deferred (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)").await;
        let failed = rig.post("/act?how=deferred").key("a").answer().await;
        assert_eq!((failed.status.as_u16(), failed.code().as_str()), (409, "constraint-violated"));
        assert_eq!(failed.retry_after(), None);
        assert_eq!(rig.db.all_effects().await, 0);
        rig.db.run("ALTER TABLE deferred DROP CONSTRAINT deferred_n_key").await;
        assert_eq!(rig.post("/act?how=deferred").key("a").answer().await.status, 201);
    }
}

#[actix_web::test]
async fn a_transaction_kept_beyond_the_handler_is_500_and_the_lease_ends_it() {
    for policy in policies() {
        let atomic = policy.clone();
        let rig = rig(policy.lease(Duration::from_millis(500))).await;
        let failed = rig.post("/act?how=keep").key("a").answer().await;
        assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "transaction-misused"));
        let retry = rig.post("/act?how=keep").key("a").answer().await;
        assert_eq!(retry.code(), "outstanding", "{atomic:?}");
        rig.gate.open(1);
        eventually("the key is free", async || {
            rig.post("/act?how=keep").key("a").answer().await.code() == "transaction-misused"
        })
        .await;
        assert_eq!(rig.db.all_effects().await, 0);
        rig.gate.open(1);
    }
}

#[actix_web::test]
async fn a_success_that_releases_contradicts_itself() {
    for policy in policies() {
        let rig = rig(policy).await;
        let failed = rig.post("/act?how=release").key("a").answer().await;
        assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "transaction-misused"));
        assert_eq!(rig.db.all_effects().await, 0);
        assert_eq!(rig.post("/act?how=release").key("a").answer().await.code(), "transaction-misused", "it ran again");
    }
}

async fn twice(mut first: IdemTx, second: Option<IdemTx>) -> Result<HttpResponse> {
    assert!(second.is_none());
    Ok(created(effect(&mut first, "twice").await?))
}

#[actix_web::test]
async fn a_second_extraction_makes_the_answer_an_error() {
    for policy in policies() {
        let rig = rig(policy).await;
        let failed = rig.post("/twice").key("a").answer().await;
        assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "transaction-misused"));
        assert_eq!(rig.db.all_effects().await, 0);
        let keyless = rig.post("/twice").answer().await;
        assert_eq!(keyless.code(), "transaction-misused");
        assert_eq!(rig.db.all_effects().await, 0);
    }
}

/// Goes on without its transaction.
async fn optional(tx: Option<IdemTx>) -> HttpResponse {
    HttpResponse::Ok().body(if tx.is_some() { "with" } else { "without" })
}

#[actix_web::test]
async fn an_exhausted_pool_makes_the_answer_an_error_also_behind_option() {
    let rig = Rig::builder()
        .policy(Policy::new().anonymous().store_timeout(Duration::from_millis(300)))
        .pool_size(1)
        .serve(|config, idempotency, _| routes(config, idempotency))
        .await;
    assert_eq!(rig.post("/optional").key("a").answer().await.text(), "with");
    let taken = rig.pool.get().await.unwrap();
    let keyless = rig.post("/optional").answer().await;
    assert_eq!((keyless.status.as_u16(), keyless.code().as_str()), (503, "store-unavailable"));
    assert!(keyless.retry_after().is_some());
    drop(taken);
    assert_eq!(rig.post("/optional").answer().await.text(), "with");
}

#[actix_web::test]
async fn without_a_key_it_is_a_transaction_that_commits_with_a_success() {
    for policy in policies() {
        let rig = rig(policy).await;
        rig.db.run("CREATE TABLE deferred (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)").await;
        assert_eq!(rig.post("/act?how=commit").answer().await.status, 201);
        assert_eq!(rig.post("/act?how=err").answer().await.status, 409);
        assert_eq!(rig.post("/act?how=swallow").answer().await.code(), "transaction-aborted");
        assert_eq!(rig.post("/act?how=deferred").answer().await.code(), "constraint-violated");
        assert_eq!(rig.post("/act?how=savepoint").answer().await.code(), "transaction-misused");
        assert_eq!(rig.db.all_effects().await, 1);
        assert_eq!(rig.post("/act?how=raw-commit").answer().await.code(), "transaction-misused");
        assert_eq!(rig.db.keys().await, 0);
    }
}

async fn with_json(mut tx: IdemTx, body: Json<serde_json::Value>) -> Result<HttpResponse> {
    assert!(body.is_object());
    Ok(created(effect(&mut tx, "json").await?))
}

#[actix_web::test]
async fn a_rejected_body_costs_no_connection() {
    for policy in policies() {
        let rig = Rig::builder()
            .policy(policy.anonymous())
            .pool_size(2)
            .serve(|config, idempotency, _| routes(config, idempotency))
            .await;
        for n in 0..1000 {
            let request = rig.post("/json").key(&format!("k{n}")).header("content-type", "application/json");
            let rejected = request.body("{").answer().await;
            assert_eq!(rejected.status, 400);
        }
        assert_eq!(rig.pool.state().statistics.connections_closed_broken, 0);
        assert_eq!(rig.post("/json").key("k0").json(&order("x")).answer().await.status, 201);
    }
}

/// Takes a second connection beside its transaction.
async fn both(mut tx: IdemTx, pool: Data<PgPool>) -> Result<HttpResponse> {
    let id = effect(&mut tx, "both").await?;
    let mut other = pool.get().await.map_err(ErrorInternalServerError)?;
    other.batch_execute("SELECT 1").await.map_err(ErrorInternalServerError)?;
    Ok(created(id))
}

/// D01
#[actix_web::test]
async fn holders_that_take_a_second_connection_do_not_starve_the_pool() {
    for policy in policies() {
        let rig = Rig::builder()
            // Forty take turns, which may take them long on a machine that is busy. Those who starve each other never end.
            .policy(policy.anonymous().isolation(Isolation::ReadCommitted).store_timeout(Duration::from_secs(60)))
            .pool_size(4)
            .serve(|config, idempotency, _| routes(config, idempotency))
            .await;
        let answers = futures_util::future::join_all((0..40).map(|n| rig.post("/both").key(&format!("k{n}")).answer()));
        for answer in answers.await {
            assert_eq!(answer.status, 201, "{}", answer.text());
        }
        assert_eq!(rig.db.effects("both").await, 40);
    }
}

#[actix_web::test]
async fn a_pool_of_one_works() {
    for policy in policies() {
        let rig = Rig::builder()
            .policy(policy.anonymous())
            .pool_size(1)
            .serve(|config, idempotency, _| routes(config, idempotency))
            .await;
        let answers =
            futures_util::future::join_all((0..10).map(|n| rig.post("/act?how=commit").key(&format!("k{n}")).answer()));
        assert!(answers.await.iter().all(|answer| answer.status == 201));
        let first = rig.post("/act?how=commit").key("a").answer().await;
        first.assert_replayed_by(&rig.post("/act?how=commit").key("a").answer().await);
    }
}

#[actix_web::test]
async fn duplicates_are_told_at_once_while_it_runs() {
    for policy in policies() {
        let rig = rig(policy).await;
        let first = actix_web::rt::spawn(rig.post("/act?how=hold").key("a").answer());
        rig.gate.entered(1).await;
        for _ in 0..10 {
            let duplicate = rig.post("/act?how=hold").key("a").answer().await;
            assert_eq!((duplicate.code().as_str(), duplicate.retry_after()), ("outstanding", Some(1)));
        }
        rig.gate.open(1);
        let first = first.await.unwrap();
        first.assert_replayed_by(&rig.post("/act?how=hold").key("a").answer().await);
        let other = rig.post("/act?how=commit").key("a").answer().await;
        assert_eq!(other.code(), "key-reused");
        assert_eq!(rig.db.all_effects().await, 1);
    }
}

#[actix_web::test]
async fn a_renewal_does_not_disturb_a_transaction_with_one_snapshot() {
    for isolation in [Isolation::RepeatableRead, Isolation::Serializable] {
        for policy in policies() {
            let rig = rig(policy.isolation(isolation).lease(Duration::from_millis(300))).await;
            let first = actix_web::rt::spawn(rig.post("/act?how=hold").key("a").answer());
            rig.gate.entered(1).await;
            // Three leases long.
            actix_web::rt::time::sleep(Duration::from_millis(900)).await;
            let duplicate = rig.post("/act?how=hold").key("a").answer().await;
            assert_eq!(duplicate.status, 409, "{}", duplicate.text());
            rig.gate.open(1);
            let first = first.await.unwrap();
            assert_eq!(first.status, 201, "{isolation:?}: {}", first.text());
            assert_eq!(rig.db.all_effects().await, 1);
        }
    }
}

/// X03
#[actix_web::test]
async fn an_attempt_that_was_overtaken_rolls_back_and_sends_the_winners_answer() {
    let rig = rig(Policy::new().isolation(Isolation::ReadCommitted)).await;
    let first = actix_web::rt::spawn(rig.post("/act?how=hold").key("a").answer());
    rig.gate.entered(1).await;
    // As if its process had been gone for longer than the lease.
    rig.db.run("UPDATE idempotency_keys SET leased_until = now() - interval '1 s'").await;
    let second = actix_web::rt::spawn(rig.post("/act?how=hold").key("a").answer());
    rig.gate.entered(2).await;
    rig.gate.open(2);
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!(rig.db.all_effects().await, 1);
    assert_eq!(second.status, 201);
    if first.status == 201 {
        second.assert_replayed_by(&first);
    } else {
        assert_eq!(first.code(), "lease-lost");
    }
    second.assert_replayed_by(&rig.post("/act?how=hold").key("a").answer().await);
}

/// T04
#[actix_web::test]
async fn a_transaction_that_idles_too_long_is_ended_and_the_key_is_free() {
    for policy in policies() {
        let rig = rig(policy.idle_in_transaction(Duration::from_millis(300))).await;
        let first = actix_web::rt::spawn(rig.post("/act?how=hold").key("a").answer());
        rig.gate.entered(1).await;
        eventually("Postgres has ended it", async || rig.db.is(NO_OPEN_TRANSACTION).await).await;
        rig.gate.open(2);
        let first = first.await.unwrap();
        assert_eq!(first.code(), "store-unavailable");
        assert_eq!(rig.db.all_effects().await, 0);
        assert_eq!(rig.post("/act?how=hold").key("a").answer().await.status, 201);
        assert_eq!(rig.db.all_effects().await, 1);
    }
}

#[actix_web::test]
async fn settings_of_the_policy_end_with_the_transaction() {
    for policy in policies() {
        let policy = policy.set_local(|req| {
            let tenant = req.headers().get("x-tenant").unwrap().to_str().unwrap();
            vec![("app.tenant".into(), tenant.into()), ("role".into(), "pg_monitor".into())]
        });
        let rig = Rig::builder()
            .policy(policy.anonymous())
            .pool_size(1)
            .serve(|config, idempotency, _| {
                let show = async |mut tx: IdemTx| -> Result<String> {
                    #[derive(diesel::QueryableByName)]
                    struct Shown {
                        #[diesel(sql_type = Text)]
                        shown: String,
                    }
                    let shown: Shown =
                        diesel::sql_query("SELECT current_setting('app.tenant') || ' ' || current_user AS shown")
                            .get_result(&mut *tx)
                            .await
                            .map_err(ErrorInternalServerError)?;
                    Ok(shown.shown)
                };
                config.service(web::resource("/show").wrap(idempotency.clone()).route(web::post().to(show)));
            })
            .await;
        let shown = rig.post("/show").key("a").header("x-tenant", "it's 1").answer().await;
        assert_eq!(shown.text(), "it's 1 pg_monitor");
        let mut conn = rig.pool.get().await.unwrap();
        conn.batch_execute("DO $$ BEGIN ASSERT coalesce(current_setting('app.tenant', true), '') = '' AND current_user = session_user; END $$")
            .await
            .unwrap();
    }
}

/// One that looks in vain must not wake itself.
#[actix_web::test]
async fn waiting_for_another_process_is_not_a_busy_loop() {
    let policy = || Policy::new().atomic().anonymous().on_outstanding(OnOutstanding::Wait(Duration::from_secs(20)));
    let rig = rig(policy()).await;
    let twin = rig.twin_serving(policy(), |config, idempotency, _| routes(config, idempotency));
    let first = actix_web::rt::spawn(rig.post("/act?how=hold").key("a").answer());
    rig.gate.entered(1).await;
    let waiter = actix_web::rt::spawn(twin.post("/act?how=hold").key("a").answer());
    let looks = async || twin.pool.state().statistics.get_direct + twin.pool.state().statistics.get_waited;
    eventually("it has looked", async || looks().await >= 2).await;
    let before = looks().await;
    let began = std::time::Instant::now();
    actix_web::rt::time::sleep(Duration::from_secs(1)).await;
    let ticks = began.elapsed().as_millis() as u64 / 100;
    assert!(looks().await - before <= 2 * ticks, "{} connections taken in {ticks} ticks", looks().await - before);
    rig.gate.open(1);
    let (first, waiter) = (first.await.unwrap(), waiter.await.unwrap());
    first.assert_replayed_by(&waiter);
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn no_more_transactions_are_open_than_the_engine_allows() {
    for policy in policies() {
        let rig = Rig::builder()
            .policy(policy.anonymous().isolation(Isolation::ReadCommitted))
            .serve(|config, idempotency, _| {
                let two = NonZeroUsize::new(2).unwrap();
                routes(config, &idempotency.clone().max_transactions(two));
            })
            .await;
        let running: Vec<_> =
            (0..4).map(|n| actix_web::rt::spawn(rig.post("/act?how=hold").key(&format!("k{n}")).answer())).collect();
        rig.gate.entered(2).await;
        assert!(rig.gate.nobody_enters(Duration::from_millis(500)).await);
        rig.gate.open(4);
        for answer in running {
            assert_eq!(answer.await.unwrap().status, 201);
        }
    }
}

async fn run(mut tx: IdemTx, sql: String) -> Result<HttpResponse, Refusal> {
    tx.batch_execute(&sql).await?;
    Ok(HttpResponse::Created().finish())
}

#[actix_web::test]
async fn a_statement_that_fails_tells_the_client_nothing_of_the_server() {
    let rig = Rig::builder().handler(run).await;
    rig.db.run("CREATE TABLE secrets (code int CONSTRAINT hidden UNIQUE); INSERT INTO secrets VALUES (7)").await;
    for (sql, status, code) in [
        ("INSERT INTO secrets VALUES (7)", 409, "constraint-violated"),
        ("SELECT 1 / 0", 500, "query-failed"),
        ("SELECT hidden FROM secrets", 500, "query-failed"),
    ] {
        let answer = rig.post("/x").key(&sql.len().to_string()).body(sql).answer().await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (status, code), "{sql}");
        let said = answer.text();
        assert!(!said.contains("hidden") && !said.contains("zero") && !said.contains("secrets"), "{said}");
    }
}

/// What it does with a transaction that is gone.
#[derive(Deserialize)]
struct Late {
    uses: bool,
}

/// The effect, the gate, and then a use of what it holds, or none.
async fn late(mut tx: IdemTx, late: Query<Late>, gate: Data<Gate>) -> Result<HttpResponse> {
    let id = effect(&mut tx, "late").await?;
    gate.pass().await;
    if late.uses {
        assert!(effect(&mut tx, "late").await.is_err(), "the transaction should be gone");
    }
    Ok(created(id))
}

/// As many as may hold one; the gate stays shut, and they go on holding.
#[actix_web::test]
async fn transactions_that_the_server_has_ended_make_room_while_their_handlers_go_on() {
    const HOLDERS: usize = 4;
    let ends = ["idle", "terminated"];
    for (end, policy) in ends.into_iter().flat_map(|end| policies().map(|policy| (end, policy))) {
        let policy = policy.anonymous().idle_in_transaction(Duration::from_secs(2));
        let rig =
            Rig::builder().policy(policy).serve(|config, idempotency, _| routes_of_late(config, idempotency)).await;
        let held: Vec<_> = (0..HOLDERS)
            .map(|n| {
                let key = format!("late-{n}");
                // One of them without a key: it is only a transaction.
                let request = rig.post(&format!("/late?uses={}", n % 2 == 0));
                actix_web::rt::spawn(if n == 3 { request } else { request.key(&key) }.answer())
            })
            .collect();
        rig.gate.entered(HOLDERS).await;
        if end == "terminated" {
            rig.db
                .run(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() \
                     AND state = 'idle in transaction'",
                )
                .await;
        }
        // All of the pool but one wait for the gate, and there is room for as many others at once.
        let orders = (0..3 * HOLDERS).map(|n| rig.post("/act?how=commit").key(&format!("order-{n}")).answer());
        let orders = futures_util::future::join_all(orders).await;
        assert!(orders.iter().all(|answer| answer.status == 201), "{end}: {orders:?}");
        assert_eq!(rig.gate.count(), HOLDERS);
        rig.gate.open(HOLDERS);
        for answer in futures_util::future::join_all(held).await {
            let answer = answer.unwrap();
            assert!(answer.status.is_server_error(), "{end}: {answer:?}");
        }
        assert_eq!((rig.db.effects("late").await, rig.db.effects("commit").await), (0, 3 * HOLDERS as i64));
        crate::support::db::assert_usable(&rig.pool, 5).await;
    }
}

fn routes_of_late(config: &mut web::ServiceConfig, idempotency: &actix_idempotency::Idempotency) {
    let patient = idempotency.with(Policy::new().anonymous().store_timeout(PATIENCE));
    config
        .service(web::resource("/late").wrap(idempotency.clone()).route(web::post().to(late)))
        .service(web::resource("/act").wrap(patient).route(web::post().to(act)));
}
