//! Which answers are kept, and which give the key back.

use std::{fmt, sync::Arc};

use actix_web::http::StatusCode;

/// Which answers are kept and replayed. Any other answer says that nothing was done, and releases the
/// key for another attempt.
///
/// A handler decides for its own answer through [`IdemKey`](crate::IdemKey). A panic, and a handler
/// that was dropped or aborted, leave no answer: [`OnFailure`](crate::OnFailure) says what becomes of their key.
#[derive(Clone)]
#[non_exhaustive]
pub enum Keep {
    /// Below 400. The default: an error says that nothing was done, so the client may correct it and
    /// try again with the same key.
    Success,
    /// Below 400, and the errors that the same request will get again: 402, 404, 405, 406, 410, 411,
    /// 414, 416, 417 and 451. The IETF draft (-07, section 2.6) replays "success or error"; this
    /// leaves out what depends on the moment or the client (401, 403, 408, 409, 425, 429, …) and what
    /// a corrected request should be free of (400, 413, 415, 422).
    ///
    /// Not for keys that anybody can compute ([`Policy::keys`](crate::Policy::keys)) and that belong to nobody
    /// ([`Policy::anonymous`](crate::Policy::anonymous)): the 404 of a forged callback would be kept against the
    /// real one. Such a policy does not build, whatever it is that keeps errors.
    Draft,
    /// [`Keep::Draft`], and 400, 413, 415 and 422: a rejected request stays rejected under its key.
    DraftWithValidation,
    /// Every answer, 5xx included, as Stripe's first API does.
    Everything,
    /// What the function says of a status.
    When(Arc<dyn Fn(StatusCode) -> bool + Send + Sync>),
}

impl Keep {
    /// Keeps an answer where the function says `true` of its status.
    ///
    /// ```
    /// use actix_idempotency::{Keep, Policy};
    ///
    /// let policy = Policy::new().keep(Keep::when(|status| status.is_success() || status == 404));
    /// ```
    pub fn when(keeps: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> Self {
        Self::When(Arc::new(keeps))
    }

    /// Whether it keeps any answer from 400 on.
    pub(crate) fn keeps_errors(&self) -> bool {
        (400..600).filter_map(|code| StatusCode::from_u16(code).ok()).any(|status| self.keeps(status))
    }

    pub(crate) fn keeps(&self, status: StatusCode) -> bool {
        let code = status.as_u16();
        match self {
            Self::Success => code < 400,
            Self::Draft => code < 400 || deterministic(code),
            Self::DraftWithValidation => code < 400 || deterministic(code) || matches!(code, 400 | 413 | 415 | 422),
            Self::Everything => true,
            Self::When(keeps) => keeps(status),
        }
    }
}

fn deterministic(code: u16) -> bool {
    matches!(code, 402 | 404 | 405 | 406 | 410 | 411 | 414 | 416 | 417 | 451)
}

impl fmt::Debug for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "Success",
            Self::Draft => "Draft",
            Self::DraftWithValidation => "DraftWithValidation",
            Self::Everything => "Everything",
            Self::When(_) => "When(…)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(keep: &Keep) -> Vec<u16> {
        (100..600).filter(|&code| keep.keeps(StatusCode::from_u16(code).unwrap())).filter(|code| *code >= 400).collect()
    }

    #[test]
    fn each_keeps_what_its_documentation_says() {
        assert!(kept(&Keep::Success).is_empty());
        assert_eq!(kept(&Keep::Draft), [402, 404, 405, 406, 410, 411, 414, 416, 417, 451]);
        assert_eq!(
            kept(&Keep::DraftWithValidation),
            [400, 402, 404, 405, 406, 410, 411, 413, 414, 415, 416, 417, 422, 451]
        );
        assert_eq!(kept(&Keep::Everything).len(), 200);
        assert_eq!(kept(&Keep::when(|status| status == 418)), [418]);
        assert!(!Keep::Success.keeps_errors() && Keep::Draft.keeps_errors() && Keep::when(|_| true).keeps_errors());
    }
}
