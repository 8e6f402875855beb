//! Makes claims durable that were committed without waiting for the disk: one commit that does wait
//! flushes them all, for all who ask at the same time. Then it looks whether they are still there: a
//! database that has crashed meanwhile has come back without them.

use std::{collections::HashSet, sync::Weak};

use tokio::sync::{mpsc, oneshot};

use super::{
    Engine,
    leases::Owner,
    store::{Line, in_time},
};
use crate::{
    error::{Error, ErrorKind},
    policy::{DEFAULT_STORE_TIMEOUT, Policy},
    postgres::{keys, server},
    scope::KeyId,
    telemetry,
};

/// How often a statement is sent whose connection has died since it was last used, or that lost a race.
const TRIES: u32 = 3;

/// A claim that is to be on disk, and whom to tell whether it is.
pub(crate) struct Wish {
    id: KeyId,
    owner: Owner,
    is_there: oneshot::Sender<bool>,
}

impl Engine {
    /// Ready when this claim survives a crash of the database. `false`: it is gone, or somebody else has
    /// the key.
    pub(crate) async fn flush(&self, id: KeyId, owner: Owner, policy: &Policy) -> Result<bool, Error> {
        let (is_there, told) = oneshot::channel();
        let failed = || Error::new(ErrorKind::Connection, "what was committed may not be on disk yet");
        self.flushes.send(Wish { id, owner, is_there }).map_err(|_| failed())?;
        in_time(policy.store_timeout, async { told.await.map_err(|_| failed()) }).await
    }
}

/// Runs on the background thread until the engine goes.
pub(crate) async fn keep_flushing(engine: Weak<Engine>, mut wishes: mpsc::UnboundedReceiver<Wish>) {
    let mut line = Line::default();
    while let Some(first) = wishes.recv().await {
        let mut all = vec![first];
        while let Ok(another) = wishes.try_recv() {
            all.push(another);
        }
        let Some(engine) = engine.upgrade() else { return };
        let mut tries = 1;
        let flushed = loop {
            match flush(&engine, &mut line, &all).await {
                Err(error) if error.is_transient() && tries < TRIES => {
                    tries += 1;
                    line.hang_up();
                }
                flushed => break flushed,
            }
        };
        match flushed {
            // Whoever no longer waits does not mind.
            Ok(there) => all.into_iter().for_each(|Wish { id, owner, is_there }| {
                let _ = is_there.send(there.contains(&(id.0.to_vec(), owner.to_vec())));
            }),
            Err(error) => {
                line.hang_up();
                telemetry::store_failed("claims could not be made durable", &error);
            }
        }
    }
}

/// Those of the claims that are there. In this order, and on one connection: what the flush has brought to the disk can
/// no longer be lost, and what was lost before it is not there.
async fn flush(engine: &Engine, line: &mut Line, all: &[Wish]) -> Result<HashSet<(Vec<u8>, Vec<u8>)>, Error> {
    let (ids, owners): (Vec<&[u8]>, Vec<&[u8]>) = all.iter().map(|wish| (&wish.id.0[..], &wish.owner[..])).unzip();
    let flushed = async {
        let conn = line.get(&engine.store).await?;
        server::flush(conn).await?;
        Ok(keys::still_outstanding(conn, &ids, &owners).await?.into_iter().collect())
    };
    in_time(DEFAULT_STORE_TIMEOUT, flushed).await
}
