//! A row of bars, one for each of the last intervals.

use maud::{Markup, html};

use super::words;
use crate::telemetry::{INTERVAL, INTERVALS};

const BAR: usize = 3;
const HEIGHT: u64 = 48;

/// The newest on the right. Intervals before the process began are empty.
pub(super) fn plot(name: &str, lately: &[u64]) -> Markup {
    let (most, sum) = (lately.iter().copied().max().unwrap_or_default(), lately.iter().sum::<u64>());
    let width = INTERVALS * BAR;
    html! {
        svg.plot viewBox=(format!("0 0 {width} {HEIGHT}")) preserveAspectRatio="none" role="img"
            aria-label=(format!("{name}: {sum} lately, at most {most} in {} s", INTERVAL.as_secs())) {
            line x1="0" x2=(width) y1=(HEIGHT) y2=(HEIGHT) {}
            @for (bars_ago, count) in lately.iter().rev().enumerate().filter(|(_, count)| **count > 0) {
                @let height = (count * HEIGHT).div_ceil(most);
                rect x=(width - (bars_ago + 1) * BAR) y=(HEIGHT - height) width=(BAR - 1) height=(height) {
                    title { (count) ", " (began(bars_ago)) }
                }
            }
        }
    }
}

fn began(bars_ago: usize) -> String {
    match words::ms(INTERVAL) * bars_ago as u64 {
        0 => "in the interval that is not over yet".to_owned(),
        ms => format!("{} before that", words::span(ms)),
    }
}
