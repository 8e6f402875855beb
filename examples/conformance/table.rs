//! What was asked, and what was seen.

use std::fmt;

#[derive(Clone, Copy, PartialEq)]
enum Verdict {
    Pass,
    Fail,
    NotApplicable,
}

/// Of one requirement.
pub struct Finding {
    verdict: Verdict,
    seen: String,
}

pub fn pass(seen: impl Into<String>) -> Finding {
    Finding { verdict: Verdict::Pass, seen: seen.into() }
}

pub fn fail(seen: impl Into<String>) -> Finding {
    Finding { verdict: Verdict::Fail, seen: seen.into() }
}

pub fn not_applicable(why: impl Into<String>) -> Finding {
    Finding { verdict: Verdict::NotApplicable, seen: why.into() }
}

pub fn judge(is_right: bool, seen: impl Into<String>) -> Finding {
    if is_right { pass(seen) } else { fail(seen) }
}

/// The draft's section, or that the draft is silent and this is what clients are used to.
#[derive(Clone, Copy)]
pub enum Source {
    Draft(&'static str),
    Practice,
}

struct Row {
    source: Source,
    requirement: String,
    finding: Finding,
}

#[derive(Default)]
pub struct Table(Vec<Row>);

impl Table {
    /// No answer at all is none of those that are asked for.
    pub fn row(&mut self, source: Source, requirement: impl Into<String>, finding: reqwest::Result<Finding>) {
        let finding = finding.unwrap_or_else(|error| fail(format!("no answer: {}", error.without_url())));
        self.0.push(Row { source, requirement: requirement.into(), finding });
    }

    pub fn fails(&self) -> bool {
        self.count(Verdict::Fail) > 0
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.0.iter().filter(|row| row.finding.verdict == verdict).count()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Row { source, requirement, finding: Finding { verdict, seen } } in &self.0 {
            let source = match source {
                Source::Draft(section) => format!("§{section}"),
                Source::Practice => "practice".into(),
            };
            let verdict = match verdict {
                Verdict::Pass => "pass",
                Verdict::Fail => "FAIL",
                Verdict::NotApplicable => "not applicable",
            };
            writeln!(f, "{source:<8}  {requirement:<66}  {verdict:<14}  {seen}")?;
        }
        let [passed, failed, rest] = [Verdict::Pass, Verdict::Fail, Verdict::NotApplicable].map(|v| self.count(v));
        writeln!(f, "\n{passed} passed, {failed} failed, {rest} not applicable")
    }
}
