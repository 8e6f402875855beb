//! What a policy chooses between.

use std::{num::NonZeroU32, time::Duration};

#[cfg(doc)]
use super::{Keep, Policy};

/// What a request gets whose key is outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnOutstanding {
    /// 409 with `Retry-After`, at once. The default: a client that waits costs the client; one that is
    /// made to wait costs the server.
    Conflict,
    /// Wait up to this long for the answer, then 409. No connection to the database is held meanwhile.
    Wait(Duration),
}

/// What a request gets whose key is completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnCompleted {
    /// The stored answer. The default: a retry is harmless and gets what it came for.
    Replay,
    /// 409 `already-completed`: the plain guard against a second submit. No answer is stored. Under a
    /// short [`Policy::retention`] that is the window of the guard.
    Reject,
    /// **Runs the handler again**: gives up the promise of one effect, and guards only against requests
    /// at the same time.
    RunAgain,
}

/// What becomes of a key whose answer is not kept: an error, a panic, an aborted handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnFailure {
    /// It is free at once. The default: nothing was done, so that the next attempt may be made now.
    Release,
    /// It is held until its lease ends: a pause before the next attempt. Meanwhile a retry gets 409 `held`, without a
    /// `Retry-After`: nobody runs it.
    HoldLease,
    /// It is held for the retention: for what must not be tried again soon, such as a payment
    /// whose outcome somebody has to look at. A retry gets 409 `held`.
    HoldRetention,
    /// The failure is stored and replayed.
    Store,
}

/// How many keys a principal may have. Counted in the table before a key is claimed, and claimed before the
/// next one of this principal is counted: the claims of one principal take turns, which costs each two
/// round trips more. Whatever runs counts, be it a first attempt or another one under a key that was given back;
/// a retry that is told what is stored, or that its key is outstanding, is never refused. Counting wants an index: [`migrations::PRINCIPAL_INDEX`](crate::migrations::PRINCIPAL_INDEX).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Quota {
    /// Keys whose requests run. Default: any number. Not counted under [`Policy::atomic`], where they
    /// have no row yet.
    pub outstanding: Option<NonZeroU32>,
    /// Keys that have not expired. Default: any number. Under [`Policy::atomic`] requests at the same time
    /// may exceed it by their number: none of them has a row yet.
    pub live: Option<NonZeroU32>,
}

/// A part of a policy that is a closure, of which the published document cannot tell by itself what it
/// does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Part {
    /// [`Policy::principal`].
    Principal,
    /// [`Policy::tenant`].
    Tenant,
    /// [`Policy::skip`].
    Skip,
    /// [`Keep::When`].
    Keep,
}
