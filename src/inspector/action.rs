//! What can be done to one key: asked first, done by POST, and told afterwards.

use actix_web::{
    HttpRequest, HttpResponse, Result, Route,
    http::header,
    rt,
    web::{self, Data, Form, Query, ServiceConfig},
};
use maud::{Markup, html};
use serde::{Deserialize, Serialize};

use super::{
    Inspector, key, origin,
    page::{self, Failure, View, link},
    rows::{self, Row},
};
use crate::admin::{Acted, Entry, State};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Action {
    Release,
    ForceRelease,
    Expire,
}

const ALL: [Action; 3] = [Action::Release, Action::ForceRelease, Action::Expire];

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Came {
    Done,
    Live,
    Unfit,
    Changed,
    Locked,
    Gone,
    Unknown,
}

/// In the address of the page that tells it.
const OUTCOMES: [(Came, &str); 7] = [
    (Came::Done, "done"),
    (Came::Live, "live"),
    (Came::Unfit, "unfit"),
    (Came::Changed, "changed"),
    (Came::Locked, "locked"),
    (Came::Gone, "gone"),
    (Came::Unknown, "unknown"),
];

/// The question: may it be done, to this attempt?
struct Question {
    action: Action,
    row: Row,
    seen: String,
}

#[derive(Deserialize)]
struct Asked {
    id: String,
}

#[derive(Deserialize)]
struct Confirmed {
    id: String,
    /// Of the attempt that was shown.
    seen: String,
}

pub(super) fn routes(config: &mut ServiceConfig) {
    for action in ALL {
        config.service(web::resource(format!("/{}", action.path())).route(ask(action)).route(act(action)));
    }
}

fn ask(action: Action) -> Route {
    web::get().to(move |inspector: Data<Inspector>, asked: Result<Query<Asked>>| async move {
        page::page(Question::of(&inspector, action, asked).await)
    })
}

fn act(action: Action) -> Route {
    web::post().to(move |inspector: Data<Inspector>, request: HttpRequest, form: Result<Form<Confirmed>>| async move {
        match confirmed(&inspector, action, &request, form).await {
            Ok((id, came)) => {
                let told = [("id", Some(&*id)), ("did", Some(action.path())), ("came", Some(came.as_str()))];
                page::protected(HttpResponse::SeeOther()).insert_header((header::LOCATION, link("key", &told))).finish()
            }
            Err(failure) => failure.page(),
        }
    })
}

async fn confirmed(
    inspector: &Inspector,
    action: Action,
    request: &HttpRequest,
    form: Result<Form<Confirmed>>,
) -> Result<(String, Came), Failure> {
    if !origin::is_ours(request) {
        return Err(Failure::foreign());
    }
    let Form(Confirmed { id, seen }) = form.map_err(|_| Failure::unreadable("This form cannot be read."))?;
    let entry = match key::entry(inspector, &id).await {
        Ok(entry) => entry,
        Err(failure) if failure.is_unknown() => return Ok((id, Came::Gone)),
        Err(failure) => return Err(failure),
    };
    if entry.seen() != seen {
        return Ok((id, Came::Changed));
    }
    let doing = inspector.clone();
    let came = inspector.to_its_end(async move { doing.perform(action, &entry).await }).await;
    Ok((id, came.unwrap_or(Came::Unknown)))
}

impl Inspector {
    async fn perform(&self, action: Action, seen: &Entry) -> Came {
        let acted = match action {
            Action::Release => self.admin.release(seen).await,
            Action::ForceRelease => self.admin.force_release(seen).await,
            Action::Expire => self.admin.expire(seen).await,
        };
        match acted {
            Ok(Acted::Done) => Came::Done,
            Ok(Acted::Live { .. }) => Came::Live,
            Ok(Acted::Unfit(_)) => Came::Unfit,
            Ok(Acted::Changed) => Came::Changed,
            Ok(Acted::Locked) => Came::Locked,
            Ok(Acted::Gone) => Came::Gone,
            Err(error) => {
                Failure::store(&error);
                Came::Unknown
            }
        }
    }

    /// In a task of its own, for which a shutdown waits: what is done is logged, also where whoever asked has
    /// hung up. `None` where it panicked.
    pub(super) async fn to_its_end<T: 'static>(&self, work: impl Future<Output = T> + 'static) -> Option<T> {
        rt::spawn(self.engine.tasks.track_future(work)).await.ok()
    }
}

impl Action {
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::ForceRelease => "force-release",
            Self::Expire => "expire",
        }
    }

    pub(super) fn of(path: &str) -> Option<Self> {
        ALL.into_iter().find(|action| action.path() == path)
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Release => "Release",
            Self::ForceRelease => "Force the release",
            Self::Expire => "Expire",
        }
    }

    pub(super) fn for_state(state: State) -> Vec<Self> {
        match state {
            State::Outstanding => vec![Self::ForceRelease],
            State::Lapsed => vec![Self::Release],
            State::Completed => vec![Self::Expire],
            State::Released | State::Expired => Vec::new(),
        }
    }

    /// Whether a key in this state is as this leaves it.
    pub(super) fn leaves(self, state: State) -> bool {
        match self {
            Self::Release | Self::ForceRelease => state == State::Released,
            Self::Expire => state == State::Expired,
        }
    }

    fn does(self) -> &'static str {
        match self {
            Self::Release => {
                "The key is given back. The next retry of the same request runs, as it would by taking the key over; \
                 another request under the key stays refused (422)."
            }
            Self::ForceRelease => {
                "The key is taken away from the attempt that runs it. Its answer is not stored, what it writes \
                 through IdemTx is rolled back, and the next retry of the same request runs. Its client is told what \
                 that attempt stores, or 409."
            }
            Self::Expire => {
                "The stored answer is given up. The next request with this key is a first one, with whatever body, \
                 and runs."
            }
        }
    }

    fn does_not_undo(self) -> &'static str {
        match self {
            Self::Release => {
                "What the dead attempt did outside the database stays done, and the next one may do it again."
            }
            Self::ForceRelease => {
                "The attempt is not stopped. What it has done outside the database, and still does, stays done, and \
                 the next attempt does it again: a payment could be made twice."
            }
            Self::Expire => "What the request did stays done. A late retry of it does it again.",
        }
    }
}

impl Came {
    fn as_str(self) -> &'static str {
        OUTCOMES.iter().find(|(came, _)| *came == self).map_or("unknown", |(_, name)| name)
    }

    pub(super) fn of(name: &str) -> Option<Self> {
        OUTCOMES.iter().find(|(_, known)| *known == name).map(|(came, _)| *came)
    }

    pub(super) fn told(self, action: Action) -> &'static str {
        match (self, action) {
            (Self::Done, Action::Release) => "Released: the next retry runs.",
            (Self::Done, Action::ForceRelease) => {
                "Released: the next retry runs, and the attempt that had the key stores nothing any more."
            }
            (Self::Done, Action::Expire) => "Expired: the next request with this key is a first one.",
            (Self::Live, _) => "Nothing was done: somebody runs it, and the lease is live.",
            (Self::Unfit, _) => "Nothing was done: this is not for a key in its state.",
            (Self::Changed, _) => {
                "Nothing was done: since you saw it, somebody has claimed, completed or released the key."
            }
            (Self::Locked, _) => {
                "Nothing was done: at that moment somebody wrote the row, its owner most likely, or holds it. Look \
                 again."
            }
            (Self::Gone, _) => "Nothing was done: there is no such key any more.",
            (Self::Unknown, _) => "The database did not answer in time: whether it was done, its state tells.",
        }
    }
}

impl Question {
    async fn of(inspector: &Inspector, action: Action, asked: Result<Query<Asked>>) -> Result<Self, Failure> {
        let Query(asked) = asked.map_err(|_| Failure::unreadable("This address cannot be read."))?;
        let entry = key::entry(inspector, &asked.id).await?;
        Ok(Self { action, row: Row::of(&entry), seen: entry.seen() })
    }
}

impl View for Question {
    fn title(&self) -> String {
        self.action.label().to_owned()
    }

    fn markup(&self) -> Markup {
        let is_for_it = Action::for_state(self.row.is).contains(&self.action);
        html! {
            h1 { (self.action.label()) "?" }
            (rows::table(std::slice::from_ref(&self.row)))
            @if is_for_it {
                p { (self.action.does()) }
                p.bad { (self.action.does_not_undo()) }
                form method="post" action=(self.action.path()) {
                    input type="hidden" name="id" value=(self.row.id);
                    input type="hidden" name="seen" value=(self.seen);
                    button { (self.action.label()) } " "
                    a href=(self.row.link()) { "No, leave it" }
                }
            } @else {
                p.notice { (Came::Unfit.told(self.action)) }
                p { a href=(self.row.link()) { "The key" } }
            }
        }
    }
}
