//! One of many moves a row; the others are told where it is.

use actix_idempotency::{
    IdemTx, Machine, PgPool, Retry, Transition, TransitionError, Versioned, states,
    transition::{State, UnknownState},
    version::VersionError,
    versioned,
};
use actix_web::{
    HttpResponse, Result,
    error::{ErrorConflict, ErrorInternalServerError},
    web::{self, Data, Path},
};
use diesel::{prelude::*, result::Error as QueryError};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use futures_util::future::join_all;

use crate::support::{
    client::RequestExt,
    db::{Db, ISOLATIONS},
    rig::Rig,
    statements::Statements,
};

mod sql_types {
    #[derive(diesel::query_builder::QueryId, diesel::sql_types::SqlType)]
    #[diesel(postgres_type(name = "ticket_state"))]
    pub struct TicketState;
}

diesel::table! {
    orders (id) {
        id -> BigInt,
        customer -> Text,
        status -> Text,
        payment -> Nullable<Text>,
        amount -> Nullable<Integer>,
        version -> Integer,
    }
}
versioned!(orders.version);

diesel::table! {
    history (id) {
        id -> BigInt,
        order_id -> BigInt,
        status -> Text,
    }
}

mod schema {
    diesel::table! {
        use diesel::sql_types::*;
        use super::super::sql_types::TicketState;

        tickets (id) {
            id -> BigInt,
            state -> TicketState,
        }
    }
}
use schema::tickets;

states! {
    enum Order for orders.status {
        Open = "OPEN",
        Paid = "PAID",
        Shipped = "SHIPPED",
        Cancelled = "CANCELLED",
    }
}
use Order::{Cancelled, Open, Paid, Shipped};

states! {
    enum Ticket for schema::tickets.state { New = "new", Done = "done" }
}

const TABLES: &str = "CREATE TABLE orders (
    id bigint PRIMARY KEY, customer text NOT NULL DEFAULT 'alice', status text NOT NULL DEFAULT 'OPEN',
    payment text, amount int, version int NOT NULL DEFAULT 1
);
CREATE TABLE history (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, order_id bigint NOT NULL, status text NOT NULL,
    CONSTRAINT history_once UNIQUE (order_id, status)
);
INSERT INTO orders (id) VALUES (1), (2);
CREATE TYPE ticket_state AS ENUM ('new', 'done', 'lost');
CREATE TABLE tickets (id bigint PRIMARY KEY, state ticket_state NOT NULL DEFAULT 'new');
INSERT INTO tickets (id) VALUES (1), (2);";

#[derive(Debug, Clone, PartialEq, Queryable, Selectable)]
#[diesel(table_name = orders)]
struct Row {
    status: Order,
    payment: Option<String>,
    amount: Option<i32>,
    version: i32,
}

fn machine() -> Machine<Order> {
    Machine::starting_at(Open)
        .allow(Open, [Paid, Cancelled])
        .allow(Paid, [Shipped])
        .ending_at([Shipped, Cancelled])
        .build()
}

async fn db() -> Db {
    let db = Db::empty().await;
    db.run(TABLES).await;
    db
}

async fn row(conn: &mut AsyncPgConnection, id: i64) -> Row {
    orders::table.find(id).select(Row::as_select()).get_result(conn).await.unwrap()
}

async fn record(conn: &mut AsyncPgConnection, id: i64, to: Order) -> Result<Transition<Row>, TransitionError<Order>> {
    machine()
        .transition(id, Open, to)
        .record(diesel::insert_into(history::table).values((history::order_id.eq(id), history::status.eq(to.label()))))
        .returning(Row::as_returning())
        .get_result(conn)
        .await
}

/// S01
#[actix_web::test]
async fn of_twenty_payments_and_twenty_cancellations_one_wins() {
    let db = db().await;
    for (id, pool) in [(1, db.pool(8)), (2, db.serializable_pool(8))] {
        let racers = (0..40).map(|n| {
            let pool = pool.clone();
            let to = if n % 2 == 0 { Paid } else { Cancelled };
            actix_web::rt::spawn(async move {
                let mut conn = pool.get().await.unwrap();
                let outcome = Retry::new().tries(100).run(&mut conn, async |conn| record(conn, id, to).await).await;
                (to, outcome)
            })
        });
        let outcomes: Vec<_> = join_all(racers).await.into_iter().map(Result::unwrap).collect();
        let winners: Vec<Order> = outcomes
            .iter()
            .filter(|(_, outcome)| outcome.as_ref().is_ok_and(Transition::is_applied))
            .map(|(to, _)| *to)
            .collect();
        assert_eq!(winners.len(), 1, "{outcomes:?}");
        for (to, outcome) in outcomes {
            match outcome {
                Ok(transition) => assert_eq!((to, transition.into_inner().status), (winners[0], winners[0])),
                Err(TransitionError::Elsewhere { current }) => {
                    assert_eq!(current, winners[0]);
                    assert_ne!(to, winners[0]);
                }
                Err(other) => panic!("{other:?}"),
            }
        }
        assert!(
            db.is(&format!("(SELECT array_agg(status) = '{{{}}}' FROM history WHERE order_id = {id})", winners[0]))
                .await
        );
    }
}

/// S02
#[actix_web::test]
async fn a_late_writer_does_not_move_the_row_back() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let step = async |conn: &mut AsyncPgConnection, from, to| machine().transition(1, from, to).execute(conn).await;
    assert_eq!(step(conn, Open, Paid).await.unwrap(), Transition::Applied(()));
    assert_eq!(step(conn, Paid, Shipped).await.unwrap(), Transition::Applied(()));
    let late = step(conn, Open, Paid).await;
    assert!(matches!(late, Err(TransitionError::Elsewhere { current: Shipped })), "{late:?}");
    assert_eq!(row(conn, 1).await.status, Shipped);
}

/// S03
#[actix_web::test]
async fn a_repeat_is_a_success_without_history() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let first = record(conn, 1, Paid).await.unwrap();
    let second = record(conn, 1, Paid).await.unwrap();
    assert!(first.is_applied() && !second.is_applied());
    assert_eq!(first.into_inner(), second.clone().into_inner());
    assert_eq!(second.applied(), None);
    assert_eq!(db.number("SELECT count(*) AS value FROM history").await, 1);
}

/// S04
#[actix_web::test]
async fn other_columns_change_with_the_state_or_not_at_all() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let pay = |payment: &'static str| {
        machine()
            .transition(1, Open, Paid)
            .set((orders::payment.eq(payment), orders::amount.eq(5)))
            .raise_version()
            .returning(Row::as_returning())
    };
    let paid = Row { status: Paid, payment: Some("card".into()), amount: Some(5), version: 2 };
    assert_eq!(pay("card").get_result::<Row>(conn).await.unwrap(), Transition::Applied(paid.clone()));
    assert_eq!(pay("cash").get_result::<Row>(conn).await.unwrap(), Transition::Already(paid.clone()));
    let cancel = machine().transition(1, Open, Cancelled).set(orders::amount.eq(0)).execute(conn).await;
    assert!(matches!(cancel, Err(TransitionError::Elsewhere { current: Paid })));
    assert_eq!(row(conn, 1).await, paid);
    // Who has read it before is stale now.
    assert!(matches!(orders::table.at(1, 1).touch().execute(conn).await, Err(VersionError::Stale { current: 2, .. })));
}

/// T03
#[actix_web::test]
async fn whoever_does_not_move_it_can_go_on_in_the_same_transaction() {
    for isolation in ISOLATIONS {
        let db = db().await;
        db.run("UPDATE orders SET status = 'LOST' WHERE id = 2").await;
        db.run("INSERT INTO orders (id, status, version) VALUES (3, 'PAID', 1), (4, 'OPEN', 2147483647)").await;
        let mut conn = db.connect_at(isolation).await;
        conn.transaction(async |conn| {
            conn.batch_execute("INSERT INTO orders (id) VALUES (10)").await?;
            let to = |id: i64, from, to| machine().transition(id, from, to);
            let elsewhere = to(1, Paid, Shipped).execute(conn).await;
            assert!(matches!(elsewhere, Err(TransitionError::Elsewhere { current: Open })));
            assert!(matches!(to(9, Open, Paid).execute(conn).await, Err(TransitionError::Gone)));
            assert!(matches!(
                to(1, Open, Shipped).execute(conn).await,
                Err(TransitionError::NotAllowed { from: Open, to: Shipped })
            ));
            match to(2, Open, Paid).execute(conn).await {
                Err(TransitionError::UnknownState(unknown)) => {
                    assert_eq!((unknown.label.as_str(), unknown.column), ("LOST", "status"));
                }
                other => panic!("{other:?}"),
            }
            let sets = to(1, Open, Paid).set(orders::status.eq(Shipped)).execute(conn).await;
            assert!(matches!(sets, Err(TransitionError::SetsItself { field: "status" })));
            let theirs = to(1, Open, Paid).filter(orders::customer.eq("bob")).execute(conn).await;
            assert!(matches!(theirs, Err(TransitionError::Gone)));
            let largest = to(4, Open, Paid).raise_version().execute(conn).await;
            assert!(matches!(largest, Err(TransitionError::Overflow)));
            // Who only repeats it writes no history, and undoes nothing.
            assert!(matches!(record(conn, 3, Paid).await, Ok(Transition::Already(_))));
            // What follows fails: the move is undone, and the transaction goes on.
            let twice = diesel::insert_into(history::table).values(vec![
                (history::order_id.eq(1), history::status.eq("PAID")),
                (history::order_id.eq(1), history::status.eq("PAID")),
            ]);
            assert!(matches!(to(1, Open, Paid).record(twice).execute(conn).await, Err(TransitionError::Query(_))));
            let refused: Result<Transition<i64>, TransitionError<Order>> = to(1, Open, Paid)
                .returning(orders::id)
                .get_result_and(conn, async |conn, _| {
                    conn.batch_execute("SELECT 1 / 0").await.map_err(TransitionError::Query)
                })
                .await;
            assert!(refused.is_err());
            conn.batch_execute("INSERT INTO orders (id) VALUES (11)").await
        })
        .await
        .unwrap();
        let statuses = "(SELECT array_agg(status ORDER BY id) = '{OPEN,LOST,PAID,OPEN,OPEN,OPEN}' FROM orders)";
        assert!(db.is(statuses).await, "{isolation}");
        assert!(db.is("NOT EXISTS (SELECT FROM history)").await);
    }
}

#[actix_web::test]
async fn a_move_is_one_statement_and_none_where_the_machine_has_no_such_move() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let statements = Statements::of(conn);
    let pay = || machine().transition(1, Open, Paid).set((orders::payment.eq("card"), orders::amount.eq(5)));
    assert!(pay().raise_version().execute(conn).await.unwrap().is_applied());
    assert_eq!(statements.sent(), 1);
    // A repeat looks where the row is, and what it is there.
    assert!(!pay().execute(conn).await.unwrap().is_applied());
    assert_eq!(statements.sent(), 3);
    assert!(machine().transition(1, Open, Shipped).execute(conn).await.is_err());
    assert!(pay().set(orders::status.eq(Open)).execute(conn).await.is_err());
    assert_eq!(statements.sent(), 0);
}

#[actix_web::test]
async fn what_must_follow_is_done_by_the_winner_or_nothing_moves() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let note =
        async |conn: &mut AsyncPgConnection, sql: &str| conn.batch_execute(sql).await.map_err(ErrorInternalServerError);
    let pay = || machine().transition(1, Open, Paid).returning(orders::id);
    let event = "INSERT INTO history (order_id, status) VALUES (1, 'event')";

    let failed: Result<Transition<i64>> = pay()
        .get_result_and(conn, async |conn, _| {
            note(conn, event).await?;
            Err(ErrorConflict("no"))
        })
        .await;
    assert_eq!(failed.unwrap_err().as_response_error().status_code(), 409);
    let swallowed: Result<Transition<i64>> = pay()
        .get_result_and(conn, async |conn, _| {
            let _ = note(conn, "SELECT 1 / 0").await;
            Ok(())
        })
        .await;
    assert!(swallowed.is_err());
    assert_eq!(row(conn, 1).await.status, Open);

    let applied: Result<Transition<i64>> = pay().get_result_and(conn, async |conn, _| note(conn, event).await).await;
    assert_eq!(applied.unwrap(), Transition::Applied(1));
    let repeated: Result<Transition<i64>> = pay().get_result_and(conn, async |_, _| panic!("not the winner")).await;
    assert_eq!(repeated.unwrap(), Transition::Already(1));
    assert_eq!(db.number("SELECT count(*) AS value FROM history WHERE status = 'event'").await, 1);
}

#[actix_web::test]
async fn a_postgres_enum_is_as_good_as_text() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let machine =
        Machine::starting_at(Ticket::New).allow(Ticket::New, [Ticket::Done]).ending_at([Ticket::Done]).build();
    let mut states = Vec::new();
    for _ in 0..2 {
        let done: Transition<Ticket> =
            machine.transition(1, Ticket::New, Ticket::Done).returning(tickets::state).get_result(conn).await.unwrap();
        states.push(done);
    }
    assert_eq!(states, [Transition::Applied(Ticket::Done), Transition::Already(Ticket::Done)]);
    let new: Vec<i64> =
        tickets::table.filter(tickets::state.eq(Ticket::New)).select(tickets::id).load(conn).await.unwrap();
    assert_eq!(new, [2]);
    db.run("UPDATE tickets SET state = 'lost' WHERE id = 2").await;
    let lost = machine.transition(2, Ticket::New, Ticket::Done).execute(conn).await;
    assert!(matches!(lost, Err(TransitionError::UnknownState(_))), "{lost:?}");
    let loaded = tickets::table.find(2).select(tickets::state).get_result::<Ticket>(conn).await.unwrap_err();
    let QueryError::DeserializationError(why) = loaded else { panic!("{loaded:?}") };
    let chain = format!("{why:?}");
    assert!(chain.contains("lost") && chain.contains("tickets.state"), "{chain}");
}

#[actix_web::test]
async fn the_largest_version_stops_a_move_that_raises_it() {
    let db = db().await;
    db.run("UPDATE orders SET version = 2147483647").await;
    let conn = &mut db.connect().await;
    let moved = machine().transition(1, Open, Paid).raise_version().execute(conn).await;
    assert!(matches!(moved, Err(TransitionError::Overflow)), "{moved:?}");
    assert!(machine().transition(1, Open, Paid).execute(conn).await.unwrap().is_applied());
}

#[test]
fn an_unknown_state_says_where_it_is() {
    assert_eq!(Order::of_label("PAID"), Some(Paid));
    assert_eq!(Order::of_label("paid"), None);
    let unknown = UnknownState::new("paid".into(), "orders.status");
    assert_eq!(unknown.to_string(), "`paid` is no state of orders.status");
}

async fn pay(mut tx: IdemTx, machine: Data<Machine<Order>>, id: Path<i64>) -> Result<HttpResponse> {
    let paid = machine.transition(*id, Open, Paid).execute(&mut tx).await?;
    Ok(HttpResponse::Ok().body(if paid.is_applied() { "applied" } else { "already" }))
}

async fn move_to(pool: Data<PgPool>, machine: Data<Machine<Order>>, to: Path<(i64, String)>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let target = Order::of_label(&to.1).unwrap();
    let _ = machine.transition(to.0, Paid, target).execute(&mut conn).await?;
    Ok(HttpResponse::Ok().finish())
}

#[actix_web::test]
async fn a_mover_is_told_by_the_status() {
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            config.app_data(Data::new(machine())).service(
                web::scope("")
                    .wrap(idempotency.clone())
                    .route("/pay/{id}", web::post().to(pay))
                    .route("/move/{id}/{to}", web::post().to(move_to)),
            );
        })
        .await;
    rig.db.run(TABLES).await;
    rig.db.run("UPDATE orders SET status = 'LOST' WHERE id = 2").await;
    assert_eq!(rig.post("/pay/1").key("a").answer().await.text(), "applied");
    assert_eq!(rig.post("/pay/1").key("b").answer().await.text(), "already");
    for (path, status, code) in [
        ("/pay/9", 404, "not-found"),
        ("/pay/2", 500, "state-unknown"),
        ("/move/1/CANCELLED", 409, "move-not-allowed"),
        ("/move/9/SHIPPED", 404, "not-found"),
    ] {
        let refused = rig.post(path).answer().await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (status, code), "{path}");
    }
    assert_eq!(rig.post("/move/1/SHIPPED").answer().await.status, 200);
    let elsewhere = rig.post("/pay/1").answer().await;
    assert_eq!((elsewhere.status.as_u16(), elsewhere.code().as_str()), (409, "elsewhere"));
    assert_eq!(elsewhere.json()["detail"], "Nothing was done: the row is in the state SHIPPED.");
}
