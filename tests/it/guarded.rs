//! Take only where there is enough.

use std::sync::atomic::{AtomicU32, Ordering};

use actix_idempotency::{Decrement, GuardedError, IdemTx, Retry, Versioned, versioned};
use actix_web::{HttpResponse, Result, web};
use diesel::prelude::*;
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use futures_util::future::join_all;

use crate::support::{
    client::RequestExt,
    db::{Db, ISOLATIONS},
    rig::Rig,
    statements::Statements,
};

diesel::table! {
    products (id) {
        id -> BigInt,
        shop -> Text,
        stock -> Integer,
        sold -> BigInt,
        version -> Integer,
    }
}
versioned!(products.version);

const TABLES: &str = "CREATE TABLE products (
    id bigint PRIMARY KEY, shop text NOT NULL DEFAULT 'a', stock int NOT NULL CHECK (stock >= 0),
    sold bigint NOT NULL DEFAULT 0, version int NOT NULL DEFAULT 1
);
INSERT INTO products (id, stock) VALUES (1, 30), (2, 30);";

async fn db() -> Db {
    let db = Db::empty().await;
    db.run(TABLES).await;
    db
}

#[actix_web::test]
async fn a_hundred_buyers_get_the_thirty_pieces_there_are() {
    let db = db().await;
    for (id, pool) in [(1_i64, db.pool(8)), (2, db.serializable_pool(8))] {
        // As many at a time as there are connections: nobody waits for one.
        let queue = AtomicU32::new(0);
        let tills = (0..8).map(|_| async {
            let mut conn = pool.get().await.unwrap();
            let mut outcomes = Vec::new();
            while queue.fetch_add(1, Ordering::Relaxed) < 100 {
                let buy = async |conn: &mut AsyncPgConnection| {
                    products::stock.decrement(id, 1).set(products::sold.eq(products::sold + 1)).execute(conn).await
                };
                // Above READ COMMITTED, one may lose against more others than a statement is sent again for.
                outcomes.push(Retry::new().tries(100).run(&mut conn, buy).await);
            }
            outcomes
        });
        let outcomes: Vec<_> = join_all(tills).await.into_iter().flatten().collect();
        assert_eq!(outcomes.len(), 100);
        let mut left: Vec<i64> = outcomes.iter().filter_map(|outcome| outcome.as_ref().ok().copied()).collect();
        left.sort_unstable();
        assert_eq!(left, (0..30).collect::<Vec<_>>());
        for lost in outcomes.into_iter().filter_map(Result::err) {
            assert!(matches!(lost, GuardedError::NotEnough { asked: 1, left: 0 }), "{lost:?}");
        }
        assert!(db.is(&format!("(SELECT (stock, sold) = (0, 30) FROM products WHERE id = {id})")).await);
    }
}

#[actix_web::test]
async fn what_cannot_be_taken_is_told_apart_and_nothing_is_taken() {
    for isolation in ISOLATIONS {
        let db = db().await;
        db.run("UPDATE products SET version = 2147483647 WHERE id = 2").await;
        let mut conn = db.connect_at(isolation).await;
        conn.transaction(async |conn| {
            conn.batch_execute("INSERT INTO products (id, stock) VALUES (10, 1)").await?;
            let take = async |conn: &mut _, id: i64, n: i64| products::stock.decrement(id, n).execute(conn).await;
            assert!(matches!(take(conn, 1, 31).await, Err(GuardedError::NotEnough { asked: 31, left: 30 })));
            assert!(matches!(take(conn, 9, 1).await, Err(GuardedError::Gone)));
            for n in [0, -1, i64::MIN, i64::from(i32::MAX) + 1, i64::MAX] {
                assert!(matches!(take(conn, 1, n).await, Err(GuardedError::Amount { asked }) if asked == n));
            }
            let both = products::stock.decrement(1, 1).set(products::stock.eq(7)).execute(conn).await;
            assert!(matches!(both, Err(GuardedError::SetsItself { field: "stock" })));
            let theirs = products::stock.decrement(1, 1).filter(products::shop.eq("b")).execute(conn).await;
            assert!(matches!(theirs, Err(GuardedError::Gone)));
            let largest = products::stock.decrement(2, 1).raise_version().execute(conn).await;
            assert!(matches!(largest, Err(GuardedError::Overflow)));
            conn.batch_execute("INSERT INTO products (id, stock) VALUES (11, 1)").await
        })
        .await
        .unwrap();
        assert!(db.is("(SELECT array_agg(stock ORDER BY id) = '{30,30,1,1}' FROM products)").await, "{isolation}");
    }
}

#[actix_web::test]
async fn it_is_one_statement_and_none_for_an_amount_that_makes_no_sense() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let statements = Statements::of(conn);
    products::stock.decrement(1, 30).set(products::sold.eq(30)).raise_version().execute(conn).await.unwrap();
    assert_eq!(statements.sent(), 1);
    assert!(products::stock.decrement(1, 1).execute(conn).await.is_err());
    assert_eq!(statements.sent(), 2);
    for n in [0, -1, i64::MAX] {
        assert!(products::stock.decrement(1, n).execute(conn).await.is_err());
    }
    assert_eq!(statements.sent(), 0);
}

#[actix_web::test]
async fn the_version_is_raised_where_that_is_asked_for() {
    let db = db().await;
    let conn = &mut db.connect().await;
    assert_eq!(products::stock.decrement(1, 10).execute(conn).await.unwrap(), 20);
    assert_eq!(products::table.at(1, 1).touch().execute(conn).await.unwrap(), 2);
    let now: (i32, i32) = products::stock
        .decrement(1, 20)
        .raise_version()
        .returning((products::stock, products::version))
        .get_result(conn)
        .await
        .unwrap();
    assert_eq!(now, (0, 3));
    db.run("UPDATE products SET version = 2147483647 WHERE id = 2").await;
    let largest = products::stock.decrement(2, 1).raise_version().execute(conn).await;
    assert!(matches!(largest, Err(GuardedError::Overflow)), "{largest:?}");
    let sets = products::stock.decrement(2, 1).set(products::version.eq(1)).raise_version().execute(conn).await;
    assert!(matches!(sets, Err(GuardedError::SetsItself { field: "version" })));
    assert_eq!(products::stock.decrement(2, 1).set(products::version.eq(1)).execute(conn).await.unwrap(), 29);
}

async fn buy(mut tx: IdemTx, what: web::Path<(i64, i64)>) -> Result<HttpResponse> {
    Ok(HttpResponse::Ok().json(products::stock.decrement(what.0, what.1).execute(&mut tx).await?))
}

#[actix_web::test]
async fn a_buyer_is_told_by_the_status() {
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            config.service(web::scope("").wrap(idempotency.clone()).route("/buy/{id}/{n}", web::post().to(buy)));
        })
        .await;
    rig.db.run(TABLES).await;
    assert_eq!(rig.post("/buy/1/29").key("a").answer().await.json(), 1);
    let too_much = rig.post("/buy/1/2").key("b").answer().await;
    assert_eq!((too_much.status.as_u16(), too_much.code().as_str()), (409, "not-enough"));
    assert_eq!(too_much.json()["detail"], "Nothing was done: 2 were asked for, 1 are left.");
    assert_eq!(rig.post("/buy/9/1").answer().await.code(), "not-found");
    let nonsense = rig.post("/buy/1/0").answer().await;
    assert_eq!((nonsense.status.as_u16(), nonsense.code().as_str()), (422, "amount-invalid"));
    // Nothing was done for it, so its key is free.
    assert_eq!(rig.post("/buy/1/1").key("b").answer().await.json(), 0);
}
