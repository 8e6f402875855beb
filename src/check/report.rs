//! What a check has found.

use std::fmt;

use serde::Serialize;

use super::skew::Skew;

/// How much a [`Finding`] matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Severity {
    /// Worth knowing: it matters only for what you may not use.
    Notice,
    /// It will make trouble, but breaks no promise.
    Warning,
    /// What is promised does not hold here: an answer that was sent can be lost.
    Danger,
}

impl Severity {
    /// `notice`, `warning`, `danger`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Notice => "notice",
            Self::Warning => "warning",
            Self::Danger => "danger",
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Something about the store that somebody should know, and what to do about it. The names are listed in
/// [the module](crate::check).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// What is found, in a word that does not change.
    pub name: &'static str,
    /// The table or the index that it is about, where it is not the server.
    pub about: Option<String>,
    /// What is so, and what follows from it.
    pub text: String,
    /// What to do.
    pub advice: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}; {}", self.severity, self.name, self.text, self.advice)
    }
}

/// What [`Idempotency::check`](crate::Idempotency::check) has found in a store that can be used.
///
/// ```no_run
/// # async fn example(idempotency: actix_idempotency::Idempotency) -> Result<(), Box<dyn std::error::Error>> {
/// use actix_idempotency::check::Severity;
///
/// let report = idempotency.check().await?;
/// println!("{report}"); // a line for each finding, and one for the clocks
/// if report.worst() == Some(Severity::Danger) {
///     return Err("the database does not keep what it commits".into());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The worst first.
    pub findings: Vec<Finding>,
    /// How far the clocks of database and process are apart.
    pub skew: Skew,
}

impl Report {
    pub(super) fn new(mut findings: Vec<Finding>, skew: Skew) -> Self {
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Self { findings, skew }
    }

    /// How much the worst of them matters. `None`: nothing was found.
    #[must_use]
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.findings.iter().try_for_each(|finding| writeln!(f, "{finding}"))?;
        write!(f, "{}", self.skew)
    }
}
