//! Three lines of defence, each switched off once while the others stand: what gets through then is what only
//! that one catches. With it, the same requests do no harm.

use actix_idempotency::{
    Decrement, Duplicates, Idempotency, IfMatch, Machine, PgPool, Policy, Transition, Versioned, states,
    version::{VersionError, etag},
    versioned,
};
use actix_web::{
    HttpResponse, Result,
    error::ErrorInternalServerError,
    http::Method,
    rt::spawn,
    web::{self, Data, Json, Path, ServiceConfig},
};
use diesel::prelude::*;
use diesel_async::{AsyncPgConnection, RunQueryDsl, pooled_connection::bb8::PooledConnection};

use crate::support::{
    client::{Answer, RequestExt},
    db::Db,
    gate::Gate,
    rig::Rig,
};

diesel::table! {
    products (id) {
        id -> BigInt,
        stock -> Integer,
    }
}

diesel::table! {
    orders (id) {
        id -> BigInt,
        campaign -> Nullable<BigInt>,
        quantity -> Integer,
        status -> Text,
        version -> Integer,
    }
}
versioned!(orders.version);

diesel::table! {
    history (id) {
        id -> BigInt,
        order_id -> BigInt,
    }
}

states! {
    enum Status for orders.status { Pending = "PENDING", Paid = "PAID" }
}
use Status::{Paid, Pending};

const CAMPAIGN: &str = "orders_campaign_key";

const TABLES: &str = "CREATE TABLE products (id bigint PRIMARY KEY, stock int NOT NULL);
CREATE TABLE orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, campaign bigint CONSTRAINT orders_campaign_key UNIQUE,
    quantity int NOT NULL DEFAULT 1, status text NOT NULL DEFAULT 'PENDING', version int NOT NULL DEFAULT 1
);
CREATE TABLE history (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, order_id bigint NOT NULL);
INSERT INTO products VALUES (1, 1), (2, 10);
INSERT INTO orders (quantity) VALUES (1), (1);";

/// Whether the line under test stands.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Line {
    Up,
    Down,
}

async fn connection(pool: &PgPool) -> Result<PooledConnection<'_, AsyncPgConnection>> {
    pool.get().await.map_err(ErrorInternalServerError)
}

async fn rig(routes: fn(&mut ServiceConfig, &Idempotency)) -> Rig {
    let policy = Policy::new().anonymous().methods([Method::POST, Method::PUT]);
    let rig = Rig::builder()
        .policy(policy)
        .database(Db::read_committed().await)
        .serve(move |config, idempotency, _| routes(config, idempotency))
        .await;
    rig.db.run(TABLES).await;
    rig
}

/// Two requests that are both where they have looked and not yet acted.
async fn two_at_once(rig: &Rig, path: &str, bodies: [i64; 2]) -> [Answer; 2] {
    let before = rig.gate.count();
    let [a, b] = bodies.map(|body| spawn(rig.post(path).key(&format!("{path}-{body}")).json(&body).answer()));
    rig.gate.entered(before + 2).await;
    rig.gate.open(2);
    [a.await.unwrap(), b.await.unwrap()]
}

fn sorted(answers: &[Answer; 2]) -> [u16; 2] {
    let mut statuses = [answers[0].status.as_u16(), answers[1].status.as_u16()];
    statuses.sort_unstable();
    statuses
}

fn refused(answers: &[Answer; 2]) -> &Answer {
    answers.iter().find(|answer| answer.status == 409).unwrap()
}

/// With a guarded stock, and a constraint that has nothing to say: the order is in no campaign.
async fn order(pool: Data<PgPool>, quantity: Json<i32>) -> Result<HttpResponse> {
    let mut conn = connection(&pool).await?;
    products::stock.decrement(2, *quantity).execute(&mut conn).await?;
    let id: i64 = diesel::insert_into(orders::table)
        .values(orders::quantity.eq(*quantity))
        .returning(orders::id)
        .get_result(&mut conn)
        .await
        .map_err(ErrorInternalServerError)?;
    Ok(HttpResponse::Created().json(id))
}

#[actix_web::test]
async fn without_the_key_one_click_is_two_orders() {
    let rig = rig(|config, idempotency| {
        let up = web::resource("/up").wrap(idempotency.clone());
        config.service(up.route(web::post().to(order))).route("/down", web::post().to(order));
    })
    .await;
    let ordered = async || rig.db.number("SELECT count(*) - 2 AS value FROM orders").await;
    let click = |path: &str| rig.post(path).key("one-click").json(&1).answer();

    let (first, second) = (click("/down").await, click("/down").await);
    assert!(first.status == 201 && second.status == 201 && first.body != second.body);
    assert_eq!(ordered().await, 2);

    click("/up").await.assert_replayed_by(&click("/up").await);
    assert_eq!(ordered().await, 3);
    assert!(rig.db.is("(SELECT stock = 7 FROM products WHERE id = 2)").await);
}

async fn show(pool: Data<PgPool>, id: Path<i64>) -> Result<HttpResponse> {
    let mut conn = connection(&pool).await?;
    let order = orders::table.find(*id).select((orders::quantity, orders::version));
    let (quantity, version): (i32, i32) = order.get_result(&mut conn).await.map_err(ErrorInternalServerError)?;
    Ok(HttpResponse::Ok().insert_header(etag(version)).json(quantity))
}

async fn change(line: Line, pool: &PgPool, id: i64, if_match: IfMatch, quantity: i32) -> Result<HttpResponse> {
    let mut conn = connection(pool).await?;
    let quantity = orders::quantity.eq(quantity);
    match line {
        Line::Up => orders::table.at(id, if_match).set(quantity).execute(&mut conn).await.map(drop)?,
        Line::Down => diesel::update(orders::table.find(id))
            .set((quantity, orders::version.eq(orders::version + 1)))
            .execute(&mut conn)
            .await
            .map(drop)
            .map_err(VersionError::Query)?,
    }
    Ok(HttpResponse::Ok().finish())
}

#[actix_web::test]
async fn without_the_version_the_second_writer_wins_in_silence() {
    let rig = rig(|config, idempotency| {
        let put = |line| {
            web::put().to(move |pool: Data<PgPool>, id: Path<i64>, tag: IfMatch, quantity: Json<i32>| async move {
                change(line, &pool, *id, tag, *quantity).await
            })
        };
        config.service(
            web::scope("")
                .wrap(idempotency.clone())
                .route("/orders/{id}", web::get().to(show))
                .route("/up/{id}", put(Line::Up))
                .route("/down/{id}", put(Line::Down)),
        );
    })
    .await;
    // Two people have seen the same; each then sends what they want, under a key of their own.
    let both = async |path: &str, id: i64| {
        let tag = rig.get(&format!("/orders/{id}")).answer().await.header("etag").unwrap().to_owned();
        let put = |key: &str, quantity: i64| {
            let request = rig.request(Method::PUT.as_str().parse().unwrap(), &format!("{path}/{id}"));
            request.key(&format!("{path}-{key}")).header("If-Match", &tag).json(&quantity).answer()
        };
        let statuses = [put("mine", 5).await.status.as_u16(), put("yours", 9).await.status.as_u16()];
        (statuses, rig.get(&format!("/orders/{id}")).answer().await.json().as_i64().unwrap())
    };
    assert_eq!(both("/down", 1).await, ([200, 200], 9), "the first one is told of success, and nothing of it is left");
    assert_eq!(both("/up", 2).await, ([200, 412], 5));
}

async fn buy(line: Line, pool: &PgPool, gate: &Gate, pieces: i32) -> Result<HttpResponse> {
    let mut conn = connection(pool).await?;
    let product = products::table.find(1);
    let stock: i32 = product.select(products::stock).get_result(&mut conn).await.map_err(ErrorInternalServerError)?;
    gate.pass().await;
    match line {
        Line::Up => products::stock.decrement(1, pieces).execute(&mut conn).await.map(drop)?,
        Line::Down if stock >= pieces => diesel::update(product)
            .set(products::stock.eq(products::stock - pieces))
            .execute(&mut conn)
            .await
            .map(drop)
            .map_err(ErrorInternalServerError)?,
        Line::Down => return Ok(HttpResponse::Conflict().finish()),
    }
    Ok(HttpResponse::Created().json(pieces))
}

#[actix_web::test]
async fn without_the_guard_the_stock_goes_below_zero() {
    let rig = rig(|config, idempotency| {
        let post = |line| {
            web::post().to(move |pool: Data<PgPool>, gate: Data<Gate>, pieces: Json<i64>| async move {
                // The other buyer wants the same; only the key differs.
                assert!(*pieces > 0);
                buy(line, &pool, &gate, 1).await
            })
        };
        config.service(
            web::scope("").wrap(idempotency.clone()).route("/up", post(Line::Up)).route("/down", post(Line::Down)),
        );
    })
    .await;
    let stock = async || rig.db.number("SELECT stock::bigint AS value FROM products WHERE id = 1").await;

    assert_eq!(sorted(&two_at_once(&rig, "/down", [1, 2]).await), [201, 201]);
    assert_eq!(stock().await, -1);

    rig.db.run("UPDATE products SET stock = 1 WHERE id = 1").await;
    let up = two_at_once(&rig, "/up", [1, 2]).await;
    assert_eq!((sorted(&up), stock().await), ([201, 409], 0));
    assert_eq!(refused(&up).code(), "not-enough");
}

async fn pay(line: Line, pool: &PgPool, id: i64) -> Result<HttpResponse> {
    let mut conn = connection(pool).await?;
    let entry = diesel::insert_into(history::table).values(history::order_id.eq(id));
    if line == Line::Up {
        let machine = Machine::starting_at(Pending).allow(Pending, [Paid]).ending_at([Paid]).build();
        let moved = machine.transition(id, Pending, Paid).record(entry).execute(&mut conn).await?;
        assert!(matches!(moved, Transition::Applied(()) | Transition::Already(())));
        return Ok(HttpResponse::Ok().finish());
    }
    let moved = diesel::update(orders::table.find(id)).set(orders::status.eq(Paid));
    moved.execute(&mut conn).await.map_err(ErrorInternalServerError)?;
    entry.execute(&mut conn).await.map_err(ErrorInternalServerError)?;
    Ok(HttpResponse::Ok().finish())
}

#[actix_web::test]
async fn without_the_transition_another_message_about_one_payment_is_another_payment() {
    let rig = rig(|config, idempotency| {
        let post =
            |line| web::post().to(move |pool: Data<PgPool>, id: Path<i64>| async move { pay(line, &pool, *id).await });
        config.service(
            web::scope("")
                .wrap(idempotency.clone())
                .route("/up/{id}", post(Line::Up))
                .route("/down/{id}", post(Line::Down)),
        );
    })
    .await;
    for (path, entries) in [("/down/1", 2), ("/up/2", 1)] {
        for message in ["first", "second"] {
            assert_eq!(rig.post(path).key(message).answer().await.status, 200);
        }
        let id = &path[path.len() - 1..];
        let history = format!("SELECT count(*) AS value FROM history WHERE order_id = {id}");
        assert_eq!(rig.db.number(&history).await, entries, "{path}");
    }
}

/// It looks before it inserts, as everybody does.
async fn order_in_campaign(pool: Data<PgPool>, gate: Data<Gate>, quantity: Json<i32>) -> Result<HttpResponse> {
    let mut conn = connection(&pool).await?;
    let there = orders::table.filter(orders::campaign.eq(7)).count();
    let there: i64 = there.get_result(&mut conn).await.map_err(ErrorInternalServerError)?;
    gate.pass().await;
    if there > 0 {
        return Ok(HttpResponse::Conflict().finish());
    }
    let inserted = diesel::insert_into(orders::table)
        .values((orders::campaign.eq(7), orders::quantity.eq(*quantity)))
        .execute(&mut conn)
        .await;
    let words = || Duplicates::new().code(CAMPAIGN, "campaign-used", "One order in this campaign.");
    inserted.map_err(|error| words().explain(error))?;
    Ok(HttpResponse::Created().finish())
}

#[actix_web::test]
async fn without_the_constraint_two_requests_have_what_there_is_one_of() {
    let rig = rig(|config, idempotency| {
        let resource = |path: &str| web::resource(path.to_owned()).wrap(idempotency.clone());
        config
            .service(resource("/down").route(web::post().to(order_in_campaign)))
            .service(resource("/up").route(web::post().to(order_in_campaign)));
    })
    .await;
    let ordered = async || rig.db.number("SELECT count(*) AS value FROM orders WHERE campaign = 7").await;

    let up = two_at_once(&rig, "/up", [1, 2]).await;
    assert_eq!((sorted(&up), ordered().await), ([201, 409], 1));
    assert_eq!(refused(&up).code(), "campaign-used");

    rig.db.run(&format!("DELETE FROM orders WHERE campaign = 7; ALTER TABLE orders DROP CONSTRAINT {CAMPAIGN}")).await;
    assert_eq!((sorted(&two_at_once(&rig, "/down", [1, 2]).await), ordered().await), ([201, 201], 2));
}
