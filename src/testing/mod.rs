//! For your own tests: does an endpoint do its work once per key? Feature `testing`.
//!
//! A proof makes the trouble that clients make, over real sockets, and reports what each request got. The endpoint may be
//! protected by this crate, by another one or by hand: nothing here knows how.
//!
//! ```no_run
//! use actix_idempotency::{
//!     Idempotency, pool,
//!     testing::{Request, idempotency_proof},
//! };
//! use actix_web::{App, HttpResponse, web};
//! use serde_json::json;
//!
//! # async fn create() -> HttpResponse { HttpResponse::Created().finish() }
//! # async fn count_orders() -> i64 { 0 }
//! // In a `#[actix_web::test]` or a `#[tokio::test]`:
//! # async fn example() -> Result<(), actix_idempotency::Error> {
//! let idempotency = Idempotency::postgres(pool("postgres://localhost/shop_test")?);
//! let app = move || {
//!     App::new().service(web::resource("/orders").wrap(idempotency.clone()).route(web::post().to(create)))
//! };
//! let request = Request::post("/orders").json(&json!({"product_id": 1, "quantity": 1}));
//!
//! // `SELECT count(*) FROM orders`: with every key that is accepted it rises by one.
//! idempotency_proof(app, request).assert_one_effect(async || count_orders().await).await;
//! # Ok(())
//! # }
//! ```
//!
//! A service that runs elsewhere, with everything that can be said about it:
//!
//! ```no_run
//! use std::time::Duration;
//! use actix_idempotency::testing::{AfterFailure, Request, Stage, idempotency_proof};
//! use serde_json::json;
//!
//! # async fn example() {
//! let request = Request::post("/payments?dry_run=1")
//!     .header("Authorization", "Bearer sk_test_1")
//!     .json(&json!({"amount": 100}))
//!     .key_in(|request, key| request.json_field("out_trade_no", key))
//!     .other_body(|request| request.json_field("amount", 200));
//! let report = idempotency_proof("http://staging.internal:8080/v1", request)
//!     .requests(50)
//!     .patience(Duration::from_secs(20))
//!     // Headers that this service knows in its test environment.
//!     .failing(|request| request.header("X-Test-Fail", "500"))
//!     .slower_than(Duration::from_secs(5), |request| request.header("X-Test-Sleep-Ms", "8000"))
//!     // It lets duplicates wait, has no 422, and keeps its failures.
//!     .duplicates_get([])
//!     .reuse_gets([400])
//!     .after_failure(AfterFailure::IsKept)
//!     .await;
//! println!("{report}");
//! assert!(report.passed() && report.entry(Stage::Concurrent).replays() > 0);
//! # }
//! ```
//!
//! # What is sent, and what is right
//!
//! Each [`Stage`] has keys of its own. All answers below 400 that a key gets must be the same: status, and body byte for
//! byte.
//!
//! | stage | sent | right |
//! |---|---|---|
//! | repeat | a request, then again | the first answer again |
//! | concurrent | [a hundred](Proof::requests) at once, then again | one answer for all, or [409](Proof::duplicates_get) |
//! | other body | a request, [another](Request::other_body) under its key, the first again | [422](Proof::reuse_gets); the first answer stays |
//! | reset | nine connections that are reset (RST) while the request is under way, each sent again until it is answered | one answer for each key |
//! | failing | an attempt that [fails](Proof::failing), a retry, then again | the retry [runs](Proof::after_failure), and stays |
//! | slow | a [handler slower](Proof::slower_than) than the window, duplicates within and beyond it, then again | as concurrent |
//!
//! A stage without its hook is *not asked for*, which is no pass. If the first request of all is not accepted, nothing else
//! is sent.
//!
//! # What an answer does not tell
//!
//! Work that is done twice behind one answer: count the effects. Where answers are the same for every key (an empty 204)
//! and replays are not marked, a report without a count has not [`passed`](Report::passed), for it has seen nothing.
//! Count what rises by one for a request, and let nobody else write it meanwhile.
//!
//! Nor is this proved: that a key outlives the end of a process, that it belongs to its user, when it expires. The
//! example `conformance` asks for some of it.
//!
//! # Deployment caveat
//!
//! What is accepted is carried out, some fifteen times: use a test system. Its URL is `http://`, there is no TLS here.

mod answer;
mod client;
mod entry;
mod expected;
mod judge;
mod proof;
mod report;
mod request;
mod served;
mod stages;
mod target;

pub use self::{
    entry::{Entry, Stage, Verdict},
    expected::AfterFailure,
    proof::{DEFAULT_PATIENCE, DEFAULT_REQUESTS, Proof},
    report::Report,
    request::Request,
    target::{Destination, Target},
};

/// A proof of the endpoint that answers this request, of a service that runs or of an `App`: see the [module](self).
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use actix_idempotency::testing::{Request, Stage, Verdict, idempotency_proof};
/// use actix_web::{App, HttpResponse, web};
///
/// static ORDERS: AtomicUsize = AtomicUsize::new(0);
///
/// // Every request is an order.
/// async fn create() -> HttpResponse {
///     HttpResponse::Created().json(ORDERS.fetch_add(1, Ordering::SeqCst))
/// }
///
/// # actix_web::rt::System::new().block_on(async {
/// let app = || App::new().route("/orders", web::post().to(create));
/// let report = idempotency_proof(app, Request::post("/orders"))
///     .counting(async || ORDERS.load(Ordering::SeqCst))
///     .await;
/// assert!(!report.passed());
/// assert_eq!(report.entry(Stage::Concurrent).verdict(), Verdict::Failed);
/// assert_eq!(report.entry(Stage::Concurrent).effects(), Some(101));
/// assert!(report.to_string().contains("the endpoint ran more than once"));
/// # });
/// ```
pub fn idempotency_proof(target: impl Target, request: Request) -> Proof {
    Proof::new(target.destination(), request)
}
