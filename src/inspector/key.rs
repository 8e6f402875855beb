//! The life of one key.

use actix_web::{
    HttpResponse, Result,
    web::{Data, Query},
};
use maud::{Markup, html};
use serde::{Deserialize, Serialize};

use super::{
    Inspector,
    action::{Action, Came},
    page::{self, Failure, View, link},
    rows::Row,
    words,
};
use crate::{
    admin::{Entry, State, Step},
    error::Error,
    snapshot::ResponseSnapshot,
};

/// Headers whose values say nothing about anybody. `Location` is none of them: a signed address is as good as a key.
const HARMLESS: &[&str] = &[
    "accept-ranges",
    "allow",
    "cache-control",
    "content-encoding",
    "content-language",
    "content-type",
    "etag",
    "expires",
    "last-modified",
    "retry-after",
    "vary",
];
/// Of a body, so many characters are shown.
const SHOWN: usize = 65_536;

#[derive(Deserialize)]
pub(super) struct Asked {
    pub(super) id: String,
    /// What was done here just now, and what came of it.
    #[serde(rename = "did")]
    action: Option<String>,
    came: Option<String>,
}

#[derive(Serialize)]
struct Life {
    #[serde(flatten)]
    row: Row,
    /// `None` where none is stored.
    answer: Option<Answer>,
    /// What its attempts have done already, in that order. `None`: this role may not read them.
    steps: Option<Vec<Done>>,
    /// What may be done to it, by the path of the question.
    actions: Vec<Action>,
    #[serde(skip)]
    notice: Option<(Action, Came)>,
}

/// A step.
#[derive(Serialize)]
struct Done {
    name: String,
    done_at_ms: u64,
    /// `None`: the result was too large to keep.
    result_size: Option<u64>,
}

#[derive(Serialize)]
struct Answer {
    /// Whether body and all header values may be shown.
    is_shown: bool,
    headers: Vec<Header>,
    /// `None`: there is none, or it was too large to keep.
    body_size: Option<u64>,
    body_omitted: bool,
    /// Where it may be shown and is text: its first 65,536 characters.
    body: Option<String>,
    /// Whether there is more of it.
    body_cut: bool,
}

#[derive(Serialize)]
struct Header {
    name: String,
    /// `None`: hidden.
    value: Option<String>,
}

pub(super) async fn page(inspector: Data<Inspector>, asked: Result<Query<Asked>>) -> HttpResponse {
    page::page(Life::of(&inspector, asked).await)
}

pub(super) async fn json(inspector: Data<Inspector>, asked: Result<Query<Asked>>) -> HttpResponse {
    page::json(Life::of(&inspector, asked).await)
}

/// The row that an address names.
pub(super) async fn entry(inspector: &Inspector, id: &str) -> Result<Entry, Failure> {
    if id.len() != 64 || !id.chars().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(Failure::unreadable("The id of a key is made of 64 hexadecimal digits."));
    }
    let row = inspector.admin.row(id).await.map_err(|error| Failure::store(&error))?;
    row.ok_or(Failure::unknown("There is no such key, or not any more."))
}

impl Life {
    async fn of(inspector: &Inspector, asked: Result<Query<Asked>>) -> Result<Self, Failure> {
        let Query(asked) = asked.map_err(|_| Failure::unreadable("This address cannot be read."))?;
        let entry = entry(inspector, &asked.id).await?;
        let answer = Answer::of(inspector, &entry).await.map_err(|error| Failure::store(&error))?;
        let steps = inspector.admin.steps(&entry).await.map_err(|error| Failure::store(&error))?;
        let steps = steps.map(|steps| steps.iter().map(Done::of).collect());
        let notice = asked.action.as_deref().and_then(Action::of).zip(asked.came.as_deref().and_then(Came::of));
        // It comes from the address, which anybody can write, and which outlives what it tells.
        let notice = notice.filter(|(action, came)| *came != Came::Done || action.leaves(entry.state));
        Ok(Self { row: Row::of(&entry), answer, steps, actions: Action::for_state(entry.state), notice })
    }

    /// One line each; what has no value has no line.
    fn facts(&self) -> Vec<(&'static str, Markup)> {
        let row = &self.row;
        let at = |unix_ms: u64| html! { (words::date(unix_ms)) ", " (row.ago(unix_ms)) };
        let mut facts = vec![
            ("state", html! { (row.badge()) " " (meaning(row.is)) }),
            ("key", html! { code { (words::visible(&row.key)) } }),
            ("resource", html! { (words::visible(&row.resource)) }),
            ("principal", html! { (words::visible(row.principal.as_deref().unwrap_or("anonymous"))) }),
            ("tenant", html! { (words::visible(row.tenant.as_deref().unwrap_or("–"))) }),
            ("domain", html! { (row.domain) }),
            ("id", html! { code { (row.id) } }),
            ("attempt", html! { (row.attempt) }),
            ("first claimed", at(row.created_at_ms)),
            ("lease", html! { (row.lease()) }),
        ];
        facts.extend(row.request_id.as_ref().map(|id| ("first request", html! { code { (words::visible(id)) } })));
        facts.extend(row.completed_at_ms.map(|completed| ("completed", at(completed))));
        facts.push((
            "expires",
            match row.expires_in_ms {
                None => html! { "never" },
                Some(0) => html! { "it has expired" },
                Some(left) => html! { "in " (words::span(left)) },
            },
        ));
        let last = if row.completed_at_ms.is_some() { "status" } else { "last status" };
        facts.extend(row.status.map(|status| (last, html! { (status) })));
        if row.acted {
            facts.push((
                "effects",
                html! { "unknown: an attempt has acted outside its transaction, or was sure of its success" },
            ));
        }
        facts
    }

    fn steps(&self, steps: &[Done]) -> Markup {
        html! {
            h2 { "Steps that are done" }
            table.steps {
                tbody {
                    @for step in steps {
                        tr {
                            th scope="row" { (words::visible(&step.name)) }
                            td { (self.row.ago(step.done_at_ms)) }
                            td {
                                @match step.result_size {
                                    Some(bytes) => { (words::size(bytes)) }
                                    None => { "its result was too large to keep" }
                                }
                            }
                        }
                    }
                }
            }
            p.hint { "The next attempt at the same request does not do them again. They go with the key." }
        }
    }

    fn actions(&self) -> Markup {
        let whose = [("principal", self.row.principal.as_deref()), ("tenant", self.row.tenant.as_deref())];
        html! {
            p.actions {
                @for action in &self.actions {
                    a.button href=(link(action.path(), &[("id", Some(&self.row.id))])) { (action.label()) } " "
                }
                @if self.row.principal.is_some() {
                    a.button href=(link("erase", &whose)) { "Erase all keys of this principal" }
                }
            }
        }
    }
}

fn meaning(state: State) -> &'static str {
    match state {
        State::Outstanding => "– somebody runs it, and the lease is live",
        State::Lapsed => "– the lease has ended without an answer; a retry takes it over",
        State::Released => "– an attempt has given it back; a retry runs",
        State::Completed => "– the answer is stored; a retry gets it",
        State::Expired => "– the next request is a first one",
    }
}

impl Done {
    fn of(step: &Step) -> Self {
        let done_at_ms = words::unix_ms(step.done_at);
        Self { name: step.name.clone(), done_at_ms, result_size: step.result_size }
    }
}

impl Answer {
    async fn of(inspector: &Inspector, entry: &Entry) -> Result<Option<Self>, Error> {
        let Some(stored) = inspector.admin.answer(entry).await? else { return Ok(None) };
        let is_shown = inspector.may_show_body(entry);
        let body = stored.body().filter(|_| is_shown).and_then(|body| text(body));
        Ok(Some(Self {
            body_cut: body.as_ref().zip(stored.body()).is_some_and(|(shown, whole)| shown.len() < whole.len()),
            is_shown,
            headers: headers(&stored, is_shown),
            body_size: entry.body_size,
            body_omitted: entry.body_omitted,
            body,
        }))
    }

    fn markup(&self) -> Markup {
        html! {
            table.headers {
                tbody {
                    @for header in &self.headers {
                        tr {
                            th scope="row" { (words::visible(&header.name)) }
                            td { @match &header.value { Some(value) => code { (words::visible(value)) }, None => i { "hidden" } } }
                        }
                    }
                }
            }
            p {
                @match (self.body_size, self.body_omitted) {
                    (_, true) => "The body was too large to keep.",
                    (Some(bytes), false) => { "A body of " b { (bytes) } " bytes" @if !self.is_shown { ", hidden" } "." }
                    (None, false) => "No body.",
                }
            }
            @if let Some(body) = &self.body {
                pre.body { (body) }
                @if self.body_cut { p.hint { "That is not all of it." } }
            } @else if self.is_shown && self.body_size.is_some_and(|bytes| bytes > 0) {
                p.hint { "It is no text." }
            }
        }
    }
}

fn headers(stored: &ResponseSnapshot, is_shown: bool) -> Vec<Header> {
    let header =
        |(name, value): (&actix_web::http::header::HeaderName, &actix_web::http::header::HeaderValue)| Header {
            name: name.to_string(),
            value: (is_shown || HARMLESS.contains(&name.as_str()))
                .then(|| String::from_utf8_lossy(value.as_bytes()).into_owned()),
        };
    stored.headers().map(header).collect()
}

/// `None` for what is no text.
fn text(body: &[u8]) -> Option<String> {
    Some(std::str::from_utf8(body).ok()?.chars().take(SHOWN).collect())
}

impl View for Life {
    fn title(&self) -> String {
        format!("Key {}", words::visible(&self.row.key))
    }

    fn markup(&self) -> Markup {
        html! {
            h1 { "One key" }
            @if let Some((action, came)) = self.notice {
                p.notice role="status" { (came.told(action)) }
            }
            div data-live="" {
                dl.life {
                    @for (name, value) in self.facts() {
                        div { dt { (name) } dd { (value) } }
                    }
                }
                @if let Some(steps @ [_, ..]) = self.steps.as_deref() {
                    section #steps { (self.steps(steps)) }
                }
                section #answer {
                    h2 { "The stored answer" }
                    @match &self.answer { Some(answer) => (answer.markup()), None => p { "None." } }
                }
                (self.actions())
            }
        }
    }
}
