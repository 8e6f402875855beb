//! A version on the wire: `ETag` going out, `If-Match` coming back (RFC 9110, sections 8.8.3 and 13.1.1).

use std::{fmt, future::ready};

use actix_web::{
    FromRequest, HttpRequest,
    dev::Payload,
    http::header::{ETag, EntityTag, HeaderMap, IF_MATCH},
};

use super::{Expected, VersionError};
use crate::{
    postgres::version::Admitted,
    refusal::{Code, Refusal},
};

/// The `ETag` of a row at this version: `"7"`, strong.
///
/// ```
/// use actix_idempotency::version::etag;
/// use actix_web::HttpResponse;
///
/// let response = HttpResponse::Ok().insert_header(etag(7)).finish();
/// assert_eq!(response.headers().get("etag").unwrap(), "\"7\"");
/// ```
///
/// Where a resource has several representations (languages, formats) this tag is that of the row and not of
/// the bytes, which is what a writer asks about; a cache that compares strong tags wants `Vary` beside it.
#[must_use]
pub fn etag(version: impl Into<i64>) -> ETag {
    ETag(EntityTag::new_strong(version.into().to_string()))
}

/// The versions that a client's `If-Match` admits.
///
/// ```no_run
/// # use actix_idempotency::{PgPool, Versioned, version::{IfMatch, VersionError}, versioned};
/// # use actix_web::{HttpResponse, Result, error::ErrorInternalServerError, web};
/// # use diesel::prelude::*;
/// # diesel::table! { orders (id) { id -> BigInt, quantity -> Integer, version -> Integer, } }
/// # versioned!(orders.version);
/// async fn cancel(pool: web::Data<PgPool>, id: web::Path<i64>, if_match: IfMatch) -> Result<HttpResponse> {
///     let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
///     orders::table.at(*id, if_match).delete().execute(&mut conn).await?;
///     Ok(HttpResponse::NoContent().finish())
/// }
/// ```
///
/// | `If-Match` | |
/// |---|---|
/// | absent | 428 `if-match-missing`; `None` for an `Option<IfMatch>` |
/// | `"7"`, `"7", "8"`, several lines | one of these versions |
/// | `*` | any version, but the row must be there |
/// | `W/"7"` | the same as `"7"`, unless [`strict`](Self::strict): the version decides, not the bytes, and proxies weaken tags when they compress |
/// | `7`, `W/7` | the same as with quotes, which sloppy clients drop |
/// | `"abc"` | a tag that is no version: 412, since no row ever had it |
/// | empty, `"7`, `abc`, `"7" "8"`, `*, "7"`, not ASCII | 400 `if-match-invalid` |
///
/// A stale version is 412 `if-match-failed` with the current `ETag`, a row that is gone 404.
///
/// What cannot be read is never taken for absent: actix makes `None` of every error behind an `Option`, so
/// the extraction lets it through, and the 400 comes where it is used: from the change that it
/// is given to, or from [`check`](Self::check). A handler that does other things first can call
/// [`readable`](Self::readable).
///
/// **Under an idempotency key** the version is part of what is asked for, but headers do not count unless the
/// policy names them: [`Policy::fingerprint_header("If-Match")`](crate::Policy::fingerprint_header) makes the same
/// change of another version 422 `key-reused`, rather than a replay of the first.
///
/// # Errors
///
/// The extraction answers 428 to a request without `If-Match`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IfMatch {
    tags: Result<Tags, InvalidIfMatch>,
    is_strict: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Tags {
    Any,
    Listed(Vec<Tag>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tag {
    /// `None`: a tag that we never made.
    version: Option<i64>,
    is_weak: bool,
}

/// An `If-Match` that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidIfMatch {
    /// No tag in it.
    #[error("If-Match is empty")]
    Empty,
    /// Something outside of ASCII.
    #[error("If-Match contains something that is not ASCII")]
    NotAscii,
    /// `*` beside tags.
    #[error("If-Match lists tags beside `*`")]
    AnyAndMore,
    /// Neither a tag in quotes nor a version.
    #[error("If-Match is not a list of entity tags")]
    NoTag,
}

impl IfMatch {
    /// `None` where there is no such field.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut lines = headers.get_all(IF_MATCH).peekable();
        lines.peek()?;
        let mut list = String::new();
        for line in lines {
            match line.to_str() {
                Ok(text) if list.is_empty() => list.push_str(text),
                Ok(text) => list.extend([",", text]),
                Err(_) => return Some(Self { tags: Err(InvalidIfMatch::NotAscii), is_strict: false }),
            }
        }
        Some(Self { tags: read(&list), is_strict: false })
    }

    /// Weak tags match nothing, as RFC 9110 has it for `If-Match`: 412. For resources whose bytes matter to
    /// those who change them.
    #[must_use]
    pub fn strict(mut self) -> Self {
        self.is_strict = true;
        self
    }

    /// Fails where the field cannot be read, before anything is done.
    ///
    /// # Errors
    ///
    /// [`VersionError::InvalidIfMatch`], which answers 400.
    pub fn readable(&self) -> Result<(), VersionError> {
        self.admitted().map(drop).map_err(VersionError::InvalidIfMatch)
    }

    /// For a resource that is no row of a diesel table: whether this version is admitted.
    ///
    /// # Errors
    ///
    /// [`VersionError::Stale`], which answers 412, and [`VersionError::InvalidIfMatch`], which answers 400.
    pub fn check(&self, current: impl Into<i64>) -> Result<(), VersionError> {
        let current = current.into();
        match self.admitted()?.contains(current) {
            true => Ok(()),
            false => Err(VersionError::Stale { expected: Expected::IfMatch(self.clone()), current }),
        }
    }

    pub(super) fn admitted(&self) -> Result<Admitted, InvalidIfMatch> {
        match &self.tags {
            Err(invalid) => Err(*invalid),
            Ok(Tags::Any) => Ok(Admitted::All),
            Ok(Tags::Listed(tags)) => Ok(Admitted::Listed(
                tags.iter().filter(|tag| !(self.is_strict && tag.is_weak)).filter_map(|tag| tag.version).collect(),
            )),
        }
    }
}

impl fmt::Display for IfMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.admitted() {
            Err(invalid) => invalid.fmt(f),
            Ok(Admitted::All) => f.write_str("*"),
            Ok(Admitted::One(version)) => version.fmt(f),
            Ok(Admitted::Listed(versions)) => f.debug_list().entries(versions).finish(),
        }
    }
}

impl FromRequest for IfMatch {
    type Error = Refusal;
    type Future = std::future::Ready<Result<Self, Refusal>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(Self::of(request.headers()).ok_or_else(|| Code::IfMatchMissing.into()))
    }
}

/// `*`, or tags separated by commas, of which some may be empty.
fn read(list: &str) -> Result<Tags, InvalidIfMatch> {
    let mut rest = list.trim_matches(BLANK);
    if rest == "*" {
        return Ok(Tags::Any);
    }
    let mut tags = Vec::new();
    while !rest.is_empty() {
        if let Some(next) = rest.strip_prefix(',') {
            rest = next.trim_start_matches(BLANK);
            continue;
        }
        let (tag, next) = read_tag(rest)?;
        tags.push(tag);
        rest = next.trim_start_matches(BLANK);
        if !rest.is_empty() && !rest.starts_with(',') {
            return Err(InvalidIfMatch::NoTag);
        }
    }
    if tags.is_empty() { Err(InvalidIfMatch::Empty) } else { Ok(Tags::Listed(tags)) }
}

const BLANK: [char; 2] = [' ', '\t'];

/// The first tag, and what follows it. Its text may contain commas.
fn read_tag(text: &str) -> Result<(Tag, &str), InvalidIfMatch> {
    let (is_weak, opaque) = match text.strip_prefix("W/") {
        Some(opaque) => (true, opaque),
        None => (false, text),
    };
    if let Some(quoted) = opaque.strip_prefix('"') {
        let (tag, rest) = quoted.split_once('"').ok_or(InvalidIfMatch::NoTag)?;
        if !tag.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(InvalidIfMatch::NoTag);
        }
        return Ok((Tag { version: version(tag), is_weak }, rest));
    }
    let (bare, rest) = opaque.split_at(opaque.find([',', ' ', '\t']).unwrap_or(opaque.len()));
    match version(bare) {
        Some(version) => Ok((Tag { version: Some(version), is_weak }, rest)),
        None if bare == "*" => Err(InvalidIfMatch::AnyAndMore),
        None => Err(InvalidIfMatch::NoTag),
    }
}

/// Exactly as [`etag`] writes it: `007` and `+7` are other tags.
fn version(tag: &str) -> Option<i64> {
    tag.parse().ok().filter(|version: &i64| version.to_string() == tag)
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;

    use super::*;

    fn of(lines: &[&[u8]]) -> Option<IfMatch> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(IF_MATCH, HeaderValue::from_bytes(line).unwrap());
        }
        IfMatch::of(&headers)
    }

    #[track_caller]
    fn assert_admits(lines: &[&[u8]], versions: &[i64]) {
        assert_eq!(of(lines).unwrap().admitted(), Ok(Admitted::Listed(versions.to_vec())));
    }

    #[test]
    fn tags_are_versions_in_quotes_or_without() {
        assert_admits(&[b"\"7\""], &[7]);
        assert_admits(&[b" \"7\" , \"8\",, W/\"9\" "], &[7, 8, 9]);
        assert_admits(&[b"\"7\"", b"\"8\""], &[7, 8]);
        assert_admits(&[b"7, W/8"], &[7, 8]);
        assert_admits(&[b"\"-1\""], &[-1]);
        assert_eq!(of(&[b" * "]).unwrap().admitted(), Ok(Admitted::All));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn a_tag_of_somebody_else_matches_nothing() {
        assert_admits(&[b"\"abc\", \"a,b\", \"\", \"007\", \"7-gzip\""], &[]);
        assert_admits(&[b"\"99999999999999999999\""], &[]);
    }

    #[test]
    fn strict_ignores_weak_tags() {
        let strict = of(&[b"W/\"7\", \"8\""]).unwrap().strict();
        assert_eq!(strict.admitted(), Ok(Admitted::Listed(vec![8])));
    }

    #[test]
    fn what_cannot_be_read_is_there_and_invalid() {
        use InvalidIfMatch as I;
        for (line, why) in [
            (&b""[..], I::Empty),
            (b" , ", I::Empty),
            (b"\"7", I::NoTag),
            (b"7\"", I::NoTag),
            (b"abc", I::NoTag),
            (b"\"7\" \"8\"", I::NoTag),
            (b"\"7 8\"", I::NoTag),
            (b"w/\"7\"", I::NoTag),
            (b"*, \"7\"", I::AnyAndMore),
            (b"\"7\", *", I::AnyAndMore),
            (b"\"\xc3\xa9\"", I::NotAscii),
        ] {
            assert_eq!(of(&[line]).unwrap().admitted(), Err(why), "{:?}", line.escape_ascii().to_string());
        }
    }
}
