//! The claim under `Policy::atomic()`: the request is one transaction, and its finished row is written
//! at its end.
//!
//! A lock that lives as long as the transaction makes concurrent duplicates cheap: they are told so at
//! once. The primary key is the guarantee: where two requests get past the lock (two ids may share
//! its 64 bits only to be told 409 for nothing, and a row may be committed between the look and the
//! lock), the second one cannot write its row, is rolled back, and answered by what is stored.

use std::{
    collections::HashSet,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use crate::{
    ask::{Ask, Columns},
    claim::{self, Claim},
    engine::{Engine, leases::Owner, store::in_time},
    error::{Error, ErrorKind},
    lease::Ended,
    policy::{Policy, Quota},
    postgres::transactions::{self, Seen},
    refusal::{self, Code},
    scope::KeyId,
    snapshot::ResponseSnapshot,
    telemetry::{self, Event},
    told::{Ahead, Told},
    transaction::{Commit, Parts, Transaction},
};

/// The requests of this process that run under an atomic policy.
#[derive(Debug, Default)]
pub(crate) struct Running(Mutex<HashSet<KeyId>>);

impl Running {
    fn enter(engine: &Arc<Engine>, id: KeyId) -> Option<Entered> {
        let mut running = engine.atomic.0.lock().unwrap_or_else(PoisonError::into_inner);
        running.insert(id).then(|| Entered { engine: Arc::clone(engine), id, claimed: false })
    }

    pub(crate) fn count(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

struct Entered {
    engine: Arc<Engine>,
    id: KeyId,
    claimed: bool,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.engine.atomic.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        // Whoever only looked has nothing to tell, not even to itself if it waits.
        if self.claimed {
            self.engine.waiters.wake(&self.id);
        }
    }
}

/// A request that runs in a transaction of its own, and the row that it will replace, if any.
pub(crate) struct Atomic {
    engine: Arc<Engine>,
    policy: Arc<Policy>,
    ask: Ask,
    owner: Owner,
    seed: [u8; 32],
    seen: Option<Seen>,
    _entered: Entered,
}

/// Claims by opening the transaction, or says why not.
pub(crate) async fn claim(
    engine: &Arc<Engine>,
    ask: &Ask,
    policy: &Arc<Policy>,
) -> Result<Claim<(Box<Atomic>, Transaction)>, Error> {
    if engine.is_draining() {
        let row = engine.look(&ask.id, policy).await?;
        let told = row.map(|row| Told::by(row, ask, policy)).transpose()?.flatten();
        return Ok(Claim::Told(told.unwrap_or(Told::Draining)));
    }
    let Some(mut entered) = Running::enter(engine, ask.id) else { return Ok(Claim::Told(outstanding())) };
    match open(engine, ask, policy).await {
        // A connection may have died since it was last used, and nothing was written yet.
        Err(error) if error.kind() == ErrorKind::Connection => open(engine, ask, policy).await,
        opened => opened,
    }
    .map(|opened| {
        opened.map(|(transaction, seen)| {
            telemetry::event(Event::Fresh, &ask.id);
            entered.claimed = true;
            engine.sweep(policy.retention);
            let atomic = Atomic {
                engine: Arc::clone(engine),
                policy: Arc::clone(policy),
                ask: ask.clone(),
                owner: rand::random(),
                seed: rand::random(),
                seen,
                _entered: entered,
            };
            (Box::new(atomic), transaction)
        })
    })
}

/// The transaction, and what it saw of the row.
type Opened = Claim<(Transaction, Option<Seen>)>;

async fn open(engine: &Arc<Engine>, ask: &Ask, policy: &Arc<Policy>) -> Result<Opened, Error> {
    let mut transaction = Transaction::begin(engine, policy).await?;
    let look = async {
        let (lock, id) = (ask.id.lock(), &ask.id.0);
        Ok(transactions::try_lock_and_look(transaction.conn_mut(), lock, id, ask.not_after).await?)
    };
    let (locked, in_good_time, row) = in_time(policy.store_timeout, look).await?;
    let seen = row.as_ref().map(Seen::of);
    let counts = seen.is_none() && policy.quota != Quota::default();
    let told = match row.map(|row| Told::by(row, ask, policy)).transpose()?.flatten() {
        None if locked && !in_good_time => Told::TokenExpired,
        None if locked && counts && is_full(&mut transaction, ask, policy).await? => Told::QuotaExceeded,
        None if locked => return Ok(Claim::Fresh((transaction, seen))),
        None => outstanding(),
        Some(told) => told,
    };
    transaction.rollback(policy).await;
    Ok(Claim::Told(told))
}

async fn is_full(transaction: &mut Transaction, ask: &Ask, policy: &Policy) -> Result<bool, Error> {
    let columns = Columns::of(ask);
    in_time(policy.store_timeout, claim::exceeds_quota(transaction.conn_mut(), &columns, policy)).await
}

/// There is no lease that could end: whoever has the lock has it as long as the request runs.
pub(crate) fn outstanding() -> Told {
    Ahead::unseen(Duration::MAX)
}

impl Atomic {
    /// Writes the finished row and commits.
    pub(crate) async fn commit(self, transaction: Transaction, snapshot: ResponseSnapshot) -> Ended {
        let stored = transaction
            .commit_after(&self.policy, async |tx| {
                let columns = Columns::of(&self.ask);
                let new = columns.new_claim(&self.ask, &self.owner, &self.seed, &self.policy);
                let stored = self.policy.stored(snapshot);
                let parts = Parts::of(&stored);
                let answer = parts.answer(&stored);
                let marked = Some((tx.session(), tx.mark()));
                Ok(transactions::finish(tx.conn(), &new, &answer, marked, self.seen.as_ref()).await?)
            })
            .await;
        match stored {
            Commit::Done => self.landed(),
            Commit::Lost => Ended::Lost,
            Commit::EndedByHandler => match self.keep(&refusal::snapshot(Code::TransactionMisused, &self.policy)).await
            {
                Ended::Lost => Ended::Lost,
                _ => Ended::Refused(Code::TransactionMisused),
            },
            // Under one snapshot, somebody who was first shows as 40001.
            Commit::RolledBack(Code::Serialization) => match self.is_answered().await {
                Ok(true) => Ended::Lost,
                _ => Ended::Refused(Code::Serialization),
            },
            Commit::RolledBack(code) => Ended::Refused(code),
            Commit::InDoubt(code) => self.resolve(code).await,
        }
    }

    /// Keeps an answer that nothing was written for, once the transaction is rolled back.
    pub(crate) async fn keep(&self, snapshot: &ResponseSnapshot) -> Ended {
        let write = async {
            let conn = self.engine.store.connection().await?;
            let columns = Columns::of(&self.ask);
            let new = columns.new_claim(&self.ask, &self.owner, &self.seed, &self.policy);
            let parts = Parts::of(snapshot);
            let answer = parts.answer(snapshot);
            let ours = transactions::finish(&conn, &new, &answer, None, self.seen.as_ref()).await?;
            conn.give_back();
            Ok(ours)
        };
        match in_time(self.policy.store_timeout, write).await {
            Ok(true) => self.landed(),
            Ok(false) => Ended::Lost,
            Err(error) => {
                telemetry::store_failed("an answer could not be kept", &error);
                Ended::Refused(Code::StoreUnavailable)
            }
        }
    }

    fn landed(&self) -> Ended {
        self.engine.recent.remember(&self.ask.id);
        Ended::Landed
    }

    /// The lock decides: while the transaction may still commit, its backend holds it.
    async fn resolve(&self, code: Code) -> Ended {
        match self.owner_after_the_lock().await {
            Ok(Some(owner)) if owner == self.owner => self.landed(),
            Ok(owner) if owner == self.seen.as_ref().map(|seen| seen.owner.clone()) => Ended::Refused(code),
            Ok(_) => Ended::Lost,
            Err(error) => {
                telemetry::store_failed("whether a transaction was committed cannot be told", &error);
                Ended::Unknown
            }
        }
    }

    async fn owner_after_the_lock(&self) -> Result<Option<Vec<u8>>, Error> {
        let wait = async {
            let mut conn = self.engine.store.connection().await?;
            transactions::wait_for_lock(&mut conn, self.ask.id.lock()).await?;
            conn.give_back();
            Ok(())
        };
        in_time(self.policy.store_timeout, wait).await?;
        let row = self.engine.look(&self.ask.id, &self.policy).await?;
        Ok(row.map(|row| row.owner))
    }

    async fn is_answered(&self) -> Result<bool, Error> {
        let row = self.engine.look(&self.ask.id, &self.policy).await?;
        Ok(row.is_some_and(|row| !row.expired && row.state == "completed"))
    }
}

impl fmt::Debug for Atomic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Atomic").field("id", &self.ask.id).finish_non_exhaustive()
    }
}
