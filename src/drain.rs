//! A graceful shutdown that waits for what still runs.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};
use tokio::time::timeout;

use crate::engine::Engine;

/// How long running requests may take to end: 30 seconds, what actix itself gives its workers.
pub const DEFAULT_DRAIN_DEADLINE: Duration = Duration::from_secs(30);

/// The future for `HttpServer::shutdown_signal`. A handler whose client has gone runs in a task of its
/// own, which actix does not wait for; this does.
///
/// It waits for SIGTERM or SIGINT. From then on new keys get 503 `shutting-down`, while stored answers
/// are still replayed; it is ready when the running requests have ended, or at the deadline. What
/// runs longer is cut off: its lease lapses, and a retry takes over.
///
/// ```no_run
/// # use actix_idempotency::Idempotency;
/// # use actix_web::{App, HttpServer};
/// # async fn example(idempotency: Idempotency) -> std::io::Result<()> {
/// HttpServer::new(|| App::new())
///     .shutdown_signal(idempotency.drain())
///     .bind(("127.0.0.1", 8080))?
///     .run()
///     .await
/// # }
/// ```
#[must_use = "give it to HttpServer::shutdown_signal"]
pub struct Drain {
    engine: Option<Arc<Engine>>,
    signal: Option<BoxFuture<'static, ()>>,
    deadline: Duration,
    running: Option<BoxFuture<'static, ()>>,
}

impl Drain {
    pub(crate) fn new(engine: Option<Arc<Engine>>) -> Self {
        Self { engine, signal: None, deadline: DEFAULT_DRAIN_DEADLINE, running: None }
    }

    /// Drains on this signal instead of SIGTERM and SIGINT.
    pub fn on(mut self, signal: impl Future<Output = ()> + Send + 'static) -> Self {
        self.signal = Some(signal.boxed());
        self
    }

    /// How long running requests may take to end. Default: [`DEFAULT_DRAIN_DEADLINE`].
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}

impl Future for Drain {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        let Self { engine, signal, deadline, running } = this;
        let running = running.get_or_insert_with(|| {
            let signal = signal.take().unwrap_or_else(|| asked_to_stop().boxed());
            drain(engine.take(), signal, *deadline).boxed()
        });
        running.poll_unpin(cx)
    }
}

impl fmt::Debug for Drain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drain").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

async fn drain(engine: Option<Arc<Engine>>, signal: BoxFuture<'static, ()>, deadline: Duration) {
    signal.await;
    if let Some(engine) = engine {
        engine.drain();
        let _ = timeout(deadline, engine.tasks.wait()).await;
    }
}

async fn asked_to_stop() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}
