//! The page that people who run the service look at: what is going on, what is stuck, and how to get it going again.
//!
//! [`Inspector`] is a scope of pages, made by the server and readable without JavaScript; a small script keeps them up
//! to date. It shows the figures of this process and of the table, finds keys, tells the life of one, and does what
//! [`Admin`] does, each time after a question that says what it does and what it does not undo.
//!
//! | path | what | its twin |
//! |---|---|---|
//! | `overview` | events of the last quarter of an hour, outstanding keys, the table, the sweeper | `overview.json` |
//! | `search` | keys, by `id`, `domain`, `key`, `tenant`, `principal`, `resource`, `outstanding`, `state`, `status` (`502`, `400-499`, `5xx`), and when they were claimed first, `from` and `to` in UTC | `search.json` |
//! | `key?id=…` | one key, by its whole id in hex: its life, its last status, its steps, its answer | `key.json` |
//! | `release`, `force-release`, `expire` | the question by GET, the action by POST | |
//! | `erase` | the same for all keys of a principal | |
//!
//! Letters that cannot be seen, or that turn others around (controls of direction, zero-width ones), are named by their
//! number in every name that a page shows, as in `ab⟨U+202E⟩c`: what looks the same is the same. The twins have names as they
//! are.
//!
//! The twin of a page has the same data, as JSON, behind the same guard. The root of the scope leads to `overview`.
//! All links are relative, so that a proxy may serve it under another path.
//!
//! # Who may look
//!
//! The inspector shows every key, tenant and principal. It does not build without [`Inspector::guard`] or an
//! explicit [`Inspector::protected_elsewhere`]. A guard that says no makes its paths unknown, as if there were no
//! inspector; for a login, wrap the scope in what authenticates your operators, as `examples/inspector.rs` does.
//!
//! Answers are shown without their body, and without the values of headers that could carry a secret, unless
//! [`Inspector::show_bodies`] allows it. The addresses of pages name what was searched for: think of it where access
//! logs are kept.
//!
//! # Requests from other sites
//!
//! A browser sends its login along with a form of any site. An action is taken by POST alone, and only where
//! `Sec-Fetch-Site` is `same-origin`, or, in browsers that do not send it, `Origin` is the host that was asked
//! (`X-Forwarded-Host` and `Forwarded` count). Anything else is 403. Scripts have [`Admin`], or send one of the two.
//!
//! # Deployment caveats
//!
//! Events are counted per process, of all its engines, from the first one on: behind a load balancer each reload
//! may show another process, and each page says which. For the service as a whole there are metrics, see
//! [`telemetry`](crate::telemetry). Whatever is told of rows is by the clock of the database.
//!
//! Outstanding keys are listed by [`OUTSTANDING_INDEX`](crate::migrations::OUTSTANDING_INDEX). Without it the page
//! lists those claimed within the last hour, among the ten thousand keys that expire last, and says so.

mod action;
mod erase;
mod event;
mod key;
mod origin;
mod overview;
mod page;
mod plot;
mod rows;
mod search;
mod words;

use std::{fmt, sync::Arc};

use actix_web::{
    HttpRequest, HttpResponse, Scope,
    guard::{Guard, fn_guard},
    http::header,
    web::{self, Data},
};

use crate::{
    admin::{Admin, Entry},
    engine::Engine,
    idempotency::Idempotency,
};

type ShowBodies = dyn Fn(&Entry) -> bool + Send + Sync;

/// Pages to look at keys and to act on them, to be mounted where only those come who may.
///
/// ```
/// use actix_idempotency::{Idempotency, Inspector};
/// use actix_web::web;
///
/// # fn example(idempotency: &Idempotency, config: &mut web::ServiceConfig) {
/// // Where a middleware asks who it is:
/// let inspector = Inspector::new(idempotency).protected_elsewhere();
/// config.service(web::scope("/operators").service(inspector.scope("/idempotency"))); // .wrap(your authentication)
/// # }
/// ```
///
/// With a guard, here for people on the machine itself, and with bodies for those keys whose answers hold nothing
/// personal:
///
/// ```
/// # use actix_idempotency::{Idempotency, Inspector};
/// # use actix_web::{guard, web};
/// # fn example(idempotency: &Idempotency, config: &mut web::ServiceConfig) {
/// let inspector = Inspector::new(idempotency)
///     .guard(guard::fn_guard(|context| context.head().peer_addr.is_some_and(|peer| peer.ip().is_loopback())))
///     .show_bodies(|entry| entry.resource == "POST /thumbnails");
/// config.service(inspector.scope("/idempotency"));
/// # }
/// ```
///
/// It may be built once and cloned into the workers, or in the closure of `HttpServer::new`: it is the
/// [`Idempotency`] that must be the one that protects the routes.
#[derive(Clone)]
pub struct Inspector {
    admin: Admin,
    engine: Arc<Engine>,
    guards: Vec<Arc<dyn Guard + Send + Sync>>,
    is_protected_elsewhere: bool,
    show_bodies: Option<Arc<ShowBodies>>,
}

impl Inspector {
    /// Of this engine, under all its policies.
    ///
    /// # Panics
    ///
    /// For [`Idempotency::from_app_data`], which has none.
    #[track_caller]
    #[must_use]
    pub fn new(idempotency: &Idempotency) -> Self {
        let engine = idempotency.engine().expect("Inspector: Idempotency::from_app_data() has no engine of its own");
        Self {
            admin: Admin::of(idempotency),
            engine,
            guards: Vec::new(),
            is_protected_elsewhere: false,
            show_bodies: None,
        }
    }

    /// Requests that this guard refuses find nothing here. Several must all agree. It has to ask for what a client
    /// cannot make up: [`guard::Host`](actix_web::guard::Host) alone, or the address of a proxy that everybody comes
    /// through, keeps nobody out.
    #[must_use]
    pub fn guard(mut self, guard: impl Guard + Send + Sync + 'static) -> Self {
        self.guards.push(Arc::new(guard));
        self
    }

    /// That only those come who may is seen to by a middleware around the scope, or by the network. Where it is the
    /// network, add [`guard::Host`](actix_web::guard::Host) with the name that you use: a page of another site whose
    /// name is made to lead here (DNS rebinding) would otherwise be a page of this one.
    #[must_use]
    pub fn protected_elsewhere(self) -> Self {
        Self { is_protected_elsewhere: true, ..self }
    }

    /// For which keys the stored body, and the values of all headers, may be shown. Default: for none. Header values
    /// that say nothing about anybody, such as `Content-Type` and `ETag`, are always shown.
    #[must_use]
    pub fn show_bodies(self, may: impl Fn(&Entry) -> bool + Send + Sync + 'static) -> Self {
        Self { show_bodies: Some(Arc::new(may)), ..self }
    }

    /// The pages, under this path.
    ///
    /// # Panics
    ///
    /// Without [`guard`](Self::guard) and [`protected_elsewhere`](Self::protected_elsewhere).
    #[track_caller]
    #[must_use]
    pub fn scope(&self, path: &str) -> Scope {
        assert!(
            self.is_protected_elsewhere || !self.guards.is_empty(),
            "Inspector::scope: nothing says who may look at every key and act on it. Add .guard(…) to the Inspector, or \
             .protected_elsewhere() where a middleware around the scope, or the network, sees to that"
        );
        let guarded = self
            .guards
            .iter()
            .cloned()
            .fold(web::scope(path), |scope, guard| scope.guard(fn_guard(move |context| guard.check(context))));
        guarded
            .app_data(Data::new(self.clone()))
            .route("", web::get().to(root))
            .route("/", web::get().to(root))
            .route("/inspector.css", web::get().to(page::style))
            .route("/inspector.js", web::get().to(page::script))
            .route("/overview", web::get().to(overview::page))
            .route("/overview.json", web::get().to(overview::json))
            .route("/search", web::get().to(search::page))
            .route("/search.json", web::get().to(search::json))
            .route("/key", web::get().to(key::page))
            .route("/key.json", web::get().to(key::json))
            .configure(action::routes)
            .configure(erase::routes)
            .default_service(web::to(page::nowhere))
    }

    fn may_show_body(&self, entry: &Entry) -> bool {
        self.show_bodies.as_ref().is_some_and(|may| may(entry))
    }
}

impl fmt::Debug for Inspector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inspector")
            .field("guards", &self.guards.len())
            .field("is_protected_elsewhere", &self.is_protected_elsewhere)
            .field("shows_bodies", &self.show_bodies.is_some())
            .finish_non_exhaustive()
    }
}

/// Links are relative to `overview` and its like, which stand beside each other.
async fn root(request: HttpRequest) -> HttpResponse {
    let last = request.uri().path().rsplit('/').next().unwrap_or_default();
    let overview = if last.is_empty() { "overview".to_owned() } else { format!("./{last}/overview") };
    page::protected(HttpResponse::SeeOther()).insert_header((header::LOCATION, overview)).finish()
}
