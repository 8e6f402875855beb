//! Content codings: a stored answer is told only to whoever can read it.
//!
//! What is compressed inside of the middleware is stored as it was, and a retry may accept less than the first request
//! did. With the feature `decode` it gets the answer as it was before; without, and for codings that nobody knows, it is
//! told that it cannot have it.

use actix_web::{
    HttpRequest,
    http::header::{self, AcceptEncoding, Header, HeaderName, HeaderValue, Preference, Quality},
};

use crate::{policy::Policy, refusal::Code, snapshot::ResponseSnapshot};

/// The answer as this request can read it.
pub(crate) fn fit(
    snapshot: ResponseSnapshot,
    request: &HttpRequest,
    policy: &Policy,
) -> Result<ResponseSnapshot, Code> {
    let codings = codings(&snapshot);
    match snapshot.body() {
        // Without its body it has no coding either.
        Some(body) if !body.is_empty() && !codings.iter().all(|coding| accepts(request, coding)) => {
            let decoded = codings.iter().rev().try_fold(body.to_vec(), |body, coding| decode(coding, &body, policy));
            decoded.map(|body| without_coding(&snapshot, body)).ok_or(Code::CodingNotAccepted)
        }
        _ => Ok(snapshot),
    }
}

/// In the order in which they were applied (RFC 9110, section 8.4).
fn codings(snapshot: &ResponseSnapshot) -> Vec<String> {
    snapshot
        .headers()
        .filter(|(name, _)| *name == header::CONTENT_ENCODING)
        .filter_map(|(_, value)| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|coding| coding.trim().to_ascii_lowercase())
        .filter(|coding| !coding.is_empty() && coding != "identity")
        .collect()
}

/// RFC 9110, section 12.5.3: who says nothing accepts anything, and an empty list nothing.
fn accepts(request: &HttpRequest, coding: &str) -> bool {
    if !request.headers().contains_key(header::ACCEPT_ENCODING) {
        return true;
    }
    let Ok(AcceptEncoding(accepted)) = AcceptEncoding::parse(request) else { return false };
    let named = accepted.iter().find(|accepted| match &accepted.item {
        Preference::Any => false,
        Preference::Specific(named) => named.to_string().eq_ignore_ascii_case(coding),
    });
    let any = || accepted.iter().find(|accepted| matches!(accepted.item, Preference::Any));
    named.or_else(any).is_some_and(|accepted| accepted.quality > Quality::ZERO)
}

/// The same answer in plain bytes. It is another representation: what identifies the bytes of the first does not hold.
fn without_coding(snapshot: &ResponseSnapshot, body: Vec<u8>) -> ResponseSnapshot {
    const OF_THE_BYTES: [HeaderName; 5] = [
        header::CONTENT_ENCODING,
        header::CONTENT_LENGTH,
        HeaderName::from_static("content-md5"),
        HeaderName::from_static("content-digest"),
        HeaderName::from_static("repr-digest"),
    ];
    let headers = snapshot.headers().filter(|(name, _)| !OF_THE_BYTES.contains(name));
    headers.fold(ResponseSnapshot::new(snapshot.status()).with_body(body), |plain, (name, value)| {
        let value = if *name == header::ETAG { weak(value) } else { value.clone() };
        plain.with_header(name.clone(), value)
    })
}

fn weak(etag: &HeaderValue) -> HeaderValue {
    if etag.as_bytes().starts_with(b"W/") {
        return etag.clone();
    }
    HeaderValue::from_bytes(&[b"W/", etag.as_bytes()].concat()).unwrap_or_else(|_| etag.clone())
}

/// `None` where the coding is not known, the bytes are none of it, or there is too much in them.
#[cfg(feature = "decode")]
fn decode(coding: &str, body: &[u8], policy: &Policy) -> Option<Vec<u8>> {
    use std::io::Read;

    /// How much more there may be in a body that is kept than its limit: text shrinks to a tenth, a bomb to a thousandth.
    const MOST: u64 = 32;
    let reader: Box<dyn Read + '_> = match coding {
        "gzip" | "x-gzip" => Box::new(flate2::read::MultiGzDecoder::new(body)),
        "deflate" => Box::new(flate2::read::ZlibDecoder::new(body)),
        "br" => Box::new(brotli_decompressor::Decompressor::new(body, 4096)),
        _ => return None,
    };
    let limit = (policy.response_limit as u64).saturating_mul(MOST);
    let mut plain = Vec::new();
    reader.take(limit.saturating_add(1)).read_to_end(&mut plain).ok()?;
    (plain.len() as u64 <= limit).then_some(plain)
}

#[cfg(not(feature = "decode"))]
fn decode(_: &str, _: &[u8], _: &Policy) -> Option<Vec<u8>> {
    None
}
