//! How an attempt ends: its answer is stored, or its key is released. At once if the store answers,
//! else later on the background thread, as long as that may still change something.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use actix_web::http::StatusCode;
use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::time::sleep;

use super::{
    Engine, background,
    leases::Owner,
    store::in_time,
    watch::{Late, Waiting},
};
use crate::{
    error::{Error, ErrorKind},
    policy::Policy,
    postgres::{ending, keys, row::Row},
    scope::KeyId,
    snapshot::ResponseSnapshot,
    telemetry::{self, Event},
    transaction::Parts,
};

/// How often a statement is sent again that can never succeed, and one that lost a race at once.
const REFUSALS: u32 = 3;

#[derive(Debug, Clone)]
pub(crate) enum Ending {
    Complete(ResponseSnapshot),
    /// With what the attempt has answered, and whether it has done what a ROLLBACK does not undo; `None` where nothing is
    /// known beyond what the row says of those before it.
    Release {
        status: Option<StatusCode>,
        acted: Option<bool>,
    },
    /// Nobody is to try again: for the retention of the key, or until the lease ends.
    Hold {
        for_retention: bool,
    },
}

impl Engine {
    /// Ends an attempt. `false`: the lease was lost.
    pub(crate) async fn end(&self, id: KeyId, owner: Owner, ending: &Ending, policy: &Policy) -> Result<bool, Error> {
        let mut tries = 0;
        loop {
            tries += 1;
            match in_time(policy.store_timeout, self.send(id, owner, ending, policy.lock_timeout())).await {
                Err(error) if error.kind() == ErrorKind::Serialization && tries < REFUSALS => {}
                outcome => return outcome,
            }
        }
    }

    async fn send(&self, id: KeyId, owner: Owner, ending: &Ending, patience: Duration) -> Result<bool, Error> {
        let mut conn = self.store.connection().await?;
        let patience = millis(patience);
        let ours = match ending {
            Ending::Complete(snapshot) => {
                let parts = Parts::of(snapshot);
                let answer = parts.answer(snapshot);
                ending::complete(&mut conn, &id.0, &owner, &answer, patience).await?
            }
            Ending::Hold { for_retention } => ending::hold(&mut conn, &id.0, &owner, *for_retention, patience).await?,
            Ending::Release { status, acted } => {
                ending::release(&mut conn, &id.0, &owner, status.map(stored), *acted, patience).await?
            }
        };
        conn.give_back();
        Ok(ours)
    }

    /// Ends an attempt on the background thread. A completion is sent until it lands or the lease turns
    /// out to be lost; a release only as long as the lease would last anyway.
    pub(crate) fn end_later(self: &Arc<Self>, id: KeyId, owner: Owner, ending: Ending, policy: Arc<Policy>) {
        let engine = Arc::clone(self);
        let waiting = matches!(ending, Ending::Complete(_)).then(|| Late::enter(self));
        let work = async move {
            engine.leases.hold_on(id, owner);
            engine.keep_ending(id, owner, ending, &policy, waiting).await;
            engine.leases.let_go(id, owner);
            engine.waiters.wake(&id);
        };
        background::handle().spawn(self.tasks.track_future(work));
    }

    async fn keep_ending(
        &self,
        id: KeyId,
        owner: Owner,
        mut ending: Ending,
        policy: &Policy,
        waiting: Option<Waiting>,
    ) {
        let lapses = Instant::now() + policy.lease;
        let arrives = Instant::now() + policy.store_timeout;
        let delays = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(50))
            .with_max_delay(Duration::from_secs(5))
            .with_jitter()
            .without_max_times()
            .build();
        let mut refusals = 0;
        for delay in delays {
            match self.end(id, owner, &ending, policy).await {
                Ok(true) => return telemetry::event(Event::EndedLate, &id),
                Ok(false) => {
                    let is_settled = self.is_settled(id, owner, policy).await;
                    // A claim that was given up before it was acknowledged may still be on its way.
                    let may_arrive = matches!(ending, Ending::Release { status: None, .. }) && Instant::now() < arrives;
                    if is_settled || !may_arrive {
                        let event = if is_settled { Event::EndedLate } else { Event::CompletionLost };
                        return telemetry::event(event, &id);
                    }
                }
                Err(error) => {
                    telemetry::store_failed("an attempt could not be ended yet", &error);
                    waiting.iter().for_each(|waiting| waiting.retried(&id));
                    refusals = if error.is_transient() { 0 } else { refusals + 1 };
                }
            }
            match &ending {
                Ending::Release { .. } | Ending::Hold { .. } if Instant::now() >= lapses => return,
                Ending::Complete(snapshot) if refusals == REFUSALS && snapshot.body().is_some() => {
                    ending = Ending::Complete(snapshot.without_body());
                    refusals = 0;
                }
                _ if refusals == REFUSALS => return telemetry::event(Event::CompletionLost, &id),
                _ => {}
            }
            sleep(delay).await;
        }
    }

    /// An earlier try may have landed and only its acknowledgement been lost.
    async fn is_settled(&self, id: KeyId, owner: Owner, policy: &Policy) -> bool {
        let row = self.look(&id, policy).await;
        row.is_ok_and(|row| row.is_some_and(|row| row.is_held() || row.owner == owner && row.state != "outstanding"))
    }

    /// Whether a request runs the key in a transaction of its own, here or elsewhere.
    pub(crate) async fn is_locked(&self, id: &KeyId, policy: &Policy) -> Result<bool, Error> {
        let ask = async {
            let mut conn = self.store.connection().await?;
            let is_held = keys::is_held(&mut conn, id.lock()).await?;
            conn.give_back();
            Ok(is_held)
        };
        if self.running.runs(id) { Ok(true) } else { in_time(policy.store_timeout, ask).await }
    }

    /// The row as it is, or `None`. Asked again where the connection turns out to be dead.
    pub(crate) async fn look(&self, id: &KeyId, policy: &Policy) -> Result<Option<Row>, Error> {
        match self.look_once(id, policy).await {
            Err(error) if error.kind() == ErrorKind::Connection => self.look_once(id, policy).await,
            row => row,
        }
    }

    async fn look_once(&self, id: &KeyId, policy: &Policy) -> Result<Option<Row>, Error> {
        let look = async {
            let mut conn = self.store.connection().await?;
            let row = keys::look(&mut conn, &id.0).await?;
            conn.give_back();
            Ok(row)
        };
        in_time(policy.store_timeout, look).await
    }
}

/// As Postgres takes it.
pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).max(1)
}

pub(crate) fn stored(status: StatusCode) -> i16 {
    // Three digits by the type's own rule.
    status.as_u16().cast_signed()
}
