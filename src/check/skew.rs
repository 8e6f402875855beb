//! How far two clocks are apart, as well as a round trip tells.

use std::{
    fmt,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;

use super::report::{Finding, Severity};
use crate::{
    error::Error,
    postgres::{AsyncPgConnection, server},
};

/// How far the clocks of the process and the database may be apart before it is worth a warning: five seconds, which no
/// machine shows whose clock is set by NTP, and which is still nothing to the ten minutes that a form token lives.
pub const MAX_SKEW: Duration = Duration::from_secs(5);

/// The first one prepares the statement; of the others the shortest tells most.
const ROUND_TRIPS: u32 = 4;

/// How far the clock of the database is ahead of that of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Skew {
    /// Milliseconds; less than zero: it is behind.
    pub ahead_ms: i64,
    /// Give or take so many: half of the round trip within which the database was asked.
    pub within_ms: u64,
}

impl Skew {
    /// Times in microseconds since 1970, by the clock of the process when the question was sent, and by that of the
    /// database some time within the round trip.
    fn new(sent_us: i64, round_trip: Duration, told_us: i64) -> Self {
        let half_us = i64::try_from(round_trip.as_micros() / 2).unwrap_or(i64::MAX);
        let ahead_us = told_us.saturating_sub(sent_us.saturating_add(half_us));
        Self { ahead_ms: ahead_us / 1000, within_ms: half_us.unsigned_abs().div_ceil(1000) }
    }

    /// Only what is there at the least counts.
    pub(super) fn finding(self) -> Option<Finding> {
        let at_least = Duration::from_millis(self.ahead_ms.unsigned_abs().saturating_sub(self.within_ms));
        (at_least > MAX_SKEW).then(|| Finding {
            severity: Severity::Warning,
            name: "clock-skew",
            about: None,
            text: format!(
                "{self}: keys are judged by the database's alone, but form tokens are issued by that of the process, \
                 and live longer or shorter for it"
            ),
            advice: "set both clocks by NTP".to_owned(),
        })
    }
}

impl fmt::Display for Skew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ahead_ms, within_ms } = self;
        let direction = if *ahead_ms < 0 { "behind" } else { "ahead of" };
        let by = ahead_ms.unsigned_abs();
        write!(f, "the database's clock is {by} ms {direction} that of this process, give or take {within_ms} ms")
    }
}

/// By the shortest of a few round trips.
pub(super) async fn measure(conn: &mut AsyncPgConnection) -> Result<Skew, Error> {
    let mut best: Option<(Duration, Skew)> = None;
    for _ in 0..ROUND_TRIPS {
        let (sent, began) = (SystemTime::now(), Instant::now());
        let told_us = server::time_us(conn).await?;
        let round_trip = began.elapsed();
        if best.is_none_or(|(shortest, _)| round_trip < shortest) {
            best = Some((round_trip, Skew::new(since_1970_us(sent), round_trip, told_us)));
        }
    }
    Ok(best.map_or_else(|| Skew::new(0, Duration::ZERO, 0), |(_, skew)| skew))
}

/// Less than zero before 1970, where a machine without a battery may begin.
fn since_1970_us(time: SystemTime) -> i64 {
    let us = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
    time.duration_since(UNIX_EPOCH).map_or_else(|before| -us(before.duration()), us)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skew(told_ms: i64, round_trip_ms: u64) -> Skew {
        Skew::new(1_000_000_000, Duration::from_millis(round_trip_ms), 1_000_000_000 + told_ms * 1000)
    }

    #[test]
    fn half_of_the_round_trip_is_taken_off_and_given_as_the_doubt() {
        assert_eq!(skew(0, 0), Skew { ahead_ms: 0, within_ms: 0 });
        // Told half-way: the clocks agree.
        assert_eq!(skew(500, 1000), Skew { ahead_ms: 0, within_ms: 500 });
        assert_eq!(skew(2500, 1000), Skew { ahead_ms: 2000, within_ms: 500 });
        assert_eq!(skew(-2500, 1000), Skew { ahead_ms: -3000, within_ms: 500 });
    }

    #[test]
    fn a_slow_network_is_no_skew() {
        // Twelve seconds on the way: whatever the database says within them may be right.
        for told_ms in [0, 3000, 6000, 12_000] {
            assert_eq!(skew(told_ms, 12_000).finding(), None, "{told_ms}");
        }
        assert_eq!(skew(5000, 0).finding(), None);
        assert!(skew(5001, 0).finding().is_some());
        assert!(skew(-5001, 0).finding().unwrap().text.contains("5001 ms behind"));
    }
}
