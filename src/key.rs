//! The key: what makes two requests the same operation.

use std::fmt;

use actix_web::http::header::HeaderMap;

use crate::header::{self, Unreadable};

/// The longest key: 255 bytes, as Stripe allows; room for several UUIDs with a prefix.
pub const MAX_KEY_LENGTH: usize = 255;

/// A key that has been read and checked: 1 to [`MAX_KEY_LENGTH`] visible ASCII characters (`0x21` to
/// `0x7E`) without `"`, `\`, `,` and `;`.
///
/// A UUID is what the IETF draft recommends (-07, section 2.2), and any other text of those
/// characters will do. Two keys are equal when they are equal byte for byte.
///
/// ```
/// use actix_idempotency::{IdempotencyKey, InvalidKey};
///
/// let key = IdempotencyKey::try_from("8e03978e-40d5-43e8-bc93-6894a57f9324")?;
/// assert_eq!(key.as_str().len(), 36);
///
/// assert_eq!(IdempotencyKey::try_from(""), Err(InvalidKey::Empty));
/// assert_eq!(IdempotencyKey::try_from("a,b"), Err(InvalidKey::Character));
/// # Ok::<(), InvalidKey>(())
/// ```
///
/// `Debug` shows no key: whoever knows one may ask for its answer.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// The key of a request. `None` where the header is absent; a header that is there and cannot be
    /// read is never absent.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Result<Option<Self>, InvalidKey> {
        header::idempotency_key(headers)?.map(Self::try_from).transpose()
    }

    /// The text, without the quotes it may have had on the wire.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for IdempotencyKey {
    type Error = InvalidKey;

    fn try_from(text: String) -> Result<Self, InvalidKey> {
        match text.len() {
            0 => Err(InvalidKey::Empty),
            1..=MAX_KEY_LENGTH if text.bytes().all(allowed) => Ok(Self(text)),
            1..=MAX_KEY_LENGTH => Err(InvalidKey::Character),
            _ => Err(InvalidKey::TooLong),
        }
    }
}

impl TryFrom<&str> for IdempotencyKey {
    type Error = InvalidKey;

    fn try_from(text: &str) -> Result<Self, InvalidKey> {
        Self::try_from(text.to_owned())
    }
}

fn allowed(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\' | b',' | b';')
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdempotencyKey({} bytes)", self.0.len())
    }
}

/// Why a text is no key. A client is told so with 400 `key-invalid`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidKey {
    /// No character, or only blanks.
    #[error("the key is empty")]
    Empty,
    /// More than [`MAX_KEY_LENGTH`] bytes.
    #[error("the key is longer than 255 bytes")]
    TooLong,
    /// A blank, a control character, one outside ASCII, or one of `"`, `\`, `,` and `;`.
    #[error("the key has a character other than visible ASCII without '\"', '\\', ',' and ';'")]
    Character,
    /// More than one header line, even with the same key.
    #[error("the header is there more than once")]
    Repeated,
    /// The body, in which the policy looks for the key, cannot be read.
    #[error("the body, which has the key, cannot be read")]
    Body,
    /// A field that is part of the key is missing, empty, repeated or no simple value.
    #[error("a field that is part of the key is missing, empty, repeated or no simple value")]
    Field,
    /// Not what [`Policy::key_rule`](crate::Policy::key_rule) asks for.
    #[error("the key is not of the form that is asked for here")]
    Form,
    /// A quoted key that is not a structured-field string, or has parameters.
    #[error("the key starts with a quote and is not a structured-field string")]
    Quoting,
}

impl From<Unreadable> for InvalidKey {
    fn from(unreadable: Unreadable) -> Self {
        match unreadable {
            Unreadable::Repeated => Self::Repeated,
            Unreadable::NotAscii => Self::Character,
            Unreadable::Quoting => Self::Quoting,
        }
    }
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn read(line: &[u8]) -> Result<Option<IdempotencyKey>, InvalidKey> {
        let mut headers = HeaderMap::new();
        headers.insert(header::IDEMPOTENCY_KEY, HeaderValue::from_bytes(line).unwrap());
        IdempotencyKey::from_headers(&headers)
    }

    #[test]
    fn an_empty_key_is_refused_however_it_is_written() {
        for empty in [&b""[..], b"   ", b"\"\"", b"\t"] {
            assert_eq!(read(empty), Err(InvalidKey::Empty), "{empty:?}");
        }
        assert_eq!(read(b"\" \""), Err(InvalidKey::Character));
    }

    #[test]
    fn the_longest_key_has_255_bytes() {
        assert!(IdempotencyKey::try_from("k".repeat(255)).is_ok());
        assert_eq!(IdempotencyKey::try_from("k".repeat(256)), Err(InvalidKey::TooLong));
    }

    #[test]
    fn debug_keeps_the_key_to_itself() {
        let key = IdempotencyKey::try_from("secret").unwrap();
        assert_eq!(format!("{key:?}"), "IdempotencyKey(6 bytes)");
    }

    proptest! {
        #[test]
        fn any_header_line_is_a_key_or_a_typed_error(line in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(value) = HeaderValue::from_bytes(&line) {
                let mut headers = HeaderMap::new();
                headers.insert(header::IDEMPOTENCY_KEY, value);
                if let Ok(key) = IdempotencyKey::from_headers(&headers) {
                    let key = key.expect("the header is there");
                    prop_assert!((1..=MAX_KEY_LENGTH).contains(&key.as_str().len()));
                    prop_assert!(key.as_str().bytes().all(allowed));
                }
            }
        }

        #[test]
        fn bare_and_quoted_are_one_key(text in "[!#-+\\--:<-\\[\\]-~]{1,255}") {
            let bare = read(text.as_bytes()).unwrap();
            let quoted = read(format!("\"{text}\"").as_bytes()).unwrap();
            prop_assert_eq!(&bare, &quoted);
            let bare = bare.unwrap();
            prop_assert_eq!(bare.as_str(), text);
        }
    }
}
