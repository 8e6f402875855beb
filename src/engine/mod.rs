//! What all wraps of one pool share: the store, the leases, those who wait, and the loops on the
//! background thread.

pub(crate) mod background;
pub(crate) mod berth;
pub(crate) mod ending;
mod flush;
pub(crate) mod holders;
pub(crate) mod leases;
mod looks;
mod recent;
pub(crate) mod running;
pub(crate) mod store;
mod waiters;
mod watch;

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::{OnceCell, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub(crate) use self::waiters::Patience;
use self::{
    berth::Berths, flush::Wish, holders::Holders, leases::Leases, looks::Looks, recent::Recent, running::Running,
    store::Store, waiters::Waiters, watch::Late,
};
use crate::{
    check::{Finding, Severity},
    error::Error,
    postgres::{
        AsyncPgConnection, PgPool,
        transactions::{self, Session},
    },
    sweeper::{Pace, Sweeper, Sweeping},
    telemetry,
};

/// Whether expired rows go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sweeps {
    /// From the first protected request on.
    NotYet,
    /// That is left to somebody else.
    Never,
    Every(Duration),
}

pub(crate) struct Engine {
    pub(crate) store: Store,
    pub(crate) leases: Arc<Leases>,
    pub(crate) waiters: Arc<Waiters>,
    pub(crate) recent: Recent,
    /// Whatever a graceful shutdown waits for.
    pub(crate) tasks: TaskTracker,
    draining: AtomicBool,
    anonymous: AtomicBool,
    /// Of what the log has been told.
    advised: Mutex<HashSet<(&'static str, Option<String>)>>,
    sweeping: OnceLock<Option<Sweeping>>,
    unfinished: OnceLock<Duration>,
    watching: OnceLock<Arc<Pace>>,
    late: Late,
    pub(crate) holders: Arc<Holders>,
    pub(crate) berths: Arc<Berths>,
    pub(crate) running: Running,
    session: OnceCell<Arc<Session>>,
    flushes: mpsc::UnboundedSender<Wish>,
    looks: Looks,
    /// Ends the loops when the engine goes.
    gone: CancellationToken,
}

impl Engine {
    pub(crate) fn new(pool: PgPool) -> Arc<Self> {
        telemetry::describe();
        let (flushes, wishes) = mpsc::unbounded_channel();
        let (looks, asked) = Looks::new();
        let engine = Arc::new(Self {
            holders: Holders::of(&pool),
            berths: Arc::default(),
            running: Running::default(),
            session: OnceCell::new(),
            flushes,
            looks,
            store: Store { pool },
            leases: Arc::new(Leases::new()),
            waiters: Arc::default(),
            recent: Recent::new(),
            tasks: TaskTracker::new(),
            draining: AtomicBool::new(false),
            anonymous: AtomicBool::new(false),
            advised: Mutex::default(),
            sweeping: OnceLock::new(),
            unfinished: OnceLock::new(),
            watching: OnceLock::new(),
            late: Late::default(),
            gone: CancellationToken::new(),
        });
        engine.go_on(leases::keep_renewing(Arc::downgrade(&engine), Arc::clone(&engine.leases)));
        engine.go_on(waiters::keep_looking(Arc::downgrade(&engine), Arc::clone(&engine.waiters)));
        engine.go_on(flush::keep_flushing(Arc::downgrade(&engine), wishes));
        engine.go_on(looks::look_for_all(Arc::downgrade(&engine), asked));
        engine.go_on(berth::keep_clearing(Arc::downgrade(&engine)));
        engine
    }

    /// On the background thread, and no longer than the engine: whatever a loop waits for then does not keep it.
    fn go_on(&self, work: impl Future<Output = ()> + Send + 'static) {
        background::handle().spawn(self.gone.clone().run_until_cancelled_owned(work));
    }

    /// What every connection of the pool starts a transaction with, asked once.
    pub(crate) async fn session(&self, conn: &mut AsyncPgConnection) -> Result<Arc<Session>, Error> {
        let session = self.session.get_or_try_init(async || transactions::session(conn).await.map(Arc::new)).await?;
        Ok(Arc::clone(session))
    }

    /// From now on nothing new is claimed; answers that are stored are still replayed.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        self.tasks.close();
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// How many keys are held: by leases, and by transactions of their own.
    pub(crate) fn outstanding(&self) -> usize {
        self.leases.count() + self.running.count()
    }

    /// Whether this is the first request of the process that has a key and no principal.
    pub(crate) fn first_anonymous(&self) -> bool {
        !self.anonymous.swap(true, Ordering::Relaxed)
    }

    /// Tells the log what is more than a notice, each once.
    pub(crate) fn advise(&self, findings: &[Finding]) {
        for finding in findings.iter().filter(|finding| finding.severity > Severity::Notice) {
            let is_news = {
                let mut advised = self.advised.lock().unwrap_or_else(PoisonError::into_inner);
                advised.insert((finding.name, finding.about.clone()))
            };
            if is_news {
                telemetry::advise(&finding.to_string());
            }
        }
    }

    /// Starts the sweeper with the first protected request, and the look at whether anybody sweeps; `retention` makes the
    /// rounds of both shorter.
    pub(crate) fn sweep(self: &Arc<Self>, retention: Option<Duration>) {
        let sweeping = self.sweeping.get_or_init(|| Some(self.sweeper().spawn()));
        let watching = self.watching.get_or_init(|| self.watch(sweeping.is_none()));
        if let Some(retention) = retention {
            watching.at_least_every(retention);
            sweeping.iter().for_each(|sweeping| sweeping.at_least_every(retention));
        }
    }

    fn sweeper(&self) -> Sweeper {
        let sweeper = Sweeper::new(self.store.pool.clone());
        match self.unfinished.get() {
            Some(kept) => sweeper.keep_unfinished(*kept),
            None => sweeper,
        }
    }

    /// For so long half-done keys stay after they have expired. Too late once a request has been protected.
    pub(crate) fn keep_unfinished(&self, kept: Duration) {
        let _ = self.unfinished.set(kept);
    }

    fn watch(self: &Arc<Self>, is_swept_by_others: bool) -> Arc<Pace> {
        let pace = Arc::new(Pace::new(watch::INTERVAL));
        self.go_on(watch::keep_watching(Arc::downgrade(self), Arc::clone(&pace), is_swept_by_others));
        pace
    }

    pub(crate) fn sweeps(&self) -> Sweeps {
        match self.sweeping.get() {
            None => Sweeps::NotYet,
            Some(None) => Sweeps::Never,
            Some(Some(sweeping)) => Sweeps::Every(sweeping.interval()),
        }
    }

    /// Somebody else sweeps. Too late once a request has been protected.
    pub(crate) fn never_sweep(&self) {
        let _ = self.sweeping.set(None);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.gone.cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tokio::time::sleep;

    use super::*;
    use crate::pool::PoolBuilder;

    #[tokio::test]
    async fn nothing_of_an_engine_goes_on_when_it_is_dropped() {
        let pool = PoolBuilder::new("postgres://nobody@127.0.0.1:1/nothing").build().unwrap();
        let alive = || background::handle().metrics().num_alive_tasks();
        let before = alive();
        let engines: Vec<_> = (0..100).map(|_| Engine::new(pool.clone())).collect();
        engines.iter().for_each(|engine| engine.sweep(None));
        // Five loops each, the sweeper, and the look at whether anybody sweeps.
        assert_eq!(alive(), before + 700);
        drop(engines);
        let began = Instant::now();
        while alive() > before {
            assert!(began.elapsed() < Duration::from_secs(30), "{} tasks go on", alive() - before);
            sleep(Duration::from_millis(5)).await;
        }
    }
}
