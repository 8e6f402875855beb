//! Owners of a transaction that are interrupted: killed, left by their client, stalled, or overtaken by another
//! transaction.

use std::{cell::OnceCell, time::Duration};

use actix_idempotency::{IdemTx, Isolation, PgPool, Policy};
use actix_web::{
    HttpResponse, Result,
    error::ErrorInternalServerError,
    rt,
    web::{self, Data, Query},
};
use diesel::{
    QueryableByName,
    sql_types::{BigInt, Text},
};
use diesel_async::{RunQueryDsl, SimpleAsyncConnection};
use serde::Deserialize;

use crate::support::{
    app::created,
    client::{Answer, RequestExt, client, post},
    db::Db,
    eventually,
    gate::Gate,
    process::{ServerProcess, Setup},
    rig::Rig,
    shop::{Purchase, Shop, Way},
};

const LEASE: Duration = Duration::from_millis(500);

fn attempt(purchase: &Purchase, server: &ServerProcess) -> rt::task::JoinHandle<reqwest::Result<Answer>> {
    let (purchase, url) = (purchase.clone(), server.url(""));
    rt::spawn(async move { purchase.attempt(&client(), &url, false).await })
}

/// Until this server runs it or replays it.
async fn insist(purchase: &Purchase, server: &ServerProcess) -> Answer {
    let answered = OnceCell::new();
    eventually("the purchase is served", async || {
        let answer = attempt(purchase, server).await.unwrap().unwrap();
        if answer.status != 201 {
            // Outstanding; or, above READ COMMITTED, a renewal came between its snapshot and its lock on the row.
            assert!(answer.retry_after().is_some(), "{answer:?}");
            return false;
        }
        answered.set(answer).is_ok()
    })
    .await;
    answered.into_inner().unwrap()
}

/// T01
#[actix_web::test]
async fn a_process_killed_between_the_write_and_the_answer_leaves_neither() {
    for way in [Way::Leased, Way::Repeatable, Way::Atomic] {
        for point in ["in-handler", "before-complete", "after-complete"] {
            let shop = Shop::open(Db::new().await).await;
            let setup = Setup { lease: LEASE, ..Setup::new(&shop.db.url) };
            let mut server = setup.start();
            let purchase = Purchase::new("k", way, 0);
            server.stop_at(point, 1).await;
            let first = attempt(&purchase, &server);
            server.stopped_at(point).await;
            server.kill();
            assert!(first.await.unwrap().is_err(), "nobody answers");
            let orders = async || shop.db.number("SELECT count(*) AS value FROM orders").await;
            assert_eq!(orders().await, 0);
            assert_ne!(shop.db.state("k").await.as_deref(), Some("completed"));

            let server = setup.start();
            let retry = insist(&purchase, &server).await;
            assert!(!retry.is_replay());
            retry.assert_replayed_by(&insist(&purchase, &server).await);
            shop.delivered(&purchase, &retry).await.unwrap();
            assert_eq!(orders().await, 1, "{way:?} {point}");
            shop.adds_up().await.unwrap();
        }
    }
}

/// The row of its key is locked: what frees it is that Postgres ends its transaction.
#[actix_web::test]
async fn the_locks_of_a_stalled_owner_go_away_and_it_writes_nothing() {
    for point in ["in-handler", "before-complete", "after-complete"] {
        let shop = Shop::open(Db::new().await).await;
        let setup = Setup { lease: LEASE, ..Setup::new(&shop.db.url) };
        let mut stalled = Setup { idle_in_transaction: Some(Duration::from_secs(2)), ..setup.clone() }.start();
        let other = setup.start();
        let purchase = Purchase::new("k", Way::Repeatable, 0);
        stalled.stop_at(point, 1).await;
        let first = attempt(&purchase, &stalled);
        stalled.stopped_at(point).await;
        stalled.signal("STOP");
        let second = insist(&purchase, &other).await;
        assert!(!second.is_replay());

        stalled.signal("CONT");
        stalled.go_on();
        let first = first.await.unwrap().unwrap();
        match first.status.as_u16() {
            201 => second.assert_replayed_by(&first),
            409 => assert_eq!(first.code(), "lease-lost"),
            _ => assert_eq!((first.status.as_u16(), first.code().as_str()), (503, "store-unavailable"), "{point}"),
        }
        shop.delivered(&purchase, &second).await.unwrap();
        shop.adds_up().await.unwrap();
        second.assert_replayed_by(&insist(&purchase, &stalled).await);
    }
}

async fn held(mut tx: IdemTx, gate: Data<Gate>, tag: String) -> Result<HttpResponse> {
    diesel::sql_query("INSERT INTO effects (tag) VALUES ($1)")
        .bind::<Text, _>(tag)
        .execute(&mut *tx)
        .await
        .map_err(ErrorInternalServerError)?;
    gate.pass().await;
    Ok(created(1))
}

#[derive(Deserialize)]
struct Doctor {
    id: i64,
}

#[derive(QueryableByName)]
struct OnCall {
    #[diesel(sql_type = BigInt)]
    doctors: i64,
}

/// Goes off call if another one stays: right for one, wrong for two who look at the same time.
async fn go_off_call(mut tx: IdemTx, gate: Data<Gate>, doctor: Query<Doctor>) -> Result<HttpResponse> {
    let on_call: OnCall = diesel::sql_query("SELECT count(*) AS doctors FROM on_call")
        .get_result(&mut *tx)
        .await
        .map_err(ErrorInternalServerError)?;
    if on_call.doctors > 1 {
        let gone = tx.batch_execute(&format!("DELETE FROM on_call WHERE id = {}", doctor.id)).await;
        gone.map_err(ErrorInternalServerError)?;
    }
    gate.pass().await;
    Ok(HttpResponse::Created().body(on_call.doctors.to_string()))
}

async fn rig(db: Db, policy: Policy, pool_size: u32) -> Rig {
    Rig::builder()
        .database(db)
        .policy(policy.anonymous())
        .pool_size(pool_size)
        .serve(|config, idempotency, _: &PgPool| {
            config.service(
                web::scope("")
                    .wrap(idempotency.clone())
                    .route("/held", web::post().to(held))
                    .route("/off-call", web::post().to(go_off_call)),
            );
        })
        .await
}

fn policies() -> [Policy; 2] {
    [Policy::new(), Policy::new().atomic()]
}

/// X04
#[actix_web::test]
async fn what_a_client_has_left_commits_all_the_same() {
    for policy in policies() {
        let rig = rig(Db::new().await, policy, 5).await;
        let mut raw = rig.raw().await;
        raw.send(post("/held", "a", "x")).await.unwrap();
        rig.gate.entered(1).await;
        raw.reset();
        // The server has seen the reset when it serves somebody who came later.
        assert_eq!(rig.post("/off-call?id=0").answer().await.status, 500, "there is no such table here");
        rig.gate.open(1);
        eventually("it is committed", async || rig.db.state("a").await.as_deref() == Some("completed")).await;
        let replay = rig.post("/held").key("a").header("content-type", "application/json").body("x").answer().await;
        assert!(replay.is_replay() && replay.status == 201, "{}", replay.text());
        assert_eq!(rig.db.effects("x").await, 1);
    }
}

/// D02
#[actix_web::test]
async fn a_storm_of_clients_that_leave_costs_no_connection() {
    const CLIENTS: usize = 60;
    for policy in policies() {
        // A deadline that ends in the middle of a statement, and a race that is lost above READ COMMITTED, cost a
        // connection too: sixty requests for one connection can take long on a machine that is busy.
        let policy = policy.store_timeout(Duration::from_secs(60));
        let rig = rig(Db::read_committed().await, policy, 1).await;
        rig.gate.open(10 * CLIENTS);
        for n in 0..CLIENTS {
            let mut raw = rig.raw().await;
            let _ = raw.send(post("/held", &format!("k{n}"), &format!("x{n}"))).await;
            // At every stage of its way, from unread to answered.
            for _ in 0..n * 4 {
                tokio::task::yield_now().await;
            }
            raw.reset();
        }
        for n in 0..CLIENTS {
            eventually("every key has its answer", async || {
                let retry = rig.post("/held").key(&format!("k{n}")).header("content-type", "application/json");
                let retry = retry.body(format!("x{n}")).answer().await;
                retry.status == 201
            })
            .await;
            assert_eq!(rig.db.effects(&format!("x{n}")).await, 1);
        }
        let statistics = rig.pool.state().statistics;
        assert_eq!((statistics.connections_created, statistics.connections_closed_broken), (1, 0));
        assert!(
            rig.db
                .is("NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND \
                           pid <> pg_backend_pid() AND state LIKE 'idle in transaction%')")
                .await
        );
    }
}

#[actix_web::test]
async fn of_two_transactions_that_contradict_each_other_one_is_409_and_its_retry_runs() {
    for policy in policies() {
        let rig = rig(Db::new().await, policy.isolation(Isolation::Serializable), 5).await;
        rig.db.run("CREATE TABLE on_call AS SELECT id FROM generate_series(1, 2) AS id").await;
        let off_call = |n: usize| rig.post(&format!("/off-call?id={n}")).key(&format!("k{n}")).answer();
        let both = [rt::spawn(off_call(1)), rt::spawn(off_call(2))];
        rig.gate.entered(2).await;
        rig.gate.open(2);
        let mut lost = None;
        let mut won = 0;
        for (n, answer) in (1..).zip(both) {
            let answer = answer.await.unwrap();
            if answer.status == 201 {
                assert_eq!(answer.text(), "2");
                won += 1;
            } else {
                assert_eq!((answer.status.as_u16(), answer.code().as_str()), (409, "serialization"));
                assert!(answer.retry_after().is_some());
                lost = Some(n);
            }
        }
        assert_eq!(won, 1);
        rig.gate.open(1);
        let retry = off_call(lost.unwrap()).await;
        assert_eq!((retry.status.as_u16(), retry.text().as_str()), (201, "1"), "it sees what the other has done");
        assert_eq!(rig.db.number("SELECT count(*) AS value FROM on_call").await, 1);
    }
}
