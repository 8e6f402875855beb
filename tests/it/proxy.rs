//! Messages between the pool and Postgres that get lost or come late, each at its place in the path.

use std::time::Duration;

use actix_idempotency::{IdemTx, Idempotency, Isolation, PgPool, Policy, PoolBuilder};
use actix_web::{
    HttpRequest, HttpResponse, Result,
    error::{ErrorConflict, ErrorInternalServerError},
    rt,
    web::{self, Data, ServiceConfig},
};
use diesel::sql_types::Text;
use diesel_async::{AsyncConnection, RunQueryDsl};

use crate::support::{
    PATIENCE,
    app::{created, effect},
    client::{Answer, RequestExt, client},
    db::Db,
    eventually,
    gate::Gate,
    proxy::{Do, Proxy},
    rig::{Rig, Server},
};

const CLAIM: &str = "INSERT INTO idempotency_keys (id";
const FINISH: &str = "INSERT INTO idempotency_keys AS k";
const LOCK: &str = "pg_try_advisory_xact_lock";
const LOOK: &str = "LEFT JOIN idempotency_keys AS k ON k.id";
const COMPLETE: &str = "SET state = 'completed'";
const RELEASE: &str = "SET state = 'released'";
const COMMIT: &str = "COMMIT";

/// Of the store: what is swallowed is waited for that long.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The effect in the transaction of the answer.
async fn within(mut tx: IdemTx, request: HttpRequest) -> Result<HttpResponse> {
    diesel::sql_query("INSERT INTO effects (tag) VALUES ($1)")
        .bind::<Text, _>("x")
        .execute(&mut *tx)
        .await
        .map_err(ErrorInternalServerError)?;
    if request.headers().contains_key("x-fail") {
        return Ok(HttpResponse::Conflict().finish());
    }
    Ok(created(1))
}

/// The effect by itself.
async fn apart(pool: Data<PgPool>) -> Result<HttpResponse> {
    Ok(created(effect(&pool, "x").await?))
}

/// Begins a savepoint, and drops that when the gate opens.
async fn savepoint(mut tx: IdemTx, gate: Data<Gate>, request: HttpRequest) -> Result<HttpResponse> {
    tokio::select! {
        _ = tx.transaction(async |_| Ok::<_, diesel::result::Error>(())) => unreachable!("its answer is held up"),
        () = gate.pass() => {}
    }
    if request.headers().contains_key("x-fail") { Err(ErrorConflict("no")) } else { Ok(created(1)) }
}

fn routes(config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool) {
    config.service(
        web::scope("")
            .wrap(idempotency.clone())
            .route("/within", web::post().to(within))
            .route("/savepoint", web::post().to(savepoint))
            .route("/apart", web::post().to(apart)),
    );
}

/// A server whose pool reaches Postgres by way of the proxy; `rig.db` goes straight there.
async fn behind_a_proxy(policy: Policy) -> (Rig, Proxy) {
    behind_a_proxy_waiting(policy, TIMEOUT).await
}

async fn behind_a_proxy_waiting(policy: Policy, timeout: Duration) -> (Rig, Proxy) {
    let db = Db::new().await;
    let proxy = Proxy::before(&db.url);
    let pool = PoolBuilder::new(proxy.url(&db.url)).build().unwrap();
    let policy = policy.anonymous().store_timeout(timeout);
    let idempotency = Idempotency::postgres(pool.clone()).with(policy);
    let gate = Gate::new();
    let server = Server::start(2, pool.clone(), idempotency.clone(), gate.clone(), routes);
    (Rig { db, pool, idempotency, gate, server, client: client() }, proxy)
}

fn policies() -> [Policy; 2] {
    [Policy::new(), Policy::new().atomic()]
}

impl Rig {
    async fn within(&self) -> Answer {
        self.post("/within").key("a").answer().await
    }

    /// The key has its answer, and the effect is there once.
    async fn assert_replays(&self, first: &Answer, path: &str) {
        first.assert_replayed_by(&self.post(path).key("a").answer().await);
        assert_eq!(self.db.effects("x").await, 1);
    }

    /// At once, or as soon as Postgres has noticed that a connection is gone.
    async fn eventually_runs(&self) {
        let ran = std::cell::OnceCell::new();
        eventually("the key is free", async || {
            let answer = self.within().await;
            answer.status != 409 && ran.set(answer).is_ok()
        })
        .await;
        let answer = ran.into_inner().unwrap();
        assert_eq!(answer.status, 201, "{}", answer.text());
        self.assert_replays(&answer, "/within").await;
    }

    async fn attempts(&self) -> i64 {
        self.db.number("SELECT attempt::bigint AS value FROM idempotency_keys").await
    }
}

#[actix_web::test]
async fn a_claim_whose_acknowledgement_is_lost_is_found_again_and_runs_once() {
    for lost in [Do::CutAnswer, Do::CutRequest] {
        let (rig, proxy) = behind_a_proxy(Policy::new()).await;
        let mishap = proxy.next(CLAIM, lost);
        let first = rig.within().await;
        assert!(mishap.has_happened());
        assert_eq!(first.status, 201, "{lost:?}: {}", first.text());
        assert_eq!(rig.attempts().await, 1, "{lost:?}: it was the same claim");
        rig.assert_replays(&first, "/within").await;
    }
}

#[actix_web::test]
async fn a_claim_that_is_never_acknowledged_is_refused_and_released() {
    let (rig, proxy) = behind_a_proxy(Policy::new()).await;
    let mishap = proxy.next(CLAIM, Do::SwallowAnswer);
    let refused = rig.within().await;
    assert!(mishap.has_happened());
    assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "store-unavailable"));
    assert_eq!(rig.db.all_effects().await, 0);
    // Long before the lease of thirty seconds ends.
    eventually("it is released", async || rig.db.state("a").await.as_deref() == Some("released")).await;
    rig.eventually_runs().await;
}

/// Given up by its deadline, or because its task was dropped: the release may be there before it.
#[actix_web::test]
async fn a_claim_that_arrives_after_it_was_given_up_is_released() {
    for takes_over in [false, true] {
        let timeout = Duration::from_secs(3);
        let (rig, proxy) = behind_a_proxy_waiting(Policy::new().lease(Duration::from_secs(600)), timeout).await;
        if takes_over {
            let failed = rig.post("/within").key("a").header("x-fail", "1").answer().await;
            assert_eq!((failed.status.as_u16(), failed.text().as_str()), (409, ""));
        }
        let late = proxy.next(if takes_over { "SET state = 'outstanding'" } else { CLAIM }, Do::HoldRequest);
        let release = proxy.next(RELEASE, Do::HoldAnswer);
        assert_eq!(rig.within().await.code(), "store-unavailable");
        release.happened().await;
        late.let_go();
        eventually("the claim has arrived", async || {
            rig.db.is("EXISTS (SELECT FROM idempotency_keys WHERE state = 'outstanding')").await
        })
        .await;
        release.let_go();
        rig.eventually_runs().await;
    }
}

#[actix_web::test]
async fn a_claim_that_is_acknowledged_late_is_outstanding_for_others() {
    let (rig, proxy) = behind_a_proxy_waiting(Policy::new(), PATIENCE).await;
    let late = proxy.next(CLAIM, Do::HoldAnswer);
    let first = rt::spawn(rig.post("/within").key("a").answer());
    late.happened().await;
    assert_eq!(rig.within().await.code(), "outstanding");
    late.let_go();
    let first = first.await.unwrap();
    assert_eq!(first.status, 201, "{}", first.text());
    rig.assert_replays(&first, "/within").await;
}

#[actix_web::test]
async fn an_atomic_claim_that_is_lost_is_opened_again_or_refused() {
    for lost in [Do::CutAnswer, Do::CutRequest, Do::SwallowAnswer] {
        for what in ["BEGIN", LOCK, LOOK] {
            let (rig, proxy) = behind_a_proxy(Policy::new().atomic()).await;
            let mishap = proxy.next(what, lost);
            let first = rig.within().await;
            assert!(mishap.has_happened());
            match first.status.as_u16() {
                201 => rig.assert_replays(&first, "/within").await,
                // The lock of the lost connection is still there.
                409 => assert_eq!(first.code(), "outstanding"),
                _ => assert_eq!((lost, first.code().as_str()), (Do::SwallowAnswer, "store-unavailable")),
            }
            if first.status != 201 {
                assert_eq!(rig.db.all_effects().await, 0);
                rig.eventually_runs().await;
            }
        }
    }
}

#[actix_web::test]
async fn a_transaction_that_cannot_be_opened_is_refused_and_released() {
    for lost in [Do::CutAnswer, Do::CutRequest, Do::SwallowAnswer] {
        let (rig, proxy) = behind_a_proxy(Policy::new()).await;
        let mishap = proxy.next("BEGIN", lost);
        let refused = rig.within().await;
        assert!(mishap.has_happened());
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "store-unavailable"), "{lost:?}");
        assert_eq!(rig.db.state("a").await.as_deref(), Some("released"));
        rig.eventually_runs().await;
    }
}

/// What is sent before the handler has its transaction is ours, and waits no longer than the rest of it.
#[actix_web::test]
async fn a_transaction_whose_beginning_is_never_acknowledged_is_refused_and_released() {
    let pinned = Policy::new().isolation(Isolation::RepeatableRead);
    let set = |policy: Policy| policy.set_local(|_| vec![("app.tenant".to_owned(), "1".to_owned())]);
    for (policy, sql) in [
        (pinned, "SELECT attempt FROM idempotency_keys"),
        (set(Policy::new()), "SELECT set_config(setting.name"),
        (set(Policy::new().atomic()), "SELECT set_config(setting.name"),
    ] {
        let (rig, proxy) = behind_a_proxy(policy).await;
        let mishap = proxy.next(sql, Do::SwallowAnswer);
        let refused = rig.within().await;
        assert!(mishap.has_happened());
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "store-unavailable"), "{sql}");
        rig.eventually_runs().await;
    }
}

#[actix_web::test]
async fn a_statement_of_the_handlers_that_is_lost_is_its_error_and_releases() {
    for policy in policies() {
        for lost in [Do::CutAnswer, Do::CutRequest] {
            let (rig, proxy) = behind_a_proxy(policy.clone()).await;
            let mishap = proxy.next("INSERT INTO effects", lost);
            let failed = rig.within().await;
            assert!(mishap.has_happened());
            assert_eq!(failed.status, 500, "{}", failed.text());
            rig.eventually_runs().await;
        }
    }
}

/// The driver has lost track of such a connection, and would panic at its next COMMIT or ROLLBACK.
#[actix_web::test]
async fn a_savepoint_that_is_dropped_on_its_way_is_rolled_back_with_everything() {
    for policy in policies() {
        for fails in [false, true] {
            let (rig, proxy) = behind_a_proxy(policy.clone()).await;
            let late = proxy.next("SAVEPOINT", Do::HoldAnswer);
            let request = rig.post("/savepoint").key("a");
            let request = if fails { request.header("x-fail", "1") } else { request };
            let answer = rt::spawn(request.answer());
            late.happened().await;
            rig.gate.open(1);
            let answer = answer.await.unwrap();
            match fails {
                false => assert_eq!((answer.status.as_u16(), answer.code().as_str()), (500, "transaction-misused")),
                true => assert_eq!((answer.status.as_u16(), answer.text().as_str()), (409, "no")),
            }
            late.let_go();
            assert_ne!(rig.db.state("a").await.as_deref(), Some("outstanding"), "{policy:?}");
            eventually("the connection is gone", async || {
                rig.db
                    .is("NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND \
                         pid <> pg_backend_pid() AND state LIKE 'idle in transaction%')")
                    .await
            })
            .await;
        }
    }
}

/// The last statement before COMMIT: whatever became of it, nothing was committed.
#[actix_web::test]
async fn a_completion_that_is_lost_before_its_commit_is_rolled_back_and_released() {
    for (policy, last) in policies().into_iter().zip([COMPLETE, FINISH]) {
        for lost in [Do::CutAnswer, Do::CutRequest, Do::SwallowAnswer] {
            let (rig, proxy) = behind_a_proxy(policy.clone()).await;
            let mishap = proxy.next(last, lost);
            let refused = rig.within().await;
            assert!(mishap.has_happened());
            assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "store-unavailable"), "{lost:?}");
            rig.eventually_runs().await;
        }
    }
}

#[actix_web::test]
async fn a_commit_that_has_arrived_is_answered_although_nobody_acknowledged_it() {
    for policy in policies() {
        for lost in [Do::CutAnswer, Do::SwallowAnswer] {
            let (rig, proxy) = behind_a_proxy(policy.clone()).await;
            let mishap = proxy.next(COMMIT, lost);
            let first = rig.within().await;
            assert!(mishap.has_happened());
            assert_eq!(first.status, 201, "{policy:?} {lost:?}: {}", first.text());
            rig.assert_replays(&first, "/within").await;
        }
    }
}

#[actix_web::test]
async fn a_commit_that_has_not_arrived_is_refused_and_the_key_is_free() {
    for policy in policies() {
        let (rig, proxy) = behind_a_proxy(policy.clone()).await;
        let mishap = proxy.next(COMMIT, Do::CutRequest);
        let refused = rig.within().await;
        assert!(mishap.has_happened());
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "store-unavailable"), "{policy:?}");
        assert!(refused.retry_after().is_some());
        assert_eq!(rig.db.all_effects().await, 0);
        assert_ne!(rig.db.state("a").await.as_deref(), Some("outstanding"));
        // No lease to wait for: the very next attempt runs.
        let second = rig.within().await;
        assert_eq!(second.status, 201, "{policy:?}: {}", second.text());
        rig.assert_replays(&second, "/within").await;
    }
}

#[actix_web::test]
async fn while_the_store_stays_away_after_a_commit_its_outcome_is_unknown() {
    for policy in policies() {
        for lost in [Do::CutAnswer, Do::CutRequest] {
            let lease = Duration::from_secs(3);
            let (rig, proxy) = behind_a_proxy(policy.clone().lease(lease)).await;
            let mishap = proxy.next_and_away(COMMIT, lost);
            let unknown = rig.within().await;
            assert!(mishap.has_happened());
            assert_eq!((unknown.status.as_u16(), unknown.code().as_str()), (503, "outcome-unknown"), "{policy:?}");
            assert!(unknown.retry_after().is_some());
            // Fail closed.
            assert_eq!(rig.within().await.code(), "store-unavailable");

            let committed = lost == Do::CutAnswer;
            eventually("Postgres has noticed", async || {
                rig.db
                    .is("NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND \
                           pid <> pg_backend_pid() AND state LIKE 'idle in transaction%')")
                    .await
            })
            .await;
            assert_eq!(rig.db.effects("x").await, i64::from(committed));
            let state = rig.db.state("a").await;
            assert_ne!(state.as_deref(), Some("released"), "nothing is released");
            proxy.back();
            if committed {
                // What it would have been told.
                let replay = rig.within().await;
                assert!(replay.is_replay() && replay.status == 201, "{}", replay.text());
                assert_eq!(rig.db.effects("x").await, 1);
            } else {
                rig.eventually_runs().await;
            }
        }
    }
}

/// A COMMIT that is on its way while its outcome is decided: the fenced release meets its row lock, and
/// under `Policy::atomic()` its advisory lock is held.
#[actix_web::test]
async fn a_commit_that_is_still_on_its_way_is_never_decided_by_a_read() {
    for policy in policies() {
        let (rig, proxy) = behind_a_proxy(policy.clone()).await;
        let late = proxy.next(COMMIT, Do::HoldRequest);
        let unknown = rig.within().await;
        assert!(late.has_happened());
        assert_eq!((unknown.status.as_u16(), unknown.code().as_str()), (503, "outcome-unknown"), "{policy:?}");
        assert_eq!(rig.within().await.code(), "outstanding", "{policy:?}");
        late.let_go();
        eventually("it is committed", async || rig.db.state("a").await.as_deref() == Some("completed")).await;
        let replay = rig.within().await;
        assert!(replay.is_replay() && replay.status == 201, "{policy:?}: {}", replay.text());
        assert_eq!(rig.db.effects("x").await, 1);
    }
}

/// Whoever else has answered meanwhile, it is theirs that is sent.
#[actix_web::test]
async fn an_answer_that_another_has_stored_while_the_outcome_of_a_commit_was_asked_is_sent_and_not_its_own() {
    let (rig, proxy) = behind_a_proxy_waiting(Policy::new().atomic(), PATIENCE).await;
    let other = rig.twin_serving(Policy::new().anonymous().atomic(), routes);
    let asked = proxy.next("pg_locks", Do::HoldRequest);
    let lost = proxy.next(COMMIT, Do::CutRequest);
    let first = rt::spawn(rig.post("/within").key("a").answer());
    asked.happened().await;
    assert!(lost.has_happened());
    let stored = std::cell::OnceCell::new();
    eventually("Postgres has noticed, and another has run", async || {
        let answer = other.post("/within").key("a").answer().await;
        assert!(answer.status == 201 || answer.code() == "outstanding", "{}", answer.text());
        answer.status == 201 && stored.set(answer).is_ok()
    })
    .await;
    asked.let_go();
    let first = first.await.unwrap();
    stored.into_inner().unwrap().assert_replayed_by(&first);
    assert_eq!(rig.db.effects("x").await, 1);
}

#[actix_web::test]
async fn a_completion_by_itself_that_is_lost_lands_later_or_is_found_landed() {
    for lost in [Do::CutAnswer, Do::CutRequest, Do::SwallowAnswer] {
        let (rig, proxy) = behind_a_proxy(Policy::new()).await;
        let mishap = proxy.next(COMPLETE, lost);
        let first = rig.post("/apart").key("a").answer().await;
        assert!(mishap.has_happened());
        assert_eq!(first.status, 201, "{lost:?}: the client has its answer");
        eventually("it has landed", async || rig.db.state("a").await.as_deref() == Some("completed")).await;
        rig.assert_replays(&first, "/apart").await;
        assert_eq!(rig.attempts().await, 1);
    }
}

#[actix_web::test]
async fn a_completion_by_itself_outlives_an_outage_that_is_shorter_than_its_lease() {
    let (rig, proxy) = behind_a_proxy(Policy::new()).await;
    let mishap = proxy.next_and_away(COMPLETE, Do::CutRequest);
    let first = rig.post("/apart").key("a").answer().await;
    assert!(mishap.has_happened());
    assert_eq!(first.status, 201, "{}", first.text());
    assert_eq!(rig.db.state("a").await.as_deref(), Some("outstanding"));
    proxy.back();
    eventually("it has landed", async || rig.db.state("a").await.as_deref() == Some("completed")).await;
    rig.assert_replays(&first, "/apart").await;
}

#[actix_web::test]
async fn a_release_that_is_lost_is_sent_again() {
    for lost in [Do::CutAnswer, Do::CutRequest, Do::SwallowAnswer] {
        let (rig, proxy) = behind_a_proxy(Policy::new()).await;
        let mishap = proxy.next(RELEASE, lost);
        let failed = rig.post("/within").key("a").header("x-fail", "1").answer().await;
        assert!(mishap.has_happened());
        assert!(failed.status == 409 && failed.body.is_empty(), "the handler's own answer: {}", failed.text());
        eventually("it is released", async || rig.db.state("a").await.as_deref() == Some("released")).await;
        rig.eventually_runs().await;
    }
}

/// D04: connections that died in the pool cost nobody a run.
#[actix_web::test]
async fn after_all_connections_were_cut_requests_run_or_are_refused() {
    for policy in policies() {
        let (rig, proxy) = behind_a_proxy(policy.isolation(Isolation::ReadCommitted)).await;
        let warm = |n: usize| rig.post("/within").key(&format!("warm{n}")).answer();
        for answer in futures_util::future::join_all((0..5).map(warm)).await {
            assert_eq!(answer.status, 201);
        }
        proxy.away();
        proxy.back();
        let mut served = 0;
        for n in 0..6 {
            let answer = rig.post("/within").key(&format!("after{n}")).answer().await;
            match answer.status.as_u16() {
                201 => served += 1,
                _ => assert_eq!(answer.code(), "store-unavailable", "{n}"),
            }
        }
        assert!(served > 0);
        assert_eq!(rig.db.effects("x").await, 5 + served);
    }
}
