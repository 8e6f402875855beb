//! The table of the protocol: what a row says to a request.

use crate::{
    fingerprint::{Fingerprint, RECIPE_VERSION},
    policy::OnCompleted,
    postgres::row::Row,
    snapshot::SNAPSHOT_VERSION,
    telemetry::Event,
};

/// What the table of the protocol says about a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// An earlier try of this very claim has landed.
    Mine,
    Replay,
    /// The request cannot be compared with the one that was answered: the recipe has changed.
    ReplayUncompared,
    Outstanding,
    /// Nobody runs it, and nobody is to run it yet.
    Held,
    KeyReused,
    NewerVersion,
    TakeOver(How),
}

/// Why a row may be taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// It is as good as absent.
    Expired,
    /// Nothing was done: a corrected request may use the key.
    Corrected,
    /// The same request again after a release.
    Retried,
    /// The same request again after its lease lapsed.
    Lapsed,
    /// It is completed, and the policy runs it again.
    Again,
}

impl How {
    /// A retry goes on with the attempt count and the seed of the row.
    pub(crate) fn is_retry(self) -> bool {
        matches!(self, Self::Retried | Self::Lapsed)
    }

    pub(crate) fn event(self) -> Event {
        match self {
            Self::Expired => Event::Expired,
            Self::Corrected | Self::Retried => Event::Retried,
            Self::Lapsed => Event::TakenOver,
            Self::Again => Event::RunAgain,
        }
    }
}

/// Whether a newer version of this crate has written it.
pub(crate) fn is_newer(row: &Row) -> bool {
    row.recipe_version > RECIPE_VERSION || row.snapshot_version.is_some_and(|version| version > SNAPSHOT_VERSION)
}

/// The table: row by request. What cannot be compared is never taken for the same request, unless
/// there is an answer to give.
pub(crate) fn decide(row: &Row, fingerprint: &Fingerprint, owner: &[u8], on_completed: OnCompleted) -> Decision {
    if row.expired {
        return Decision::TakeOver(How::Expired);
    }
    if is_newer(row) {
        return Decision::NewerVersion;
    }
    let comparable = fingerprint.by(&row.recipe).filter(|_| row.recipe_version == RECIPE_VERSION);
    let same = comparable.is_some_and(|digest| row.fingerprint == digest);
    let comparable = comparable.is_some();
    let nothing_done = row.status.is_some_and(|status| status < 500) && !row.acted;
    match row.state.as_str() {
        "completed" if on_completed == OnCompleted::RunAgain => Decision::TakeOver(How::Again),
        "completed" if same => Decision::Replay,
        "completed" if !comparable => Decision::ReplayUncompared,
        "outstanding" if row.owner == owner => Decision::Mine,
        "outstanding" if same && row.lease_left_ms <= 0 => Decision::TakeOver(How::Lapsed),
        "outstanding" if (same || !comparable) && row.is_held() => Decision::Held,
        "outstanding" if same || !comparable => Decision::Outstanding,
        "released" if same => Decision::TakeOver(How::Retried),
        "released" if nothing_done => Decision::TakeOver(How::Corrected),
        "released" if !comparable => Decision::Outstanding,
        _ => Decision::KeyReused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outstanding(lease_left_ms: i64) -> Row {
        Row {
            fingerprint: vec![1; 32],
            recipe: vec![2; 8],
            recipe_version: RECIPE_VERSION,
            state: "outstanding".into(),
            owner: vec![3; 16],
            attempt: 1,
            seed: vec![4; 32],
            lease_left_ms,
            expired: false,
            status: None,
            acted: false,
            header_names: None,
            header_values: None,
            body: None,
            snapshot_version: None,
            expires_in_ms: None,
            request_id: None,
        }
    }

    #[test]
    fn a_lease_is_taken_over_when_it_has_ended_and_not_a_millisecond_before() {
        let same = Fingerprint::stored([1; 32], [2; 8]);
        let decided = |lease_left_ms| decide(&outstanding(lease_left_ms), &same, &[], OnCompleted::Replay);
        for left in [1, 1_000, 20_000, i64::MAX] {
            assert_eq!(decided(left), Decision::Outstanding, "{left} ms are left");
        }
        for left in [0, -1, -20_000] {
            assert_eq!(decided(left), Decision::TakeOver(How::Lapsed), "{left} ms are left");
        }
        let other = Fingerprint::stored([5; 32], [2; 8]);
        assert_eq!(decide(&outstanding(-1), &other, &[], OnCompleted::Replay), Decision::KeyReused);
    }
}
