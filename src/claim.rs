//! The claim: one statement decides who runs a request; everybody else is told what to do instead.
//!
//! The row is inserted where there is none. Where there is one, a second statement looks at it (a
//! losing INSERT cannot see the winner's row, its snapshot is older) and the table of the protocol
//! says what follows; [`decide`] is that table. A row that may be taken over is taken over by a third
//! statement, pinned to the owner and state that were seen. Whoever loses a race starts again with a
//! new statement, a bounded number of times.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use actix_web::http::StatusCode;

use crate::{
    engine::{
        Engine,
        ending::{Ending, millis},
        leases::Owner,
        store::{Checkout, in_time},
    },
    error::{Error, ErrorKind},
    fingerprint::{Fingerprint, RECIPE_VERSION},
    key::IdempotencyKey,
    policy::Policy,
    postgres::keys::{self, NewClaim, Row, Takeover},
    scope::{KeyId, Scope, readable},
    snapshot::{ResponseSnapshot, SNAPSHOT_VERSION},
    telemetry::{self, Event},
};

/// How often a claim starts again after losing a race. Each time somebody else has won one, so that
/// more than a few mean that the key is busy: 409 is the truth.
const ROUNDS: u32 = 5;

/// What a request asks of the store.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) id: KeyId,
    pub(crate) key: IdempotencyKey,
    pub(crate) scope: Scope,
    pub(crate) fingerprint: Fingerprint,
}

impl Ask {
    pub(crate) fn new(key: IdempotencyKey, scope: Scope, fingerprint: Fingerprint) -> Self {
        Self { id: scope.id(&key), key, scope, fingerprint }
    }
}

/// What the store answers.
#[derive(Debug)]
pub(crate) enum Claim {
    /// Run the handler.
    Fresh(Lease),
    /// Send the stored answer.
    Replay(ResponseSnapshot),
    /// Somebody runs it; the lease ends in so long.
    Outstanding { lease_left: Duration },
    /// The key was used for something else.
    KeyReused,
    /// The row was written by a newer version of this crate.
    NewerVersion,
    /// It would have been claimed, but this process is going down.
    Draining,
}

/// A claim that is held: renewed in the background until it is ended by [`complete`](Self::complete)
/// or [`release`](Self::release). Dropped before that, it releases the key in the background.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) id: KeyId,
    pub(crate) attempt: i32,
    pub(crate) seed: [u8; 32],
    owner: Owner,
    policy: Arc<Policy>,
    ending: Option<Ending>,
    engine: EngineRef,
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
}

#[derive(Clone)]
struct EngineRef(Arc<Engine>);

impl std::fmt::Debug for EngineRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Engine")
    }
}

impl Lease {
    /// Ends the attempt with an answer that is kept.
    pub(crate) async fn complete(self, snapshot: ResponseSnapshot) -> Ended {
        self.end(Ending::Complete(snapshot)).await
    }

    /// Ends the attempt and gives the key back; the status says how the next one may use it.
    pub(crate) async fn release(self, status: StatusCode) -> Ended {
        telemetry::event(Event::Released, &self.id);
        self.end(Ending::Release(Some(status))).await
    }

    async fn end(mut self, ending: Ending) -> Ended {
        let engine = Arc::clone(&self.engine.0);
        // From here on, whoever drops this future leaves the ending to the background.
        self.ending = Some(ending.clone());
        match engine.end(self.id, self.owner, &ending, &self.policy).await {
            Ok(landed) => {
                self.ending = None;
                engine.leases.let_go(self.id, self.owner);
                engine.waiters.wake(&self.id);
                if landed { Ended::Landed } else { Ended::Lost }
            }
            Err(error) => {
                telemetry::store_failed("an attempt could not be ended at once", &error);
                Ended::Later
            }
        }
    }
}

impl Lease {
    /// Nothing was claimed.
    fn disarm(mut self) {
        self.ending = None;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(ending) = self.ending.take() {
            self.engine.0.end_later(self.id, self.owner, ending, Arc::clone(&self.policy));
        }
    }
}

/// Claims the key of a request, or says why not.
pub(crate) async fn claim(engine: &Arc<Engine>, ask: &Ask, policy: &Arc<Policy>) -> Result<Claim, Error> {
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
pub(crate) async fn look_again(engine: &Engine, ask: &Ask, policy: &Policy) -> Result<Option<Claim>, Error> {
    let Some(row) = engine.look(&ask.id, policy).await? else { return Ok(None) };
    Ok(match decide(&row, &ask.fingerprint, &[]) {
        Decision::Replay | Decision::ReplayUncompared => Some(Claim::Replay(restore(row)?)),
        Decision::KeyReused => Some(Claim::KeyReused),
        Decision::NewerVersion => Some(Claim::NewerVersion),
        Decision::Mine | Decision::Outstanding | Decision::TakeOver(_) => None,
    })
}

/// One claim, however many statements it takes.
struct Attempt<'a> {
    engine: &'a Arc<Engine>,
    ask: &'a Ask,
    policy: &'a Arc<Policy>,
    owner: Owner,
    seed: [u8; 32],
    tenant: Option<String>,
    principal: Option<String>,
    resource: String,
}

impl<'a> Attempt<'a> {
    fn new(engine: &'a Arc<Engine>, ask: &'a Ask, policy: &'a Arc<Policy>) -> Self {
        Self {
            engine,
            ask,
            policy,
            owner: rand::random(),
            seed: rand::random(),
            tenant: ask.scope.tenant().map(readable),
            principal: ask.scope.principal().map(readable),
            resource: readable(ask.scope.resource()),
        }
    }

    async fn run(&self, unfinished: &mut Option<Lease>) -> Result<Claim, Error> {
        let mut conn = self.engine.store.connection().await?;
        let lease = unfinished.get_or_insert_with(|| self.lease());
        let verdict = self.rounds(&mut conn, lease).await?;
        conn.give_back();
        let lease = unfinished.take();
        Ok(match (verdict, lease) {
            (Verdict::Ours, Some(lease)) => self.claimed(lease),
            (Verdict::Ours, None) => return Err(Error::new(ErrorKind::Database, "a claim without its guard")),
            (Verdict::Theirs(claim), lease) => {
                lease.into_iter().for_each(Lease::disarm);
                claim
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
            let claim = match row {
                // Somebody is about to insert it, and takes long.
                None if waited => Claim::Outstanding { lease_left: self.policy.lease },
                None if draining => Claim::Draining,
                // It was released by a ROLLBACK or swept since the INSERT met it.
                None => continue,
                Some(row) => match self.meet(conn, row, lease).await? {
                    Some(verdict) => return Ok(verdict),
                    // Whoever had it locked still has.
                    None if waited => Claim::Outstanding { lease_left: self.policy.lease },
                    None => continue,
                },
            };
            return Ok(Verdict::Theirs(claim));
        }
        Ok(Verdict::Theirs(Claim::Outstanding { lease_left: self.policy.lease }))
    }

    async fn insert(&self, conn: &mut Checkout) -> Result<Inserted, Error> {
        let began = Instant::now();
        match keys::insert(conn, &self.new_claim()).await.map_err(Error::from) {
            Ok(true) => {
                telemetry::event(Event::Fresh, &self.ask.id);
                Ok(Inserted::Ours)
            }
            Ok(false) => Ok(Inserted::Conflict),
            Err(error) if error.kind() == ErrorKind::Serialization => Ok(Inserted::Conflict),
            // lock_timeout: the driver does not tell its SQLSTATE, and the text may be in any language.
            Err(error) if error.kind() == ErrorKind::Database && began.elapsed() >= self.policy.lock_timeout() => {
                Ok(Inserted::WaitedInVain)
            }
            Err(error) => Err(error),
        }
    }

    /// What follows from a row that is there; `None`: it is another one by now.
    async fn meet(&self, conn: &mut Checkout, row: Row, lease: &mut Lease) -> Result<Option<Verdict>, Error> {
        self.engine.recent.remember(&self.ask.id);
        let claim = match decide(&row, &self.ask.fingerprint, &self.owner) {
            Decision::TakeOver(_) if self.engine.is_draining() => Claim::Draining,
            Decision::TakeOver(how) => {
                let ours = self.take_over(conn, &row, how, lease).await?;
                return Ok(ours.then_some(Verdict::Ours));
            }
            Decision::Mine => {
                (lease.attempt, lease.seed) = (row.attempt, seed_of(&row)?);
                return Ok(Some(Verdict::Ours));
            }
            Decision::Replay => Claim::Replay(restore(row)?),
            Decision::ReplayUncompared => {
                telemetry::event(Event::RecipeChanged, &self.ask.id);
                Claim::Replay(restore(row)?)
            }
            Decision::Outstanding => Claim::Outstanding { lease_left: lease_left(&row) },
            Decision::KeyReused => Claim::KeyReused,
            Decision::NewerVersion => Claim::NewerVersion,
        };
        Ok(Some(Verdict::Theirs(claim)))
    }

    async fn take_over(&self, conn: &mut Checkout, row: &Row, how: How, lease: &mut Lease) -> Result<bool, Error> {
        // What a retry goes on with, and a new operation does not.
        let (attempt, seed) =
            if how.is_retry() { (row.attempt.saturating_add(1), seed_of(row)?) } else { (1, self.seed) };
        let over =
            Takeover { seen_owner: &row.owner, seen_state: &row.state, attempt, seed: &seed, anew: !how.is_retry() };
        match keys::take_over(conn, &self.new_claim(), &over).await.map_err(Error::from) {
            Ok(true) => {
                (lease.attempt, lease.seed) = (attempt, seed);
                telemetry::event(how.event(), &self.ask.id);
                Ok(true)
            }
            Ok(false) => Ok(false),
            Err(error) if error.kind() == ErrorKind::Serialization => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn claimed(&self, lease: Lease) -> Claim {
        let run_until = Instant::now() + self.policy.run_limit();
        self.engine.recent.remember(&self.ask.id);
        self.engine.leases.hold(lease.id, lease.owner, self.policy.lease, Some(run_until));
        self.engine.sweep(self.policy.retention);
        Claim::Fresh(lease)
    }

    fn lease(&self) -> Lease {
        Lease {
            id: self.ask.id,
            attempt: 1,
            seed: self.seed,
            owner: self.owner,
            policy: Arc::clone(self.policy),
            ending: Some(Ending::Release(None)),
            engine: EngineRef(Arc::clone(self.engine)),
        }
    }

    fn new_claim(&self) -> NewClaim<'_> {
        NewClaim {
            id: &self.ask.id.0,
            domain: self.ask.scope.domain().as_str(),
            tenant: self.tenant.as_deref(),
            principal: self.principal.as_deref(),
            resource: &self.resource,
            key: self.ask.key.as_str(),
            fingerprint: &self.ask.fingerprint.digest,
            recipe: &self.ask.fingerprint.recipe.0,
            recipe_version: RECIPE_VERSION,
            owner: &self.owner,
            seed: &self.seed,
            lease_ms: millis(self.policy.lease),
            retention_ms: self.policy.retention.map(millis),
            lock_timeout_ms: millis(self.policy.lock_timeout()),
        }
    }
}

enum Verdict {
    Ours,
    Theirs(Claim),
}

enum Inserted {
    Ours,
    Conflict,
    WaitedInVain,
}

/// What the table of the protocol says about a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision {
    /// An earlier try of this very claim has landed.
    Mine,
    Replay,
    /// The request cannot be compared with the one that was answered: the recipe has changed.
    ReplayUncompared,
    Outstanding,
    KeyReused,
    NewerVersion,
    TakeOver(How),
}

/// Why a row may be taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// It is as good as absent.
    Expired,
    /// Nothing was done: a corrected request may use the key.
    Corrected,
    /// The same request again after a release.
    Retried,
    /// The same request again after its lease lapsed.
    Lapsed,
}

impl How {
    /// A retry goes on with the attempt count and the seed of the row.
    fn is_retry(self) -> bool {
        matches!(self, Self::Retried | Self::Lapsed)
    }

    fn event(self) -> Event {
        match self {
            Self::Expired => Event::Expired,
            Self::Corrected | Self::Retried => Event::Retried,
            Self::Lapsed => Event::TakenOver,
        }
    }
}

/// The table: row by request. What cannot be compared is never taken for the same request, unless
/// there is an answer to give.
fn decide(row: &Row, fingerprint: &Fingerprint, owner: &[u8]) -> Decision {
    if row.expired {
        return Decision::TakeOver(How::Expired);
    }
    if row.recipe_version > RECIPE_VERSION || row.snapshot_version.is_some_and(|version| version > SNAPSHOT_VERSION) {
        return Decision::NewerVersion;
    }
    let comparable = row.recipe_version == RECIPE_VERSION && row.recipe == fingerprint.recipe.0;
    let same = comparable && row.fingerprint == fingerprint.digest;
    let nothing_done = row.status.is_some_and(|status| status < 500);
    match row.state.as_str() {
        "completed" if same => Decision::Replay,
        "completed" if !comparable => Decision::ReplayUncompared,
        "outstanding" if row.owner == owner => Decision::Mine,
        "outstanding" if same && row.lease_left_ms <= 0 => Decision::TakeOver(How::Lapsed),
        "outstanding" if same || !comparable => Decision::Outstanding,
        "released" if same => Decision::TakeOver(How::Retried),
        "released" if nothing_done => Decision::TakeOver(How::Corrected),
        "released" if !comparable => Decision::Outstanding,
        _ => Decision::KeyReused,
    }
}

fn restore(row: Row) -> Result<ResponseSnapshot, Error> {
    let (Some(status), Some(names), Some(values)) = (row.status, row.header_names, row.header_values) else {
        return Err(unreadable());
    };
    ResponseSnapshot::restore(status, &names, values, row.body).ok_or_else(unreadable)
}

fn seed_of(row: &Row) -> Result<[u8; 32], Error> {
    row.seed.as_slice().try_into().map_err(|_| unreadable())
}

fn unreadable() -> Error {
    Error::new(ErrorKind::Schema, "a row of idempotency_keys cannot be read: it was not written by this crate")
}

fn lease_left(row: &Row) -> Duration {
    Duration::from_millis(row.lease_left_ms.max(0).unsigned_abs())
}
