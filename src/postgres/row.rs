//! A row of the keys, read whole: its columns, and what follows from its times.

use bytes::Bytes;
use diesel::{
    Queryable, deserialize,
    pg::{Pg, data_types::PgTimestamp},
    sql_types::{Array, Binary, Bool, Integer, Nullable, SmallInt, Text, Timestamptz},
};

/// A row as a claim sees it.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) recipe: Vec<u8>,
    pub(crate) recipe_version: i16,
    pub(crate) state: String,
    pub(crate) owner: Vec<u8>,
    pub(crate) attempt: i32,
    pub(crate) seed: Vec<u8>,
    /// What is left of the lease of an outstanding row; 0 or less: it has lapsed.
    pub(crate) lease_left_ms: i64,
    pub(crate) expired: bool,
    pub(crate) status: Option<i16>,
    /// An attempt that gave the key back has done what a ROLLBACK does not undo.
    pub(crate) acted: bool,
    pub(crate) header_names: Option<Vec<String>>,
    pub(crate) header_values: Option<Vec<Bytes>>,
    /// One buffer, however many copies of the row there are.
    pub(crate) body: Option<Bytes>,
    pub(crate) snapshot_version: Option<i16>,
    /// `None`: never.
    pub(crate) expires_in_ms: Option<i64>,
    /// Of the request that claimed the key first.
    pub(crate) request_id: Option<String>,
}

/// Owns the rows of keys that are held: nobody does. Whoever claims one has an owner of its own again.
pub(crate) const NOBODY: [u8; 16] = *b"held, by nobody.";

impl Row {
    /// Outstanding, and nobody runs it.
    pub(crate) fn is_held(&self) -> bool {
        self.state == "outstanding" && self.owner == NOBODY
    }
}

/// The columns of a [`Row`], with the database's time behind them: what follows from times is cheaper to
/// compute here than in a statement.
pub(crate) type RowColumns = (
    Binary,
    Binary,
    SmallInt,
    Text,
    Binary,
    Integer,
    Binary,
    Nullable<SmallInt>,
    Bool,
    Nullable<Array<Text>>,
    Nullable<Array<Binary>>,
    Nullable<Binary>,
    Nullable<SmallInt>,
    Nullable<Text>,
    (Timestamptz, Timestamptz, Nullable<Timestamptz>, Nullable<Timestamptz>, Timestamptz),
);

pub(crate) const ROW_COLUMNS: &str = "k.fingerprint, k.recipe, k.recipe_version, k.state, k.owner, k.attempt, k.seed, \
     k.status, k.acted, k.header_names, k.header_values, k.body, k.snapshot_version, k.request_id, k.created_at, k.leased_until, \
     k.completed_at, k.expires_at, clock_timestamp()";

impl Row {
    /// Whether an attempt has acted and none has come to an end of its own, as in [`unfinished`](super::unfinished); of
    /// steps a row says nothing.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.state != "completed" && self.acted && self.status.is_none_or(|status| status >= 500 || status == 409)
    }
}

impl Queryable<RowColumns, Pg> for Row {
    #[rustfmt::skip]
    type Row = (
        Vec<u8>, Vec<u8>, i16, String, Vec<u8>, i32, Vec<u8>, Option<i16>, bool, Option<Vec<String>>,
        Option<Vec<Vec<u8>>>, Option<Vec<u8>>, Option<i16>, Option<String>,
        (PgTimestamp, PgTimestamp, Option<PgTimestamp>, Option<PgTimestamp>, PgTimestamp),
    );

    fn build(row: Self::Row) -> deserialize::Result<Self> {
        #[rustfmt::skip]
        let (
            fingerprint, recipe, recipe_version, state, owner, attempt, seed, status, acted, header_names, header_values,
            body, snapshot_version, request_id, (created_at, leased_until, completed_at, expires_at, now),
        ) = row;
        // Microseconds; infinity is the largest number there is, and stays so.
        let left = |until: i64| until.saturating_sub(now.0);
        let retention = expires_at.map(|expires_at| expires_at.0.saturating_sub(created_at.0));
        let ended = completed_at.unwrap_or(leased_until).0;
        Ok(Self {
            lease_left_ms: if leased_until.0 == i64::MAX { i64::MAX } else { ceil_ms(left(leased_until.0)) },
            expired: retention.is_some_and(|retention| left(ended.saturating_add(retention)) <= 0),
            expires_in_ms: completed_at
                .zip(retention)
                .map(|(completed_at, retention)| ceil_ms(left(completed_at.0.saturating_add(retention)))),
            fingerprint,
            recipe,
            recipe_version,
            state,
            owner,
            attempt,
            seed,
            status,
            acted,
            header_names,
            header_values: header_values.map(|values| values.into_iter().map(Bytes::from).collect()),
            body: body.map(Bytes::from),
            snapshot_version,
            request_id,
        })
    }
}

fn ceil_ms(us: i64) -> i64 {
    us.div_euclid(1000) + i64::from(us.rem_euclid(1000) > 0)
}
