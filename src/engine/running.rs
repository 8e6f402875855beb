//! The keys that requests of this process run under an atomic policy, without a row that would say so.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Notify, futures::OwnedNotified};

use super::Engine;
use crate::scope::KeyId;

/// Each once: whoever comes while another one asks the store for the key waits for what that finds.
#[derive(Debug, Default)]
pub(crate) struct Running(Mutex<HashMap<KeyId, Stage>>);

#[derive(Debug)]
enum Stage {
    /// Somebody asks whether it may run; this tells those who wait that it knows.
    Asks(Arc<Notify>),
    Runs,
}

/// What somebody finds who wants to run a key.
pub(crate) enum Found {
    /// Nobody: it is this request's turn to ask.
    Free(Entered),
    /// Its handler runs.
    Runs,
    /// Somebody asks; ready when that is over.
    Asks(OwnedNotified),
}

impl Running {
    pub(crate) fn enter(engine: &Arc<Engine>, id: KeyId) -> Found {
        match engine.running.stages().entry(id) {
            Entry::Vacant(free) => {
                free.insert(Stage::Asks(Arc::default()));
                Found::Free(Entered { engine: Arc::clone(engine), id })
            }
            Entry::Occupied(taken) => match taken.get() {
                // Made while nobody can leave, so that no call of it is missed.
                Stage::Asks(over) => Found::Asks(Arc::clone(over).notified_owned()),
                Stage::Runs => Found::Runs,
            },
        }
    }

    pub(crate) fn runs(&self, id: &KeyId) -> bool {
        matches!(self.stages().get(id), Some(Stage::Runs))
    }

    pub(crate) fn count(&self) -> usize {
        self.stages().values().filter(|stage| matches!(stage, Stage::Runs)).count()
    }

    fn stages(&self) -> MutexGuard<'_, HashMap<KeyId, Stage>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A key that this request asks for or runs, until it is dropped.
pub(crate) struct Entered {
    engine: Arc<Engine>,
    id: KeyId,
}

impl Entered {
    /// The key is this request's, and its handler runs from now on.
    pub(crate) fn run(&self) {
        if let Some(Stage::Asks(over)) = self.engine.running.stages().insert(self.id, Stage::Runs) {
            over.notify_waiters();
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let left = self.engine.running.stages().remove(&self.id);
        match left {
            Some(Stage::Runs) => self.engine.waiters.wake(&self.id),
            // Whoever only asked has nothing to tell those who wait for an answer.
            Some(Stage::Asks(over)) => over.notify_waiters(),
            None => {}
        }
    }
}
