//! One way to put several values into one SHA-256 digest.
//!
//! Each part carries its length, so that ("ab", "c") and ("a", "bc") differ, and each digest starts
//! with the name of what it is for, so that a scope can never equal a fingerprint.

use sha2::{Digest as _, Sha256};

/// A digest under construction.
pub(crate) struct Digest(Sha256);

impl Digest {
    /// `domain` names what the digest is for, with its version.
    pub(crate) fn new(domain: &str) -> Self {
        let mut digest = Self(Sha256::new());
        digest.part(domain);
        digest
    }

    pub(crate) fn part(&mut self, bytes: impl AsRef<[u8]>) -> &mut Self {
        let bytes = bytes.as_ref();
        self.0.update((bytes.len() as u64).to_be_bytes());
        self.0.update(bytes);
        self
    }

    /// Absent differs from empty.
    pub(crate) fn optional(&mut self, bytes: Option<impl AsRef<[u8]>>) -> &mut Self {
        match bytes {
            None => self.part("absent"),
            Some(bytes) => self.part("present").part(bytes),
        }
    }

    pub(crate) fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(parts: &[&str]) -> [u8; 32] {
        let mut digest = Digest::new("test");
        for part in parts {
            digest.part(part);
        }
        digest.finish()
    }

    #[test]
    fn where_a_part_ends_is_part_of_the_digest() {
        assert_ne!(of(&["ab", "c"]), of(&["a", "bc"]));
        assert_ne!(of(&["ab"]), of(&["ab", ""]));
    }

    #[test]
    fn absent_is_not_empty() {
        let digest = |value: Option<&str>| {
            let mut digest = Digest::new("test");
            digest.optional(value);
            digest.finish()
        };
        assert_ne!(digest(None), digest(Some("")));
        assert_ne!(digest(None), digest(Some("absent")));
    }
}
