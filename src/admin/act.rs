//! What can be done to a key, to the one that was seen and no other.

use std::time::Duration;

use super::{Admin, Entry, State};
use crate::{
    engine::{leases::Owner, store::Checkout},
    error::Error,
    postgres::intervene,
    telemetry::{self, Event},
};

/// What became of an action. Of several at once, by hand or by requests, one is done; the others are told why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acted {
    /// It is done.
    Done,
    /// Nothing was done: somebody runs it, with so much left of the lease (`None`: without end).
    Live {
        /// By the database's clock.
        lease_left: Option<Duration>,
    },
    /// Nothing was done: this is not for a key in this state.
    Unfit(State),
    /// Nothing was done: since it was seen, somebody has claimed, completed or released it. Look again.
    Changed,
    /// Nothing was done: at this moment somebody writes the row, its owner most likely, or holds it for as long as
    /// an `IdemTx` above READ COMMITTED runs. Look again.
    Locked,
    /// Nothing was done: there is no such row any more.
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Release,
    ForceRelease,
    Expire,
}

impl Action {
    fn is_for(self, entry: &Entry) -> bool {
        match self {
            Self::Release | Self::ForceRelease => entry.stored == "outstanding",
            Self::Expire => entry.stored == "completed",
        }
    }

    fn event(self) -> Event {
        match self {
            Self::Release => Event::ReleasedByHand,
            Self::ForceRelease => Event::ForceReleased,
            Self::Expire => Event::ExpiredByHand,
        }
    }
}

impl Admin {
    /// Releases a key whose lease has lapsed. The next retry runs, as it would have by taking it over; but a
    /// [`Completer`](crate::Completer) takes it only if an attempt before the one that died has acted. What the attempt has done is unknown: another
    /// request under the key stays 422.
    ///
    /// [`Acted::Live`] while somebody runs it.
    ///
    /// # Errors
    ///
    /// Where the store fails. Past the deadline, or where the connection was lost, it may be done all the same: look
    /// again.
    pub async fn release(&self, seen: &Entry) -> Result<Acted, Error> {
        self.act(Action::Release, seen).await
    }

    /// Releases a key whoever runs it. Its owner goes on running, and is fenced off: what it writes by `IdemTx` or
    /// `complete_in` is rolled back, its answer is not stored, and its client is told what the next attempt has stored, or
    /// 409 `lease-lost`. **What it does outside the database is not undone**, and the next attempt does it again.
    ///
    /// An owner that was first has completed the key: [`Acted::Changed`], or [`Acted::Locked`] while it is at it.
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release).
    pub async fn force_release(&self, seen: &Entry) -> Result<Acted, Error> {
        self.act(Action::ForceRelease, seen).await
    }

    /// Ends the retention of a completed key: the next request with it is a first one, with whatever body. Its stored
    /// answer goes with the next round of the sweeper.
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release).
    pub async fn expire(&self, seen: &Entry) -> Result<Acted, Error> {
        self.act(Action::Expire, seen).await
    }

    async fn act(&self, action: Action, seen: &Entry) -> Result<Acted, Error> {
        if action.is_for(seen) && self.send(action, seen).await? {
            telemetry::event(action.event(), &seen.id);
            self.engine.waiters.wake(&seen.id);
            return Ok(Acted::Done);
        }
        Ok(match self.entry(seen.id).await? {
            None => Acted::Gone,
            Some(now) if !now.is_as(seen) => Acted::Changed,
            Some(now) if !action.is_for(&now) => Acted::Unfit(now.state),
            Some(now) if action == Action::Release && now.state == State::Outstanding => {
                Acted::Live { lease_left: now.lease_left }
            }
            Some(_) => Acted::Locked,
        })
    }

    async fn send(&self, action: Action, seen: &Entry) -> Result<bool, Error> {
        let nobody: Owner = rand::random();
        let write = async |conn: &mut Checkout| {
            let (id, owner) = (&seen.id.0, &seen.owner);
            Ok(match action {
                Action::Release => intervene::release(conn, id, owner, &nobody, false).await?,
                Action::ForceRelease => intervene::release(conn, id, owner, &nobody, true).await?,
                Action::Expire => intervene::expire(conn, id, owner).await?,
            })
        };
        self.ask(write).await
    }
}
