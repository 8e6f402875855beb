//! Connections that are read along: see [`witness`].
//!
//! The driver opens sockets itself and lets nobody between but TLS. So a connection without TLS is one
//! whose "TLS" does nothing but read along.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready as ok},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::{
    Socket,
    tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream},
};

use crate::postgres::witness::{Follower, Seen};

/// A stream from the server, and who follows it.
pub(super) struct Watched<S> {
    inner: S,
    /// What SCRAM may bind a login to.
    binding: fn(&S) -> ChannelBinding,
    follower: Follower,
}

impl<S> Watched<S> {
    /// Of a stream without TLS.
    pub(super) fn plain(inner: S, seen: &Arc<Seen>) -> Self {
        Self { inner, binding: |_| ChannelBinding::none(), follower: Follower::new(seen) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { inner, follower, .. } = self.get_mut();
        let before = buf.filled().len();
        ok!(Pin::new(inner).poll_read(cx, buf))?;
        follower.follow(&buf.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Watched<S> {
    fn channel_binding(&self) -> ChannelBinding {
        (self.binding)(&self.inner)
    }
}

/// Makes connections without TLS.
#[derive(Clone)]
pub(super) struct Plain(pub(super) Arc<Seen>);

impl MakeTlsConnect<Socket> for Plain {
    type Stream = Watched<Socket>;
    type TlsConnect = Self;
    type Error = Infallible;

    fn make_tls_connect(&mut self, _: &str) -> Result<Self, Infallible> {
        Ok(self.clone())
    }
}

impl TlsConnect<Socket> for Plain {
    type Stream = Watched<Socket>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Stream, Infallible>>;

    fn connect(self, socket: Socket) -> Self::Future {
        ready(Ok(Watched::plain(socket, &self.0)))
    }
}

#[cfg(feature = "rustls")]
mod tls {
    use futures_util::{FutureExt, TryFutureExt, future::BoxFuture};

    use super::*;

    /// Makes connections with the TLS of `T`.
    pub(in super::super) struct Encrypted<T>(pub(in super::super) T, pub(in super::super) Arc<Seen>);

    impl<T> MakeTlsConnect<Socket> for Encrypted<T>
    where
        T: MakeTlsConnect<Socket, TlsConnect: TlsConnect<Socket, Future: Send + 'static>>,
    {
        type Stream = Watched<T::Stream>;
        type TlsConnect = Encrypted<T::TlsConnect>;
        type Error = T::Error;

        fn make_tls_connect(&mut self, domain: &str) -> Result<Self::TlsConnect, T::Error> {
            Ok(Encrypted(self.0.make_tls_connect(domain)?, Arc::clone(&self.1)))
        }
    }

    impl<T: TlsConnect<Socket, Future: Send + 'static>> TlsConnect<Socket> for Encrypted<T> {
        type Stream = Watched<T::Stream>;
        type Error = T::Error;
        type Future = BoxFuture<'static, Result<Self::Stream, T::Error>>;

        fn connect(self, socket: Socket) -> Self::Future {
            let Self(tls, seen) = self;
            let watched =
                move |inner| Watched { inner, binding: T::Stream::channel_binding, follower: Follower::new(&seen) };
            tls.connect(socket).map_ok(watched).boxed()
        }
    }
}

#[cfg(feature = "rustls")]
pub(super) use tls::Encrypted;
