//! `Policy::atomic()`: the request is one transaction, its lock makes duplicates cheap, and its primary key is
//! the guarantee.

use std::time::Duration;

use actix_idempotency::{IdemKey, IdemTx, Idempotency, Isolation, OnOutstanding, PgPool, Policy};
use actix_web::{
    HttpRequest, HttpResponse, Result,
    error::ErrorInternalServerError,
    guard,
    http::StatusCode,
    rt,
    web::{self, Data},
};
use diesel::sql_types::Text;
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use reqwest::RequestBuilder;

use crate::support::{
    PATIENCE,
    app::created,
    client::{Answer, RequestExt, client},
    cluster::Cluster,
    db::Db,
    eventually,
    gate::Gate,
    process::Setup,
    rig::{Rig, Server},
    shop::{self, Purchase, Shop, Way},
};

/// With `x-hold` it waits at the gate, with `x-fail` it answers with that status.
async fn buy(mut tx: IdemTx, request: HttpRequest, gate: Data<Gate>, tag: String) -> Result<HttpResponse> {
    diesel::sql_query("INSERT INTO effects (tag) VALUES ($1)")
        .bind::<Text, _>(tag)
        .execute(&mut *tx)
        .await
        .map_err(ErrorInternalServerError)?;
    let header = |name: &str| request.headers().get(name).map(|value| value.to_str().unwrap());
    if header("x-hold").is_some() {
        gate.pass().await;
    }
    Ok(match header("x-fail") {
        Some(status) => HttpResponse::build(StatusCode::from_bytes(status.as_bytes()).unwrap()).finish(),
        None => created(1),
    })
}

async fn derive(key: IdemKey) -> String {
    key.derive("charge")
}

/// One resource under two policies, told apart by a header, so that path and fingerprint are the same.
async fn rig(policy: Policy) -> Rig {
    rig_on(Db::new().await, policy).await
}

async fn rig_on(db: Db, policy: Policy) -> Rig {
    let pool = db.pool(5);
    let idempotency = Idempotency::postgres(pool.clone()).without_sweeper();
    let routes = move |config: &mut web::ServiceConfig, idempotency: &Idempotency, _: &PgPool| {
        let policy = policy.clone().anonymous().resource("orders");
        let leased = web::resource("/orders").guard(guard::Header("x-policy", "leased"));
        let leased = leased.wrap(idempotency.with(policy.clone())).route(web::post().to(buy));
        let atomic = idempotency.with(policy.atomic());
        config
            .service(leased)
            .service(web::resource("/orders").wrap(atomic.clone()).route(web::post().to(buy)))
            .service(web::resource("/derive").wrap(atomic).route(web::post().to(derive)));
    };
    let gate = Gate::new();
    let server = Server::start(2, pool.clone(), idempotency.clone(), gate.clone(), routes);
    Rig { db, pool, idempotency, gate, server, client: client() }
}

impl Rig {
    fn order(&self, tag: &str) -> RequestBuilder {
        self.post("/orders").key("a").body(tag.to_owned())
    }

    fn leased_order(&self, tag: &str) -> RequestBuilder {
        self.order(tag).header("x-policy", "leased")
    }

    /// One that waits at the gate.
    async fn held(&self, request: RequestBuilder, nth: usize) -> rt::task::JoinHandle<Answer> {
        let held = rt::spawn(request.header("x-hold", "1").answer());
        self.gate.entered(nth).await;
        held
    }

    async fn let_go(&self, held: rt::task::JoinHandle<Answer>) -> Answer {
        self.gate.open(1);
        held.await.unwrap()
    }

    /// Takes the finished row of the key away, so that it can come [back](Self::bring_back) at a chosen moment.
    async fn take_away(&self) {
        self.db.run("CREATE TABLE away AS TABLE idempotency_keys; DELETE FROM idempotency_keys").await;
    }

    async fn bring_back(&self) {
        self.db.run("INSERT INTO idempotency_keys TABLE away").await;
    }
}

const ANOTHER_DAY: &str = "UPDATE idempotency_keys SET created_at = created_at - interval '2 days', \
                           leased_until = leased_until - interval '2 days', \
                           completed_at = completed_at - interval '2 days', expires_at = expires_at - interval '2 days'";

// --- duplicates -------------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn a_duplicate_in_another_process_is_told_without_blocking() {
    let shop = Shop::open(Db::new().await).await;
    let setup = Setup::new(&shop.db.url);
    let (mut one, other) = (setup.start(), setup.start());
    let purchase = Purchase::new("k", Way::Atomic, 0);
    one.stop_at("after-complete", 1).await;
    let (first, url) = (purchase.clone(), one.url(""));
    let first = rt::spawn(async move { first.attempt(&client(), &url, false).await.unwrap() });
    one.stopped_at("after-complete").await;
    // Its row is written and not committed; whoever met it would wait.
    for _ in 0..5 {
        let duplicate = purchase.attempt(&client(), &other.url(""), false).await.unwrap();
        assert_eq!((duplicate.code().as_str(), duplicate.retry_after()), ("outstanding", Some(1)));
    }
    one.go_on();
    let first = first.await.unwrap();
    first.assert_replayed_by(&purchase.attempt(&client(), &other.url(""), false).await.unwrap());
    shop.delivered(&purchase, &first).await.unwrap();
}

#[actix_web::test]
async fn a_duplicate_in_another_process_waits_without_a_connection() {
    let shop = Shop::open(Db::read_committed().await).await;
    let mut one = Setup::new(&shop.db.url).start();
    let pool = shop.db.pool(1);
    let idempotency = Idempotency::postgres(pool.clone());
    let policy = Policy::new().anonymous().on_outstanding(OnOutstanding::Wait(PATIENCE));
    let other = Server::start(2, pool.clone(), idempotency, Gate::new(), move |config, idempotency, _| {
        shop::routes(config, idempotency, &policy);
    });
    let purchase = Purchase::new("k", Way::Atomic, 0);
    let attempt = |url: String| {
        let purchase = purchase.clone();
        rt::spawn(async move { purchase.attempt(&client(), &url, false).await.unwrap() })
    };
    one.stop_at("in-handler", 1).await;
    let first = attempt(one.url(""));
    one.stopped_at("in-handler").await;
    let waiting = [attempt(other.url("")), attempt(other.url(""))];
    // The only connection of its pool serves somebody else meanwhile.
    let another = Purchase::new("another", Way::Atomic, 1).attempt(&client(), &other.url(""), false).await.unwrap();
    assert_eq!(another.status, 201);
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
    one.go_on();
    let first = first.await.unwrap();
    for waiting in waiting {
        first.assert_replayed_by(&waiting.await.unwrap());
    }
    shop.delivered(&purchase, &first).await.unwrap();
}

#[actix_web::test]
async fn after_an_attempt_that_failed_one_of_those_who_wait_runs() {
    let rig = rig(Policy::new().on_outstanding(OnOutstanding::Wait(PATIENCE))).await;
    let failing = rig.held(rig.order("x").header("x-fail", "409"), 1).await;
    let waiting: Vec<_> = (0..3).map(|_| rt::spawn(rig.order("x").answer())).collect();
    assert_eq!(rig.let_go(failing).await.status, 409);
    let mut answers = Vec::new();
    for waiting in waiting {
        answers.push(waiting.await.unwrap());
    }
    let (replays, ran): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.is_replay());
    assert_eq!((ran.len(), ran[0].status.as_u16()), (1, 201));
    replays.into_iter().for_each(|replay| ran[0].assert_replayed_by(replay));
    assert_eq!(rig.db.effects("x").await, 1);
}

/// X01, without its lease: there is none.
#[actix_web::test]
async fn a_process_that_is_killed_frees_its_key_at_once() {
    for point in ["after-claim", "in-handler", "after-complete"] {
        let shop = Shop::open(Db::new().await).await;
        let setup = Setup { lease: Duration::from_secs(3600), ..Setup::new(&shop.db.url) };
        let (mut one, other) = (setup.start(), setup.start());
        let purchase = Purchase::new("k", Way::Atomic, 0);
        one.stop_at(point, 1).await;
        let (first, url) = (purchase.clone(), one.url(""));
        let first = rt::spawn(async move { first.attempt(&client(), &url, false).await });
        one.stopped_at(point).await;
        one.kill();
        assert!(first.await.unwrap().is_err(), "nobody answers");
        let ran = std::cell::OnceCell::new();
        eventually("Postgres has noticed", async || {
            let answer = purchase.attempt(&client(), &other.url(""), false).await.unwrap();
            answer.status == 201 && ran.set(answer).is_ok()
        })
        .await;
        let answer = ran.into_inner().unwrap();
        assert!(!answer.is_replay());
        shop.delivered(&purchase, &answer).await.unwrap();
        shop.adds_up().await.unwrap();
    }
}

// --- the lock is a hint, the row decides ------------------------------------------------------------------------------

/// C07
#[actix_web::test]
async fn a_collision_of_the_lock_is_409_and_never_a_wrong_answer() {
    let rig = rig(Policy::new()).await;
    let first = rig.order("x").answer().await;
    assert_eq!(first.status, 201);
    // Another key whose id begins with the same eight bytes is running.
    let lock = "('x' || encode(substring(id FROM 1 FOR 8), 'hex'))::bit(64)::bigint";
    let lock = rig.db.number(&format!("SELECT {lock} AS value FROM idempotency_keys")).await;
    let mut other = AsyncPgConnection::establish(&rig.db.url).await.unwrap();
    other.batch_execute(&format!("BEGIN; SELECT pg_advisory_xact_lock({lock})")).await.unwrap();
    first.assert_replayed_by(&rig.order("x").answer().await);
    assert_eq!(rig.order("y").answer().await.code(), "key-reused");
    rig.take_away().await;
    let refused = rig.order("x").answer().await;
    assert_eq!((refused.code().as_str(), refused.retry_after()), ("outstanding", Some(1)));
    assert_eq!(rig.db.effects("x").await, 1);
    other.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(rig.order("x").answer().await.status, 201);
    assert_eq!(rig.db.effects("x").await, 2, "the row was taken away");
}

#[actix_web::test]
async fn a_row_that_appears_after_the_look_is_the_answer_and_what_ran_is_rolled_back() {
    for isolation in [Isolation::Default, Isolation::RepeatableRead, Isolation::Serializable] {
        let rig = rig(Policy::new().isolation(isolation)).await;
        let first = rig.order("x").answer().await;
        rig.take_away().await;
        let second = rig.held(rig.order("x"), 1).await;
        rig.bring_back().await;
        let second = rig.let_go(second).await;
        first.assert_replayed_by(&second);
        assert_eq!(rig.db.effects("x").await, 1, "{isolation:?}");
        // For another request it is another answer, but never its own.
        rig.db.run("DROP TABLE away").await;
        rig.take_away().await;
        let other = rig.held(rig.order("y"), 2).await;
        rig.bring_back().await;
        assert_eq!(rig.let_go(other).await.code(), "key-reused");
        assert_eq!(rig.db.effects("y").await, 0);
    }
}

// --- beside leases ----------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn a_live_lease_of_another_policy_is_409() {
    let rig = rig(Policy::new()).await;
    let leased = rig.held(rig.leased_order("x"), 1).await;
    assert_eq!(rig.order("x").answer().await.code(), "outstanding");
    assert_eq!(rig.order("y").answer().await.code(), "key-reused");
    let first = rig.let_go(leased).await;
    assert_eq!(first.status, 201);
    first.assert_replayed_by(&rig.order("x").answer().await);
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn a_lease_that_is_taken_meanwhile_makes_the_attempt_without_one_roll_back() {
    for isolation in [Isolation::Default, Isolation::RepeatableRead, Isolation::Serializable] {
        let rig = rig(Policy::new().isolation(isolation)).await;
        let atomic = rig.held(rig.order("x"), 1).await;
        let leased = rig.held(rig.leased_order("x"), 2).await;
        // Both may pass; whoever is first at the row, it is the lease that has it.
        rig.gate.open(1);
        let atomic = atomic.await.unwrap();
        let told = ["lease-lost", "serialization", "outstanding"].contains(&atomic.code().as_str());
        assert!(told, "{isolation:?}: {}", atomic.text());
        assert_eq!((atomic.status.as_u16(), rig.db.all_effects().await), (409, 0));
        let leased = rig.let_go(leased).await;
        assert_eq!(leased.status, 201, "{}", leased.text());
        leased.assert_replayed_by(&rig.order("x").answer().await);
        assert_eq!(rig.db.effects("x").await, 1);
    }
}

#[actix_web::test]
async fn a_lapsed_lease_is_replaced_and_its_owner_stores_nothing() {
    let rig = rig_on(Db::read_committed().await, Policy::new()).await;
    let late = rig.held(rig.leased_order("x"), 1).await;
    rig.db.run("UPDATE idempotency_keys SET leased_until = now() - interval '1 s'").await;
    assert_eq!(rig.order("y").answer().await.code(), "key-reused", "its effects are unknown");
    let answer = rig.order("x").answer().await;
    assert_eq!((answer.status.as_u16(), answer.is_replay()), (201, false), "{}", answer.text());
    answer.assert_replayed_by(&rig.let_go(late).await);
    assert_eq!((rig.db.effects("x").await, rig.db.keys().await), (1, 1));
}

#[actix_web::test]
async fn an_expired_row_is_replaced_whatever_was_asked() {
    let rig = rig(Policy::new()).await;
    let old = rig.order("x").answer().await;
    rig.db.run(ANOTHER_DAY).await;
    let new = rig.order("y").answer().await;
    assert_eq!((new.status.as_u16(), new.is_replay()), (201, false));
    assert_ne!(old.body, new.body);
    new.assert_replayed_by(&rig.order("y").answer().await);
    assert_eq!((rig.db.effects("y").await, rig.db.keys().await), (1, 1));
}

#[actix_web::test]
async fn a_released_row_is_replaced_as_the_table_says() {
    let rig = rig(Policy::new()).await;
    for status in ["409", "500"] {
        assert_eq!(rig.leased_order("x").header("x-fail", status).answer().await.status.as_str(), status);
        assert_eq!(rig.db.state("a").await.as_deref(), Some("released"));
        let corrected = rig.order("y").answer().await;
        if status == "500" {
            assert_eq!(corrected.code(), "key-reused", "its effects are unknown");
            assert_eq!(rig.order("x").answer().await.status, 201);
        } else {
            assert_eq!(corrected.status, 201);
        }
        assert_eq!(rig.db.keys().await, 1);
        rig.db.run("DELETE FROM idempotency_keys").await;
    }
    assert_eq!((rig.db.effects("x").await, rig.db.effects("y").await), (1, 1));
}

/// What it replaces is the very row that it saw.
#[actix_web::test]
async fn a_row_that_changes_after_the_look_is_not_replaced() {
    for isolation in [Isolation::Default, Isolation::RepeatableRead, Isolation::Serializable] {
        let rig = rig(Policy::new().isolation(isolation)).await;
        assert_eq!(rig.leased_order("x").header("x-fail", "409").answer().await.status, 409);
        let atomic = rig.held(rig.order("x"), 1).await;
        let first = rig.leased_order("x").answer().await;
        assert_eq!((first.status.as_u16(), first.is_replay()), (201, false));
        first.assert_replayed_by(&rig.let_go(atomic).await);
        assert_eq!(rig.db.effects("x").await, 1, "{isolation:?}");
    }
}

// --- what it leaves ---------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn deriving_a_key_panics_and_nothing_is_kept() {
    let rig = rig(Policy::new()).await;
    for _ in 0..2 {
        let failed = rig.post("/derive").key("a").answer().await;
        assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "handler-panicked"));
        assert_eq!(rig.db.keys().await, 0);
    }
}

#[actix_web::test]
async fn an_answer_of_400_and_more_leaves_no_row() {
    let rig = rig(Policy::new()).await;
    for status in ["400", "404", "500", "503"] {
        assert_eq!(rig.order("x").header("x-fail", status).answer().await.status.as_str(), status);
        assert_eq!((rig.db.keys().await, rig.db.all_effects().await), (0, 0));
    }
    assert_eq!(rig.order("y").answer().await.status, 201, "another request may use the key");
}

/// As the server counts, which backends report when they end at the latest.
struct Counted {
    flushes: i64,
    inserted: i64,
    updated: i64,
    dead: i64,
}

async fn counted(db: &Db) -> Counted {
    db.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()").await;
    eventually("they have ended", async || {
        db.is(
            "NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid())",
        )
        .await
    })
    .await;
    let flushes = if db.is("current_setting('server_version_num')::int >= 180000").await {
        "SELECT sum(fsyncs)::bigint AS value FROM pg_stat_io WHERE object = 'wal'"
    } else {
        "SELECT wal_sync AS value FROM pg_stat_wal"
    };
    let of_keys = async |what: &str| {
        db.number(&format!("SELECT {what} AS value FROM pg_stat_user_tables WHERE relname = 'idempotency_keys'")).await
    };
    Counted {
        flushes: db.number(flushes).await,
        inserted: of_keys("n_tup_ins").await,
        updated: of_keys("n_tup_upd").await,
        dead: of_keys("n_dead_tup").await,
    }
}

#[actix_web::test]
async fn a_request_costs_one_flush_and_without_a_lease_one_row_version() {
    const REQUESTS: i64 = 100;
    // Whatever else flushes is put off.
    let cluster = Cluster::start(&["autovacuum = off", "wal_writer_delay = 10s", "checkpoint_timeout = 1h"]);
    for way in [Way::Atomic, Way::Leased] {
        let shop = Shop::open(Db::on(&cluster.url()).await).await;
        let server = Setup::new(&shop.db.url).start();
        let client = client();
        let order = async |n: i64| {
            let purchase = Purchase::new(format!("{n}"), way, 0);
            assert_eq!(purchase.attempt(&client, &server.url(""), false).await.unwrap().status, 201);
        };
        for n in 0..5 {
            order(-n).await;
        }
        let before = counted(&shop.db).await;
        for n in 1..=REQUESTS {
            order(n).await;
        }
        let after = counted(&shop.db).await;
        let flushes = after.flushes - before.flushes;
        println!("{way:?}: {flushes} flushes for {REQUESTS} requests");
        assert!(flushes >= REQUESTS, "{way:?}: {flushes} flushes, an answer is durable when it is sent");
        assert!(flushes < REQUESTS * 3 / 2, "{way:?}: {flushes} flushes for {REQUESTS} requests");
        assert_eq!(after.inserted - before.inserted, REQUESTS, "{way:?}");
        let updated = if way == Way::Atomic { 0 } else { REQUESTS };
        assert_eq!(after.updated - before.updated, updated, "{way:?}");
        if way == Way::Atomic {
            assert_eq!(after.dead, 0);
        }
    }
}

/// One flush more for each: the claim is on disk before the handler goes on.
#[actix_web::test]
async fn a_durable_claim_and_a_handler_that_takes_the_key_wait_for_the_disk() {
    const REQUESTS: i64 = 30;
    let cluster = Cluster::start(&["autovacuum = off", "wal_writer_delay = 10s", "checkpoint_timeout = 1h"]);
    async fn plain(_: IdemTx) -> HttpResponse {
        HttpResponse::Ok().finish()
    }
    async fn with_key(_: IdemTx, key: IdemKey) -> HttpResponse {
        HttpResponse::Ok().body(key.derive("charge"))
    }
    let leased = || Policy::new().anonymous();
    for (policy, path, per_request) in
        [(leased(), "/plain", 1), (leased().durable_claims(), "/plain", 2), (leased(), "/with-key", 2)]
    {
        let rig = Rig::builder()
            .policy(policy)
            .database(Db::on(&cluster.url()).await)
            .serve(|config, idempotency, _| {
                config.service(
                    web::scope("")
                        .wrap(idempotency.clone())
                        .route("/plain", web::post().to(plain))
                        .route("/with-key", web::post().to(with_key)),
                );
            })
            .await;
        let send = async |n: i64| assert_eq!(rig.post(path).key(&format!("k{n}")).answer().await.status, 200);
        for n in 0..3 {
            send(-n).await;
        }
        let before = counted(&rig.db).await;
        for n in 1..=REQUESTS {
            send(n).await;
        }
        let flushes = counted(&rig.db).await.flushes - before.flushes;
        assert!(flushes >= REQUESTS * per_request, "{path}: {flushes} flushes for {REQUESTS} requests");
        assert!(flushes < REQUESTS * per_request + REQUESTS / 2, "{path}: {flushes} flushes for {REQUESTS} requests");
    }
}
