//! The table in figures.

use std::time::Duration;

use super::{Admin, STRETCH, STRETCHES};
use crate::{
    engine::store::Checkout,
    error::Error,
    postgres::inspect::{self, By, Figures},
};

/// What the table holds at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Numbers {
    /// Bytes on disk, indexes and large bodies included.
    pub bytes: u64,
    /// Rows, as the server's statistics estimate them, which lag behind by moments.
    pub live_rows: u64,
    /// Dead row versions that wait for the vacuum, by the same estimate.
    pub dead_rows: u64,
    /// Keys that are outstanding, lapsed ones included: at least so many, see `is_whole`.
    pub outstanding: u64,
    /// Since when the oldest of them has been claimed. `None` where there are none.
    pub oldest_outstanding: Option<Duration>,
    /// Whether `outstanding` and `oldest_outstanding` speak of all rows: they stop at a hundred thousand, of those that
    /// are outstanding with [`OUTSTANDING_INDEX`](crate::migrations::OUTSTANDING_INDEX), of all without it.
    pub is_whole: bool,
    /// For how long the row has been expired that should have been swept first. `None` where there is none. When it
    /// grows old, nobody sweeps. Half-done keys are kept on purpose, see [`sweeper`](crate::sweeper#half-done-keys).
    pub oldest_expired: Option<Duration>,
}

impl Admin {
    /// The table in figures, by one bounded statement: cheap enough for every few seconds.
    ///
    /// # Errors
    ///
    /// Where the store fails.
    pub async fn numbers(&self) -> Result<Numbers, Error> {
        self.numbers_of(i64::from(STRETCH) * i64::from(STRETCHES)).await
    }

    /// The same, by a look at fewer rows: for a page that asks every few seconds.
    pub(crate) async fn numbers_lately(&self) -> Result<Numbers, Error> {
        self.numbers_of(STRETCH.into()).await
    }

    async fn numbers_of(&self, rows: i64) -> Result<Numbers, Error> {
        let count = async |conn: &mut Checkout| {
            let indexed = inspect::is_indexed(conn, By::Outstanding).await?;
            Ok(inspect::figures(conn, indexed, rows).await?)
        };
        let figures: Figures = self.read(count).await?;
        let ago = |ms: Option<i64>| ms.map(|ms| Duration::from_millis(ms.try_into().unwrap_or_default()));
        Ok(Numbers {
            bytes: figures.bytes.unsigned_abs(),
            live_rows: figures.live_rows.unwrap_or_default().unsigned_abs(),
            dead_rows: figures.dead_rows.unwrap_or_default().unsigned_abs(),
            outstanding: figures.outstanding.unsigned_abs(),
            oldest_outstanding: ago(figures.oldest_outstanding_ms),
            is_whole: figures.looked_through < rows,
            oldest_expired: ago(figures.oldest_expired_ms),
        })
    }
}
