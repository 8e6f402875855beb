//! Many messages: all of them or none, or each for itself.

use std::{
    collections::{HashMap, hash_map::Entry},
    error::Error as StdError,
    fmt,
    panic::{AssertUnwindSafe, resume_unwind},
};

use diesel::result::Error as QueryError;
use diesel_async::AsyncPgConnection;
use futures_util::FutureExt as _;

use super::{HandleError, Handled, Inbox, InboxError, Message, Received, handle::roll_back_to};
use crate::postgres::{
    guarded::{TRIES, is_in_transaction},
    savepoint,
    transactions::depth,
};

impl Inbox {
    /// [`receive`](Self::receive) for many messages by one statement, all or nothing: what each of them is, in
    /// the order given. The second of two copies in one batch is a duplicate.
    ///
    /// Marks are written in the order of the ids, whatever order these are given in, so that two batches never
    /// wait for each other in a circle.
    ///
    /// # Errors
    ///
    /// See [`BatchError`]. Nothing is marked then, and the transaction can go on.
    pub async fn receive_all<M>(
        &self,
        conn: &mut AsyncPgConnection,
        messages: impl IntoIterator<Item = M>,
    ) -> Result<Vec<Received>, BatchError<InboxError>>
    where
        M: TryInto<Message, Error: Into<InboxError>>,
    {
        let batch = Batch::of(messages)?;
        if !is_in_transaction(conn) {
            return Err(InboxError::NoTransaction.into());
        }
        savepoint::begin(conn).await?;
        let marked = batch.mark(self, conn).await;
        let marked = savepoint::end(conn, marked).await?;
        Ok(batch.received(&marked))
    }

    /// [`handle`](Self::handle) for many messages in one transaction, all or nothing. `work` is called for those
    /// that are new, in the order given, with the place of each.
    ///
    /// ```no_run
    /// # use actix_idempotency::inbox::{Handled, Inbox, InboxError};
    /// # use diesel_async::AsyncPgConnection;
    /// # struct Delivery { id: String }
    /// # async fn store(_: &mut AsyncPgConnection, _: &Delivery) -> Result<(), InboxError> { Ok(()) }
    /// # async fn example(inbox: &Inbox, conn: &mut AsyncPgConnection, deliveries: Vec<Delivery>) {
    /// let ids = deliveries.iter().map(|delivery| &delivery.id);
    /// match inbox.handle_all(conn, ids, async |conn, n| store(conn, &deliveries[n]).await).await {
    ///     Ok(_) => { /* acknowledge all of them */ }
    ///     Err(error) => println!("nothing was done, because of message {:?}", error.index),
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Of the first message that cannot be handled; then none is. See [`BatchError`].
    pub async fn handle_all<M, T, E>(
        &self,
        conn: &mut AsyncPgConnection,
        messages: impl IntoIterator<Item = M>,
        mut work: impl AsyncFnMut(&mut AsyncPgConnection, usize) -> Result<T, E>,
    ) -> Result<Vec<Handled<T>>, BatchError<HandleError<E>>>
    where
        M: TryInto<Message, Error: Into<InboxError>>,
        E: From<InboxError>,
    {
        let batch = Batch::of(messages)?;
        let marked = self.begin_all(conn, &batch).await?;
        let depth_before = depth(conn);
        let mut handled = Vec::with_capacity(batch.messages.len());
        for (index, received) in batch.received(&marked).into_iter().enumerate() {
            if received == Received::Duplicate {
                handled.push(Handled::Duplicate);
                continue;
            }
            let message = &batch.messages[index];
            let attempts = marked.get(message.id()).copied().unwrap_or_default();
            if attempts >= self.max_attempts {
                roll_back_to(conn, depth_before).await;
                return Err(BatchError { index: Some(index), error: HandleError::Park { error: None, attempts } });
            }
            let failure = match AssertUnwindSafe(work(conn, index)).catch_unwind().await {
                Ok(Ok(value)) => {
                    handled.push(Handled::Handled(value));
                    continue;
                }
                Ok(Err(error)) => Ok(error),
                Err(panic) => Err(panic),
            };
            roll_back_to(conn, depth_before).await;
            let attempts = self.count(conn, message).await;
            match failure {
                Ok(error) => return Err(BatchError { index: Some(index), error: self.failed(error, attempts) }),
                Err(panic) => resume_unwind(panic),
            }
        }
        let ids: Vec<&str> = marked.keys().map(String::as_str).collect();
        match self.commit(conn, depth_before, &ids).await {
            Ok(()) => Ok(handled),
            Err(error) if error.is_the_messages() => {
                Err(BatchError { index: None, error: HandleError::Failed { error: error.into(), attempts: None } })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// [`handle`](Self::handle) for many messages, each in a transaction of its own and in the order given:
    /// what became of each. One that fails does not stop the others.
    pub async fn handle_each<M, T, E>(
        &self,
        conn: &mut AsyncPgConnection,
        messages: impl IntoIterator<Item = M>,
        mut work: impl AsyncFnMut(&mut AsyncPgConnection, usize) -> Result<T, E>,
    ) -> Vec<Result<Handled<T>, HandleError<E>>>
    where
        M: TryInto<Message, Error: Into<InboxError>>,
        E: From<InboxError>,
    {
        let mut outcomes = Vec::new();
        for (index, message) in messages.into_iter().enumerate() {
            outcomes.push(self.handle(conn, message, async |conn| work(conn, index).await).await);
        }
        outcomes
    }

    /// Begins, marks those that are new, and leaves the transaction open.
    async fn begin_all(
        &self,
        conn: &mut AsyncPgConnection,
        batch: &Batch,
    ) -> Result<HashMap<String, u32>, BatchError<InboxError>> {
        let is_nested = is_in_transaction(conn);
        let mut tries = 1..TRIES;
        loop {
            savepoint::begin(conn).await?;
            let error = match batch.mark(self, conn).await {
                Ok(marked) => return Ok(marked),
                Err(error) => error,
            };
            savepoint::roll_back(conn).await?;
            let again = matches!(error.error, InboxError::Serialization) && !is_nested && tries.next().is_some();
            if !again {
                return Err(error);
            }
        }
    }
}

/// Messages that came together.
struct Batch {
    messages: Vec<Message>,
    /// Where each id comes first.
    first: HashMap<String, usize>,
}

impl Batch {
    fn of<M>(messages: impl IntoIterator<Item = M>) -> Result<Self, BatchError<InboxError>>
    where
        M: TryInto<Message, Error: Into<InboxError>>,
    {
        let mut batch = Self { messages: Vec::new(), first: HashMap::new() };
        for (index, message) in messages.into_iter().enumerate() {
            let about = |error| BatchError { index: Some(index), error };
            let message = message.try_into().map_err(|error| about(error.into()))?;
            match batch.first.entry(message.id().to_owned()) {
                Entry::Vacant(entry) => drop(entry.insert(index)),
                Entry::Occupied(entry) => {
                    if let (Some(first), Some(this)) =
                        (batch.messages[*entry.get()].fingerprint(), message.fingerprint())
                        && first != this
                    {
                        return Err(about(InboxError::Mismatch));
                    }
                }
            }
            batch.messages.push(message);
        }
        Ok(batch)
    }

    async fn mark(
        &self,
        inbox: &Inbox,
        conn: &mut AsyncPgConnection,
    ) -> Result<HashMap<String, u32>, BatchError<InboxError>> {
        let mut sorted: Vec<&Message> = self.first.values().map(|first| &self.messages[*first]).collect();
        sorted.sort_by_key(|message| message.id());
        inbox
            .mark_all(conn, &sorted)
            .await
            .map_err(|(id, error)| BatchError { index: id.and_then(|id| self.first.get(&id).copied()), error })
    }

    fn received(&self, marked: &HashMap<String, u32>) -> Vec<Received> {
        let is_first = |(index, message): (usize, &Message)| {
            self.first.get(message.id()) == Some(&index) && marked.contains_key(message.id())
        };
        let received = |is_first| if is_first { Received::First } else { Received::Duplicate };
        self.messages.iter().enumerate().map(is_first).map(received).collect()
    }
}

/// Why nothing was done of a batch.
#[derive(Debug)]
#[non_exhaustive]
pub struct BatchError<E> {
    /// The place of the message that it is about, counted from 0. `None` where it is about none of them alone: the
    /// connection, a copy that is being handled elsewhere, a failure at COMMIT;
    /// [`handle_each`](Inbox::handle_each) tells which message it is.
    pub index: Option<usize>,
    /// What is wrong.
    pub error: E,
}

impl<E: fmt::Display> fmt::Display for BatchError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index {
            Some(index) => write!(f, "nothing was done, because of message {index}: {}", self.error),
            None => write!(f, "nothing was done: {}", self.error),
        }
    }
}

impl<E: StdError + 'static> StdError for BatchError<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.error)
    }
}

impl From<InboxError> for BatchError<InboxError> {
    fn from(error: InboxError) -> Self {
        Self { index: None, error }
    }
}

impl<E> From<InboxError> for BatchError<HandleError<E>> {
    fn from(error: InboxError) -> Self {
        Self { index: None, error: error.into() }
    }
}

impl<E> From<BatchError<InboxError>> for BatchError<HandleError<E>> {
    fn from(BatchError { index, error }: BatchError<InboxError>) -> Self {
        Self { index, error: error.into() }
    }
}

impl From<QueryError> for BatchError<InboxError> {
    fn from(error: QueryError) -> Self {
        InboxError::from(error).into()
    }
}
