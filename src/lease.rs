//! A claim that is held, and how it ends.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Instant,
};

use actix_web::http::StatusCode;

use crate::{
    ask::Ask,
    engine::{Engine, ending::Ending, leases::Owner},
    failpoint,
    policy::{Policy, Return},
    refusal::Code,
    scope::KeyId,
    snapshot::ResponseSnapshot,
    telemetry::{self, Event},
    transaction::{Commit, Transaction},
};

/// A claim that is held: renewed in the background until it is ended. Dropped before that, it ends
/// in the background, as the policy says.
pub(crate) struct Lease {
    pub(crate) id: KeyId,
    pub(crate) owner: Owner,
    pub(crate) attempt: i32,
    pub(crate) seed: [u8; 32],
    /// Of the first attempt: what keys for downstream services are derived from.
    pub(crate) fingerprint: [u8; 32],
    /// Whether the claim survives a crash of the database already.
    pub(crate) is_durable: bool,
    pub(crate) acted: Acted,
    policy: Arc<Policy>,
    engine: Arc<Engine>,
    /// What is left to do when it is dropped.
    ending: Option<Ending>,
}

/// Whether an attempt has done what a ROLLBACK does not undo: from then on its effects are unknown, whatever it
/// answers. Shared with the handler's key.
#[derive(Debug, Clone, Default)]
pub(crate) struct Acted(Arc<AtomicU8>);

impl Acted {
    const YES: u8 = 1;
    const NO: u8 = 2;

    pub(crate) fn set(&self) {
        self.0.store(Self::YES, Ordering::Release);
    }

    /// The handler says that nothing was done, by no attempt, and knows better.
    pub(crate) fn deny(&self) {
        self.0.store(Self::NO, Ordering::Release);
    }

    fn get(&self) -> Option<bool> {
        match self.0.load(Ordering::Acquire) {
            Self::YES => Some(true),
            Self::NO => Some(false),
            _ => None,
        }
    }
}

/// What became of an ending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// It is stored.
    Landed,
    /// Somebody else has the key.
    Lost,
    /// The store failed; it is being sent again in the background.
    Later,
    /// It was rolled back, and the key is free or will be; this is why.
    Refused(Code),
    /// Whether it was committed cannot be told now. Nothing is released and nothing renewed.
    Unknown,
}

impl Lease {
    /// Before the claim is sent: whatever becomes of it, this is what ends it.
    pub(crate) fn new(ask: &Ask, owner: Owner, seed: [u8; 32], engine: &Arc<Engine>, policy: &Arc<Policy>) -> Self {
        Self {
            id: ask.id,
            fingerprint: ask.fingerprint.digest,
            owner,
            attempt: 1,
            seed,
            is_durable: policy.durable_claims,
            acted: Acted::default(),
            policy: Arc::clone(policy),
            engine: Arc::clone(engine),
            ending: Some(Ending::Release { status: None, acted: None }),
        }
    }

    /// Of a row that was taken over already.
    pub(crate) fn resumed(
        ask: &Ask,
        owner: Owner,
        seed: [u8; 32],
        attempt: i32,
        engine: &Arc<Engine>,
        policy: &Arc<Policy>,
    ) -> Self {
        let mut lease = Self::new(ask, owner, seed, engine, policy);
        (lease.attempt, lease.is_durable, lease.ending) = (attempt, true, None);
        lease.keep_renewing();
        lease
    }

    /// From now on it is renewed, for as long as its handler may run.
    pub(crate) fn keep_renewing(&self) {
        let run_until = Instant::now() + self.policy.run_limit();
        self.engine.leases.hold(self.id, self.owner, self.policy.lease, Some(run_until));
    }

    /// Nothing was claimed.
    pub(crate) fn disarm(mut self) {
        self.ending = None;
    }

    /// Ends the attempt with an answer that is kept.
    pub(crate) async fn complete(self, snapshot: ResponseSnapshot) -> Ended {
        self.end(Ending::Complete(snapshot)).await
    }

    /// The handler is about to run: dropped from now on, the attempt has failed.
    pub(crate) fn start(&mut self, failed: Return) {
        self.ending = match failed {
            Return::Release => Some(Ending::Release { status: None, acted: None }),
            Return::HoldLease => Some(Ending::Hold { for_retention: false }),
            Return::HoldRetention => Some(Ending::Hold { for_retention: true }),
        };
    }

    /// Ends the attempt without an answer; the status says how the next one may use a key that is released.
    pub(crate) async fn give_back(self, status: StatusCode, how: Return) -> Ended {
        match how {
            Return::Release => {
                telemetry::event(Event::Released, &self.id);
                failpoint::reach("before-release");
                let acted = self.acted.get();
                let ended = self.end(Ending::Release { status: Some(status), acted }).await;
                failpoint::reach("after-release");
                ended
            }
            Return::HoldLease => self.end(Ending::Hold { for_retention: false }).await,
            Return::HoldRetention => self.end(Ending::Hold { for_retention: true }).await,
        }
    }

    /// Ends the attempt with an answer that is kept, in the transaction of the handler's writes.
    pub(crate) async fn commit(self, transaction: Transaction, snapshot: ResponseSnapshot) -> Ended {
        let stored = transaction
            .commit_after(&self.policy, async |tx| tx.complete(&self.id.0, &self.owner, &snapshot, &self.policy).await)
            .await;
        match stored {
            Commit::Done => {
                self.done();
                Ended::Landed
            }
            Commit::Lost => {
                self.done();
                Ended::Lost
            }
            // Its writes are there, its answer is not: they must not be made again.
            Commit::EndedByHandler => self.refuse_for_good().await,
            // Its handler was sure of its success.
            Commit::RolledBack(code) => {
                self.acted.set();
                let how = self.policy.without_answer();
                match self.give_back(code.status(), how).await {
                    Ended::Lost => Ended::Lost,
                    _ => Ended::Refused(code),
                }
            }
            Commit::InDoubt(code) => self.resolve(code).await,
        }
    }

    /// A fenced write decides, not a read: a commit that is still on its way holds the row.
    async fn resolve(mut self, code: Code) -> Ended {
        let ending = match self.policy.without_answer() {
            Return::HoldRetention => Ending::Hold { for_retention: true },
            Return::HoldLease | Return::Release => Ending::Release { status: Some(code.status()), acted: Some(true) },
        };
        let ended = self.engine.end(self.id, self.owner, &ending, &self.policy).await;
        let row = match ended {
            Ok(true) => {
                self.done();
                return Ended::Refused(code);
            }
            Ok(false) => self.engine.look(&self.id, &self.policy).await,
            Err(error) => Err(error),
        };
        match row {
            Ok(row) => {
                let owner = self.owner;
                self.done();
                let committed = row.is_some_and(|row| row.owner == owner && row.state == "completed");
                if committed { Ended::Landed } else { Ended::Lost }
            }
            Err(error) => {
                telemetry::store_failed("whether a transaction was committed cannot be told", &error);
                self.ending = None;
                self.abandon();
                Ended::Unknown
            }
        }
    }

    async fn refuse_for_good(self) -> Ended {
        let code = Code::TransactionMisused;
        let policy = Arc::clone(&self.policy);
        match self.complete(crate::refusal::snapshot(code, &policy)).await {
            Ended::Lost => Ended::Lost,
            _ => Ended::Refused(code),
        }
    }

    /// The row has been seen to be settled, by this attempt or another.
    pub(crate) fn confirm(self) {
        self.done();
    }

    /// Neither completed nor released: the lease ends it.
    pub(crate) fn abandon(mut self) {
        self.ending = None;
        self.engine.leases.let_go(self.id, self.owner);
    }

    async fn end(mut self, ending: Ending) -> Ended {
        // From here on, whoever drops this future leaves the ending to the background.
        self.ending = Some(ending.clone());
        match self.engine.end(self.id, self.owner, &ending, &self.policy).await {
            Ok(landed) => {
                self.done();
                if landed { Ended::Landed } else { Ended::Lost }
            }
            Err(error) => {
                telemetry::store_failed("an attempt could not be ended at once", &error);
                Ended::Later
            }
        }
    }

    fn done(mut self) {
        self.ending = None;
        self.engine.leases.let_go(self.id, self.owner);
        self.engine.waiters.wake(&self.id);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        match self.ending.take() {
            Some(Ending::Release { status, .. }) => {
                let ending = Ending::Release { status, acted: self.acted.get() };
                self.engine.end_later(self.id, self.owner, ending, Arc::clone(&self.policy));
            }
            Some(ending) => self.engine.end_later(self.id, self.owner, ending, Arc::clone(&self.policy)),
            None => self.engine.leases.let_go(self.id, self.owner),
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("id", &self.id).field("attempt", &self.attempt).finish_non_exhaustive()
    }
}
