//! What is wrong with what a key got, in words that say what it usually means.

use std::fmt;

use super::{
    answer::{Answer, Heard, shown},
    expected::{Expected, list},
};

/// One thing that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    expected: String,
    came: String,
    /// Nothing where another fault of the same stage has said it.
    means: Option<&'static str>,
}

/// What each stage calls it where one key has two answers.
pub(super) mod twice {
    pub(in super::super) const REPEAT: &str = "two different answers for one key: the endpoint ran more than once, for \
        it does not look at the key, or keeps no answer for it";
    pub(in super::super) const CONCURRENT: &str = "two different answers for one key: the endpoint ran more than once. \
        Requests pass between a check of the key and the note that it is taken; one statement must do both (INSERT … ON \
        CONFLICT DO NOTHING), before the work and not after it";
    pub(in super::super) const RESET: &str = "two different answers for one key: the endpoint ran again although it had \
        answered a retry";
    pub(in super::super) const FAILING: &str = "two different answers for one key: the answer of the retry that \
        succeeded was not kept";
    pub(in super::super) const SLOW: &str = "two different answers for one key: it was forgotten while its handler \
        still ran. The window (a lease, a lock's time to live) is shorter than the handler and nobody renews it";
}

/// What the statuses of failures usually mean.
fn meaning(answer: &Answer) -> &'static str {
    match answer.status.as_u16() {
        409 => "the key is held and not given back: nobody ends its claim, or a lease is longer than the patience",
        422 => "it was taken for another request: what was added to it is part of the fingerprint",
        429 | 503 => {
            "it was refused for want of room; where that is the endpoint's policy, allow it by `.duplicates_get(…)`, or \
             send fewer `.requests(…)`"
        }
        400..500 => "the endpoint refuses what it has accepted before",
        _ => {
            "the duplicate reached the handler and failed there, at a unique constraint for example: whoever comes \
             second must be told the first answer, or that it is being made"
        }
    }
}

impl Fault {
    pub(super) fn new(expected: impl Into<String>, came: impl Into<String>, means: &'static str) -> Self {
        Self { expected: expected.into(), came: came.into(), means: Some(means) }
    }

    /// One more of a stage whose first fault explains both.
    pub(super) fn brief(self) -> Self {
        Self { means: None, ..self }
    }

    /// No answer at all, or an error where there should be a success.
    pub(super) fn none(expected: impl Into<String>, heard: &Heard) -> Self {
        let means = match heard {
            Ok(answer) => meaning(answer),
            Err(_) => "the endpoint hangs, or its handler has panicked",
        };
        Self::new(expected, shown(heard), means)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "expected  {}", self.expected)?;
        write!(f, "came      {}", self.came)?;
        self.means.map_or(Ok(()), |means| write!(f, "\nusually   {means}"))
    }
}

/// The first answer of a key, which others are compared with.
pub(super) fn success<'a>(what: &str, heard: &'a Heard) -> Result<&'a Answer, Fault> {
    match heard {
        Ok(answer) if answer.is_success() => Ok(answer),
        heard => Err(Fault::none(format!("{what} is answered below 400"), heard)),
    }
}

/// Whether a later request under the key is told the first answer again.
pub(super) fn told(
    what: &str,
    first: &Answer,
    again: &Heard,
    expected: &Expected,
    twice: &'static str,
) -> Result<(), Fault> {
    let wanted = || match expected.repeats.as_slice() {
        [] => format!("{what} gets the first answer ({}) again, byte for byte", first.status.as_u16()),
        refusals => format!("{what} gets the first answer ({}), or {}", first.status.as_u16(), list(refusals)),
    };
    match again {
        Ok(again) if first.is_told_by(again) || expected.repeats.contains(&again.status.as_u16()) => Ok(()),
        Ok(again) if again.is_success() && again.status == first.status => {
            Err(Fault::new(wanted(), format!("{}, with another body", again.status.as_u16()), twice))
        }
        Ok(again) if again.is_success() => Err(Fault::new(wanted(), shown(&Ok(again.clone())), twice)),
        again => Err(Fault::none(wanted(), again)),
    }
}

/// Of requests at the same time one runs, and the others get its answer or a refusal.
pub(super) fn one_answer<'a>(all: &'a [Heard], expected: &Expected, twice: &'static str) -> Result<&'a Answer, Fault> {
    let wanted = || match expected.duplicates.as_slice() {
        [] => "one answer below 400, the same for all".to_owned(),
        refusals => format!("one answer below 400, the same for all, or {} while the first runs", list(refusals)),
    };
    let is_stray = |heard: &&Heard| match heard {
        Ok(answer) => !answer.is_success() && !expected.duplicates.contains(&answer.status.as_u16()),
        Err(_) => true,
    };
    let successes = || all.iter().flatten().filter(|answer| answer.is_success());
    let n = different(successes());
    if n > 1 {
        return Err(Fault::new(wanted(), format!("{n} different answers below 400"), twice));
    }
    match (all.iter().find(is_stray), successes().next()) {
        (Some(stray), _) => Err(Fault::none(wanted(), stray)),
        (None, Some(first)) => Ok(first),
        (None, None) => Err(Fault::new(wanted(), "refusals only", "the key is held, and nobody runs")),
    }
}

/// How many different answers these are.
pub(super) fn different<'a>(answers: impl Iterator<Item = &'a Answer>) -> usize {
    let mut seen: Vec<&Answer> = Vec::new();
    for answer in answers {
        if !seen.iter().any(|other| other.is_told_by(answer) || answer.is_told_by(other)) {
            seen.push(answer);
        }
    }
    seen.len()
}
