//! The answer, as it is kept: captured from a response, rebuilt as a replay.

use std::{
    collections::VecDeque,
    error::Error as StdError,
    fmt,
    future::poll_fn,
    panic::AssertUnwindSafe,
    pin::Pin,
    task::{Context, Poll, ready},
};

use actix_web::{
    HttpRequest, HttpResponse, Responder,
    body::{BodySize, BoxBody, MessageBody},
    http::{
        StatusCode,
        header::{self, HeaderMap, HeaderName, HeaderValue},
    },
    web::{Bytes, BytesMut},
};
use futures_util::FutureExt;
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

use crate::{
    header::{IDEMPOTENCY_BODY_OMITTED, TRUE},
    policy::Policy,
};

/// Raised whenever a snapshot means something else; a row with a higher one was written by a newer
/// version of this crate.
pub(crate) const SNAPSHOT_VERSION: i16 = 1;

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// The kept answer: status, headers in their order and repetition, and the bytes of the body, unless
/// it was too large or a stream: then it is marked omitted.
///
/// What belongs to one exchange is not kept: hop-by-hop fields (RFC 9110, section 7.6.1, and those
/// that `Connection` names), `Set-Cookie`, `Date` and `Content-Length` (both made anew),
/// authentication challenges, and fields of request ids, traces and rate limits.
/// [`Policy::never_store_header`] adds to them. A custom reason phrase becomes the standard one.
#[derive(Clone, PartialEq, Eq)]
pub struct ResponseSnapshot {
    status: StatusCode,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: Option<Bytes>,
}

impl ResponseSnapshot {
    /// An answer without headers and body, for a handler that stores its own
    /// ([`IdemKey::complete_in`](crate::IdemKey::complete_in)). It is `Send`, and a `Responder`.
    #[must_use]
    pub fn new(status: StatusCode) -> Self {
        Self { status, headers: Vec::new(), body: Some(Bytes::new()) }
    }

    /// An answer with `value` as its JSON body.
    ///
    /// ```
    /// use actix_idempotency::ResponseSnapshot;
    /// use actix_web::http::{StatusCode, header};
    ///
    /// let answer = ResponseSnapshot::json(StatusCode::CREATED, &[1, 2])?
    ///     .with_header(header::LOCATION, header::HeaderValue::from_static("/orders/1"));
    /// assert_eq!(answer.body().unwrap(), "[1,2]");
    /// # Ok::<(), serde_json::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Where `value` cannot be serialised.
    pub fn json(status: StatusCode, value: &(impl Serialize + ?Sized)) -> serde_json::Result<Self> {
        let body = serde_json::to_vec(value)?;
        Ok(Self::new(status).with_header(header::CONTENT_TYPE, JSON).with_body(body))
    }

    /// Adds a header; one of the same name that is there already stays.
    #[must_use]
    pub fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// Replaces the body.
    #[must_use]
    pub fn with_body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = Some(body.into());
        self
    }

    /// What of it may be stored under a policy.
    pub(crate) fn fit_for(self, policy: &Policy) -> Self {
        let headers = self.headers.iter().cloned().collect();
        let body = self.body.filter(|body| body.len() <= policy.response_limit);
        Self::capture(self.status, &headers, body, policy)
    }

    /// `body` is `None` where it is omitted.
    pub(crate) fn capture(status: StatusCode, headers: &HeaderMap, body: Option<Bytes>, policy: &Policy) -> Self {
        let headers = headers
            .iter()
            .filter(|(name, _)| is_stored(name, status, headers, policy))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        Self { status, headers, body }
    }

    /// From what is stored; `None` where that is no response.
    pub(crate) fn restore(status: i16, names: &[String], values: Vec<Bytes>, body: Option<Bytes>) -> Option<Self> {
        let status = StatusCode::from_u16(status.try_into().ok()?).ok()?;
        let headers = names
            .iter()
            .zip(values)
            .map(|(name, value)| {
                Some((HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_maybe_shared(value).ok()?))
            })
            .collect::<Option<_>>()?;
        Some(Self { status, headers, body })
    }

    /// The status alone: that it was done, and nothing about it.
    pub(crate) fn bare(&self) -> Self {
        Self { status: self.status, headers: Vec::new(), body: None }
    }

    /// The same without its body.
    pub(crate) fn without_body(&self) -> Self {
        Self { body: None, ..self.clone() }
    }

    /// The status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The headers, in their order and repetition.
    pub fn headers(&self) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> {
        self.headers.iter().map(|(name, value)| (name, value))
    }

    /// The body; `None` where it was omitted.
    #[must_use]
    pub fn body(&self) -> Option<&Bytes> {
        self.body.as_ref()
    }

    /// The answer to a retry.
    pub(crate) fn replay(self, policy: &Policy) -> HttpResponse<BoxBody> {
        let mut response = self.into_response();
        response.headers_mut().insert(policy.replay_marker.clone(), TRUE);
        response
    }

    /// The answer itself.
    pub(crate) fn into_response(self) -> HttpResponse<BoxBody> {
        let mut response = HttpResponse::new(self.status);
        let omitted = self.body.is_none();
        for (name, value) in self.headers {
            // An empty body is no valid gzip.
            if !(omitted && name == header::CONTENT_ENCODING) {
                response.headers_mut().append(name, value);
            }
        }
        if omitted {
            response.headers_mut().insert(IDEMPOTENCY_BODY_OMITTED, TRUE);
        }
        if is_bodiless(self.status) { response } else { response.set_body(BoxBody::new(self.body.unwrap_or_default())) }
    }
}

impl Responder for ResponseSnapshot {
    type Body = BoxBody;

    fn respond_to(self, _: &HttpRequest) -> HttpResponse<BoxBody> {
        self.into_response()
    }
}

/// Headers and body stay out of logs.
impl fmt::Debug for ResponseSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseSnapshot")
            .field("status", &self.status)
            .field("headers", &self.headers.len())
            .field("body", &self.body.as_ref().map(|body| format!("{} bytes", body.len())))
            .finish()
    }
}

/// A response whose status has no body, whatever the handler gave it (RFC 9110, section 6.4.1).
fn is_bodiless(status: StatusCode) -> bool {
    status.is_informational() || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED
}

/// Only this crate marks a replay.
pub(crate) fn remove_markers(headers: &mut HeaderMap, policy: &Policy) {
    headers.remove(&policy.replay_marker);
    headers.remove(IDEMPOTENCY_BODY_OMITTED);
}

fn is_stored(name: &HeaderName, status: StatusCode, headers: &HeaderMap, policy: &Policy) -> bool {
    if name == header::CONTENT_LENGTH {
        // It says how large the body would have been, and cannot be made anew.
        return status == StatusCode::NOT_MODIFIED;
    }
    let of_the_protocol = name == policy.replay_marker || name == IDEMPOTENCY_BODY_OMITTED;
    !(of_the_protocol
        || ONE_EXCHANGE.contains(&name.as_str())
        || ONE_EXCHANGE_PREFIXES.iter().any(|prefix| name.as_str().starts_with(prefix))
        || policy.unstored_headers.contains(name)
        || named_by_connection(name, headers))
}

#[rustfmt::skip]
const ONE_EXCHANGE: &[&str] = &[
    // hop by hop
    "connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
    // made anew
    "date",
    // sessions and authentication
    "set-cookie", "set-cookie2", "authorization", "proxy-authorization", "www-authenticate", "proxy-authenticate",
    "authentication-info", "proxy-authentication-info",
    // request ids and traces
    "request-id", "x-request-id", "correlation-id", "x-correlation-id", "x-amzn-requestid", "x-amzn-trace-id",
    "x-amz-request-id", "x-trace-id", "cf-ray", "traceparent", "tracestate", "traceresponse", "b3", "server-timing",
    // rate limits
    "ratelimit",
];
const ONE_EXCHANGE_PREFIXES: &[&str] = &["x-b3-", "ratelimit-", "x-ratelimit-", "x-rate-limit-"];

fn named_by_connection(name: &HeaderName, headers: &HeaderMap) -> bool {
    headers
        .get_all(header::CONNECTION)
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|token| token.trim().eq_ignore_ascii_case(name.as_str()))
}

/// What became of a body that was to be kept.
pub(crate) enum Buffered<B> {
    /// There is none.
    Empty(B),
    /// All of it.
    Whole(Bytes),
    /// Known to be too large, or an event stream, before any of it was read.
    Untouched(B),
    /// Too large, or too slow, for the rest to be waited for.
    Streaming(BoxBody),
    /// It failed before it was complete.
    Failed(Box<dyn StdError>),
}

/// Reads a body up to a limit in bytes and time. What is beyond either is passed on as it comes.
pub(crate) async fn buffer<B>(body: B, headers: &HeaderMap, policy: &Policy) -> Buffered<B>
where
    B: MessageBody + 'static,
{
    let limit = policy.response_limit;
    let size = body.size();
    match size {
        BodySize::None => return Buffered::Empty(body),
        BodySize::Sized(length) if length > limit as u64 => return Buffered::Untouched(body),
        BodySize::Stream if is_event_stream(headers, policy) => return Buffered::Untouched(body),
        _ => {}
    }
    let deadline = Instant::now() + policy.stream_timeout;
    let mut rest = Box::pin(body);
    let mut read = VecDeque::new();
    let mut length = 0;
    loop {
        let next = AssertUnwindSafe(poll_fn(|cx| rest.as_mut().poll_next(cx))).catch_unwind();
        match timeout_at(deadline, next).await {
            Ok(Err(_panic)) => return Buffered::Failed("the body panicked".into()),
            Ok(Ok(None)) => return Buffered::Whole(joined(read)),
            Ok(Ok(Some(Err(error)))) => return Buffered::Failed(error.into()),
            Ok(Ok(Some(Ok(chunk)))) => {
                length += chunk.len();
                read.push_back(chunk);
                if length > limit {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    Buffered::Streaming(BoxBody::new(PrefixAndRest { prefix: read, rest, size }))
}

/// Media types of which each part is meant to be read as soon as it is there.
const EVENT_STREAMS: &[&str] = &[
    "text/event-stream",
    "application/x-ndjson",
    "application/jsonl",
    "application/json-seq",
    "multipart/x-mixed-replace",
];

/// The first byte of an event stream must not wait for a deadline.
fn is_event_stream(headers: &HeaderMap, policy: &Policy) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    let mut named = EVENT_STREAMS.iter().copied().chain(policy.event_streams.iter().map(String::as_str));
    named.any(|event_stream| event_stream.eq_ignore_ascii_case(media_type))
}

fn joined(mut chunks: VecDeque<Bytes>) -> Bytes {
    if chunks.len() == 1 {
        return chunks.remove(0).unwrap_or_default();
    }
    let mut whole = BytesMut::with_capacity(chunks.iter().map(Bytes::len).sum());
    chunks.iter().for_each(|chunk| whole.extend_from_slice(chunk));
    whole.freeze()
}

/// A body of which the first chunks have been read already.
struct PrefixAndRest<B> {
    prefix: VecDeque<Bytes>,
    rest: Pin<Box<B>>,
    size: BodySize,
}

impl<B: MessageBody> MessageBody for PrefixAndRest<B> {
    type Error = Box<dyn StdError>;

    fn size(&self) -> BodySize {
        self.size
    }

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let this = self.get_mut();
        if let Some(chunk) = this.prefix.pop_front() {
            return Poll::Ready(Some(Ok(chunk)));
        }
        let next = ready!(this.rest.as_mut().poll_next(cx));
        Poll::Ready(next.map(|chunk| chunk.map_err(Into::into)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect()
    }

    fn stored(lines: &[(&'static str, &str)]) -> Vec<String> {
        let snapshot = ResponseSnapshot::capture(StatusCode::OK, &headers(lines), None, &Policy::new());
        let mut names: Vec<_> = snapshot.headers().map(|(name, _)| name.to_string()).collect();
        names.sort();
        names
    }

    #[test]
    fn headers_of_one_exchange_are_not_stored() {
        assert_eq!(
            stored(&[
                ("etag", "\"1\""),
                ("set-cookie", "s=1"),
                ("connection", "close, x-hop"),
                ("x-hop", "1"),
                ("x-ratelimit-remaining", "9"),
                ("ratelimit", "limit=1"),
                ("x-request-id", "r"),
                ("date", "now"),
                ("location", "/orders/1"),
                ("idempotency-replayed", "true"),
            ]),
            ["etag", "location"]
        );
    }

    #[test]
    fn what_is_stored_is_restored() {
        let before = ResponseSnapshot {
            status: StatusCode::CREATED,
            headers: vec![(header::LINK, HeaderValue::from_bytes(b"<a>; title=\"\xe9\"").unwrap())],
            body: Some(Bytes::from_static(b"\0\xff")),
        };
        let after = ResponseSnapshot::restore(
            201,
            &["link".to_owned()],
            vec![b"<a>; title=\"\xe9\"".to_vec().into()],
            Some(b"\0\xff".to_vec().into()),
        );
        assert_eq!(after, Some(before));
        assert_eq!(ResponseSnapshot::restore(99, &[], vec![], None), None);
        assert_eq!(ResponseSnapshot::restore(200, &["a b".to_owned()], vec![Bytes::new()], None), None);
        assert_eq!(ResponseSnapshot::restore(200, &["a".to_owned()], vec![b"\r\n".to_vec().into()], None), None);
    }

    #[test]
    fn debug_shows_neither_headers_nor_body() {
        let snapshot = ResponseSnapshot {
            status: StatusCode::OK,
            headers: vec![(header::LOCATION, HeaderValue::from_static("secret-place"))],
            body: Some(Bytes::from_static(b"secret")),
        };
        assert!(!format!("{snapshot:?}").contains("secret"));
    }
}
