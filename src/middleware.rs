//! The corridor: what happens to a request, station by station.

use std::{
    fmt,
    future::{Ready, ready},
    panic::AssertUnwindSafe,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use actix_web::{
    Error as ActixError, HttpResponse, ResponseError, Result as ActixResult,
    body::{BoxBody, EitherBody, MessageBody},
    dev::{Service, ServiceRequest, ServiceResponse, Transform, forward_ready},
    error::InternalError,
    http::StatusCode,
    web::Data,
};
use futures_util::{FutureExt, future::LocalBoxFuture};
use tokio::time::{Instant as Clock, timeout, timeout_at};
use tracing::{Instrument, Span};

use crate::{
    body, check,
    claim::{self, Ask, Claim, Ended, Lease},
    drain::Drain,
    engine::Engine,
    error::Error,
    extract::{self, IdemKey, Verdict},
    fingerprint::Fingerprint,
    key::IdempotencyKey,
    policy::{OnOutstanding, Policy},
    postgres::PgPool,
    refusal::{Code, Refusal},
    scope::Scope,
    snapshot::{self, Buffered, ResponseSnapshot},
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
    /// Where there is none, the answer is 500 `misconfigured`, the handler does not run, and the log
    /// names the line to add.
    #[must_use]
    pub fn from_app_data() -> Self {
        Self { engine: None, policy: None }
    }

    /// The same engine under another policy.
    #[must_use]
    pub fn with(&self, policy: Policy) -> Self {
        Self { engine: self.engine.clone(), policy: Some(Arc::new(policy)) }
    }

    /// Leaves expired rows to somebody else: a [`Sweeper`](crate::Sweeper) in a job, or another
    /// service on the same table.
    #[must_use]
    pub fn without_sweeper(self) -> Self {
        self.engine.iter().for_each(|engine| engine.never_sweep());
        self
    }

    /// Checks at start-up that the store can keep its promise: the table is there and of this version,
    /// the server is a primary and writable, and prepared statements survive the pooler.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong; its text says what to change.
    pub async fn check(&self) -> Result<(), Error> {
        match &self.engine {
            Some(engine) => check::check(&engine.store.pool).await,
            None => Ok(()),
        }
    }

    /// For `HttpServer::shutdown_signal`: see [`Drain`].
    pub fn drain(&self) -> Drain {
        Drain::new(self.engine.clone())
    }

    fn resolve(&self, request: &ServiceRequest) -> Result<(Arc<Engine>, Arc<Policy>), Code> {
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
        let (engine, policy) = match self.idempotency.resolve(&request) {
            Ok(found) => found,
            Err(code) => return ready(Ok(refuse(request, code.into()))).boxed_local(),
        };
        if !policy.applies_to(request.request()) || is_claimed(&request) {
            return self.service.call(request).map(|answer| answer.map(untouched)).boxed_local();
        }
        let service = Rc::clone(&self.service);
        async move {
            match prepare(&engine, &policy, &mut request).await {
                Ok(Some(ask)) => Rc::new(Protected::new(service, engine, policy, ask)).answer(request).await,
                Ok(None) => service.call(request).await.map(untouched),
                Err(refusal) => Ok(refuse(request, refusal.documented(policy.documentation.as_ref()))),
            }
        }
        .boxed_local()
    }
}

/// Header → key + scope + fingerprint. `None`: there is no key, and none is required.
async fn prepare(engine: &Engine, policy: &Policy, request: &mut ServiceRequest) -> Result<Option<Ask>, Refusal> {
    let Some(key) = IdempotencyKey::from_headers(request.headers())? else {
        if policy.key_required {
            return Err(Code::KeyMissing.into());
        }
        extract::mark_keyless(request);
        return Ok(None);
    };
    let scope = Scope::of(request.request(), policy)?;
    if scope.principal().is_none() && policy.warns_of_anonymous() && engine.first_anonymous() {
        telemetry::advise(
            "a request with a key names nobody, so that its key is shared by all who name nobody: give the policy a \
             principal closure, or say Policy::anonymous() or Policy::refuse_anonymous()",
        );
    }
    let body = body::read(request, policy).await?;
    let fingerprint = Fingerprint::of(request.request(), body.as_deref(), policy);
    Ok(Some(Ask::new(key, scope, fingerprint)))
}

/// A request that has a key, on its way from the claim to the answer.
struct Protected<S> {
    service: Rc<S>,
    engine: Arc<Engine>,
    policy: Arc<Policy>,
    ask: Ask,
    span: Span,
    began: Instant,
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
    fn new(service: Rc<S>, engine: Arc<Engine>, policy: Arc<Policy>, ask: Ask) -> Self {
        let span = telemetry::span(&ask.scope, &ask.id, &ask.fingerprint);
        Self { service, engine, policy, ask, span, began: Instant::now() }
    }

    /// Takes turns until there is an answer, or the wait for one is over.
    async fn answer(self: Rc<Self>, mut request: ServiceRequest) -> ActixResult<Response<B>> {
        let give_up = Clock::now() + self.policy.patience();
        let mut seat = None;
        loop {
            if self.engine.tasks.len() >= self.policy.max_running {
                return Ok(self.refuse(request, Code::Busy.into()));
            }
            let woken = seat.as_ref().map(|seat: &crate::engine::Seat| seat.woken());
            let lease_left = match Rc::clone(&self).spawn(request).await? {
                Turn::Answered(response) => return Ok(response),
                Turn::Outstanding(back, lease_left) => {
                    request = back;
                    lease_left
                }
            };
            let waits_on = match woken {
                Some(woken) => timeout_at(give_up, woken).await.is_ok(),
                // Once seated it misses no completion; so look again before the wait begins.
                None => {
                    seat = self.sit();
                    seat.is_some()
                }
            };
            if !waits_on {
                return Ok(self.outstanding(request, lease_left));
            }
        }
    }

    fn sit(&self) -> Option<crate::engine::Seat> {
        match self.policy.on_outstanding {
            OnOutstanding::Conflict => None,
            OnOutstanding::Wait(_) => {
                telemetry::event(Event::Waited, &self.ask.id);
                self.engine.waiters.sit(self.ask.id, self.policy.max_waiting)
            }
        }
    }

    /// From the claim on in a task of its own: a client that hangs up does not stop half-done work.
    async fn spawn(self: Rc<Self>, request: ServiceRequest) -> ActixResult<Turn<B>> {
        let engine = Arc::clone(&self.engine);
        let span = self.span.clone();
        let turn = engine.tasks.track_future(self.turn(request).instrument(span));
        match actix_web::rt::spawn(turn).await {
            Ok(turn) => turn,
            // The worker is being torn down, or the handler panicked while it was dropped.
            Err(_) => Err(Refusal::new(Code::OutcomeUnknown).into()),
        }
    }

    async fn turn(self: Rc<Self>, request: ServiceRequest) -> ActixResult<Turn<B>> {
        let refusal = match claim::claim(&self.engine, &self.ask, &self.policy).await {
            Ok(Claim::Fresh(lease)) => return self.run(lease, request).await.map(Turn::Answered),
            Ok(Claim::Outstanding { lease_left }) => return Ok(Turn::Outstanding(request, lease_left)),
            Ok(Claim::Replay(snapshot)) => {
                return Ok(Turn::Answered(request.into_response(self.replay(snapshot)).map_into_right_body()));
            }
            Ok(Claim::KeyReused) => self.key_reused(),
            Ok(Claim::NewerVersion) => Code::NewerVersion.into(),
            Ok(Claim::Draining) => Code::ShuttingDown.into(),
            Err(error) => self.unavailable(&error),
        };
        Ok(Turn::Answered(self.refuse(request, refusal)))
    }

    /// Your handler, and what becomes of its answer.
    async fn run(&self, lease: Lease, request: ServiceRequest) -> ActixResult<Response<B>> {
        self.span.record("attempt", lease.attempt);
        let key = IdemKey::new(&self.ask, &lease);
        extract::mark_claimed(&request, key.clone());
        let handler = AssertUnwindSafe(async { self.service.call(request).await }).catch_unwind();
        let outcome = timeout(self.policy.run_limit(), handler).await;
        match outcome {
            Ok(Ok(Ok(response))) => {
                let (request, response) = response.into_parts();
                let response = self.settle(lease, &key, response).await;
                Ok(ServiceResponse::new(request, response))
            }
            Ok(Ok(Err(error))) => {
                let response = self.settle(lease, &key, error.error_response()).await;
                Err(InternalError::from_response(error, response.map_into_boxed_body()).into())
            }
            Ok(Err(_panic)) => {
                telemetry::event(Event::Panicked, &self.ask.id);
                self.fail(lease, Code::HandlerPanicked).await
            }
            Err(_elapsed) => {
                telemetry::event(Event::Aborted, &self.ask.id);
                self.fail(lease, Code::OutcomeUnknown).await
            }
        }
    }

    /// There is no answer: the handler's future is gone, and the request with it.
    async fn fail(&self, lease: Lease, code: Code) -> ActixResult<Response<B>> {
        let refusal = Refusal::new(code).documented(self.policy.documentation.as_ref());
        if lease.release(code.status()).await == Ended::Lost {
            return Err(InternalError::from_response(refusal, self.overtaken().await).into());
        }
        self.report(code.as_str());
        Err(refusal.into())
    }

    /// Captured, completed or released, and only then sent.
    async fn settle<C>(&self, lease: Lease, key: &IdemKey, mut response: HttpResponse<C>) -> HttpResponse<EitherBody<C>>
    where
        C: MessageBody + 'static,
    {
        snapshot::remove_markers(response.headers_mut(), &self.policy);
        let status = response.status();
        let verdict = key.verdict(status, &self.policy);
        let (head, body) = response.into_parts();
        let (stored, sent) = match verdict {
            Verdict::Release => return self.give_back(lease, status, head.set_body(EitherBody::left(body))).await,
            Verdict::KeepWithoutBody => (None, EitherBody::left(body)),
            Verdict::Keep => match snapshot::buffer(body, head.headers(), &self.policy).await {
                Buffered::Empty(body) => (Some(Default::default()), EitherBody::left(body)),
                Buffered::Whole(bytes) => (Some(bytes.clone()), EitherBody::right(BoxBody::new(bytes))),
                Buffered::Untouched(body) => (None, EitherBody::left(body)),
                Buffered::Streaming(body) => (None, EitherBody::right(body)),
                Buffered::Failed(error) => {
                    telemetry::body_failed(&*error);
                    let refusal = Refusal::new(Code::BodyFailed).documented(self.policy.documentation.as_ref());
                    let response = refusal.error_response().map_into_right_body();
                    return self.give_back(lease, StatusCode::INTERNAL_SERVER_ERROR, response).await;
                }
            },
        };
        let snapshot = ResponseSnapshot::capture(status, head.headers(), stored, &self.policy);
        match lease.complete(snapshot).await {
            Ended::Landed | Ended::Later => {
                self.report("fresh");
                head.set_body(sent)
            }
            Ended::Lost => self.overtaken().await.map_into_right_body(),
        }
    }

    async fn give_back<C>(
        &self,
        lease: Lease,
        status: StatusCode,
        response: HttpResponse<EitherBody<C>>,
    ) -> HttpResponse<EitherBody<C>> {
        match lease.release(status).await {
            Ended::Landed | Ended::Later => {
                self.report("released");
                response
            }
            Ended::Lost => self.overtaken().await.map_into_right_body(),
        }
    }

    /// Somebody else has the key: what they stored is the answer.
    async fn overtaken(&self) -> HttpResponse<BoxBody> {
        telemetry::event(Event::LeaseLost, &self.ask.id);
        let refusal = match claim::look_again(&self.engine, &self.ask, &self.policy).await {
            Ok(Some(Claim::Replay(snapshot))) => return self.replay(snapshot),
            Ok(Some(Claim::KeyReused)) => self.key_reused(),
            Ok(Some(Claim::NewerVersion)) => Code::NewerVersion.into(),
            Ok(_) => Code::LeaseLost.into(),
            Err(error) => {
                telemetry::store_failed("an attempt was overtaken, and by what is unknown", &error);
                Code::OutcomeUnknown.into()
            }
        };
        self.report(refusal.code().as_str());
        refusal.documented(self.policy.documentation.as_ref()).error_response()
    }

    fn replay(&self, snapshot: ResponseSnapshot) -> HttpResponse<BoxBody> {
        telemetry::event(Event::Replayed, &self.ask.id);
        self.report("replayed");
        snapshot.replay(&self.policy)
    }

    fn key_reused(&self) -> Refusal {
        telemetry::event(Event::KeyReused, &self.ask.id);
        Code::KeyReused.into()
    }

    fn unavailable(&self, error: &Error) -> Refusal {
        telemetry::store_failed("a request could not be claimed", error);
        Code::StoreUnavailable.into()
    }

    fn outstanding(&self, request: ServiceRequest, lease_left: Duration) -> Response<B> {
        telemetry::event(Event::Outstanding, &self.ask.id);
        let wait = self.policy.retry_after.min(lease_left);
        self.refuse(request, Refusal::new(Code::Outstanding).retry_after(wait))
    }

    fn refuse(&self, request: ServiceRequest, refusal: Refusal) -> Response<B> {
        self.report(refusal.code().as_str());
        refuse(request, refusal.documented(self.policy.documentation.as_ref()))
    }

    fn report(&self, outcome: &str) {
        telemetry::outcome(&self.span, outcome, self.began);
    }
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
