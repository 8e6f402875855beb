//! Makes claims durable that were committed without waiting for the disk: one commit that does wait
//! flushes them all, for all who ask at the same time.

use std::sync::Weak;

use tokio::sync::{mpsc, oneshot};

use super::{
    Engine,
    store::{Line, in_time},
};
use crate::{
    error::{Error, ErrorKind},
    policy::{DEFAULT_STORE_TIMEOUT, Policy},
    postgres::server,
    telemetry,
};

/// Told when what was committed before it was sent is on disk.
pub(crate) type Wish = oneshot::Sender<()>;

impl Engine {
    /// Ready when everything that was committed before this call survives a crash of the database.
    pub(crate) async fn flush(&self, policy: &Policy) -> Result<(), Error> {
        let (wish, granted) = oneshot::channel();
        let failed = || Error::new(ErrorKind::Connection, "what was committed may not be on disk yet");
        self.flushes.send(wish).map_err(|_| failed())?;
        in_time(policy.store_timeout, async { granted.await.map_err(|_| failed()) }).await
    }
}

/// Runs on the background thread until the engine goes.
pub(crate) async fn keep_flushing(engine: Weak<Engine>, mut wishes: mpsc::UnboundedReceiver<Wish>) {
    let mut line = Line::default();
    while let Some(first) = wishes.recv().await {
        let mut granted = vec![first];
        while let Ok(another) = wishes.try_recv() {
            granted.push(another);
        }
        let Some(engine) = engine.upgrade() else { return };
        let mut flushed = flush(&engine, &mut line).await;
        if flushed.as_ref().is_err_and(Error::is_transient) {
            // The connection may have died since it was last used.
            line.hang_up();
            flushed = flush(&engine, &mut line).await;
        }
        match flushed {
            // Whoever no longer waits does not mind.
            Ok(()) => granted.into_iter().for_each(|wish| {
                let _ = wish.send(());
            }),
            Err(error) => {
                line.hang_up();
                telemetry::store_failed("claims could not be made durable", &error);
            }
        }
    }
}

async fn flush(engine: &Engine, line: &mut Line) -> Result<(), Error> {
    let flushed = async { Ok(server::flush(line.get(&engine.store).await?).await?) };
    in_time(DEFAULT_STORE_TIMEOUT, flushed).await
}
