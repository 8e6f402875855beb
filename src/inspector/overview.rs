//! What is going on: in this process, in the table.

use std::process;

use actix_web::{HttpResponse, web::Data};
use maud::{Markup, html};
use serde::Serialize;

use super::{
    Inspector,
    event::{self, Figures},
    page::{self, Failure, View},
    rows::{self, Row},
    search, words,
};
use crate::{
    admin::{Numbers, STRETCH},
    engine::{Engine, Sweeps},
    error::Error,
    telemetry::{self, INTERVAL, INTERVALS},
};

#[derive(Serialize)]
struct Overview {
    process: Process,
    events: Vec<Figures>,
    sweeper: Sweeper,
    /// `None`: the store does not answer.
    table: Option<Table>,
}

/// The one that has answered.
#[derive(Serialize)]
struct Process {
    id: u32,
    counted_for_ms: u64,
    interval_ms: u64,
    /// Keys that it holds.
    held: usize,
    connections_in_use: u32,
    connections_idle: u32,
}

#[derive(Serialize)]
struct Sweeper {
    /// `not-yet`, `off`, `on`.
    state: &'static str,
    every_ms: Option<u64>,
    /// How long ago its last round was over.
    last_ago_ms: Option<u64>,
    last_rows: Option<u64>,
    /// Since the process has counted.
    rows: u64,
}

#[derive(Serialize)]
struct Table {
    bytes: u64,
    live_rows: u64,
    dead_rows: u64,
    outstanding: u64,
    outstanding_is_whole: bool,
    oldest_outstanding_ms: Option<u64>,
    oldest_expired_ms: Option<u64>,
    /// Whether there is an index of outstanding keys; without it those of the last hour are listed.
    is_indexed: bool,
    /// Whether all of them were looked through.
    is_whole: bool,
    /// Whether there are more than are listed.
    is_cut: bool,
    keys: Vec<Row>,
}

pub(super) async fn page(inspector: Data<Inspector>) -> HttpResponse {
    page::page(Ok(Overview::of(&inspector).await))
}

pub(super) async fn json(inspector: Data<Inspector>) -> HttpResponse {
    page::json(Ok(Overview::of(&inspector).await))
}

impl Overview {
    async fn of(inspector: &Inspector) -> Self {
        // What the process counts is there also where the store is not.
        let table = Table::of(inspector).await.map_err(|error| Failure::store(&error)).ok();
        Self {
            process: Process::of(&inspector.engine),
            events: telemetry::tally().counted().into_iter().map(Figures::from).collect(),
            sweeper: Sweeper::of(&inspector.engine),
            table,
        }
    }
}

impl Process {
    fn of(engine: &Engine) -> Self {
        let pool = engine.store.pool.state();
        Self {
            id: process::id(),
            counted_for_ms: words::ms(telemetry::tally().counted_for()),
            interval_ms: words::ms(INTERVAL),
            held: engine.outstanding(),
            connections_in_use: pool.connections.saturating_sub(pool.idle_connections),
            connections_idle: pool.idle_connections,
        }
    }
}

impl Sweeper {
    fn of(engine: &Engine) -> Self {
        let swept = telemetry::tally().sweeps();
        let (state, every) = match engine.sweeps() {
            Sweeps::NotYet => ("not-yet", None),
            Sweeps::Never => ("off", None),
            Sweeps::Every(interval) => ("on", Some(interval)),
        };
        Self {
            state,
            every_ms: every.map(words::ms),
            last_ago_ms: swept.last.map(|(at, _)| words::ms(at.elapsed())),
            last_rows: swept.last.map(|(_, rows)| rows),
            rows: swept.rows,
        }
    }

    fn markup(&self) -> Markup {
        html! {
            p {
                @match (self.state, self.every_ms) {
                    ("on", Some(every)) => { "This process sweeps about every " (words::span(every)) ". " }
                    ("off", _) => { "This engine leaves expired rows to somebody else. " }
                    _ => { "The sweeper starts with the first protected request. " }
                }
                @match (self.last_ago_ms, self.last_rows) {
                    (Some(ago), Some(rows)) => {
                        "Its last round was over " b { (words::span(ago)) } " ago and deleted "
                        b { (rows) } " rows; " (self.rows) " since the process has counted."
                    }
                    _ => { "No round has been over in this process." }
                }
            }
        }
    }
}

impl Table {
    async fn of(inspector: &Inspector) -> Result<Self, Error> {
        let (found, is_indexed) = inspector.admin.outstanding_lately().await?;
        let Numbers { bytes, live_rows, dead_rows, outstanding, oldest_outstanding, is_whole, oldest_expired } =
            inspector.admin.numbers_lately().await?;
        Ok(Self {
            bytes,
            live_rows,
            dead_rows,
            outstanding,
            outstanding_is_whole: is_whole,
            oldest_outstanding_ms: oldest_outstanding.map(words::ms),
            oldest_expired_ms: oldest_expired.map(words::ms),
            is_indexed,
            is_whole: found.is_whole,
            is_cut: found.is_cut,
            keys: found.entries.iter().map(Row::of).collect(),
        })
    }

    fn outstanding(&self) -> Markup {
        html! {
            @if !self.is_indexed {
                p.hint {
                    "There is no index of outstanding keys (migrations::OUTSTANDING_INDEX), so these are the ones claimed "
                    "within the last hour"
                    @if !self.is_whole { ", among the " (STRETCH) " keys that expire last" }
                    ". Keys that never expire are not among them. "
                    a href="search?outstanding=on" { "Look through the table" }
                }
            }
            @if self.is_indexed && !self.is_whole {
                p.hint { "These are among the " (STRETCH) " whose leases end first; there are more." }
            } @else if self.is_cut {
                p.hint { "There are more than these " (self.keys.len()) "." }
            }
            @if self.keys.is_empty() {
                p { "None." }
            } @else {
                (rows::table(&self.keys))
            }
        }
    }

    fn figures(&self) -> Markup {
        html! {
            dl.figures {
                div { dt { "size, with indexes" } dd { (words::size(self.bytes)) } }
                div { dt { "live rows, about" } dd { (self.live_rows) } }
                div { dt { "dead rows, about" } dd { (self.dead_rows) } }
                div {
                    dt { "outstanding" }
                    dd { @if !self.outstanding_is_whole { "at least " } (self.outstanding) }
                }
                div {
                    dt { "the oldest of them" }
                    dd { @if let Some(age) = self.oldest_outstanding_ms { (words::span(age)) } @else { "–" } }
                }
                div {
                    dt { "expired and not swept for" }
                    dd { @if let Some(age) = self.oldest_expired_ms { (words::span(age)) } @else { "–" } }
                }
            }
        }
    }
}

impl View for Overview {
    fn title(&self) -> String {
        "Overview".to_owned()
    }

    fn markup(&self) -> Markup {
        let minutes = INTERVAL.as_secs() * INTERVALS as u64 / 60;
        html! {
            h1 { "Idempotency keys" }
            (search::form(&search::Asked::default()))
            div data-live="" {
                section {
                    h2 { "The last " (minutes) " minutes" }
                    p.hint {
                        "Of process " (self.process.id) ", which has counted for " (words::span(self.process.counted_for_ms))
                        ". A bar is " (INTERVAL.as_secs()) " s. It holds " b { (self.process.held) } " keys; of its pool "
                        (self.process.connections_in_use) " connections are in use and " (self.process.connections_idle)
                        " idle."
                    }
                    (event::plots(&self.events))
                }
                section #outstanding {
                    h2 { "Outstanding keys, the oldest first" }
                    @match &self.table { Some(table) => (table.outstanding()), None => (silence()) }
                }
                section #table {
                    h2 { "The table" }
                    @match &self.table { Some(table) => (table.figures()), None => (silence()) }
                }
                section #sweeper {
                    h2 { "The sweeper" }
                    (self.sweeper.markup())
                }
            }
        }
    }
}

fn silence() -> Markup {
    html! { p.bad { "The database does not answer. The log says why." } }
}
