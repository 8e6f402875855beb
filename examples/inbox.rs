//! An order, the event that follows it, and the invoice that its message makes: outbox → RabbitMQ → inbox.
//!
//!     sudo apt-get install rabbitmq-server    # Debian and Ubuntu; it runs from then on
//!     ./with-postgres bash                    # a database that outlives the commands below
//!
//!     cargo run --example inbox -- order 3                        # three orders, and an event with each
//!     cargo run --example inbox -- relay                          # the events go to RabbitMQ
//!     CRASH=before-ack cargo run --example inbox -- consume       # one invoice, and it dies before it acknowledges
//!     cargo run --example inbox -- consume                        # that message again: a duplicate; then the others
//!     cargo run --example inbox -- show                           # 3 orders, 3 invoices
//!
//! Without a broker of your own: `service rabbitmq-server start`, and `AMQP_URL` where it is not the one of this
//! machine.

use std::{env, error::Error, process::abort};

use actix_idempotency::{
    Event, Handled, Inbox, PgPool, Relay,
    inbox::{HandleError, InboxError, Message},
    migrations, outbox, pool,
};
use diesel::prelude::*;
use diesel_async::{AsyncConnection, RunQueryDsl, SimpleAsyncConnection};
use futures_util::StreamExt;
use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties,
    message::Delivery,
    options::{
        BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicPublishOptions, BasicQosOptions,
        ConfirmSelectOptions, QueueDeclareOptions,
    },
    types::FieldTable,
};

type Failure = Box<dyn Error + Send + Sync>;

diesel::table! { orders (id) { id -> BigInt, product -> Text, } }
diesel::table! { invoices (id) { id -> BigInt, order_id -> BigInt, } }

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, product text NOT NULL);
    CREATE TABLE IF NOT EXISTS invoices (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders
    )";
const QUEUE: &str = "actix-idempotency-orders";
/// What failed too often, for people to look at.
const PARKED: &str = "actix-idempotency-parked";

/// The order and its event: both, or neither.
async fn order(pool: &PgPool) -> Result<(), Failure> {
    let mut conn = pool.get().await?;
    conn.transaction(async |conn| {
        let id: i64 = diesel::insert_into(orders::table)
            .values(orders::product.eq("tea"))
            .returning(orders::id)
            .get_result(conn)
            .await?;
        let event = outbox::publish(conn, QUEUE, serde_json::to_vec(&id)?).await?;
        println!("order {id}, event {event}");
        Ok(())
    })
    .await
}

/// Done when the broker has it on its disk: then, and only then, the event goes.
async fn send(channel: Channel, event: Event) -> Result<(), Failure> {
    let properties = BasicProperties::default().with_message_id(event.id.to_string().into()).with_delivery_mode(2);
    let topic = event.topic.as_str().into();
    let confirmed = channel
        .basic_publish("".into(), topic, BasicPublishOptions::default(), &event.payload, properties)
        .await?
        .await?;
    if confirmed.is_ack() { Ok(()) } else { Err("the broker did not take it".into()) }
}

async fn relay(pool: PgPool, channel: Channel) -> Result<(), Failure> {
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let relayed = Relay::new(pool, move |event| send(channel.clone(), event)).relay_once().await?;
    println!("{relayed:?}");
    Ok(())
}

/// Until the queue has been empty for two seconds.
async fn consume(pool: PgPool, channel: Channel) -> Result<(), Failure> {
    let inbox = Inbox::new("invoices");
    channel.basic_qos(1, BasicQosOptions::default()).await?;
    let mut deliveries =
        channel.basic_consume(QUEUE.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default()).await?;
    let pause = std::time::Duration::from_secs(2);
    while let Ok(Some(delivery)) = tokio::time::timeout(pause, deliveries.next()).await {
        let delivery = delivery?;
        let outcome = match message(&delivery) {
            Ok(message) => handle(&inbox, &pool, &delivery, message).await,
            Err(error) => Err(HandleError::Inbox(error)),
        };
        match outcome {
            Ok(handled) => {
                println!("{handled:?}, redelivered: {}", delivery.redelivered);
                if env::var("CRASH").is_ok_and(|at| at == "before-ack") {
                    abort();
                }
                delivery.ack(BasicAckOptions::default()).await?;
            }
            Err(error) if error.is_to_be_parked() => {
                let properties = delivery.properties.clone();
                channel
                    .basic_publish("".into(), PARKED.into(), BasicPublishOptions::default(), &delivery.data, properties)
                    .await?;
                delivery.ack(BasicAckOptions::default()).await?;
            }
            Err(error) => {
                eprintln!("given back: {error}");
                delivery.nack(BasicNackOptions { requeue: true, ..Default::default() }).await?;
            }
        }
    }
    Ok(())
}

/// The event's id, which the relay has made the message's.
fn message(delivery: &Delivery) -> Result<Message, InboxError> {
    let id = delivery.properties.message_id().as_ref().map(ToString::to_string).unwrap_or_default();
    Ok(Message::try_from(id)?.content(&delivery.data))
}

async fn handle(
    inbox: &Inbox,
    pool: &PgPool,
    delivery: &Delivery,
    message: Message,
) -> Result<Handled<i64>, HandleError<Failure>> {
    let mut conn = pool.get().await.map_err(|error| HandleError::Failed { error: error.into(), attempts: None })?;
    inbox
        .handle(&mut conn, message, async |conn| {
            let order: i64 = serde_json::from_slice(&delivery.data)?;
            let invoice: i64 = diesel::insert_into(invoices::table)
                .values(invoices::order_id.eq(order))
                .returning(invoices::id)
                .get_result(conn)
                .await?;
            Ok(invoice)
        })
        .await
}

async fn show(pool: &PgPool) -> Result<(), Failure> {
    let mut conn = pool.get().await?;
    let orders: i64 = orders::table.count().get_result(&mut conn).await?;
    let invoices: i64 = invoices::table.count().get_result(&mut conn).await?;
    println!("{orders} orders, {invoices} invoices");
    Ok(())
}

async fn broker() -> Result<Channel, Failure> {
    let url = env::var("AMQP_URL").unwrap_or_else(|_| "amqp://127.0.0.1:5672/%2f".into());
    let connection = Connection::connect(&url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    for queue in [QUEUE, PARKED] {
        channel.queue_declare(queue.into(), QueueDeclareOptions::durable(), FieldTable::default()).await?;
    }
    // It lives as long as the program.
    std::mem::forget(connection);
    Ok(channel)
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL, or start this inside ./with-postgres bash")?;
    migrations::run(&url).await?;
    let pool = pool(&url)?;
    pool.get().await?.batch_execute(TABLES).await?;
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["order"] => order(&pool).await,
        ["order", times] => {
            for _ in 0..times.parse()? {
                order(&pool).await?;
            }
            Ok(())
        }
        ["relay"] => relay(pool, broker().await?).await,
        ["consume"] => consume(pool, broker().await?).await,
        ["show"] => show(&pool).await,
        _ => Err("say `order [TIMES]`, `relay`, `consume` or `show`".into()),
    }
}
