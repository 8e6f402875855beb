//! Keys that somebody looks for.

use actix_web::{
    HttpResponse, Result,
    web::{Data, Query},
};
use maud::{Markup, html};
use serde::{Deserialize, Serialize};

use super::{
    Inspector,
    page::{self, Failure, View, link},
    rows::{self, Row},
    words,
};
use crate::{
    admin::{Found, MATCHES, Rest, STRETCH, STRETCHES, Search, State},
    error::Error,
    scope::Scope,
};

/// As it stands in the address. An empty field says nothing.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Asked {
    id: String,
    domain: String,
    key: String,
    tenant: String,
    principal: String,
    resource: String,
    outstanding: String,
    /// What it is doing now.
    state: String,
    /// One, a range as in `400-499`, or a class as in `5xx`.
    status: String,
    /// When it was claimed first, in UTC: not before, and before.
    from: String,
    to: String,
    /// Where the look before has stopped.
    after: String,
    /// How many rows of the principal have just gone, and how many are left.
    erased: Option<u64>,
    left: Option<u64>,
}

#[derive(Serialize)]
struct Listing {
    keys: Vec<Row>,
    /// Whether every row was looked through that could fit.
    is_whole: bool,
    /// Whether more were found than are listed: the newest of them are, or the oldest of those that are outstanding.
    is_cut: bool,
    /// For `after`, where there is more to look through.
    rest: Option<String>,
    #[serde(skip)]
    asked: Asked,
}

pub(super) async fn page(inspector: Data<Inspector>, asked: Result<Query<Asked>>) -> HttpResponse {
    page::page(Listing::of(&inspector, asked).await)
}

pub(super) async fn json(inspector: Data<Inspector>, asked: Result<Query<Asked>>) -> HttpResponse {
    page::json(Listing::of(&inspector, asked).await)
}

fn said(field: &str) -> Option<&str> {
    Some(field).filter(|text| !text.is_empty())
}

impl Asked {
    /// Those that say something about the key.
    fn fields(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let fields = [
            ("domain", &self.domain),
            ("key", &self.key),
            ("tenant", &self.tenant),
            ("principal", &self.principal),
            ("resource", &self.resource),
        ];
        fields.into_iter().filter_map(|(field, text)| Some((field, said(text)?)))
    }

    /// What no column can hold is told apart before the store is asked.
    fn check(&self) -> Result<(), Failure> {
        if self.fields().any(|(_, text)| text.contains('\0')) {
            return Err(Failure::unreadable("No key has a NUL in it, nor has anything else that can be looked for."));
        }
        if !self.state.is_empty() && State::named(&self.state).is_none() {
            return Err(Failure::unreadable("The state is outstanding, lapsed, released, completed or expired."));
        }
        if !["", "http", "once", "token"].contains(&self.domain.as_str()) {
            return Err(Failure::unreadable("The domain is http, once or token."));
        }
        if self.id.len() > 64 || !self.id.chars().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(Failure::unreadable("An id is made of up to 64 hexadecimal digits."));
        }
        Ok(())
    }

    fn search(&self) -> Result<Search, Failure> {
        let mut search = Search::new();
        for (field, text) in self.fields() {
            search = match field {
                "domain" => search.domain(text),
                "key" => search.key(text),
                "tenant" => search.tenant(text),
                "principal" => search.principal(text),
                _ => search.resource(text),
            };
        }
        if !self.outstanding.is_empty() {
            search = search.outstanding();
        }
        if let Some(state) = State::named(&self.state) {
            search = search.state(state);
        }
        if let Some(status) = said(&self.status) {
            let told = "A status is a number such as 502, a range such as 400-499, or a class such as 5xx.";
            search = search.status(words::statuses(status).ok_or(Failure::unreadable(told))?);
        }
        let when = |text| {
            let told = "A time is a date and a time of day in UTC, such as 2026-01-31T08:00.";
            said(text).map(|text| words::time(text).ok_or(Failure::unreadable(told))).transpose()
        };
        if let Some(from) = when(&self.from)? {
            search = search.claimed_from(from);
        }
        if let Some(to) = when(&self.to)? {
            search = search.claimed_before(to);
        }
        match said(&self.after) {
            None => Ok(search),
            Some(after) => {
                let rest = Rest::of_hex(after).ok_or(Failure::unreadable("No look has stopped there."))?;
                Ok(search.after(rest))
            }
        }
    }

    /// The key, and whose it would be if the fields say everything about it.
    fn scope(&self) -> Option<(Scope, &str)> {
        let (key, resource) = (said(&self.key)?, said(&self.resource)?);
        let narrowing = [&self.outstanding, &self.state, &self.status, &self.from, &self.to, &self.after];
        let is_any_state = narrowing.into_iter().all(String::is_empty);
        let scope = match self.domain.as_str() {
            _ if !is_any_state => return None,
            "token" => return None,
            "once" => Scope::once(resource),
            _ => Scope::request(resource),
        };
        let scope = said(&self.tenant).map_or(scope.clone(), |tenant| scope.for_tenant(tenant));
        let scope = said(&self.principal).map_or(scope.clone(), |principal| scope.for_principal(principal));
        Some((scope, key))
    }

    fn further(&self, rest: &str) -> String {
        let mut fields: Vec<_> = self.fields().map(|(field, text)| (field, Some(text))).collect();
        fields.extend([
            ("outstanding", said(&self.outstanding)),
            ("state", said(&self.state)),
            ("status", said(&self.status)),
            ("from", said(&self.from)),
            ("to", said(&self.to)),
            ("after", Some(rest)),
        ]);
        link("search", &fields)
    }
}

impl Listing {
    async fn of(inspector: &Inspector, asked: Result<Query<Asked>>) -> Result<Self, Failure> {
        let Query(asked) = asked.map_err(|_| Failure::unreadable("This address cannot be read."))?;
        asked.check()?;
        let search = asked.search()?;
        let found = match said(&asked.id) {
            Some(id) => Self::by_id(inspector, id).await,
            None => Self::by_fields(inspector, &search, asked.scope()).await,
        };
        let Found { entries, is_whole, is_cut, rest } = found.map_err(|error| Failure::store(&error))?;
        let rest = rest.map(|rest| rest.to_hex());
        Ok(Self { keys: entries.iter().map(Row::of).collect(), is_whole, is_cut, rest, asked })
    }

    async fn by_id(inspector: &Inspector, id: &str) -> Result<Found, Error> {
        let entries = inspector.admin.find(&id.to_ascii_lowercase()).await?;
        let is_whole = entries.len() < MATCHES as usize;
        Ok(Found { entries, is_whole, is_cut: false, rest: None })
    }

    /// A key whose whole scope is said is found wherever it stands, however large the table is.
    async fn by_fields(inspector: &Inspector, search: &Search, scope: Option<(Scope, &str)>) -> Result<Found, Error> {
        let mut found = inspector.admin.search(search).await?;
        if let Some((scope, key)) = scope
            && let Some(exact) = inspector.admin.look(&scope, key).await?
            && found.entries.iter().all(|entry| entry.id() != exact.id())
        {
            found.entries.insert(0, exact);
        }
        Ok(found)
    }
}

impl View for Listing {
    fn title(&self) -> String {
        "Search".to_owned()
    }

    fn markup(&self) -> Markup {
        html! {
            h1 { "Search" }
            @if let Some(erased) = self.asked.erased {
                p.notice role="status" {
                    (erased) " keys were erased"
                    @if let Some(left @ 1..) = self.asked.left {
                        "; " (left) " are there still: their requests run, or were written at that moment"
                    }
                    "."
                }
            }
            (form(&self.asked))
            @for (field, text) in self.asked.fields().filter(|(_, text)| words::visible(text) != *text) {
                p.hint { "The " (field) " that was looked for: " code { (words::visible(text)) } }
            }
            p.hint {
                @if self.keys.is_empty() { "None found" } @else { (self.keys.len()) " found" }
                @if self.is_cut { ", and there are more that fit: say more of what you look for" }
                @if !self.is_whole && !self.asked.id.is_empty() {
                    ", and there may be more whose ids begin so"
                } @else if !self.is_whole {
                    ", and not every key was looked through: a search stops after " (STRETCH * STRETCHES) " rows"
                }
                ". "
                @if let Some(rest) = &self.rest { a href=(self.asked.further(rest)) { "Go on from there" } }
            }
            @if !self.keys.is_empty() { (rows::table(&self.keys)) }
        }
    }
}

/// With what was asked in it.
pub(super) fn form(asked: &Asked) -> Markup {
    let fields = [
        ("key", "Key", &asked.key),
        ("resource", "Resource", &asked.resource),
        ("principal", "Principal", &asked.principal),
        ("tenant", "Tenant", &asked.tenant),
        ("id", "Id, or how it begins", &asked.id),
    ];
    html! {
        form.search method="get" action="search" role="search" {
            @for (name, label, value) in fields {
                label { (label) input name=(name) value=(value) autocomplete="off" spellcheck="false"; }
            }
            label {
                "Domain"
                select name="domain" {
                    @for (value, label) in [("", "any"), ("http", "http"), ("once", "once"), ("token", "token")] {
                        option value=(value) selected[asked.domain == value] { (label) }
                    }
                }
            }
            label {
                "State"
                select name="state" {
                    option value="" selected[asked.state.is_empty()] { "any" }
                    @for state in State::ALL {
                        option value=(state.as_str()) selected[asked.state == state.as_str()] { (state.as_str()) }
                    }
                }
            }
            label { "Status, as 502 or 5xx" input name="status" value=(asked.status) size="8" autocomplete="off"; }
            label { "Claimed from (UTC)" input type="datetime-local" name="from" value=(asked.from); }
            label { "and before" input type="datetime-local" name="to" value=(asked.to); }
            label.check { input type="checkbox" name="outstanding" checked[!asked.outstanding.is_empty()]; "outstanding" }
            button { "Search" }
        }
    }
}
