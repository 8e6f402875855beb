//! Numbers that are asked for, rather than told as they change: how much is outstanding, how old the oldest rows
//! are, how much is half-done, how busy the pool is.
//!
//! Nothing is sampled unless somebody makes [`Gauges`]. Those of the process cost nothing; those of the table are three
//! short looks into indexes, of a thousand rows at most.
//!
//! # Deployment caveat
//!
//! The age of the oldest outstanding key needs
//! [`OUTSTANDING_INDEX`](crate::migrations::OUTSTANDING_INDEX): without it only a walk through the whole table
//! could tell, and the gauge is missing. The ages are those of the table, the same in every process: an alarm takes their
//! maximum, and the sum of what the processes hold.

use std::{fmt, sync::Arc, time::Duration};

use tokio::{task::JoinHandle, time::sleep};

use crate::{
    engine::{Engine, background, store::in_time},
    error::Error,
    idempotency::Idempotency,
    policy::DEFAULT_STORE_TIMEOUT,
    postgres::gauges,
    sweeper::jittered,
    telemetry,
};

/// The time between two samples: four a minute, as often as most scrape.
pub const DEFAULT_SAMPLE_INTERVAL: Duration = Duration::from_secs(15);
/// More often than this nobody looks.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// Sets the gauges of [`telemetry`]: when it is told to, or by itself.
///
/// In the handler that is scraped, so that the numbers are those of the moment:
///
/// ```
/// use actix_idempotency::Gauges;
/// use actix_web::{HttpResponse, web};
///
/// async fn metrics(gauges: web::Data<Gauges>) -> HttpResponse {
///     // An error is a store that does not answer; what is known without it has been set.
///     let _ = gauges.sample_once().await;
///     HttpResponse::Ok().body("") // what the recorder renders
/// }
/// ```
///
/// For an exporter with a listener of its own:
///
/// ```no_run
/// # fn example(idempotency: actix_idempotency::Idempotency) {
/// use actix_idempotency::Gauges;
///
/// let sampling = Gauges::of(&idempotency).spawn();
/// # }
/// ```
///
/// One for a process: a second engine would set the same gauges to its own numbers.
#[derive(Clone)]
pub struct Gauges {
    engine: Arc<Engine>,
    interval: Duration,
}

/// What a sample has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sample {
    /// Keys that this process holds: handlers that run, and answers that still have to be stored.
    pub outstanding: usize,
    /// Connections of the pool that somebody has.
    pub connections_in_use: u32,
    /// Connections of the pool that nobody has.
    pub connections_idle: u32,
    /// How long ago the oldest key was first claimed that is outstanding now, in whatever process; zero where none is.
    /// `None` without the index for it.
    pub oldest_outstanding: Option<Duration>,
    /// For how long the oldest row has been expired that should have been swept; zero where there is none. It grows where
    /// nobody sweeps. Half-done keys are kept on purpose.
    pub oldest_expired: Duration,
    /// [Half-done keys](crate::sweeper#half-done-keys) that have expired and are kept to be looked at, among the thousand
    /// rows that expired first.
    pub unfinished: u32,
}

impl Gauges {
    /// Of this engine, under all its policies.
    ///
    /// # Panics
    ///
    /// For [`Idempotency::from_app_data`], which has none.
    #[track_caller]
    #[must_use]
    pub fn of(idempotency: &Idempotency) -> Self {
        let engine = idempotency.engine().expect("Gauges::of: Idempotency::from_app_data() has no engine of its own");
        Self { engine, interval: DEFAULT_SAMPLE_INTERVAL }
    }

    /// The time between two samples of [`spawn`](Self::spawn), give or take a fifth. Default:
    /// [`DEFAULT_SAMPLE_INTERVAL`]; at least a second.
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval.max(MIN_INTERVAL);
        self
    }

    /// Sets the gauges and tells what they say. It takes a connection of the pool for a moment, which it does not
    /// count.
    ///
    /// # Errors
    ///
    /// Where the store fails, or does not answer within five seconds. The gauges of the process are set all the same.
    pub async fn sample_once(&self) -> Result<Sample, Error> {
        let state = self.engine.store.pool.state();
        let in_use = state.connections.saturating_sub(state.idle_connections);
        let outstanding = self.engine.outstanding();
        telemetry::outstanding(outstanding);
        telemetry::connections(in_use, state.idle_connections);
        let looking = async {
            let mut conn = self.engine.store.connection().await?;
            let oldest = gauges::oldest(&mut conn).await?;
            conn.give_back();
            Ok(oldest)
        };
        let oldest = in_time(DEFAULT_STORE_TIMEOUT, looking).await?;
        let sample = Sample {
            outstanding,
            connections_in_use: in_use,
            connections_idle: state.idle_connections,
            oldest_outstanding: oldest.outstanding.map(age),
            oldest_expired: age(oldest.expired),
            unfinished: oldest.unfinished.try_into().unwrap_or_default(),
        };
        telemetry::unfinished(sample.unfinished);
        telemetry::oldest(sample.oldest_outstanding, sample.oldest_expired);
        Ok(sample)
    }

    /// Samples on the background thread until the handle is stopped or dropped. An error is logged and the loop
    /// goes on.
    #[must_use = "dropping the handle stops the sampling"]
    pub fn spawn(self) -> Sampling {
        let task = background::handle().spawn(async move {
            loop {
                if let Err(error) = self.sample_once().await {
                    telemetry::store_failed("the gauges of the table could not be read", &error);
                }
                sleep(jittered(self.interval)).await;
            }
        });
        Sampling { task }
    }
}

impl fmt::Debug for Gauges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gauges").field("interval", &self.interval).finish_non_exhaustive()
    }
}

/// Of a clock that was set back: none.
fn age(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// Gauges that are kept up to date. Dropping it stops that; they stay as they are.
#[derive(Debug)]
pub struct Sampling {
    task: JoinHandle<()>,
}

impl Sampling {
    /// Stops it and waits until it has stopped.
    pub async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Sampling {
    fn drop(&mut self) {
        self.task.abort();
    }
}
