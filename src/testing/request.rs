//! The request that is proved: what is sent again and again.

use std::{fmt, sync::Arc};

use reqwest::{
    Method,
    header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue},
};
use serde::Serialize;
use serde_json::{Map, Value};

type Change = Arc<dyn Fn(Request) -> Request + Send + Sync>;
type Place = Arc<dyn Fn(Request, &str) -> Request + Send + Sync>;

/// A request that the endpoint accepts and that has one effect. It may be carried out as often as a proof has keys.
///
/// ```
/// use actix_idempotency::testing::Request;
/// use serde_json::json;
///
/// // Keys go into `Idempotency-Key`, another body is made from this one.
/// Request::post("/orders").header("Authorization", "Bearer alice").json(&json!({"product_id": 1, "quantity": 1}));
///
/// // The key is a field of the business, and the other body is chosen.
/// Request::post("/payments/callback")
///     .json(&json!({"order_id": 1, "amount": 100}))
///     .key_in(|request, key| request.json_field("out_trade_no", key))
///     .other_body(|request| request.json_field("amount", 200));
/// ```
#[derive(Clone)]
pub struct Request {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) headers: HeaderMap,
    body: Body,
    other_body: Option<Change>,
    key_in: Place,
}

#[derive(Clone)]
enum Body {
    Bytes(Vec<u8>),
    Json(Value),
    Form(Vec<(String, String)>),
}

impl Request {
    /// # Panics
    ///
    /// Where [`new`](Self::new) does.
    #[track_caller]
    #[must_use]
    pub fn post(path: &str) -> Self {
        Self::new(Method::POST.as_str(), path)
    }

    /// # Panics
    ///
    /// Where [`new`](Self::new) does.
    #[track_caller]
    #[must_use]
    pub fn put(path: &str) -> Self {
        Self::new(Method::PUT.as_str(), path)
    }

    /// # Panics
    ///
    /// Where [`new`](Self::new) does.
    #[track_caller]
    #[must_use]
    pub fn patch(path: &str) -> Self {
        Self::new(Method::PATCH.as_str(), path)
    }

    /// # Panics
    ///
    /// Where [`new`](Self::new) does.
    #[track_caller]
    #[must_use]
    pub fn delete(path: &str) -> Self {
        Self::new(Method::DELETE.as_str(), path)
    }

    /// Any method; the path with its query, which continues the URL of the service.
    ///
    /// # Panics
    ///
    /// If it is no method, or if the path neither begins with `/` nor is empty.
    #[track_caller]
    #[must_use]
    pub fn new(method: &str, path: &str) -> Self {
        assert!(path.is_empty() || path.starts_with('/'), "{path:?}: a path begins with /");
        Self {
            method: method.parse().unwrap_or_else(|_| panic!("{method:?} is no method")),
            path: path.to_owned(),
            headers: HeaderMap::new(),
            body: Body::Bytes(Vec::new()),
            other_body: None,
            key_in: Arc::new(|request, key| request.header("Idempotency-Key", format!("\"{key}\""))),
        }
    }

    /// A header, in place of one of the same name.
    ///
    /// # Panics
    ///
    /// If it is no name or no value of a header.
    #[track_caller]
    #[must_use]
    pub fn header(mut self, name: &str, value: impl AsRef<str>) -> Self {
        let name: HeaderName = name.parse().unwrap_or_else(|_| panic!("{name:?} is no name of a header"));
        let value = HeaderValue::try_from(value.as_ref()).unwrap_or_else(|_| panic!("{name}: no value of a header"));
        self.headers.insert(name, value);
        self
    }

    /// The body as it is. It has no type until [`header`](Self::header) gives it one.
    #[must_use]
    pub fn body(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.body = Body::Bytes(bytes.into());
        self
    }

    /// The body as JSON, with its `Content-Type`.
    ///
    /// # Panics
    ///
    /// If the value cannot be written as JSON.
    #[track_caller]
    #[must_use]
    pub fn json(self, value: &impl Serialize) -> Self {
        let mut request = self.header(CONTENT_TYPE.as_str(), "application/json");
        request.body = Body::Json(json_of(value));
        request
    }

    /// A field of the JSON object that is the body, added or replaced. Without a body it becomes an object.
    ///
    /// # Panics
    ///
    /// If the body is something else, or if the value cannot be written as JSON.
    #[track_caller]
    #[must_use]
    pub fn json_field(mut self, name: &str, value: impl Serialize) -> Self {
        if self.is_empty() {
            self = self.json(&Map::new());
        }
        let Body::Json(Value::Object(members)) = &mut self.body else {
            panic!("the body is no JSON object that could have a field {name:?}");
        };
        members.insert(name.to_owned(), json_of(&value));
        self
    }

    /// A field of the form that is the body (`application/x-www-form-urlencoded`), added or replaced. Without a body it
    /// becomes a form.
    ///
    /// # Panics
    ///
    /// If the body is something else.
    #[track_caller]
    #[must_use]
    pub fn form_field(mut self, name: &str, value: impl Into<String>) -> Self {
        if self.is_empty() {
            self = self.header(CONTENT_TYPE.as_str(), "application/x-www-form-urlencoded");
            self.body = Body::Form(Vec::new());
        }
        let Body::Form(fields) = &mut self.body else {
            panic!("the body is no form that could have a field {name:?}");
        };
        fields.retain(|(other, _)| other != name);
        fields.push((name.to_owned(), value.into()));
        self
    }

    /// Where the key goes: the function puts it into the request. A key is a fresh UUID for each use; by default it is
    /// sent as `Idempotency-Key: "…"`, with the quotes of the IETF draft.
    ///
    /// ```
    /// # use actix_idempotency::testing::Request;
    /// # let request = || Request::post("/orders");
    /// request().key_in(|request, key| request.header("X-Request-Id", key));
    /// request().key_in(|request, key| request.json_field("order_no", key));
    /// request().key_in(|request, key| request.form_field("order_no", key));
    /// ```
    #[must_use]
    pub fn key_in(mut self, place: impl Fn(Self, &str) -> Self + Send + Sync + 'static) -> Self {
        self.key_in = Arc::new(place);
        self
    }

    /// What is sent under a key that was used for this request: the function makes another request of it, which the key
    /// is then put into. By default every number at the top level of a JSON object is raised by one, or, where there
    /// is none, a member `another` is added; of other bodies no other one can be made, and the stage is not asked for.
    #[must_use]
    pub fn other_body(mut self, change: impl Fn(Self) -> Self + Send + Sync + 'static) -> Self {
        self.other_body = Some(Arc::new(change));
        self
    }

    pub(super) fn under(&self, key: &str) -> Self {
        (self.key_in)(self.clone(), key)
    }

    pub(super) fn another(&self) -> Option<Self> {
        let mut other = self.clone();
        match (&self.other_body, &mut other.body) {
            (Some(change), _) => Some(change(other)),
            (None, Body::Json(Value::Object(members))) => {
                change(members);
                Some(other)
            }
            (None, _) => None,
        }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        match &self.body {
            Body::Bytes(bytes) => bytes.clone(),
            Body::Json(value) => value.to_string().into_bytes(),
            Body::Form(fields) => serde_urlencoded::to_string(fields).unwrap_or_default().into_bytes(),
        }
    }

    fn is_empty(&self) -> bool {
        matches!(&self.body, Body::Bytes(bytes) if bytes.is_empty())
    }
}

#[track_caller]
fn json_of(value: &impl Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_else(|error| panic!("no JSON can be made of the value: {error}"))
}

/// Into members that are as valid, most likely, and that no fingerprint takes for the same.
fn change(members: &mut Map<String, Value>) {
    let mut changed = false;
    for value in members.values_mut() {
        let raised = value
            .as_i64()
            .and_then(|number| number.checked_add(1))
            .map(Value::from)
            .or_else(|| value.as_f64().map(|number| Value::from(number + 1.0)));
        if let Some(raised) = raised {
            *value = raised;
            changed = true;
        }
    }
    if !changed {
        members.insert("another".to_owned(), Value::from(true));
    }
}

impl fmt::Debug for Request {
    /// Without headers and body, which may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("method", &self.method).field("path", &self.path).finish_non_exhaustive()
    }
}

impl fmt::Display for Request {
    /// The method and the path, without the query.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.path.split('?').next().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body(request: &Request) -> Value {
        serde_json::from_slice(&request.bytes()).unwrap()
    }

    #[test]
    fn another_body_has_its_numbers_raised_and_keeps_the_key() {
        let request = Request::post("/orders")
            .json(&json!({"sku": "a", "quantity": 1, "price": 1.5, "tags": [1]}))
            .key_in(|request, key| request.json_field("order_no", key));
        let other = request.another().unwrap().under("k");
        let expected = json!({"sku": "a", "quantity": 2, "price": 2.5, "tags": [1], "order_no": "k"});
        assert_eq!(body(&other), expected);
        let without = Request::post("/orders").json(&json!({"sku": "a"})).another().unwrap();
        assert_eq!(body(&without), json!({"sku": "a", "another": true}));
    }

    #[test]
    fn of_what_is_no_object_no_other_body_is_made() {
        assert!(Request::post("/orders").another().is_none());
        assert!(Request::post("/orders").body("a").another().is_none());
        assert!(Request::post("/orders").json(&json!([1])).another().is_none());
        let chosen = Request::post("/orders").body("a").other_body(|request| request.body("b")).another();
        assert_eq!(chosen.unwrap().bytes(), b"b");
    }

    #[test]
    fn fields_of_forms_are_replaced_and_encoded() {
        let request = Request::post("/orders").form_field("sku", "a&b").form_field("n", "1").form_field("n", "2");
        assert_eq!(request.bytes(), b"sku=a%26b&n=2");
        assert_eq!(request.headers[CONTENT_TYPE], "application/x-www-form-urlencoded");
    }

    #[test]
    #[should_panic(expected = "a path begins with /")]
    fn a_path_that_is_none_is_refused() {
        let _ = Request::post("orders");
    }

    #[test]
    fn neither_headers_nor_bodies_nor_the_query_are_shown() {
        let request = Request::post("/orders?token=secret").header("Authorization", "Bearer secret").body("secret");
        assert_eq!(request.to_string(), "POST /orders");
        let request = Request { path: "/orders".into(), ..request };
        assert!(!format!("{request:?}").contains("secret"), "{request:?}");
    }
}
