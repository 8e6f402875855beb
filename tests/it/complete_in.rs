//! `IdemKey::complete_in`: the answer stored in a transaction of the handler's own.

use std::time::Duration;

use actix_idempotency::{IdemKey, IdemTx, Idempotency, PgPool, Policy, ResponseSnapshot};
use actix_web::{
    HttpResponse, Result,
    error::{ErrorConflict, ErrorInternalServerError},
    http::{StatusCode, header},
    rt,
    web::{self, Data, Query, ServiceConfig},
};
use diesel::sql_types::Text;
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use serde::Deserialize;
use serde_json::json;

use crate::support::{
    PATIENCE,
    client::{RequestExt, client},
    gate::Gate,
    rig::{Rig, Server},
};

async fn effect(conn: &mut AsyncPgConnection, tag: &str) -> Result<()> {
    let inserted = diesel::sql_query("INSERT INTO effects (tag) VALUES ($1)").bind::<Text, _>(tag).execute(conn).await;
    inserted.map(drop).map_err(ErrorInternalServerError)
}

async fn sql(conn: &mut AsyncPgConnection, sql: &str) -> Result<()> {
    conn.batch_execute(sql).await.map_err(ErrorInternalServerError)
}

/// Every run makes another one.
fn stored() -> ResponseSnapshot {
    ResponseSnapshot::json(StatusCode::CREATED, &json!({"random": rand::random::<u64>().to_string()}))
        .unwrap()
        .with_header(header::LOCATION, header::HeaderValue::from_static("/orders/1"))
}

#[derive(Deserialize)]
struct How {
    how: String,
}

/// The effect and the answer, and then whatever the query asks for.
async fn own(key: IdemKey, pool: Data<PgPool>, how: Query<How>, gate: Data<Gate>) -> Result<HttpResponse> {
    let how = how.how.as_str();
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    sql(&mut conn, "BEGIN").await?;
    effect(&mut conn, how).await?;
    if how == "hold-before" {
        gate.pass().await;
    }
    if let Err(refusal) = key.complete_in(&mut conn, stored()).await {
        sql(&mut conn, "ROLLBACK").await?;
        return Err(refusal.into());
    }
    if how == "hold-after" {
        gate.pass().await;
    }
    let rolls_back = how.starts_with("rolled-back");
    sql(&mut conn, if rolls_back { "ROLLBACK" } else { "COMMIT" }).await?;
    match how {
        "rolled-back-and-fails" | "committed-and-fails" => Err(ErrorConflict("no")),
        "committed-and-panics" => panic!("as asked"),
        _ => Ok(HttpResponse::Ok().body("something else")),
    }
}

/// In the transaction that commits with the answer anyway.
async fn within(key: IdemKey, mut tx: IdemTx, how: Query<How>) -> Result<HttpResponse> {
    effect(&mut tx, &how.how).await?;
    key.complete_in(&mut tx, stored()).await?;
    match how.how.as_str() {
        "fails" => Err(ErrorConflict("no")),
        _ => Ok(HttpResponse::Ok().body("something else")),
    }
}

/// As its documentation shows it.
async fn documented(key: IdemKey, pool: Data<PgPool>) -> Result<ResponseSnapshot> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    conn.transaction(async |conn| {
        effect(conn, "documented").await.map_err(|error| error.to_string())?;
        let answer = stored();
        key.complete_in(conn, answer.clone()).await?;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(answer)
    })
    .await
    .map_err(ErrorInternalServerError)
}

fn routes(config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool) {
    config.service(
        web::scope("")
            .wrap(idempotency.clone())
            .route("/own", web::post().to(own))
            .route("/within", web::post().to(within))
            .route("/documented", web::post().to(documented)),
    );
}

async fn rig(policy: Policy) -> Rig {
    Rig::builder().policy(policy.anonymous()).serve(routes).await
}

#[actix_web::test]
async fn a_snapshot_is_an_answer_and_is_replayed() {
    let rig = rig(Policy::new()).await;
    let first = rig.post("/documented").key("a").answer().await;
    assert_eq!(first.status, 201);
    assert_eq!(first.header("content-type"), Some("application/json"));
    assert_eq!(first.header("location"), Some("/orders/1"));
    assert!(first.json()["random"].is_string());
    first.assert_replayed_by(&rig.post("/documented").key("a").answer().await);
    assert_eq!(rig.db.effects("documented").await, 1);
    // One transaction wrote both.
    assert!(rig.db.is("(SELECT xmin FROM effects) = (SELECT xmin FROM idempotency_keys)").await);
}

#[actix_web::test]
async fn what_was_committed_is_what_is_sent_whatever_the_handler_returns() {
    let rig = rig(Policy::new()).await;
    for how in ["committed", "committed-and-fails"] {
        let path = format!("/own?how={how}");
        let first = rig.post(&path).key(how).answer().await;
        assert_eq!(first.status, 201, "{}", first.text());
        assert!(first.json()["random"].is_string());
        first.assert_replayed_by(&rig.post(&path).key(how).answer().await);
        assert_eq!(rig.db.effects(how).await, 1);
    }
}

#[actix_web::test]
async fn what_was_committed_is_the_answer_also_after_a_panic() {
    let rig = rig(Policy::new()).await;
    let path = "/own?how=committed-and-panics";
    let first = rig.post(path).key("a").answer().await;
    assert_eq!(first.status, 201, "{}", first.text());
    let retry = rig.post(path).key("a").answer().await;
    assert!(retry.is_replay());
    assert_eq!(first.body, retry.body);
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn a_success_whose_transaction_was_rolled_back_is_500_and_releases() {
    let rig = rig(Policy::new()).await;
    for _ in 0..2 {
        let failed = rig.post("/own?how=rolled-back").key("a").answer().await;
        assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "transaction-misused"));
        assert_eq!(rig.db.state("a").await.as_deref(), Some("released"));
        assert_eq!(rig.db.all_effects().await, 0);
    }
}

#[actix_web::test]
async fn an_error_whose_transaction_was_rolled_back_is_sent_and_releases() {
    let rig = rig(Policy::new()).await;
    let failed = rig.post("/own?how=rolled-back-and-fails").key("a").answer().await;
    assert_eq!((failed.status.as_u16(), failed.text().as_str()), (409, "no"));
    assert_eq!(rig.db.state("a").await.as_deref(), Some("released"));
    let corrected = rig.post("/own?how=committed").key("a").answer().await;
    assert_eq!((corrected.status.as_u16(), corrected.is_replay()), (201, false));
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn an_attempt_that_was_overtaken_is_told_so_and_writes_nothing() {
    let rig = rig(Policy::new()).await;
    let path = "/own?how=hold-before";
    let first = rt::spawn(rig.post(path).key("a").answer());
    rig.gate.entered(1).await;
    rig.db.run("UPDATE idempotency_keys SET leased_until = now() - interval '1 s'").await;
    let second = rt::spawn(rig.post(path).key("a").answer());
    rig.gate.entered(2).await;
    // First come, first served.
    rig.gate.open(1);
    let first = first.await.unwrap();
    assert_eq!((first.status.as_u16(), first.code().as_str()), (409, "lease-lost"));
    assert_eq!(rig.db.all_effects().await, 0);
    rig.gate.open(1);
    let second = second.await.unwrap();
    assert_eq!(second.status, 201, "{}", second.text());
    second.assert_replayed_by(&rig.post(path).key("a").answer().await);
    assert_eq!(rig.db.all_effects().await, 1);
}

/// They meet the row lock of a transaction that is not theirs to end.
#[actix_web::test]
async fn duplicates_get_their_409_while_the_transaction_is_open() {
    let timeout = Duration::from_secs(1);
    let rig = rig(Policy::new().store_timeout(timeout)).await;
    // As another process: it has never met this key.
    let (pool, policy) = (rig.db.pool(5), Policy::new().anonymous().store_timeout(timeout));
    let other = Server::start(2, pool.clone(), Idempotency::postgres(pool).with(policy), rig.gate.clone(), routes);
    let path = "/own?how=hold-after";
    let first = rt::spawn(rig.post(path).key("a").answer());
    rig.gate.entered(1).await;
    // The first one is held by the test: whoever waited for it would wait for ever.
    for server in [&rig.server, &other, &other] {
        let asked = client().post(server.url(path)).key("a").answer();
        let duplicate = rt::time::timeout(PATIENCE, asked).await.expect("it is told at once");
        assert_eq!((duplicate.status.as_u16(), duplicate.code().as_str()), (409, "outstanding"));
    }
    rig.gate.open(1);
    let first = first.await.unwrap();
    assert_eq!(first.status, 201, "{}", first.text());
    first.assert_replayed_by(&client().post(other.url(path)).key("a").answer().await);
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn inside_an_idem_tx_it_commits_with_a_success_and_goes_with_an_error() {
    let rig = rig(Policy::new()).await;
    let failed = rig.post("/within?how=fails").key("a").answer().await;
    assert_eq!((failed.status.as_u16(), failed.text().as_str()), (409, "no"));
    assert_eq!((rig.db.all_effects().await, rig.db.state("a").await.as_deref()), (0, Some("released")));
    let first = rig.post("/within?how=commits").key("a").answer().await;
    assert_eq!(first.status, 201, "{}", first.text());
    first.assert_replayed_by(&rig.post("/within?how=commits").key("a").answer().await);
    assert_eq!(rig.db.all_effects().await, 1);
}

#[actix_web::test]
async fn under_an_atomic_policy_it_is_refused_and_nothing_is_kept() {
    let rig = rig(Policy::new().atomic()).await;
    for path in ["/own?how=committed", "/within?how=commits"] {
        let refused = rig.post(path).key("a").answer().await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (500, "misconfigured"));
        assert_eq!((rig.db.all_effects().await, rig.db.keys().await), (0, 0));
    }
}
