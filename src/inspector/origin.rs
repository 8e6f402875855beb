//! Whether a request was sent by a page of this very service.

use actix_web::{
    HttpRequest,
    http::{Uri, header, uri::Authority},
};

/// By what browsers say and pages cannot: `Sec-Fetch-Site`, or `Origin` where that is not sent. Who says neither is
/// not believed.
pub(super) fn is_ours(request: &HttpRequest) -> bool {
    let mut sites = request.headers().get_all("sec-fetch-site");
    match (sites.next(), sites.next()) {
        (Some(site), None) => site.as_bytes() == b"same-origin",
        (Some(_), Some(_)) => false,
        (None, _) => is_from_own_host(request),
    }
}

/// A proxy that ends TLS changes the scheme, so that only the host counts.
fn is_from_own_host(request: &HttpRequest) -> bool {
    let mut origins = request.headers().get_all(header::ORIGIN);
    let (Some(origin), None) = (origins.next(), origins.next()) else { return false };
    let Some(origin) = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok()) else { return false };
    let port = match origin.scheme_str() {
        Some("http") => 80,
        Some("https") => 443,
        _ => return false,
    };
    let info = request.connection_info();
    match (origin.authority(), info.host().parse::<Authority>()) {
        (Some(origin), Ok(own)) => {
            let port_of = |authority: &Authority| authority.port_u16().unwrap_or(port);
            origin.host().eq_ignore_ascii_case(own.host()) && port_of(origin) == port_of(&own)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;

    use super::*;

    fn is_ours_with(headers: &[(&'static str, &'static str)]) -> bool {
        let request = headers.iter().fold(TestRequest::post(), |request, header| request.append_header(*header));
        is_ours(&request.to_http_request())
    }

    #[test]
    fn a_browser_says_where_a_request_comes_from() {
        let host = ("host", "ops.example");
        assert!(is_ours_with(&[host, ("sec-fetch-site", "same-origin")]));
        for site in ["cross-site", "same-site", "none", "", "SAME-ORIGIN", "same-origin, cross-site"] {
            assert!(!is_ours_with(&[host, ("sec-fetch-site", site), ("origin", "https://ops.example")]), "{site}");
        }
        assert!(!is_ours_with(&[host, ("sec-fetch-site", "same-origin"), ("sec-fetch-site", "same-origin")]));
    }

    #[test]
    fn where_it_does_not_the_origin_is_our_host() {
        for (host, origin) in [
            ("ops.example", "https://ops.example"),
            ("ops.example", "http://OPS.example:80"),
            ("ops.example:443", "https://ops.example"),
            ("localhost:8080", "http://localhost:8080"),
            ("[::1]:8080", "http://[::1]:8080"),
        ] {
            assert!(is_ours_with(&[("host", host), ("origin", origin)]), "{host} {origin}");
        }
        for origin in [
            "null",
            "",
            "https://evil.example",
            "https://ops.example.evil.example",
            "https://ops.example:8443",
            "https://user@evil.example",
            "ops.example",
            "file://ops.example",
            "https://ops.example https://evil.example",
        ] {
            assert!(!is_ours_with(&[("host", "ops.example"), ("origin", origin)]), "{origin}");
        }
        let twice = [("host", "ops.example"), ("origin", "https://ops.example"), ("origin", "https://evil.example")];
        assert!(!is_ours_with(&twice));
        assert!(!is_ours_with(&[("host", "ops.example")]));
        let behind_a_proxy = ("x-forwarded-host", "ops.example");
        assert!(is_ours_with(&[("host", "10.0.0.1"), behind_a_proxy, ("origin", "https://ops.example")]));
    }
}
