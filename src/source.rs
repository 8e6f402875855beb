//! Where a key comes from.
//!
//! Not every client sends `Idempotency-Key`: a browser double-clicks, and a payment provider knows only
//! its own order number. A policy has a chain of sources; the first that is there wins. What is there
//! and cannot be read is 400 `key-invalid` and never falls through to the next.

use std::{fmt, sync::Arc};

use actix_web::{HttpRequest, web::Query};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use serde::de::DeserializeOwned;

use crate::{
    digest::Digest,
    fingerprint,
    json::{Json, Pointer},
    key::{IdempotencyKey, InvalidKey, MAX_KEY_LENGTH},
    refusal::Refusal,
    secret::Secret,
    selection::Fields,
    token::{Admitted, FormTokens, InvalidToken},
};

/// What separates the parts of a key, and what a key must not have in it.
const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'\\').add(b',').add(b';').add(b':').add(b'%');

type Computed = Arc<dyn Fn(&HttpRequest, &[u8]) -> Result<Option<String>, InvalidKey> + Send + Sync>;

/// One place where a key may come from.
///
/// ```
/// use actix_idempotency::{Fields, KeySource, Policy};
///
/// // The header if there is one, else the provider's order number.
/// let callback = Policy::new()
///     .keys([KeySource::header(), KeySource::json(["/out_trade_no"])])
///     .anonymous();
///
/// // Same user, same request: the double click of a form that has no key.
/// let form = Policy::new()
///     .keys([KeySource::digest(Fields::all_but(["/requestTime"]))])
///     .principal(|req| req.headers().get("x-user")?.to_str().ok().map(str::to_owned));
/// ```
///
/// All but [`header`](Self::header) and [`form_token`](Self::form_token) are computed by the server,
/// from what anybody may send: a policy
/// with one of them does not build without a principal closure, or an explicit
/// [`Policy::anonymous`](crate::Policy::anonymous).
#[derive(Clone)]
pub struct KeySource(Kind);

#[derive(Clone)]
enum Kind {
    Header,
    Json(Vec<(String, Pointer)>),
    Form(Vec<String>),
    Path(Vec<String>),
    Query(Vec<String>),
    Computed { name: String, compute: Computed },
    Digest(Fields),
    Token(FormTokens, String),
}

/// A key, and the source that it is from.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) key: IdempotencyKey,
    /// Empty for the header. Keys of different sources never meet.
    pub(crate) source: String,
    /// What of the request identifies it, where that is a choice.
    pub(crate) fields: Option<Fields>,
    /// The scope and the expiry of a form token, which it says itself.
    pub(crate) form: Option<Admitted>,
}

impl KeySource {
    /// The header `Idempotency-Key`. The default chain has only this.
    #[must_use]
    pub fn header() -> Self {
        Self(Kind::Header)
    }

    /// Fields of a JSON body, by JSON pointers. Absent where the body is not JSON by its type, or has none
    /// of them; unreadable where it is encoded (`Content-Encoding`) or does not parse, has some of them but
    /// not all, or has one that is an array, an object or empty. `null` is absent.
    ///
    /// # Panics
    ///
    /// For what is no JSON pointer, and for none at all.
    #[track_caller]
    #[must_use]
    pub fn json<P: AsRef<str>>(pointers: impl IntoIterator<Item = P>) -> Self {
        let mut all = Vec::new();
        for text in pointers {
            let text = text.as_ref();
            match Pointer::parse(text) {
                Some(pointer) => all.push((text.to_owned(), pointer)),
                None => panic!("KeySource::json: {text:?} is no JSON pointer (RFC 6901): it starts with /"),
            }
        }
        assert!(!all.is_empty(), "KeySource::json: name at least one field");
        Self(Kind::Json(all))
    }

    /// Fields of a form (`application/x-www-form-urlencoded`); absent and unreadable as for
    /// [`json`](Self::json). A field that is there twice is unreadable.
    ///
    /// # Panics
    ///
    /// For no field at all.
    #[track_caller]
    #[must_use]
    pub fn form<N: Into<String>>(names: impl IntoIterator<Item = N>) -> Self {
        Self(Kind::Form(named("form", names)))
    }

    /// Parameters of the route pattern, such as `id` in `/orders/{id}/payments`.
    ///
    /// # Panics
    ///
    /// For no parameter at all.
    #[track_caller]
    #[must_use]
    pub fn path<N: Into<String>>(names: impl IntoIterator<Item = N>) -> Self {
        Self(Kind::Path(named("path", names)))
    }

    /// Parameters of the query string; as [`form`](Self::form).
    ///
    /// # Panics
    ///
    /// For no parameter at all.
    #[track_caller]
    #[must_use]
    pub fn query<N: Into<String>>(names: impl IntoIterator<Item = N>) -> Self {
        Self(Kind::Query(named("query", names)))
    }

    /// A closure over the request and its body (empty where the policy streams it through). `name` tells
    /// its keys from those of other sources, and stands in the published document.
    #[must_use]
    pub fn computed(
        name: impl Into<String>,
        compute: impl Fn(&HttpRequest, &[u8]) -> Result<Option<String>, InvalidKey> + Send + Sync + 'static,
    ) -> Self {
        Self(Kind::Computed { name: name.into(), compute: Arc::new(compute) })
    }

    /// A closure over the body as a type of your own: the key expression of an `@Idempotent` annotation.
    /// A body that is no such JSON is unreadable.
    ///
    /// ```
    /// use actix_idempotency::KeySource;
    ///
    /// #[derive(serde::Deserialize)]
    /// struct OrderReq {
    ///     user_id: u64,
    ///     product_id: u64,
    /// }
    ///
    /// let source = KeySource::typed(|req: OrderReq| format!("{}:{}", req.user_id, req.product_id));
    /// ```
    #[must_use]
    pub fn typed<T: DeserializeOwned>(key: impl Fn(T) -> String + Send + Sync + 'static) -> Self {
        Self::computed(short_name::<T>(), move |_, body| {
            let body = serde_json::from_slice(body).map_err(|_| InvalidKey::Body)?;
            Ok(Some(key(body)))
        })
    }

    /// A digest of what the request asks for: method, path, query and these fields of its body. For
    /// endpoints that have neither key nor number; with a short
    /// [`retention`](crate::Policy::retention) it is the guard against double clicks. Unless the policy
    /// says what is [compared](crate::Policy::compare), the same fields are.
    ///
    /// Under [`Policy::fingerprint_secrets`](crate::Policy::fingerprint_secrets) it is made by the first
    /// secret, so that the key tells no more than the fingerprint does; a repeat across a change of that
    /// secret is a first request.
    #[must_use]
    pub fn digest(fields: Fields) -> Self {
        Self(Kind::Digest(fields))
    }

    /// A token that [`FormTokens`] has issued for this action: in the field
    /// [`form_token`](crate::FORM_TOKEN_FIELD) of a form (urlencoded or multipart), or in the header
    /// [`Form-Token`](crate::header::FORM_TOKEN). In both, or twice in one, it has to be the same. See
    /// [the module](crate::form_token).
    #[must_use]
    pub fn form_token(tokens: &FormTokens, action: impl Into<String>) -> Self {
        Self(Kind::Token(tokens.clone(), action.into()))
    }

    pub(crate) fn is_header(&self) -> bool {
        matches!(self.0, Kind::Header)
    }

    /// Who issues its keys, where they are form tokens.
    pub(crate) fn tokens(&self) -> Option<&FormTokens> {
        match &self.0 {
            Kind::Token(tokens, _) => Some(tokens),
            _ => None,
        }
    }

    /// Of which fields it is a digest, if it is one.
    pub(crate) fn digested(&self) -> Option<&Fields> {
        match &self.0 {
            Kind::Digest(fields) => Some(fields),
            _ => None,
        }
    }

    /// Whether it needs the body of the request. A form token may be in it, and is looked for with care.
    pub(crate) fn reads_body(&self) -> bool {
        !matches!(self.0, Kind::Header | Kind::Path(_) | Kind::Query(_) | Kind::Token(..))
    }

    /// The key that these tokens, all that the request has, are for. Several are one if they are equal.
    pub(crate) fn admit(&self, request: &HttpRequest, tokens: &[String]) -> Result<Option<Found>, Refusal> {
        let (Kind::Token(issuer, action), Some((token, others))) = (&self.0, tokens.split_first()) else {
            return Ok(None);
        };
        if others.iter().any(|other| other != token) {
            return Err(InvalidToken::Different.into());
        }
        let (key, form) = issuer.admit(token, request, action)?;
        Ok(Some(Found { key, source: self.tag(), fields: None, form: Some(form) }))
    }

    /// The key, if this source has one. By `secret`, if there is one, digests are made.
    pub(crate) fn find(
        &self,
        request: &HttpRequest,
        body: Option<&[u8]>,
        secret: Option<&Secret>,
    ) -> Result<Option<Found>, InvalidKey> {
        let bytes = body.unwrap_or_default();
        let parts = match &self.0 {
            Kind::Header => {
                let key = IdempotencyKey::from_headers(request.headers())?;
                return Ok(key.map(|key| Found { key, source: String::new(), fields: None, form: None }));
            }
            Kind::Digest(fields) => {
                return Ok(Some(self.found(digest_of(fields, request, bytes, secret), Some(fields.clone()))?));
            }
            Kind::Computed { compute, .. } => compute(request, bytes)?.map(|text| vec![text]),
            // It takes more than the body: `admit`.
            Kind::Token(..) => None,
            Kind::Json(pointers) => of_json(pointers, request, bytes)?,
            Kind::Form(names) if fingerprint::is_form(request) => {
                if fingerprint::is_encoded(request) {
                    return Err(InvalidKey::Body);
                }
                of_pairs(names, serde_urlencoded::from_bytes(bytes).map_err(|_| InvalidKey::Body)?)?
            }
            Kind::Form(_) => None,
            Kind::Query(names) => {
                let pairs = Query::<Vec<(String, String)>>::from_query(request.query_string());
                of_pairs(names, pairs.map_err(|_| InvalidKey::Field)?.into_inner())?
            }
            Kind::Path(names) => {
                let values = names.iter().map(|name| path_parameter(request, name));
                all_or_none(values.collect())?
            }
        };
        parts.map(|parts| self.found(joined(&parts), None)).transpose()
    }

    fn found(&self, key: String, fields: Option<Fields>) -> Result<Found, InvalidKey> {
        let key = IdempotencyKey::try_from(key)?;
        Ok(Found { key, source: self.tag(), fields, form: None })
    }

    /// What keeps its keys apart from those of other sources: nothing for the header.
    pub(crate) fn tag(&self) -> String {
        match &self.0 {
            Kind::Header => String::new(),
            // What it is made of is in it.
            Kind::Digest(_) => "digest".into(),
            // Its action is part of its scope.
            Kind::Token(..) => "form token".into(),
            _ => self.name(),
        }
    }

    /// Where its keys come from, in words.
    pub(crate) fn name(&self) -> String {
        let list = |kind: &str, names: &[String]| format!("{kind} {}", names.join(" + "));
        match &self.0 {
            Kind::Header => "header Idempotency-Key".into(),
            Kind::Json(pointers) => list("json", &pointers.iter().map(|(text, _)| text.clone()).collect::<Vec<_>>()),
            Kind::Form(names) => list("form", names),
            Kind::Path(names) => list("path", names),
            Kind::Query(names) => list("query", names),
            Kind::Computed { name, .. } => format!("computed {name}"),
            Kind::Digest(fields) => format!("digest of {}", fields.in_words()),
            Kind::Token(_, action) => format!("form token of {action}"),
        }
    }
}

impl fmt::Debug for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeySource({})", self.name())
    }
}

/// The name of a type without its modules, which are nobody's business and may be renamed.
fn short_name<T>() -> String {
    let name = std::any::type_name::<T>().split_inclusive(['<', '>', '(', ')', '[', ']', ',', ';', ' ', '&']);
    name.map(|part| part.rsplit("::").next().unwrap_or(part)).collect()
}

#[track_caller]
fn named<N: Into<String>>(kind: &str, names: impl IntoIterator<Item = N>) -> Vec<String> {
    let names: Vec<String> = names.into_iter().map(Into::into).collect();
    assert!(!names.is_empty(), "KeySource::{kind}: name at least one field");
    names
}

fn of_json(
    pointers: &[(String, Pointer)],
    request: &HttpRequest,
    body: &[u8],
) -> Result<Option<Vec<String>>, InvalidKey> {
    if !fingerprint::is_of_json_type(request) {
        return Ok(None);
    }
    let json = fingerprint::json_of(request, body).ok_or(InvalidKey::Body)?;
    let value = |pointer| match json.at(pointer) {
        None => Ok(None),
        Some(value) if value.is_null() => Ok(None),
        Some(Json::Literal(text)) => Ok(Some((*text).to_owned())),
        Some(Json::String(text)) => Ok(Some(text.to_string())),
        Some(Json::Array(_) | Json::Object(_)) => Err(InvalidKey::Field),
    };
    all_or_none(pointers.iter().map(|(_, pointer)| value(pointer)).collect::<Result<_, _>>()?)
}

fn of_pairs(names: &[String], pairs: Vec<(String, String)>) -> Result<Option<Vec<String>>, InvalidKey> {
    let value = |name: &String| {
        let mut values = pairs.iter().filter(|(found, _)| found == name).map(|(_, value)| value);
        match (values.next(), values.next()) {
            (_, Some(_)) => Err(InvalidKey::Field),
            (value, None) => Ok(value.cloned()),
        }
    };
    all_or_none(names.iter().map(value).collect::<Result<_, _>>()?)
}

/// A key of which a part is missing, or empty, is not another key.
fn all_or_none(values: Vec<Option<String>>) -> Result<Option<Vec<String>>, InvalidKey> {
    if values.iter().all(Option::is_none) {
        return Ok(None);
    }
    let values: Option<Vec<String>> = values.into_iter().collect();
    match values {
        Some(values) if values.iter().all(|value| !value.is_empty()) => Ok(Some(values)),
        _ => Err(InvalidKey::Field),
    }
}

/// One text, in which it can be seen where each part ends; as its digest where it is too long.
fn joined(parts: &[String]) -> String {
    let text: Vec<String> = parts.iter().map(|part| utf8_percent_encode(part, ESCAPED).to_string()).collect();
    let text = text.join(":");
    if text.len() <= MAX_KEY_LENGTH {
        return text;
    }
    let mut digest = Digest::new("actix-idempotency long key 1");
    digest.part(text);
    format!("sha256:{}", hex::encode(digest.finish()))
}

/// A parameter of the route pattern. actix leaves `%2F`, `%2B` and `%25` as they are.
pub(crate) fn path_parameter(request: &HttpRequest, name: &str) -> Option<String> {
    request.match_info().get(name).map(|value| percent_decode_str(value).decode_utf8_lossy().into_owned())
}

fn digest_of(fields: &Fields, request: &HttpRequest, body: &[u8], secret: Option<&Secret>) -> String {
    let mut digest = Digest::new("actix-idempotency request 1");
    digest.part(request.method().as_str()).part(request.uri().path()).optional(request.uri().query());
    fields.add(&mut digest, request, body);
    let plain = digest.finish();
    hex::encode(secret.map_or(plain, |secret| secret.sign(&plain)))
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;
    use proptest::prelude::*;

    use super::*;

    fn find(source: &KeySource, content_type: &str, body: &str) -> Result<Option<String>, InvalidKey> {
        let request = TestRequest::post().insert_header(("content-type", content_type)).to_http_request();
        source.find(&request, Some(body.as_bytes()), None).map(|found| found.map(|found| found.key.as_str().to_owned()))
    }

    #[test]
    fn fields_of_json_are_all_there_or_none_is() {
        let source = KeySource::json(["/userId", "/productId"]);
        let json = |body| find(&source, "application/json", body);
        assert_eq!(json(r#"{"userId":7,"productId":"a:b"}"#), Ok(Some("7:a%3Ab".into())));
        assert_eq!(json("{}"), Ok(None));
        assert_eq!(json(r#"{"userId":null}"#), Ok(None));
        for bad in [r#"{"userId":7}"#, r#"{"userId":7,"productId":""}"#, r#"{"userId":7,"productId":[]}"#] {
            assert_eq!(json(bad), Err(InvalidKey::Field), "{bad}");
        }
        for bad in ["{", "", r#"{"userId":1,"userId":2,"productId":3}"#, "NaN"] {
            assert_eq!(json(bad), Err(InvalidKey::Body), "{bad}");
        }
        assert_eq!(find(&source, "text/plain", "userId"), Ok(None));
    }

    #[test]
    fn where_a_part_ends_can_be_seen() {
        assert_ne!(joined(&["a:b".into(), "c".into()]), joined(&["a".into(), "b:c".into()]));
        let long = joined(&["ü".repeat(300)]);
        assert!(IdempotencyKey::try_from(long).is_ok());
        assert!(IdempotencyKey::try_from(joined(&["a\0\n ü".into()])).is_ok());
    }

    #[test]
    fn a_form_field_twice_is_unreadable() {
        let source = KeySource::form(["no"]);
        let form = |body| find(&source, "application/x-www-form-urlencoded", body);
        assert_eq!(form("no=1%202&x=y"), Ok(Some("1%202".into())));
        assert_eq!(form("x=y"), Ok(None));
        assert_eq!(form("no=1&no=1"), Err(InvalidKey::Field));
        assert_eq!(find(&source, "application/json", "no=1"), Ok(None));
    }

    #[test]
    fn what_must_be_decoded_first_is_unreadable_where_the_key_is_in_it() {
        let encoded = |source: &KeySource, content_type: &str| {
            let request = TestRequest::post()
                .insert_header(("content-type", content_type))
                .insert_header(("content-encoding", "gzip"))
                .to_http_request();
            source.find(&request, Some(b"\x1f\x8b"), None).map(|found| found.is_some())
        };
        let (json, form) = (KeySource::json(["/no"]), KeySource::form(["no"]));
        assert_eq!(encoded(&json, "application/json"), Err(InvalidKey::Body));
        assert_eq!(encoded(&form, "application/x-www-form-urlencoded; charset=utf-8"), Err(InvalidKey::Body));
        assert_eq!(encoded(&json, "text/plain"), Ok(false));
        assert_eq!(encoded(&form, "text/plain"), Ok(false));
        assert_eq!(encoded(&KeySource::digest(Fields::all()), "application/json"), Ok(true));
    }

    #[test]
    fn a_path_parameter_is_decoded_once() {
        let source = KeySource::path(["no"]);
        let at = |text: &'static str| {
            let request = TestRequest::post().param("no", text).to_http_request();
            source.find(&request, None, None).map(|found| found.map(|found| found.key.as_str().to_owned()))
        };
        assert_eq!(at("7"), Ok(Some("7".into())));
        // As actix leaves it.
        assert_eq!(at("a%2Fb%2Bc%253A"), Ok(Some("a/b+c%253A".into())));
        assert_eq!(at(""), Err(InvalidKey::Field));
        assert!(source.find(&TestRequest::post().to_http_request(), None, None).unwrap().is_none());
    }

    #[test]
    fn sources_are_told_apart() {
        let all = [
            KeySource::header(),
            KeySource::json(["/a"]),
            KeySource::json(["/a", "/b"]),
            KeySource::form(["a"]),
            KeySource::path(["a"]),
            KeySource::query(["a"]),
            KeySource::computed("a", |_, _| Ok(None)),
            KeySource::typed(|text: String| text),
            KeySource::typed(|texts: Vec<String>| texts.concat()),
            KeySource::digest(Fields::all()),
            KeySource::form_token(&FormTokens::new([Secret::new([1; 32])]), "a"),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a.tag() != b.tag()), "{a:?}");
        }
        assert_eq!(
            KeySource::typed(|texts: Vec<Option<String>>| format!("{texts:?}")).name(),
            "computed Vec<Option<String>>"
        );
    }

    proptest! {
        #[test]
        fn any_parts_make_a_key_of_their_own(
            a in proptest::collection::vec(any::<String>(), 1..4), b in proptest::collection::vec(any::<String>(), 1..4),
        ) {
            for parts in [&a, &b] {
                let text = joined(parts);
                prop_assert!(text.is_empty() || IdempotencyKey::try_from(text).is_ok());
            }
            prop_assert_eq!(a == b, joined(&a) == joined(&b));
        }

        #[test]
        fn any_body_has_a_key_or_none_or_a_typed_error(body in proptest::collection::vec(any::<u8>(), 0..100)) {
            let request = |content_type| TestRequest::post().insert_header(("content-type", content_type)).to_http_request();
            let json = KeySource::json(["/a/0"]).find(&request("application/json"), Some(&body), None);
            let form = KeySource::form(["a"]).find(&request("application/x-www-form-urlencoded"), Some(&body), None);
            for invalid in [json.err(), form.err()].into_iter().flatten() {
                prop_assert!(matches!(invalid, InvalidKey::Body | InvalidKey::Field));
            }
        }
    }
}
