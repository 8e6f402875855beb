//! By what the logs know a request.

use actix_web::HttpRequest;

/// How long a request id may be, in bytes: a UUID has 36, a `traceparent` 55, and what gateways make up stays well
/// below. A longer one is ignored.
pub const MAX_REQUEST_ID_LENGTH: usize = 128;

/// In this order. The first is what gateways set and applications log; the second is there wherever traces are.
const HEADERS: [&str; 2] = ["x-request-id", "traceparent"];

/// The id of a request, which lands in logs: visible ASCII and nothing else, so that no client writes lines of its
/// own, and of bounded length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RequestId(Box<str>);

impl RequestId {
    /// `None` for what cannot be one: a request is never refused for it.
    pub(crate) fn new(id: &str) -> Option<Self> {
        let is_one = (1..=MAX_REQUEST_ID_LENGTH).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
        is_one.then(|| Self(id.into()))
    }

    /// What the request was sent with.
    pub(crate) fn of(request: &HttpRequest) -> Option<Self> {
        HEADERS.iter().find_map(|name| Self::new(request.headers().get(*name)?.to_str().ok()?))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;

    use super::*;

    #[test]
    fn what_lands_in_logs_is_bounded_and_visible() {
        let longest = "x".repeat(MAX_REQUEST_ID_LENGTH);
        for id in ["1", "!~", "Root=1-5759e988;Parent=53995c3f42cd8ad8", &longest] {
            assert_eq!(RequestId::new(id).unwrap().as_str(), id);
        }
        for id in ["", " ", "a b", "a\nb", "a\tb", "a\u{7f}", "ä", "a\0", &format!("{longest}x")] {
            assert_eq!(RequestId::new(id), None, "{id:?}");
        }
    }

    #[test]
    fn the_first_header_that_has_one_names_the_request() {
        let id = |headers: &[(&str, &[u8])]| {
            let request = headers.iter().fold(TestRequest::post(), |request, (name, value)| {
                let value = actix_web::http::header::HeaderValue::from_bytes(value).unwrap();
                request.append_header((*name, value))
            });
            RequestId::of(&request.to_http_request()).map(|id| id.as_str().to_owned())
        };
        let trace: (&str, &[u8]) = ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        let told = std::str::from_utf8(trace.1).unwrap();
        assert_eq!(id(&[]), None);
        assert_eq!(id(&[trace]).as_deref(), Some(told));
        assert_eq!(id(&[trace, ("x-request-id", b"r1"), ("x-request-id", b"r2")]).as_deref(), Some("r1"));
        for unreadable in [&b"two words"[..], b"", b"\xff\xfe", &[b'x'; 129]] {
            assert_eq!(id(&[("x-request-id", unreadable), trace]).as_deref(), Some(told));
        }
    }
}
