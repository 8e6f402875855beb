//! Keys in a list.

use maud::{Markup, html};
use serde::Serialize;

use super::{page::link, words};
use crate::admin::{Entry, State};

/// What is shown of a key wherever it is shown. Times are milliseconds, those of the clock since 1970.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) id: String,
    pub(super) domain: String,
    pub(super) tenant: Option<String>,
    pub(super) principal: Option<String>,
    pub(super) resource: String,
    pub(super) key: String,
    /// By what the logs know the request that claimed it first.
    pub(super) request_id: Option<String>,
    pub(super) state: &'static str,
    pub(super) attempt: u32,
    /// When it was looked at, by the same clock as all of these: the database's.
    pub(super) seen_at_ms: u64,
    pub(super) created_at_ms: u64,
    pub(super) age_ms: u64,
    pub(super) leased_until_ms: Option<u64>,
    pub(super) lease_left_ms: Option<u64>,
    pub(super) completed_at_ms: Option<u64>,
    pub(super) expires_in_ms: Option<u64>,
    /// Of the stored answer, or of the attempt that gave the key back.
    pub(super) status: Option<u16>,
    /// Whether an attempt that gave it back has done what a ROLLBACK does not undo.
    pub(super) acted: bool,
    #[serde(skip)]
    pub(super) is: State,
}

impl Row {
    pub(super) fn of(entry: &Entry) -> Self {
        let (seen_at_ms, created_at_ms) = (words::unix_ms(entry.seen_at), words::unix_ms(entry.created_at));
        Self {
            id: entry.id(),
            domain: entry.domain.clone(),
            tenant: entry.tenant.clone(),
            principal: entry.principal.clone(),
            resource: entry.resource.clone(),
            key: entry.key.clone(),
            request_id: entry.request_id.clone(),
            state: entry.state.as_str(),
            attempt: entry.attempt,
            seen_at_ms,
            created_at_ms,
            age_ms: seen_at_ms.saturating_sub(created_at_ms),
            leased_until_ms: entry.leased_until.map(words::unix_ms),
            lease_left_ms: entry.lease_left.map(words::ms),
            completed_at_ms: entry.completed_at.map(words::unix_ms),
            expires_in_ms: entry.expires_in.map(words::ms),
            status: entry.status,
            acted: entry.acted,
            is: entry.state,
        }
    }

    pub(super) fn link(&self) -> String {
        link("key", &[("id", Some(&self.id))])
    }

    /// How long before it was looked at.
    pub(super) fn ago(&self, unix_ms: u64) -> String {
        format!("{} ago", words::span(self.seen_at_ms.saturating_sub(unix_ms)))
    }

    /// What is left, or why there is nothing left.
    pub(super) fn lease(&self) -> String {
        match (self.is, self.lease_left_ms, self.leased_until_ms) {
            (State::Outstanding, Some(left), _) => format!("{} left", words::span(left)),
            (State::Outstanding, None, _) => "without end".to_owned(),
            (State::Lapsed, _, Some(ended)) => format!("lapsed {}", self.ago(ended)),
            _ => "ended".to_owned(),
        }
    }

    pub(super) fn badge(&self) -> Markup {
        html! { span.badge.(self.state) { (self.state) } }
    }
}

pub(super) fn table(rows: &[Row]) -> Markup {
    html! {
        table.keys {
            thead {
                tr {
                    @for name in ["State", "Key", "Resource", "Principal", "Tenant", "Attempt", "Claimed", "Lease", "Status"] {
                        th scope="col" { (name) }
                    }
                }
            }
            tbody {
                @for row in rows {
                    tr.(row.state) {
                        td { (row.badge()) }
                        td.text { a href=(row.link()) { (words::visible(&row.key)) } }
                        td.text { (words::visible(&row.resource)) }
                        td.text { (words::visible(row.principal.as_deref().unwrap_or("anonymous"))) }
                        td.text { (words::visible(row.tenant.as_deref().unwrap_or("–"))) }
                        td.number { (row.attempt) }
                        td { (row.ago(row.created_at_ms)) }
                        td { (row.lease()) }
                        td.number { @if let Some(status) = row.status { (status) } @else { "–" } }
                    }
                }
            }
        }
    }
}
