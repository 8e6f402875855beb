//! Half-done keys: an attempt has left something behind, and none has brought it to an end.
//!
//! A key with steps is one, whatever its last attempt has answered, unless that or an operator has said that nothing is
//! left to do by releasing it. Without steps it is one if an attempt has acted (it
//! has derived a key for another service, say) and the last one has ended without an answer of its own: by a failure (500 and
//! more, a panic, an end without a word) or by a COMMIT that was refused (409). Who acts and then answers 402 has
//! decided.

/// Asked of a row `k`, where steps may be read.
pub(crate) const UNFINISHED: &str = "(k.state <> 'completed' AND (k.acted AND coalesce(k.status >= 500 OR \
     k.status = 409, true) OR (k.acted OR k.state = 'outstanding') AND EXISTS (SELECT FROM idempotency_steps AS s \
     WHERE s.id = k.id AND s.seed = k.seed)))";

/// The same where they may not: what is done in steps has acted, but a process that has died could not say so.
pub(crate) const UNFINISHED_WITHOUT_STEPS: &str =
    "(k.state <> 'completed' AND k.acted AND coalesce(k.status >= 500 OR k.status = 409, true))";

/// Of a row that is certainly none: once it has expired, whoever sweeps should have deleted it.
pub(crate) const FINISHED: &str = "(state = 'completed' OR state = 'released' AND NOT acted)";
