//! The corridor: what happens to a request, station by station.

use std::{
    fmt,
    future::{Ready, ready},
    num::NonZeroUsize,
    panic::AssertUnwindSafe,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use actix_web::{
    Error as ActixError, HttpMessage, HttpRequest, HttpResponse, Resource, ResponseError, Result as ActixResult, Route,
    body::{BoxBody, EitherBody, MessageBody},
    dev::{Service, ServiceRequest, ServiceResponse, Transform, forward_ready},
    error::InternalError,
    web::{Bytes, Data},
};
use futures_util::{FutureExt, future::LocalBoxFuture};
use tokio::time::timeout;
use tracing::Instrument;

use crate::{
    atomic, body, check,
    claim::{self, Ask, Claim},
    document,
    drain::Drain,
    engine::{Engine, Patience},
    error::{Error, ErrorKind},
    extract::{self, IdemKey, Slot},
    failpoint,
    fingerprint::Fingerprint,
    form_token::submitted,
    lease::Ended,
    policy::{OnFailure, Policy},
    postgres::PgPool,
    refusal::{self, Code, Refusal},
    scope::Scope,
    selection::Fields,
    settle::{Case, Hold, settle_keyless},
    source::Found,
    status,
    telemetry::{self, Event},
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

    /// How many requests may hold a connection for as long as their handlers run, for
    /// [`IdemTx`](crate::IdemTx) and under [`Policy::atomic`]; more wait their turn, at most
    /// [`Policy::store_timeout`]. One number for the pool, however many engines share it. Default: all
    /// connections but one, so that claims, and handlers that take a second connection, find one.
    #[must_use]
    pub fn max_transactions(self, transactions: NonZeroUsize) -> Self {
        self.engine.iter().for_each(|engine| engine.holders.set_limit(transactions.get()));
        self
    }

    /// Checks at start-up that the store can keep its promise: the table is there and of this version,
    /// the server is a primary and writable, and prepared statements survive the pooler. It opens three
    /// connections outside the pool's count, and is done within ten seconds. Of
    /// [`from_app_data`](Self::from_app_data) there is nothing to check.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong; its text says what to change.
    pub async fn check(&self) -> Result<(), Error> {
        match &self.engine {
            Some(engine) => check::check(&engine.store.pool).await,
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

impl<S, B> Transform<S, ServiceRequest> for Idempotency
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = ActixError> + 'static,
    B: MessageBody + 'static,
{
    type Response = ServiceResponse<EitherBody<B>>;
    type Error = ActixError;
    type Transform = IdempotencyMiddleware<S>;
    type InitError = ();
    type Future = Ready<Result<Self::Transform, ()>>;

    fn new_transform(&self, service: S) -> Self::Future {
        ready(Ok(IdempotencyMiddleware { service: Rc::new(service), idempotency: self.clone() }))
    }
}

/// What [`Idempotency`] makes of the service that it wraps.
pub struct IdempotencyMiddleware<S> {
    service: Rc<S>,
    idempotency: Idempotency,
}

impl<S> fmt::Debug for IdempotencyMiddleware<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyMiddleware").field("idempotency", &self.idempotency).finish_non_exhaustive()
    }
}

type Response<B> = ServiceResponse<EitherBody<B>>;

impl<S, B> Service<ServiceRequest> for IdempotencyMiddleware<S>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = ActixError> + 'static,
    B: MessageBody + 'static,
{
    type Response = Response<B>;
    type Error = ActixError;
    type Future = LocalBoxFuture<'static, ActixResult<Response<B>>>;

    forward_ready!(service);

    fn call(&self, mut request: ServiceRequest) -> Self::Future {
        let (engine, policy) = match self.idempotency.resolve(request.request()) {
            Ok(found) => found,
            Err(code) => return ready(Ok(refuse(request, code.into()))).boxed_local(),
        };
        if !policy.applies_to(request.request()) || is_claimed(&request) {
            return self.service.call(request).map(|answer| answer.map(untouched)).boxed_local();
        }
        let service = Rc::clone(&self.service);
        async move {
            match prepare(&engine, &policy, &mut request).await {
                Ok(Some(ask)) => {
                    let case = Case::new(engine, policy, ask);
                    Rc::new(Protected { service, case }).answer(request).await
                }
                Ok(None) => keyless(&service, &engine, &policy, request).await,
                Err(refusal) => Ok(refuse(request, refusal.under(&policy))),
            }
        }
        .boxed_local()
    }
}

/// Key + scope + fingerprint. `None`: there is no key, and none is required.
async fn prepare(engine: &Engine, policy: &Policy, request: &mut ServiceRequest) -> Result<Option<Ask>, Refusal> {
    let mut body = None;
    let Some(found) = find_key(policy, request, &mut body).await? else {
        return if policy.key_required { Err(policy.key_missing()) } else { Ok(None) };
    };
    policy.allows_key(&found)?;
    let scope = match &found.form {
        Some(form) => {
            request.extensions_mut().insert(form.token.clone());
            form.scope.clone()
        }
        None => Scope::of(request.request(), policy)?,
    };
    let names_nobody = scope.principal().is_none() && found.form.is_none();
    if names_nobody && policy.warns_of_anonymous() && engine.first_anonymous() {
        telemetry::advise(
            "a request with a key names nobody, so that its key is shared by all who name nobody: give the policy a \
             principal closure, or say Policy::anonymous() or Policy::refuse_anonymous()",
        );
    }
    let body = match body {
        Some(body) => body,
        None => body::read(request, policy).await?,
    };
    let all = Fields::all();
    let fields = policy.compare.as_ref().or(found.fields.as_ref()).unwrap_or(&all);
    let fingerprint = Fingerprint::of(request.request(), body.as_deref(), fields, policy);
    Ok(Some(Ask::new(found, scope, fingerprint)))
}

/// The first source that has a key. The body is read when one needs it, and once.
async fn find_key(
    policy: &Policy,
    request: &mut ServiceRequest,
    body: &mut Option<Option<Bytes>>,
) -> Result<Option<Found>, Refusal> {
    for source in &policy.keys {
        if source.tokens().is_some() {
            let tokens = submitted::tokens(request, policy, body).await?;
            match source.admit(request.request(), &tokens)? {
                Some(found) => return Ok(Some(found)),
                None => continue,
            }
        }
        if source.reads_body() && body.is_none() {
            *body = Some(body::read(request, policy).await?);
        }
        let bytes = body.as_ref().and_then(Option::as_deref);
        if let Some(found) = source.find(request.request(), bytes, policy.fingerprint_keys.first())? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Without a key nothing is claimed; a handler that takes `IdemTx` has a transaction all the same.
async fn keyless<S, B>(
    service: &S,
    engine: &Arc<Engine>,
    policy: &Arc<Policy>,
    request: ServiceRequest,
) -> ActixResult<Response<B>>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = ActixError>,
{
    let slot = Slot::lazy(engine, policy, None);
    extract::mark(&request, None, slot.clone());
    let (request, response) = service.call(request).await?.into_parts();
    Ok(ServiceResponse::new(request, settle_keyless(policy, &slot, response).await))
}

/// A request that has a key, on its way from the claim to the answer.
struct Protected<S> {
    service: Rc<S>,
    case: Case,
}

/// What came of one look at the key.
enum Turn<B> {
    Answered(Response<B>),
    Outstanding(ServiceRequest, Duration),
}

impl<S, B> Protected<S>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = ActixError> + 'static,
    B: MessageBody + 'static,
{
    /// Takes turns until there is an answer, or the wait for one is over.
    async fn answer(self: Rc<Self>, mut request: ServiceRequest) -> ActixResult<Response<B>> {
        let Case { engine, policy, ask, .. } = &self.case;
        let mut patience = Patience::new(policy);
        loop {
            if engine.tasks.len() >= policy.max_running {
                return Ok(answered(request, self.case.refusal(Code::Busy.into())));
            }
            patience.listen();
            let lease_left = match Rc::clone(&self).spawn(request).await? {
                Turn::Answered(response) => return Ok(response),
                Turn::Outstanding(back, lease_left) => {
                    request = back;
                    lease_left
                }
            };
            if !patience.wait(engine, ask.id, policy).await {
                return Ok(answered(request, self.case.outstanding(lease_left)));
            }
        }
    }

    /// From the claim on in a task of its own: a client that hangs up does not stop half-done work.
    async fn spawn(self: Rc<Self>, request: ServiceRequest) -> ActixResult<Turn<B>> {
        let engine = Arc::clone(&self.case.engine);
        let span = self.case.span.clone();
        // Boxed here and where a branch is rare: a future is copied as a whole whenever it is handed on.
        let turn = engine.tasks.track_future(Rc::clone(&self).turn(request).boxed_local().instrument(span));
        match actix_web::rt::spawn(failpoint::cuttable(self.case.ask.key.as_str(), turn)).await {
            Ok(turn) => turn,
            // The worker is being torn down, or the handler panicked while it was dropped.
            Err(_) => Err(Refusal::new(Code::OutcomeUnknown).into()),
        }
    }

    async fn turn(self: Rc<Self>, request: ServiceRequest) -> ActixResult<Turn<B>> {
        let Case { engine, policy, ask, .. } = &self.case;
        failpoint::reach("before-claim");
        let began = Instant::now();
        let claim = if policy.is_atomic {
            atomic::claim(engine, ask, policy).boxed_local().await
        } else {
            claim::claim(engine, ask, policy).await
        };
        telemetry::claimed(began);
        let answer = match claim {
            Ok(Claim::Fresh(mut lease)) => {
                lease.start(policy.without_answer());
                let key = IdemKey::leased(ask, &lease, engine, policy);
                let slot = Slot::lazy(engine, policy, Some(&lease));
                return self.run(Hold::Lease(lease), key, slot, request).boxed_local().await.map(Turn::Answered);
            }
            Ok(Claim::Atomic(atomic, transaction)) => {
                let key = IdemKey::atomic(ask);
                let slot = Slot::ready(engine, policy, transaction);
                return self.run(Hold::Atomic(atomic), key, slot, request).boxed_local().await.map(Turn::Answered);
            }
            Ok(Claim::Outstanding { lease_left }) => return Ok(Turn::Outstanding(request, lease_left)),
            Ok(Claim::Replay(stored)) => self.case.replay(request.request(), stored),
            Ok(Claim::AlreadyCompleted) => self.case.refusal(Code::AlreadyCompleted.into()),
            Ok(Claim::QuotaExceeded) => {
                self.case.refusal(Refusal::new(Code::QuotaExceeded).retry_after(policy.retry_after))
            }
            Ok(Claim::TokenUsed) => self.case.refusal(Code::TokenUsed.into()),
            Ok(Claim::TokenExpired) => self.case.refusal(Code::TokenExpired.into()),
            Ok(Claim::KeyReused) => self.case.key_reused(),
            Ok(Claim::NewerVersion) => self.case.refusal(Code::NewerVersion.into()),
            Ok(Claim::Draining) => self.case.refusal(Code::ShuttingDown.into()),
            Err(error) => self.case.unavailable(&error),
        };
        Ok(Turn::Answered(answered(request, answer)))
    }

    /// Your handler, and what becomes of its answer.
    async fn run(&self, hold: Hold, key: IdemKey, slot: Slot, request: ServiceRequest) -> ActixResult<Response<B>> {
        let Case { policy, ask, span, .. } = &self.case;
        failpoint::reach("after-claim");
        span.record("attempt", key.attempt());
        extract::mark(&request, Some(key.clone()), slot.clone());
        let handler = AssertUnwindSafe(async { self.service.call(request).await }).catch_unwind();
        let began = Instant::now();
        let outcome = timeout(policy.run_limit(), handler).await;
        telemetry::handled(began);
        let (event, code) = match outcome {
            Ok(Ok(Ok(response))) => {
                let (request, response) = response.into_parts();
                let response = self.case.settle(hold, &key, &slot, response).await;
                return Ok(ServiceResponse::new(request, response));
            }
            Ok(Ok(Err(error))) => {
                let response = self.case.settle(hold, &key, &slot, error.error_response()).await;
                return Err(InternalError::from_response(error, response.map_into_boxed_body()).into());
            }
            Ok(Err(_panic)) => (Event::Panicked, Code::HandlerPanicked),
            Err(_elapsed) => (Event::Aborted, Code::OutcomeUnknown),
        };
        // There is no answer: the handler's future is gone, and the request with it.
        telemetry::event(event, &ask.id);
        drop(slot.close());
        let refusal = Refusal::new(code).under(policy);
        let ended = match policy.on_failure {
            OnFailure::Store => hold.keep(None, refusal::snapshot(code, policy)).await,
            _ => hold.give_back(code.status(), policy.without_answer()).await,
        };
        if ended == Ended::Lost {
            return Err(InternalError::from_response(refusal, self.case.overtaken().await).into());
        }
        self.case.report(code.as_str());
        Err(refusal.into())
    }
}

fn answered<B>(request: ServiceRequest, answer: HttpResponse<BoxBody>) -> Response<B> {
    request.into_response(answer).map_into_right_body()
}

fn refuse<B>(request: ServiceRequest, refusal: Refusal) -> Response<B> {
    telemetry::rejected(refusal.code().as_str());
    request.into_response(refusal.error_response()).map_into_right_body()
}

fn untouched<B>(response: ServiceResponse<B>) -> Response<B> {
    response.map_into_left_body()
}

/// Two wraps around one route: the inner one passes.
fn is_claimed(request: &ServiceRequest) -> bool {
    let claimed = extract::is_claimed(request);
    if claimed {
        telemetry::advise("two Idempotency wraps around one route: the inner one does nothing");
    }
    claimed
}
