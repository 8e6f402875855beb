//! All keys of a principal go.

use actix_web::{
    HttpRequest, HttpResponse, Result,
    http::header,
    web::{self, Data, Form, Query, ServiceConfig},
};
use maud::{Markup, html};
use serde::Deserialize;

use super::{
    Inspector, origin,
    page::{self, Failure, View, link},
    rows::{self, Row},
    words,
};
use crate::admin::{Erased, Search};

/// Whose keys; no tenant is those without one.
#[derive(Deserialize)]
struct Whose {
    principal: String,
    #[serde(default)]
    tenant: String,
}

struct Question {
    whose: Whose,
    /// Some of them.
    keys: Vec<Row>,
    is_whole: bool,
}

pub(super) fn routes(config: &mut ServiceConfig) {
    config.service(web::resource("/erase").route(web::get().to(ask)).route(web::post().to(erase)));
}

async fn ask(inspector: Data<Inspector>, whose: Result<Query<Whose>>) -> HttpResponse {
    page::page(Question::of(&inspector, whose).await)
}

async fn erase(inspector: Data<Inspector>, request: HttpRequest, whose: Result<Form<Whose>>) -> HttpResponse {
    match erased(&inspector, &request, whose).await {
        Ok((whose, Erased { gone, left })) => {
            let (gone, left) = (gone.to_string(), left.to_string());
            let told = [
                ("principal", Some(&*whose.principal)),
                ("tenant", whose.tenant()),
                ("erased", Some(&*gone)),
                ("left", Some(&*left)),
            ];
            page::protected(HttpResponse::SeeOther()).insert_header((header::LOCATION, link("search", &told))).finish()
        }
        Err(failure) => failure.page(),
    }
}

async fn erased(
    inspector: &Inspector,
    request: &HttpRequest,
    whose: Result<Form<Whose>>,
) -> Result<(Whose, Erased), Failure> {
    if !origin::is_ours(request) {
        return Err(Failure::foreign());
    }
    let Form(whose) = whose.map_err(|_| Failure::unreadable("This form cannot be read."))?;
    whose.check()?;
    let admin = inspector.admin.clone();
    let erasing = async move {
        let outcome = admin.erase(whose.tenant(), &whose.principal).await;
        (whose, outcome)
    };
    match inspector.to_its_end(erasing).await {
        Some((whose, Ok(erased))) => Ok((whose, erased)),
        Some((_, Err(error))) => Err(Failure::broken_off(&error)),
        None => Err(Failure::panicked()),
    }
}

impl Whose {
    fn tenant(&self) -> Option<&str> {
        Some(&*self.tenant).filter(|tenant| !tenant.is_empty())
    }

    fn check(&self) -> Result<(), Failure> {
        if self.principal.is_empty() {
            return Err(Failure::unreadable("Whose keys? A principal is missing."));
        }
        if self.principal.contains('\0') || self.tenant.contains('\0') {
            return Err(Failure::unreadable("Nobody has a name with a NUL in it."));
        }
        Ok(())
    }
}

impl Question {
    async fn of(inspector: &Inspector, whose: Result<Query<Whose>>) -> Result<Self, Failure> {
        let Query(whose) = whose.map_err(|_| Failure::unreadable("This address cannot be read."))?;
        whose.check()?;
        let search = Search::new().principal(&whose.principal);
        let search = match whose.tenant() {
            Some(tenant) => search.tenant(tenant),
            None => search.without_tenant(),
        };
        let found = inspector.admin.search(&search).await.map_err(|error| Failure::store(&error))?;
        let is_whole = found.is_whole && !found.is_cut;
        Ok(Self { keys: found.entries.iter().map(Row::of).collect(), is_whole, whose })
    }
}

impl View for Question {
    fn title(&self) -> String {
        "Erase".to_owned()
    }

    fn markup(&self) -> Markup {
        html! {
            h1 { "Erase all keys of this principal?" }
            dl.life {
                div { dt { "principal" } dd { (words::visible(&self.whose.principal)) } }
                div { dt { "tenant" } dd { (words::visible(self.whose.tenant().unwrap_or("none"))) } }
            }
            p { "All of its keys are deleted, with their answers and steps. A retry of any of them is a first request, and runs." }
            p.bad {
                "What those requests did stays done, and late retries do it again. Keys whose requests run stay, and are "
                "counted. It cannot be undone."
            }
            form method="post" action="erase" {
                input type="hidden" name="principal" value=(self.whose.principal);
                input type="hidden" name="tenant" value=(self.whose.tenant);
                button { "Erase" } " "
                a href="overview" { "No, leave them" }
            }
            h2 { @if self.is_whole { "All of them" } @else { "Some of them" } }
            @match (self.keys.is_empty(), self.is_whole) {
                (false, _) => (rows::table(&self.keys)),
                (true, true) => p { "There are none." },
                (true, false) => p { "There are none among the rows that were looked through, which are not all." },
            }
        }
    }
}
