//! A transaction that commits with the answer.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use actix_web::{FromRequest, HttpRequest, dev::Payload};
use diesel_async::AsyncPgConnection;
use futures_util::{FutureExt, future::LocalBoxFuture};

use crate::{
    body,
    engine::{Engine, store::in_time},
    error::{Error, ErrorKind},
    lease::Lease,
    policy::Policy,
    postgres::transactions,
    refusal::{Code, Refusal},
    scope::KeyId,
    telemetry,
    transaction::Transaction,
};

/// A transaction of this request's own: what is written through it commits together with the answer,
/// or not at all. Nothing to commit, nothing to remember.
///
/// ```no_run
/// # diesel::table! { orders (id) { id -> BigInt, product_id -> BigInt, } }
/// use actix_idempotency::{IdemTx, Refusal};
/// use actix_web::{HttpResponse, web};
/// use diesel::prelude::*;
/// use diesel_async::RunQueryDsl;
///
/// async fn create_order(mut tx: IdemTx, product: web::Path<i64>) -> Result<HttpResponse, Refusal> {
///     let id: i64 = diesel::insert_into(orders::table)
///         .values(orders::product_id.eq(*product))
///         .returning(orders::id)
///         .get_result(&mut *tx)
///         .await?;
///     Ok(HttpResponse::Created().json(id))
/// }
/// ```
///
/// An answer below 400 commits: the answer is stored in this transaction, then COMMIT, and only then
/// is it sent. Any other answer rolls back, a panic too. `transaction(…)` inside it makes savepoints.
///
/// It works without a key as well: then it is simply a transaction that commits with an answer below
/// 400. It is opened when the handler takes it, on a connection of the pool, of which at most all but
/// one are held this way ([`Idempotency::max_transactions`](crate::Idempotency::max_transactions)). One that the
/// server has ended holds nothing any more ([`Policy::idle_in_transaction`]).
///
/// # Beside a body that is streamed through
///
/// Under [`Policy::stream_body`] the client decides how long the body takes, and no transaction is held meanwhile: as
/// an argument of the handler, beside a body that has not been read, it is refused. Take it once the body is there
/// (one that is empty always is):
///
/// ```no_run
/// # diesel::table! { files (id) { id -> BigInt, bytes -> BigInt, } }
/// use actix_idempotency::IdemTx;
/// use actix_web::{FromRequest, HttpRequest, HttpResponse, Result, error::ErrorInternalServerError, web};
/// use diesel::prelude::*;
/// use diesel_async::RunQueryDsl;
/// use futures_util::StreamExt;
///
/// async fn upload(request: HttpRequest, mut body: web::Payload) -> Result<HttpResponse> {
///     let mut bytes = 0;
///     while let Some(piece) = body.next().await {
///         bytes += piece?.len() as i64; // to where files are kept
///     }
///     let mut tx = IdemTx::extract(&request).await?;
///     diesel::insert_into(files::table)
///         .values(files::bytes.eq(bytes))
///         .execute(&mut *tx)
///         .await
///         .map_err(ErrorInternalServerError)?;
///     Ok(HttpResponse::Created().finish())
/// }
/// ```
///
/// # Errors
///
/// The extraction waits at most [`Policy::store_timeout`] for a connection and then answers 503
/// `store-unavailable`; 409 `lease-lost` where another attempt has the key by then, 409
/// `serialization` where the server says so, 500 `misconfigured` where no [`Idempotency`](crate::Idempotency) is wrapped around
/// the route or a body that is streamed through has not been read, and 500 `transaction-misused` to a second extraction in one request. A failed
/// extraction is remembered: also behind `Option<IdemTx>` the answer is then an error, whatever the
/// handler returns, and nothing is kept.
///
/// The answer becomes 409 `serialization` where the transaction lost against another one (40001, 40P01: at any
/// statement, whatever the handler has made of that, on a connection of [our pool](fn@crate::pool); and at COMMIT), 409
/// `constraint-violated` where a deferred constraint fails at COMMIT, 500 `transaction-aborted` where
/// the handler has swallowed the error of a statement, 503 `store-unavailable` where the server cannot take the answer (a
/// full disk), and 500 `transaction-misused` where it left a
/// savepoint open, sent COMMIT by itself, kept the `IdemTx` beyond its own end, or gave its key back
/// with an answer of success. Where the connection is lost at COMMIT, what became of it is found out:
/// the answer is sent if it was committed, 503 `store-unavailable` if not, and 503 `outcome-unknown`
/// if the store stays away; without a key there is nothing to ask, and it is always the last.
pub struct IdemTx {
    /// `None` only while it is dropped.
    transaction: Option<Transaction>,
    slot: Slot,
}

impl Deref for IdemTx {
    type Target = AsyncPgConnection;

    fn deref(&self) -> &AsyncPgConnection {
        match &self.transaction {
            Some(transaction) => transaction.conn(),
            None => unreachable!("it is dropped"),
        }
    }
}

impl DerefMut for IdemTx {
    fn deref_mut(&mut self) -> &mut AsyncPgConnection {
        match &mut self.transaction {
            Some(transaction) => transaction.conn_mut(),
            None => unreachable!("it is dropped"),
        }
    }
}

impl Drop for IdemTx {
    fn drop(&mut self) {
        if let Some(transaction) = self.transaction.take() {
            self.slot.take_back(transaction);
        }
    }
}

impl fmt::Debug for IdemTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdemTx")
    }
}

impl FromRequest for IdemTx {
    type Error = Refusal;
    type Future = LocalBoxFuture<'static, Result<Self, Refusal>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let slot = super::marked(request, "IdemTx", |mark| mark.slot.clone()).and_then(|slot| slot.admit(request));
        let request = request.clone();
        async move {
            let slot = slot?;
            let opening = slot.start_opening()?;
            // Extractors are polled together: where a neighbour rejects the body, nothing is opened.
            tokio::task::yield_now().await;
            opening.open(&request).await
        }
        .boxed_local()
    }
}

/// Where the transaction of a request is.
#[derive(Clone)]
pub(crate) struct Slot(Arc<Shared>);

struct Shared {
    engine: Arc<Engine>,
    policy: Arc<Policy>,
    /// The claim whose answer will commit with the transaction.
    lease: Option<(KeyId, [u8; 16])>,
    place: Mutex<Place>,
}

struct Place {
    transaction: Where,
    /// An extraction has failed.
    failed: Option<Code>,
}

enum Where {
    /// Nobody has asked for it.
    NotYet,
    /// It was opened with the claim, and nobody has asked for it.
    Ready(Transaction),
    /// Somebody waits for it to be opened.
    Opening,
    /// The handler has it.
    Out,
    /// The handler has had it.
    Back(Transaction),
    /// The handler is done.
    Closed,
}

/// What the handler has done with the transaction.
pub(crate) enum Used {
    /// It never had it. Under `Policy::atomic()` it is open nonetheless.
    Not(Option<Transaction>),
    /// It has had it and given it back.
    Back(Transaction),
    /// It has it still.
    Kept,
    /// It could not have it, or asked for it twice.
    Failed(Code, Option<Transaction>),
}

impl Slot {
    /// The transaction is opened when the handler asks for it.
    pub(crate) fn lazy(engine: &Arc<Engine>, policy: &Arc<Policy>, lease: Option<&Lease>) -> Self {
        Self::new(engine, policy, lease.map(|lease| (lease.id, lease.owner)), Where::NotYet)
    }

    /// It is open already.
    pub(crate) fn ready(engine: &Arc<Engine>, policy: &Arc<Policy>, transaction: Transaction) -> Self {
        Self::new(engine, policy, None, Where::Ready(transaction))
    }

    fn new(engine: &Arc<Engine>, policy: &Arc<Policy>, lease: Option<(KeyId, [u8; 16])>, at: Where) -> Self {
        let place = Mutex::new(Place { transaction: at, failed: None });
        Self(Arc::new(Shared { engine: Arc::clone(engine), policy: Arc::clone(policy), lease, place }))
    }

    /// What the handler has done with it; from now on nothing comes back.
    pub(crate) fn close(&self) -> Used {
        let mut place = self.place();
        let transaction = match std::mem::replace(&mut place.transaction, Where::Closed) {
            Where::Out => return Used::Kept,
            Where::Back(transaction) => (Some(transaction), true),
            Where::Ready(transaction) => (Some(transaction), false),
            Where::NotYet | Where::Opening | Where::Closed => (None, false),
        };
        match (place.failed, transaction) {
            (Some(code), (transaction, _)) => Used::Failed(code, transaction),
            (None, (Some(transaction), true)) => Used::Back(transaction),
            (None, (transaction, _)) => Used::Not(transaction),
        }
    }

    /// Whatever the handler makes of it, its answer is an error.
    pub(crate) fn fail(&self, code: Code) {
        self.place().failed = Some(code);
    }

    /// Nobody holds a transaction while a client takes its time.
    fn admit(self, request: &HttpRequest) -> Result<Self, Refusal> {
        if !body::is_unread(request) {
            return Ok(self);
        }
        telemetry::misconfigured(
            "a handler takes IdemTx while its body, which Policy::stream_body lets through, is still on its way: read the \
             body first, then take the transaction inside the handler, by IdemTx::extract(&request).await",
        );
        self.fail(Code::Misconfigured);
        Err(Code::Misconfigured.into())
    }

    fn start_opening(self) -> Result<Opening, Code> {
        let mut place = self.place();
        let ready = match std::mem::replace(&mut place.transaction, Where::Opening) {
            Where::NotYet => None,
            Where::Ready(transaction) => Some(transaction),
            taken => {
                place.transaction = taken;
                place.failed = Some(Code::TransactionMisused);
                telemetry::misconfigured("a handler takes IdemTx twice in one request: pass the first one on");
                return Err(Code::TransactionMisused);
            }
        };
        drop(place);
        Ok(Opening { slot: self, ready })
    }

    /// From a handler that is done with it. Once the slot is closed it is too late, and the connection
    /// is closed with it.
    fn take_back(&self, transaction: Transaction) {
        let mut place = self.place();
        if matches!(place.transaction, Where::Out) {
            place.transaction = Where::Back(transaction);
        }
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.0.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody waits for the transaction; dropped, nobody has asked for it.
struct Opening {
    slot: Slot,
    ready: Option<Transaction>,
}

impl Opening {
    async fn open(mut self, request: &HttpRequest) -> Result<IdemTx, Refusal> {
        match self.begin(request).await {
            Ok(transaction) => {
                self.slot.place().transaction = Where::Out;
                Ok(IdemTx { transaction: Some(transaction), slot: self.slot.clone() })
            }
            Err(code) => {
                self.slot.fail(code);
                Err(code.into())
            }
        }
    }

    async fn begin(&mut self, request: &HttpRequest) -> Result<Transaction, Code> {
        let Shared { engine, policy, lease, .. } = &*self.slot.0;
        let settings = policy.settings(request);
        let mut transaction = match self.ready.take() {
            Some(transaction) => transaction,
            None => begin_for(engine, policy, lease.as_ref()).await?,
        };
        in_time(policy.store_timeout, transaction.set_local(settings)).await.map_err(|error| failed(&error))?;
        Ok(transaction)
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        let mut place = self.slot.place();
        if matches!(place.transaction, Where::Opening) {
            place.transaction = self.ready.take().map_or(Where::NotYet, Where::Ready);
        }
    }
}

async fn begin_for(engine: &Engine, policy: &Policy, lease: Option<&(KeyId, [u8; 16])>) -> Result<Transaction, Code> {
    let mut transaction = Transaction::begin(engine, policy).await.map_err(|error| failed(&error))?;
    if let Some((id, owner)) = lease
        && transaction.has_one_snapshot(policy)
    {
        let pin = async { Ok(transactions::pin(transaction.conn_mut(), &id.0, owner).await?) };
        if !in_time(policy.store_timeout, pin).await.map_err(|error| failed(&error))? {
            return Err(Code::LeaseLost);
        }
        // Nobody can take over a row that is locked, and a renewal would only wait for it.
        engine.leases.let_go(*id, *owner);
    }
    Ok(transaction)
}

fn failed(error: &Error) -> Code {
    if error.kind() == ErrorKind::Serialization {
        return Code::Serialization;
    }
    telemetry::store_failed("a transaction could not be opened", error);
    Code::StoreUnavailable
}
