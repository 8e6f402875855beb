//! Functions of the user's that are told what happens.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{Event, say, tally};
use crate::scope::KeyId;

/// What a listener is told: see [`on_event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notice<'a> {
    /// The name in the table of [this module](crate::telemetry).
    pub event: &'static str,
    /// By which the log and the table know the key, where it is about one:
    /// `where encode(id, 'hex') like '…%'`.
    pub id: Option<&'a str>,
    /// Why a request was refused; of `rejected` alone.
    pub code: Option<&'static str>,
}

type Listener = Arc<dyn Fn(&Notice<'_>) + Send + Sync>;

static LISTENERS: RwLock<Vec<Listener>> = RwLock::new(Vec::new());
/// So that nobody pays for what nobody asked for.
static ARE_ANY: AtomicBool = AtomicBool::new(false);

/// Has a function told of every event of this process, whichever engine it comes from: to raise an alarm, or for
/// metrics that do not come through the facade. It lasts as long as the process; several are told one after
/// the other.
///
/// ```
/// use actix_idempotency::telemetry;
///
/// telemetry::on_event(|notice| {
///     if notice.event == "completion-lost" {
///         eprintln!("the answer for {:?} could not be stored", notice.id);
///     }
/// });
/// ```
///
/// It is called where the event happens, between the parts of a request, and on the thread that renews all leases: what
/// takes time belongs in a channel.
///
/// ```
/// use actix_idempotency::telemetry;
/// use std::sync::mpsc;
///
/// let (says, said) = mpsc::channel();
/// telemetry::on_event(move |notice| {
///     let _ = says.send((notice.event, notice.code));
/// });
/// # drop(said);
/// ```
///
/// # Panics
///
/// It does not, and neither does the request whose listener panics: that is logged as `listener-panicked`, and the
/// others are told all the same. Where panics abort the process they do so here too.
pub fn on_event(listener: impl Fn(&Notice<'_>) + Send + Sync + 'static) {
    LISTENERS.write().unwrap_or_else(PoisonError::into_inner).push(Arc::new(listener));
    ARE_ANY.store(true, Ordering::Release);
}

pub(super) fn tell(event: Event, id: Option<&KeyId>, code: Option<&'static str>) {
    if !ARE_ANY.load(Ordering::Acquire) {
        return;
    }
    // No lock is held meanwhile: a listener may add another.
    let listeners = LISTENERS.read().unwrap_or_else(PoisonError::into_inner).clone();
    let id = id.map(KeyId::prefix);
    let notice = Notice { event: event.name(), id: id.as_deref(), code };
    for listener in listeners {
        if catch_unwind(AssertUnwindSafe(|| listener(&notice))).is_err() {
            // Not told to the listeners, of whom one would panic again.
            say!(error, Event::ListenerPanicked, during = notice.event);
            Event::ListenerPanicked.counter().increment(1);
            tally().count(Event::ListenerPanicked);
        }
    }
}
