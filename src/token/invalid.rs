//! Why a text is no token, or none for this request.

use crate::refusal::{Code, Refusal};

/// A client is told so under a code for each; nothing is consumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidToken {
    #[error("what stands for the form token is none")]
    Unreadable,
    #[error("the request has two different form tokens")]
    Different,
    #[error("the form token cannot be read: the form is broken or encoded")]
    Form,
    #[error("the form token was signed with a key that is not in use here")]
    Unknown,
    #[error("the signature of the form token is wrong")]
    Forged,
    #[error("the form token is for another form")]
    OtherAction,
    #[error("the form token was issued to somebody else")]
    OtherPrincipal,
}

impl From<InvalidToken> for Refusal {
    fn from(invalid: InvalidToken) -> Self {
        match invalid {
            InvalidToken::Unreadable => Code::TokenInvalid.into(),
            InvalidToken::Different | InvalidToken::Form => {
                Self::new(Code::TokenInvalid).detailed(format!("Nothing was done: {invalid}."))
            }
            InvalidToken::Unknown => Code::TokenUnknown.into(),
            InvalidToken::Forged => Code::TokenForged.into(),
            InvalidToken::OtherAction => Code::TokenOfOtherAction.into(),
            InvalidToken::OtherPrincipal => Code::TokenOfOtherPrincipal.into(),
        }
    }
}
