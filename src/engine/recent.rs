//! Which keys this process has met lately: a hint that looking is cheaper than trying to insert.
//!
//! A wrong hint costs a statement, never an answer. So it is a table of fixed size without locks, in
//! which a newer key simply overwrites an older one.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::scope::KeyId;

/// 64 KiB; a power of two.
const SLOTS: usize = 8192;

pub(crate) struct Recent(Box<[AtomicU64]>);

impl Recent {
    pub(crate) fn new() -> Self {
        Self((0..SLOTS).map(|_| AtomicU64::new(0)).collect())
    }

    pub(crate) fn remember(&self, id: &KeyId) {
        let (slot, mark) = self.place(id);
        slot.store(mark, Ordering::Relaxed);
    }

    pub(crate) fn knows(&self, id: &KeyId) -> bool {
        let (slot, mark) = self.place(id);
        slot.load(Ordering::Relaxed) == mark
    }

    /// The id is a digest: its bytes are as good as random.
    fn place(&self, id: &KeyId) -> (&AtomicU64, u64) {
        let (slot, mark) = id.0.split_at(8);
        let number = |bytes: &[u8]| bytes.iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        (&self.0[number(slot) as usize % SLOTS], number(mark))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_known_until_another_takes_its_place() {
        let recent = Recent::new();
        let (a, b) = (KeyId([1; 32]), KeyId([2; 32]));
        let mut same_slot_as_a = [1; 32];
        same_slot_as_a[31] = 7;
        same_slot_as_a[8] = 7;
        recent.remember(&a);
        assert!(recent.knows(&a) && !recent.knows(&b));
        recent.remember(&KeyId(same_slot_as_a));
        assert!(!recent.knows(&a));
    }
}
