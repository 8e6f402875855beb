//! What became of one stage.

use std::{cmp::Ordering, collections::BTreeMap, fmt};

use super::{
    answer::{Answer, Heard},
    judge::{Fault, different},
};

/// One kind of trouble that a client makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Stage {
    /// A request, and the same again when it has been answered.
    Repeat,
    /// Many identical requests at once, and one more afterwards.
    Concurrent,
    /// Another request under a key that was used, and the first one again.
    OtherBody,
    /// Connections that are reset while the request runs, at various moments; then a retry until it is answered, and a
    /// repeat.
    Reset,
    /// An attempt that fails, a retry, and a repeat.
    Failing,
    /// A handler slower than the window in which the endpoint remembers a key that is under way: duplicates within and
    /// beyond the window, and a repeat.
    Slow,
}

/// What became of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// It is as it should be.
    Passed,
    /// It is not, see [`Report`](super::Report).
    Failed,
    /// There was no hook for it, or no other body. It says nothing about the endpoint.
    NotAskedFor,
    /// The proof has stopped before.
    NotReached,
}

/// One stage: what was sent, and what each request got.
#[derive(Debug, Clone)]
pub struct Entry {
    stage: Stage,
    verdict: Verdict,
    /// What was sent; why not, where nothing was.
    sent: String,
    statuses: BTreeMap<u16, usize>,
    unanswered: usize,
    answers: usize,
    replays: usize,
    /// Whether every 409 says when to retry, if there was one.
    retry_after: Option<bool>,
    keys: usize,
    effects: Option<i64>,
    faults: Vec<Fault>,
}

/// What a stage has sent and got, before it is written down.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    pub(super) sent: String,
    /// By key.
    pub(super) keys: Vec<Vec<Heard>>,
    pub(super) fault: Option<Fault>,
}

impl Stage {
    pub(super) const ALL: [Self; 6] =
        [Self::Repeat, Self::Concurrent, Self::OtherBody, Self::Reset, Self::Failing, Self::Slow];

    fn name(self) -> &'static str {
        match self {
            Self::Repeat => "repeat",
            Self::Concurrent => "concurrent",
            Self::OtherBody => "other body",
            Self::Reset => "reset",
            Self::Failing => "failing",
            Self::Slow => "slow",
        }
    }
}

impl Entry {
    pub(super) fn without(stage: Stage, verdict: Verdict, why: &str) -> Self {
        let (statuses, faults) = (BTreeMap::new(), Vec::new());
        let sent = why.to_owned();
        let (unanswered, answers, replays, retry_after, keys, effects) = (0, 0, 0, None, 0, None);
        Self { stage, verdict, sent, statuses, unanswered, answers, replays, retry_after, keys, effects, faults }
    }

    pub(super) fn of(stage: Stage, heard: &Exchange, effects: Option<i64>) -> Self {
        let mut entry = Self::without(stage, Verdict::Passed, &heard.sent);
        for all in &heard.keys {
            let answers = || all.iter().flatten();
            let successes = || answers().filter(|answer| answer.is_success());
            answers().for_each(|answer| *entry.statuses.entry(answer.status.as_u16()).or_default() += 1);
            entry.unanswered += all.len() - answers().count();
            entry.answers += different(successes());
            entry.replays += answers().filter(|answer| answer.is_marked()).count();
            entry.keys += usize::from(successes().next().is_some());
        }
        let mut conflicts = heard.keys.iter().flatten().flatten().filter(|answer| answer.status == 409).peekable();
        entry.retry_after = conflicts.peek().is_some().then(|| conflicts.all(Answer::says_when_to_retry));
        entry.effects = effects;
        let effect = effects.and_then(|effects| too_many_or_few(effects, entry.keys));
        entry.faults.extend(heard.fault.clone());
        entry.faults.extend(if heard.fault.is_some() { effect.map(Fault::brief) } else { effect });
        if !entry.faults.is_empty() {
            entry.verdict = Verdict::Failed;
        }
        entry
    }

    /// Which one.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// What became of it.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// How many requests got which status.
    #[must_use]
    pub fn statuses(&self) -> &BTreeMap<u16, usize> {
        &self.statuses
    }

    /// How many requests got no answer: not in time, or because the connection ended.
    #[must_use]
    pub fn unanswered(&self) -> usize {
        self.unanswered
    }

    /// How many different answers below 400 there were, byte for byte; of every key one, where all is well.
    #[must_use]
    pub fn answers(&self) -> usize {
        self.answers
    }

    /// How many answers were marked as replays: `Idempotency-Replayed: true`, or another name that ends so.
    #[must_use]
    pub fn replays(&self) -> usize {
        self.replays
    }

    /// How many keys got an answer below 400.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// By how many the effects have risen, where they were counted.
    #[must_use]
    pub fn effects(&self) -> Option<i64> {
        self.effects
    }
}

fn too_many_or_few(effects: i64, keys: usize) -> Option<Fault> {
    let means = match effects.cmp(&i64::try_from(keys).unwrap_or(i64::MAX)) {
        Ordering::Equal => return None,
        Ordering::Greater => {
            "work was done that no answer tells of: before the key was claimed, by an attempt that was cut off or has \
             failed, or by a second run whose answer was thrown away. Or what is counted rises by more than one for a \
             request, or by others' requests"
        }
        Ordering::Less => {
            "a success was told of work that is not there: it was rolled back, or it is done later. Or what is counted is \
             not what this request does"
        }
    };
    let expected = format!("{}, one for each key that got an answer below 400", number(keys, "effect"));
    Some(Fault::new(expected, format!("{effects} effects for {}", number(keys, "key")), means))
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Passed => "pass",
            Verdict::Failed => "FAIL",
            Verdict::NotAskedFor => "not asked for",
            Verdict::NotReached => "not reached",
        };
        write!(f, "{verdict:<13}  {:<10}  {}", self.stage.name(), self.sent)?;
        let got = self.got();
        if !got.is_empty() {
            write!(f, ": {}", got.join(", "))?;
        }
        writeln!(f)?;
        for fault in &self.faults {
            for line in fault.to_string().lines() {
                writeln!(f, "{:<25}  {line}", "")?;
            }
        }
        Ok(())
    }
}

impl Entry {
    fn got(&self) -> Vec<String> {
        let mut got: Vec<_> = self.statuses.iter().map(|(status, n)| format!("{n} × {status}")).collect();
        if self.unanswered > 0 {
            got.push(format!("{} without an answer", self.unanswered));
        }
        if got.is_empty() {
            return got;
        }
        let of_keys = if self.keys == 1 { String::new() } else { format!(" for {}", number(self.keys, "key")) };
        got.push(format!("{}{of_keys}", number(self.answers, "answer")));
        got.push(format!("{} marked", number(self.replays, "replay")));
        got.extend(self.retry_after.filter(|tells| !tells).map(|_| "409 without Retry-After".to_owned()));
        got.extend(self.effects.map(|effects| number(effects, "effect")));
        got
    }
}

fn number(n: impl fmt::Display, what: &str) -> String {
    let n = n.to_string();
    let s = if n == "1" { "" } else { "s" };
    format!("{n} {what}{s}")
}
