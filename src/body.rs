//! The request body, read whole before anything is claimed, and put back.

use std::{
    iter,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Poll, ready},
};

use actix_web::{
    HttpMessage, HttpRequest,
    dev::{Payload, ServiceRequest},
    error::PayloadError,
    http::header,
    web::{Bytes, BytesMut},
};
use futures_util::{
    FutureExt, StreamExt,
    future::{Either, select},
    stream,
};
use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    time::timeout,
};

use crate::{policy::Policy, refusal::Code};

/// Reads the body and puts it back, so that every extractor finds it as it came. `None` where the
/// policy streams it through.
pub(crate) async fn read(request: &mut ServiceRequest, policy: &Policy) -> Result<Option<Bytes>, Code> {
    if policy.streams_body {
        return Ok(None);
    }
    if announced(request).is_some_and(|length| length > policy.request_limit as u64) {
        return Err(Code::BodyTooLarge);
    }
    let payload = request.take_payload();
    let body =
        timeout(policy.body_timeout, collect(payload, policy.request_limit)).await.map_err(|_| Code::BodyTimeout)??;
    let encoded = request.headers().contains_key(header::CONTENT_ENCODING);
    request.set_payload(if encoded { in_pieces(body.clone()) } else { Payload::from(body.clone()) });
    Ok(Some(body))
}

/// Lets `reader` see how a body that is streamed through begins, at most `limit` bytes of it, and puts those
/// back. The stream that it is given ends where the body or the limit does.
pub(crate) async fn peek<T, R>(
    request: &mut ServiceRequest,
    policy: &Policy,
    limit: usize,
    reader: impl FnOnce(UnboundedReceiver<Bytes>) -> R,
) -> Result<T, Code>
where
    R: Future<Output = T>,
{
    let mut payload = request.take_payload();
    let mut seen: Vec<Result<Bytes, PayloadError>> = Vec::new();
    let (pieces, received) = unbounded_channel();
    let feed = async {
        let mut length = 0;
        while length < limit {
            let Some(piece) = payload.next().await else { break };
            if let Ok(bytes) = &piece {
                length += bytes.len();
                // Whoever has read enough has gone.
                let _ = pieces.send(bytes.clone());
            }
            let failed = piece.is_err();
            seen.push(piece);
            if failed {
                break;
            }
        }
        drop(pieces);
    };
    let read = async {
        let (feed, reader) = (pin!(feed), pin!(reader(received)));
        match select(reader, feed).await {
            Either::Left((read, _)) => read,
            Either::Right(((), reader)) => reader.await,
        }
    };
    let read = timeout(policy.body_timeout, read).await.map_err(|_| Code::BodyTimeout);
    request.set_payload(Payload::Stream { payload: Box::pin(stream::iter(seen).chain(payload)) });
    read
}

/// Whether anybody waits for more of a body that is streamed through.
struct Progress(Arc<AtomicBool>);

/// Said when all of the body is there, and when whoever has read it wants no more.
struct End(Arc<AtomicBool>);

impl End {
    fn say(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.say();
    }
}

/// Notes the end of a body that the policy streams through. One that is empty is at its end.
pub(crate) fn follow(request: &mut ServiceRequest, policy: &Policy) {
    if !policy.streams_body {
        return;
    }
    let ended = Arc::new(AtomicBool::new(false));
    let end = End(Arc::clone(&ended));
    request.extensions_mut().insert(Progress(ended));
    let mut left = announced(request);
    let mut payload = request.take_payload();
    let first = match payload.next().now_or_never() {
        Some(None) => return,
        Some(first) => first,
        None => None,
    };
    let mut body = stream::iter(first).chain(payload);
    let followed = stream::poll_fn(move |context| {
        let piece = ready!(body.poll_next_unpin(context));
        if let (Some(left), Some(Ok(piece))) = (&mut left, &piece) {
            *left = left.saturating_sub(piece.len() as u64);
        }
        // Who reads a form stops at its last boundary, and asks for nothing behind it.
        if piece.is_none() || left == Some(0) {
            end.say();
        }
        Poll::Ready(piece)
    });
    request.set_payload(Payload::Stream { payload: Box::pin(followed) });
}

/// Whether somebody may still wait for this body, for as long as the client likes.
pub(crate) fn is_unread(request: &HttpRequest) -> bool {
    request.extensions().get::<Progress>().is_some_and(|Progress(ended)| !ended.load(Ordering::Acquire))
}

/// Whoever decodes a body decodes a piece of it whole before an extractor can count what comes out, and
/// gzip may make a thousandfold of it.
fn in_pieces(mut body: Bytes) -> Payload {
    const PIECE: usize = 4096;
    let piece = move || (!body.is_empty()).then(|| Ok(body.split_to(PIECE.min(body.len()))));
    Payload::Stream { payload: Box::pin(stream::iter(iter::from_fn(piece))) }
}

fn announced(request: &ServiceRequest) -> Option<u64> {
    request.headers().get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

async fn collect(mut payload: Payload, limit: usize) -> Result<Bytes, Code> {
    let mut body = BytesMut::new();
    while let Some(chunk) = payload.next().await {
        let chunk = chunk.map_err(|error| match error {
            PayloadError::Overflow => Code::BodyTooLarge,
            _ => Code::BodyTruncated,
        })?;
        if body.len() + chunk.len() > limit {
            return Err(Code::BodyTooLarge);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}
