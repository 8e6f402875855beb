//! The event that follows: published with the rows that it tells of, delivered after they are committed.
//!
//! To send a message before the commit tells of what may not happen; to send it after the commit loses it where the
//! process dies in between. [`publish`] writes the event into a table, in the transaction of the caller's: it exists
//! exactly when the business rows do. A [`Relay`] hands it on until somebody has taken it.
//!
//! ```no_run
//! use actix_idempotency::{Event, IdemTx, PgPool, Relay, outbox};
//! use actix_web::{HttpResponse, Result};
//!
//! async fn create(mut tx: IdemTx) -> Result<HttpResponse> {
//!     // ... insert order 7 ...
//!     outbox::publish(&mut tx, "orders", br#"{"order":7}"#).await?;
//!     Ok(HttpResponse::Created().finish())
//! }
//!
//! # async fn send(_: &Event) -> Result<(), Box<dyn std::error::Error + Send + Sync>> { Ok(()) }
//! # async fn example(pool: PgPool) {
//! let relaying = Relay::new(pool, |event: Event| async move {
//!     send(&event).await // to a broker, another service, ...
//! })
//! .spawn();
//! // ...
//! relaying.stop().await;
//! # }
//! ```
//!
//! It works in every transaction: [`IdemTx`](crate::IdemTx), the closure of an [`Inbox`](crate::Inbox), what follows a
//! [`transition`](crate::transition), `conn.transaction(…)`.
//!
//! # At least once
//!
//! A relay that dies between the delivery and the note of it leaves the event to the next one: it is delivered
//! again, with the same [`Event::id`]. A consumer that has an [`Inbox`](crate::Inbox), and takes the event's id for the
//! message id, handles it once.
//!
//! # Order
//!
//! Without a key events are delivered in no order that you could build on. With one ([`publish_in_order`]), events of
//! one topic and key are delivered one after the other, in the order in which they were committed, however many
//! relays there are: the next one begins when the one before has been delivered, and also waits while that is in
//! backoff.
//!
//! The order is real because publishers of one key take turns: numbers are drawn before a commit, and a
//! transaction that has drawn the larger one may commit first. Whoever publishes under a key holds it until the end
//! of the transaction (a transaction-scoped advisory lock); another publisher of the same key waits, for
//! [`TURN_TIMEOUT`] at most. So publish late in the transaction, and choose keys as narrow as the order that you need:
//! that of an order, not that of all orders. Each key takes a place in the server's table of locks until the commit
//! (`max_locks_per_transaction`): not for ten thousand keys in one transaction. And a key has one event on its way at a
//! time, which makes a few hundred a second where the receiver is quick.
//!
//! What comes again comes late: an event whose relay had stalled for longer than its lease can be delivered once
//! more after its successors. The first deliveries are in order, and an inbox drops the repeats.
//!
//! # Events that fail
//!
//! A delivery that returns an error, panics or runs longer than [`Relay::timeout`] is repeated with a growing
//! wait. After [`Relay::max_attempts`] the event is *parked*: it is not tried again until [`unpark`], or is given up by
//! [`discard`]. It holds up the later events of its key, unless [`Relay::skip_parked`] says otherwise.
//!
//! # Lease, not transaction
//!
//! A relay claims an event for a time, by the database's clock, and holds neither a transaction nor a connection of the
//! pool while your function runs. An open transaction would free the event at once if the process died; but it
//! would keep a connection busy for as long as a slow receiver takes, and hold back vacuum for the whole database. The
//! price is that the events of a dead relay wait until their lease ends: [`Relay::timeout`] and ten seconds.

mod error;
mod event;
mod relay;
mod round;

use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBuilder};
use diesel_async::AsyncPgConnection;
pub use uuid::Uuid;

pub use self::{
    error::OutboxError,
    event::Event,
    relay::{
        DEFAULT_DELIVERY_TIMEOUT, DEFAULT_MAX_DELIVERIES, DEFAULT_RELAY_BATCH, DEFAULT_RELAY_INTERVAL, MAX_WAIT,
        MIN_WAIT, Relay, Relayed, Relaying,
    },
};
use crate::{
    digest::Digest,
    inbox::check_id,
    postgres::{
        guarded::is_in_transaction,
        outbox::{self as sql, NewEvent},
    },
};

/// The largest payload: 1 MiB. An event tells of something; what is larger has a place of its own.
pub const MAX_PAYLOAD_LENGTH: usize = 1024 * 1024;
/// How long a publisher waits for others of the same key: five seconds, as statements of this crate do.
pub const TURN_TIMEOUT: Duration = Duration::from_secs(5);

/// Writes an event in the transaction of the caller's: its id.
///
/// # Errors
///
/// See [`OutboxError`].
pub async fn publish(
    conn: &mut AsyncPgConnection,
    topic: &str,
    payload: impl AsRef<[u8]>,
) -> Result<Uuid, OutboxError> {
    write(conn, topic, None, payload.as_ref()).await
}

/// The same for an event that is delivered after all that were committed before it with the same topic and key; see
/// [Order](self#order).
///
/// ```no_run
/// # use actix_idempotency::{IdemTx, outbox};
/// # async fn example(mut tx: IdemTx) -> actix_web::Result<()> {
/// outbox::publish_in_order(&mut tx, "orders", "order-7", r#"{"state":"paid"}"#).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// See [`OutboxError`].
pub async fn publish_in_order(
    conn: &mut AsyncPgConnection,
    topic: &str,
    key: &str,
    payload: impl AsRef<[u8]>,
) -> Result<Uuid, OutboxError> {
    write(conn, topic, Some(key), payload.as_ref()).await
}

async fn write(
    conn: &mut AsyncPgConnection,
    topic: &str,
    key: Option<&str>,
    payload: &[u8],
) -> Result<Uuid, OutboxError> {
    for name in [Some(topic), key].into_iter().flatten() {
        check_id(name).map_err(OutboxError::InvalidName)?;
    }
    if payload.len() > MAX_PAYLOAD_LENGTH {
        return Err(OutboxError::PayloadTooLarge);
    }
    if !is_in_transaction(conn) {
        return Err(OutboxError::NoTransaction);
    }
    let new = NewEvent { topic, key, payload, lock: key.map(|key| lock(topic, key)).unwrap_or_default() };
    let began = Instant::now();
    let mut waits = turns();
    loop {
        if let Some(id) = sql::publish(conn, new).await? {
            return Ok(event::id_of(&id));
        }
        match waits.next() {
            Some(wait) if began.elapsed() < TURN_TIMEOUT => tokio::time::sleep(wait).await,
            _ => return Err(OutboxError::KeyBusy),
        }
    }
}

/// 64 bits of a digest: two keys that share them take turns for nothing.
fn lock(topic: &str, key: &str) -> i64 {
    let mut digest = Digest::new("actix-idempotency outbox key 1");
    digest.part(topic).part(key);
    let [a, b, c, d, e, f, g, h, ..] = digest.finish();
    i64::from_be_bytes([a, b, c, d, e, f, g, h])
}

fn turns() -> impl Iterator<Item = Duration> {
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(2))
        .with_max_delay(Duration::from_millis(50))
        .without_max_times()
        .with_jitter()
        .build()
}

/// The first parked events, in the order of their publication.
///
/// # Errors
///
/// [`OutboxError::Query`].
pub async fn parked(conn: &mut AsyncPgConnection, limit: u32) -> Result<Vec<Event>, OutboxError> {
    let events = sql::parked(conn, limit.into()).await?;
    Ok(events.into_iter().map(Event::from).collect())
}

/// Lets a parked event be delivered again, with its attempts counted anew. `false` where there is none with this id.
///
/// # Errors
///
/// [`OutboxError::Query`].
pub async fn unpark(conn: &mut AsyncPgConnection, id: Uuid) -> Result<bool, OutboxError> {
    Ok(sql::unpark(conn, &id.to_string()).await?)
}

/// Gives up a parked event: it is deleted, and those behind it go on. `false` where there is none with this id.
///
/// # Errors
///
/// [`OutboxError::Query`].
pub async fn discard(conn: &mut AsyncPgConnection, id: Uuid) -> Result<bool, OutboxError> {
    Ok(sql::discard(conn, &id.to_string()).await?)
}
