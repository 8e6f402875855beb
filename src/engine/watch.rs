//! What a process notices of itself while it runs: that nobody sweeps, and that answers wait to be stored.

use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};

use super::{
    Engine,
    store::{Line, in_time},
};
use crate::{error::Error, policy::DEFAULT_STORE_TIMEOUT, postgres::gauges, scope::KeyId, sweeper::Pace, telemetry};

/// How often an engine looks for rows that nobody has swept: every five minutes, or as often as the shortest retention
/// in use. It is one look into an index, of a thousand rows at most.
pub(super) const INTERVAL: Duration = Duration::from_secs(5 * 60);
/// A row that has been expired for an hour has outlived sixty rounds of a sweeper...
const LATE: Duration = Duration::from_secs(60 * 60);
/// ...and one for two days a job that sweeps once a night, where this engine leaves it to somebody else.
const LATE_FOR_OTHERS: Duration = Duration::from_secs(2 * 24 * 60 * 60);

/// How often it is said that rows are not swept: it takes somebody a while to do something about it.
const SWEEPING_SAID: Duration = Duration::from_secs(60 * 60);
/// How often it is said that answers wait: while a store is down the number grows.
const WAITING_SAID: Duration = Duration::from_secs(60);

/// Says a thing now and then, however often it is so.
#[derive(Debug)]
struct Seldom {
    every: Duration,
    said: Option<Instant>,
}

impl Seldom {
    fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.said.is_none_or(|said| now.saturating_duration_since(said) >= self.every);
        if is_due {
            self.said = Some(now);
        }
        is_due
    }
}

/// Answers that are known and not stored.
#[derive(Debug)]
pub(crate) struct Late(Mutex<(usize, Seldom)>);

impl Default for Late {
    fn default() -> Self {
        Self(Mutex::new((0, Seldom { every: WAITING_SAID, said: None })))
    }
}

impl Late {
    /// One more waits, until what this returns is dropped.
    pub(super) fn enter(engine: &Arc<Engine>) -> Waiting {
        engine.late.0.lock().unwrap_or_else(PoisonError::into_inner).0 += 1;
        Waiting(Arc::clone(engine))
    }
}

/// An answer that waits.
pub(super) struct Waiting(Arc<Engine>);

impl Waiting {
    /// It was sent to the store again, in vain.
    pub(super) fn retried(&self, id: &KeyId) {
        let (answers, is_due) = {
            let mut late = self.0.late.0.lock().unwrap_or_else(PoisonError::into_inner);
            (late.0, late.1.is_due(Instant::now()))
        };
        if is_due {
            telemetry::completion_retried(id, answers);
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.late.0.lock().unwrap_or_else(PoisonError::into_inner).0 -= 1;
    }
}

/// Runs on the background thread until the engine goes.
pub(super) async fn keep_watching(engine: Weak<Engine>, pace: Arc<Pace>, is_swept_by_others: bool) {
    let late = if is_swept_by_others { LATE_FOR_OTHERS } else { LATE };
    let mut seldom = Seldom { every: SWEEPING_SAID, said: None };
    loop {
        pace.wait().await;
        let Some(engine) = engine.upgrade() else { return };
        match oldest_expired(&engine).await {
            Ok(oldest) if oldest >= late && seldom.is_due(Instant::now()) => telemetry::sweeping_late(oldest),
            Ok(_) => {}
            Err(error) => telemetry::store_failed("whether expired rows are swept could not be seen", &error),
        }
    }
}

/// By a connection outside the pool's count, as the sweeper's: a pool that is used up hides nothing.
async fn oldest_expired(engine: &Engine) -> Result<Duration, Error> {
    let mut line = Line::default();
    let looking = async { Ok(gauges::oldest_expired(line.get(&engine.store).await?).await?) };
    let seconds = in_time(DEFAULT_STORE_TIMEOUT, looking).await?;
    // Of a clock that was set back: none.
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_on_is_said_again_after_its_interval_and_not_before() {
        let mut seldom = Seldom { every: Duration::from_secs(60), said: None };
        let began = Instant::now();
        let due = |seconds: u64| began + Duration::from_secs(seconds);
        let said = [0, 1, 59, 60, 61, 119, 120, 500, 501].map(|seconds| seldom.is_due(due(seconds)));
        assert_eq!(said, [true, false, false, true, false, false, true, true, false]);
    }
}
