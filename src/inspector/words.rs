//! Times and sizes as people read them.

use std::time::{Duration, SystemTime};

use actix_web::http::header::HttpDate;

/// Milliseconds since 1970.
pub(super) fn unix_ms(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH).map(ms).unwrap_or_default()
}

pub(super) fn ms(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}

/// In UTC.
pub(super) fn date(unix_ms: u64) -> String {
    HttpDate::from(SystemTime::UNIX_EPOCH + Duration::from_millis(unix_ms)).to_string()
}

/// In the two largest units.
pub(super) fn span(ms: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s")];
    let Some(largest) = UNITS.iter().position(|(unit, _)| ms >= *unit) else { return format!("{ms} ms") };
    let (unit, name) = UNITS[largest];
    let rest = UNITS.get(largest + 1).map(|(smaller, name)| (ms % unit / smaller, name)).filter(|(rest, _)| *rest > 0);
    match rest {
        Some((rest, smaller)) => format!("{} {name} {rest} {smaller}", ms / unit),
        None => format!("{} {name}", ms / unit),
    }
}

pub(super) fn size(bytes: u64) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_are_told_in_units_that_fit() {
        for (ms, told) in [
            (0, "0 ms"),
            (999, "999 ms"),
            (61_500, "1 min 1 s"),
            (3_600_000, "1 h"),
            (90_000_000, "1 d 1 h"),
            (u64::MAX, "213503982334 d 14 h"),
        ] {
            assert_eq!(span(ms), told);
        }
        assert_eq!((size(1023), size(1536), size(1 << 30)), ("1023 bytes".into(), "1.5 KiB".into(), "1.0 GiB".into()));
        assert_eq!(date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
    }
}
