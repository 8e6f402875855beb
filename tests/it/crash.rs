//! Crashes, cancelled requests, panics, shutdowns and outages: the lease, and the task of its own.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use actix_idempotency::{Idempotency, PgPool, Policy};
use actix_web::{
    App, HttpResponse, HttpServer, Result,
    error::ErrorInternalServerError,
    rt::{self, time::sleep},
    web::{self, Data, ServiceConfig},
};
use futures_util::future::join_all;
use tokio::sync::{oneshot, watch};

use crate::support::{
    PATIENCE,
    app::{self, Misbehaved, created, order},
    client::{Answer, Raw, RequestExt, client, post},
    cluster::Cluster,
    db::{Db, assert_usable, pool},
    eventually,
    gate::Gate,
    process::{ServerProcess, Setup},
    repeat,
    rig::{Rig, Twin},
};

const SECOND: Duration = Duration::from_secs(1);

fn policy() -> Policy {
    Policy::new().anonymous()
}

/// Sends a request whose answer nobody here waits for, and returns when it has claimed its key.
async fn begin(server: &ServerProcess, db: &Db, path: &str, key: &str) -> Raw {
    let mut raw = Raw::connect(server.address).await;
    raw.send(post(path, key, key)).await.unwrap();
    eventually("the key is claimed", || async { db.state(key).await.as_deref() == Some("outstanding") }).await;
    raw
}

/// Sends until the answer is 201; whoever is told to wait must be told so properly.
async fn retry(send: impl AsyncFn() -> Answer) -> (Answer, usize) {
    let began = Instant::now();
    let mut conflicts = 0;
    loop {
        let answer = send().await;
        if answer.status == 201 {
            return (answer, conflicts);
        }
        assert_eq!(answer.code(), "outstanding", "{answer:?}");
        assert!(answer.retry_after().unwrap() >= 1);
        assert!(began.elapsed() < PATIENCE, "the key should be free by now");
        conflicts += 1;
        sleep(Duration::from_millis(50)).await;
    }
}

async fn lease_left_ms(db: &Db, key: &str) -> i64 {
    db.number(&format!(
        "SELECT ceil(extract(epoch FROM leased_until - clock_timestamp()) * 1000)::bigint AS value \
         FROM idempotency_keys WHERE key = '{key}'"
    ))
    .await
}

// --- processes that die ----------------------------------------------------------------------------------

/// X01
#[actix_web::test]
async fn a_killed_process_holds_its_key_until_the_lease_ends_and_a_retry_takes_over() {
    let lease = 3 * SECOND;
    let rig = Rig::with(policy().lease(lease).retry_after(60.try_into().unwrap())).await;
    rig.gate.open(2);
    let doomed = Setup { lease, ..Setup::new(&rig.db.url) }.start();
    let _waiting = (
        begin(&doomed, &rig.db, "/held?gate_first=true", "nothing").await,
        begin(&doomed, &rig.db, "/held", "effect").await,
    );
    eventually("the effect is there", || async { rig.db.effects("effect").await == 1 }).await;
    doomed.kill();
    let seed = "SELECT encode(seed, 'hex') AS value FROM idempotency_keys WHERE key = 'nothing'";
    let seed_before = rig.db.text(seed).await;
    let lapses = rig.db.text("SELECT leased_until::text AS value FROM idempotency_keys WHERE key = 'nothing'").await;

    let (_, conflicts) = retry(async || {
        let left = lease_left_ms(&rig.db, "nothing").await;
        let answer = rig.post("/held?gate_first=true").key("nothing").body("nothing").answer().await;
        if let Some(seconds) = answer.retry_after() {
            let most = u64::try_from(left.max(1)).unwrap().div_ceil(1000);
            assert!((1..=most).contains(&seconds), "{seconds} s, of {left} ms");
        }
        answer
    })
    .await;
    assert!(conflicts > 0, "the lease should have protected the key");
    assert!(
        rig.db
            .is(&format!(
                "(SELECT leased_until - interval '3 s' >= '{}' AND attempt = 2 FROM idempotency_keys \
                 WHERE key = 'nothing')",
                lapses.unwrap()
            ))
            .await,
        "taken over too early, or not counted as an attempt"
    );
    assert_eq!(rig.db.text(seed).await, seed_before, "what derive() is made of");
    assert_eq!(rig.db.effects("nothing").await, 1);

    // What the dead attempt did outside a transaction of ours is done again: at least once.
    retry(async || rig.post("/held").key("effect").body("effect").answer().await).await;
    assert_eq!(rig.db.effects("effect").await, 2);
}

/// A process that was stopped (a paused container, a suspended machine) and wakes up after its lease.
#[actix_web::test]
async fn a_process_that_sleeps_through_its_lease_stores_nothing_and_sends_what_is_stored() {
    let rig = Rig::start().await;
    let sleeper = Setup { lease: SECOND / 2, ..Setup::new(&rig.db.url) }.start();
    let url = sleeper.url("/slow?ms=2000");
    let late = rt::spawn(client().post(url).key("x").body("x").answer());
    eventually("the handler runs", || async { rig.db.effects("x").await == 1 }).await;
    sleeper.signal("STOP");

    let (stored, _) = retry(async || rig.post("/slow?ms=2000").key("x").body("x").answer().await).await;
    assert!(!stored.is_replay());
    sleeper.signal("CONT");
    stored.assert_replayed_by(&late.await.unwrap());
    stored.assert_replayed_by(&rig.post("/slow?ms=2000").key("x").body("x").answer().await);
    assert_eq!(rig.db.effects("x").await, 2);
}

// --- lease and retention -----------------------------------------------------------------------------------

/// X02
#[actix_web::test]
async fn an_answer_outlives_the_lease_it_was_made_under() {
    let rig = Rig::with(policy().lease(SECOND / 5)).await;
    let first = rig.post("/orders").key("x").json(&order("x")).answer().await;
    sleep(SECOND).await;
    first.assert_replayed_by(&rig.post("/orders").key("x").json(&order("x")).answer().await);
    assert_eq!(rig.db.effects("x").await, 1);
}

/// X02
#[actix_web::test]
async fn retention_counts_from_the_completion_however_long_the_handler_runs() {
    let rig = Rig::with(policy().retention(2 * SECOND)).await;
    let first = rt::spawn(rig.post("/held").key("x").body("x").answer());
    rig.gate.entered(1).await;
    eventually("the retention has passed", || {
        rig.db.is("(SELECT expires_at + interval '300 ms' < now() FROM idempotency_keys)")
    })
    .await;
    assert_eq!(rig.post("/held").key("x").body("x").answer().await.code(), "outstanding");

    rig.gate.open(2);
    let first = first.await.unwrap();
    first.assert_replayed_by(&rig.post("/held").key("x").body("x").answer().await);
    let completed = rig.db.text("SELECT completed_at::text AS value FROM idempotency_keys").await.unwrap();
    eventually("the key is free", || async {
        let answer = rig.post("/held").key("x").body("x").answer().await;
        assert_eq!(answer.status, 201);
        !answer.is_replay()
    })
    .await;
    assert!(
        rig.db
            .is(&format!("(SELECT created_at >= '{completed}'::timestamptz + interval '2 s' FROM idempotency_keys)"))
            .await
    );
    assert_eq!(rig.db.effects("x").await, 2);
}

/// X02
#[actix_web::test]
async fn without_an_answer_retention_counts_from_the_end_of_the_lease() {
    let rig = Rig::with(policy().retention(SECOND)).await;
    let send = async |path: &str, body| rig.post(path).key("x").json(&order(body)).answer().await;
    // A failure, whose effects are unknown; and an attempt that died.
    for (path, status) in [("/flaky?mode=r500", 500), ("/orders", 201)] {
        assert_eq!(send(path, "a").await.status, status);
        if status == 201 {
            rig.db.lapse("x").await;
        }
        let of = format!("resource = 'POST {}'", path.split('?').next().unwrap());
        let ended = rig.db.text(&format!("SELECT leased_until::text AS value FROM idempotency_keys WHERE {of}")).await;
        eventually("another request may use the key", || async {
            let answer = send(path, "b").await;
            assert!(answer.status == 201 || answer.code() == "key-reused", "{path}: {answer:?}");
            answer.status == 201
        })
        .await;
        let condition = format!("created_at >= '{}'::timestamptz + interval '1 s' AND attempt = 1", ended.unwrap());
        assert!(rig.db.is(&format!("(SELECT {condition} FROM idempotency_keys WHERE {of})")).await, "{path}");
    }
}

// --- clients that reset ------------------------------------------------------------------------------------

/// X04
#[actix_web::test]
async fn a_handler_goes_on_when_its_client_has_reset_the_connection() {
    let rig = Rig::start().await;
    let mut raw = rig.raw().await;
    raw.send(post("/held?gate_first=true", "x", "x")).await.unwrap();
    rig.gate.entered(1).await;
    raw.reset();
    let send = async || rig.post("/held?gate_first=true").key("x").body("x").answer().await;
    assert_eq!(send().await.code(), "outstanding");
    rig.gate.open(1);
    let (answer, _) = retry(send).await;
    assert!(answer.is_replay());
    assert_eq!(rig.db.effects("x").await, 1);
}

/// X04
#[actix_web::test]
async fn resets_at_any_moment_leave_one_effect_and_a_whole_pool() {
    const LANES: usize = 5;
    let rig = Rig::builder().pool_size(3).start().await;
    let rounds = repeat(200, 25) / LANES;
    let lanes = (0..LANES).map(|lane| {
        let rig = &rig;
        async move {
            for round in 0..rounds {
                let key = format!("{lane}-{round}");
                let mut raw = rig.raw().await;
                raw.send(post("/slow?ms=100", &key, &key)).await.unwrap();
                sleep(Duration::from_millis(rand::random_range(0..130))).await;
                raw.reset();
                retry(async || rig.post("/slow?ms=100").key(&key).body(key.clone()).answer().await).await;
                assert_eq!(rig.db.effects(&key).await, 1);
            }
        }
    });
    join_all(lanes).await;
    assert_eq!(rig.db.keys().await, rig.db.all_effects().await);
    assert_usable(&rig.pool, 3).await;
}

// --- handlers that panic -----------------------------------------------------------------------------------

/// X06
#[actix_web::test]
async fn a_panic_is_an_answer_and_the_key_is_free() {
    let rig = Rig::start().await;
    for mode in ["panic", "panic_after_write"] {
        let path = format!("/flaky?mode={mode}");
        let answer = rig.post(&path).key(mode).answer().await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (500, "handler-panicked"));
        assert_eq!(rig.db.state(mode).await.as_deref(), Some("released"));
        let retry = rig.post(&path).key(mode).answer().await;
        assert_eq!(retry.status, 201);
        retry.assert_replayed_by(&rig.post(&path).key(mode).answer().await);
    }
}

/// X06
#[actix_web::test]
async fn fifty_panics_leave_a_whole_pool() {
    let routes = |config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool| {
        config
            .service(web::scope("").wrap(idempotency.clone()).route("/panic", web::post().to(panics_with_connection)));
    };
    let rig = Rig::builder().pool_size(3).serve(routes).await;
    // Each takes its connection down with it.
    for round in 0..10 {
        let panics = (0..5).map(|n| rig.post("/panic").key(&format!("{round}-{n}")).answer());
        for answer in join_all(panics).await {
            assert_eq!(answer.code(), "handler-panicked");
        }
    }
    assert_eq!(rig.db.number("SELECT count(*) AS value FROM idempotency_keys WHERE state = 'released'").await, 50);
    assert_usable(&rig.pool, 3).await;
}

async fn panics_with_connection(pool: Data<PgPool>) -> Result<HttpResponse> {
    let _conn = pool.get().await.map_err(ErrorInternalServerError)?;
    // As `panic!`, without the fifty messages.
    std::panic::resume_unwind(Box::new("on purpose"));
}

// --- shutdown ------------------------------------------------------------------------------------------------

/// X07
#[actix_web::test]
async fn a_request_that_shutdown_cuts_off_can_be_sent_again() {
    let rig = Rig::start().await;
    rig.gate.open(1);
    let mut server = Setup { lease: 2 * SECOND, shutdown_timeout: 1, ..Setup::new(&rig.db.url) }.start();
    let _waiting = begin(&server, &rig.db, "/held?gate_first=true", "x").await;
    server.signal("TERM");
    server.exited().await;
    retry(async || rig.post("/held?gate_first=true").key("x").body("x").answer().await).await;
    assert_eq!(rig.db.effects("x").await, 1);
}

/// X07
#[actix_web::test]
async fn a_drain_waits_for_the_request_of_a_client_that_has_gone() {
    for signal in ["TERM", "INT"] {
        let rig = Rig::start().await;
        let mut server = Setup { drain: Some(PATIENCE), shutdown_timeout: 1, ..Setup::new(&rig.db.url) }.start();
        begin(&server, &rig.db, "/slow?ms=1500", "x").await.reset();
        server.signal(signal);
        assert!(server.exited().await.success());
        assert_eq!(rig.db.state("x").await.as_deref(), Some("completed"), "{signal}");
        let retry = rig.post("/slow?ms=1500").key("x").body("x").answer().await;
        assert!(retry.is_replay());
        assert_eq!(rig.db.effects("x").await, 1);
    }
}

/// A server that drains on the test's own signal.
struct Draining {
    db: Db,
    gate: Gate,
    url: String,
    stop: Option<oneshot::Sender<()>>,
    stopped: rt::task::JoinHandle<std::io::Result<()>>,
}

impl Draining {
    async fn start(deadline: Duration) -> Self {
        let db = Db::new().await;
        let (pool, gate, misbehaved) = (db.pool(5), Gate::new(), Misbehaved::default());
        let idempotency = Idempotency::postgres(pool.clone()).with(policy());
        let (stop, stopping) = oneshot::channel::<()>();
        let drain = idempotency.drain().deadline(deadline).on(async { drop(stopping.await) });
        let for_server = gate.clone();
        let server = HttpServer::new(move || {
            App::new()
                .app_data(Data::new(pool.clone()))
                .app_data(Data::new(for_server.clone()))
                .app_data(Data::new(misbehaved.clone()))
                .configure(|config| app::routes(config, &idempotency))
        })
        .workers(2)
        .shutdown_timeout(1)
        .shutdown_signal(drain)
        .bind(("127.0.0.1", 0))
        .unwrap();
        let url = format!("http://{}", server.addrs()[0]);
        Self { db, gate, url, stop: Some(stop), stopped: rt::spawn(server.run()) }
    }

    fn post(&self, path: &str) -> reqwest::RequestBuilder {
        client().post(format!("{}{path}", self.url))
    }
}

/// X07
#[actix_web::test]
async fn a_draining_server_replays_and_claims_nothing() {
    let mut server = Draining::start(PATIENCE).await;
    let first = server.post("/orders").key("done").json(&order("done")).answer().await;
    server.post("/orders").key("lapsed").json(&order("lapsed")).answer().await;
    server.db.lapse("lapsed").await;
    assert_eq!(server.post("/flaky?mode=r503").key("released").answer().await.status, 503);
    let running = rt::spawn(server.post("/held").key("running").body("running").answer());
    server.gate.entered(1).await;

    server.stop.take().unwrap().send(()).unwrap();
    eventually("new claims are refused", || async {
        let answer =
            server.post("/orders").key(&format!("{}", rand::random::<u64>())).json(&order("new")).answer().await;
        answer.status == 503 && answer.code() == "shutting-down" && answer.retry_after().is_some()
    })
    .await;
    let orders = server.db.effects("new").await;
    for key in ["new", "lapsed"] {
        assert_eq!(server.post("/orders").key(key).json(&order(key)).answer().await.code(), "shutting-down", "{key}");
    }
    assert_eq!(server.post("/flaky?mode=r503").key("released").answer().await.code(), "shutting-down");
    first.assert_replayed_by(&server.post("/orders").key("done").json(&order("done")).answer().await);
    assert_eq!(server.post("/orders").key("done").json(&order("other")).answer().await.code(), "key-reused");
    assert_eq!(server.post("/held").key("running").body("running").answer().await.code(), "outstanding");
    // Without a key it is none of our business.
    assert_eq!(server.post("/orders").json(&order("keyless")).answer().await.status, 201);
    assert_eq!(server.db.effects("new").await, orders);
    assert_eq!(server.db.effects("lapsed").await, 1);

    server.gate.open(1);
    assert_eq!(running.await.unwrap().status, 201);
    server.stopped.await.unwrap().unwrap();
    assert_eq!(server.db.state("running").await.as_deref(), Some("completed"));
}

/// X07
#[actix_web::test]
async fn a_drain_has_a_deadline() {
    let mut server = Draining::start(SECOND / 2).await;
    let cut_off = rt::spawn(server.post("/held?gate_first=true").key("x").body("x").try_answer());
    server.gate.entered(1).await;
    server.stop.take().unwrap().send(()).unwrap();
    let began = Instant::now();
    server.stopped.await.unwrap().unwrap();
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    assert!(cut_off.await.unwrap().is_err());

    // The next process does it.
    let next = Twin::alone(server.db.pool(5), policy());
    next.gate.open(1);
    retry(async || next.post("/held?gate_first=true").key("x").body("x").answer().await).await;
    assert_eq!(server.db.effects("x").await, 1);
}

// --- renewal, and handlers that run too long -----------------------------------------------------------------

#[actix_web::test]
async fn a_handler_of_many_leases_keeps_its_key_even_when_another_blocks_the_only_worker() {
    let lease = 2 * SECOND;
    let rig = Rig::builder().policy(policy().lease(lease).max_run(PATIENCE)).workers(1).start().await;
    let held = rt::spawn(rig.post("/held").key("x").body("x").answer());
    rig.gate.entered(1).await;
    let blocked = rt::spawn(rig.post("/blocked").key("y").body("y").answer());
    rig.gate.entered(2).await;

    let other = rig.other(policy());
    let began = Instant::now();
    while began.elapsed() < 3 * lease {
        for (path, key) in [("/held", "x"), ("/blocked", "y")] {
            assert_eq!(other.post(path).key(key).body(key).answer().await.code(), "outstanding");
        }
        sleep(lease / 10).await;
    }
    rig.gate.open(2);
    for (path, key, first) in [("/held", "x", held), ("/blocked", "y", blocked)] {
        first.await.unwrap().assert_replayed_by(&other.post(path).key(key).body(key).answer().await);
    }
    assert_eq!((rig.db.all_effects().await, other.gate.count()), (2, 0));
}

#[actix_web::test]
async fn a_handler_that_runs_too_long_is_dropped_and_its_key_is_free() {
    let running = Arc::new(watch::channel(()).0);
    let for_handler = Arc::clone(&running);
    let rig = Rig::builder()
        .policy(policy().max_run(SECOND))
        .serve(move |config, idempotency, _| {
            let running = Arc::clone(&for_handler);
            let handler = move |gate: Data<Gate>| {
                let runs = running.subscribe();
                async move {
                    gate.pass().await;
                    drop(runs);
                    created(1)
                }
            };
            config.service(web::resource("/long").wrap(idempotency.clone()).route(web::post().to(handler)));
        })
        .await;
    let answer = rig.post("/long").key("x").answer().await;
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (503, "outcome-unknown"));
    assert!(answer.retry_after().is_some());
    assert_eq!((rig.gate.count(), running.receiver_count()), (1, 0), "the handler should have been dropped");
    assert_eq!(rig.db.state("x").await.as_deref(), Some("released"));

    assert_eq!(rig.post("/long").key("x").body("another request").answer().await.code(), "key-reused");
    rig.gate.open(1);
    assert_eq!(rig.post("/long").key("x").answer().await.status, 201);
    assert_eq!(rig.gate.count(), 2);
}

#[actix_web::test]
async fn a_handler_that_blocks_past_its_time_loses_its_lease_and_sends_what_is_stored() {
    let rig = Rig::with(policy().lease(2 * SECOND).max_run(4 * SECOND)).await;
    let blocked = rt::spawn(rig.post("/blocked").key("x").body("x").answer());
    rig.gate.entered(1).await;
    let other = rig.other(policy());
    other.gate.open(1);
    let began = Instant::now();
    let (stored, _) = retry(async || other.post("/blocked").key("x").body("x").answer().await).await;
    assert!(began.elapsed() > 3 * SECOND, "its lease should have been renewed as long as it might run");
    assert!(!stored.is_replay());

    rig.gate.open(1);
    stored.assert_replayed_by(&blocked.await.unwrap());
    stored.assert_replayed_by(&other.post("/blocked").key("x").body("x").answer().await);
}

// --- a store that fails --------------------------------------------------------------------------------------

/// X10
#[actix_web::test]
async fn renewal_needs_no_connection_of_the_pool_and_goes_on_after_an_outage() {
    let lease = 4 * SECOND;
    let db = Db::new().await;
    let role = db.service_role().await;
    let rig = Rig::builder().policy(policy().lease(lease)).on(db, pool(&role.url, 2)).start().await;
    let first = ["x", "y"].map(|key| rt::spawn(rig.post("/connected").key(key).body(key).answer()));
    rig.gate.entered(2).await;
    let lapses = "(SELECT min(leased_until) FROM idempotency_keys)";
    let before = rig.db.text(&format!("SELECT {lapses}::text AS value")).await.unwrap();
    rig.db.run(&format!("REVOKE UPDATE ON idempotency_keys FROM {}", role.name)).await;
    sleep(2 * SECOND).await;
    assert_eq!(rig.db.text(&format!("SELECT {lapses}::text AS value")).await.unwrap(), before);
    rig.db.run(&format!("GRANT UPDATE ON idempotency_keys TO {}", role.name)).await;

    // The pool is still exhausted: nothing can be claimed, and nothing runs unprotected.
    let starved = rt::spawn(rig.post("/connected").key("z").body("z").answer());
    let other = rig.other(policy());
    eventually("the first lease is over", || async {
        for key in ["x", "y"] {
            assert_eq!(other.post("/connected").key(key).body(key).answer().await.code(), "outstanding");
        }
        rig.db.is(&format!("clock_timestamp() > '{before}'::timestamptz + interval '300 ms'")).await
    })
    .await;
    assert_eq!(starved.await.unwrap().code(), "store-unavailable");
    rig.gate.open(2);
    for (key, first) in ["x", "y"].into_iter().zip(first) {
        first.await.unwrap().assert_replayed_by(&other.post("/connected").key(key).body(key).answer().await);
        assert_eq!(rig.db.effects(key).await, 1);
    }
    assert_eq!(other.gate.count(), 0);
}

#[actix_web::test]
async fn an_answer_that_cannot_be_stored_is_sent_and_stored_when_the_server_is_back() {
    let cluster = Cluster::start(&[]);
    let db = Db::on(&cluster.url()).await;
    let connections = db.pool(5);
    let rig = Rig::builder().policy(policy().store_timeout(2 * SECOND)).on(db, connections).start().await;
    let first = rt::spawn(rig.post("/held").key("x").body("x").answer());
    let released = rt::spawn(rig.post("/held").key("y").body("y").answer());
    rig.gate.entered(2).await;
    cluster.down();
    rig.gate.open(2);
    let first = first.await.unwrap();
    assert_eq!((first.status.as_u16(), first.is_replay()), (201, false));
    assert_eq!(released.await.unwrap().status, 201);
    let answer = rig.post("/held").key("x").body("x").answer().await;
    assert_eq!(answer.code(), "store-unavailable");
    assert!(answer.retry_after().is_some());

    cluster.up();
    eventually("the answer is stored", || async {
        rig.db.number("SELECT count(*) AS value FROM idempotency_keys WHERE state = 'completed'").await == 2
    })
    .await;
    first.assert_replayed_by(&rig.other(policy()).post("/held").key("x").body("x").answer().await);
    assert_eq!(rig.db.effects("x").await, 1);
}

/// The network between one process and the store is cut: its role may not log in for a while.
struct CutOff {
    rig: Rig,
    role: String,
}

impl CutOff {
    async fn start(policy: Policy) -> Self {
        let db = Db::new().await;
        let role = db.service_role().await;
        let rig = Rig::builder().policy(policy).on(db, pool(&role.url, 2)).start().await;
        Self { rig, role: role.name }
    }

    async fn cut(&self) {
        let role = &self.role;
        self.rig.db.run(&format!("ALTER ROLE {role} NOLOGIN")).await;
        self.rig
            .db
            .run(&format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'"))
            .await;
    }

    async fn mend(&self) {
        self.rig.db.run(&format!("ALTER ROLE {} LOGIN", self.role)).await;
    }

    /// Everything that is still to be stored has been, or is known to be lost.
    async fn settled(&self) {
        self.rig.idempotency.drain().on(async {}).deadline(PATIENCE).await;
    }
}

#[actix_web::test]
async fn an_outage_longer_than_the_lease_lets_another_attempt_in_and_the_late_one_stores_nothing() {
    let island = CutOff::start(policy().lease(SECOND).store_timeout(2 * SECOND)).await;
    let rig = &island.rig;
    let first = rt::spawn(rig.post("/held").key("x").body("x").answer());
    rig.gate.entered(1).await;
    island.cut().await;
    rig.gate.open(1);
    // It knows what it did, and says so; that nobody else will be told the same it cannot help.
    let first = first.await.unwrap();
    assert_eq!((first.status.as_u16(), first.is_replay()), (201, false));

    let mainland = rig.other(policy());
    mainland.gate.open(1);
    let send = async || mainland.post("/held").key("x").body("x").answer().await;
    let (stored, _) = retry(send).await;
    assert!(!stored.is_replay() && stored.body != first.body);
    island.mend().await;
    island.settled().await;
    stored.assert_replayed_by(&send().await);
    assert_eq!(rig.db.effects("x").await, 2);
}

#[actix_web::test]
async fn an_answer_is_stored_after_an_outage_longer_than_the_lease_if_nobody_was_faster() {
    let island = CutOff::start(policy().lease(SECOND / 2).store_timeout(2 * SECOND)).await;
    let rig = &island.rig;
    let first = rt::spawn(rig.post("/held").key("x").body("x").answer());
    rig.gate.entered(1).await;
    island.cut().await;
    rig.gate.open(1);
    let first = first.await.unwrap();
    eventually("the lease lapses", || rig.db.is("(SELECT leased_until < clock_timestamp() FROM idempotency_keys)"))
        .await;
    island.mend().await;
    island.settled().await;
    first.assert_replayed_by(&rig.other(policy()).post("/held").key("x").body("x").answer().await);
    assert_eq!(rig.db.effects("x").await, 1);
}

/// There is no answer to keep, so that nothing is sent again for longer than the lease lasts anyway.
#[actix_web::test]
async fn a_release_that_cannot_be_sent_is_left_to_the_lease() {
    let island = CutOff::start(policy().lease(SECOND).store_timeout(2 * SECOND)).await;
    let rig = &island.rig;
    let failing = rt::spawn(rig.post("/flaky?mode=err_after_gate").key("x").answer());
    rig.gate.entered(1).await;
    island.cut().await;
    rig.gate.open(1);
    assert_eq!(failing.await.unwrap().status, 500);
    island.settled().await;
    let mainland = rig.other(policy());
    mainland.gate.open(1);
    eventually("another attempt runs", || async {
        let answer = mainland.post("/flaky?mode=err_after_gate").key("x").answer().await;
        assert!(answer.status == 500 || answer.code() == "outstanding", "{answer:?}");
        answer.status == 500
    })
    .await;
    assert_eq!(rig.db.number("SELECT attempt::bigint AS value FROM idempotency_keys").await, 2);
}
