//! For the people who run the service: what is going on, what is stuck, and how to get it going again.
//!
//! [`Admin`] looks at keys and their steps, lists those that are outstanding, searches, releases, expires, erases and counts. It is made
//! for scripts and consoles, behind whatever decides there who may do so: a program that has an `Admin` may see every
//! key, and read every stored answer.
//!
//! Looking writes nothing and waits for no lock. An action is for the row that was seen: where somebody has claimed,
//! completed or released it meanwhile, it changes nothing and says so. Each is an event of its own in
//! [`telemetry`](crate::telemetry).
//!
//! # Deployment caveat
//!
//! Keys under [`Policy::atomic`](crate::Policy::atomic) have no row while they run, and nothing to release: their lock
//! ends with their connection.

mod act;
mod entry;
mod erase;
mod numbers;
mod search;

use std::{fmt, sync::Arc};

pub use self::{
    act::Acted,
    entry::{Entry, State, Step},
    erase::{ERASE_BATCH, Erased},
    numbers::Numbers,
    search::{DEFAULT_LIMIT, Found, Rest, STRETCH, STRETCHES, Search},
};
use crate::{
    engine::{
        Engine,
        store::{Checkout, in_time},
    },
    error::Error,
    idempotency::Idempotency,
    key::IdempotencyKey,
    policy::DEFAULT_STORE_TIMEOUT,
    postgres::{PgPool, inspect, keys, steps},
    scope::{KeyId, Scope},
    snapshot::ResponseSnapshot,
};

/// How many rows a prefix of an id may bring.
pub(crate) const MATCHES: u32 = 10;

/// Looks at keys, and acts on them.
///
/// ```no_run
/// use actix_idempotency::{Admin, Scope, admin::Acted, pool};
///
/// # async fn example() -> Result<(), actix_idempotency::Error> {
/// let admin = Admin::postgres(pool("postgres://localhost/shop")?);
/// for stuck in admin.outstanding().await?.entries {
///     println!("{} {} {}: {}", stuck.id(), stuck.resource, stuck.key, stuck.state.as_str());
/// }
/// if let Some(seen) = admin.look(&Scope::request("POST /orders").for_principal("alice"), "a1").await? {
///     match admin.release(&seen).await? {
///         Acted::Done => println!("the next retry runs"),
///         Acted::Live { lease_left } => println!("somebody runs it: force_release would take it away ({lease_left:?})"),
///         other => println!("{other:?}"),
///     }
/// }
/// # Ok(())
/// # }
/// ```
///
/// Beside a service, on its engine, which wakes the requests that wait for a released key at once; those of other
/// processes find out by themselves within moments:
///
/// ```no_run
/// use actix_idempotency::{Admin, Idempotency};
///
/// # fn example(idempotency: &Idempotency) {
/// let admin = Admin::of(idempotency);
/// # }
/// ```
///
/// Every statement has 5 s, connection included.
#[derive(Clone)]
pub struct Admin {
    engine: Arc<Engine>,
}

impl Admin {
    /// On this pool.
    ///
    /// # Panics
    ///
    /// If the operating system refuses a thread, which the first engine of a process starts.
    #[must_use]
    pub fn postgres(pool: PgPool) -> Self {
        Self { engine: Engine::new(pool) }
    }

    /// On the engine of a middleware.
    ///
    /// # Panics
    ///
    /// For [`Idempotency::from_app_data`], which has none.
    #[track_caller]
    #[must_use]
    pub fn of(idempotency: &Idempotency) -> Self {
        let engine = idempotency.engine().expect("Admin::of: Idempotency::from_app_data() has no engine of its own");
        Self { engine }
    }

    /// The row of a key that came in the header, or to [`Once`](crate::Once). `None` where there is none, and for a text
    /// that is no key. Keys from other sources are found by [`search`](Self::search).
    ///
    /// # Errors
    ///
    /// Where the store fails.
    pub async fn look(&self, scope: &Scope, key: &str) -> Result<Option<Entry>, Error> {
        match IdempotencyKey::try_from(key) {
            Ok(key) => self.entry(scope.id("", &key)).await,
            Err(_) => Ok(None),
        }
    }

    /// The rows whose id begins with these hex digits, such as the twelve of a log line; ten at most. None for a text
    /// that no id begins with.
    ///
    /// # Errors
    ///
    /// Where the store fails.
    pub async fn find(&self, prefix: &str) -> Result<Vec<Entry>, Error> {
        let end = |digit: &str| hex::decode(format!("{prefix}{}", digit.repeat(64_usize.saturating_sub(prefix.len()))));
        let (Ok(first), Ok(last), false) = (end("0"), end("f"), prefix.is_empty() || prefix.len() > 64) else {
            return Ok(Vec::new());
        };
        let ids = self.read(async |conn| Ok(inspect::in_range(conn, &first, &last, MATCHES.into()).await?)).await?;
        let mut entries = self.entries(&ids).await?;
        entries.sort_by_key(|entry| entry.id.0);
        Ok(entries)
    }

    /// The keys that are outstanding, lapsed ones included, the oldest first: as
    /// [`search`](Self::search) for [`Search::outstanding`], with its bounds.
    ///
    /// # Errors
    ///
    /// Where the store fails.
    pub async fn outstanding(&self) -> Result<Found, Error> {
        self.search(&Search::new().outstanding()).await
    }

    /// The stored answer, with its header values and its body. `None` where there is none, or another than was seen.
    ///
    /// # Errors
    ///
    /// Where the store fails.
    pub async fn answer(&self, seen: &Entry) -> Result<Option<ResponseSnapshot>, Error> {
        let row = self.read(async |conn| Ok(keys::look(conn, &seen.id.0).await?)).await?;
        Ok(row.filter(|row| row.owner == seen.owner && row.state == "completed").and_then(|row| {
            let (names, values) = row.header_names.zip(row.header_values)?;
            ResponseSnapshot::restore(row.status?, &names, values, row.body)
        }))
    }

    /// What the attempts at this key have done, step by step, the first first. `None` where there is no table of
    /// steps, or this role may not read it.
    ///
    /// # Errors
    ///
    /// Where the store fails.
    pub async fn steps(&self, seen: &Entry) -> Result<Option<Vec<Step>>, Error> {
        let look = async |conn: &mut Checkout| {
            if !steps::may_be_read(conn).await? {
                return Ok(None);
            }
            Ok(Some(steps::of_key(conn, &seen.id.0).await?))
        };
        let rows = self.read(look).await?;
        Ok(rows.map(|rows| rows.into_iter().map(Step::of).collect()))
    }

    async fn entry(&self, id: KeyId) -> Result<Option<Entry>, Error> {
        Ok(self.entries(&[id.0.to_vec()]).await?.pop())
    }

    async fn entries(&self, ids: &[Vec<u8>]) -> Result<Vec<Entry>, Error> {
        let ids: Vec<&[u8]> = ids.iter().map(Vec::as_slice).collect();
        let rows = self.read(async |conn| Ok(inspect::rows(conn, &ids).await?)).await?;
        Ok(rows.into_iter().filter_map(Entry::of).collect())
    }

    /// The row with this id, in hex. `None` where there is none, and for a text that is no id.
    pub(crate) async fn row(&self, id: &str) -> Result<Option<Entry>, Error> {
        match hex::decode(id).ok().and_then(|id| id.try_into().ok()) {
            Some(id) => self.entry(KeyId(id)).await,
            None => Ok(None),
        }
    }

    /// With a connection of the pool, within the deadline. Dropped before its end, the connection is closed.
    async fn ask<T>(&self, work: impl AsyncFnOnce(&mut Checkout) -> Result<T, Error>) -> Result<T, Error> {
        let asked = async {
            let mut conn = self.engine.store.connection().await?;
            let answer = work(&mut conn).await?;
            conn.give_back();
            Ok(answer)
        };
        in_time(DEFAULT_STORE_TIMEOUT, asked).await
    }

    /// The same for what only looks.
    async fn read<T>(&self, work: impl AsyncFnOnce(&mut Checkout) -> Result<T, Error>) -> Result<T, Error> {
        let look = async |conn: &mut Checkout| {
            inspect::begin(conn, DEFAULT_STORE_TIMEOUT).await?;
            let answer = work(conn).await?;
            inspect::end(conn).await?;
            Ok(answer)
        };
        self.ask(look).await
    }
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin").finish_non_exhaustive()
    }
}
