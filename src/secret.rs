//! A key that only the server knows.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The shortest secret: as long as what it makes, so that guessing it is no easier (RFC 2104, section 3).
const MIN_LENGTH: usize = 32;

/// A key for HMAC-SHA-256. `Debug` does not show it.
#[derive(Clone)]
pub struct Secret(Hmac<Sha256>);

impl Secret {
    /// # Panics
    ///
    /// Below 32 bytes.
    #[track_caller]
    #[must_use]
    pub fn new(bytes: impl AsRef<[u8]>) -> Self {
        let bytes = bytes.as_ref();
        assert!(bytes.len() >= MIN_LENGTH, "Secret::new: a secret has at least 32 random bytes");
        Self(Hmac::new_from_slice(bytes).expect("HMAC takes keys of any length"))
    }

    pub(crate) fn sign(&self, message: &[u8]) -> [u8; 32] {
        self.0.clone().chain_update(message).finalize().into_bytes().into()
    }

    /// Whether it has made this signature, or the first bytes of it. It takes as long for a wrong one as for a
    /// right one.
    pub(crate) fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        self.0.clone().chain_update(message).verify_truncated_left(signature).is_ok()
    }

    /// Tells it from others, and nothing more.
    pub(crate) fn id(&self) -> [u8; 32] {
        self.sign(b"actix-idempotency secret id 1")
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}
