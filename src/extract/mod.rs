//! The claim as the handler sees it: [`IdemKey`], and [`IdemTx`] to write in one transaction with it.

mod idem_key;
mod idem_tx;
mod step;

use actix_web::{HttpMessage, HttpRequest, dev::ServiceRequest};

pub(crate) use self::idem_key::Verdict;
pub(crate) use self::idem_tx::{Slot, Used};
pub use self::{
    idem_key::IdemKey,
    idem_tx::IdemTx,
    step::{MAX_STEP_NAME, MAX_STEP_RESULT, StepError},
};
use crate::{
    refusal::{Code, Refusal},
    telemetry,
};

/// What the middleware leaves in the request for those further in.
struct Mark {
    /// `None`: the request has no key.
    key: Option<IdemKey>,
    slot: Slot,
}

/// Whether a wrap further out has claimed a key for this request.
pub(crate) fn is_claimed(request: &ServiceRequest) -> bool {
    request.extensions().get::<Mark>().is_some_and(|mark| mark.key.is_some())
}

pub(crate) fn mark(request: &ServiceRequest, key: Option<IdemKey>, slot: Slot) {
    request.extensions_mut().insert(Mark { key, slot });
}

/// What an extractor needs of the mark; without a mark it can do nothing but say so.
fn marked<T>(request: &HttpRequest, extractor: &str, find: impl FnOnce(&Mark) -> T) -> Result<T, Refusal> {
    request.extensions().get::<Mark>().map(find).ok_or_else(|| {
        telemetry::misconfigured(&format!(
            "a handler takes {extractor}, and no Idempotency is wrapped around its route: add \
             .wrap(Idempotency::postgres(pool)), or the method of the request to Policy::methods"
        ));
        Code::Misconfigured.into()
    })
}
