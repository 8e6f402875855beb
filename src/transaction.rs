//! A transaction on a pooled connection, opened for a handler and ended by this crate.

use std::{fmt, sync::Arc};

use diesel_async::{AsyncPgConnection, pooled_connection::PoolableConnection};

use crate::{
    engine::{
        Engine,
        berth::Berthed,
        ending::{millis, stored},
        store::in_time,
    },
    error::{Error, ErrorKind},
    failpoint,
    policy::Policy,
    postgres::{
        ending::Answer,
        transactions::{self, Session},
        witness::{self, Seen, SqlState},
    },
    refusal::Code,
    snapshot::{ResponseSnapshot, SNAPSHOT_VERSION},
    telemetry,
};

/// Open, one level deep when it begins, and marked, so that it is recognised.
pub(crate) struct Transaction {
    conn: Box<Berthed>,
    mark: String,
    session: Arc<Session>,
    /// `None` on a connection that nobody reads along.
    seen: Option<Arc<Seen>>,
}

impl Transaction {
    /// Waits for a connection, within the deadline of the policy, and begins.
    pub(crate) async fn begin(engine: &Engine, policy: &Policy) -> Result<Self, Error> {
        in_time(policy.store_timeout, async {
            let permit = engine.holders.join().await?;
            let mut conn = engine.store.connection().await?;
            let session = engine.session(&mut conn).await?;
            let mark = hex::encode(rand::random::<[u8; 16]>());
            let idle = millis(policy.idle_in_transaction);
            failpoint::reach("before-begin");
            transactions::begin(&mut conn, policy.isolation.sql(), idle, &mark).await?;
            let seen = witness::of(&mut conn);
            let conn = Box::new(engine.berths.take(conn, permit, policy.idle_in_transaction, seen.clone()).await?);
            Ok(Self { conn, mark, session, seen })
        })
        .await
    }

    /// Whether statements of this transaction all see what the first one saw.
    pub(crate) fn has_one_snapshot(&self, policy: &Policy) -> bool {
        policy.isolation.has_one_snapshot(&self.session.isolation)
    }

    pub(crate) async fn set_local(&mut self, settings: Vec<(String, String)>) -> Result<(), Error> {
        if settings.is_empty() {
            return Ok(());
        }
        let (names, values): (Vec<_>, Vec<_>) = settings.into_iter().unzip();
        Ok(transactions::set_local(&mut self.conn, &names, &values).await?)
    }

    pub(crate) fn conn(&self) -> &AsyncPgConnection {
        &self.conn
    }

    pub(crate) fn conn_mut(&mut self) -> &mut AsyncPgConnection {
        &mut self.conn
    }

    pub(crate) fn mark(&self) -> &str {
        &self.mark
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Whether the handler has left it as it found it, savepoints and all.
    pub(crate) fn is_one_level_deep(&mut self) -> bool {
        transactions::depth(&mut self.conn) == Some(1)
    }

    /// Whether another transaction was first, so that this one can only be rolled back, whatever the handler has
    /// made of that.
    pub(crate) fn has_lost_a_race(&self) -> bool {
        self.aborted_by().is_some_and(SqlState::is_lost_race)
    }

    fn aborted_by(&self) -> Option<SqlState> {
        self.seen.as_ref().and_then(|seen| seen.aborted_by())
    }

    /// Stores the answer of a claim in this transaction. `false`: the lease was lost, or the handler
    /// has ended the transaction by itself.
    pub(crate) async fn complete(
        &self,
        id: &[u8],
        owner: &[u8],
        snapshot: &ResponseSnapshot,
        policy: &Policy,
    ) -> Result<bool, Error> {
        let parts = Parts::of(snapshot);
        let (answer, patience) = (parts.answer(snapshot), millis(policy.lock_timeout()));
        Ok(transactions::complete_within(&self.conn, &self.session, id, owner, &self.mark, &answer, patience).await?)
    }

    /// A checked statement: fails where the transaction is aborted, `false` where it is no longer ours.
    pub(crate) async fn is_ours(&self) -> Result<bool, Error> {
        Ok(transactions::is_marked(&self.conn, &self.mark).await?)
    }

    /// Sends the last statement, which must change something, and commits.
    pub(crate) async fn commit_after(
        mut self,
        policy: &Policy,
        last: impl AsyncFnOnce(&Self) -> Result<bool, Error>,
    ) -> Commit {
        if !self.is_one_level_deep() {
            telemetry::misconfigured("a handler has left a savepoint of its IdemTx open: its writes are rolled back");
            return Commit::RolledBack(Code::TransactionMisused);
        }
        failpoint::reach("before-complete");
        if let Some(code) = self.aborted_by() {
            self.rollback(policy).await;
            return Commit::RolledBack(if code.is_lost_race() {
                Code::Serialization
            } else {
                Code::TransactionAborted
            });
        }
        match in_time(policy.store_timeout, last(&self)).await {
            Ok(true) => {}
            Ok(false) => return self.explain(policy).await,
            Err(error) => {
                let code = match code_of(&error) {
                    // It was not the handler that broke it.
                    Code::TransactionAborted if self.seen.is_some() => Code::StoreUnavailable,
                    code => code,
                };
                telemetry::store_failed("a transaction failed before its COMMIT", &error);
                self.rollback(policy).await;
                return Commit::RolledBack(code);
            }
        }
        failpoint::reach("after-complete");
        let committed = async { Ok(transactions::commit(&mut self.conn).await?) };
        match in_time(policy.store_timeout, committed).await {
            Ok(()) => {
                failpoint::reach("after-commit");
                self.conn.give_back();
                Commit::Done
            }
            Err(error) => {
                telemetry::store_failed("a COMMIT failed", &error);
                Commit::InDoubt(match code_of(&error) {
                    Code::TransactionAborted if self.is_the_servers_fault() => Code::StoreUnavailable,
                    code => code,
                })
            }
        }
    }

    /// Whether the last failure was not about what the transaction does: the server may have ended the connection
    /// in the midst of it, and said so as if the statement had failed.
    fn is_the_servers_fault(&mut self) -> bool {
        self.conn.is_broken() || self.seen.as_ref().is_some_and(|seen| seen.is_the_servers_fault())
    }

    /// Why the last statement changed nothing.
    async fn explain(self, policy: &Policy) -> Commit {
        match in_time(policy.store_timeout, self.is_ours()).await {
            Ok(true) => {
                self.rollback(policy).await;
                Commit::Lost
            }
            Ok(false) => {
                telemetry::misconfigured("a handler has ended the transaction of its IdemTx by itself");
                Commit::EndedByHandler
            }
            Err(error) => Commit::RolledBack(code_of(&error)),
        }
    }

    /// Where this fails, or is dropped, the connection is closed, which rolls back as well.
    pub(crate) async fn rollback(mut self, policy: &Policy) {
        failpoint::reach("before-rollback");
        if !self.is_one_level_deep() {
            return;
        }
        let rolled_back = async { Ok(transactions::rollback(&mut self.conn).await?) };
        if in_time(policy.store_timeout, rolled_back).await.is_ok() {
            failpoint::reach("after-rollback");
            self.conn.give_back();
        }
    }
}

impl fmt::Debug for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transaction")
    }
}

/// What became of a COMMIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Commit {
    Done,
    /// Rolled back: the last statement changed nothing, because somebody else has the key.
    Lost,
    /// The handler has sent COMMIT or ROLLBACK by itself.
    EndedByHandler,
    /// Rolled back, for this reason.
    RolledBack(Code),
    /// COMMIT was not acknowledged; if it has failed, this is why.
    InDoubt(Code),
}

/// What is told of a transaction that failed.
pub(crate) fn code_of(error: &Error) -> Code {
    match error.kind() {
        ErrorKind::Serialization => Code::Serialization,
        // Somebody is busy with the key.
        ErrorKind::LockTimeout => Code::Outstanding,
        ErrorKind::Constraint => Code::ConstraintViolated,
        ErrorKind::Connection | ErrorKind::Timeout | ErrorKind::ReadOnly => Code::StoreUnavailable,
        _ => Code::TransactionAborted,
    }
}

/// A snapshot as the table takes it.
pub(crate) struct Parts<'a> {
    names: Vec<&'a str>,
    values: Vec<&'a [u8]>,
}

impl<'a> Parts<'a> {
    pub(crate) fn of(snapshot: &'a ResponseSnapshot) -> Self {
        let (names, values) = snapshot.headers().map(|(name, value)| (name.as_str(), value.as_bytes())).unzip();
        Self { names, values }
    }

    pub(crate) fn answer<'b>(&'b self, snapshot: &'b ResponseSnapshot) -> Answer<'b> {
        Answer {
            status: stored(snapshot.status()),
            header_names: &self.names,
            header_values: &self.values,
            body: snapshot.body().map(|body| &body[..]),
            snapshot_version: SNAPSHOT_VERSION,
        }
    }
}
