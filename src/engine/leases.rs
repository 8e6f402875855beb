//! The leases of this process, renewed by one statement for all that are due.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use tokio::{sync::Notify, time::sleep};

use super::{
    Engine,
    store::{Line, in_time},
};
use crate::{
    error::{Error, ErrorKind},
    policy::DEFAULT_STORE_TIMEOUT,
    postgres::keys,
    scope::KeyId,
    telemetry::{self, Event},
};

/// A lease is due after a third of its time, so that two renewals may fail before it lapses...
const DUE_AFTER: u32 = 3;
/// ...and is looked at twice in that time.
const LOOKS: u32 = 6;

/// How often a renewal is sent that fails with 40001: under REPEATABLE READ and above one of its rows
/// is enough, and every completion writes to one.
const TRIES: u32 = 5;

pub(crate) type Owner = [u8; 16];

struct Held {
    lease: Duration,
    due: Instant,
    /// Past it nothing is renewed: the handler has had its time.
    run_until: Option<Instant>,
}

pub(crate) struct Leases {
    held: Mutex<HashMap<(KeyId, Owner), Held>>,
    shortest: Mutex<Duration>,
    shortened: Notify,
}

impl Leases {
    pub(crate) fn new() -> Self {
        Self { held: Mutex::default(), shortest: Mutex::new(Duration::from_secs(60)), shortened: Notify::new() }
    }

    /// Keeps a lease from now on, at most until `run_until`.
    pub(crate) fn hold(&self, id: KeyId, owner: Owner, lease: Duration, run_until: Option<Instant>) {
        self.held().insert((id, owner), Held { lease, due: Instant::now() + lease / DUE_AFTER, run_until });
        let mut shortest = self.shortest.lock().unwrap_or_else(PoisonError::into_inner);
        if lease < *shortest {
            *shortest = lease;
            self.shortened.notify_one();
        }
    }

    /// The answer is known and will be stored, however long that takes.
    pub(crate) fn hold_on(&self, id: KeyId, owner: Owner) {
        if let Some(held) = self.held().get_mut(&(id, owner)) {
            held.run_until = None;
        }
    }

    pub(crate) fn let_go(&self, id: KeyId, owner: Owner) {
        self.held().remove(&(id, owner));
    }

    pub(crate) fn count(&self) -> usize {
        self.held().len()
    }

    fn due(&self) -> Vec<(KeyId, Owner, i64)> {
        let now = Instant::now();
        self.held()
            .iter()
            .filter(|(_, held)| held.due <= now && held.run_until.is_none_or(|until| now < until))
            .map(|((id, owner), held)| (*id, *owner, i64::try_from(held.lease.as_millis()).unwrap_or(i64::MAX)))
            .collect()
    }

    fn renewed(&self, ids: &[Vec<u8>]) {
        let now = Instant::now();
        for ((id, _), held) in self.held().iter_mut() {
            if held.due <= now && ids.iter().any(|renewed| *renewed == id.0) {
                held.due = now + held.lease / DUE_AFTER;
            }
        }
    }

    fn pause(&self) -> Duration {
        *self.shortest.lock().unwrap_or_else(PoisonError::into_inner) / LOOKS
    }

    fn held(&self) -> MutexGuard<'_, HashMap<(KeyId, Owner), Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs on the background thread until the engine goes.
pub(crate) async fn keep_renewing(engine: Weak<Engine>, leases: Arc<Leases>) {
    let mut line = Line::default();
    loop {
        tokio::select! {
            () = sleep(leases.pause()) => {}
            () = leases.shortened.notified() => continue,
        }
        let Some(engine) = engine.upgrade() else { return };
        if let Err(error) = renew_due(&engine, &mut line).await {
            line.hang_up();
            telemetry::store_failed("leases could not be renewed", &error);
        }
    }
}

async fn renew_due(engine: &Engine, line: &mut Line) -> Result<(), Error> {
    let due = engine.leases.due();
    if due.is_empty() {
        return Ok(());
    }
    let ids: Vec<&[u8]> = due.iter().map(|(id, ..)| &id.0[..]).collect();
    let owners: Vec<&[u8]> = due.iter().map(|(_, owner, _)| &owner[..]).collect();
    let lease_ms: Vec<i64> = due.iter().map(|(.., ms)| *ms).collect();
    let mut tries = 0;
    let renewed = loop {
        tries += 1;
        let renewing = async { Ok(keys::renew(line.get(&engine.store).await?, &ids, &owners, &lease_ms).await?) };
        match in_time(DEFAULT_STORE_TIMEOUT, renewing).await {
            Err(error) if error.kind() == ErrorKind::Serialization && tries < TRIES => {}
            renewed => break renewed?,
        }
    };
    engine.leases.renewed(&renewed);
    for (id, ..) in due.iter().filter(|(id, ..)| !renewed.iter().any(|renewed| *renewed == id.0)) {
        telemetry::event(Event::NotRenewed, id);
    }
    Ok(())
}
