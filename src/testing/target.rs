//! Whom a proof asks: a service that runs already, or an `App` that is served for it.

use std::{fmt, future::Future, io, pin::Pin};

use actix_web::{
    App, Error,
    body::MessageBody,
    dev::{ServiceFactory, ServiceRequest, ServiceResponse},
};

use super::served::Served;

type Start = Pin<Box<dyn Future<Output = io::Result<Served>> + Send>>;

/// What [`idempotency_proof`](super::idempotency_proof) can be asked about:
///
/// - `&str` or `String`: the URL of a service that runs, `http://` only. It may be of anything that speaks HTTP;
/// - `Fn() -> App`: what [`HttpServer::new`](actix_web::HttpServer::new) takes. It is served on a free port of 127.0.0.1
///   by two workers, in a thread of its own, for as long as the proof takes.
pub trait Target {
    #[doc(hidden)]
    fn destination(self) -> Destination;
}

/// A [`Target`], whichever it is.
pub struct Destination(pub(super) To);

pub(super) enum To {
    Url(String),
    /// Nothing runs before it is polled.
    App(Start),
}

impl Target for &str {
    fn destination(self) -> Destination {
        Destination(To::Url(self.to_owned()))
    }
}

impl Target for String {
    fn destination(self) -> Destination {
        Destination(To::Url(self))
    }
}

impl<F, T, B> Target for F
where
    F: Fn() -> App<T> + Clone + Send + 'static,
    T: ServiceFactory<ServiceRequest, Config = (), Response = ServiceResponse<B>, Error = Error, InitError = ()>
        + 'static,
    B: MessageBody + 'static,
{
    fn destination(self) -> Destination {
        Destination(To::App(Box::pin(Served::start(self))))
    }
}

impl fmt::Debug for Destination {
    /// Without the URL, which may hold a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            To::Url(_) => "Destination::Url",
            To::App(_) => "Destination::App",
        })
    }
}
