//! One message, one effect: for consumers of brokers that deliver at least once.
//!
//! Every broker delivers a message again when it has not heard that the message was handled: after a crash
//! between the commit and the acknowledgement, after a lost connection, after a rebalancing. The mark of an
//! [`Inbox`] commits in the same transaction as what the message does, so that a redelivery finds both or
//! neither:
//!
//! ```no_run
//! use actix_idempotency::inbox::{Handled, Inbox};
//! use diesel::prelude::*;
//! use diesel_async::{AsyncPgConnection, RunQueryDsl};
//!
//! diesel::table! { invoices (order_id) { order_id -> BigInt, } }
//!
//! # struct Delivery { id: String, order_id: i64 }
//! # impl Delivery { async fn ack(self) {} async fn give_back(self) {} async fn park(self) {} }
//! async fn consume(inbox: &Inbox, conn: &mut AsyncPgConnection, delivery: Delivery) {
//!     let handled = inbox
//!         .handle(conn, &delivery.id, async |conn| {
//!             diesel::insert_into(invoices::table)
//!                 .values(invoices::order_id.eq(delivery.order_id))
//!                 .execute(conn)
//!                 .await?;
//!             Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
//!         })
//!         .await;
//!     match handled {
//!         Ok(Handled::Handled(()) | Handled::Duplicate) => delivery.ack().await, // after the commit
//!         Err(error) if error.is_to_be_parked() => delivery.park().await,
//!         Err(_) => delivery.give_back().await,
//!     }
//! }
//! ```
//!
//! Where the consumer has a transaction of its own, [`Inbox::receive`] is one call in it.
//!
//! # What is promised
//!
//! For one consumer and one message id, from the commit until the [`retention`](Inbox::retention) ends, what the
//! closure writes through its connection is committed once. What it does elsewhere (an e-mail, a call) happens at
//! least once: publish an event for it ([`outbox`](crate::outbox)), whose consumer has an inbox of its own.
//!
//! # Copies that come together
//!
//! The second waits for the first, for [`Inbox::wait`] at most, in the database and with its own transaction
//! intact. Then it is `First` (the other has rolled back), `Duplicate` (it has committed), or
//! [`InboxError::InProgress`]. Above READ COMMITTED a transaction cannot see what was committed after its first
//! statement: [`InboxError::Serialization`]; [`Inbox::handle`] begins anew by itself, unless it was called
//! inside a transaction.
//!
//! # Retention
//!
//! How long a mark is kept decides what is right, not only how large the table is: a message that is
//! delivered after its mark has gone is handled again. Seven days by default, longer than brokers keep what
//! nobody acknowledges; more where yours keeps more, or where people replay old messages.
//!
//! It counts from the handling, by the database's clock. A redelivery does not extend it. It is a lower bound:
//! the mark lasts until a [`Sweeper`](crate::Sweeper) has deleted it, and a message that was not handled leaves
//! none. Sweepers (the one of an `Idempotency` engine, or `Sweeper::new(pool).spawn()` beside a consumer that
//! serves no requests) look after inboxes by themselves. A sweeper's first round comes one interval after its start, so
//! that a consumer that was down for longer than the retention meets its redeliveries before the marks
//! go; with several processes sweeping, do not count on that.
//!
//! # Messages that fail
//!
//! The closure's error rolls everything back, and the mark with it: the next delivery runs. The failed attempt
//! is counted afterwards, in a transaction of its own. After [`Inbox::max_attempts`] the consumer is told to
//! [park](HandleError::Park) it, and from then on it is not run again until [`Inbox::forgive`]. A panic counts
//! as well, and goes on. So does an error of the closure that is a lost race (40001): where the default isolation is
//! SERIALIZABLE, allow more attempts. A process that dies, or a future that is dropped, counts nothing: limit the
//! redeliveries of your broker too (`x-delivery-limit` of RabbitMQ's quorum queues).

mod batch;
mod error;
mod handle;
mod message;

use std::time::Duration;

use diesel_async::AsyncPgConnection;

pub(crate) use self::message::check as check_id;
pub use self::{
    batch::BatchError,
    error::{HandleError, InboxError},
    handle::Handled,
    message::{InvalidMessageId, MAX_MESSAGE_ID_LENGTH, Message},
};
pub use crate::policy::DEFAULT_IDLE_IN_TRANSACTION;
use crate::postgres::{guarded::is_in_transaction, inbox::Marks, savepoint};

/// How long a mark is kept: seven days. Longer than brokers hold on to what is not acknowledged, and than an
/// outage of a consumer should last.
pub const DEFAULT_INBOX_RETENTION: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// How long one copy of a message waits for another: half a second. Most handlers are done by then, and it is
/// shorter than the second after which Postgres looks for deadlocks.
pub const DEFAULT_INBOX_WAIT: Duration = Duration::from_millis(500);
/// How often a message may fail: ten times, so that a bad minute of the service parks none.
pub const DEFAULT_MAX_ATTEMPTS: u32 = 10;

/// The messages that one consumer has handled. See [the module](self).
///
/// Another consumer, another name: each handles every message once. Instances of one service have the same name.
///
/// ```
/// use std::time::Duration;
/// use actix_idempotency::Inbox;
///
/// let inbox = Inbox::new("billing");
///
/// let patient = Inbox::new("billing")
///     .retention(Duration::from_secs(30 * 24 * 60 * 60))
///     .wait(Duration::from_secs(5))
///     .max_attempts(3);
/// ```
#[derive(Debug, Clone)]
pub struct Inbox {
    consumer: String,
    retention: Option<Duration>,
    wait: Duration,
    idle_in_transaction: Duration,
    max_attempts: u32,
}

impl Inbox {
    /// The inbox of the consumer with this name, with the defaults.
    ///
    /// # Panics
    ///
    /// If the name could be no message id either: see [`InvalidMessageId`].
    #[track_caller]
    #[must_use]
    pub fn new(consumer: impl Into<String>) -> Self {
        let consumer = consumer.into();
        if let Err(invalid) = message::check(&consumer) {
            panic!("Inbox::new: the name of a consumer obeys the rules of a message id: {invalid}");
        }
        Self {
            consumer,
            retention: Some(DEFAULT_INBOX_RETENTION),
            wait: DEFAULT_INBOX_WAIT,
            idle_in_transaction: DEFAULT_IDLE_IN_TRANSACTION,
            max_attempts: DEFAULT_MAX_ATTEMPTS,
        }
    }

    /// How long a handled message is remembered, from its handling; see [Retention](self#retention). Counts of
    /// failed attempts are kept as long, from the last one. Default: [`DEFAULT_INBOX_RETENTION`].
    ///
    /// # Panics
    ///
    /// Below one second, and above 100 years.
    #[track_caller]
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        let max = Duration::from_secs(100 * 365 * 24 * 60 * 60);
        assert!(
            (Duration::from_secs(1)..=max).contains(&retention),
            "Inbox::retention: {retention:?} is not between 1 s and 100 years"
        );
        self.retention = Some(retention);
        self
    }

    /// Remembers handled messages for ever. The table grows with every message.
    #[must_use]
    pub fn retain_forever(mut self) -> Self {
        self.retention = None;
        self
    }

    /// How long a copy of a message waits for another one that is being handled; it holds its connection
    /// meanwhile. Default: [`DEFAULT_INBOX_WAIT`].
    ///
    /// # Panics
    ///
    /// Above one hour. Zero is no wait.
    #[track_caller]
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        assert!(wait <= Duration::from_secs(60 * 60), "Inbox::wait: {wait:?} is more than one hour");
        self.wait = wait;
        self
    }

    /// How long the transaction of [`handle`](Self::handle) may be idle, between two statements of the closure, before
    /// Postgres ends it: a consumer that stalls, or that the network has cut off, does not keep its message from the
    /// others for longer. Inside a transaction of the caller's, that one's setting stays. Default:
    /// [`DEFAULT_IDLE_IN_TRANSACTION`], as for an [`IdemTx`](crate::IdemTx).
    ///
    /// # Panics
    ///
    /// Below one millisecond, and above one day.
    #[track_caller]
    #[must_use]
    pub fn idle_in_transaction(mut self, idle: Duration) -> Self {
        let day = Duration::from_secs(24 * 60 * 60);
        assert!(
            (Duration::from_millis(1)..=day).contains(&idle),
            "Inbox::idle_in_transaction: {idle:?} is not between 1 ms and one day"
        );
        self.idle_in_transaction = idle;
        self
    }

    /// How often a message may fail until it is to be parked. Default: [`DEFAULT_MAX_ATTEMPTS`].
    ///
    /// # Panics
    ///
    /// With none.
    #[track_caller]
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        assert!(attempts > 0, "Inbox::max_attempts: at least one attempt");
        self.max_attempts = attempts;
        self
    }

    /// The name.
    #[must_use]
    pub fn consumer(&self) -> &str {
        &self.consumer
    }

    /// Marks a message as handled in the transaction of the caller's, or finds that it is marked. What the
    /// message does is written in the same transaction, after this.
    ///
    /// ```no_run
    /// # use actix_idempotency::inbox::{Inbox, InboxError, Received};
    /// # use diesel_async::{AsyncConnection, AsyncPgConnection};
    /// # async fn example(inbox: &Inbox, conn: &mut AsyncPgConnection) -> Result<(), InboxError> {
    /// conn.transaction(async |conn| {
    ///     match inbox.receive(conn, "m1").await? {
    ///         Received::First => { /* your statements */ }
    ///         Received::Duplicate => {}
    ///     }
    ///     Ok::<_, InboxError>(())
    /// })
    /// .await?; // then acknowledge
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// It costs three round trips, two of which keep the caller's transaction whole whatever happens;
    /// [`handle`](Self::handle) does without these. It neither counts attempts nor looks at their count.
    ///
    /// # Errors
    ///
    /// See [`InboxError`]. Nothing is marked then, and the transaction can go on.
    pub async fn receive<M>(&self, conn: &mut AsyncPgConnection, message: M) -> Result<Received, InboxError>
    where
        M: TryInto<Message, Error: Into<InboxError>>,
    {
        let message = message.try_into().map_err(Into::into)?;
        if !is_in_transaction(conn) {
            return Err(InboxError::NoTransaction);
        }
        savepoint::begin(conn).await?;
        let received = self.mark(conn, &message).await.map(|marked| match marked {
            Some(_) => Received::First,
            None => Received::Duplicate,
        });
        savepoint::end(conn, received).await
    }

    /// Lets a message that was to be parked run again. `false` where it has not failed.
    ///
    /// # Errors
    ///
    /// [`InboxError::InvalidId`], [`InboxError::Query`].
    pub async fn forgive<M>(&self, conn: &mut AsyncPgConnection, message: M) -> Result<bool, InboxError>
    where
        M: TryInto<Message, Error: Into<InboxError>>,
    {
        let message = message.try_into().map_err(Into::into)?;
        Ok(crate::postgres::inbox::forgive(conn, &self.consumer, message.id()).await?)
    }

    fn marks(&self, is_ours: bool) -> Marks<'_> {
        let millis = |duration: Duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
        // Zero would be no limit.
        Marks {
            consumer: &self.consumer,
            retention_ms: self.retention.map(millis),
            patience_ms: millis(self.wait).max(1),
            idle_ms: is_ours.then(|| millis(self.idle_in_transaction)),
        }
    }
}

/// Whether a message is new to its consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a duplicate must not be handled again"]
pub enum Received {
    /// It is, and marked now: handle it.
    First,
    /// It was handled before: acknowledge it.
    Duplicate,
}
