//! All rows of a principal go.

use super::{Admin, STRETCH};
use crate::{
    engine::store::Checkout,
    error::Error,
    postgres::{
        inspect::{self, By},
        intervene::{self, Whose},
        lapsed::{self, Stretch},
    },
    scope::readable,
    telemetry,
};

/// How many rows go in one statement: few enough that none holds its locks for long.
pub const ERASE_BATCH: u32 = 1000;

/// What has gone, and what has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Erased {
    /// So many keys are gone, with their answers and steps.
    pub gone: u64,
    /// So many are there still: their requests run, or somebody wrote them at that moment. Erase again later.
    pub left: u64,
}

impl Admin {
    /// Deletes every key of this principal, with its answers and steps, in small batches, each in a transaction of its
    /// own: those of requests and of plain functions, of exactly this tenant, `None` being those without one. A retry
    /// of any of them is a first request. A row whose lease is live stays, and is counted.
    ///
    /// The principal is what the policy's closure returns, or the digest that the table shows. With
    /// [`PRINCIPAL_INDEX`](crate::migrations::PRINCIPAL_INDEX) only its own rows are read; without it all of the
    /// table is walked.
    ///
    /// # Errors
    ///
    /// Where the store fails; what went before stays gone.
    pub async fn erase(&self, tenant: Option<&str>, principal: &str) -> Result<Erased, Error> {
        let (tenant, principal) = (tenant.map(readable), readable(principal));
        let whose = Whose { tenant: tenant.as_deref(), principal: &principal };
        let mut erased = Erased::default();
        let outcome = self.erase_all(whose, &mut erased).await;
        // Also where it was broken off: what is gone is gone.
        telemetry::erased(&principal, erased.gone, erased.left);
        outcome.map(|()| erased)
    }

    async fn erase_all(&self, whose: Whose<'_>, erased: &mut Erased) -> Result<(), Error> {
        if self.ask(async |conn| Ok(inspect::is_indexed(conn, By::Principal).await?)).await? {
            return self.erase_in(whose, &Stretch::whole(), erased).await;
        }
        let mut after = Vec::new();
        while let Some(to) = self.ask(async |conn| Ok(lapsed::end(conn, &after, STRETCH.into()).await?)).await? {
            let stretch = Stretch { after, to };
            self.erase_in(whose, &stretch, erased).await?;
            after = stretch.to;
        }
        Ok(())
    }

    async fn erase_in(&self, whose: Whose<'_>, stretch: &Stretch, erased: &mut Erased) -> Result<(), Error> {
        let batch = async |conn: &mut Checkout| Ok(intervene::erase(conn, whose, stretch, ERASE_BATCH.into()).await?);
        loop {
            let gone = self.ask(batch).await?;
            erased.gone += gone as u64;
            if gone < ERASE_BATCH as usize {
                break;
            }
        }
        let left = self.ask(async |conn| Ok(intervene::left(conn, whose, stretch).await?)).await?;
        erased.left += left.unsigned_abs();
        Ok(())
    }
}
