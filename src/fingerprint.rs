//! The fingerprint: a digest of what a request asks for, by which a retry is told from another
//! request that uses the same key (IETF draft -07, section 2.4).
//!
//! It covers method, path, query and body, and no header unless the policy names it: a retry through
//! another gateway has another `traceparent`, `Date` and `User-Agent`. The body counts
//!
//! - as canonical JSON where its type is `application/json` or ends in `+json`: the order of members,
//!   white space and escapes do not count, numbers count as they are written, an absent member is not
//!   a `null` one;
//! - without its boundary where it is `multipart/*`: browsers draw a new one for every submit;
//! - as its bytes otherwise, and wherever the above cannot be relied on: an encoded body
//!   (`Content-Encoding`), JSON that does not parse, nests deeper than 128 or names a member twice.

use std::fmt;

use actix_web::{HttpMessage, HttpRequest, http::header};
use memchr::memmem;
use mime::Mime;

use crate::{digest::Digest, json::Json, policy::Policy, secret::Secret, selection::Fields};

/// Raised whenever the same request would get another fingerprint. A row with a higher one was
/// written by a newer version of this crate and is answered with 503 `newer-version`.
pub(crate) const RECIPE_VERSION: i16 = 1;

/// The digest of a request, and the recipe it was made by.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    pub(crate) digest: [u8; 32],
    pub(crate) recipe: Recipe,
    /// The same under keys that were used before.
    earlier: Vec<([u8; 32], Recipe)>,
}

/// Which choices of the policy went into a fingerprint, as a digest. Two fingerprints say something
/// about each other only where this is the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Recipe(pub(crate) [u8; 8]);

impl Recipe {
    /// `key` where fingerprints are keyed.
    fn of(policy: &Policy, fields: &Fields, key: Option<&Secret>) -> Self {
        let mut digest = Digest::new("actix-idempotency recipe 1");
        digest.part(if policy.streams_body { "body streamed through" } else { "body" });
        fields.add_recipe(&mut digest);
        for name in &policy.fingerprinted_headers {
            digest.part(name.as_str());
        }
        digest.optional(key.map(Secret::id));
        Self::from(digest)
    }

    fn of_value(key: Option<&Secret>) -> Self {
        let mut digest = Digest::new("actix-idempotency recipe of a value 1");
        digest.optional(key.map(Secret::id));
        Self::from(digest)
    }
}

impl From<Digest> for Recipe {
    fn from(digest: Digest) -> Self {
        let mut recipe = [0; 8];
        recipe.copy_from_slice(&digest.finish()[..8]);
        Self(recipe)
    }
}

impl Fingerprint {
    /// `body` is `None` where the policy streams it through unread.
    pub(crate) fn of(request: &HttpRequest, body: Option<&[u8]>, fields: &Fields, policy: &Policy) -> Self {
        let mut digest = Digest::new("actix-idempotency fingerprint 1");
        digest.part(request.method().as_str()).part(request.uri().path()).optional(request.uri().query());
        for name in &policy.fingerprinted_headers {
            let values: Vec<_> = request.headers().get_all(name).collect();
            digest.part(name.as_str()).part((values.len() as u64).to_be_bytes());
            values.iter().for_each(|value| {
                digest.part(value.as_bytes());
            });
        }
        if let Some(body) = body {
            fields.add(&mut digest, request, body);
        }
        Self::keyed(digest.finish(), &policy.fingerprint_keys, |key| Recipe::of(policy, fields, key))
    }

    /// Of what a plain function is asked for, as JSON.
    pub(crate) fn of_value(json: &[u8], policy: &Policy) -> Self {
        let mut digest = Digest::new("actix-idempotency fingerprint of a value 1");
        match Json::parse(json) {
            Some(value) => value.digest(digest.part("json")),
            None => drop(digest.part("bytes").part(json)),
        }
        Self::keyed(digest.finish(), &policy.fingerprint_keys, Recipe::of_value)
    }

    /// As a row has it.
    pub(crate) fn stored(digest: [u8; 32], recipe: [u8; 8]) -> Self {
        Self { digest, recipe: Recipe(recipe), earlier: Vec::new() }
    }

    fn keyed(plain: [u8; 32], keys: &[Secret], recipe: impl Fn(Option<&Secret>) -> Recipe) -> Self {
        let Some((current, earlier)) = keys.split_first() else {
            return Self { digest: plain, recipe: recipe(None), earlier: Vec::new() };
        };
        let under = |key: &Secret| (key.sign(&plain), recipe(Some(key)));
        let (digest, recipe) = under(current);
        Self { digest, recipe, earlier: earlier.iter().map(under).collect() }
    }

    /// The digest as it would be by another recipe; `None` where it cannot be made by that one.
    pub(crate) fn by(&self, recipe: &[u8]) -> Option<&[u8; 32]> {
        if self.recipe.0 == recipe {
            return Some(&self.digest);
        }
        self.earlier.iter().find(|(_, earlier)| earlier.0 == recipe).map(|(digest, _)| digest)
    }

    /// The first bytes, for logs.
    pub(crate) fn prefix(&self) -> String {
        hex::encode(&self.digest[..6])
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({}…)", self.prefix())
    }
}

/// Whether the body is JSON by its type.
pub(crate) fn is_of_json_type(request: &HttpRequest) -> bool {
    matches!(request.mime_type(), Ok(Some(mime)) if is_json_type(&mime))
}

/// Whether the body has to be decoded before it can be read.
pub(crate) fn is_encoded(request: &HttpRequest) -> bool {
    request.headers().contains_key(header::CONTENT_ENCODING)
}

/// Whether the body is a form by its type.
pub(crate) fn is_form(request: &HttpRequest) -> bool {
    let form = mime::APPLICATION_WWW_FORM_URLENCODED;
    matches!(request.mime_type(), Ok(Some(mime)) if mime.essence_str() == form.essence_str())
}

/// The body as canonical JSON, where it is such.
pub(crate) fn json_of<'a>(request: &HttpRequest, body: &'a [u8]) -> Option<Json<'a>> {
    if is_of_json_type(request) && !is_encoded(request) { Json::parse(body) } else { None }
}

/// A body that is no JSON; `raw`: whatever its type.
pub(crate) fn add_bytes(digest: &mut Digest, request: &HttpRequest, body: &[u8], raw: bool) {
    match request.mime_type() {
        Ok(Some(mime)) if !raw && !is_encoded(request) && mime.type_() == mime::MULTIPART => {
            if let Some(boundary) = mime.get_param(mime::BOUNDARY) {
                digest.part("multipart");
                return add_multipart(digest, boundary.as_str(), body);
            }
        }
        _ => {}
    }
    digest.part("bytes").part(body);
}

fn is_json_type(mime: &Mime) -> bool {
    mime.subtype() == mime::JSON || mime.suffix() == Some(mime::JSON)
}

/// What stands between the delimiters (RFC 2046, section 5.1.1).
fn add_multipart(digest: &mut Digest, boundary: &str, body: &[u8]) {
    let delimiter = format!("--{boundary}");
    let mut start = 0;
    for end in memmem::find_iter(body, delimiter.as_bytes()) {
        digest.part(&body[start..end]);
        start = end + delimiter.len();
    }
    digest.part(&body[start..]);
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;

    use super::*;

    fn of(uri: &str, content_type: &str, body: &[u8]) -> [u8; 32] {
        let request = TestRequest::post().uri(uri).insert_header(("content-type", content_type)).to_http_request();
        Fingerprint::of(&request, Some(body), &Fields::all(), &Policy::new()).digest
    }

    #[test]
    fn json_is_recognised_by_its_type() {
        for json in ["application/json", "application/json; charset=utf-8", "application/vnd.shop+json", "text/json"] {
            assert_eq!(of("/", json, b"{\"a\":1,\"b\":2}"), of("/", json, b"{ \"b\":2, \"a\":1 }"), "{json}");
        }
        assert_ne!(of("/", "text/plain", b"{\"a\":1}"), of("/", "text/plain", b"{ \"a\":1 }"));
        assert_ne!(of("/", "application/json", b"{\"a\":"), of("/", "application/json", b"{ \"a\":"));
    }

    #[test]
    fn path_and_query_count() {
        let all =
            [of("/a", "", b""), of("/b", "", b""), of("/a?", "", b""), of("/a?x=1", "", b""), of("/a?x=2", "", b"")];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b), "{i}");
        }
    }

    #[test]
    fn a_multipart_form_is_the_same_under_another_boundary() {
        let form = |boundary: &str, value: &str| {
            let body = format!(
                "--{boundary}\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n{value}\r\n--{boundary}--\r\n"
            );
            of("/", &format!("multipart/form-data; boundary={boundary}"), body.as_bytes())
        };
        assert_eq!(form("xxxx", "1"), form("----WebKitFormBoundary7MA4YWxk", "1"));
        assert_ne!(form("xxxx", "1"), form("xxxx", "2"));
    }

    #[test]
    fn headers_count_only_where_they_are_named() {
        let policy = Policy::new().fingerprint_header("x-api-version");
        let with = |name: &str, value: &str, policy: &Policy| {
            let request = TestRequest::post().insert_header((name, value)).to_http_request();
            Fingerprint::of(&request, None, &Fields::all(), policy).digest
        };
        assert_eq!(with("user-agent", "a", &policy), with("user-agent", "b", &policy));
        assert_ne!(with("x-api-version", "1", &policy), with("x-api-version", "2", &policy));
        let recipe = |policy| Recipe::of(policy, &Fields::all(), None);
        assert!(recipe(&policy) != recipe(&Policy::new()));
    }
}
