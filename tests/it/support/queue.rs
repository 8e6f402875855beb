//! A small at-least-once queue, made of a Postgres table: what a broker does, where there is none.
//!
//! A message that was received and not acknowledged is there again after a while, as after a lost connection; one
//! that is given back is there at once. Each test database has at most one.

use actix_idempotency::Event;
use diesel::{
    OptionalExtension, QueryResult, QueryableByName,
    sql_types::{BigInt, Text},
};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection, TransactionManager};

use super::db::Db;

/// For [`Db::run`].
pub const QUEUE: &str = "CREATE TABLE queue (
    place bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id text NOT NULL,
    body text NOT NULL,
    deliveries int NOT NULL DEFAULT 0,
    visible_at timestamptz NOT NULL DEFAULT clock_timestamp()
)";

#[derive(Debug, QueryableByName)]
pub struct Delivery {
    #[diesel(sql_type = BigInt)]
    pub place: i64,
    #[diesel(sql_type = Text)]
    pub message_id: String,
    #[diesel(sql_type = Text)]
    pub body: String,
}

pub async fn send(conn: &mut AsyncPgConnection, message_id: &str, body: &str) -> QueryResult<()> {
    let insert = diesel::sql_query("INSERT INTO queue (message_id, body) VALUES ($1, $2)")
        .bind::<Text, _>(message_id)
        .bind::<Text, _>(body);
    brokered(conn, async |conn| insert.execute(conn).await).await.map(drop)
}

/// What a relay of the tests does: the event's id is the message's.
pub async fn send_event(conn: &mut AsyncPgConnection, event: &Event) -> QueryResult<()> {
    send(conn, &event.id.to_string(), std::str::from_utf8(&event.payload).unwrap()).await
}

/// The next message, which nobody else gets for 300 ms.
pub async fn receive(conn: &mut AsyncPgConnection) -> QueryResult<Option<Delivery>> {
    let update = diesel::sql_query(
        "UPDATE queue SET deliveries = deliveries + 1, visible_at = clock_timestamp() + interval '300 ms' \
         WHERE place = (SELECT place FROM queue WHERE visible_at <= clock_timestamp() ORDER BY place LIMIT 1 \
         FOR UPDATE SKIP LOCKED) RETURNING place, message_id, body",
    );
    brokered(conn, async |conn| update.get_result(conn).await.optional()).await
}

pub async fn acknowledge(conn: &mut AsyncPgConnection, delivery: &Delivery) -> QueryResult<()> {
    let delete = diesel::sql_query("DELETE FROM queue WHERE place = $1").bind::<BigInt, _>(delivery.place);
    brokered(conn, async |conn| delete.execute(conn).await).await.map(drop)
}

pub async fn give_back(conn: &mut AsyncPgConnection, delivery: &Delivery) -> QueryResult<()> {
    let update = diesel::sql_query("UPDATE queue SET visible_at = clock_timestamp() WHERE place = $1")
        .bind::<BigInt, _>(delivery.place);
    brokered(conn, async |conn| update.execute(conn).await).await.map(drop)
}

/// A broker has no isolation level: whatever the default, its statements lose no races.
async fn brokered<T: Send>(
    conn: &mut AsyncPgConnection,
    statement: impl AsyncFnOnce(&mut AsyncPgConnection) -> QueryResult<T>,
) -> QueryResult<T> {
    type Manager = <AsyncPgConnection as AsyncConnection>::TransactionManager;
    Manager::begin_transaction(conn).await?;
    conn.batch_execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
    let outcome = statement(conn).await?;
    Manager::commit_transaction(conn).await?;
    Ok(outcome)
}

/// How many messages are there, received or not.
pub async fn length(db: &Db) -> i64 {
    db.number("SELECT count(*) AS value FROM queue").await
}
