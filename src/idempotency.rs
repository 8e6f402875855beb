//! What is built once and wrapped around routes: an engine, and a policy.

use std::{fmt, num::NonZeroUsize, sync::Arc, time::Duration};

use actix_web::{HttpRequest, Resource, Route, web::Data};

use crate::{
    check::{self, Report},
    document,
    drain::Drain,
    engine::Engine,
    error::{Error, ErrorKind},
    policy::Policy,
    postgres::PgPool,
    refusal::Code,
    status, telemetry,
};

/// The middleware: wrap it around an `App`, a `Scope`, a `Resource` or a route.
///
/// Build it once and clone it into the workers: what the clones share (the pool, the leases of this
/// process, its sweeper) is one engine, also under different policies.
///
/// ```no_run
/// use actix_idempotency::{Idempotency, pool};
/// use actix_web::{App, HttpResponse, HttpServer, web};
///
/// # async fn create_order() -> HttpResponse { HttpResponse::Created().finish() }
/// #[actix_web::main]
/// async fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let idempotency = Idempotency::postgres(pool("postgres://localhost/shop")?);
///     HttpServer::new(move || {
///         App::new().service(
///             web::resource("/orders").wrap(idempotency.clone()).route(web::post().to(create_order)),
///         )
///     })
///     .bind(("127.0.0.1", 8080))?
///     .run()
///     .await?;
///     Ok(())
/// }
/// ```
///
/// # Order
///
/// In actix the last `.wrap` is the outermost. Authentication belongs outside this middleware, or a
/// replay goes to whoever knows the key; so do `Cors`, `Compress`, `NormalizePath` and `Logger`.
///
/// # Where to wrap
///
/// A `Resource` or a `Scope`, rather than the `App`: there actix knows only the first route pattern
/// that fits the path, and keys of two routes could meet in one scope.
#[derive(Clone)]
pub struct Idempotency {
    /// `None`: to be found in the app data of each request.
    engine: Option<Arc<Engine>>,
    /// `None`: that of the app data.
    policy: Option<Arc<Policy>>,
}

impl Idempotency {
    /// An engine on this pool, under the default policy.
    ///
    /// Call it outside the closure of `HttpServer::new`, which runs once per worker: leases, waiters
    /// and the sweeper are one to an engine.
    ///
    /// # Panics
    ///
    /// If the operating system refuses a thread, which the first engine of a process starts.
    #[must_use]
    pub fn postgres(pool: PgPool) -> Self {
        Self { engine: Some(Engine::new(pool)), policy: Some(Arc::default()) }
    }

    /// The engine that the request finds in `web::Data<Idempotency>`, for the attribute form:
    ///
    /// ```
    /// use actix_idempotency::Idempotency;
    /// use actix_web::{HttpResponse, post};
    ///
    /// // with .app_data(web::Data::new(Idempotency::postgres(pool))) on the App
    /// #[post("/orders", wrap = "Idempotency::from_app_data()")]
    /// async fn create_order() -> HttpResponse {
    ///     HttpResponse::Created().finish()
    /// }
    /// ```
    ///
    /// With a policy in a plain function it is the annotation that Java services know. There:
    ///
    /// ```java
    /// @Idempotent(key = "#req.userId + ':' + #req.productId", expireSeconds = 15,
    ///             message = "Your order is being processed, please don't submit twice")
    /// @PostMapping("/orders")
    /// public Order createOrder(@RequestBody OrderReq req) { … }
    /// ```
    ///
    /// Here:
    ///
    /// ```
    /// use std::time::Duration;
    /// use actix_idempotency::{Code, Idempotency, OnCompleted, Policy, Wording};
    /// use actix_web::{HttpResponse, post, web};
    ///
    /// #[derive(serde::Deserialize)]
    /// struct OrderReq {
    ///     user_id: u64,
    ///     product_id: u64,
    /// }
    ///
    /// fn once_per_order() -> Idempotency {
    ///     let message = || Wording::new().detail("Your order is being processed, please don't submit twice");
    ///     let policy = Policy::new()
    ///         .key_from_json::<OrderReq>(|req| format!("{}:{}", req.user_id, req.product_id))
    ///         .anonymous() // or, better, .principal(…): whose key it is
    ///         .retention(Duration::from_secs(15))
    ///         .on_completed(OnCompleted::Reject)
    ///         .wording(Code::Outstanding, message())
    ///         .wording(Code::AlreadyCompleted, message());
    ///     Idempotency::from_app_data().with(policy)
    /// }
    ///
    /// #[post("/orders", wrap = "once_per_order()")]
    /// async fn create_order(req: web::Json<OrderReq>) -> HttpResponse {
    ///     HttpResponse::Created().json(req.product_id)
    /// }
    /// ```
    ///
    /// The function runs once per worker; what is counted or said once lives in the engine.
    ///
    /// Where there is none, the answer is 500 `misconfigured`, the handler does not run, and the log
    /// names the line to add.
    #[must_use]
    pub fn from_app_data() -> Self {
        Self { engine: None, policy: None }
    }

    /// The same engine under another policy. It replaces the policy as a whole.
    ///
    /// # Panics
    ///
    /// Where settings of the policy contradict each other: keys that the server computes without a
    /// principal closure or an explicit [`Policy::anonymous`], and so on.
    #[track_caller]
    #[must_use]
    pub fn with(&self, policy: Policy) -> Self {
        policy.assert_consistent();
        Self { engine: self.engine.clone(), policy: Some(Arc::new(policy)) }
    }

    /// Leaves expired rows to somebody else: a [`Sweeper`](crate::Sweeper) in a job, or another
    /// service on the same table. Say it before the first request; it holds for all policies of the
    /// engine.
    #[must_use]
    pub fn without_sweeper(self) -> Self {
        self.engine.iter().for_each(|engine| engine.never_sweep());
        self
    }

    /// For how long the engine's sweeper keeps [half-done keys](crate::sweeper#half-done-keys) after they have expired.
    /// Default: [`DEFAULT_UNFINISHED`](crate::sweeper::DEFAULT_UNFINISHED). Say it before the first request, and once; it holds
    /// for all policies of the engine.
    #[must_use]
    pub fn keep_unfinished(self, kept: Duration) -> Self {
        self.engine.iter().for_each(|engine| engine.keep_unfinished(kept));
        self
    }

    /// How many requests may hold a connection for as long as their handlers run, for
    /// [`IdemTx`](crate::IdemTx) and under [`Policy::atomic`]; more wait their turn, at most
    /// [`Policy::store_timeout`]. One number for the pool, however many engines share it. Default: all
    /// connections but one, so that claims, and handlers that take a second connection, find one.
    #[must_use]
    pub fn max_transactions(self, transactions: NonZeroUsize) -> Self {
        self.engine.iter().for_each(|engine| engine.holders.set_limit(transactions.get()));
        self
    }

    /// Checks at start-up whether the store can keep its promise: an error where it cannot be used, otherwise a
    /// [`Report`] of what endangers the promise or will make trouble. [The module](crate::check) lists both. Warnings and
    /// dangers are said in the log as well, each once.
    ///
    /// It opens three connections outside the pool's count, and is done within ten seconds. Of
    /// [`from_app_data`](Self::from_app_data) there is nothing to check.
    ///
    /// ```no_run
    /// # async fn example(idempotency: actix_idempotency::Idempotency) -> Result<(), actix_idempotency::Error> {
    /// // At start-up, where a warning in the log is enough:
    /// idempotency.check().await?;
    ///
    /// // For the people who look:
    /// for finding in idempotency.check().await?.findings {
    ///     println!("{finding}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The report is JSON, too. Show it to operators only, for it names settings of your server, and to no probe:
    /// each check opens three connections.
    ///
    /// ```
    /// use actix_idempotency::Idempotency;
    /// use actix_web::{HttpResponse, Result, error::ErrorServiceUnavailable, web};
    ///
    /// async fn report(idempotency: web::Data<Idempotency>) -> Result<HttpResponse> {
    ///     let report = idempotency.check().await.map_err(|_| ErrorServiceUnavailable("no store"))?;
    ///     Ok(HttpResponse::Ok().json(report))
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// The first thing that makes the store useless; its text says what to change.
    pub async fn check(&self) -> Result<Report, Error> {
        match &self.engine {
            Some(engine) => {
                let report = check::check(&engine.store.pool).await?;
                engine.advise(&report.findings);
                Ok(report)
            }
            None => Err(Error::new(
                ErrorKind::Configuration,
                "Idempotency::from_app_data() has no store of its own: check the one that is in the app data",
            )),
        }
    }

    /// What has become of a key, for the principal that sent it: a GET route, to be mounted where its path
    /// has a `{key}`. `method` and `pattern` are those of the protected resource.
    ///
    /// ```
    /// # use actix_idempotency::Idempotency;
    /// # use actix_web::web;
    /// # fn example(idempotency: &Idempotency, config: &mut web::ServiceConfig) {
    /// config.route("/orders/keys/{key}", idempotency.status("POST", "/orders"));
    /// # }
    /// ```
    ///
    /// It answers 202 with `Retry-After` while the request runs; 200 with
    /// `{"state": "completed", "status": …, "headers": […]}` once it is answered, or, with `?answer=true`,
    /// the stored answer itself; 404 `key-unknown` where nothing is known of it, where the attempt has
    /// given the key back, and after it has expired. Keys of others cannot be told from unknown ones.
    #[must_use]
    pub fn status(&self, method: &str, pattern: &str) -> Route {
        status::route(self.clone(), method, pattern)
    }

    /// The specification that the IETF draft asks of a resource (-07, section 2.5.2): whether a key is
    /// required, its form, its scope, its expiry, what is kept, limits; as HTML, or as JSON where `Accept`
    /// asks for it. Mount it at `path`, and give that to [`Policy::documentation`], so that every refusal
    /// links to it.
    ///
    /// ```
    /// use actix_idempotency::{Idempotency, Policy};
    /// use actix_web::App;
    ///
    /// let policy = Policy::new().documentation("/docs/idempotency");
    /// let app = App::new().service(Idempotency::document(&policy, "/docs/idempotency"));
    /// ```
    #[must_use]
    pub fn document(policy: &Policy, path: &str) -> Resource {
        document::resource(policy, path)
    }

    /// For `HttpServer::shutdown_signal`: see [`Drain`]. It drains the engine, under all its policies.
    pub fn drain(&self) -> Drain {
        Drain::new(self.engine.clone())
    }

    /// `None` where it is in the app data.
    pub(crate) fn engine(&self) -> Option<Arc<Engine>> {
        self.engine.clone()
    }

    pub(crate) fn policy(&self) -> Option<Arc<Policy>> {
        self.policy.clone()
    }

    pub(crate) fn resolve(&self, request: &HttpRequest) -> Result<(Arc<Engine>, Arc<Policy>), Code> {
        if let (Some(engine), Some(policy)) = (&self.engine, &self.policy) {
            return Ok((Arc::clone(engine), Arc::clone(policy)));
        }
        let data = request.app_data::<Data<Self>>().and_then(|data| Some((data.engine.clone()?, data.policy.clone())));
        let Some((engine, policy)) = data else {
            telemetry::misconfigured(
                "Idempotency::from_app_data() finds no engine: add \
                 .app_data(web::Data::new(Idempotency::postgres(pool))) to the App",
            );
            return Err(Code::Misconfigured);
        };
        Ok((engine, self.policy.clone().or(policy).unwrap_or_default()))
    }
}

impl fmt::Debug for Idempotency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency").field("policy", &self.policy).finish_non_exhaustive()
    }
}
