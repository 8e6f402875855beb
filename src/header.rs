//! The header fields of the protocol, and how an `Idempotency-Key` is written on the wire.
//!
//! The IETF draft (-07, section 2.1) makes the field a structured-field string, `"abc"` with its
//! quotes; nearly every client in the field sends it bare, `abc`. Both are read, as the same key.

use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use sfv::{BareItem, Parser};

/// The request header that carries the key (IETF draft -07, section 2).
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The response header that marks a replay, with the value `true`. The first answer never has it.
/// [`Policy::replay_marker`](crate::Policy::replay_marker) changes its name.
pub const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

/// The response header, with the value `true`, of a replay whose body was not kept.
pub const IDEMPOTENCY_BODY_OMITTED: HeaderName = HeaderName::from_static("idempotency-body-omitted");

/// The response header that tells which attempt has made an answer, where
/// [`Policy::tell_attempt`](crate::Policy::tell_attempt) asks for it: `1` for the first.
pub const IDEMPOTENCY_ATTEMPT: HeaderName = HeaderName::from_static("idempotency-attempt");

/// The response header that tells in how many seconds the key of an answer expires, where
/// [`Policy::tell_expiry`](crate::Policy::tell_expiry) asks for it. No date: only the clock of the
/// database knows it.
pub const IDEMPOTENCY_KEY_EXPIRES_IN: HeaderName = HeaderName::from_static("idempotency-key-expires-in");

/// The request header that carries a form token, where no form field does: of scripts, and of uploads whose body
/// is streamed through.
pub const FORM_TOKEN: HeaderName = HeaderName::from_static("form-token");

pub(crate) const TRUE: HeaderValue = HeaderValue::from_static("true");

/// Why a field that is there cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unreadable {
    Repeated,
    NotAscii,
    Quoting,
}

/// The text of the one key field, its quotes and escapes resolved; `None` where there is none.
/// Which characters may be in it is the key's own business.
pub(crate) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Unreadable> {
    let mut lines = headers.get_all(IDEMPOTENCY_KEY);
    let Some(line) = lines.next() else {
        return Ok(None);
    };
    if lines.next().is_some() {
        return Err(Unreadable::Repeated);
    }
    let text = line.to_str().map_err(|_| Unreadable::NotAscii)?.trim_matches([' ', '\t']);
    if text.starts_with('"') { quoted(text).map(Some) } else { Ok(Some(text.to_owned())) }
}

/// A structured-field string without parameters (RFC 8941, section 3.3.3).
fn quoted(text: &str) -> Result<String, Unreadable> {
    let item = Parser::new(text).parse::<sfv::Item>().map_err(|_| Unreadable::Quoting)?;
    match item.bare_item {
        BareItem::String(text) if item.params.is_empty() => Ok(text.into()),
        _ => Err(Unreadable::Quoting),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[&[u8]]) -> Result<Option<String>, Unreadable> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(IDEMPOTENCY_KEY, HeaderValue::from_bytes(line).unwrap());
        }
        idempotency_key(&headers)
    }

    #[test]
    fn bare_and_quoted_are_the_same_text() {
        assert_eq!(read(&[b"abc"]), Ok(Some("abc".into())));
        assert_eq!(read(&[b"\"abc\""]), Ok(Some("abc".into())));
        assert_eq!(read(&[br#""a\"b\\c""#]), Ok(Some(r#"a"b\c"#.into())));
        assert_eq!(read(&[]), Ok(None));
    }

    #[test]
    fn what_cannot_be_read_is_never_absent() {
        assert_eq!(read(&[b"a", b"a"]), Err(Unreadable::Repeated));
        assert_eq!(read(&[b"k\xc3\xa9y"]), Err(Unreadable::NotAscii));
        for bad in [&b"\"a"[..], b"\"a\"b", b"\"a\";p=1", br#""\x""#, b"\"a\", \"b\""] {
            assert_eq!(read(&[bad]), Err(Unreadable::Quoting), "{bad:?}");
        }
    }
}
