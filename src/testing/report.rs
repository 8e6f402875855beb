//! What a proof has found.

use std::{fmt, panic::Location};

use super::{
    answer::Answer,
    entry::{Entry, Exchange, Stage, Verdict},
    request::Request,
};

/// What each stage got. It prints as a table; what has failed is told with what was expected, what came, and what that
/// usually means.
///
/// It shows statuses and numbers: no key, no header, and of bodies only the beginning of an answer that has stopped the
/// proof.
#[derive(Debug, Clone)]
pub struct Report {
    of: String,
    entries: Vec<Entry>,
    /// Why nothing more could be asked.
    stopped: Option<String>,
    /// The first success of each key, byte for byte another one than that of any other key before.
    answers: Vec<Answer>,
}

/// Bodies that are all the same hide a second run.
const NOT_TELLING: &str = "every key got the same answer, byte for byte, and no replay is marked: a second run cannot be \
    told from a replay. Let effects be counted (`.assert_one_effect(…)`), or let the answer tell what was made";

impl Report {
    pub(super) fn of(request: &Request) -> Self {
        Self { of: request.to_string(), entries: Vec::new(), stopped: None, answers: Vec::new() }
    }

    pub(super) fn push(&mut self, stage: Stage, exchange: Result<Exchange, &str>, effects: Option<i64>) {
        self.entries.push(match exchange {
            Err(why) => Entry::without(stage, Verdict::NotAskedFor, why),
            Ok(exchange) => {
                let entry = Entry::of(stage, &exchange, effects);
                for all in exchange.keys {
                    let first = all.into_iter().flatten().find(Answer::is_success);
                    let is_new = |first: &Answer| !self.answers.iter().any(|other| other.is_told_by(first));
                    self.answers.extend(first.filter(is_new));
                }
                entry
            }
        });
    }

    pub(super) fn ended(mut self, end: Result<(), String>) -> Self {
        self.stopped = end.err();
        for stage in &Stage::ALL[self.entries.len()..] {
            self.entries.push(Entry::without(*stage, Verdict::NotReached, ""));
        }
        self
    }

    pub(super) fn stopped(self, why: String) -> Self {
        self.ended(Err(why))
    }

    /// Whether answers can show a second run.
    fn is_telling(&self) -> bool {
        self.answers.len() > 1 || self.entries.iter().any(|entry| entry.replays() > 0)
    }

    /// Whether every stage that was asked for is as it should be. False as well where that cannot be seen: nothing could
    /// be asked, or every key gets the same answer and effects were not counted.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.stopped.is_none() && !self.fails() && (self.is_telling() || self.is_counted())
    }

    /// The stages, in their order.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// One stage.
    #[must_use]
    pub fn entry(&self, stage: Stage) -> &Entry {
        self.entries.iter().find(|entry| entry.stage() == stage).expect("a report has every stage")
    }

    /// # Panics
    ///
    /// With the report as its message, unless it has [`passed`](Self::passed).
    #[track_caller]
    pub fn assert(&self) {
        self.assert_at(Location::caller());
    }

    pub(super) fn assert_at(&self, place: &Location<'_>) {
        assert!(self.passed(), "{place}: not proved\n\n{self}");
    }

    fn fails(&self) -> bool {
        self.entries.iter().any(|entry| entry.verdict() == Verdict::Failed)
    }

    fn is_counted(&self) -> bool {
        self.entries.iter().any(|entry| entry.effects().is_some())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.of)?;
        for entry in &self.entries {
            write!(f, "{entry}")?;
        }
        if let Some(why) = &self.stopped {
            writeln!(f, "\nnothing more could be asked: {why}")?;
        } else if !self.is_telling() && !self.is_counted() {
            writeln!(f, "\nnothing is proved: {NOT_TELLING}")?;
        }
        Ok(())
    }
}
