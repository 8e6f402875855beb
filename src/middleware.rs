//! The corridor: what happens to a request, station by station.

use std::{
    fmt,
    future::{Ready, ready},
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    sync::Arc,
    time::Instant,
};

use actix_web::{
    Error as ActixError, HttpMessage, HttpResponse, ResponseError, Result as ActixResult,
    body::{BoxBody, EitherBody, MessageBody},
    dev::{Service, ServiceRequest, ServiceResponse, Transform, forward_ready},
    error::InternalError,
    web::Bytes,
};
use futures_util::{FutureExt, future::LocalBoxFuture};
use tokio::time::timeout;
use tracing::Instrument;

use crate::{
    ask::Ask,
    atomic, body,
    case::Case,
    claim::{self, Claim},
    engine::{Engine, Patience},
    error::Error,
    extract::{self, IdemKey, Slot},
    failpoint,
    fingerprint::Fingerprint,
    form_token::submitted,
    idempotency::Idempotency,
    policy::Policy,
    refusal::{Code, Refusal},
    scope::Scope,
    selection::Fields,
    settle::{Hold, settle_keyless},
    source::Found,
    telemetry::{self, Event},
    told::Told,
};

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
            let prepared = prepare(&engine, &policy, &mut request).await;
            body::follow(&mut request, &policy);
            match prepared {
                Ok(Some(ask)) => {
                    let case = Case::new(engine, policy, ask);
                    Rc::new(Protected { service, case }).answer(request).await
                }
                Ok(None) => keyless(&service, &engine, &policy, request).boxed_local().await,
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
        None => Scope::of(request.request(), policy).inspect_err(|_| tell_of_nobody(engine, policy))?,
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
    let request_id = policy.id_of(request.request());
    Ok(Some(Ask::new(found, scope, fingerprint, request_id)))
}

/// A closure that never finds anybody stands inside of what authenticates: the log should say so.
fn tell_of_nobody(engine: &Engine, policy: &Policy) {
    if policy.finds_principals() && engine.first_anonymous() {
        telemetry::advise(
            "a principal closure has found nobody, and the request is refused: authentication belongs outside of \
             Idempotency (a later .wrap), so that the closure reads what it has found",
        );
    }
}

/// The first source that has a key. The body is read when one needs it, and once.
async fn find_key(
    policy: &Policy,
    request: &mut ServiceRequest,
    body: &mut Option<Option<Bytes>>,
) -> Result<Option<Found>, Refusal> {
    for source in &policy.keys {
        if source.tokens().is_some() {
            let tokens = submitted::tokens(request, policy, body).boxed_local().await?;
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

/// What came of a claim.
enum Turn<B> {
    Answered(Response<B>),
    Told(ServiceRequest, Told),
}

/// What holds the key while the handler runs, and what the handler sees of it.
type Held = (Hold, IdemKey, Slot);

impl<S, B> Protected<S>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = ActixError> + 'static,
    B: MessageBody + 'static,
{
    /// Looks and claims until there is an answer, or the wait for one is over.
    async fn answer(self: Rc<Self>, mut request: ServiceRequest) -> ActixResult<Response<B>> {
        let Case { engine, policy, ask, span, .. } = &self.case;
        let mut patience = Patience::new(policy);
        loop {
            patience.listen();
            let told = match claim::look(engine, ask, policy).instrument(span.clone()).await {
                Some(told) => told,
                None if engine.tasks.len() >= policy.max_running => {
                    return Ok(answered(request, self.case.refusal(Code::Busy.into())));
                }
                None => match Rc::clone(&self).spawn(request).await? {
                    Turn::Answered(response) => return Ok(response),
                    Turn::Told(back, told) => {
                        request = back;
                        told
                    }
                },
            };
            if !matches!(told, Told::Outstanding(_)) || !patience.wait(engine, ask.id, policy).await {
                return Ok(self.told(request, told));
            }
        }
    }

    fn told(&self, request: ServiceRequest, told: Told) -> Response<B> {
        // A closure of the policy's may panic.
        let answer = AssertUnwindSafe(|| self.case.span.in_scope(|| self.case.told(request.request(), told)));
        let answer = catch_unwind(answer).unwrap_or_else(|_| self.case.refusal(Code::OutcomeUnknown.into()));
        answered(request, answer)
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
        failpoint::reach("before-claim");
        let began = Instant::now();
        let claim = self.claim().await;
        telemetry::claimed(began);
        match claim {
            Ok(Claim::Fresh(held)) => self.run(held, request).boxed_local().await.map(Turn::Answered),
            Ok(Claim::Told(told)) => Ok(Turn::Told(request, told)),
            Err(error) => Ok(Turn::Answered(answered(request, self.case.unavailable(&error)))),
        }
    }

    async fn claim(&self) -> Result<Claim<Held>, Error> {
        let Case { engine, policy, ask, .. } = &self.case;
        if policy.is_atomic {
            let claim = atomic::claim(engine, ask, policy).boxed_local().await?;
            return Ok(claim.map(|(atomic, transaction)| {
                (Hold::Atomic(atomic), IdemKey::atomic(ask), Slot::ready(engine, policy, transaction))
            }));
        }
        let claim = claim::claim(engine, ask, policy).await?;
        Ok(claim.map(|mut lease| {
            lease.start(policy.without_answer());
            let key = IdemKey::leased(ask, &lease, engine, policy);
            let slot = Slot::lazy(engine, policy, Some(&lease));
            (Hold::Lease(lease), key, slot)
        }))
    }

    /// Your handler, and what becomes of its answer.
    async fn run(&self, (hold, key, slot): Held, request: ServiceRequest) -> ActixResult<Response<B>> {
        let Case { policy, span, .. } = &self.case;
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
        drop(slot.close());
        let response = self.case.fail(hold, event, code).await;
        Err(InternalError::from_response(Refusal::new(code), response).into())
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
