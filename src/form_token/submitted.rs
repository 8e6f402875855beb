//! The tokens that a request carries: in its header, and in the field of its form.

use std::future::{Ready, ready};

use actix_web::{
    FromRequest, HttpMessage, HttpRequest,
    dev::{Payload, ServiceRequest},
    http::header,
    web::Bytes,
};
use futures_util::{Stream, stream};
use multer::{Constraints, Field, Multipart, SizeLimit, parse_boundary};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::{
    body, fingerprint,
    header::FORM_TOKEN,
    policy::Policy,
    refusal::{Code, Refusal},
    token::{FORM_TOKEN_FIELD, FormToken, InvalidToken},
};

/// The most of a streamed body that is looked at: a token is 124 characters, and what stands around it in a
/// multipart form is not much more.
const MOST_OF_A_STREAM: usize = 16 * 1024;

/// The longest field that is read: several tokens, in case somebody joins them by commas.
const LONGEST_FIELD: u64 = 4 * 1024;

/// Every token that the request has, in the order header, form. The body is read, unless the policy streams it
/// through: of that only the first field is looked at.
pub(crate) async fn tokens(
    request: &mut ServiceRequest,
    policy: &Policy,
    body: &mut Option<Option<Bytes>>,
) -> Result<Vec<String>, Refusal> {
    let mut tokens = in_header(request.request())?;
    let form = Form::of(request.request());
    if form.is_some() && body.is_none() && !policy.streams_body {
        *body = Some(body::read(request, policy).await?);
    }
    let found = match (form, body) {
        (None, _) => Ok(Vec::new()),
        // It would have to be decoded first, which is the handler's business.
        (Some(_), _) if fingerprint::is_encoded(request.request()) => Err(InvalidToken::Form),
        (Some(Form::Urlencoded), Some(Some(body))) => in_urlencoded(body),
        (Some(Form::Multipart(boundary)), Some(Some(body))) => {
            let whole = stream::iter([Ok::<_, InvalidToken>(body.clone())]);
            in_multipart(whole, &boundary, usize::MAX).await
        }
        (Some(Form::Multipart(boundary)), _) => {
            let first = |received| async move { in_multipart(as_stream(received), &boundary, 1).await };
            body::peek(request, policy, MOST_OF_A_STREAM, first).await?
        }
        (Some(Form::Urlencoded), _) => Ok(Vec::new()),
    };
    match found {
        Ok(found) => tokens.extend(found),
        // The handler may say what is wrong with the form; the token is there.
        Err(_) if !tokens.is_empty() => {}
        Err(invalid) => return Err(invalid.into()),
    }
    Ok(tokens)
}

impl FromRequest for FormToken {
    type Error = Refusal;
    type Future = Ready<Result<Self, Refusal>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(request.extensions().get::<Self>().cloned().ok_or(Code::TokenMissing.into()))
    }
}

enum Form {
    Urlencoded,
    Multipart(String),
}

impl Form {
    fn of(request: &HttpRequest) -> Option<Self> {
        if fingerprint::is_form(request) {
            return Some(Self::Urlencoded);
        }
        let content_type = request.headers().get(header::CONTENT_TYPE)?.to_str().ok()?;
        parse_boundary(content_type).ok().map(Self::Multipart)
    }
}

/// Gateways join header lines by commas.
fn split(text: &str) -> impl Iterator<Item = String> {
    text.split(',').map(|token| token.trim_matches([' ', '\t']).to_owned())
}

fn in_header(request: &HttpRequest) -> Result<Vec<String>, InvalidToken> {
    let mut tokens = Vec::new();
    for line in request.headers().get_all(FORM_TOKEN) {
        tokens.extend(split(line.to_str().map_err(|_| InvalidToken::Unreadable)?));
    }
    Ok(tokens)
}

fn in_urlencoded(body: &[u8]) -> Result<Vec<String>, InvalidToken> {
    let pairs: Vec<(String, String)> = serde_urlencoded::from_bytes(body).map_err(|_| InvalidToken::Form)?;
    Ok(pairs.iter().filter(|(name, _)| name == FORM_TOKEN_FIELD).flat_map(|(_, value)| split(value)).collect())
}

/// In the first so many fields of the form.
async fn in_multipart<E>(
    body: impl Stream<Item = Result<Bytes, E>> + Send + 'static,
    boundary: &str,
    fields: usize,
) -> Result<Vec<String>, InvalidToken>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let limits = SizeLimit::new().for_field(FORM_TOKEN_FIELD, LONGEST_FIELD);
    let mut form = Multipart::with_constraints(body, boundary, Constraints::new().size_limit(limits));
    let mut tokens = Vec::new();
    for _ in 0..fields {
        let Some(field) = form.next_field().await.map_err(|_| InvalidToken::Form)? else { break };
        if field.name() == Some(FORM_TOKEN_FIELD) {
            tokens.extend(split(&text(field).await?));
        }
    }
    Ok(tokens)
}

async fn text(field: Field<'_>) -> Result<String, InvalidToken> {
    let bytes = field.bytes().await.map_err(|_| InvalidToken::Form)?;
    String::from_utf8(bytes.into()).map_err(|_| InvalidToken::Unreadable)
}

fn as_stream(mut received: UnboundedReceiver<Bytes>) -> impl Stream<Item = Result<Bytes, InvalidToken>> + Send {
    stream::poll_fn(move |context| received.poll_recv(context).map(|piece| piece.map(Ok)))
}
