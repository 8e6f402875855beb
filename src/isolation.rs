//! How a transaction that a handler writes in is isolated from others.

/// The isolation level of [`IdemTx`](crate::IdemTx).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Isolation {
    /// What the server, the database or the role says (`default_transaction_isolation`). The default.
    #[default]
    Default,
    /// Each statement sees what was committed before it.
    ReadCommitted,
    /// All statements see what was committed before the first; a row that somebody else has changed since
    /// then cannot be changed: 409 `serialization`.
    RepeatableRead,
    /// As if transactions ran one after the other; else 409 `serialization`.
    Serializable,
}

impl Isolation {
    pub(crate) fn sql(self) -> &'static str {
        match self {
            Self::Default => "",
            Self::ReadCommitted => "ISOLATION LEVEL READ COMMITTED",
            Self::RepeatableRead => "ISOLATION LEVEL REPEATABLE READ",
            Self::Serializable => "ISOLATION LEVEL SERIALIZABLE",
        }
    }

    /// `default` is what the server says.
    pub(crate) fn has_one_snapshot(self, default: &str) -> bool {
        match self {
            Self::Default => matches!(default, "repeatable read" | "serializable"),
            Self::ReadCommitted => false,
            Self::RepeatableRead | Self::Serializable => true,
        }
    }
}
