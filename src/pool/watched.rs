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
    follower: Follower,
}

impl<S> Watched<S> {
    pub(super) fn new(inner: S, seen: &Arc<Seen>) -> Self {
        Self { inner, follower: Follower::new(seen) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { inner, follower } = self.get_mut();
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

/// What SCRAM may bind a login to.
trait Binds {
    fn binding(&self) -> ChannelBinding;
}

impl Binds for Socket {
    fn binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: Binds + AsyncRead + AsyncWrite + Unpin> TlsStream for Watched<S> {
    fn channel_binding(&self) -> ChannelBinding {
        self.inner.binding()
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
        ready(Ok(Watched::new(socket, &self.0)))
    }
}

#[cfg(feature = "rustls")]
mod tls {
    use futures_util::{FutureExt, TryFutureExt, future::BoxFuture};
    use tokio_postgres_rustls::MakeRustlsConnect;

    use super::*;

    type Rustls = <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream;
    type RustlsConnect = <MakeRustlsConnect as MakeTlsConnect<Socket>>::TlsConnect;

    impl Binds for Rustls {
        fn binding(&self) -> ChannelBinding {
            self.channel_binding()
        }
    }

    /// Makes connections with TLS.
    pub(in super::super) struct Encrypted<T>(pub(in super::super) T, pub(in super::super) Arc<Seen>);

    impl MakeTlsConnect<Socket> for Encrypted<MakeRustlsConnect> {
        type Stream = Watched<Rustls>;
        type TlsConnect = Encrypted<RustlsConnect>;
        type Error = <MakeRustlsConnect as MakeTlsConnect<Socket>>::Error;

        fn make_tls_connect(&mut self, domain: &str) -> Result<Self::TlsConnect, Self::Error> {
            let tls = MakeTlsConnect::<Socket>::make_tls_connect(&mut self.0, domain)?;
            Ok(Encrypted(tls, Arc::clone(&self.1)))
        }
    }

    impl TlsConnect<Socket> for Encrypted<RustlsConnect> {
        type Stream = Watched<Rustls>;
        type Error = <RustlsConnect as TlsConnect<Socket>>::Error;
        type Future = BoxFuture<'static, Result<Self::Stream, Self::Error>>;

        fn connect(self, socket: Socket) -> Self::Future {
            let Self(tls, seen) = self;
            tls.connect(socket).map_ok(move |stream| Watched::new(stream, &seen)).boxed()
        }
    }
}

#[cfg(feature = "rustls")]
pub(super) use tls::Encrypted;
