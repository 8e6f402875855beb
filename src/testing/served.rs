//! An `App` that is served while it is proved.

use std::{future::Future, io, net::SocketAddr, pin::pin, thread, time::Duration};

use actix_web::{
    App, Error, HttpServer,
    body::MessageBody,
    dev::{ServiceFactory, ServiceRequest, ServiceResponse},
    rt::System,
};
use futures_util::{
    FutureExt,
    future::{Either, select},
};
use tokio::sync::oneshot;

/// What one worker forgets the other must not know: two, as few as show it.
const WORKERS: usize = 2;

/// For the head of a request, on a machine that is busy with other tests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Told to stop when it is dropped, which waits for nothing: so also where a proof panics or is dropped.
pub(super) struct Served {
    pub(super) address: SocketAddr,
    /// Its end, from whatever cause.
    ended: oneshot::Receiver<io::Result<()>>,
    /// Nothing is ever sent: that it is gone is the message.
    running: oneshot::Sender<()>,
}

impl Served {
    /// On a free port of 127.0.0.1, by a thread with a runtime of its own: the caller's may have one thread only, which a
    /// handler could block.
    pub(super) async fn start<F, T, B>(factory: F) -> io::Result<Self>
    where
        F: Fn() -> App<T> + Clone + Send + 'static,
        T: ServiceFactory<ServiceRequest, Config = (), Response = ServiceResponse<B>, Error = Error, InitError = ()>
            + 'static,
        B: MessageBody + 'static,
    {
        let (running, stopped) = oneshot::channel::<()>();
        let (says_address, address) = oneshot::channel();
        let (says_end, ended) = oneshot::channel();
        let serve = move || async move {
            let server = HttpServer::new(factory)
                .workers(WORKERS)
                .client_request_timeout(HEAD_TIMEOUT)
                .disable_signals()
                .bind(("127.0.0.1", 0))?;
            let address = server.addrs()[0];
            let mut server = server.run();
            let handle = server.handle();
            // The first poll starts the workers and waits until each has made its `App`: where that fails, nobody is sent
            // to an address that refuses.
            if let Some(end) = (&mut server).now_or_never() {
                return end;
            }
            // If nobody waits for it any more, `stopped` says so too.
            let _ = says_address.send(address);
            actix_web::rt::spawn(async move {
                let _ = stopped.await;
                // All that was asked has been answered or given up: whatever still runs is not waited for.
                handle.stop(false).await;
            });
            server.await
        };
        thread::Builder::new().name("idempotency-proof".to_owned()).spawn(move || {
            let _ = says_end.send(System::new().block_on(serve()));
        })?;
        match address.await {
            Ok(address) => Ok(Self { address, ended, running }),
            Err(_) => Err(end(ended.await)),
        }
    }

    /// Serves until this is done, and has stopped when it returns.
    ///
    /// # Errors
    ///
    /// If it ends by itself before.
    pub(super) async fn during<T>(mut self, work: impl Future<Output = T>) -> io::Result<T> {
        let done = match select(pin!(work), &mut self.ended).await {
            Either::Left((done, _)) => done,
            Either::Right((ended, _)) => return Err(end(ended)),
        };
        drop(self.running);
        let _ = self.ended.await;
        Ok(done)
    }
}

fn end(result: Result<io::Result<()>, oneshot::error::RecvError>) -> io::Error {
    match result {
        Ok(Err(error)) => error,
        Ok(Ok(())) => io::Error::other("it ended by itself"),
        Err(_) => io::Error::other("its thread has panicked"),
    }
}
