//! What becomes of the key when an attempt fails, and of the request when the store does.

use std::{
    net::TcpListener,
    num::NonZeroUsize,
    time::{Duration, Instant},
};

use actix_idempotency::{Idempotency, Keep, PgPool, Policy, PoolBuilder};
use actix_web::{
    Error, HttpRequest, HttpResponse, Result,
    body::MessageBody,
    dev::{ServiceRequest, ServiceResponse},
    error::{ErrorBadRequest, InternalError},
    http::StatusCode,
    middleware::{Next, from_fn},
    rt::spawn,
    web::{self, Data},
};
use reqwest::Method;

use crate::support::{
    PATIENCE,
    app::{created, effect, order, routes},
    client::{Answer, RequestExt, client},
    cluster::Cluster,
    db::{Db, server_url, with_database},
    eventually,
    gate::Gate,
    rig::{Rig, Server},
};

fn keeping(keep: Keep) -> Policy {
    Policy::new().anonymous().keep(keep)
}

/// P01
#[actix_web::test]
async fn a_transient_failure_is_not_kept() {
    let rig = Rig::start().await;
    for status in [500, 502, 503, 504] {
        let post = || rig.post(&format!("/flaky?mode=r{status}")).key(&format!("k{status}")).answer();
        assert_eq!(post().await.status, status);
        let retry = post().await;
        assert!(retry.status == 201 && !retry.is_replay());
        retry.assert_replayed_by(&post().await);
    }
    assert_eq!(rig.db.effects("flaky").await, 4);
}

/// P01
#[actix_web::test]
async fn a_failure_is_replayed_where_everything_is_kept() {
    let rig = Rig::with(keeping(Keep::Everything)).await;
    let post = || rig.post("/flaky?mode=r503").key("x").answer();
    let first = post().await;
    assert_eq!((first.status.as_u16(), first.text().as_str()), (503, "flaky"));
    first.assert_replayed_by(&post().await);
    assert_eq!(rig.db.effects("flaky").await, 0);
}

#[actix_web::test]
async fn every_answer_below_400_is_kept() {
    let rig = Rig::builder().handler(as_asked).await;
    for status in ["200", "201", "202", "204", "206", "301", "303", "304", "307", "399"] {
        let post = || rig.post("/x").key(status).body(status).answer();
        let first = post().await;
        assert_eq!(first.status.as_str(), status);
        first.assert_replayed_by(&post().await);
        assert_eq!(rig.db.effects(status).await, 1);
    }
}

/// Answers with the status that the body begins with, and counts by the body.
async fn as_asked(pool: Data<PgPool>, body: String) -> Result<HttpResponse> {
    let id = effect(&pool, &body).await?;
    match body.get(..3).and_then(|status| status.parse().ok()) {
        Some(201) | None => Ok(created(id)),
        Some(status @ (204 | 304)) => Ok(HttpResponse::build(StatusCode::from_u16(status).unwrap()).finish()),
        Some(status) => Ok(HttpResponse::build(StatusCode::from_u16(status).unwrap()).body(id.to_string())),
    }
}

async fn ask(rig: &Rig, key: &str, body: &'static str) -> Answer {
    rig.post("/x").key(key).body(body).answer().await
}

/// P02
#[actix_web::test]
async fn after_a_rejection_the_corrected_request_may_use_the_key() {
    let rig = Rig::builder().handler(as_asked).await;
    for status in ["400", "401", "403", "404", "409", "422", "429"] {
        let key = format!("k{status}");
        let rejected = rig.post("/x").key(&key).body(status).answer().await;
        assert_eq!(rejected.status.as_str(), status);
        // The same again runs again.
        let again = rig.post("/x").key(&key).body(status).answer().await;
        assert!(again.status.as_str() == status && !again.is_replay() && again.body != rejected.body);
        let corrected = ask(&rig, &key, "201").await;
        assert!(corrected.status == 201 && !corrected.is_replay());
        corrected.assert_replayed_by(&ask(&rig, &key, "201").await);
        // And now the key is taken.
        assert_eq!(rig.post("/x").key(&key).body(status).answer().await.code(), "key-reused");
        assert_eq!(rig.db.effects(status).await, 2);
    }
}

/// P02
#[actix_web::test]
async fn after_a_failure_only_the_same_request_may_use_the_key() {
    let rig = Rig::builder().handler(as_asked).await;
    assert_eq!(ask(&rig, "x", "500").await.status, 500);
    assert_eq!(ask(&rig, "x", "201").await.code(), "key-reused");
    assert_eq!(ask(&rig, "x", "500").await.status, 500);
    assert_eq!((rig.db.effects("500").await, rig.db.effects("201").await), (2, 0));
}

/// P02
#[actix_web::test]
async fn the_draft_keeps_the_errors_that_will_come_again() {
    let rig = Rig::builder().policy(keeping(Keep::Draft)).handler(as_asked).await;
    let post = |body: &'static str| rig.post("/x").key(body).body(body).answer();
    for status in ["402", "404", "405", "406", "410", "411", "414", "416", "417", "451"] {
        let first = post(status).await;
        assert_eq!(first.status.as_str(), status);
        first.assert_replayed_by(&post(status).await);
        assert_eq!(rig.db.effects(status).await, 1);
    }
    let moment = [
        "400", "401", "403", "407", "408", "409", "412", "413", "415", "418", "421", "422", "423", "424", "425", "426",
        "428", "429", "431", "500", "503",
    ];
    for status in moment {
        assert_eq!(post(status).await.status.as_str(), status);
        let again = post(status).await;
        assert!(again.status.as_str() == status && !again.is_replay());
        assert_eq!(rig.db.effects(status).await, 2);
    }
}

/// P02
#[actix_web::test]
async fn whoever_logs_in_or_waits_may_try_again_under_the_draft() {
    async fn handler(request: HttpRequest) -> HttpResponse {
        let has = |name| request.headers().contains_key(name);
        match (has("x-session"), has("x-later")) {
            (false, _) => HttpResponse::Unauthorized().finish(),
            (true, false) => HttpResponse::TooManyRequests().finish(),
            (true, true) => HttpResponse::Created().body("done"),
        }
    }
    let rig = Rig::builder().policy(keeping(Keep::Draft)).handler(handler).await;
    let with = |names: &[&'static str]| {
        names.iter().fold(rig.post("/x").key("x"), |request, name| request.header(*name, "1")).answer()
    };
    assert_eq!(with(&[]).await.status, 401);
    assert_eq!(with(&["x-session"]).await.status, 429);
    let done = with(&["x-session", "x-later"]).await;
    assert_eq!(done.status, 201);
    done.assert_replayed_by(&with(&[]).await);
}

#[actix_web::test]
async fn a_rejection_that_is_kept_stays_one() {
    let rig = Rig::builder().policy(keeping(Keep::DraftWithValidation)).handler(as_asked).await;
    for status in ["400", "413", "415", "422"] {
        let post = |body: &'static str| rig.post("/x").key(status).body(body).answer();
        let first = post(status).await;
        assert_eq!(first.status.as_str(), status);
        first.assert_replayed_by(&post(status).await);
        assert_eq!(post("201").await.code(), "key-reused");
    }
    assert_eq!(rig.db.effects("201").await, 0);
}

#[actix_web::test]
async fn a_policy_may_decide_by_a_function_of_the_status() {
    let teapots = Keep::when(|status| status == 418);
    let rig = Rig::builder().policy(keeping(teapots)).handler(as_asked).await;
    ask(&rig, "a", "418").await.assert_replayed_by(&ask(&rig, "a", "418").await);
    for _ in 0..2 {
        assert!(!ask(&rig, "b", "201").await.is_replay());
    }
    assert_eq!((rig.db.effects("418").await, rig.db.effects("201").await), (1, 2));
}

/// P04
#[actix_web::test]
async fn however_a_handler_fails_its_key_is_free_at_once() {
    let rig = Rig::start().await;
    for mode in ["err", "r500", "r400", "panic", "err_after_write", "panic_after_write"] {
        let post = || rig.post(&format!("/flaky?mode={mode}")).key(mode).answer();
        let failed = post().await;
        assert!(failed.status.as_u16() >= 400, "{mode}");
        assert_eq!(rig.db.state(mode).await.unwrap(), "released", "{mode}");
        let retry = post().await;
        assert!(retry.status == 201 && !retry.is_replay(), "{mode}");
        retry.assert_replayed_by(&post().await);
    }
}

/// P04
#[actix_web::test]
async fn a_panic_is_answered_and_never_kept() {
    let rig = Rig::with(keeping(Keep::Everything)).await;
    let failed = rig.post("/flaky?mode=panic").key("x").answer().await;
    assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "handler-panicked"));
    assert!(!failed.text().contains("flaky"));
    assert_eq!(rig.post("/flaky?mode=panic").key("x").answer().await.status, 201);
}

/// P04
#[actix_web::test]
async fn whatever_refuses_a_request_further_in_leaves_its_key_free() {
    // One scope for all, so that it is one key.
    let policy = Policy::new().anonymous().resource("orders").request_limit(8 * 1024 * 1024);
    let rig = Rig::with(policy).await;
    let large = format!("{{\"sku\": \"{}\", \"qty\": 1}}", "x".repeat(3 * 1024 * 1024));
    let json = |body: String| rig.post("/orders").key("x").header("content-type", "application/json").body(body);
    for (request, status) in [
        (json("{\"sku\":".into()), 400),
        (json("{\"sku\": 1, \"qty\": 1}".into()), 400),
        (json("\u{0}".into()), 400),
        (rig.post("/orders").key("x").body("no JSON at all"), 400),
        (rig.request(Method::PATCH, "/orders").key("x"), 405),
        (rig.post("/nowhere").key("x"), 404),
        (json(large), 413),
    ] {
        let refused = request.answer().await;
        assert_eq!(refused.status, status);
        assert_eq!(rig.db.state("x").await.unwrap(), "released", "{status}");
    }
    let corrected = rig.post("/orders").key("x").json(&order("x")).answer().await;
    assert_eq!(corrected.status, 201);
    assert_eq!((rig.db.all_effects().await, rig.db.keys().await), (1, 1));
}

/// P04
#[actix_web::test]
async fn an_err_and_an_ok_of_one_status_are_one_outcome() {
    async fn handler(pool: Data<PgPool>, body: String) -> Result<HttpResponse> {
        effect(&pool, &body).await?;
        let response = HttpResponse::Conflict().insert_header(("x-a", "1")).body("taken");
        match body.as_str() {
            "ok" => Ok(response),
            "err" => Err(InternalError::from_response("taken", response).into()),
            _ => Err(InternalError::new("taken", StatusCode::CONFLICT).into()),
        }
    }
    for (keep, runs) in [(Keep::Success, 2), (Keep::Everything, 1)] {
        let rig = Rig::builder().policy(keeping(keep)).handler(handler).await;
        let mut answers = Vec::new();
        for body in ["ok", "err", "plain"] {
            let (first, second) = (ask(&rig, body, body).await, ask(&rig, body, body).await);
            assert_eq!((first.status.as_u16(), first.text().as_str()), (409, "taken"));
            assert_eq!((second.status.as_u16(), second.text().as_str()), (409, "taken"));
            assert_eq!(second.is_replay(), runs == 1);
            assert_eq!(rig.db.effects(body).await, runs);
            answers.push((first.header("x-a").map(str::to_owned), second.header("x-a").map(str::to_owned)));
        }
        assert_eq!(answers[0], answers[1]);
        assert_eq!(answers[0].0.as_deref(), Some("1"));
    }
}

/// P04
#[actix_web::test]
async fn an_inner_middleware_that_errs_is_an_outcome_like_any_other() {
    async fn turns_away(
        request: ServiceRequest,
        next: Next<impl MessageBody + 'static>,
    ) -> Result<ServiceResponse<impl MessageBody>, Error> {
        if request.headers().contains_key("x-welcome") {
            return next.call(request).await;
        }
        Err(ErrorBadRequest("not today"))
    }
    for keep in [Keep::Success, Keep::Everything] {
        let kept = matches!(keep, Keep::Everything);
        let rig = Rig::builder()
            .policy(keeping(keep))
            .serve(|config, idempotency, _| {
                let inner = web::scope("").wrap(from_fn(turns_away)).wrap(idempotency.clone());
                config.service(inner.route("/x", web::post().to(as_asked)));
            })
            .await;
        let first = ask(&rig, "x", "201").await;
        assert_eq!((first.status.as_u16(), first.text().as_str()), (400, "not today"));
        let second = rig.post("/x").key("x").body("201").header("x-welcome", "1").answer().await;
        if kept {
            first.assert_replayed_by(&second);
        } else {
            assert!(second.status == 201 && !second.is_replay());
        }
    }
}

#[actix_web::test]
async fn no_more_run_than_the_policy_lets_run() {
    let rig = Rig::with(Policy::new().anonymous().max_running(NonZeroUsize::new(2).unwrap())).await;
    let done = rig.post("/orders").key("done").json(&order("done")).answer().await;
    let running = ["a", "b"].map(|key| spawn(rig.post("/held").key(key).answer()));
    rig.gate.entered(2).await;
    let refused = rig.post("/held").key("c").answer().await;
    assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "busy"));
    assert_eq!(refused.retry_after(), Some(1));
    assert_eq!(rig.db.state("c").await, None);
    assert_eq!(rig.post("/orders").json(&order("unprotected")).answer().await.status, 201);
    done.assert_replayed_by(&rig.post("/orders").key("done").json(&order("done")).answer().await);
    rig.gate.open(3);
    for running in running {
        assert_eq!(running.await.unwrap().status, 201);
    }
    eventually("there is room", async || rig.post("/held").key("c").answer().await.status == 201).await;
}

/// A service whose handler needs no database; the gate counts how often it runs.
fn serve_on(pool: PgPool, policy: Policy) -> (Server, Gate) {
    let gate = Gate::new();
    gate.open(1000);
    async fn handler(gate: Data<Gate>) -> &'static str {
        gate.pass().await;
        "done"
    }
    let idempotency = Idempotency::postgres(pool.clone()).with(policy);
    let server = Server::start(2, pool, idempotency, gate.clone(), |config, idempotency, _| {
        config.service(web::resource("/x").wrap(idempotency.clone()).route(web::post().to(handler)));
    });
    (server, gate)
}

fn short() -> Policy {
    Policy::new().anonymous().store_timeout(Duration::from_secs(1))
}

/// No store, no execution; and without a key there is no need of a store.
async fn assert_fails_closed(server: &Server, gate: &Gate) {
    let ran = gate.count();
    let began = Instant::now();
    let refused = client().post(server.url("/x")).key("x").answer().await;
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "store-unavailable"));
    assert_eq!(refused.retry_after(), Some(1));
    assert_eq!(gate.count(), ran, "the handler does not run");
    let unprotected = client().post(server.url("/x")).answer().await;
    assert_eq!((unprotected.status.as_u16(), gate.count()), (200, ran + 1));
}

/// P05
#[actix_web::test]
async fn nothing_runs_while_the_server_is_down() {
    let cluster = Cluster::start(&[]);
    let db = Db::on(&cluster.url()).await;
    let (server, gate) = serve_on(db.pool(5), short());
    assert_eq!(client().post(server.url("/x")).key("before").answer().await.status, 200);
    cluster.down();
    assert_fails_closed(&server, &gate).await;
    cluster.up();
    eventually("it works again", async || client().post(server.url("/x")).key("x").answer().await.status == 200).await;
    let replay = client().post(server.url("/x")).key("before").answer().await;
    assert!(replay.is_replay());
}

/// P05
#[actix_web::test]
async fn nothing_runs_where_there_is_no_store_at_all() {
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let closed = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap();
    for url in [
        // Nobody answers.
        format!("postgres://{}/shop", silent.local_addr().unwrap()),
        // Nobody listens.
        format!("postgres://{closed}/shop"),
        // Nobody knows that database.
        with_database(&server_url(), "it_no_such_database"),
    ] {
        let (server, gate) = serve_on(PoolBuilder::new(url).build().unwrap(), short());
        assert_fails_closed(&server, &gate).await;
    }
}

/// P05
#[actix_web::test]
async fn nothing_runs_without_the_table() {
    let rig = Rig::start().await;
    rig.db.run("ALTER TABLE idempotency_keys RENAME TO away").await;
    let refused = rig.post("/orders").key("x").json(&order("x")).answer().await;
    assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "store-unavailable"));
    assert_eq!(refused.retry_after(), Some(1));
    assert_eq!(rig.db.all_effects().await, 0);
    assert_eq!(rig.post("/orders").json(&order("unprotected")).answer().await.status, 201);
    rig.db.run("ALTER TABLE away RENAME TO idempotency_keys").await;
    assert_eq!(rig.post("/orders").key("x").json(&order("x")).answer().await.status, 201);
    // Nor where it goes later.
    rig.db.run("ALTER TABLE idempotency_keys RENAME TO away").await;
    assert_eq!(rig.post("/orders").key("x").json(&order("x")).answer().await.code(), "store-unavailable");
    assert_eq!(rig.db.effects("x").await, 1);
}

/// P05
#[actix_web::test]
async fn nothing_runs_without_the_right_to_claim() {
    let db = Db::new().await;
    let role = format!("{}_role", db.name);
    db.run(&format!("CREATE ROLE {role}; GRANT ALL ON effects TO {role}; GRANT SELECT ON idempotency_keys TO {role}"))
        .await;
    let separator = if db.url.contains('?') { '&' } else { '?' };
    let pool = PoolBuilder::new(format!("{}{separator}options=-c%20role%3D{role}", db.url)).build().unwrap();
    let idempotency = Idempotency::postgres(pool.clone()).with(Policy::new().anonymous().store_timeout(PATIENCE));
    let server = Server::start(2, pool, idempotency, Gate::new(), |config, idempotency, _| routes(config, idempotency));
    let post = || client().post(server.url("/orders")).json(&order("x"));
    assert_eq!(post().key("x").answer().await.code(), "store-unavailable");
    assert_eq!(db.effects("x").await, 0);
    assert_eq!(post().answer().await.status, 201, "unprotected");
    db.run(&format!("GRANT INSERT, UPDATE, DELETE ON idempotency_keys TO {role}")).await;
    let first = post().key("x").answer().await;
    assert_eq!(first.status, 201);
    first.assert_replayed_by(&post().key("x").answer().await);
    drop(server);
    db.run(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

/// P05
#[actix_web::test]
async fn nothing_runs_on_a_server_that_is_read_only() {
    let db = Db::new().await;
    db.run(&format!("ALTER DATABASE {} SET default_transaction_read_only = on", db.name)).await;
    let (server, gate) = serve_on(db.pool(5), short());
    assert_fails_closed(&server, &gate).await;
}
