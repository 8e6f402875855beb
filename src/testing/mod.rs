//! For your own tests: does an endpoint do its work once per key? (Feature `testing`.)

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
pub fn idempotency_proof(target: impl Target, request: Request) -> Proof {
    Proof::new(target.destination(), request)
}
