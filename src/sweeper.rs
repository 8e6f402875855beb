//! Expired rows go, in small batches: those of keys, and those of an [`inbox`](crate::inbox) where there is one.
//!
//! # Half-done keys
//!
//! An expired key whose attempts have [done something](crate::IdemKey::step) outside the database, and that none has
//! brought to an end, is evidence: somebody may have been charged for nothing. It is as expired as any other, and the next
//! request with it a first one, but its row and its steps stay for [`DEFAULT_UNFINISHED`] longer, for
//! [`Admin`](crate::Admin) and the [`Inspector`](crate::Inspector) to be found by; the gauge `idempotency_unfinished` counts
//! them. Each that is deleted after that is the event `abandoned`. What is half-done is a key with steps (unless its
//! handler has [said](crate::IdemKey::release) that nothing was done, or somebody has
//! [released](crate::Admin::release) it by hand), and one without them whose attempts have [derived](crate::IdemKey::derive) a key or were sure of a success that was not committed, if the
//! last attempt has ended by a failure (500 and more, a panic) or a refused COMMIT (409). A
//! [`Completer`](crate::Completer) takes them over while they have not expired.
//!
//! An expired key is claimed anew whether or not its row has been swept: sweeping is for the size of
//! the table, not for what is right. An engine sweeps by itself from its first claim on, every
//! minute, or as often as the shortest retention in use;
//! [`Idempotency::without_sweeper`](crate::Idempotency::without_sweeper) leaves it to a [`Sweeper`]
//! elsewhere, in a job for example.

use std::{
    fmt,
    num::NonZeroU32,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rand::RngExt as _;
use tokio::{sync::Notify, task::JoinHandle, time::sleep};

use crate::{
    engine::{
        background,
        store::{Line, Store, in_time},
    },
    error::Error,
    policy::DEFAULT_STORE_TIMEOUT,
    postgres::{AsyncPgConnection, PgPool, inbox, steps, sweep},
    scope::KeyId,
    telemetry,
};

/// How often a sweeper looks: every minute.
pub const DEFAULT_SWEEP_INTERVAL: Duration = Duration::from_secs(60);
/// For how long a half-done key stays after it has expired: a week, in which somebody works who can look at it.
pub const DEFAULT_UNFINISHED: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// How many rows go in one statement: few enough that none holds its locks for long.
pub const DEFAULT_SWEEP_BATCH: u32 = 1000;
/// A retention of milliseconds must not make the sweeper spin.
const MIN_INTERVAL: Duration = Duration::from_millis(500);
/// As long as a retention.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Deletes expired rows, in the tables that there are and that its role may delete from. Several at once, in one
/// process or many, do not get in each other's way.
///
/// ```no_run
/// # async fn example(pool: actix_idempotency::PgPool) -> Result<(), actix_idempotency::Error> {
/// use actix_idempotency::Sweeper;
///
/// // In a job that runs once a night:
/// let rows = Sweeper::new(pool.clone()).sweep_once().await?;
///
/// // Or for as long as the process runs:
/// let sweeping = Sweeper::new(pool).spawn();
/// // ...
/// sweeping.stop().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Sweeper {
    pool: PgPool,
    interval: Duration,
    batch: NonZeroU32,
    unfinished: Duration,
}

impl Sweeper {
    /// A sweeper with the defaults. It opens a connection of its own, outside the pool's count, for
    /// each round.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self {
            pool,
            interval: DEFAULT_SWEEP_INTERVAL,
            batch: NonZeroU32::new(DEFAULT_SWEEP_BATCH).unwrap_or(NonZeroU32::MIN),
            unfinished: DEFAULT_UNFINISHED,
        }
    }

    /// For how long [half-done keys](self#half-done-keys) stay after they have expired; zero deletes them with the others,
    /// each with its event. Default: [`DEFAULT_UNFINISHED`]. At most 100 years. The sweeper of an engine is told by
    /// [`Idempotency::keep_unfinished`](crate::Idempotency::keep_unfinished).
    #[must_use]
    pub fn keep_unfinished(mut self, kept: Duration) -> Self {
        self.unfinished = kept.min(LONGEST);
        self
    }

    /// The time between two rounds, give or take a fifth, so that the processes of a service do not
    /// all sweep at once. Default: [`DEFAULT_SWEEP_INTERVAL`]; at least half a second.
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval.max(MIN_INTERVAL);
        self
    }

    /// How many rows go in one statement. Default: [`DEFAULT_SWEEP_BATCH`].
    #[must_use]
    pub fn batch(mut self, rows: NonZeroU32) -> Self {
        self.batch = rows;
        self
    }

    /// Deletes what has expired, batch by batch, each in its own transaction, and returns how many
    /// rows went. Rows that somebody holds stay for the next time.
    ///
    /// # Errors
    ///
    /// Where the store fails; what went before stays gone.
    pub async fn sweep_once(&self) -> Result<u64, Error> {
        let store = Store { pool: self.pool.clone() };
        let mut line = Line::default();
        let looking = async { Ok(steps::may_be_read(line.get(&store).await?).await?) };
        let sees_steps = in_time(DEFAULT_STORE_TIMEOUT, looking).await?;
        let mut swept = self.sweep(Rows::Keys { sees_steps }, &store, &mut line).await?;
        swept += self.sweep(Rows::Unfinished { sees_steps }, &store, &mut line).await?;
        let looking = async { Ok(inbox::may_be_swept(line.get(&store).await?).await?) };
        if in_time(DEFAULT_STORE_TIMEOUT, looking).await? {
            swept += self.sweep(Rows::Marks, &store, &mut line).await?;
            swept += self.sweep(Rows::Attempts, &store, &mut line).await?;
        }
        telemetry::swept(swept);
        Ok(swept)
    }

    async fn sweep(&self, rows: Rows, store: &Store, line: &mut Line) -> Result<u64, Error> {
        let limit = self.batch.get().into();
        let mut swept = 0;
        loop {
            let batch = async {
                let conn = line.get(store).await?;
                Ok(match rows {
                    Rows::Keys { sees_steps } => sweep::delete_expired(conn, limit, sees_steps).await?,
                    Rows::Unfinished { sees_steps } => self.abandon(conn, sees_steps).await?,
                    Rows::Marks => inbox::delete_expired(conn, limit).await?,
                    Rows::Attempts => inbox::delete_expired_attempts(conn, limit).await?,
                })
            };
            let gone = in_time(DEFAULT_STORE_TIMEOUT, batch).await?;
            swept += gone as u64;
            if gone < self.batch.get() as usize {
                return Ok(swept);
            }
        }
    }

    /// The half-done keys that have been kept long enough go, and each is told of.
    async fn abandon(&self, conn: &mut AsyncPgConnection, sees_steps: bool) -> Result<usize, Error> {
        let kept_ms = i64::try_from(self.unfinished.as_millis()).unwrap_or(i64::MAX);
        let gone = sweep::delete_abandoned(conn, kept_ms, self.batch.get().into(), sees_steps).await?;
        for key in &gone {
            // Any other was not written by this crate.
            let Ok(id) = key.id.as_slice().try_into().map(KeyId) else { continue };
            telemetry::abandoned(telemetry::Abandoned {
                id,
                resource: &key.resource,
                state: &key.state,
                status: key.status,
                attempt: key.attempt,
                first_request: key.request_id.as_deref(),
            });
        }
        Ok(gone.len())
    }

    /// Sweeps on the background thread until the handle is stopped or dropped. An error is logged and
    /// the loop goes on.
    #[must_use = "dropping the handle stops the sweeper"]
    pub fn spawn(self) -> Sweeping {
        let pace = Arc::new(Pace::new(self.interval));
        let task = background::handle().spawn(self.keep_sweeping(Arc::clone(&pace)));
        Sweeping { pace, task }
    }

    async fn keep_sweeping(self, pace: Arc<Pace>) {
        loop {
            pace.wait().await;
            if let Err(error) = self.sweep_once().await {
                telemetry::store_failed("expired rows could not be swept", &error);
            }
        }
    }
}

impl fmt::Debug for Sweeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sweeper")
            .field("interval", &self.interval)
            .field("batch", &self.batch)
            .field("unfinished", &self.unfinished)
            .finish_non_exhaustive()
    }
}

/// What expires.
#[derive(Debug, Clone, Copy)]
enum Rows {
    Keys {
        sees_steps: bool,
    },
    /// Half-done keys, which have been kept for longer.
    Unfinished {
        sees_steps: bool,
    },
    /// Of messages, and how often they failed.
    Marks,
    Attempts,
}

/// How often a loop goes round, which may become more often while it waits.
#[derive(Debug)]
pub(crate) struct Pace {
    interval: Mutex<Duration>,
    changed: Notify,
}

impl Pace {
    pub(crate) fn new(interval: Duration) -> Self {
        Self { interval: Mutex::new(interval), changed: Notify::new() }
    }

    /// Until the next round.
    pub(crate) async fn wait(&self) {
        loop {
            let pause = jittered(self.interval());
            tokio::select! {
                () = sleep(pause) => return,
                () = self.changed.notified() => {}
            }
        }
    }

    /// Goes round at least this often, from now on.
    pub(crate) fn at_least_every(&self, interval: Duration) {
        let interval = interval.max(MIN_INTERVAL);
        let mut current = self.interval.lock().unwrap_or_else(PoisonError::into_inner);
        if interval < *current {
            *current = interval;
            self.changed.notify_one();
        }
    }

    fn interval(&self) -> Duration {
        *self.interval.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Give or take a fifth.
pub(crate) fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(rand::rng().random_range(0.8..1.2))
}

/// A sweeper at work. Dropping it stops it; a batch in flight is then rolled back or done, as it comes.
#[derive(Debug)]
pub struct Sweeping {
    pace: Arc<Pace>,
    task: JoinHandle<()>,
}

impl Sweeping {
    /// Stops the sweeper and waits until it has stopped.
    pub async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }

    /// Give or take a fifth.
    pub(crate) fn interval(&self) -> Duration {
        self.pace.interval()
    }

    /// Sweeps at least this often, from now on.
    pub(crate) fn at_least_every(&self, interval: Duration) {
        self.pace.at_least_every(interval);
    }
}

impl Drop for Sweeping {
    fn drop(&mut self) {
        self.task.abort();
    }
}
