//! What ended a transaction, as the server said it.
//!
//! A handler makes of a failed statement whatever it likes, and the driver tells no SQLSTATE. The server has
//! told both the code and the state of the transaction to whoever reads along: connections of [our
//! pool](crate::pool) are read through [`Seen::follow`], and what it has seen stays with the connection, in
//! the place that diesel has for instrumentation. The instrumentation that others have asked for by
//! `set_default_instrumentation` is behind it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use diesel::connection::{Instrumentation, InstrumentationEvent, get_default_instrumentation};
use diesel_async::AsyncConnection;

use super::AsyncPgConnection;

/// What the server calls a failure, in every language.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SqlState([u8; 5]);

impl SqlState {
    /// 40001 or 40P01: another transaction was first, and a new one helps.
    pub(crate) fn is_lost_race(self) -> bool {
        matches!(&self.0, b"40001" | b"40P01")
    }

    /// It was not the statement: the server has run out of something, was told to stop, or cannot read or write.
    fn is_the_servers(self) -> bool {
        matches!(&self.0[..2], b"08" | b"53" | b"57" | b"58")
    }
}

/// What one connection has been told.
#[derive(Debug, Default)]
pub(crate) struct Seen(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    is_open: bool,
    is_over: bool,
    failed: Option<SqlState>,
    aborted_by: Option<SqlState>,
}

impl Seen {
    /// What has ended the transaction, which can only be rolled back now.
    pub(crate) fn aborted_by(&self) -> Option<SqlState> {
        self.told().aborted_by
    }

    /// Whether the server has ended the connection, and said so.
    pub(crate) fn is_over(&self) -> bool {
        self.told().is_over
    }

    /// Whether the last failure was not the statement's: the server has ended the connection, or had not what it
    /// takes.
    pub(crate) fn is_the_servers_fault(&self) -> bool {
        let told = self.told();
        told.is_over || told.failed.is_some_and(SqlState::is_the_servers)
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, tag: u8, body: &[u8]) {
        let mut told = self.told();
        match (tag, body) {
            (ERROR, fields) => {
                let field = |name| fields.split(|byte| *byte == 0).find_map(|field| field.strip_prefix(name));
                told.failed = field(b"C").and_then(|code| code.try_into().ok()).map(SqlState);
                // In no language: the connection ends, with its transaction.
                if matches!(field(b"V"), Some(b"FATAL" | b"PANIC")) {
                    told.is_over = true;
                    return;
                }
                // Whoever sent the statement hears of it now, and of the state that follows only later.
                if told.is_open {
                    told.abort();
                }
            }
            (READY, state) => {
                told.is_open = state != b"I";
                told.aborted_by = told.aborted_by.filter(|_| state == b"E");
                if state == b"E" {
                    told.abort();
                }
            }
            _ => {}
        }
    }
}

impl Told {
    /// By the first failure: what comes after it fails only because of it.
    fn abort(&mut self) {
        self.aborted_by = self.aborted_by.or(self.failed);
    }
}

const ERROR: u8 = b'E';
const READY: u8 = b'Z';
/// The code stands near the begin of an error, and what comes after it may be long.
const ENOUGH: usize = 256;

/// Follows the messages of a server, in whatever pieces they come.
#[derive(Debug)]
pub(crate) struct Follower {
    seen: Arc<Seen>,
    /// Tag and length.
    head: Vec<u8>,
    body: Vec<u8>,
    left: usize,
}

impl Follower {
    pub(crate) fn new(seen: &Arc<Seen>) -> Self {
        Self { seen: Arc::clone(seen), head: Vec::with_capacity(5), body: Vec::new(), left: 0 }
    }

    /// The next bytes that the server has sent.
    pub(crate) fn follow(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let missing = 5 - self.head.len();
            let (piece, rest) = bytes.split_at(bytes.len().min(if missing > 0 { missing } else { self.left }));
            bytes = rest;
            if missing > 0 {
                self.head.extend_from_slice(piece);
            } else {
                self.left -= piece.len();
                if matches!(self.head[0], ERROR | READY) {
                    let room = ENOUGH.saturating_sub(self.body.len()).min(piece.len());
                    self.body.extend_from_slice(&piece[..room]);
                }
            }
            if missing == piece.len() {
                // The length counts itself.
                let length = self.head[1..].iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
                self.left = length.saturating_sub(4);
            }
            if self.head.len() == 5 && self.left == 0 {
                if matches!(self.head[0], ERROR | READY) {
                    self.seen.tell(self.head[0], &self.body);
                }
                self.head.clear();
                self.body.clear();
            }
        }
    }
}

/// What a connection has seen, in the place of its instrumentation.
struct Witness {
    seen: Arc<Seen>,
    behind: Option<Box<dyn Instrumentation>>,
}

impl Instrumentation for Witness {
    fn on_connection_event(&mut self, event: InstrumentationEvent<'_>) {
        if let Some(behind) = &mut self.behind {
            behind.on_connection_event(event);
        }
    }
}

/// From now on what this connection has seen can be asked of it.
pub(crate) fn attach(mut conn: AsyncPgConnection, seen: Arc<Seen>) -> AsyncPgConnection {
    conn.set_instrumentation(Witness { seen, behind: get_default_instrumentation() });
    conn
}

/// What this connection has been told so far, and will be. `None` where nobody reads along.
pub(crate) fn of(conn: &mut AsyncPgConnection) -> Option<Arc<Seen>> {
    let witness = conn.instrumentation().downcast_ref::<Witness>()?;
    Some(Arc::clone(&witness.seen))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(tag: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).unwrap().to_be_bytes();
        [&[tag][..], &length, body].concat()
    }

    #[test]
    fn the_first_failure_ends_a_transaction_in_whatever_pieces_it_comes() {
        let error =
            |code: &str| message(b'E', format!("SERROR\0VERROR\0C{code}\0MC40P01 {}\0\0", "x".repeat(999)).as_bytes());
        let ready = |state: &[u8]| message(b'Z', state);
        let flow = [
            ready(b"T"),
            message(b'2', b""),
            message(b'D', &[0; 300]),
            error("40001"),
            ready(b"E"),
            error("25P02"),
            ready(b"E"),
        ];
        for size in [1, 2, 3, 5, 7, 64, 4096] {
            let seen = Arc::new(Seen::default());
            let mut follower = Follower::new(&seen);
            flow.concat().chunks(size).for_each(|piece| follower.follow(piece));
            assert_eq!(seen.aborted_by(), Some(SqlState(*b"40001")), "by {size}");
            // It is known before the state that follows is.
            follower.follow(&[ready(b"T"), error("40P01")].concat());
            assert_eq!(seen.aborted_by(), Some(SqlState(*b"40P01")));
            // A savepoint was rolled back to; and outside a transaction nothing is left open.
            follower.follow(&ready(b"T"));
            assert_eq!(seen.aborted_by(), None);
            follower.follow(&[error("40001"), ready(b"I")].concat());
            assert_eq!(seen.aborted_by(), None);
            assert!(!seen.is_the_servers_fault());
            // The server ends the connection, and with it the transaction.
            let fatal = message(b'E', b"SFATAL\0VFATAL\0C25P03\0Mtoo long\0\0");
            follower.follow(&[ready(b"T"), fatal].concat());
            assert!(seen.aborted_by().is_none() && seen.is_the_servers_fault());
        }
    }
}
