//! How often something has happened in this process.

use maud::{Markup, html};
use serde::Serialize;

use super::plot::plot;
use crate::telemetry::{Counted, Event};

/// What has a plot of its own, whether or not it has happened, and what that means.
const PLOTTED: &[(Event, &str)] = &[
    (Event::Fresh, "first requests"),
    (Event::Replayed, "stored answers sent again"),
    (Event::Outstanding, "409: the first request still runs"),
    (Event::Waited, "waited for another's answer"),
    (Event::KeyReused, "422: another request under the key"),
    (Event::Rejected, "refused, for whatever reason"),
    (Event::Released, "attempts that failed and gave the key back"),
    (Event::Retried, "released keys claimed again"),
    (Event::TakenOver, "taken over: the attempt before it died"),
    (Event::LeaseLost, "attempts that found themselves overtaken"),
    (Event::CompletionLost, "answers that could not be stored"),
    (Event::StoreUnavailable, "failures of the store"),
];

/// Which of them nobody wants to see.
const BAD: &[Event] = &[Event::TakenOver, Event::LeaseLost, Event::CompletionLost, Event::StoreUnavailable];

#[derive(Serialize)]
pub(super) struct Figures {
    /// As [`telemetry`](crate::telemetry) names it.
    event: &'static str,
    total: u64,
    /// In each of the last intervals, the one that is not over last.
    lately: Vec<u64>,
    #[serde(skip)]
    counted: Event,
}

impl From<Counted> for Figures {
    fn from(counted: Counted) -> Self {
        Self { event: counted.event.name(), total: counted.total, lately: counted.lately, counted: counted.event }
    }
}

pub(super) fn plots(figures: &[Figures]) -> Markup {
    let plotted = |event| PLOTTED.iter().find(|(plotted, _)| *plotted == event);
    let find = |event: Event| figures.iter().find(|figures| figures.counted == event);
    let others = || figures.iter().filter(|figures| figures.total > 0 && plotted(figures.counted).is_none());
    html! {
        div.plots {
            @for (figures, meaning) in PLOTTED.iter().filter_map(|(event, meaning)| Some((find(*event)?, meaning))) {
                @let is_bad = BAD.contains(&figures.counted) && figures.total > 0;
                figure.bad[is_bad] id=(format!("event-{}", figures.event)) {
                    figcaption {
                        b { (figures.event) } " " span.count { (figures.lately.iter().sum::<u64>()) }
                        span.total { " of " (figures.total) } br;
                        small { (meaning) }
                    }
                    (plot(figures.event, &figures.lately))
                }
            }
        }
        @if others().next().is_some() {
            p.others { "Also since then: "
                @for figures in others() { span { (figures.event) " " b { (figures.total) } } " " }
            }
        }
    }
}
