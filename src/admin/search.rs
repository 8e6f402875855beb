//! Which keys are looked for, and how far.

use std::{
    fmt,
    num::NonZeroU32,
    ops::RangeInclusive,
    time::{SystemTime, UNIX_EPOCH},
};

use super::{Admin, Entry, State};
use crate::{
    engine::{ending::millis, store::Checkout},
    error::Error,
    postgres::inspect::{self, By, Wanted},
    scope::{readable, redacted},
};

/// How many keys a search brings at most: what fits on a page.
pub const DEFAULT_LIMIT: u32 = 100;
/// How many rows one statement looks through.
pub const STRETCH: u32 = 10_000;
/// How many stretches one call looks through: a hundred thousand rows.
pub const STRETCHES: u32 = 10;

/// Which keys are wanted: all that fit everything that is said.
///
/// ```
/// use actix_idempotency::admin::Search;
///
/// let all = Search::new();
/// let hers = Search::new().principal("alice").resource("POST /orders").limit(20.try_into().unwrap());
/// ```
///
/// `Debug` shows no key, and tenant and principal as digests.
#[derive(Clone)]
pub struct Search {
    domain: Option<String>,
    key: Option<String>,
    tenant: Option<String>,
    no_tenant: bool,
    principal: Option<String>,
    resource: Option<String>,
    outstanding: bool,
    state: Option<State>,
    status: Option<RangeInclusive<u16>>,
    from: Option<SystemTime>,
    before: Option<SystemTime>,
    limit: NonZeroU32,
    after: Option<Rest>,
}

/// Where a search has stopped.
#[derive(Clone, PartialEq, Eq)]
pub struct Rest(Vec<u8>);

impl Rest {
    /// For a link that goes on from here.
    pub(crate) fn to_hex(&self) -> String {
        hex::encode(&self.0)
    }

    /// `None` for what was never one.
    pub(crate) fn of_hex(text: &str) -> Option<Self> {
        hex::decode(text).ok().filter(|id| id.len() == 32).map(Self)
    }
}

impl fmt::Debug for Rest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rest")
    }
}

/// What a search has found.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Found {
    /// The newest first; of a search for those that are outstanding, the oldest.
    pub entries: Vec<Entry>,
    /// Whether every row was looked through that could fit.
    pub is_whole: bool,
    /// Whether more were found than [`Search::limit`] allows. They are not here, and no [`rest`](Self::rest) leads to
    /// them: say more of what is looked for, or allow more.
    pub is_cut: bool,
    /// What to go on with ([`Search::after`]), where the table was walked and has more rows.
    pub rest: Option<Rest>,
}

impl Default for Search {
    fn default() -> Self {
        Self {
            domain: None,
            key: None,
            tenant: None,
            no_tenant: false,
            principal: None,
            resource: None,
            outstanding: false,
            state: None,
            status: None,
            from: None,
            before: None,
            limit: NonZeroU32::new(DEFAULT_LIMIT).unwrap_or(NonZeroU32::MIN),
            after: None,
        }
    }
}

impl Search {
    /// For every key there is.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// `http` for keys of requests, `once` for those of plain functions, `token` for form tokens.
    #[must_use]
    pub fn domain(self, domain: &str) -> Self {
        Self { domain: Some(readable(domain)), ..self }
    }

    /// With this text, whoever's it is.
    #[must_use]
    pub fn key(self, key: &str) -> Self {
        Self { key: Some(key.into()), ..self }
    }

    /// Of this tenant.
    #[must_use]
    pub fn tenant(self, tenant: &str) -> Self {
        Self { tenant: Some(readable(tenant)), ..self }
    }

    /// Only those that have no tenant. Default: whatever tenant they have.
    #[must_use]
    pub fn without_tenant(self) -> Self {
        Self { no_tenant: true, ..self }
    }

    /// Of this principal: what the policy's closure returns, or the digest that the table shows.
    #[must_use]
    pub fn principal(self, principal: &str) -> Self {
        Self { principal: Some(readable(principal)), ..self }
    }

    /// Of this resource: `POST /orders`, or the name that the policy gives.
    #[must_use]
    pub fn resource(self, resource: &str) -> Self {
        Self { resource: Some(readable(resource)), ..self }
    }

    /// Only those that are outstanding, lapsed ones included; the oldest first.
    #[must_use]
    pub fn outstanding(self) -> Self {
        Self { outstanding: true, ..self }
    }

    /// Only those that are in this state now.
    #[must_use]
    pub fn state(self, state: State) -> Self {
        Self { state: Some(state), ..self }
    }

    /// Only those with such a status, of the stored answer, or of the attempt that gave the key back: `500..=599` beside
    /// [`State::Released`] are attempts that have failed.
    #[must_use]
    pub fn status(self, status: RangeInclusive<u16>) -> Self {
        Self { status: Some(status), ..self }
    }

    /// Only those that were first claimed at this time or later.
    #[must_use]
    pub fn claimed_from(self, at: SystemTime) -> Self {
        Self { from: Some(at), ..self }
    }

    /// Only those that were first claimed before this time.
    #[must_use]
    pub fn claimed_before(self, at: SystemTime) -> Self {
        Self { before: Some(at), ..self }
    }

    /// How many at most. Default: [`DEFAULT_LIMIT`].
    #[must_use]
    pub fn limit(self, keys: NonZeroU32) -> Self {
        Self { limit: keys, ..self }
    }

    /// Goes on where another search has stopped.
    #[must_use]
    pub fn after(self, rest: Rest) -> Self {
        Self { after: Some(rest), ..self }
    }

    fn wanted(&self) -> Wanted<'_> {
        Wanted {
            domain: self.domain.as_deref(),
            key: self.key.as_deref(),
            tenant: self.tenant.as_deref(),
            no_tenant: self.no_tenant,
            principal: self.principal.as_deref(),
            resource: self.resource.as_deref(),
            outstanding: self.outstanding,
            state: self.state.map(State::as_str),
            status: self.status.as_ref().map(|status| (i32::from(*status.start()), i32::from(*status.end()))),
            from_ms: self.from.map(unix_ms),
            before_ms: self.before.map(unix_ms),
            // One more tells that there are more.
            limit: i64::from(self.limit.get()) + 1,
        }
    }

    /// By an index, if there is one that helps. Whoever goes on walks.
    async fn way(&self, conn: &mut Checkout) -> Result<By, Error> {
        if self.after.is_some() {
            return Ok(By::Id);
        }
        let is_stored_outstanding = matches!(self.state, Some(State::Outstanding | State::Lapsed));
        for (helps, by) in
            [(self.outstanding || is_stored_outstanding, By::Outstanding), (self.principal.is_some(), By::Principal)]
        {
            if helps && inspect::is_indexed(conn, by).await? {
                return Ok(by);
            }
        }
        Ok(By::Id)
    }

    /// Whether some were cut off.
    fn sort_and_cut(&self, entries: &mut Vec<Entry>) -> bool {
        entries.sort_by_key(|entry| (entry.created_at, entry.id.0));
        if !self.outstanding {
            entries.reverse();
        }
        let (found, limit) = (entries.len(), self.limit.get() as usize);
        entries.truncate(limit);
        found > limit
    }
}

impl fmt::Debug for Search {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Search")
            .field("domain", &self.domain)
            .field("key", &self.key.as_ref().map(|key| format!("{} bytes", key.len())))
            .field("tenant", &self.tenant.as_deref().map(redacted))
            .field("no_tenant", &self.no_tenant)
            .field("principal", &self.principal.as_deref().map(redacted))
            .field("resource", &self.resource)
            .field("outstanding", &self.outstanding)
            .field("state", &self.state)
            .field("status", &self.status)
            .field("from", &self.from)
            .field("before", &self.before)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// Milliseconds since 1970; before that nothing was claimed.
fn unix_ms(at: SystemTime) -> i64 {
    at.duration_since(UNIX_EPOCH).map(millis).unwrap_or_default()
}

/// What has been looked through.
#[derive(Default)]
struct Walked {
    ids: Vec<Vec<u8>>,
    is_whole: bool,
    rest: Option<Rest>,
}

impl Admin {
    /// The keys that fit, in a bounded look: with [`OUTSTANDING_INDEX`](crate::migrations::OUTSTANDING_INDEX) through
    /// the [`STRETCH`] outstanding keys whose leases end first, with
    /// [`PRINCIPAL_INDEX`](crate::migrations::PRINCIPAL_INDEX) through as many keys of the principal, and
    /// otherwise through [`STRETCHES`] times as many rows of the table in the order of their ids, which is no order in
    /// time. [`Found`] says whether that was all, and how to go on. At READ COMMITTED whatever the default is: who looks
    /// fails nobody's transaction.
    ///
    /// # Errors
    ///
    /// Where the store fails.
    pub async fn search(&self, search: &Search) -> Result<Found, Error> {
        let by = self.read(async |conn| search.way(conn).await).await?;
        self.found(search, by).await
    }

    /// Those that are outstanding, in one statement for a page that asks every few seconds: by
    /// [`OUTSTANDING_INDEX`](crate::migrations::OUTSTANDING_INDEX) if it is there, and otherwise those claimed within the
    /// last hour among the [`STRETCH`] keys that expire last. Whether the index was there is told, too.
    pub(crate) async fn outstanding_lately(&self) -> Result<(Found, bool), Error> {
        let is_indexed = self.read(async |conn| Ok(inspect::is_indexed(conn, By::Outstanding).await?)).await?;
        let by = if is_indexed { By::Outstanding } else { By::Lately };
        Ok((self.found(&Search::new().outstanding(), by).await?, is_indexed))
    }

    async fn found(&self, search: &Search, by: By) -> Result<Found, Error> {
        let walked = self.walk(search, by).await?;
        let mut entries = self.entries(&walked.ids).await?;
        // One that has ended since it was found is not outstanding any more, nor in another state.
        entries.retain(|entry| !search.outstanding || entry.stored == "outstanding");
        entries.retain(|entry| search.state.is_none_or(|state| entry.state == state));
        let is_cut = search.sort_and_cut(&mut entries);
        Ok(Found { entries, is_whole: walked.is_whole, is_cut, rest: walked.rest })
    }

    async fn walk(&self, search: &Search, by: By) -> Result<Walked, Error> {
        let mut after = search.after.as_ref().map(|Rest(after)| after.clone()).unwrap_or_default();
        let mut walked = Walked::default();
        for _ in 0..STRETCHES {
            let look =
                async |conn: &mut Checkout| Ok(inspect::find(conn, by, &after, STRETCH.into(), search.wanted()).await?);
            let looked = self.read(look).await?;
            walked.ids.extend(looked.ids);
            walked.is_whole = looked.rows < STRETCH.into();
            if walked.is_whole || by != By::Id {
                return Ok(walked);
            }
            after = looked.end.unwrap_or_default();
        }
        walked.rest = Some(Rest(after));
        Ok(walked)
    }
}
