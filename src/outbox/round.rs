//! One round of a relay: claim, deliver, note.

use std::{
    error::Error as StdError,
    panic::AssertUnwindSafe,
    time::{Duration, Instant},
};

use backon::{BackoffBuilder, ExponentialBuilder};
use futures_util::{FutureExt as _, StreamExt as _, stream::FuturesUnordered};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{Event, Relay, Relayed, Uuid};
use crate::{
    engine::store::{Line, in_time},
    error::Error,
    failpoint,
    policy::DEFAULT_STORE_TIMEOUT,
    postgres::outbox::{self, Claim},
    telemetry,
};

/// What is left of a lease when its delivery has run as long as it may: for the note of it.
const MARGIN: Duration = Duration::from_secs(10);

impl<F, Fut, E> Relay<F>
where
    F: Fn(Event) -> Fut,
    Fut: Future<Output = Result<(), E>>,
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    /// Until nothing more is due and nothing is being delivered. Where the store fails, nothing more is claimed,
    /// and what is being delivered has its time all the same.
    pub(super) async fn round(&self, line: &mut Line, stopped: &CancellationToken) -> Result<Relayed, Error> {
        let (mut relayed, mut failed) = (Relayed::default(), None);
        let mut running = FuturesUnordered::new();
        loop {
            let free = (self.batch.get() as usize).saturating_sub(running.len());
            let claims = free > 0 && failed.is_none() && !stopped.is_cancelled();
            let claimed = match claims {
                true => self.claim(line, free, &mut relayed).await.unwrap_or_else(|error| {
                    failed = Some(error);
                    Vec::new()
                }),
                false => Vec::new(),
            };
            let is_idle = claimed.is_empty();
            running.extend(claimed.into_iter().map(|delivery| self.deliver(delivery)));
            tokio::select! {
                biased;
                outcome = running.next() => {
                    let Some(outcome) = outcome else { return failed.map_or(Ok(relayed), Err) };
                    let mut outcomes = vec![outcome];
                    while let Some(Some(outcome)) = running.next().now_or_never() {
                        outcomes.push(outcome);
                    }
                    if let Err(error) = self.settle(line, outcomes, &mut relayed).await {
                        failed = Some(error);
                    }
                }
                // While the last ones are slow, others become due.
                () = sleep(self.interval), if is_idle && failed.is_none() && !stopped.is_cancelled() => {}
            }
        }
    }

    async fn claim(&self, line: &mut Line, limit: usize, relayed: &mut Relayed) -> Result<Vec<Delivery>, Error> {
        // Before the lease begins, so that it is never taken for longer than it is.
        let began = Instant::now();
        let owner: [u8; 16] = rand::random();
        let claim = Claim {
            owner: &owner,
            lease_ms: millis(self.timeout + MARGIN),
            limit: i64::try_from(limit).unwrap_or(i64::MAX),
            max_attempts: i32::try_from(self.max_attempts).unwrap_or(i32::MAX),
            holds: self.holds,
        };
        let claiming = async { Ok(outbox::claim(line.get(&self.store).await?, claim).await?) };
        let claimed = in_time(DEFAULT_STORE_TIMEOUT, claiming).await.inspect_err(|_| line.hang_up())?;
        if !claimed.is_empty() {
            failpoint::reach("events-claimed");
        }
        let mut deliveries = Vec::with_capacity(claimed.len());
        for claimed in claimed {
            let (position, is_parked) = (claimed.position, claimed.is_parked);
            let event = Event::from(claimed);
            if is_parked {
                relayed.parked += 1;
                telemetry::event_parked(&event.id, &event.topic, event.attempt);
            } else {
                deliveries.push(Delivery { position, owner, began, event });
            }
        }
        Ok(deliveries)
    }

    async fn deliver(&self, delivery: Delivery) -> Outcome {
        let Delivery { position, owner, began, event } = delivery;
        let (id, topic, attempt) = (event.id, event.topic.clone(), event.attempt);
        // A process that has slept since the claim must not deliver what another may have.
        let result = if began.elapsed() > MARGIN / 2 {
            Err("this process stalled after it had claimed the event".into())
        } else {
            let delivering = AssertUnwindSafe(async { (self.deliver)(event).await }).catch_unwind();
            match timeout(self.timeout, delivering).await {
                Ok(Ok(Ok(()))) => Ok(()),
                Ok(Ok(Err(error))) => Err(error.into()),
                Ok(Err(_)) => Err("the delivery panicked".into()),
                Err(_) => Err(format!("the delivery took longer than {:?}", self.timeout).into()),
            }
        };
        let is_delivered = result.is_ok();
        if let Err(error) = result {
            let error: Box<dyn StdError + Send + Sync> = error;
            telemetry::event_failed(&id, &topic, attempt, &error);
        }
        Outcome { position, owner, attempt, id, topic, is_delivered }
    }

    async fn settle(&self, line: &mut Line, outcomes: Vec<Outcome>, relayed: &mut Relayed) -> Result<(), Error> {
        failpoint::reach("events-delivered");
        let (delivered, failed): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(|outcome| outcome.is_delivered);
        let parked = match self.note(line, &delivered, &failed).await {
            // What cannot be noted is delivered again: a connection that has died in the meantime is worth another.
            Err(error) if error.is_transient() => self.note(line, &delivered, &failed).await,
            noted => noted,
        }?;
        failpoint::reach("events-noted");
        relayed.delivered += delivered.len();
        relayed.failed += failed.len() - parked.len();
        relayed.parked += parked.len();
        for outcome in failed.iter().filter(|outcome| parked.contains(&outcome.position)) {
            telemetry::event_parked(&outcome.id, &outcome.topic, outcome.attempt);
        }
        Ok(())
    }

    /// The positions of those that are parked now.
    async fn note(&self, line: &mut Line, delivered: &[Outcome], failed: &[Outcome]) -> Result<Vec<i64>, Error> {
        let noting = async {
            let conn = line.get(&self.store).await?;
            if !delivered.is_empty() {
                let (positions, owners) = columns(delivered);
                let noted = outbox::delivered(conn, &positions, &owners).await?;
                if noted < delivered.len() {
                    telemetry::events_late(delivered.len() - noted);
                }
            }
            if failed.is_empty() {
                return Ok(Vec::new());
            }
            let (positions, owners) = columns(failed);
            let waits: Vec<i64> = failed.iter().map(|outcome| millis(self.wait(outcome.attempt))).collect();
            let max_attempts = i32::try_from(self.max_attempts).unwrap_or(i32::MAX);
            Ok(outbox::put_back(conn, &positions, &owners, &waits, max_attempts).await?)
        };
        in_time(DEFAULT_STORE_TIMEOUT, noting).await.inspect_err(|_| line.hang_up())
    }

    /// With jitter: events that failed together do not come back together.
    fn wait(&self, attempt: u32) -> Duration {
        let (min, max) = self.waits;
        let mut waits = ExponentialBuilder::default()
            .with_min_delay(min)
            .with_max_delay(max)
            .without_max_times()
            .with_jitter()
            .build();
        // Beyond this many doublings a millisecond has become longer than a day.
        waits.nth(attempt.clamp(1, 64) as usize - 1).unwrap_or(max)
    }
}

/// An event that is ours for as long as its lease.
struct Delivery {
    position: i64,
    owner: [u8; 16],
    began: Instant,
    event: Event,
}

struct Outcome {
    position: i64,
    owner: [u8; 16],
    attempt: u32,
    id: Uuid,
    topic: String,
    is_delivered: bool,
}

fn columns(outcomes: &[Outcome]) -> (Vec<i64>, Vec<&[u8]>) {
    outcomes.iter().map(|outcome| (outcome.position, &outcome.owner[..])).unzip()
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
