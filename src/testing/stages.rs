//! What is sent at each stage, and what is right about it.

use std::time::{Duration, Instant};

use futures_util::future::{join_all, join3};
use tokio::time::sleep;

use super::{
    answer::{Answer, Heard, Silence, shown},
    client::Client,
    entry::Exchange,
    expected::{AfterFailure, Expected, list},
    judge::{Fault, one_answer, success, told, twice},
    proof::Hook,
    request::Request,
};

/// How many connections are reset, evenly over the time that an answer takes: before the handler, within it, and when the
/// answer is on its way.
const RESETS: u32 = 9;

/// Between retries.
const PAUSE: Duration = Duration::from_millis(100);

/// Beyond a window: what clocks and schedulers blur.
const MARGIN: Duration = Duration::from_millis(100);

/// What all stages have.
pub(super) struct Ground {
    pub(super) client: Client,
    pub(super) request: Request,
    pub(super) requests: usize,
    pub(super) expected: Expected,
    pub(super) patience: Duration,
}

/// One that nobody has used.
fn key() -> String {
    uuid::Builder::from_random_bytes(rand::random()).into_uuid().to_string()
}

impl Ground {
    fn fresh(&self) -> Request {
        self.request.under(&key())
    }

    /// And how long the first answer took.
    ///
    /// # Errors
    ///
    /// Why nothing else needs to be asked.
    pub(super) async fn repeat(&self) -> Result<(Exchange, Duration), String> {
        let request = self.fresh();
        let began = Instant::now();
        let first = self.client.send(&request).await;
        let took = began.elapsed();
        let answer = accepted(&first)?;
        let again = self.client.send(&request).await;
        let fault = told("a repeat", answer, &again, &self.expected, twice::REPEAT).err();
        Ok((Exchange { sent: "a request, then again".into(), keys: vec![vec![first, again]], fault }, took))
    }

    pub(super) async fn concurrent(&self) -> Exchange {
        let request = self.fresh();
        let mut all = join_all((0..self.requests).map(|_| self.client.send(&request))).await;
        let after = self.client.send(&request).await;
        let fault = one_answer(&all, &self.expected, twice::CONCURRENT)
            .and_then(|first| told("one more afterwards", first, &after, &self.expected, twice::CONCURRENT))
            .err();
        all.push(after);
        Exchange { sent: format!("{} at once, then again", self.requests), keys: vec![all], fault }
    }

    /// `None` where there is no other body.
    pub(super) async fn other_body(&self) -> Option<Exchange> {
        let key = key();
        let (request, another) = (self.request.under(&key), self.request.another()?.under(&key));
        let first = self.client.send(&request).await;
        let other = self.client.send(&another).await;
        let again = self.client.send(&request).await;
        let fault = success("a request", &first)
            .and_then(|first| {
                self.reused(first, &other)?;
                told("the first request", first, &again, &self.expected, "its answer was written over by another's")
            })
            .err();
        let sent = "a request, another under its key, the first again".into();
        Some(Exchange { sent, keys: vec![vec![first, other, again]], fault })
    }

    fn reused(&self, first: &Answer, other: &Heard) -> Result<(), Fault> {
        let means = match other {
            Ok(other) if self.expected.reuse.contains(&other.status.as_u16()) => return Ok(()),
            Ok(other) if first.is_told_by(other) => {
                "another request was told the first one's answer: the key alone was compared, and not what was asked for. \
                 Where only chosen fields count, give `.other_body(…)` that differs in them"
            }
            Ok(other) if other.is_success() => {
                "it ran under a key that was used: each body counts as a key of its own, or the endpoint looks at none"
            }
            Ok(_) => {
                "another refusal than the draft has for it; where that is the endpoint's policy, say so by \
                 `.reuse_gets(…)`"
            }
            Err(_) => "the endpoint hangs, or its handler has panicked",
        };
        let wanted = format!("another request under the key is refused with {}", list(&self.expected.reuse));
        Err(Fault::new(wanted, shown(other), means))
    }

    /// Of requests that are answered in this time; with a slow handler, if there is one, once more in the middle of it.
    pub(super) async fn reset(&self, took: Duration, slow: Option<&(Duration, Hook)>) -> Exchange {
        let fast = (0..RESETS).map(|n| (self.fresh(), took * n / (RESETS - 1)));
        let slow = slow.map(|(window, hook)| (hook(self.fresh()), *window / 2));
        let resets: Vec<_> = fast.chain(slow).collect();
        let sent = format!("{} requests whose connection is reset, each sent again until it is answered", resets.len());
        let (keys, faults): (Vec<_>, Vec<_>) =
            join_all(resets.iter().map(|(request, after)| self.after_reset(request, *after))).await.into_iter().unzip();
        Exchange { sent, keys, fault: faults.into_iter().flatten().next() }
    }

    async fn after_reset(&self, request: &Request, after: Duration) -> (Vec<Heard>, Option<Fault>) {
        if let Err(error) = self.client.reset(request, after).await {
            let fault = Fault::new("a connection that can be reset", error.to_string(), "the service takes no more");
            return (Vec::new(), Some(fault));
        }
        let mut heard = self.insist(request).await;
        let again = self.client.send(request).await;
        let fault = match heard.last() {
            Some(Ok(first)) if first.is_success() => {
                told("a repeat", first, &again, &self.expected, twice::RESET).err()
            }
            Some(last) => Some(self.unanswered(last)),
            None => None,
        };
        heard.push(again);
        (heard, fault)
    }

    fn unanswered(&self, last: &Heard) -> Fault {
        let wanted = format!("a retry gets an answer below 400 within {} s", self.patience.as_secs_f32());
        match last {
            Ok(answer) if is_told_to_wait(answer) => Fault::new(
                wanted,
                shown(last),
                "the key stays taken: the end of the connection has ended the handler (actix drops it), and nobody gives \
                 its key back. What was begun must end without its client, or its claim must lapse",
            ),
            last => Fault::none(wanted, last),
        }
    }

    /// Retries as a client does, until it is told something else than to wait, or loses patience.
    async fn insist(&self, request: &Request) -> Vec<Heard> {
        let began = Instant::now();
        let mut heard = Vec::new();
        loop {
            let last = self.client.send(request).await;
            let waits = last.as_ref().is_ok_and(is_told_to_wait);
            heard.push(last);
            if !waits || began.elapsed() + PAUSE > self.patience {
                return heard;
            }
            sleep(PAUSE).await;
        }
    }

    pub(super) async fn failing(&self, hook: &Hook) -> Exchange {
        let request = self.fresh();
        let failed = self.client.send(&hook(request.clone())).await;
        let mut heard = match self.expected.after_failure {
            AfterFailure::RunsAgain => self.insist(&request).await,
            _ => vec![self.client.send(&request).await],
        };
        let retry = heard.last().cloned().unwrap_or(Err(Silence::TimedOut));
        let again = self.client.send(&request).await;
        let fault = self.after_failure(&failed, &retry, &again).err();
        heard.insert(0, failed);
        heard.push(again);
        Exchange { sent: "an attempt that fails, a retry, then again".into(), keys: vec![heard], fault }
    }

    fn after_failure(&self, failed: &Heard, retry: &Heard, again: &Heard) -> Result<(), Fault> {
        match failed {
            Ok(answer) if answer.is_success() => {
                return Err(Fault::new(
                    "an attempt that fails",
                    shown(failed),
                    "the hook of `.failing(…)` makes nothing fail",
                ));
            }
            Err(Silence::TimedOut) => {
                return Err(Fault::new(
                    "an attempt that fails",
                    shown(failed),
                    "the hook of `.failing(…)` makes it hang",
                ));
            }
            _ => {}
        }
        let is_same = |other: &Heard| matches!((failed, other), (Ok(failed), Ok(other)) if failed.is_told_by(other));
        match self.expected.after_failure {
            AfterFailure::RunsAgain if is_same(retry) => Err(Fault::new(
                "a retry after a failure runs, and is answered below 400",
                format!("the failure again ({})", shown(retry)),
                "the failure was kept like an answer, and is told until the key expires; or the hook of `.failing(…)` \
                 makes more than one attempt fail",
            )),
            AfterFailure::RunsAgain => {
                let retry = success("a retry after a failure", retry)?;
                told("a repeat", retry, again, &self.expected, twice::FAILING)
            }
            AfterFailure::IsKept if is_same(retry) && is_same(again) => Ok(()),
            AfterFailure::IsKept => Err(Fault::new(
                format!("a retry is told the failure again ({})", shown(failed)),
                format!("{}, then {}", shown(retry), shown(again)),
                "the failure was not kept",
            )),
            AfterFailure::StaysTaken => one_of(&self.expected.duplicates, [retry, again]),
        }
    }

    pub(super) async fn slow(&self, window: Duration, hook: &Hook) -> Exchange {
        let request = hook(self.fresh());
        let beyond = window + window / 10 + MARGIN;
        let later = async |pause: Duration| {
            sleep(pause).await;
            self.client.send(&request).await
        };
        let began = Instant::now();
        let first = async {
            let first = self.client.send(&request).await;
            (first, began.elapsed())
        };
        let ((first, took), within, past) = join3(first, later(window / 2), later(beyond)).await;
        let again = self.client.send(&request).await;
        let all = [first, within, past];
        let fault = if took < beyond && all[0].is_ok() {
            Some(Fault::new(
                format!("a handler slower than the window: more than {} s", beyond.as_secs_f32()),
                format!("{} after {:.3} s", shown(&all[0]), took.as_secs_f32()),
                "the hook of `.slower_than(…)` does not make it slow enough",
            ))
        } else {
            one_answer(&all, &self.expected, twice::SLOW)
                .and_then(|first| told("a repeat", first, &again, &self.expected, twice::SLOW))
                .err()
        };
        let sent = "a slow one, one within the window, one beyond it, then again".into();
        Exchange { sent, keys: vec![all.into_iter().chain([again]).collect()], fault }
    }
}

fn is_told_to_wait(answer: &Answer) -> bool {
    [409, 429, 503].contains(&answer.status.as_u16())
}

fn one_of<const N: usize>(statuses: &[u16], heard: [&Heard; N]) -> Result<(), Fault> {
    let is_refused = |heard: &&Heard| heard.as_ref().is_ok_and(|answer| statuses.contains(&answer.status.as_u16()));
    match heard.iter().find(|heard| !is_refused(heard)) {
        None => Ok(()),
        Some(other) => Err(Fault::new(
            format!("the key stays taken: {}", list(statuses)),
            shown(other),
            "the key was given back when its attempt had failed",
        )),
    }
}

/// The first answer of all, on which everything else stands.
fn accepted(first: &Heard) -> Result<&Answer, String> {
    match first {
        Ok(answer) if answer.is_success() => Ok(answer),
        Ok(answer) => {
            let body: String = String::from_utf8_lossy(&answer.body).chars().take(300).collect();
            Err(format!("the first request got {}: {body}", answer.status))
        }
        Err(silence) => Err(format!("the first request got {silence}")),
    }
}
