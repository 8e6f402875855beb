//! Those who hold a connection for as long as a handler runs.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    error::{Error, ErrorKind},
    postgres::PgPool,
};

/// All but one of the pool's connections may be held by handlers, so that claims, and handlers that take
/// a connection beside their transaction, find one; the only one of a pool of one.
pub(crate) struct Holders {
    /// Kept, so that no other pool gets its address.
    pool: PgPool,
    permits: Arc<Semaphore>,
    bound: Mutex<Bound>,
}

#[derive(Debug)]
struct Bound {
    limit: usize,
    /// Permits that were taken away while somebody had them.
    owed: usize,
}

impl Holders {
    /// One for each pool, however many engines share it.
    pub(crate) fn of(pool: &PgPool) -> Arc<Self> {
        static ALL: Mutex<Vec<Weak<Holders>>> = Mutex::new(Vec::new());
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|holders| holders.strong_count() > 0);
        if let Some(known) = all.iter().filter_map(Weak::upgrade).find(|known| address(&known.pool) == address(pool)) {
            return known;
        }
        let limit = (pool.config().max_size as usize).saturating_sub(1).max(1);
        let (permits, bound) = (Arc::new(Semaphore::new(limit)), Mutex::new(Bound { limit, owed: 0 }));
        let holders = Arc::new(Self { pool: pool.clone(), permits, bound });
        all.push(Arc::downgrade(&holders));
        holders
    }

    /// Those who have a permit keep it; where there are fewer from now on, theirs are not given again.
    pub(crate) fn set_limit(&self, new: usize) {
        let mut bound = self.bound();
        if let Some(more) = new.checked_sub(bound.limit) {
            let kept = more.min(bound.owed);
            bound.owed -= kept;
            self.permits.add_permits(more - kept);
        } else {
            let fewer = bound.limit - new;
            bound.owed += fewer - self.permits.forget_permits(fewer);
        }
        bound.limit = new;
    }

    pub(crate) async fn join(self: &Arc<Self>) -> Result<Permit, Error> {
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit =
            permit.map_err(|error| Error::new(ErrorKind::Connection, "no transaction can be opened").because(error))?;
        Ok(Permit { permit: Some(permit), holders: Arc::clone(self) })
    }

    fn bound(&self) -> MutexGuard<'_, Bound> {
        self.bound.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What clones of a pool share: bb8 tells it in what it prints, and nowhere else.
fn address(pool: &PgPool) -> String {
    format!("{pool:?}")
}

impl fmt::Debug for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holders").field("bound", &self.bound).finish_non_exhaustive()
    }
}

/// The right to hold a connection.
#[derive(Debug)]
pub(crate) struct Permit {
    /// `None` only while it is dropped.
    permit: Option<OwnedSemaphorePermit>,
    holders: Arc<Holders>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut bound = self.holders.bound();
        let Some(permit) = self.permit.take() else { return };
        if bound.owed > 0 {
            bound.owed -= 1;
            permit.forget();
        }
        // Otherwise it goes back here, before anybody counts again.
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> PgPool {
        crate::pool::pool("postgres://localhost/nowhere").unwrap()
    }

    fn free(holders: &Holders) -> usize {
        holders.permits.available_permits()
    }

    /// Should this fail, bb8 prints something else by now.
    #[tokio::test]
    async fn clones_of_a_pool_share_their_holders_and_two_pools_do_not() {
        let (one, other) = (pool(), pool());
        let holders = Holders::of(&one);
        assert!(Arc::ptr_eq(&holders, &Holders::of(&one.clone())));
        assert!(!Arc::ptr_eq(&holders, &Holders::of(&other)));
        // Whoever comes after it has gone begins anew, at whatever address.
        holders.set_limit(1);
        drop((holders, one));
        assert_eq!(free(&Holders::of(&pool())), 9);
    }

    #[tokio::test]
    async fn a_limit_that_is_lowered_while_all_are_out_counts_once_they_come_back() {
        let pool = pool();
        let holders = Holders::of(&pool);
        let mut out = Vec::new();
        while free(&holders) > 0 {
            out.push(holders.join().await.unwrap());
        }
        holders.set_limit(2);
        out.truncate(4);
        assert_eq!(free(&holders), 0);
        // Half-way up again: of the permits that come back, one more is given.
        holders.set_limit(3);
        out.clear();
        assert_eq!(free(&holders), 3);
        holders.set_limit(5);
        assert_eq!(free(&holders), 5);
        holders.set_limit(1);
        assert_eq!(free(&holders), 1);
    }
}
