//! The claim under `Policy::atomic()`: the request is one transaction, and its finished row is written
//! at its end.
//!
//! A lock that lives as long as the transaction makes concurrent duplicates cheap: they are told so at
//! once. Whoever has it runs a handler; whoever only looks, or asks what has become of a key, takes none
//! that a claim would miss. The primary key is the guarantee: where two requests get past the lock (one of
//! another policy takes none), the second one cannot write its row, is rolled back, and answered by what
//! is stored. Two ids may share the lock's 64 bits: then one of them is told 409 for nothing.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::sleep;

use crate::{
    ask::{Ask, Columns},
    claim::{self, Claim},
    engine::{
        Engine,
        leases::Owner,
        running::{Entered, Found, Running},
        store::in_time,
    },
    error::{Error, ErrorKind},
    lease::Ended,
    policy::{Policy, Quota},
    postgres::{
        AsyncPgConnection, keys,
        transactions::{self, Looked, Seen},
    },
    refusal::{self, Code},
    snapshot::ResponseSnapshot,
    telemetry::{self, Event},
    told::{Ahead, Told},
    transaction::{Commit, Parts, Transaction},
};

/// How often it is asked whether a transaction of unknown outcome is over.
const PAUSE: Duration = Duration::from_millis(20);

/// A request that runs in a transaction of its own, and the row that it will replace, if any.
pub(crate) struct Atomic {
    engine: Arc<Engine>,
    policy: Arc<Policy>,
    ask: Ask,
    owner: Owner,
    seed: [u8; 32],
    seen: Option<Seen>,
    /// Which process serves the transaction.
    backend: i32,
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
    let entered = match in_time(policy.store_timeout, enter(engine, ask, policy)).await? {
        Claim::Fresh(entered) => entered,
        Claim::Told(told) => return Ok(Claim::Told(told)),
    };
    match open(engine, ask, policy).await {
        // A connection may have died since it was last used, and nothing was written yet.
        Err(error) if error.kind() == ErrorKind::Connection => open(engine, ask, policy).await,
        opened => opened,
    }
    .map(|opened| {
        opened.map(|Opened { transaction, seen, backend }| {
            telemetry::event(Event::Fresh, &ask.id);
            entered.run();
            engine.sweep(policy.retention);
            let atomic = Atomic {
                engine: Arc::clone(engine),
                policy: Arc::clone(policy),
                ask: ask.clone(),
                owner: rand::random(),
                seed: rand::random(),
                seen,
                backend,
                _entered: entered,
            };
            (Box::new(atomic), transaction)
        })
    })
}

/// One of those who come at the same time asks the store. The others need no connection meanwhile, and are told what
/// it has found.
async fn enter(engine: &Arc<Engine>, ask: &Ask, policy: &Policy) -> Result<Claim<Entered>, Error> {
    loop {
        match Running::enter(engine, ask.id) {
            Found::Free(entered) => return Ok(Claim::Fresh(entered)),
            Found::Runs => return Ok(Claim::Told(outstanding())),
            Found::Asks(over) => over.await,
        }
        if engine.recent.knows(&ask.id)
            && let Some(told) = claim::look_with_others(engine, ask, policy).await
        {
            return Ok(Claim::Told(told));
        }
    }
}

/// A transaction that has the key.
struct Opened {
    transaction: Transaction,
    seen: Option<Seen>,
    backend: i32,
}

async fn open(engine: &Arc<Engine>, ask: &Ask, policy: &Arc<Policy>) -> Result<Claim<Opened>, Error> {
    let mut transaction = Transaction::begin(engine, policy).await?;
    let met = in_time(policy.store_timeout, meet(engine, transaction.conn(), ask, policy)).await?;
    let mut told = met.told;
    if told.is_none() && transaction.has_one_snapshot(policy) {
        // It was taken before the lock was asked for.
        told = claim::look_with_others(engine, ask, policy).await;
    }
    let counts = !met.lives && policy.quota != Quota::default();
    let told = match told {
        Some(told) => told,
        None if !met.locked => outstanding(),
        None if !met.in_good_time => Told::TokenExpired,
        None if counts && is_full(&mut transaction, ask, policy).await? => Told::QuotaExceeded,
        None => return Ok(Claim::Fresh(Opened { transaction, seen: met.seen, backend: met.backend })),
    };
    transaction.rollback(policy).await;
    Ok(Claim::Told(told))
}

/// How a transaction finds a key.
pub(crate) struct Met {
    /// By the row, unless that may be replaced.
    pub(crate) told: Option<Told>,
    pub(crate) locked: bool,
    in_good_time: bool,
    pub(crate) seen: Option<Seen>,
    /// There is a row, and it has not expired: it counts already.
    lives: bool,
    backend: i32,
}

/// Asks for the lock of a key, and looks. Only whoever runs the key where he gets the lock asks for it: where somebody else
/// has it, the handler runs.
pub(crate) async fn meet(engine: &Engine, conn: &AsyncPgConnection, ask: &Ask, policy: &Policy) -> Result<Met, Error> {
    let mut over = false;
    loop {
        let looked = transactions::lock_and_look(conn, ask.id.lock(), &ask.id.0, ask.not_after, over).await?;
        let Looked { locked, in_good_time, row, backend } = looked;
        if row.is_some() {
            engine.recent.remember(&ask.id);
        }
        let seen = row.as_ref().map(Seen::of);
        let lives = row.as_ref().is_some_and(|row| !row.expired);
        let told = row.map(|row| Told::by(row, ask, policy)).transpose()?.flatten();
        match (&told, locked) {
            // There is a row, and it may be replaced.
            (None, None) => over = true,
            _ => return Ok(Met { told, locked: locked == Some(true), in_good_time, seen, lives, backend }),
        }
    }
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
                let parts = Parts::of(&snapshot);
                let answer = parts.answer(&snapshot);
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

    /// The lock decides: while the transaction may still commit, its backend has it.
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
            while keys::is_held_by(&mut conn, self.ask.id.lock(), self.backend).await? {
                sleep(PAUSE).await;
            }
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
