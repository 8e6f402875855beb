//! An event, as it is delivered.

use std::fmt;

use serde::de::DeserializeOwned;
use uuid::Uuid;

use crate::postgres::outbox::Claimed;

/// An event of the outbox.
///
/// `Debug` shows no payload.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// The same on every delivery, and of no other event: the message id for the [`Inbox`](crate::Inbox) of
    /// whoever gets it.
    pub id: Uuid,
    /// What it is about.
    pub topic: String,
    /// Events with the same topic and key are delivered one after the other.
    pub key: Option<String>,
    /// As it was published.
    pub payload: Vec<u8>,
    /// Which delivery this is, from 1 on.
    pub attempt: u32,
}

impl Event {
    /// The payload as JSON.
    ///
    /// # Errors
    ///
    /// Where it is not JSON, or not that of a `T`.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_slice(&self.payload)
    }
}

impl From<Claimed> for Event {
    fn from(claimed: Claimed) -> Self {
        Self {
            id: id_of(&claimed.id),
            topic: claimed.topic,
            key: claimed.key,
            payload: claimed.payload,
            attempt: u32::try_from(claimed.attempts).unwrap_or_default(),
        }
    }
}

/// What `uuid_send` makes of a uuid, which is always sixteen bytes.
pub(super) fn id_of(bytes: &[u8]) -> Uuid {
    Uuid::from_slice(bytes).unwrap_or_default()
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("id", &self.id)
            .field("topic", &self.topic)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}
