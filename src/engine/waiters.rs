//! Requests that wait for another's answer, without a connection: woken by whoever completes or
//! releases the key in this process, and otherwise by one query per tick for all of them.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    sync::{Notify, futures::OwnedNotified},
    time::{Instant, sleep, timeout_at},
};

use super::{
    Engine,
    store::{Line, in_time},
};
use crate::{
    error::Error,
    policy::{DEFAULT_STORE_TIMEOUT, OnOutstanding, Policy},
    postgres::keys,
    scope::KeyId,
    telemetry::{self, Event},
};

/// How often the keys of other processes are looked at: a tenth of a second, which a person does not
/// notice, at ten small queries a second at most.
const TICK: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(crate) struct Waiters {
    waiting: Mutex<HashMap<KeyId, Waiting>>,
    first: Notify,
}

struct Waiting {
    wake: Arc<Notify>,
    seats: usize,
    /// Of a request that may run without a row.
    lock: Option<i64>,
}

/// How one request waits, as long as its policy says: it looks, and while the key is outstanding it is
/// woken to look again.
pub(crate) struct Patience {
    ends: Instant,
    seat: Option<Seat>,
    woken: Option<OwnedNotified>,
    /// So long it has waited already, and since then it waits now.
    waited: Duration,
    since: Option<Instant>,
}

impl Patience {
    pub(crate) fn new(policy: &Policy) -> Self {
        let ends = Instant::now() + policy.patience();
        Self { ends, seat: None, woken: None, waited: Duration::ZERO, since: None }
    }

    /// Before each look: what becomes of the key from now on is not missed.
    pub(crate) fn listen(&mut self) {
        self.woken = self.seat.as_ref().map(Seat::woken);
    }

    /// Ready when it is time to look again; `false` where the wait is over, or none is wanted.
    pub(crate) async fn wait(&mut self, engine: &Engine, id: KeyId, policy: &Policy) -> bool {
        match self.woken.take() {
            Some(woken) => {
                self.since = Some(Instant::now());
                let woken = timeout_at(self.ends, woken).await.is_ok();
                self.pause();
                woken
            }
            // Once seated it misses no completion; so it looks again before the wait begins.
            None => {
                if let OnOutstanding::Wait(_) = policy.on_outstanding {
                    telemetry::event(Event::Waited, &id);
                    self.seat = engine.waiters.sit(id, policy);
                }
                self.seat.is_some()
            }
        }
    }
}

impl Patience {
    fn pause(&mut self) {
        self.waited += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
    }
}

impl Drop for Patience {
    /// Also where whoever waited has hung up.
    fn drop(&mut self) {
        if self.seat.is_some() {
            self.pause();
            telemetry::waited(self.waited);
        }
    }
}

/// One request's place among those that wait; dropped when it no longer does.
struct Seat {
    waiters: Arc<Waiters>,
    id: KeyId,
    wake: Arc<Notify>,
}

impl Seat {
    /// Ready when the key has been completed or released after this call.
    fn woken(&self) -> OwnedNotified {
        Arc::clone(&self.wake).notified_owned()
    }
}

impl Waiters {
    /// `None` where the policy's seats are all taken.
    fn sit(self: &Arc<Self>, id: KeyId, policy: &Policy) -> Option<Seat> {
        let mut waiting = self.waiting();
        let taken: usize = waiting.values().map(|waiting| waiting.seats).sum();
        if taken >= policy.max_waiting {
            return None;
        }
        let lock = policy.is_atomic.then(|| id.lock());
        let entry = waiting.entry(id).or_insert_with(|| Waiting { wake: Arc::default(), seats: 0, lock });
        entry.seats += 1;
        let wake = Arc::clone(&entry.wake);
        if taken == 0 {
            self.first.notify_one();
        }
        Some(Seat { waiters: Arc::clone(self), id, wake })
    }

    /// Somebody has completed or released this key.
    pub(crate) fn wake(&self, id: &KeyId) {
        if let Some(waiting) = self.waiting().get(id) {
            waiting.wake.notify_waiters();
        }
    }

    fn all(&self) -> Vec<(KeyId, Option<i64>)> {
        self.waiting().iter().map(|(id, waiting)| (*id, waiting.lock)).collect()
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<KeyId, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Entry::Occupied(mut entry) = self.waiters.waiting().entry(self.id) {
            entry.get_mut().seats -= 1;
            if entry.get().seats == 0 {
                entry.remove();
            }
        }
    }
}

/// Runs on the background thread until the engine goes.
pub(crate) async fn keep_looking(engine: Weak<Engine>, waiters: Arc<Waiters>) {
    let mut line = Line::default();
    loop {
        let waited = waiters.all();
        if waited.is_empty() {
            line.hang_up();
            waiters.first.notified().await;
        } else {
            let Some(engine) = engine.upgrade() else { return };
            if let Err(error) = look(&engine, &waited, &mut line).await {
                line.hang_up();
                telemetry::store_failed("waiting requests could not be looked for", &error);
            }
        }
        sleep(TICK).await;
    }
}

async fn look(engine: &Engine, waited: &[(KeyId, Option<i64>)], line: &mut Line) -> Result<(), Error> {
    let ids: Vec<&[u8]> = waited.iter().map(|(id, _)| &id.0[..]).collect();
    let locks: Vec<Option<i64>> = waited.iter().map(|(_, lock)| *lock).collect();
    let settled = in_time(DEFAULT_STORE_TIMEOUT, async {
        Ok(keys::settled(line.get(&engine.store).await?, &ids, &locks).await?)
    })
    .await?;
    for (id, _) in waited.iter().filter(|(id, _)| settled.iter().any(|settled| *settled == id.0)) {
        engine.waiters.wake(id);
    }
    Ok(())
}
