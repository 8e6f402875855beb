//! Pools and poolers: few connections, dead ones, those of somebody else.

use std::time::Duration;

use actix_idempotency::{ErrorKind, Idempotency, PgPool};
use actix_web::rt::time::sleep;
use diesel_async::{
    AsyncPgConnection, SimpleAsyncConnection,
    pooled_connection::{AsyncDieselConnectionManager, ManagerConfig, PoolableConnection},
};
use futures_util::{
    FutureExt,
    future::{join_all, ready},
};

use crate::support::{
    app::order,
    bouncer::Bouncer,
    client::{RequestExt, post},
    cluster::Cluster,
    db::{Db, assert_usable, backend, pool, server_url},
    eventually, repeat,
    rig::Rig,
    tour::tour,
};

// --- few connections -----------------------------------------------------------------------------------------

/// D01
#[actix_web::test]
async fn a_pool_of_one_is_enough() {
    let rig = Rig::builder().pool_size(1).start().await;
    // Its handlers take a connection of their own.
    tour(&rig).await;
}

/// D01
#[actix_web::test]
async fn handlers_that_take_connections_of_their_own_do_not_starve_the_pool() {
    let rig = Rig::builder().pool_size(4).start().await;
    let answers = join_all((0..40).map(|n| {
        let key = format!("{n}");
        rig.post("/slow?ms=20").key(&key).body(key.clone()).answer()
    }))
    .await;
    assert!(answers.iter().all(|answer| answer.status == 201), "{answers:?}");
    assert_eq!(rig.db.all_effects().await, 40);
    assert_usable(&rig.pool, 4).await;
}

/// D02
#[actix_web::test]
async fn a_storm_of_resets_leaves_no_transaction_in_the_pool() {
    let rig = Rig::builder().pool_size(1).start().await;
    for round in 0..repeat(20, 4) {
        let storm = (0..10).map(|n| {
            let rig = &rig;
            async move {
                let key = format!("{round}-{n}");
                let mut raw = rig.raw().await;
                raw.send(post("/orders", &key, &order(&key).to_string())).await.unwrap();
                sleep(Duration::from_millis(rand::random_range(0..40))).await;
                raw.reset();
            }
        });
        join_all(storm).await;
        assert_usable(&rig.pool, 1).await;
        let tag = format!("after {round}");
        let answer = rig.post("/orders").key(&format!("after-{round}")).json(&order(&tag)).answer().await;
        assert_eq!(answer.status, 201);
        // As another session sees it.
        assert_eq!(rig.db.effects(&tag).await, 1);
    }
    // Whatever was claimed comes to its end, once.
    rig.idempotency.drain().on(async {}).await;
    assert_eq!(rig.db.number("SELECT count(*) AS value FROM idempotency_keys WHERE state <> 'completed'").await, 0);
    assert_eq!(rig.db.keys().await, rig.db.all_effects().await);
}

// --- dead connections ----------------------------------------------------------------------------------------

/// Opens every connection of the pool.
async fn warm(pool: &PgPool, size: usize) {
    let all = join_all((0..size).map(|_| pool.get())).await;
    assert!(all.iter().all(Result::is_ok));
}

/// Five requests after all connections have died: each runs or is refused, and none runs unprotected. The
/// sixth runs.
async fn survive(rig: &Rig, round: &str) {
    let mut ran = 0;
    for n in 0..5 {
        let key = format!("{round}-{n}");
        let answer = rig.post("/orders").key(&key).json(&order(round)).answer().await;
        match answer.status.as_u16() {
            201 => {
                ran += 1;
                assert_eq!(rig.db.state(&key).await.as_deref(), Some("completed"));
            }
            // The handler's own connection died under it.
            500 => assert_eq!(rig.db.state(&key).await.as_deref(), Some("released")),
            _ => assert_eq!(answer.code(), "store-unavailable", "{answer:?}"),
        }
    }
    assert_eq!(rig.db.effects(round).await, ran);
    let key = format!("{round}-sixth");
    let sixth = rig.post("/orders").key(&key).json(&order(round)).answer().await;
    assert_eq!(sixth.status, 201, "{sixth:?}");
}

async fn terminate_all(db: &Db) {
    db.run(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
         WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    .await;
}

/// D04
#[actix_web::test]
async fn terminated_connections_are_replaced() {
    let rig = Rig::start().await;
    for round in ["one", "two", "three"] {
        warm(&rig.pool, 5).await;
        terminate_all(&rig.db).await;
        survive(&rig, round).await;
    }
}

/// D04
#[actix_web::test]
async fn our_pool_hands_nobody_a_connection_that_is_known_to_be_closed() {
    let rig = Rig::start().await;
    // Driven by the thread that drives those of the pool: what becomes of them first, that hears of first.
    let mut witness = rig.pool.dedicated_connection().await.unwrap();
    let last = backend(&mut witness).await;
    warm(&rig.pool, 5).await;
    rig.db
        .run(&format!(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
             WHERE datname = current_database() AND pid NOT IN (pg_backend_pid(), {last})"
        ))
        .await;
    rig.db.run(&format!("SELECT pg_terminate_backend({last}, 5000)")).await;
    eventually("the news has come", || ready(witness.is_broken())).await;
    for _ in 0..5 {
        let unprotected = rig.get("/orders").answer().await;
        assert_eq!(unprotected.status, 200, "{}", unprotected.text());
    }
}

/// D04
#[actix_web::test]
async fn a_restart_of_the_server_is_survived() {
    let cluster = Cluster::start(&[]);
    let db = Db::on(&cluster.url()).await;
    let connections = db.pool(5);
    let rig = Rig::builder().on(db, connections).start().await;
    warm(&rig.pool, 5).await;
    cluster.down();
    let refused = rig.post("/orders").key("down").json(&order("down")).answer().await;
    assert_eq!(refused.code(), "store-unavailable");
    cluster.up();
    // The pool tries again every now and then, at most 2.5 s apart.
    eventually("the pool connects", || async { rig.pool.get().await.is_ok() }).await;
    assert_eq!(rig.db.effects("down").await, 0);
    survive(&rig, "up").await;
}

// --- other people's pools ------------------------------------------------------------------------------------

#[actix_web::test]
async fn a_pool_made_without_us_works() {
    let db = Db::new().await;
    let pool = PgPool::builder().build(AsyncDieselConnectionManager::new(&db.url)).await.unwrap();
    tour(&Rig::builder().on(db, pool).start().await).await;
}

#[actix_web::test]
async fn a_session_time_zone_east_of_utc_changes_nothing() {
    let db = Db::new().await;
    let mut config = ManagerConfig::default();
    config.custom_setup = Box::new(|url| {
        let connecting = <AsyncPgConnection as diesel_async::AsyncConnection>::establish(url);
        async {
            let mut conn = connecting.await?;
            conn.batch_execute("SET TimeZone = 'Asia/Tokyo'").await.unwrap();
            Ok(conn)
        }
        .boxed()
    });
    let pool = PgPool::builder().build(AsyncDieselConnectionManager::new_with_config(&db.url, config)).await.unwrap();
    tour(&Rig::builder().on(db, pool).start().await).await;
}

// --- PgBouncer -----------------------------------------------------------------------------------------------

/// D05
#[actix_web::test]
async fn pgbouncer_in_session_mode_works() {
    let Some(bouncer) = Bouncer::start(&server_url(), "session") else { return };
    let db = Db::new().await;
    let pool = pool(&bouncer.url(&db.name), 5);
    tour(&Rig::builder().on(db, pool).start().await).await;
}

/// D05
#[actix_web::test]
async fn pgbouncer_in_transaction_mode_is_recognised() {
    let Some(bouncer) = Bouncer::start(&server_url(), "transaction") else { return };
    let db = Db::new().await;
    for round in 0..repeat(50, 5) {
        let error = Idempotency::postgres(pool(&bouncer.url(&db.name), 5)).check().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Pooler, "{round}: {error:?}");
        for advice in ["session mode", "max_prepared_statements"] {
            assert!(error.to_string().contains(advice), "{error}");
        }
    }
    // It leaves nothing open behind.
    eventually("no transaction is open", || {
        db.is("NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%')")
    })
    .await;
}
