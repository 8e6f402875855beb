//! From the outbox through a real broker to the inbox. With `REPEAT=full`, or where `IT_REQUIRE` lists
//! rabbitmq-server; what a broker does is otherwise done by `support/queue.rs`, in `inbox.rs` and `outbox.rs`.

use std::{env, time::Duration};

use actix_idempotency::{
    Event, Handled, Inbox, InboxError, PgPool, Relay,
    inbox::{HandleError, Message},
    outbox,
};
use actix_web::rt::{self, time::timeout};
use diesel::sql_types::Text;
use diesel_async::{AsyncConnection, RunQueryDsl};
use futures_util::StreamExt;
use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties,
    options::{
        BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicPublishOptions, BasicQosOptions,
        ConfirmSelectOptions, QueueDeclareOptions,
    },
    types::FieldTable,
};

use crate::support::{
    db::{Db, pool},
    points,
    rabbit::Rabbit,
    worker::Worker,
};

const QUEUE: &str = "orders";

async fn channel(url: &str) -> (Connection, Channel) {
    let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    channel.queue_declare(QUEUE.into(), QueueDeclareOptions::durable(), FieldTable::default()).await.unwrap();
    (connection, channel)
}

async fn send(channel: Channel, event: Event) -> Result<(), lapin::Error> {
    let properties = BasicProperties::default().with_message_id(event.id.to_string().into()).with_delivery_mode(2);
    let options = BasicPublishOptions::default();
    let confirm = channel.basic_publish("".into(), QUEUE.into(), options, &event.payload, properties).await?;
    assert!(confirm.await?.is_ack());
    Ok(())
}

/// Until nothing has come for a while: what became of each, and whether it was a redelivery.
async fn consume(pool: &PgPool, url: &str, patience: Duration) -> Vec<(Handled<()>, bool)> {
    let (_connection, channel) = channel(url).await;
    channel.basic_qos(1, BasicQosOptions::default()).await.unwrap();
    let options = BasicConsumeOptions::default();
    let mut deliveries = channel.basic_consume(QUEUE.into(), "".into(), options, FieldTable::default()).await.unwrap();
    let mut outcomes = Vec::new();
    while let Ok(Some(delivery)) = timeout(patience, deliveries.next()).await {
        let delivery = delivery.unwrap();
        let id = delivery.properties.message_id().as_ref().unwrap().to_string();
        let message = Message::try_from(id).unwrap().content(&delivery.data);
        let mut conn = pool.get().await.unwrap();
        let handled = Inbox::new("c1")
            .handle(&mut conn, message, async |conn| {
                diesel::sql_query("INSERT INTO effects (tag) VALUES ($1)")
                    .bind::<Text, _>(std::str::from_utf8(&delivery.data).unwrap())
                    .execute(conn)
                    .await?;
                Ok::<_, InboxError>(())
            })
            .await;
        match handled {
            Ok(handled) => {
                points::reach("before-acknowledge");
                delivery.ack(BasicAckOptions::default()).await.unwrap();
                outcomes.push((handled, delivery.redelivered));
            }
            // The transaction of the one that was killed has not ended yet.
            Err(HandleError::Inbox(InboxError::InProgress)) => {
                delivery.nack(BasicNackOptions { requeue: true, ..Default::default() }).await.unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
    outcomes
}

/// The other process. Among the tests it finds no IT_RABBIT and is done.
#[test]
fn consume_if_asked() {
    let Ok(broker) = env::var("IT_RABBIT") else { return };
    let url = env::var("IT_CONSUME_BY").unwrap();
    points::obey();
    rt::System::new().block_on(async { consume(&pool(&url, 1), &broker, Duration::from_secs(3600)).await });
}

/// I02, with a broker.
#[actix_web::test]
async fn a_consumer_that_is_killed_before_its_acknowledgement_gets_a_duplicate() {
    let Some(rabbit) = Rabbit::start().await else { return };
    let (db, url) = (Db::new().await, rabbit.url());
    let conn = &mut db.connect().await;
    for tag in ["a", "b", "c"] {
        conn.transaction(async |conn| outbox::publish_in_order(conn, QUEUE, "k", tag).await).await.unwrap();
    }
    let mut doomed = Worker::start("rabbit::consume_if_asked", &[("IT_RABBIT", &url), ("IT_CONSUME_BY", &db.url)]);
    doomed.stop_at("before-acknowledge", 2).await;
    let (connection, channel) = channel(&url).await;
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let relayed = Relay::new(db.pool(1), move |event| send(channel.clone(), event)).relay_once().await.unwrap();
    assert_eq!((relayed.delivered, relayed.failed), (3, 0));
    doomed.stopped_at("before-acknowledge").await;
    assert_eq!((db.effects("a").await, db.effects("b").await, db.effects("c").await), (1, 1, 0));
    doomed.kill();

    let outcomes = consume(&db.pool(1), &url, Duration::from_secs(3)).await;
    assert_eq!(outcomes, [(Handled::Duplicate, true), (Handled::Handled(()), false)]);
    // Acknowledged: nothing is left for anybody.
    assert!(consume(&db.pool(1), &url, Duration::from_secs(1)).await.is_empty());
    assert!(db.is("(SELECT array_agg(tag ORDER BY id) = '{a,b,c}' FROM effects)").await);
    connection.close(200, "done".into()).await.unwrap();
}
