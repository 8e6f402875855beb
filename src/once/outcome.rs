//! What comes of a run, and what stands in its way.

use std::{fmt, time::Duration};

use actix_web::Error as ActixError;

use crate::{
    error::Error,
    key::InvalidKey,
    refusal::{Code, Refusal},
    telemetry,
};

/// What came of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "work that is outstanding elsewhere was not done here"]
pub enum Outcome<T> {
    /// The work ran here, and its result is stored.
    Ran(T),
    /// It was done before: the stored result.
    Replayed(T),
    /// Somebody else is at it. Ask again after this long, which is no more than is left of their lease.
    Outstanding(Duration),
}

impl<T> Outcome<T> {
    /// The result, new or stored; `None` where there is none yet.
    pub fn into_inner(self) -> Option<T> {
        match self {
            Self::Ran(value) | Self::Replayed(value) => Some(value),
            Self::Outstanding(_) => None,
        }
    }
}

/// Why a run has no result.
///
/// As the error of an actix handler, `Failed` is the answer of that error, `InvalidKey` 400 `key-invalid`,
/// `Refused` that refusal, `Store` 503 `store-unavailable`, and the rest 500 `misconfigured`.
#[derive(Debug)]
#[non_exhaustive]
pub enum OnceError<E> {
    /// The work failed with this. Nothing is stored, and the key is given back as
    /// [`Policy::on_failure`](crate::Policy::on_failure) says.
    Failed(E),
    /// The key cannot be one. Nothing was done.
    InvalidKey(InvalidKey),
    /// The input cannot be written as JSON. Nothing was done.
    Input(serde_json::Error),
    /// In the words of a request: [`Code::KeyReused`] (the key was used with another input),
    /// [`Code::AlreadyCompleted`], [`Code::NewerVersion`], [`Code::ShuttingDown`] and [`Code::Busy`]: nothing was
    /// done. [`Code::LeaseLost`]: another attempt has the key, and has no result yet. [`Code::HandlerPanicked`];
    /// [`Code::OutcomeUnknown`]: the work ran longer than it may, or its task is gone. In a transaction of the
    /// caller's [`Code::Serialization`].
    Refused(Code),
    /// It was done, and its result was too large to keep, or said to be kept without its body.
    Omitted,
    /// It was done, and its result is of another shape: another version of the program wrote it. What is stored
    /// stays; it is not shown here.
    Shape,
    /// The store failed before the work ran.
    Store(Error),
}

impl<E> OnceError<E> {
    pub(super) fn code(&self) -> Code {
        match self {
            Self::InvalidKey(_) => Code::KeyInvalid,
            Self::Refused(code) => *code,
            Self::Store(_) => Code::StoreUnavailable,
            _ => Code::Misconfigured,
        }
    }

    fn words(&self) -> &'static str {
        match self {
            Self::Failed(_) => "the work failed",
            Self::InvalidKey(_) => "this cannot be a key",
            Self::Input(_) => "the input cannot be written as JSON",
            Self::Refused(code) => code.as_str(),
            Self::Omitted => "it was done, and its result was not kept",
            Self::Shape => "it was done, and its result is of another shape",
            Self::Store(_) => "the store failed, and nothing was run",
        }
    }
}

impl<E> From<Code> for OnceError<E> {
    fn from(code: Code) -> Self {
        Self::Refused(code)
    }
}

impl<E> fmt::Display for OnceError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

impl<E: std::error::Error + 'static> std::error::Error for OnceError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Failed(error) => Some(error),
            Self::InvalidKey(error) => Some(error),
            Self::Input(error) => Some(error),
            Self::Store(error) => Some(error),
            Self::Refused(_) | Self::Omitted | Self::Shape => None,
        }
    }
}

impl<E: Into<ActixError>> From<OnceError<E>> for ActixError {
    fn from(error: OnceError<E>) -> Self {
        match &error {
            OnceError::Store(cause) => telemetry::store_failed(error.words(), cause),
            OnceError::Input(_) | OnceError::Omitted | OnceError::Shape => telemetry::misconfigured(error.words()),
            _ => {}
        }
        match error {
            OnceError::Failed(error) => error.into(),
            error => Refusal::new(error.code()).into(),
        }
    }
}
