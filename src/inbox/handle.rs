//! The comfortable form: a transaction with the mark, around what the message does.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, resume_unwind},
};

use diesel::result::Error as QueryError;
use diesel_async::AsyncPgConnection;
use futures_util::FutureExt as _;

use super::{HandleError, Inbox, InboxError, Message};
use crate::{
    error::words::{is_lock_timeout, is_lost_race},
    failpoint,
    postgres::{
        guarded::{TRIES, is_in_transaction},
        inbox, savepoint,
        transactions::depth,
    },
    telemetry,
};

/// What became of a message. Either way it can be acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Handled<T> {
    /// By this call: what the closure wrote is committed, and this is what it returned.
    Handled(T),
    /// Before: the closure did not run.
    Duplicate,
}

impl<T> Handled<T> {
    /// What the closure returned, if it ran.
    #[must_use]
    pub fn handled(self) -> Option<T> {
        match self {
            Self::Handled(value) => Some(value),
            Self::Duplicate => None,
        }
    }
}

impl Inbox {
    /// Handles a message: begins a transaction (a savepoint inside one of the caller's), marks the message, runs
    /// `work` with the connection, and commits both. See [the module](super) for an example.
    ///
    /// With an id alone, `&str` or `String`, or with a [`Message`] that knows its content.
    ///
    /// Dropped half-way, nothing is committed, and the connection is not used again by its pool; a drop while
    /// COMMIT is on its way leaves both, or neither. Inside a transaction of the caller's nothing is committed
    /// before that is, and the count of a failed attempt is part of it as well.
    ///
    /// # Errors
    ///
    /// See [`HandleError`]. Whatever `work` has written is rolled back with the mark. An `Ok` of a closure that
    /// has swallowed the error of a statement is a failure too.
    pub async fn handle<M, T, E>(
        &self,
        conn: &mut AsyncPgConnection,
        message: M,
        work: impl AsyncFnOnce(&mut AsyncPgConnection) -> Result<T, E>,
    ) -> Result<Handled<T>, HandleError<E>>
    where
        M: TryInto<Message, Error: Into<InboxError>>,
        E: From<InboxError>,
    {
        let message = message.try_into().map_err(Into::into)?;
        let Some(attempts) = self.begin(conn, &message).await? else {
            return Ok(Handled::Duplicate);
        };
        if attempts >= self.max_attempts {
            savepoint::roll_back(conn).await.map_err(InboxError::from)?;
            return Err(HandleError::Park { error: None, attempts });
        }
        failpoint::reach("message-marked");
        let depth_before = depth(conn);
        let error = match AssertUnwindSafe(work(conn)).catch_unwind().await {
            Ok(Ok(value)) => {
                failpoint::reach("message-handled");
                match self.commit(conn, depth_before, &[message.id()]).await {
                    Ok(()) => return Ok(Handled::Handled(value)),
                    Err(error) if error.is_the_messages() => Ok(error.into()),
                    Err(error) => return Err(HandleError::Inbox(error)),
                }
            }
            Ok(Err(error)) => {
                roll_back_to(conn, depth_before).await;
                Ok(error)
            }
            Err(panic) => {
                roll_back_to(conn, depth_before).await;
                Err(panic)
            }
        };
        let attempts = self.count(conn, &message).await;
        match error {
            Ok(error) => Err(self.failed(error, attempts)),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Begins, and leaves the transaction open where the message is new: the failed attempts so far. `None`
    /// where it has been handled.
    pub(super) async fn begin(
        &self,
        conn: &mut AsyncPgConnection,
        message: &Message,
    ) -> Result<Option<u32>, InboxError> {
        let is_nested = is_in_transaction(conn);
        let mut tries = 1..TRIES;
        loop {
            savepoint::begin(conn).await?;
            match self.mark(conn, message).await {
                Ok(Some(attempts)) => return Ok(Some(attempts)),
                Ok(None) => {
                    savepoint::roll_back(conn).await?;
                    return Ok(None);
                }
                Err(error) => {
                    savepoint::roll_back(conn).await?;
                    let again = matches!(error, InboxError::Serialization) && !is_nested && tries.next().is_some();
                    if !again {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Marks one message: the failed attempts so far, or `None` where it has been marked before.
    pub(super) async fn mark(
        &self,
        conn: &mut AsyncPgConnection,
        message: &Message,
    ) -> Result<Option<u32>, InboxError> {
        let marked = self.mark_all(conn, &[message]).await.map_err(|(_, error)| error)?;
        Ok(marked.get(message.id()).copied())
    }

    /// Marks messages with different ids, sorted: those that are new, with their failed attempts. An error
    /// names the message that it is about, where it is one's.
    pub(super) async fn mark_all(
        &self,
        conn: &mut AsyncPgConnection,
        messages: &[&Message],
    ) -> Result<HashMap<String, u32>, (Option<String>, InboxError)> {
        // `receive` marks in a savepoint of the caller's transaction.
        let is_ours = depth(conn) == Some(1);
        let mut marked = HashMap::with_capacity(messages.len());
        let mut left = messages.to_vec();
        for _ in 0..TRIES {
            let ids: Vec<&str> = left.iter().map(|message| message.id()).collect();
            let fingerprints: Vec<_> = left.iter().map(|message| message.fingerprint()).collect();
            let new = inbox::mark(conn, self.marks(is_ours), &ids, &fingerprints)
                .await
                .map_err(|error| (None, explain(error)))?;
            marked.extend(new.into_iter().map(|(id, attempts)| (id, u32::try_from(attempts).unwrap_or_default())));
            left.retain(|message| !marked.contains_key(message.id()));
            if left.is_empty() {
                return Ok(marked);
            }
            // A statement of its own: one together with the insert would not see who was first.
            let ids: Vec<&str> = left.iter().map(|message| message.id()).collect();
            let known = inbox::look(conn, &self.consumer, &ids).await.map_err(|error| (None, error.into()))?;
            for message in &left {
                if let (Some(Some(known)), Some(given)) = (known.get(message.id()), message.fingerprint())
                    && known != given
                {
                    return Err((Some(message.id().to_owned()), InboxError::Mismatch));
                }
            }
            // Those that nobody sees have expired and gone meanwhile.
            left.retain(|message| !known.contains_key(message.id()));
            if left.is_empty() {
                return Ok(marked);
            }
        }
        Err((None, InboxError::InProgress))
    }

    /// Ends what [`begin`](Self::begin) began with a success, or rolls it back.
    pub(super) async fn commit(
        &self,
        conn: &mut AsyncPgConnection,
        depth_before: Option<u32>,
        ids: &[&str],
    ) -> Result<(), InboxError> {
        if depth_before.is_none() || depth(conn) != depth_before {
            roll_back_to(conn, depth_before).await;
            return Err(InboxError::TransactionMisused);
        }
        // Where code of the caller's has run, COMMIT needs a checked statement right before it.
        let done = match inbox::done(conn, &self.consumer, ids).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(InboxError::TransactionMisused),
            Err(error) => Err(error.into()),
        };
        failpoint::reach("message-done");
        let ended = savepoint::end(conn, done).await;
        failpoint::reach("message-committed");
        ended
    }

    /// Counts a failed attempt. `None` where that fails too, of which the log tells.
    pub(super) async fn count(&self, conn: &mut AsyncPgConnection, message: &Message) -> Option<u32> {
        let is_nested = is_in_transaction(conn);
        for _ in 0..TRIES {
            let counted = async {
                savepoint::begin(conn).await?;
                let counted = inbox::count(conn, self.marks(false), message.id()).await;
                savepoint::end(conn, counted).await
            };
            match counted.await {
                Ok(attempts) => return u32::try_from(attempts).ok(),
                Err(error) if is_lost_race(&error) && !is_nested => {}
                Err(error) => {
                    telemetry::store_failed("a failed attempt at a message could not be counted", &error.into());
                    return None;
                }
            }
        }
        None
    }

    pub(super) fn failed<E>(&self, error: E, attempts: Option<u32>) -> HandleError<E> {
        match attempts {
            Some(attempts) if attempts >= self.max_attempts => {
                telemetry::message_parked(&self.consumer, attempts);
                HandleError::Park { error: Some(error), attempts }
            }
            attempts => HandleError::Failed { error, attempts },
        }
    }
}

fn explain(error: QueryError) -> InboxError {
    if is_lock_timeout(&error) { InboxError::InProgress } else { error.into() }
}

/// Rolls back what [`Inbox::begin`] has begun, and whatever the closure has begun in it. Where that fails the
/// connection is broken, and says so to whoever uses it next.
pub(super) async fn roll_back_to(conn: &mut AsyncPgConnection, depth_before: Option<u32>) {
    let Some(ours) = depth_before else { return };
    while depth(conn).is_some_and(|depth| depth >= ours) {
        if let Err(error) = savepoint::roll_back(conn).await {
            telemetry::store_failed("a transaction of the inbox could not be rolled back", &error.into());
            return;
        }
    }
}
