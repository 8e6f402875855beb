//! Connections of the pool, each bounded by a deadline and never handed on in doubt.

use std::{
    ops::{Deref, DerefMut},
    time::Duration,
};

use diesel_async::{
    AsyncConnection, AsyncPgConnection, TransactionManager,
    pooled_connection::{AsyncDieselConnectionManager, PoolableConnection},
};
use futures_util::FutureExt;
use tokio::time::timeout;

use crate::{
    error::{Error, ErrorKind},
    postgres::PgPool,
};

/// The pool, and how it is asked.
pub(crate) struct Store {
    pub(crate) pool: PgPool,
}

impl Store {
    /// A connection that was alive when it was taken. Those that have died in the pool are passed over.
    pub(crate) async fn connection(&self) -> Result<Checkout, Error> {
        loop {
            let mut conn = self.pool.get_owned().await?;
            if !conn.is_broken() {
                return Ok(Checkout { conn, settled: false });
            }
        }
    }
}

/// Bounds what is done with the store. Past the deadline the work is dropped, its connection is
/// closed, and its outcome is unknown.
///
/// No `async fn`: that would have room for the work twice, once to take it and once to do it, and the
/// futures around it would be copied at twice the size.
pub(crate) fn in_time<T, W>(deadline: Duration, work: W) -> impl Future<Output = Result<T, Error>>
where
    W: Future<Output = Result<T, Error>>,
{
    let late = |_| Err(Error::new(ErrorKind::Timeout, "the store did not answer within the deadline"));
    timeout(deadline, work).map(move |outcome| outcome.unwrap_or_else(late))
}

type Pooled = bb8::PooledConnection<'static, AsyncDieselConnectionManager<AsyncPgConnection>>;
type Transactions = <AsyncPgConnection as AsyncConnection>::TransactionManager;

/// A connection on loan. It goes back to the pool only by [`give_back`](Self::give_back): one that is
/// dropped by an error, a deadline or a dropped future may have a statement in flight, for which its
/// next user would wait. It is closed instead.
pub(crate) struct Checkout {
    conn: Pooled,
    settled: bool,
}

impl Checkout {
    /// Nothing is in flight.
    pub(crate) fn give_back(mut self) {
        self.settled = true;
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        if !self.settled {
            // What the pool asks when it decides whether to keep a connection.
            Transactions::transaction_manager_status_mut(&mut *self.conn).set_in_error();
        }
    }
}

impl Deref for Checkout {
    type Target = AsyncPgConnection;

    fn deref(&self) -> &AsyncPgConnection {
        &self.conn
    }
}

impl DerefMut for Checkout {
    fn deref_mut(&mut self) -> &mut AsyncPgConnection {
        &mut self.conn
    }
}

/// A connection of a loop's own, outside the pool's count: opened when it is first needed, and anew
/// after a failure or where it has died meanwhile.
#[derive(Default)]
pub(crate) struct Line(Option<AsyncPgConnection>);

impl Line {
    pub(crate) async fn get(&mut self, store: &Store) -> Result<&mut AsyncPgConnection, Error> {
        let conn = match self.0.take_if(|conn| !conn.is_broken()) {
            Some(conn) => conn,
            None => store.pool.dedicated_connection().await?,
        };
        Ok(self.0.insert(conn))
    }

    pub(crate) fn hang_up(&mut self) {
        self.0 = None;
    }
}
