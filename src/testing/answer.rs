//! What a request got.

use std::{error::Error, fmt};

use reqwest::{
    StatusCode,
    header::{HeaderMap, RETRY_AFTER},
};

pub(super) type Heard = Result<Answer, Silence>;

/// Read to its end.
#[derive(Clone)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Silence {
    /// Nobody listens there.
    Unreachable(String),
    /// Not within the patience.
    TimedOut,
    /// The connection ended before the answer did.
    Cut(String),
}

impl Answer {
    /// Done: what an endpoint answers below 400 it stands by.
    pub(super) fn is_success(&self) -> bool {
        self.status.as_u16() < 400
    }

    /// The same status and the same body, byte for byte, or one that says that its body was not kept.
    pub(super) fn is_told_by(&self, other: &Self) -> bool {
        self.status == other.status && (self.body == other.body || other.says("-body-omitted"))
    }

    /// `Idempotency-Replayed: true`, under whatever name.
    pub(super) fn is_marked(&self) -> bool {
        self.says("-replayed")
    }

    pub(super) fn says_when_to_retry(&self) -> bool {
        self.headers.contains_key(RETRY_AFTER)
    }

    fn says(&self, end: &str) -> bool {
        self.headers.iter().any(|(name, value)| name.as_str().ends_with(end) && value == "true")
    }
}

impl fmt::Debug for Answer {
    /// Without headers and body, which may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Answer({}, {} bytes)", self.status, self.body.len())
    }
}

impl From<reqwest::Error> for Silence {
    fn from(error: reqwest::Error) -> Self {
        let error = error.without_url();
        if error.is_timeout() {
            return Self::TimedOut;
        }
        // The innermost cause is the one that a reader knows: the others say that a request was sent.
        let mut cause: &dyn Error = &error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        if error.is_connect() { Self::Unreachable(cause.to_string()) } else { Self::Cut(cause.to_string()) }
    }
}

impl fmt::Display for Silence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(cause) => write!(f, "no connection ({cause})"),
            Self::TimedOut => f.write_str("no answer in time"),
            Self::Cut(cause) => write!(f, "the connection ended without an answer ({cause})"),
        }
    }
}

/// For a sentence that begins with "got".
pub(super) fn shown(heard: &Heard) -> String {
    match heard {
        Ok(answer) => answer.status.as_u16().to_string(),
        Err(silence) => silence.to_string(),
    }
}
