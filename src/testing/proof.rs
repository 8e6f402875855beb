//! The proof: what is asked of an endpoint, with its settings.

use std::{
    fmt,
    future::{Future, IntoFuture},
    io,
    panic::Location,
    pin::Pin,
    time::Duration,
};

use super::{
    client::Client,
    entry::Stage,
    expected::{AfterFailure, Expected},
    report::Report,
    request::Request,
    stages::Ground,
    target::{Destination, To},
};

/// How many identical requests are sent at once: as many as show a race, and as few as a small pool bears.
pub const DEFAULT_REQUESTS: usize = 100;

/// How long a request, or the retries after a reset, may take: twice a default lease, so that a claim that nobody gives
/// back can lapse within it.
pub const DEFAULT_PATIENCE: Duration = Duration::from_secs(60);

/// Changes a request.
pub(super) type Hook = Box<dyn Fn(Request) -> Request + Send + Sync>;

/// A proof that is to be made, by [`idempotency_proof`](super::idempotency_proof). Nothing is sent before it is awaited:
/// it becomes a [`Report`], which [`assert`](Self::assert) and [`assert_one_effect`](Self::assert_one_effect) judge at once.
#[must_use = "a proof is made when it is awaited"]
pub struct Proof {
    destination: Destination,
    request: Request,
    requests: usize,
    patience: Duration,
    expected: Expected,
    failing: Option<Hook>,
    slow: Option<(Duration, Hook)>,
}

impl Proof {
    pub(super) fn new(destination: Destination, request: Request) -> Self {
        let (requests, patience) = (DEFAULT_REQUESTS, DEFAULT_PATIENCE);
        let expected = Expected::default();
        Self { destination, request, requests, patience, expected, failing: None, slow: None }
    }

    /// How many identical requests are sent at once. Default: [`DEFAULT_REQUESTS`].
    ///
    /// # Panics
    ///
    /// If it is less than two, which race with nobody.
    #[track_caller]
    pub fn requests(mut self, number: usize) -> Self {
        assert!(number >= 2, "at least two requests make a race");
        self.requests = number;
        self
    }

    /// How long a request may take, and how long is retried after a reset. Default: [`DEFAULT_PATIENCE`].
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// How an attempt is made to fail: the function changes the first request of a key, and its retry goes out
    /// unchanged. What it changes must not be part of the fingerprint: a header, or a switch in the service that makes one
    /// attempt fail. An answer of 400 and more, or a connection that ends without one, is a failure.
    pub fn failing(mut self, hook: impl Fn(Request) -> Request + Send + Sync + 'static) -> Self {
        self.failing = Some(Box::new(hook));
        self
    }

    /// How the handler is made slower than `window`: the time for which the endpoint remembers that a key is under way (a
    /// lease, a lock's time to live). The function changes one request, of which copies are sent while it runs, before the
    /// window ends and after. The [`patience`](Self::patience) must be enough for two such runs.
    pub fn slower_than(mut self, window: Duration, hook: impl Fn(Request) -> Request + Send + Sync + 'static) -> Self {
        self.slow = Some((window, Box::new(hook)));
        self
    }

    /// The statuses that a duplicate may get while the first request runs, beside its answer. Default: 409. None for an
    /// endpoint whose duplicates wait; 429 or 503 too for one that refuses some for want of room.
    pub fn duplicates_get(mut self, statuses: impl IntoIterator<Item = u16>) -> Self {
        self.expected.duplicates = statuses.into_iter().collect();
        self
    }

    /// The statuses of another request under a key that was used. Default: 422.
    pub fn reuse_gets(mut self, statuses: impl IntoIterator<Item = u16>) -> Self {
        self.expected.reuse = statuses.into_iter().collect();
        self
    }

    /// The statuses of a repeat of what is done, for an endpoint that does not tell its first answer again. Default: none.
    /// What was done before a reset is not asked for then: its answer is never seen.
    pub fn repeats_get(mut self, statuses: impl IntoIterator<Item = u16>) -> Self {
        self.expected.repeats = statuses.into_iter().collect();
        self
    }

    /// What the retry of an attempt that has failed gets. Default: [`AfterFailure::RunsAgain`].
    pub fn after_failure(mut self, retry: AfterFailure) -> Self {
        self.expected.after_failure = retry;
        self
    }

    /// Awaits the report, and asserts that it has [`passed`](Report::passed).
    ///
    /// # Panics
    ///
    /// When it is awaited, with the report as its message, unless it has passed.
    #[track_caller]
    pub fn assert(self) -> impl Future<Output = Report> {
        let place = Location::caller();
        async move {
            let report = self.await;
            report.assert_at(place);
            report
        }
    }

    /// The same, and that every key which got an answer below 400 had one effect: `count` counts the effects, as by
    /// `SELECT count(*)`. It is asked before and after every stage.
    ///
    /// # Panics
    ///
    /// When it is awaited, as [`assert`](Self::assert); and if the number is beyond an `i64`.
    #[track_caller]
    pub fn assert_one_effect<N: TryInto<i64>>(self, count: impl AsyncFn() -> N) -> impl Future<Output = Report> {
        let place = Location::caller();
        async move {
            let report = self.counting(count).await;
            report.assert_at(place);
            report
        }
    }

    /// The report with effects counted, as [`assert_one_effect`](Self::assert_one_effect) does, for whoever judges it
    /// otherwise.
    ///
    /// # Panics
    ///
    /// If the number is beyond an `i64`.
    pub async fn counting<N: TryInto<i64>>(self, count: impl AsyncFn() -> N) -> Report {
        self.prove(async || Some(count().await.try_into().ok().expect("a number of effects is within an i64"))).await
    }

    async fn prove(self, count: impl AsyncFn() -> Option<i64>) -> Report {
        let Self { destination: Destination(to), request, requests, patience, expected, failing, slow } = self;
        let mut report = Report::of(&request);
        let (url, served) = match to {
            To::Url(url) => (url, None),
            To::App(start) => match start.await {
                Ok(served) => (format!("http://{}", served.address), Some(served)),
                Err(error) => return report.stopped(unserved(&error)),
            },
        };
        let client = match Client::new(&url, patience) {
            Ok(client) => client,
            Err(wrong) => return report.stopped(wrong),
        };
        let ground = Ground { client, request, requests, expected, patience };
        let asked = ask(&ground, failing.as_ref(), slow.as_ref(), &count, &mut report);
        let end = match served {
            None => asked.await,
            Some(served) => served.during(asked).await.unwrap_or_else(|error| Err(unserved(&error))),
        };
        report.ended(end)
    }
}

fn unserved(error: &io::Error) -> String {
    format!("the App cannot be served: {error}")
}

/// Stage by stage, with effects counted in between.
///
/// # Errors
///
/// Why nothing more can be asked.
async fn ask(
    ground: &Ground,
    failing: Option<&Hook>,
    slow: Option<&(Duration, Hook)>,
    count: &impl AsyncFn() -> Option<i64>,
    report: &mut Report,
) -> Result<(), String> {
    let mut before = count().await;
    let mut took = Duration::ZERO;
    for stage in Stage::ALL {
        let exchange = match stage {
            Stage::Repeat => {
                let (exchange, time) = ground.repeat().await?;
                took = time;
                Ok(exchange)
            }
            Stage::Concurrent => Ok(ground.concurrent().await),
            Stage::OtherBody => ground.other_body().await.ok_or("no other body can be made: give `.other_body(…)`"),
            Stage::Reset if ground.expected.repeats.is_empty() => Ok(ground.reset(took, slow).await),
            Stage::Reset => Err("repeats are refused, so that an answer which was lost is never seen"),
            Stage::Failing => match failing {
                Some(hook) => Ok(ground.failing(hook).await),
                None => Err("give `.failing(…)`"),
            },
            Stage::Slow => match slow {
                Some((window, hook)) => Ok(ground.slow(*window, hook).await),
                None => Err("give `.slower_than(…)`"),
            },
        };
        let after = count().await;
        let effects = after.zip(before).map(|(after, before)| after - before);
        report.push(stage, exchange, effects);
        before = after;
    }
    Ok(())
}

impl IntoFuture for Proof {
    type Output = Report;
    type IntoFuture = Pin<Box<dyn Future<Output = Report> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.prove(async || None))
    }
}

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proof")
            .field("destination", &self.destination)
            .field("request", &self.request)
            .field("requests", &self.requests)
            .field("patience", &self.patience)
            .finish_non_exhaustive()
    }
}
