//! Many requests with one key, in one process and in several.

use std::{
    cell::Cell,
    num::{NonZeroU32, NonZeroUsize},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use actix_idempotency::{Idempotency, OnOutstanding, PgPool, Policy};
use actix_web::{
    HttpResponse,
    rt::{spawn, time::sleep},
    web::{self, Data, ServiceConfig},
};
use diesel_async::SimpleAsyncConnection;
use futures_util::future::join_all;

use crate::support::{
    app::{order, routes},
    client::{Answer, RequestExt, client, post},
    cluster::Cluster,
    db::Db,
    eventually,
    gate::Gate,
    log,
    process::{ServerProcess, Setup},
    repeat,
    rig::{Rig, Server},
    statements::counting,
};

const WAIT: OnOutstanding = OnOutstanding::Wait(Duration::from_secs(3600));

#[track_caller]
fn assert_outstanding(answer: &Answer) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (409, "outstanding"));
    assert_eq!(answer.retry_after(), Some(1));
}

/// The same request so many times at once, dealt out to the servers, each over its own connection.
async fn duplicates(servers: &[ServerProcess], times: usize, path: &str, key: &str) -> Vec<Answer> {
    let client = client();
    let requests = (0..times).map(|n| {
        let request = client.post(servers[n % servers.len()].url(path)).key(key);
        spawn(request.json(&order(key)).answer())
    });
    join_all(requests).await.into_iter().map(Result::unwrap).collect()
}

/// One of them ran, and the others were told its answer or that it runs.
#[track_caller]
fn assert_one_answer(answers: &[Answer]) -> Answer {
    let ran: Vec<_> = answers.iter().filter(|answer| answer.status == 201 && !answer.is_replay()).collect();
    assert_eq!(ran.len(), 1, "{answers:?}");
    for answer in answers.iter().filter(|answer| answer.is_replay()) {
        ran[0].assert_replayed_by(answer);
    }
    answers.iter().filter(|answer| answer.status != 201).for_each(assert_outstanding);
    ran[0].clone()
}

/// C01
#[actix_web::test]
async fn of_fifty_duplicates_to_two_processes_one_runs() {
    let db = Db::new().await;
    let servers = [Setup::new(&db.url).start(), Setup::new(&db.url).start()];
    for round in 0..repeat(20, 3) {
        let key = format!("k{round}");
        let first = assert_one_answer(&duplicates(&servers, 50, "/orders", &key).await);
        for server in &servers {
            let retry = client().post(server.url("/orders")).key(&key).json(&order(&key)).answer().await;
            first.assert_replayed_by(&retry);
        }
        assert_eq!(db.effects(&key).await, 1);
    }
}

/// C02
#[actix_web::test]
async fn losing_the_race_is_no_error_not_even_in_the_log_of_postgres() {
    let cluster = Cluster::start(&[]);
    let db = Db::on(&cluster.url()).await;
    let servers = [Setup::new(&db.url).start(), Setup::new(&db.url).start()];
    for key in ["a", "b"] {
        assert_one_answer(&duplicates(&servers, 50, "/orders", key).await);
    }
    let errors: Vec<_> = cluster.log().lines().filter(|line| line.contains("ERROR")).map(str::to_owned).collect();
    assert!(errors.is_empty(), "{errors:?}");
}

/// C08
#[actix_web::test]
async fn no_state_is_kept_in_workers_or_processes() {
    let db = Db::new().await;
    let setup = Setup { workers: 4, ..Setup::new(&db.url) };
    let servers = [setup.start(), setup.start()];
    let first = assert_one_answer(&duplicates(&servers, 40, "/orders", "x").await);
    assert_eq!(db.effects("x").await, 1);
    servers.into_iter().for_each(ServerProcess::kill);
    let servers = [setup.start(), setup.start()];
    for answer in duplicates(&servers, 4, "/orders", "x").await {
        first.assert_replayed_by(&answer);
    }
    assert_eq!(db.effects("x").await, 1);
}

/// Another session that is about to insert the row of a key which no request has claimed yet.
struct AnotherSession(diesel_async::AsyncPgConnection);

impl AnotherSession {
    /// The row is that of `first`, which is forgotten.
    async fn inserts(rig: &Rig, state: &str) -> Self {
        let outstanding = "completed_at = NULL, status = NULL, header_names = NULL, header_values = NULL, body = NULL, \
                           snapshot_version = NULL, leased_until = now() + interval '1 minute'";
        rig.db.run("CREATE TABLE copy AS TABLE idempotency_keys; TRUNCATE idempotency_keys CASCADE").await;
        if state == "outstanding" {
            rig.db.run(&format!("UPDATE copy SET state = 'outstanding', {outstanding}")).await;
        }
        let mut conn = rig.db.connect().await;
        conn.batch_execute("BEGIN; INSERT INTO idempotency_keys TABLE copy").await.unwrap();
        Self(conn)
    }

    async fn ends(mut self, how: &str) {
        self.0.batch_execute(how).await.unwrap();
    }
}

/// Until a statement of this database waits for a lock.
async fn until_somebody_waits_for_a_lock(rig: &Rig) {
    eventually("somebody waits for a lock", || {
        rig.db.is("EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
                   AND wait_event_type = 'Lock')")
    })
    .await;
}

/// C03
#[actix_web::test]
async fn whoever_meets_a_claim_that_then_commits_is_told_so() {
    for state in ["completed", "outstanding"] {
        let rig = Rig::start().await;
        let twin = rig.twin(Policy::new().anonymous());
        let first = rig.post("/orders").key("x").json(&order("x")).answer().await;
        let session = AnotherSession::inserts(&rig, state).await;
        let request = spawn(twin.post("/orders").key("x").json(&order("x")).answer());
        until_somebody_waits_for_a_lock(&rig).await;
        session.ends("COMMIT").await;
        let answer = request.await.unwrap();
        if state == "completed" {
            first.assert_replayed_by(&answer);
        } else {
            assert_outstanding(&answer);
        }
        assert_eq!(rig.db.effects("x").await, 1);
    }
}

/// C03
#[actix_web::test]
async fn whoever_meets_a_claim_that_is_rolled_back_runs() {
    let rig = Rig::start().await;
    let twin = rig.twin(Policy::new().anonymous());
    let first = rig.post("/orders").key("x").json(&order("x")).answer().await;
    let session = AnotherSession::inserts(&rig, "outstanding").await;
    let request = spawn(twin.post("/orders").key("x").json(&order("x")).answer());
    until_somebody_waits_for_a_lock(&rig).await;
    session.ends("ROLLBACK").await;
    let answer = request.await.unwrap();
    assert!(answer.status == 201 && !answer.is_replay());
    assert_ne!(answer.body, first.body);
    assert_eq!(rig.db.effects("x").await, 2);
}

/// C03
#[actix_web::test]
async fn nobody_waits_for_ever_for_a_claim_that_is_not_committed() {
    let rig = Rig::start().await;
    // A fifth of it is how long a statement waits for a lock.
    let twin = rig.twin(Policy::new().anonymous().store_timeout(Duration::from_secs(2)));
    let first = rig.post("/orders").key("x").json(&order("x")).answer().await;
    let session = AnotherSession::inserts(&rig, "completed").await;
    assert_outstanding(&twin.post("/orders").key("x").json(&order("x")).answer().await);
    session.ends("COMMIT").await;
    first.assert_replayed_by(&twin.post("/orders").key("x").json(&order("x")).answer().await);
    assert_eq!(rig.db.effects("x").await, 1);
}

/// C03
#[actix_web::test]
async fn whoever_meets_a_row_that_is_being_deleted_runs_only_once_it_is_gone() {
    for goes in [true, false] {
        let rig = Rig::start().await;
        let twin = rig.twin(Policy::new().anonymous());
        let first = rig.post("/orders").key("x").json(&order("x")).answer().await;
        let mut session = rig.db.connect().await;
        session.batch_execute("BEGIN; DELETE FROM idempotency_keys").await.unwrap();
        let request = spawn(twin.post("/orders").key("x").json(&order("x")).answer());
        until_somebody_waits_for_a_lock(&rig).await;
        session.batch_execute(if goes { "COMMIT" } else { "ROLLBACK" }).await.unwrap();
        let answer = request.await.unwrap();
        if goes {
            assert!(answer.status == 201 && !answer.is_replay());
        } else {
            first.assert_replayed_by(&answer);
        }
        assert_eq!(rig.db.effects("x").await, if goes { 2 } else { 1 });
    }
}

/// C05
#[actix_web::test]
async fn duplicates_of_a_running_request_neither_wait_nor_hold_connections() {
    // A pool of one is enough for all of them.
    for pool_size in [5, 1] {
        let rig = Rig::builder().pool_size(pool_size).start().await;
        let first = spawn(rig.post("/held").key("x").body("a").answer());
        rig.gate.entered(1).await;
        let duplicates = (0..10).map(|_| spawn(rig.post("/held").key("x").body("a").answer()));
        let list = rig.get("/orders").answer().await;
        assert_eq!(list.json().as_array().unwrap().len(), 1);
        for duplicate in join_all(duplicates).await {
            assert_outstanding(&duplicate.unwrap());
        }
        rig.gate.open(1);
        assert_eq!(first.await.unwrap().status, 201);
        assert_eq!(rig.db.effects("a").await, 1);
    }
}

/// C07
#[actix_web::test]
async fn requests_with_different_keys_run_side_by_side() {
    let rig = Rig::start().await;
    let requests: Vec<_> = (0..10).map(|n| spawn(rig.post("/held").key(&format!("k{n}")).body("a").answer())).collect();
    // All of them are in the handler at once.
    rig.gate.entered(10).await;
    rig.gate.open(10);
    for request in requests {
        assert_eq!(request.await.unwrap().status, 201);
    }
    assert_eq!(rig.db.effects("a").await, 10);
}

/// C09
#[actix_web::test]
async fn wait_and_changed_and_down_are_told_apart() {
    let rig = Rig::start().await;
    let first = spawn(rig.post("/held").key("x").body("a").answer());
    rig.gate.entered(1).await;
    let told = async |body: &'static str| {
        let answer = rig.post("/held").key("x").body(body).answer().await;
        (answer.status.as_u16(), answer.code(), answer.retry_after())
    };
    assert_eq!(told("a").await, (409, "outstanding".into(), Some(1)));
    assert_eq!(told("b").await, (422, "key-reused".into(), None));
    rig.db.run("ALTER TABLE idempotency_keys RENAME TO away").await;
    assert_eq!(told("a").await, (503, "store-unavailable".into(), Some(1)));
    rig.db.run("ALTER TABLE away RENAME TO idempotency_keys").await;
    rig.gate.open(1);
    first.await.unwrap().assert_replayed_by(&rig.post("/held").key("x").body("a").answer().await);
}

/// C09
#[actix_web::test]
async fn a_client_is_told_to_wait_as_long_as_the_policy_says_and_the_lease_lasts() {
    let (lease, minutes) = (Duration::from_secs(30), NonZeroU32::new(300).unwrap());
    for (policy, seconds) in [
        (Policy::new().retry_after(NonZeroU32::new(7).unwrap()), 7..=7),
        (Policy::new().lease(lease).retry_after(minutes), 1..=30),
    ] {
        let rig = Rig::with(policy.anonymous()).await;
        let first = spawn(rig.post("/held").key("x").body("a").answer());
        rig.gate.entered(1).await;
        let conflict = rig.post("/held").key("x").body("a").answer().await;
        assert_eq!(conflict.code(), "outstanding");
        assert!(seconds.contains(&conflict.retry_after().unwrap()), "{:?}", conflict.retry_after());
        rig.gate.open(1);
        assert_eq!(first.await.unwrap().status, 201);
    }
}

/// C09
#[actix_web::test]
async fn a_client_that_retries_409_and_503_ends_with_the_first_answer() {
    let rig = Rig::start().await;
    let first = spawn(rig.post("/held").key("x").body("a").answer());
    rig.gate.entered(1).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let request = rig.post("/held").key("x").body("a");
    let retrying = spawn({
        let seen = Arc::clone(&seen);
        async move {
            loop {
                let answer = request.try_clone().unwrap().answer().await;
                seen.lock().unwrap().push(answer.status.as_u16());
                if !matches!(answer.status.as_u16(), 409 | 503) {
                    return answer;
                }
                assert!(answer.retry_after().is_some());
                sleep(Duration::from_millis(20)).await;
            }
        }
    });
    let sees = |status: u16| {
        let seen = Arc::clone(&seen);
        eventually("the client sees it", move || {
            let seen = seen.lock().unwrap().contains(&status);
            async move { seen }
        })
    };
    sees(409).await;
    rig.db.run("ALTER TABLE idempotency_keys RENAME TO away").await;
    sees(503).await;
    rig.db.run("ALTER TABLE away RENAME TO idempotency_keys").await;
    rig.gate.open(1);
    first.await.unwrap().assert_replayed_by(&retrying.await.unwrap());
    assert_eq!(rig.db.effects("a").await, 1);
}

/// Until so many requests have said that they wait for this row.
async fn until_waiting(id: &str, waiters: usize) {
    eventually("the requests wait", || async { log::count(id, "waited") >= waiters }).await;
}

/// A request that is held, with the id of its row, and requests that wait for its answer.
async fn held(rig: &Rig, key: &str) -> (actix_web::rt::task::JoinHandle<Answer>, String) {
    log::listen();
    let before = rig.gate.count();
    let first = spawn(rig.post("/held").key(key).body("a").answer());
    rig.gate.entered(before + 1).await;
    (first, rig.db.id(key).await)
}

fn send(request: reqwest::RequestBuilder, key: &str) -> actix_web::rt::task::JoinHandle<Answer> {
    spawn(request.key(key).body("a").answer())
}

#[actix_web::test]
async fn waiters_get_the_answer_in_this_process_and_in_others() {
    let rig = Rig::with(Policy::new().anonymous().on_outstanding(WAIT)).await;
    let twin = rig.twin(Policy::new().anonymous().on_outstanding(WAIT));
    let (first, id) = held(&rig, "told").await;
    let waiting: Vec<_> =
        (0..3).flat_map(|_| [send(rig.post("/held"), "told"), send(twin.post("/held"), "told")]).collect();
    until_waiting(&id, 6).await;
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
    rig.gate.open(1);
    let first = first.await.unwrap();
    for answer in join_all(waiting).await {
        first.assert_replayed_by(&answer.unwrap());
    }
    assert_eq!(rig.db.effects("a").await, 1);
}

#[cfg(unix)]
#[actix_web::test]
async fn waiters_of_the_same_process_are_woken_and_need_no_poll() {
    let cluster = Cluster::start(&[]);
    let rig = Rig::builder()
        .policy(Policy::new().anonymous().on_outstanding(WAIT))
        .database(Db::on(&cluster.url()).await)
        .start()
        .await;
    for key in ["woken-1", "woken-2", "woken-3"] {
        // The poll gives up after 5 s and goes on over another connection; a busy machine has three tries.
        if told_without_a_poll(&rig, key).await < Duration::from_secs(4) {
            return;
        }
    }
    panic!("they are told by the poll only");
}

/// How long waiters wait for an answer that is there, while the one connection that polls is stopped.
#[cfg(unix)]
async fn told_without_a_poll(rig: &Rig, key: &str) -> Duration {
    let (first, id) = held(rig, key).await;
    let waiting: Vec<_> = (0..5).map(|_| send(rig.post("/held"), key)).collect();
    until_waiting(&id, 5).await;
    let poller = "FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%AS waited (id, lock)%' \
                  AND pid <> pg_backend_pid()";
    eventually("it polls", async || rig.db.is(&format!("(SELECT count(*) = 1 {poller})")).await).await;
    let pid = rig.db.number(&format!("SELECT pid::bigint AS value {poller}")).await;
    let signal = |name: &str| {
        assert!(std::process::Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
    };
    signal("-STOP");
    rig.gate.open(1);
    let first = first.await.unwrap();
    let answered = Instant::now();
    for answer in join_all(waiting).await {
        first.assert_replayed_by(&answer.unwrap());
    }
    let waited = answered.elapsed();
    signal("-CONT");
    waited
}

/// Fails once it is let go for the first time.
fn fails_first(config: &mut ServiceConfig, idempotency: &Idempotency, failed: &Data<AtomicBool>) {
    async fn handler(gate: Data<Gate>, failed: Data<AtomicBool>) -> HttpResponse {
        gate.pass().await;
        if failed.swap(true, Ordering::SeqCst) {
            HttpResponse::Created().body("done")
        } else {
            HttpResponse::InternalServerError().body("failed")
        }
    }
    let resource = web::resource("/fails-first").wrap(idempotency.clone()).app_data(failed.clone());
    config.service(resource.route(web::post().to(handler)));
}

#[actix_web::test]
async fn after_a_release_one_waiter_runs_and_the_others_get_its_answer() {
    log::listen();
    let policy = || Policy::new().anonymous().on_outstanding(WAIT);
    let failed = Data::new(AtomicBool::new(false));
    let routes = move |config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool| {
        fails_first(config, idempotency, &failed);
    };
    let rig = Rig::builder().policy(policy()).serve(routes.clone()).await;
    let twin = rig.twin_serving(policy(), routes);
    let first = send(rig.post("/fails-first"), "after-release");
    rig.gate.entered(1).await;
    let waiting: Vec<_> = (0..4)
        .flat_map(|_| {
            [send(rig.post("/fails-first"), "after-release"), send(twin.post("/fails-first"), "after-release")]
        })
        .collect();
    until_waiting(&rig.db.id("after-release").await, 8).await;
    rig.gate.open(1);
    let first = first.await.unwrap();
    assert_eq!((first.status.as_u16(), first.text().as_str()), (500, "failed"));
    rig.gate.entered(2).await;
    assert!(rig.gate.nobody_enters(Duration::from_millis(500)).await, "one of them runs");
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
    rig.gate.open(1);
    let answers: Vec<_> = join_all(waiting).await.into_iter().map(Result::unwrap).collect();
    assert!(answers.iter().all(|answer| answer.status == 201 && answer.text() == "done"));
    assert_eq!(answers.iter().filter(|answer| !answer.is_replay()).count(), 1);
    assert_eq!(rig.gate.count(), 2);
}

#[actix_web::test]
async fn a_waiter_takes_over_from_a_process_that_died() {
    let rig = Rig::with(Policy::new().anonymous().on_outstanding(WAIT)).await;
    let server = Setup { lease: Duration::from_secs(1), ..Setup::new(&rig.db.url) }.start();
    let first = spawn(client().post(server.url("/held")).key("x").body("a").try_answer());
    eventually("it runs", || async { rig.db.effects("a").await == 1 }).await;
    let waiting = send(rig.post("/held"), "x");
    server.kill();
    assert!(first.await.unwrap().is_err());
    rig.gate.entered(1).await;
    rig.gate.open(1);
    let answer = waiting.await.unwrap();
    assert!(answer.status == 201 && !answer.is_replay());
}

#[actix_web::test]
async fn a_waiter_that_has_waited_long_enough_is_told_to_come_back() {
    let limit = Duration::from_millis(300);
    let rig = Rig::with(Policy::new().anonymous().on_outstanding(OnOutstanding::Wait(limit))).await;
    let (first, _) = held(&rig, "x").await;
    let began = Instant::now();
    assert_outstanding(&send(rig.post("/held"), "x").await.unwrap());
    assert!(began.elapsed() >= limit);
    rig.gate.open(1);
    assert_eq!(first.await.unwrap().status, 201);
}

#[actix_web::test]
async fn no_more_wait_than_the_policy_lets_wait() {
    let two = NonZeroUsize::new(2).unwrap();
    let rig = Rig::with(Policy::new().anonymous().on_outstanding(WAIT).max_waiting(two)).await;
    let (first, id) = held(&rig, "no-more-1").await;
    let (other, _) = held(&rig, "no-more-2").await;
    let waiting = [send(rig.post("/held"), "no-more-1"), send(rig.post("/held"), "no-more-2")];
    until_waiting(&id, 1).await;
    until_waiting(&rig.db.id("no-more-2").await, 1).await;
    for key in ["no-more-1", "no-more-2"] {
        assert_outstanding(&send(rig.post("/held"), key).await.unwrap());
    }
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
    rig.gate.open(2);
    let [x, y] = waiting;
    first.await.unwrap().assert_replayed_by(&x.await.unwrap());
    other.await.unwrap().assert_replayed_by(&y.await.unwrap());
}

#[actix_web::test]
async fn a_waiter_that_hangs_up_makes_room_for_another() {
    let limit = Duration::from_secs(1);
    let one = NonZeroUsize::new(1).unwrap();
    let policy = || Policy::new().anonymous().max_waiting(one);
    let rig = Rig::with(policy().on_outstanding(WAIT)).await;
    // The same engine, with less patience.
    let hasty = rig.idempotency.with(policy().on_outstanding(OnOutstanding::Wait(limit)));
    let hasty = Server::start(2, rig.pool.clone(), hasty, rig.gate.clone(), |config, idempotency, _| {
        routes(config, idempotency);
    });
    let (first, id) = held(&rig, "hangs-up").await;
    let mut raw = rig.raw().await;
    raw.send(post("/held", "hangs-up", "a")).await.unwrap();
    until_waiting(&id, 1).await;
    assert_outstanding(&send(rig.post("/held"), "hangs-up").await.unwrap());
    raw.reset();
    eventually("there is room", async || {
        let began = Instant::now();
        assert_outstanding(&send(rig.client.post(hasty.url("/held")), "hangs-up").await.unwrap());
        began.elapsed() >= limit
    })
    .await;
    rig.gate.open(1);
    assert_eq!(first.await.unwrap().status, 201);
}

#[actix_web::test]
async fn fifty_waiters_cost_one_statement_per_tick_and_no_connection_of_the_pool() {
    let Some((_cluster, db)) = counting().await else { return };
    let rig = Rig::builder().database(db).start().await;
    let twin = rig.twin(Policy::new().anonymous().on_outstanding(WAIT));
    let mut first = Vec::new();
    for key in ["fifty-1", "fifty-2", "fifty-3", "fifty-4", "fifty-5"] {
        first.push((key, held(&rig, key).await));
    }
    let mut waiting = Vec::new();
    for (key, (_, id)) in &first {
        waiting.extend((0..10).map(|_| (*key, send(twin.post("/held"), key))));
        until_waiting(id, 10).await;
    }
    let polls = async || rig.db.calls("%AS waited (id, lock)%").await;
    let claims = async || rig.db.calls("SELECT k.%").await + rig.db.calls("%INSERT INTO%").await;
    // Each looks a second time once it is seated, and then asks nothing itself.
    let ticks = Cell::new((0, 0));
    eventually("a second without a look", async || {
        let began = Instant::now();
        let before = (polls().await, claims().await);
        sleep(Duration::from_secs(1)).await;
        let after = (polls().await, claims().await);
        ticks.set((began.elapsed().as_millis() as i64 / 100 + 1, after.0 - before.0));
        after.1 == before.1
    })
    .await;
    let (ticks, polls) = ticks.get();
    assert!((1..=ticks).contains(&polls), "{polls} polls in {ticks} ticks");
    let state = twin.pool.state();
    assert_eq!(state.idle_connections, state.connections);

    rig.gate.open(5);
    let mut answers = std::collections::HashMap::new();
    for (key, (first, _)) in first {
        answers.insert(key, first.await.unwrap());
    }
    for (key, waiting) in waiting {
        answers[key].assert_replayed_by(&waiting.await.unwrap());
    }
}
