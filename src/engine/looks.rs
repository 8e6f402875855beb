//! Looks at the rows of keys that this process has met: one statement for all who ask at the same time.
//!
//! So a crowd of retries costs a few statements instead of one each, and needs nothing of the pool. It
//! is a shortcut and nothing rests on it: whom it does not serve in good time goes on to claim, looks
//! for itself, and says what failed.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};

use tokio::{
    sync::{mpsc, oneshot},
    time::{sleep, timeout},
};

use super::{
    Engine,
    store::{Line, in_time},
};
use crate::{
    error::{Error, ErrorKind},
    policy::{DEFAULT_STORE_TIMEOUT, Policy},
    postgres::{keys, row::Row},
    scope::KeyId,
    telemetry,
};

/// Keys that a statement asks for at most, since it brings all their answers at once: 16 MiB at the
/// default limit of an answer.
const MOST: usize = 16;

/// How many may wait for the next look. Where more come than it can serve, the pool serves the rest.
const ROOM: usize = 256;

/// How long somebody waits for the look: far longer than it takes where the store is well.
const GOOD_TIME: Duration = Duration::from_millis(500);

/// How long nobody looks for others after the store could not be reached.
const REST: Duration = Duration::from_secs(1);

/// After so long without a retry the connection is closed.
const IDLE: Duration = Duration::from_secs(60);

/// Where to ask for a look.
pub(crate) struct Looks {
    asking: mpsc::Sender<Asked>,
    /// From then on it is no use to wait for the statement that is under way.
    late_from: Mutex<Option<Instant>>,
}

/// A key, and whom to tell its row.
pub(crate) struct Asked {
    id: KeyId,
    reply: Reply,
}

type Reply = oneshot::Sender<Arc<Row>>;

impl Looks {
    pub(crate) fn new() -> (Self, mpsc::Receiver<Asked>) {
        let (asking, asked) = mpsc::channel(ROOM);
        (Self { asking, late_from: Mutex::default() }, asked)
    }

    /// Whether the statement hangs, perhaps with its connection, or has just failed.
    fn are_late(&self) -> bool {
        let late_from = self.late_from.lock().unwrap_or_else(PoisonError::into_inner);
        late_from.is_some_and(|late| late <= Instant::now())
    }

    fn set_late_from(&self, late: Option<Instant>) {
        *self.late_from.lock().unwrap_or_else(PoisonError::into_inner) = late;
    }
}

impl Engine {
    /// The row as it is now. `None` where there is none, and where nobody could say in good time.
    pub(crate) async fn look_with_others(&self, id: KeyId, policy: &Policy) -> Option<Row> {
        if self.looks.are_late() {
            return None;
        }
        let (reply, row) = oneshot::channel();
        self.looks.asking.try_send(Asked { id, reply }).ok()?;
        // A small part of the deadline that the claim has after it.
        let good_time = GOOD_TIME.min(policy.store_timeout / 10);
        let row = timeout(good_time, row).await.ok()?.ok()?;
        Some(Arc::unwrap_or_clone(row))
    }
}

/// Runs on the background thread until the engine goes. One statement at a time: while it is under way,
/// those gather whom the next one serves.
pub(crate) async fn look_for_all(engine: Weak<Engine>, mut asked: mpsc::Receiver<Asked>) {
    let mut line = Line::default();
    let mut taken = Vec::with_capacity(ROOM);
    loop {
        match timeout(IDLE, asked.recv_many(&mut taken, ROOM)).await {
            Ok(0) => return,
            Ok(_) => {}
            Err(_) => {
                line.hang_up();
                continue;
            }
        }
        let reached = {
            let Some(engine) = engine.upgrade() else { return };
            serve(&engine, &mut line, taken.drain(..)).await
        };
        if let Err(error) = reached {
            telemetry::store_failed("the keys of retries could not be looked at for all", &error);
            line.hang_up();
            sleep(REST).await;
            engine.upgrade().iter().for_each(|engine| engine.looks.set_late_from(None));
        }
    }
}

/// Fails where the store cannot be reached. Any other failure is one that whoever claims will meet too.
async fn serve(engine: &Engine, line: &mut Line, taken: impl Iterator<Item = Asked>) -> Result<(), Error> {
    let mut replies: HashMap<[u8; 32], Vec<Reply>> = HashMap::new();
    // Whoever has hung up, or has waited too long, need not be told.
    for Asked { id, reply } in taken.filter(|asked| !asked.reply.is_closed()) {
        replies.entry(id.0).or_default().push(reply);
    }
    let ids: Vec<[u8; 32]> = replies.keys().copied().collect();
    for ids in ids.chunks(MOST) {
        engine.looks.set_late_from(Some(Instant::now() + GOOD_TIME));
        let mut rows = look(engine, line, ids).await;
        if rows.as_ref().is_err_and(|error| error.kind() == ErrorKind::Connection) {
            // It may have died since it was last used.
            line.hang_up();
            rows = look(engine, line, ids).await;
        }
        let unreached = |error: &Error| matches!(error.kind(), ErrorKind::Connection | ErrorKind::Timeout);
        engine.looks.set_late_from(rows.as_ref().is_err_and(unreached).then(Instant::now));
        match rows {
            Ok(rows) => rows.into_iter().for_each(|(id, row)| tell(replies.remove(&id[..]).unwrap_or_default(), row)),
            Err(error) if unreached(&error) => return Err(error),
            Err(_) => {}
        }
    }
    Ok(())
}

async fn look(engine: &Engine, line: &mut Line, ids: &[[u8; 32]]) -> Result<Vec<(Vec<u8>, Row)>, Error> {
    let look = async {
        let conn = line.get(&engine.store).await?;
        Ok(match ids {
            [id] => keys::look(conn, id).await?.map(|row| (id.to_vec(), row)).into_iter().collect(),
            _ => keys::look_at_all(conn, &ids.iter().map(|id| &id[..]).collect::<Vec<_>>()).await?,
        })
    };
    in_time(DEFAULT_STORE_TIMEOUT, look).await
}

/// All of them share the buffers of its headers and body, and whoever is the last to take it copies nothing at all.
fn tell(mut replies: Vec<Reply>, row: Row) {
    let row = Arc::new(row);
    let last = replies.pop();
    for reply in replies {
        let _ = reply.send(Arc::clone(&row));
    }
    if let Some(last) = last {
        let _ = last.send(row);
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::told::Stored;

    #[tokio::test]
    async fn all_who_are_told_a_row_send_the_same_buffer() {
        let row = Row {
            fingerprint: vec![0; 32],
            recipe: Vec::new(),
            recipe_version: 1,
            state: "completed".into(),
            owner: vec![0; 16],
            attempt: 1,
            seed: vec![0; 32],
            lease_left_ms: 0,
            expired: false,
            status: Some(200),
            acted: false,
            header_names: Some(vec!["x".into()]),
            header_values: Some(vec![Bytes::from(vec![b'x'; 1024])]),
            body: Some(Bytes::from(vec![b'y'; 1024 * 1024])),
            snapshot_version: Some(1),
            expires_in_ms: None,
            request_id: None,
        };
        let body = row.body.clone().unwrap();
        let (replies, told): (Vec<_>, Vec<_>) = (0..ROOM).map(|_| oneshot::channel()).unzip();
        tell(replies, row);
        let mut answers = Vec::new();
        for row in told {
            answers.push(Stored::of(Arc::unwrap_or_clone(row.await.unwrap())).unwrap().snapshot);
        }
        assert!(answers.iter().all(|answer| answer.body().unwrap().as_ptr() == body.as_ptr()));
        let values = |answer: &crate::snapshot::ResponseSnapshot| {
            answer.headers().map(|(_, value)| value.as_bytes().as_ptr()).collect::<Vec<_>>()
        };
        assert!(answers.iter().all(|answer| values(answer) == values(&answers[0])));
    }
}
