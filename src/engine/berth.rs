//! A connection that a handler has, and its berth: its place in the pool, and among the holders.
//!
//! Whoever has a connection may keep it for as long as it likes; a berth ends with the transaction. Postgres ends one
//! that has been idle for too long, and from then on its berth is for others, whatever the handler does: in the
//! pool there sits a stand-in meanwhile, and that goes.

use std::{
    mem,
    ops::{Deref, DerefMut},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::time::sleep;

use super::{Engine, holders::Permit, store::Checkout};
use crate::{
    error::Error,
    postgres::{AsyncPgConnection, stand_in::stand_in, witness::Seen},
    telemetry,
};

/// How often it is looked whose time is over.
const TICK: Duration = Duration::from_millis(500);

/// A place in the pool and among the holders.
pub(crate) struct Berth {
    place: Mutex<Option<Place>>,
    began: Instant,
    /// When the connection was last used, in milliseconds since it began.
    used: AtomicU64,
    /// For how long it may be idle.
    idle: Duration,
    /// What the server says of it; `None` where nobody reads along.
    seen: Option<Arc<Seen>>,
}

/// The permit is returned after the connection.
struct Place {
    /// A stand-in is in it.
    checkout: Checkout,
    _permit: Permit,
}

impl Berth {
    fn touch(&self) {
        let used = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.used.store(used, Ordering::Relaxed);
    }

    /// Whether Postgres has ended the transaction: it has said so, or it must have by now, unless a statement takes as
    /// long as that.
    fn is_over(&self) -> bool {
        if self.seen.as_ref().is_some_and(|seen| seen.is_over()) {
            return true;
        }
        let used = Duration::from_millis(self.used.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(used) > self.idle + TICK
    }

    fn leave(&self) -> Option<Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The berths that are taken.
#[derive(Default)]
pub(crate) struct Berths {
    taken: Mutex<Vec<Weak<Berth>>>,
    /// Used again: to make one takes longer than a transaction may.
    stand_ins: Mutex<Vec<AsyncPgConnection>>,
}

impl Berths {
    /// Takes the place of a connection, which may then be idle for so long.
    pub(crate) async fn take(
        self: &Arc<Self>,
        mut checkout: Checkout,
        permit: Permit,
        idle: Duration,
        seen: Option<Arc<Seen>>,
    ) -> Result<Berthed, Error> {
        let known = self.stand_ins().pop();
        let mut conn = match known {
            Some(conn) => conn,
            None => stand_in().await?,
        };
        mem::swap(&mut *checkout, &mut conn);
        let place = Mutex::new(Some(Place { checkout, _permit: permit }));
        let berth = Arc::new(Berth { place, began: Instant::now(), used: AtomicU64::new(0), idle, seen });
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        match taken.iter_mut().find(|berth| berth.strong_count() == 0) {
            Some(free) => *free = Arc::downgrade(&berth),
            None => taken.push(Arc::downgrade(&berth)),
        }
        drop(taken);
        Ok(Berthed { conn: Some(conn), berth, berths: Arc::clone(self) })
    }

    /// Gives the berths to others whose transactions are over.
    fn clear(&self) {
        let taken: Vec<_> = {
            let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
            taken.iter().filter_map(Weak::upgrade).filter(|berth| berth.is_over()).collect()
        };
        for berth in taken {
            if berth.leave().is_some() {
                telemetry::advise(
                    "a handler holds an IdemTx that Postgres has ended (Policy::idle_in_transaction): its answer will be an \
                     error, and its connection is given to others",
                );
            }
        }
    }

    fn stand_ins(&self) -> MutexGuard<'_, Vec<AsyncPgConnection>> {
        self.stand_ins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs on the background thread until the engine goes.
pub(super) async fn keep_clearing(engine: Weak<Engine>) {
    loop {
        sleep(TICK).await;
        let Some(engine) = engine.upgrade() else { return };
        engine.berths.clear();
    }
}

/// A connection with a berth. Like a [`Checkout`] it goes back to the pool only by [`give_back`](Self::give_back).
pub(crate) struct Berthed {
    /// `None` only while it leaves.
    conn: Option<AsyncPgConnection>,
    berth: Arc<Berth>,
    berths: Arc<Berths>,
}

impl Berthed {
    /// Nothing is in flight.
    pub(crate) fn give_back(mut self) {
        self.leave(Checkout::give_back);
    }

    /// Where the berth is somebody else's by now, the connection is closed.
    fn leave(&mut self, how: impl FnOnce(Checkout)) {
        let (Some(mut conn), Some(Place { mut checkout, _permit })) = (self.conn.take(), self.berth.leave()) else {
            return;
        };
        mem::swap(&mut *checkout, &mut conn);
        how(checkout);
        self.berths.stand_ins().push(conn);
    }
}

impl Drop for Berthed {
    fn drop(&mut self) {
        self.leave(drop);
    }
}

impl Deref for Berthed {
    type Target = AsyncPgConnection;

    fn deref(&self) -> &AsyncPgConnection {
        self.berth.touch();
        match &self.conn {
            Some(conn) => conn,
            None => unreachable!("it has left"),
        }
    }
}

impl DerefMut for Berthed {
    fn deref_mut(&mut self) -> &mut AsyncPgConnection {
        self.berth.touch();
        match &mut self.conn {
            Some(conn) => conn,
            None => unreachable!("it has left"),
        }
    }
}
