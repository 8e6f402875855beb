//! Times, sizes and texts as people read them.

use std::{
    borrow::Cow,
    fmt::Write,
    ops::RangeInclusive,
    time::{Duration, SystemTime},
};

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

/// The other way: `2026-01-31T08:00`, with seconds or without, in UTC. `None` for what is no time of ours.
pub(super) fn time(text: &str) -> Option<SystemTime> {
    let (date, day_time) = text.split_once('T')?;
    let [year, month, day] = numbers(date, '-')?;
    let [hour, minute, second] = match day_time.len() {
        5 => numbers(&format!("{day_time}:00"), ':')?,
        _ => numbers(day_time, ':')?,
    };
    let fits = (1970..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !fits || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    // Years begin with March, so that a leap day is the last of its year.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1 - 719_468;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(days * 86_400 + hour * 3600 + minute * 60 + second))
}

fn numbers(text: &str, between: char) -> Option<[u64; 3]> {
    let is_number = |part: &str| (1..=4).contains(&part.len()) && part.bytes().all(|digit| digit.is_ascii_digit());
    let number = |part: &str| is_number(part).then(|| part.parse().ok())?;
    let parts: Option<Vec<u64>> = text.split(between).map(number).collect();
    parts?.try_into().ok()
}

/// `502`, `400-499` or `5xx`.
pub(super) fn statuses(text: &str) -> Option<RangeInclusive<u16>> {
    let text = text.trim();
    let number = |text: &str| text.trim().parse().ok().filter(|status| (100..=999).contains(status));
    if let Some(class) = text.strip_suffix("xx") {
        let first = number(&format!("{class}00"))?;
        return Some(first..=first + 99);
    }
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some(number(first)?..=number(last)?)
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

/// With whatever has no look of its own, or changes that of its neighbours, named by its number: `ab⟨U+202E⟩c`. Two texts
/// that differ look different.
pub(super) fn visible(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unseen) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len() * 2);
    for letter in text.chars() {
        if is_unseen(letter) {
            // A String takes whatever is written.
            let _ = write!(shown, "⟨U+{:04X}⟩", u32::from(letter));
        } else {
            shown.push(letter);
        }
    }
    shown.into()
}

/// Controls, those of direction among them, zero-width and filling letters, selectors of variants, tags.
fn is_unseen(letter: char) -> bool {
    letter.is_control()
        || matches!(letter,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{2800}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_look_is_named_and_all_else_stays() {
        for (text, shown) in [
            ("a1-plain", "a1-plain"),
            ("Größe 注文 عربي", "Größe 注文 عربي"),
            ("ab\u{202e}cd\u{202c}", "ab⟨U+202E⟩cd⟨U+202C⟩"),
            ("pay\u{200b}ment\u{feff}", "pay⟨U+200B⟩ment⟨U+FEFF⟩"),
            ("\u{2066}a\u{2069}\t\u{7f}\u{e0041}", "⟨U+2066⟩a⟨U+2069⟩⟨U+0009⟩⟨U+007F⟩⟨U+E0041⟩"),
        ] {
            assert_eq!(visible(text), shown);
        }
    }

    #[test]
    fn times_and_statuses_are_read_as_people_write_them() {
        for (text, unix) in [
            ("1970-01-01T00:00", 0),
            ("2000-02-29T12:34:56", 951_827_696),
            ("2026-12-01T08:00", 1_796_112_000),
            ("2100-03-01T00:00", 4_107_542_400),
        ] {
            assert_eq!(time(text), Some(SystemTime::UNIX_EPOCH + Duration::from_secs(unix)), "{text}");
        }
        for text in
            ["", "now", "2026-12-01", "2026-13-01T00:00", "2026-12-01T24:00", "1969-12-31T23:59", "2026-1--1T00:00"]
        {
            assert_eq!(time(text), None, "{text}");
        }
        assert_eq!(statuses("502"), Some(502..=502));
        assert_eq!(statuses(" 400-499 "), Some(400..=499));
        assert_eq!(statuses("5xx"), Some(500..=599));
        for text in ["", "xx", "12", "1000", "5x", "400-", "a-b", "-1"] {
            assert_eq!(statuses(text), None, "{text}");
        }
    }

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
