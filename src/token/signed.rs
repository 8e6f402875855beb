//! A token on the wire: what it says, and the signature over it.
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version |
//! | 4 | which key has signed |
//! | 16 | id: random, the key of the row |
//! | 8 | expiry: milliseconds since 1970 |
//! | 16 | action, as a keyed digest with the id in it |
//! | 16 | tenant and principal, likewise |
//! | 32 | HMAC-SHA-256 over all of the above |
//!
//! 93 bytes are 124 characters of base64 (RFC 4648, section 5), without padding and without a bit that does not
//! count. A token tells nobody whose it is, and two tokens do not tell that they are of the same user.

use std::{fmt, time::Duration};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use serde::{Serialize, Serializer};

use super::{FORM_TOKEN_FIELD, InvalidToken};
use crate::{digest::Digest, scope::Scope, secret::Secret};

const VERSION: u8 = 1;

const KEY: usize = 1;
const ID: usize = KEY + 4;
const EXPIRY: usize = ID + 16;
const ACTION: usize = EXPIRY + 8;
const PRINCIPAL: usize = ACTION + 16;
const SIGNATURE: usize = PRINCIPAL + 16;
const LENGTH: usize = SIGNATURE + 32;
const TEXT_LENGTH: usize = LENGTH / 3 * 4;

/// A form token: a key that this service has issued. `Debug` does not show it; it serialises as its text.
///
/// As an extractor it is the token that the request has brought, for a form that is shown again with its errors;
/// where a request was not protected by one, the extraction is 400 `token-missing`.
///
/// ```
/// use actix_idempotency::{FormTokens, Secret};
/// # use actix_web::test::TestRequest;
/// # fn main() -> Result<(), actix_idempotency::Refusal> {
/// # let request = TestRequest::get().to_http_request();
/// let tokens = FormTokens::new([Secret::new([7; 32])]).anonymous();
/// let token = tokens.issue(&request, "checkout")?;
/// let page = format!("<form method=\"post\">{} <button>Buy</button></form>", token.hidden_input());
/// assert!(page.contains(token.as_str()));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct FormToken {
    text: String,
    lifetime: Duration,
}

impl FormToken {
    /// The text: letters, digits, `-` and `_`, which need no escaping in HTML and in URLs.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// How long it may be used, from its issue.
    #[must_use]
    pub fn lifetime(&self) -> Duration {
        self.lifetime
    }

    /// An `<input type="hidden">` with this token, for a form; the first field of it, where the form is an upload
    /// whose body is [streamed through](crate::Policy::stream_body).
    ///
    /// It says `autocomplete="off"`: a browser that reloads the page would otherwise put the old token into
    /// the new form.
    #[must_use]
    pub fn hidden_input(&self) -> String {
        format!("<input type=\"hidden\" name=\"{FORM_TOKEN_FIELD}\" value=\"{}\" autocomplete=\"off\">", self.text)
    }

    /// One that has come back.
    pub(super) fn admitted(text: &str, lifetime: Duration) -> Self {
        Self { text: text.to_owned(), lifetime }
    }

    /// For the action and whoever the scope names; `not_after` since 1970.
    pub(super) fn sign(secret: &Secret, scope: &Scope, lifetime: Duration, not_after: Duration) -> Self {
        let id: [u8; 16] = rand::random();
        let not_after = i64::try_from(not_after.as_millis()).unwrap_or(i64::MAX);
        let mut bytes = Vec::with_capacity(LENGTH);
        bytes.push(VERSION);
        bytes.extend_from_slice(&key_of(secret));
        bytes.extend_from_slice(&id);
        bytes.extend_from_slice(&not_after.to_be_bytes());
        bytes.extend_from_slice(&secret.sign(&action_of(&id, scope))[..16]);
        bytes.extend_from_slice(&secret.sign(&principal_of(&id, scope))[..16]);
        bytes.extend_from_slice(&secret.sign(&content(&bytes)));
        Self { text: BASE64_URL_SAFE_NO_PAD.encode(bytes), lifetime }
    }

    /// What a token says, if one of these keys has signed it, for this action and principal.
    pub(super) fn verify(text: &str, secrets: &[Secret], scope: &Scope) -> Result<Terms, InvalidToken> {
        let bytes = decode(text).ok_or(InvalidToken::Unreadable)?;
        if bytes[0] != VERSION {
            return Err(InvalidToken::Unreadable);
        }
        let (said, signature) = bytes.split_at(SIGNATURE);
        let mut known = secrets.iter().filter(|secret| key_of(secret) == said[KEY..ID]).peekable();
        known.peek().ok_or(InvalidToken::Unknown)?;
        let secret = known.find(|secret| secret.has_signed(&content(said), signature)).ok_or(InvalidToken::Forged)?;
        let id = &said[ID..EXPIRY];
        if !secret.has_signed(&action_of(id, scope), &said[ACTION..PRINCIPAL]) {
            return Err(InvalidToken::OtherAction);
        }
        if !secret.has_signed(&principal_of(id, scope), &said[PRINCIPAL..SIGNATURE]) {
            return Err(InvalidToken::OtherPrincipal);
        }
        let mut terms = Terms { id: [0; 16], not_after: 0 };
        terms.id.copy_from_slice(id);
        let mut not_after = [0; 8];
        not_after.copy_from_slice(&said[EXPIRY..ACTION]);
        terms.not_after = i64::from_be_bytes(not_after);
        Ok(terms)
    }
}

/// What a token says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) id: [u8; 16],
    /// In milliseconds since 1970.
    pub(super) not_after: i64,
}

impl Serialize for FormToken {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl fmt::Debug for FormToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FormToken")
    }
}

fn decode(text: &str) -> Option<[u8; LENGTH]> {
    if text.len() != TEXT_LENGTH {
        return None;
    }
    BASE64_URL_SAFE_NO_PAD.decode(text).ok()?.try_into().ok()
}

/// By what a token names the key that has signed it.
fn key_of(secret: &Secret) -> [u8; 4] {
    let id = secret.id();
    [id[0], id[1], id[2], id[3]]
}

fn content(said: &[u8]) -> [u8; 32] {
    let mut digest = Digest::new("actix-idempotency form token 1");
    digest.part(said);
    digest.finish()
}

fn action_of(id: &[u8], scope: &Scope) -> [u8; 32] {
    let mut digest = Digest::new("actix-idempotency form token action 1");
    digest.part(id).part(scope.resource());
    digest.finish()
}

fn principal_of(id: &[u8], scope: &Scope) -> [u8; 32] {
    let mut digest = Digest::new("actix-idempotency form token principal 1");
    digest.part(id).optional(scope.tenant()).optional(scope.principal());
    digest.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn secret(byte: u8) -> Secret {
        Secret::new([byte; 32])
    }

    fn scope(principal: &str, action: &str) -> Scope {
        Scope::token(None, Some(principal.into()), action.into())
    }

    fn sign(byte: u8) -> FormToken {
        FormToken::sign(&secret(byte), &scope("alice", "a"), Duration::from_secs(1), Duration::from_millis(1_234_567))
    }

    fn verify(text: &str) -> Result<Terms, InvalidToken> {
        FormToken::verify(text, &[secret(1)], &scope("alice", "a"))
    }

    #[test]
    fn a_token_says_what_was_signed_and_nothing_else_does() {
        let token = sign(1);
        assert_eq!(verify(token.as_str()).unwrap().not_after, 1_234_567);
        assert_ne!(verify(token.as_str()).unwrap().id, verify(sign(1).as_str()).unwrap().id);
        let other = |principal, action| FormToken::verify(token.as_str(), &[secret(1)], &scope(principal, action));
        assert_eq!(other("alice", "b"), Err(InvalidToken::OtherAction));
        assert_eq!(other("bob", "a"), Err(InvalidToken::OtherPrincipal));
        let nobody = Scope::token(None, None, "a".into());
        assert_eq!(FormToken::verify(token.as_str(), &[secret(1)], &nobody), Err(InvalidToken::OtherPrincipal));
        let tenant = Scope::token(Some("t".into()), Some("alice".into()), "a".into());
        assert_eq!(FormToken::verify(token.as_str(), &[secret(1)], &tenant), Err(InvalidToken::OtherPrincipal));
        assert_eq!(verify(sign(2).as_str()), Err(InvalidToken::Unknown));
    }

    #[test]
    fn a_retired_key_verifies_as_long_as_it_is_named() {
        let token = sign(1);
        let under = |keys: &[u8]| {
            let secrets: Vec<_> = keys.iter().copied().map(secret).collect();
            FormToken::verify(token.as_str(), &secrets, &scope("alice", "a")).map(|terms| terms.not_after)
        };
        assert_eq!(under(&[2, 1]), Ok(1_234_567));
        assert_eq!(under(&[2, 3]), Err(InvalidToken::Unknown));
    }

    #[test]
    fn nothing_of_it_is_shown_by_debug_and_nothing_of_its_user_by_the_token() {
        let token = sign(1);
        assert_eq!(format!("{token:?}"), "FormToken");
        assert_eq!(serde_json::to_string(&token).unwrap(), format!("\"{}\"", token.as_str()));
        let bytes = decode(token.as_str()).unwrap();
        let other = decode(sign(1).as_str()).unwrap();
        assert_ne!(bytes[ACTION..PRINCIPAL], other[ACTION..PRINCIPAL]);
        assert_ne!(bytes[PRINCIPAL..SIGNATURE], other[PRINCIPAL..SIGNATURE]);
    }

    proptest! {
        #[test]
        fn one_bit_makes_a_forgery(byte in 0..LENGTH, bit in 0..8u32) {
            let mut bytes = decode(sign(1).as_str()).unwrap();
            bytes[byte] ^= 1 << bit;
            let expected = match byte {
                0 => InvalidToken::Unreadable,
                KEY..ID => InvalidToken::Unknown,
                _ => InvalidToken::Forged,
            };
            prop_assert_eq!(verify(&BASE64_URL_SAFE_NO_PAD.encode(bytes)), Err(expected));
        }

        #[test]
        fn one_character_makes_no_token(at in 0..TEXT_LENGTH, with in any::<char>()) {
            let token = sign(1);
            let mut characters: Vec<char> = token.as_str().chars().collect();
            prop_assume!(characters[at] != with);
            characters[at] = with;
            prop_assert!(verify(&characters.into_iter().collect::<String>()).is_err());
        }

        #[test]
        fn a_part_of_a_token_and_more_than_one_are_none(cut in 0..TEXT_LENGTH, more in ".{1,20}") {
            let token = sign(1);
            prop_assert_eq!(verify(&token.as_str()[..cut]), Err(InvalidToken::Unreadable));
            prop_assert_eq!(verify(&token.as_str()[cut + 1..]), Err(InvalidToken::Unreadable));
            for longer in [format!("{}{more}", token.as_str()), format!("{more}{}", token.as_str())] {
                prop_assert_eq!(verify(&longer), Err(InvalidToken::Unreadable));
            }
        }

        #[test]
        fn two_tokens_make_no_third(cut in 1..TEXT_LENGTH) {
            let (one, other) = (sign(1), sign(1));
            // The version and the key are the same in both, so that a cut there mixes nothing.
            let mixed = format!("{}{}", &one.as_str()[..cut], &other.as_str()[cut..]);
            if mixed != one.as_str() && mixed != other.as_str() {
                prop_assert!(verify(&mixed).is_err());
            }
        }

        #[test]
        fn no_other_text_is_one(text in any::<String>(), letters in "[A-Za-z0-9_-]{124}", wide in "[A-Za-z0-9+/=]{124}") {
            for text in [text, letters, wide] {
                prop_assert!(verify(&text).is_err());
            }
        }
    }
}
