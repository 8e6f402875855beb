//! The loop that hands events on.

use std::{error::Error as StdError, fmt, num::NonZeroU32, time::Duration};

use rand::RngExt as _;
use tokio::{task::JoinHandle, time::sleep};
use tokio_util::sync::CancellationToken;

use super::Event;
use crate::{
    engine::store::{Line, Store},
    error::Error,
    postgres::PgPool,
    telemetry,
};

/// How often a relay that has nothing to do looks: every second. Each look is one statement on an index.
pub const DEFAULT_RELAY_INTERVAL: Duration = Duration::from_secs(1);
/// How many events are delivered at once: enough to keep a broker busy, few enough to be in memory.
pub const DEFAULT_RELAY_BATCH: u32 = 32;
/// How long a delivery may take: 30 seconds, as long as a lease of a key.
pub const DEFAULT_DELIVERY_TIMEOUT: Duration = Duration::from_secs(30);
/// How often an event is tried: twenty times, which takes more than an hour: longer than most outages of a
/// receiver.
pub const DEFAULT_MAX_DELIVERIES: u32 = 20;
/// The wait after the first failure, which doubles with each and has as much again of jitter: one second.
pub const MIN_WAIT: Duration = Duration::from_secs(1);
/// The longest wait: five minutes, before jitter.
pub const MAX_WAIT: Duration = Duration::from_secs(5 * 60);

const MIN_INTERVAL: Duration = Duration::from_millis(10);

/// Hands events to a function of yours, at least once. See [the module](super).
///
/// Several at once, in one process or many, share the work and do not get in each other's way. A relay has a
/// connection of its own, outside the pool's count, and takes none of the pool's.
///
/// ```no_run
/// # use std::time::Duration;
/// # use actix_idempotency::{Event, PgPool, Relay};
/// # async fn send(_: &Event) -> Result<(), std::io::Error> { Ok(()) }
/// # async fn example(pool: PgPool) -> Result<(), actix_idempotency::Error> {
/// // In a job:
/// let relayed = Relay::new(pool.clone(), |event: Event| async move { send(&event).await }).relay_once().await?;
///
/// // Or for as long as the process runs:
/// let relaying = Relay::new(pool, |event: Event| async move { send(&event).await })
///     .interval(Duration::from_millis(200))
///     .timeout(Duration::from_secs(5))
///     .max_attempts(10)
///     .spawn();
/// // ...
/// relaying.stop().await;
/// # Ok(())
/// # }
/// ```
pub struct Relay<F> {
    pub(super) store: Store,
    pub(super) deliver: F,
    pub(super) interval: Duration,
    pub(super) batch: NonZeroU32,
    pub(super) timeout: Duration,
    pub(super) max_attempts: u32,
    pub(super) waits: (Duration, Duration),
    pub(super) holds: bool,
}

impl<F, Fut, E> Relay<F>
where
    F: Fn(Event) -> Fut,
    Fut: Future<Output = Result<(), E>>,
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    /// A relay with the defaults. `Ok` says that the event has been taken, for good: after the broker's
    /// confirmation, for example. An error is logged in its own words, which therefore should hold no
    /// payload.
    #[must_use]
    pub fn new(pool: PgPool, deliver: F) -> Self {
        Self {
            store: Store { pool },
            deliver,
            interval: DEFAULT_RELAY_INTERVAL,
            batch: NonZeroU32::new(DEFAULT_RELAY_BATCH).unwrap_or(NonZeroU32::MIN),
            timeout: DEFAULT_DELIVERY_TIMEOUT,
            max_attempts: DEFAULT_MAX_DELIVERIES,
            waits: (MIN_WAIT, MAX_WAIT),
            holds: true,
        }
    }

    /// The time between two looks when there is nothing to do, give or take a fifth. Default:
    /// [`DEFAULT_RELAY_INTERVAL`]; at least 10 ms.
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval.max(MIN_INTERVAL);
        self
    }

    /// How many events are delivered at once. Default: [`DEFAULT_RELAY_BATCH`].
    #[must_use]
    pub fn batch(mut self, events: NonZeroU32) -> Self {
        self.batch = events;
        self
    }

    /// How long a delivery may take; then it is dropped, and counts as failed. The events of a relay that has died
    /// wait so long and ten seconds. Default: [`DEFAULT_DELIVERY_TIMEOUT`].
    ///
    /// # Panics
    ///
    /// With zero, and above one day.
    #[track_caller]
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        let max = Duration::from_secs(24 * 60 * 60);
        assert!(!timeout.is_zero() && timeout <= max, "Relay::timeout: {timeout:?} is not between 0 and one day");
        self.timeout = timeout;
        self
    }

    /// How often an event is tried until it is parked. Default: [`DEFAULT_MAX_DELIVERIES`].
    ///
    /// # Panics
    ///
    /// With none, and above `i32::MAX`.
    #[track_caller]
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        assert!(attempts > 0 && i32::try_from(attempts).is_ok(), "Relay::max_attempts: at least one attempt");
        self.max_attempts = attempts;
        self
    }

    /// The wait after the first failure, and the longest wait. Default: [`MIN_WAIT`], [`MAX_WAIT`].
    ///
    /// # Panics
    ///
    /// Where the first is zero or longer than the second, or the second longer than a day.
    #[track_caller]
    #[must_use]
    pub fn backoff(mut self, min: Duration, max: Duration) -> Self {
        let day = Duration::from_secs(24 * 60 * 60);
        assert!(!min.is_zero() && min <= max && max <= day, "Relay::backoff: not 0 < {min:?} <= {max:?} <= one day");
        self.waits = (min, max);
        self
    }

    /// Parked events do not hold up the later ones of their key: whoever gets those does without the parked one, or
    /// gets it later, after [`unpark`](super::unpark).
    #[must_use]
    pub fn skip_parked(mut self) -> Self {
        self.holds = false;
        self
    }

    /// Delivers what is due, until nothing more is, and returns what became of it. Events in backoff and those that
    /// another relay delivers are not waited for.
    ///
    /// Dropped half-way, deliveries are dropped as well, and repeated after their lease.
    ///
    /// # Errors
    ///
    /// Where the store fails. What was delivered and could not be noted is delivered again.
    pub async fn relay_once(&self) -> Result<Relayed, Error> {
        let mut line = Line::default();
        self.round(&mut line, &CancellationToken::new()).await
    }
}

impl<F, Fut, E> Relay<F>
where
    F: Fn(Event) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), E>> + Send + 'static,
    E: Into<Box<dyn StdError + Send + Sync>> + Send + 'static,
{
    /// Relays on this runtime until the handle is stopped or dropped. Where the store fails, it is logged and the loop
    /// goes on.
    ///
    /// # Panics
    ///
    /// Outside a runtime.
    #[must_use = "dropping the handle stops the relay"]
    pub fn spawn(self) -> Relaying {
        let stopped = CancellationToken::new();
        let task = tokio::spawn(self.keep_relaying(stopped.clone()));
        Relaying { stopped, task }
    }

    async fn keep_relaying(self, stopped: CancellationToken) {
        let mut line = Line::default();
        while !stopped.is_cancelled() {
            if let Err(error) = self.round(&mut line, &stopped).await {
                telemetry::store_failed("events could not be relayed", &error);
            }
            let pause = self.interval.mul_f64(rand::rng().random_range(0.8..1.2));
            let _ = stopped.run_until_cancelled(sleep(pause)).await;
        }
    }
}

impl<F> fmt::Debug for Relay<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay")
            .field("interval", &self.interval)
            .field("batch", &self.batch)
            .field("timeout", &self.timeout)
            .field("max_attempts", &self.max_attempts)
            .finish_non_exhaustive()
    }
}

/// What became of the events of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Relayed {
    /// Delivered.
    pub delivered: usize,
    /// To be tried again.
    pub failed: usize,
    /// Tried often enough.
    pub parked: usize,
}

/// A relay at work. Dropping it stops it, and drops what it is delivering, which is then repeated after the lease.
#[derive(Debug)]
pub struct Relaying {
    stopped: CancellationToken,
    task: JoinHandle<()>,
}

impl Relaying {
    /// Claims nothing more, and waits until what is being delivered has been delivered and noted, for the
    /// [`timeout`](Relay::timeout) of a delivery at most.
    pub async fn stop(mut self) {
        self.stopped.cancel();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Relaying {
    fn drop(&mut self) {
        self.task.abort();
    }
}
