//! The claim: one statement decides who runs a request; everybody else is told what to do instead.
//!
//! The row is inserted where there is none. Where there is one, a second statement looks at it (a
//! losing INSERT cannot see the winner's row, its snapshot is older) and the table of the protocol
//! says what follows; [`decide`] is that table. A row that may be taken over is taken over by a third
//! statement, pinned to the owner and state that were seen. Whoever loses a race starts again with a
//! new statement, a bounded number of times.
//!
//! Most retries need none of this: the row of a key that this process has met is [looked at](look) before
//! anything is claimed, and what it says is told.

use std::{num::NonZeroU32, sync::Arc, time::Instant};

use crate::{
    ask::{Ask, Columns},
    decision::{Decision, How, decide},
    engine::{
        Engine,
        ending::millis,
        leases::Owner,
        store::{Checkout, in_time},
    },
    error::{Error, ErrorKind},
    lease::Lease,
    policy::{OnCompleted, Policy, Quota},
    postgres::{
        AsyncPgConnection,
        keys::{self, NewClaim, Takeover},
        row::Row,
        transactions,
    },
    telemetry::{self, Abandoned, Event},
    told::{Ahead, Told, unreadable},
};

/// How often a claim starts again after losing a race. Each time somebody else has won one, so that
/// more than a few mean that the key is busy: 409 is the truth.
const ROUNDS: u32 = 5;

/// What the store answers.
#[derive(Debug)]
pub(crate) enum Claim<H> {
    /// Run the handler: this holds the key meanwhile.
    Fresh(H),
    /// Do not.
    Told(Told),
}

impl<H> Claim<H> {
    pub(crate) fn map<T>(self, with: impl FnOnce(H) -> T) -> Claim<T> {
        match self {
            Self::Fresh(hold) => Claim::Fresh(with(hold)),
            Self::Told(told) => Claim::Told(told),
        }
    }
}

/// What the row of a key that this process has met says to a request, without a claim; `None` where it
/// has to claim. What cannot be read is told to whoever claims.
pub(crate) async fn look(engine: &Engine, ask: &Ask, policy: &Policy) -> Option<Told> {
    if !engine.recent.knows(&ask.id) || policy.on_completed == OnCompleted::RunAgain {
        return None;
    }
    let began = Instant::now();
    let told = look_with_others(engine, ask, policy).await?;
    telemetry::claimed(began);
    Some(told)
}

/// The same of any key. Also `None` where nobody could look in good time.
pub(crate) async fn look_with_others(engine: &Engine, ask: &Ask, policy: &Policy) -> Option<Told> {
    let row = engine.look_with_others(ask.id, policy).await?;
    Told::by(row, ask, policy).ok()?
}

/// Claims the key of a request, or says why not.
pub(crate) async fn claim(engine: &Arc<Engine>, ask: &Ask, policy: &Arc<Policy>) -> Result<Claim<Lease>, Error> {
    let attempt = Attempt::new(engine, ask, policy);
    // Dropped with something in it, this releases what may have been claimed.
    let mut unfinished = None;
    let mut failed = false;
    loop {
        match in_time(policy.store_timeout, attempt.run(&mut unfinished)).await {
            Ok(claim) => return Ok(claim),
            // The owner was drawn before: if the first try has landed, the second finds itself.
            Err(error) if !failed && error.kind() != ErrorKind::Timeout => failed = true,
            Err(error) => return Err(error),
        }
    }
}

/// What the table says for one's own request, never claiming: for an attempt that was overtaken.
/// `None`: there is no answer for it yet.
pub(crate) async fn look_again(engine: &Engine, ask: &Ask, policy: &Policy) -> Result<Option<Told>, Error> {
    let Some(row) = engine.look(&ask.id, policy).await? else { return Ok(None) };
    engine.recent.remember(&ask.id);
    match decide(&row, &ask.fingerprint, &[], OnCompleted::Replay) {
        Decision::Mine | Decision::Outstanding | Decision::TakeOver(_) => Ok(None),
        decision => Told::of(decision, row, ask, policy).map(Some),
    }
}

/// Whether the principal has as many keys as it may, so that one more is refused.
pub(crate) async fn exceeds_quota(
    conn: &mut AsyncPgConnection,
    columns: &Columns,
    policy: &Policy,
) -> Result<bool, Error> {
    exceeds(conn, columns, policy.quota).await
}

async fn exceeds(conn: &mut AsyncPgConnection, columns: &Columns, quota: Quota) -> Result<bool, Error> {
    let Quota { outstanding, live } = quota;
    let (are_outstanding, are_live) =
        keys::count(conn, columns.tenant.as_deref(), columns.principal.as_deref()).await?;
    let full = |limit: Option<NonZeroU32>, count| limit.is_some_and(|limit| count >= i64::from(limit.get()));
    Ok(full(outstanding, are_outstanding) || full(live, are_live))
}

/// One claim, however many statements it takes.
struct Attempt<'a> {
    engine: &'a Arc<Engine>,
    ask: &'a Ask,
    policy: &'a Arc<Policy>,
    owner: Owner,
    seed: [u8; 32],
}

impl<'a> Attempt<'a> {
    fn new(engine: &'a Arc<Engine>, ask: &'a Ask, policy: &'a Arc<Policy>) -> Self {
        Self { engine, ask, policy, owner: rand::random(), seed: rand::random() }
    }

    async fn run(&self, unfinished: &mut Option<Lease>) -> Result<Claim<Lease>, Error> {
        let mut conn = self.engine.store.connection().await?;
        let lease = unfinished.get_or_insert_with(|| self.lease());
        let verdict = if self.policy.quota == Quota::default() {
            self.rounds(&mut conn, lease).await?
        } else {
            self.turns(&mut conn, lease).await?
        };
        conn.give_back();
        let lease = unfinished.take();
        Ok(match (verdict, lease) {
            (Verdict::Ours, Some(lease)) => self.claimed(lease),
            (Verdict::Ours, None) => return Err(Error::new(ErrorKind::Database, "a claim without its guard")),
            (Verdict::Theirs(told), lease) => {
                lease.into_iter().for_each(Lease::disarm);
                Claim::Told(told)
            }
        })
    }

    async fn rounds(&self, conn: &mut Checkout, lease: &mut Lease) -> Result<Verdict, Error> {
        let draining = self.engine.is_draining();
        let mut look_first = draining || self.engine.recent.knows(&self.ask.id);
        for _ in 0..ROUNDS {
            let mut waited = false;
            if !look_first {
                match self.insert(conn).await? {
                    Inserted::Ours => return Ok(Verdict::Ours),
                    Inserted::Conflict => {}
                    Inserted::WaitedInVain => waited = true,
                }
            }
            look_first = draining;
            let row = match keys::look(conn, &self.ask.id.0).await.map_err(Error::from) {
                Err(error) if error.kind() == ErrorKind::Serialization => continue,
                row => row?,
            };
            let told = match row {
                // Somebody is about to insert it, and takes long.
                None if waited => Ahead::unseen(self.policy.lease),
                None if draining => Told::Draining,
                None if self.is_too_late(conn).await? => Told::TokenExpired,
                // It was released by a ROLLBACK or swept since the INSERT met it.
                None => continue,
                Some(row) => match self.meet(conn, row, lease).await? {
                    Some(verdict) => return Ok(verdict),
                    // Whoever had it locked still has.
                    None if waited => Ahead::unseen(self.policy.lease),
                    None => continue,
                },
            };
            return Ok(Verdict::Theirs(told));
        }
        Ok(Verdict::Theirs(Ahead::unseen(self.policy.lease)))
    }

    /// Whether the key can no longer be claimed. What is stored under it is not asked for that.
    async fn is_too_late(&self, conn: &mut Checkout) -> Result<bool, Error> {
        match self.ask.not_after {
            Some(not_after) => Ok(keys::is_past(conn, not_after).await?),
            None => Ok(false),
        }
    }

    /// Claims under a quota. The claims of a principal take turns, so that what one has counted is still so when
    /// it claims. Whoever is told something without a claim waits for nobody.
    async fn turns(&self, conn: &mut Checkout, lease: &mut Lease) -> Result<Verdict, Error> {
        let turn = self.ask.scope.turn();
        let (patience, idle) = (millis(self.policy.lock_timeout()), millis(self.policy.idle_in_transaction));
        for _ in 0..ROUNDS {
            if let Some(row) = keys::look(conn, &self.ask.id.0).await?
                && !matches!(self.decide(&row), Decision::TakeOver(_))
                && let Some(verdict) = self.meet(conn, row, lease).await?
            {
                return Ok(verdict);
            }
            transactions::begin_in_turn(conn, turn, patience, idle).await?;
            let verdict = self.turn(conn, lease).await?;
            match verdict {
                Some(Verdict::Ours) => transactions::commit(conn).await?,
                _ => transactions::rollback(conn).await?,
            }
            if let Some(verdict) = verdict {
                return Ok(verdict);
            }
        }
        Ok(Verdict::Theirs(Ahead::unseen(self.policy.lease)))
    }

    /// A look, a count and a write. `None`: somebody who takes no turns, under another policy, was first.
    async fn turn(&self, conn: &mut Checkout, lease: &mut Lease) -> Result<Option<Verdict>, Error> {
        let Some(row) = keys::look(conn, &self.ask.id.0).await? else {
            let told = match () {
                () if self.engine.is_draining() => Told::Draining,
                () if self.is_too_late(conn).await? => Told::TokenExpired,
                () if self.exceeds_quota(conn, How::Expired).await? => Told::QuotaExceeded,
                () => return Ok(matches!(self.insert(conn).await?, Inserted::Ours).then_some(Verdict::Ours)),
            };
            return Ok(Some(Verdict::Theirs(told)));
        };
        if let Decision::TakeOver(how) = self.decide(&row)
            && self.exceeds_quota(conn, how).await?
        {
            return Ok(Some(Verdict::Theirs(Told::QuotaExceeded)));
        }
        self.meet(conn, row, lease).await
    }

    /// A row that has not expired is among those that live already; claimed again, it is outstanding once more.
    async fn exceeds_quota(&self, conn: &mut Checkout, how: How) -> Result<bool, Error> {
        let live = self.policy.quota.live.filter(|_| how == How::Expired);
        exceeds(conn, &Columns::of(self.ask), Quota { live, ..self.policy.quota }).await
    }

    async fn insert(&self, conn: &mut Checkout) -> Result<Inserted, Error> {
        let columns = Columns::of(self.ask);
        match keys::insert(conn, &self.new_claim(&columns)).await.map_err(Error::from) {
            Ok(true) => {
                telemetry::event(Event::Fresh, &self.ask.id);
                Ok(Inserted::Ours)
            }
            Ok(false) => Ok(Inserted::Conflict),
            Err(error) if error.kind() == ErrorKind::Serialization => Ok(Inserted::Conflict),
            Err(error) if error.kind() == ErrorKind::LockTimeout => Ok(Inserted::WaitedInVain),
            Err(error) => Err(error),
        }
    }

    /// What follows from a row that is there; `None`: it is another one by now.
    async fn meet(&self, conn: &mut Checkout, row: Row, lease: &mut Lease) -> Result<Option<Verdict>, Error> {
        self.engine.recent.remember(&self.ask.id);
        match self.decide(&row) {
            Decision::TakeOver(_) if self.engine.is_draining() => Ok(Some(Verdict::Theirs(Told::Draining))),
            Decision::TakeOver(_) if self.is_too_late(conn).await? => Ok(Some(Verdict::Theirs(Told::TokenExpired))),
            Decision::TakeOver(how) => {
                let ours = self.take_over(conn, &row, how, lease).await?;
                Ok(ours.then_some(Verdict::Ours))
            }
            Decision::Mine => {
                (lease.attempt, lease.seed) = (row.attempt, seed_of(&row)?);
                Ok(Some(Verdict::Ours))
            }
            decision => Told::of(decision, row, self.ask, self.policy).map(|told| Some(Verdict::Theirs(told))),
        }
    }

    fn decide(&self, row: &Row) -> Decision {
        decide(row, &self.ask.fingerprint, &self.owner, self.policy.on_completed)
    }

    async fn take_over(&self, conn: &mut Checkout, row: &Row, how: How, lease: &mut Lease) -> Result<bool, Error> {
        // What a retry goes on with, and a new operation does not.
        let (attempt, seed) =
            if how.is_retry() { (row.attempt.saturating_add(1), seed_of(row)?) } else { (1, self.seed) };
        let over = Takeover {
            seen_owner: &row.owner,
            seen_state: &row.state,
            attempt,
            seed: &seed,
            anew: !how.is_retry(),
            again: how == How::Again,
        };
        let columns = Columns::of(self.ask);
        let mut new = self.new_claim(&columns);
        if how.is_retry() {
            // It may have been made by an earlier secret, and keys may have been derived from it.
            (new.fingerprint, new.recipe) = (&row.fingerprint, &row.recipe);
            lease.fingerprint = row.fingerprint.as_slice().try_into().map_err(|_| unreadable())?;
        }
        match keys::take_over(conn, &new, &over).await.map_err(Error::from) {
            Ok(true) => {
                (lease.attempt, lease.seed, lease.is_durable) = (attempt, seed, true);
                let first_request = row.request_id.as_deref().filter(|_| how.is_retry());
                telemetry::joined(how.event(), &self.ask.id, first_request);
                if how == How::Expired && row.is_unfinished() {
                    telemetry::abandoned(self.abandoned(row));
                }
                Ok(true)
            }
            Ok(false) => Ok(false),
            Err(error) if error.kind() == ErrorKind::Serialization => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What the key was about before this operation.
    fn abandoned<'r>(&'r self, row: &'r Row) -> Abandoned<'r> {
        Abandoned {
            id: self.ask.id,
            resource: self.ask.scope.resource(),
            state: &row.state,
            status: row.status,
            attempt: row.attempt,
            first_request: row.request_id.as_deref(),
        }
    }

    fn claimed(&self, lease: Lease) -> Claim<Lease> {
        self.engine.recent.remember(&self.ask.id);
        lease.keep_renewing();
        self.engine.sweep(self.policy.retention);
        Claim::Fresh(lease)
    }

    fn lease(&self) -> Lease {
        Lease::new(self.ask, self.owner, self.seed, self.engine, self.policy)
    }

    fn new_claim<'c>(&'c self, columns: &'c Columns) -> NewClaim<'c> {
        columns.new_claim(self.ask, &self.owner, &self.seed, self.policy)
    }
}

enum Verdict {
    Ours,
    Theirs(Told),
}

enum Inserted {
    Ours,
    Conflict,
    WaitedInVain,
}

fn seed_of(row: &Row) -> Result<[u8; 32], Error> {
    row.seed.as_slice().try_into().map_err(|_| unreadable())
}
