//! How an attempt ends where the store does not take its ending at once, or refuses it.

use std::time::Duration;

use actix_idempotency::{IdemKey, IdemTx, Idempotency, PgPool, Policy};
use actix_web::{
    FromRequest, HttpRequest, HttpResponse, Result,
    error::ErrorInternalServerError,
    rt::spawn,
    web::{self, Data, ServiceConfig},
};
use diesel_async::SimpleAsyncConnection;

use crate::support::{
    app::{created, effect_in},
    client::RequestExt,
    cluster::Cluster,
    db::Db,
    eventually, log,
    rig::Rig,
};

/// More than the tries after which what can never succeed is given up.
const TRIES: usize = 8;

/// An answer is known, and cannot be stored while `lock` is held by another session; `said` is what the server says
/// of each try.
async fn an_answer_waits_for(settings: &str, lock: &str, said: &str) {
    log::listen();
    let cluster = Cluster::start(&[]);
    let db = Db::on(&cluster.url()).await;
    db.run(&format!("ALTER DATABASE {} {settings}", db.name)).await;
    let policy = Policy::new().anonymous().lease(Duration::from_secs(600)).store_timeout(Duration::from_secs(1));
    let rig = Rig::builder().database(db).policy(policy).start().await;
    let key = format!("waits for {}", rig.db.name).replace(' ', "-");
    let first = spawn(rig.post("/held").key(&key).body("x").answer());
    rig.gate.entered(1).await;
    let mut other = rig.db.connect().await;
    other.batch_execute(&format!("SET statement_timeout = 0; BEGIN; {lock}")).await.unwrap();
    rig.gate.open(1);
    let first = first.await.unwrap();
    assert_eq!(first.status, 201);
    eventually("it was tried in vain for long", async || cluster.log().matches(said).count() >= TRIES).await;
    other.batch_execute("ROLLBACK").await.unwrap();
    eventually("it is stored", async || rig.db.state(&key).await.as_deref() == Some("completed")).await;
    first.assert_replayed_by(&rig.post("/held").key(&key).body("x").answer().await);
    assert_eq!(rig.db.effects("x").await, 1);
    let id = rig.db.text("SELECT encode(id, 'hex') AS value FROM idempotency_keys").await.unwrap();
    assert_eq!(log::count(&id[..16], "completion-lost"), 0);
}

#[actix_web::test]
async fn a_row_that_somebody_has_locked_costs_no_answer() {
    let lock = "SELECT FROM idempotency_keys FOR UPDATE";
    an_answer_waits_for("SET statement_timeout = 0", lock, "due to lock timeout").await;
}

/// What CREATE INDEX takes.
#[actix_web::test]
async fn a_table_that_somebody_has_locked_costs_no_answer() {
    let lock = "LOCK TABLE idempotency_keys IN SHARE MODE";
    an_answer_waits_for("SET statement_timeout = '100ms'", lock, "due to statement timeout").await;
}

/// Lets the server refuse completions as if it had no room for them, while there is a row in `disk_full`.
const DISK_FULL: &str = "
    CREATE TABLE disk_full (n int);
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF EXISTS (SELECT FROM disk_full) THEN RAISE EXCEPTION 'no room' USING ERRCODE = '53100'; END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON idempotency_keys FOR EACH ROW WHEN (NEW.state = 'completed')
        EXECUTE FUNCTION refuse()";

#[actix_web::test]
async fn a_disk_that_is_full_costs_no_answer() {
    let cluster = Cluster::start(&[]);
    let db = Db::on(&cluster.url()).await;
    db.run(DISK_FULL).await;
    db.run("INSERT INTO disk_full VALUES (1)").await;
    let policy = Policy::new().anonymous().lease(Duration::from_secs(600));
    let rig = Rig::builder().database(db).policy(policy).start().await;
    rig.gate.open(2);
    let first = rig.post("/held").key("a").body("x").answer().await;
    assert_eq!(first.status, 201);
    eventually("it was tried in vain for long", async || cluster.log().matches("no room").count() >= TRIES).await;
    rig.db.run("DELETE FROM disk_full").await;
    eventually("it is stored", async || rig.db.state("a").await.as_deref() == Some("completed")).await;
    first.assert_replayed_by(&rig.post("/held").key("a").body("x").answer().await);
    assert_eq!(rig.db.effects("x").await, 1);
}

async fn order(mut tx: IdemTx, body: String) -> Result<HttpResponse> {
    let id = effect_in(&mut tx, &body).await?;
    if let Some(sql) = body.strip_prefix("then ") {
        tx.batch_execute(sql).await.map_err(ErrorInternalServerError)?;
    }
    Ok(created(id))
}

/// Charges by a key that it derives, and by a step, and then does what the body says.
async fn charge(key: IdemKey, request: HttpRequest, body: String) -> Result<HttpResponse> {
    let pool = request.app_data::<Data<PgPool>>().unwrap();
    if body.contains("derive") {
        let derived = key.derive("charge");
        effect_in(&mut *pool.get().await.map_err(ErrorInternalServerError)?, &derived).await?;
    }
    if body.contains("step") {
        let charged = key.step("charge", async || {
            let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
            effect_in(&mut conn, "step").await
        });
        charged.await?;
    }
    if body.contains("commit") {
        let mut tx = IdemTx::extract(&request).await?;
        tx.batch_execute("INSERT INTO deferred VALUES (1), (1)").await.map_err(ErrorInternalServerError)?;
        return Ok(HttpResponse::Created().body("charged"));
    }
    Ok(HttpResponse::PaymentRequired().body("declined"))
}

fn routes(config: &mut ServiceConfig, idempotency: &Idempotency) {
    config.service(
        web::scope("")
            .wrap(idempotency.clone())
            .route("/order", web::post().to(order))
            .route("/charge", web::post().to(charge)),
    );
}

async fn rig(policy: Policy) -> Rig {
    let policy = policy.anonymous();
    Rig::builder().policy(policy).serve(|config, idempotency, _| routes(config, idempotency)).await
}

#[actix_web::test]
async fn a_transaction_whose_answer_the_server_cannot_take_is_503_and_nothing_is_done() {
    for policy in [Policy::new(), Policy::new().atomic()] {
        let rig = rig(policy).await;
        rig.db.run(DISK_FULL).await;
        rig.db.run("INSERT INTO disk_full VALUES (1)").await;
        let refused = rig.post("/order").key("a").body("x").answer().await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "store-unavailable"));
        assert!(refused.retry_after().is_some());
        rig.db.run("DELETE FROM disk_full").await;
        let retry = rig.post("/order").key("a").body("x").answer().await;
        assert_eq!(retry.status, 201, "{}", retry.text());
        assert_eq!(rig.db.effects("x").await, 1);
    }
}

/// Ends the connection that commits, once.
const ENDED_AT_COMMIT: &str = "
    CREATE TABLE ended (n int);
    CREATE FUNCTION end_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM pg_terminate_backend(pg_backend_pid());
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER end_it AFTER INSERT ON ended DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
        EXECUTE FUNCTION end_it()";

#[actix_web::test]
async fn a_connection_that_the_server_ends_at_commit_is_503_and_never_the_handlers_fault() {
    for policy in [Policy::new(), Policy::new().atomic()] {
        let rig = rig(policy).await;
        rig.db.run(ENDED_AT_COMMIT).await;
        let body = "then INSERT INTO ended VALUES (1)";
        let ended = rig.post("/order").key("a").body(body).answer().await;
        assert_eq!((ended.status.as_u16(), ended.code().as_str()), (503, "store-unavailable"));
        assert!(ended.retry_after().is_some());
        let keyless = rig.post("/order").body(body).answer().await;
        assert_eq!((keyless.status.as_u16(), keyless.code().as_str()), (503, "outcome-unknown"));
        assert!(keyless.retry_after().is_some());
        assert_eq!(rig.db.all_effects().await, 0);
        rig.db.run("DROP TRIGGER end_it ON ended").await;
        assert_eq!(rig.post("/order").key("a").body(body).answer().await.status, 201);
        assert_eq!(rig.db.all_effects().await, 1);
    }
}

#[actix_web::test]
async fn what_has_acted_and_fails_at_commit_gives_its_key_to_no_other_request() {
    let rig = rig(Policy::new()).await;
    rig.db.run("CREATE TABLE deferred (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)").await;
    let charge = |body: &'static str| rig.post("/charge").key("a").body(body).answer();
    for _ in 0..2 {
        let failed = charge("derive, step, commit").await;
        assert_eq!((failed.status.as_u16(), failed.code().as_str()), (409, "constraint-violated"));
    }
    assert_eq!(charge("another").await.code(), "key-reused");
    // The same seed, and the step is remembered.
    assert!(rig.db.is("(SELECT count(DISTINCT tag) = 1 FROM effects WHERE tag <> 'step')").await);
    assert_eq!((rig.db.effects("step").await, rig.db.all_effects().await), (1, 3));
    rig.db.run("ALTER TABLE deferred DROP CONSTRAINT deferred_n_key").await;
    assert_eq!(charge("derive, step, commit").await.status, 201);
    assert_eq!(rig.db.effects("step").await, 1);
}

#[actix_web::test]
async fn a_success_that_cannot_be_committed_gives_its_key_to_no_other_request() {
    let rig = rig(Policy::new()).await;
    rig.db.run("CREATE TABLE deferred (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)").await;
    assert_eq!(rig.post("/charge").key("a").body("commit").answer().await.code(), "constraint-violated");
    assert_eq!(rig.post("/charge").key("a").body("another").answer().await.code(), "key-reused");
}

#[actix_web::test]
async fn a_rejection_after_a_step_or_a_derived_key_leaves_its_key_to_the_same_request() {
    let rig = rig(Policy::new()).await;
    for body in ["derive", "step"] {
        let charge = |body: &'static str| rig.post("/charge").key(body).body(body).answer();
        assert_eq!(charge(body).await.status, 402);
        let other = rig.post("/charge").key(body).body("neither").answer().await;
        assert_eq!(other.code(), "key-reused", "after {body}");
        assert_eq!(charge(body).await.status, 402);
        let other = rig.post("/charge").key(body).body("neither").answer().await;
        assert_eq!(other.code(), "key-reused", "after {body} once more");
    }
    // Nothing was done: whoever corrects the request may use the key.
    assert_eq!(rig.post("/charge").key("n").body("neither").answer().await.status, 402);
    assert_eq!(rig.post("/charge").key("n").body("corrected").answer().await.status, 402);
    assert_eq!(rig.db.effects("step").await, 1);
}
