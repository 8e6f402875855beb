//! Named points of the path, at which a test stops a process, and tasks that a test cuts short.
//!
//! They exist in test builds only: with the feature `__failpoints`, which a dev-dependency of this crate
//! on itself switches on, and with debug assertions. In any other build they are nothing.

#[cfg(all(feature = "__failpoints", debug_assertions))]
pub use self::there::{Drop, cut, on_reach, reach};

#[cfg(all(feature = "__failpoints", debug_assertions))]
pub(crate) use self::there::cuttable;

#[cfg(not(all(feature = "__failpoints", debug_assertions)))]
pub(crate) use self::not_there::{cuttable, reach};

#[cfg(not(all(feature = "__failpoints", debug_assertions)))]
mod not_there {
    #[inline(always)]
    pub(crate) fn reach(_point: &'static str) {}

    #[inline(always)]
    pub(crate) fn cuttable<F: Future>(_key: &str, future: F) -> F {
        future
    }
}

#[cfg(all(feature = "__failpoints", debug_assertions))]
mod there {
    use std::{
        collections::HashMap,
        future::poll_fn,
        panic::resume_unwind,
        sync::{Mutex, OnceLock, PoisonError},
    };

    type Hook = Box<dyn Fn(&'static str) + Send + Sync>;
    static HOOK: OnceLock<Hook> = OnceLock::new();

    /// What happens at every point, in this process, from now on. Once only.
    pub fn on_reach(hook: impl Fn(&'static str) + Send + Sync + 'static) {
        assert!(HOOK.set(Box::new(hook)).is_ok(), "there is a hook already");
    }

    /// The path has come to this point.
    pub fn reach(point: &'static str) {
        if let Some(hook) = HOOK.get() {
            hook(point);
        }
    }

    /// When a task is dropped that has been polled so many times.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Drop {
        /// Right after that poll: what it has sent may not have left yet.
        After(u32),
        /// Once it is woken again: what it waited for has happened.
        WokenAfter(u32),
    }

    static CUTS: Mutex<Option<HashMap<String, Drop>>> = Mutex::new(None);

    /// The next task for this key is dropped that early.
    pub fn cut(key: &str, drop: Drop) {
        CUTS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(key.to_owned(), drop);
    }

    /// The task of a request: the future, or, once that is dropped, an unwinding without a message.
    pub(crate) fn cuttable<F: Future>(key: &str, future: F) -> impl Future<Output = F::Output> + use<F> {
        let drop = CUTS.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(|cuts| cuts.remove(key));
        let mut future = Some(Box::pin(future));
        let mut polls = 0;
        poll_fn(move |cx| {
            if drop != Some(Drop::WokenAfter(polls))
                && let Some(running) = &mut future
            {
                let poll = running.as_mut().poll(cx);
                polls += 1;
                if poll.is_ready() || drop != Some(Drop::After(polls)) {
                    return poll;
                }
            }
            future = None;
            resume_unwind(Box::new("cut"))
        })
    }
}
