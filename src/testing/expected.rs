//! What counts as right: by default what the IETF draft says.

/// What the retry of an attempt that has failed gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AfterFailure {
    /// It runs. The default: nothing was done, so that the next attempt may be made.
    #[default]
    RunsAgain,
    /// The failure is kept, and told again.
    IsKept,
    /// The key stays taken: it gets what a duplicate gets while the first request runs.
    StaysTaken,
}

#[derive(Debug, Clone)]
pub(super) struct Expected {
    /// Statuses of a duplicate while the first request runs, beside its answer.
    pub(super) duplicates: Vec<u16>,
    /// Statuses of another request under a key that was used.
    pub(super) reuse: Vec<u16>,
    /// Statuses of a repeat, where it does not get the first answer.
    pub(super) repeats: Vec<u16>,
    pub(super) after_failure: AfterFailure,
}

impl Default for Expected {
    fn default() -> Self {
        Self { duplicates: vec![409], reuse: vec![422], repeats: Vec::new(), after_failure: AfterFailure::RunsAgain }
    }
}

/// `409`, or `409, 429`.
pub(super) fn list(statuses: &[u16]) -> String {
    statuses.iter().map(u16::to_string).collect::<Vec<_>>().join(", ")
}
