//! What a message is known by.

use std::{convert::Infallible, fmt};

use super::InboxError;
use crate::{digest::Digest, scope::redacted};

/// The longest message id, and the longest name of a consumer: 255 bytes, as a key may have.
pub const MAX_MESSAGE_ID_LENGTH: usize = 255;

/// A message: its id, and a fingerprint of its content where the consumer gives it.
///
/// ```
/// use actix_idempotency::inbox::{InvalidMessageId, Message};
///
/// let message = Message::try_from("order-7/paid")?;
/// assert_eq!(message.id(), "order-7/paid");
///
/// // The same id with another content is refused, where both deliveries give it:
/// let message = message.content(br#"{"order":7}"#);
///
/// assert_eq!(Message::try_from("").unwrap_err(), InvalidMessageId::Empty);
/// assert_eq!(Message::try_from("id\0x").unwrap_err(), InvalidMessageId::Control);
/// # Ok::<(), InvalidMessageId>(())
/// ```
///
/// An id is 1 to [`MAX_MESSAGE_ID_LENGTH`] bytes of UTF-8 without control characters, and not only
/// blanks. Ids are equal when they are equal byte for byte. Where the broker has none, make one of what
/// identifies the message (`"{topic}/{partition}/{offset}"`), or take the business number; a digest of
/// the content takes two equal orders for one.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    id: String,
    fingerprint: Option<[u8; 32]>,
}

impl Message {
    /// The id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The bytes that every delivery of this message has in common: a digest of them is kept with the id, and
    /// a delivery with another one is [`InboxError::Mismatch`]. Default: the content is not looked at.
    #[must_use]
    pub fn content(mut self, content: impl AsRef<[u8]>) -> Self {
        let mut digest = Digest::new("actix-idempotency message 1");
        digest.part(content);
        self.fingerprint = Some(digest.finish());
        self
    }

    pub(super) fn fingerprint(&self) -> Option<&[u8]> {
        self.fingerprint.as_ref().map(|digest| &digest[..])
    }
}

impl TryFrom<String> for Message {
    type Error = InvalidMessageId;

    fn try_from(id: String) -> Result<Self, InvalidMessageId> {
        check(&id)?;
        Ok(Self { id, fingerprint: None })
    }
}

impl TryFrom<&str> for Message {
    type Error = InvalidMessageId;

    fn try_from(id: &str) -> Result<Self, InvalidMessageId> {
        check(id)?;
        Ok(Self { id: id.to_owned(), fingerprint: None })
    }
}

impl TryFrom<&String> for Message {
    type Error = InvalidMessageId;

    fn try_from(id: &String) -> Result<Self, InvalidMessageId> {
        id.as_str().try_into()
    }
}

/// For names of consumers, topics and keys too.
pub(crate) fn check(id: &str) -> Result<(), InvalidMessageId> {
    if id.trim().is_empty() {
        Err(InvalidMessageId::Empty)
    } else if id.contains(char::is_control) {
        Err(InvalidMessageId::Control)
    } else if id.len() > MAX_MESSAGE_ID_LENGTH {
        Err(InvalidMessageId::TooLong)
    } else {
        Ok(())
    }
}

/// Its id as a digest, as the keys of requests: an order's number may be one. [`id`](Message::id) tells it.
impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Message").field(&redacted(&self.id)).finish()
    }
}

/// Why a text is no message id. Nothing was written: a message without an id is not deduplicated, and
/// above all not taken for a duplicate of another one without. What becomes of it is the consumer's to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidMessageId {
    /// No character, or only blanks.
    #[error("the message id is empty")]
    Empty,
    /// Longer than [`MAX_MESSAGE_ID_LENGTH`] bytes.
    #[error("the message id is longer than {MAX_MESSAGE_ID_LENGTH} bytes")]
    TooLong,
    /// A NUL, a line feed, or another control character.
    #[error("the message id has a control character")]
    Control,
}

/// So that a [`Message`] is taken where an id is.
impl From<Infallible> for InboxError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}
