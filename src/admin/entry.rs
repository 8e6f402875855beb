//! A key as people who run the service see it.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use crate::{
    digest::Digest,
    postgres::{
        inspect::{Pin, Row},
        steps::DoneStep,
    },
    scope::{KeyId, redacted},
};

/// What a key is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Somebody runs it, and the lease is live.
    Outstanding,
    /// Somebody ran it, and the lease has ended without an answer. A retry takes it over.
    Lapsed,
    /// An attempt has given it back. A retry runs.
    Released,
    /// The answer is stored. A retry gets it.
    Completed,
    /// Its retention is over, whatever it was before. The next request is a first one.
    Expired,
}

impl State {
    /// In the order of a life.
    pub(crate) const ALL: [Self; 5] = [Self::Outstanding, Self::Lapsed, Self::Released, Self::Completed, Self::Expired];

    /// In the words of the table: `outstanding`, `lapsed`, `released`, `completed`, `expired`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Outstanding => "outstanding",
            Self::Lapsed => "lapsed",
            Self::Released => "released",
            Self::Completed => "completed",
            Self::Expired => "expired",
        }
    }

    /// `None` for what is none of these words.
    pub(crate) fn named(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == text)
    }
}

/// The row of a key, as it was when it was looked at: by the database's clock, without header values and body.
///
/// What the table shows of key, tenant and principal is there for people who look; `Debug` shows no key, and tenant
/// and principal as digests.
#[derive(Clone)]
#[non_exhaustive]
pub struct Entry {
    pub(super) id: KeyId,
    pub(super) owner: Vec<u8>,
    /// As it is stored.
    pub(super) stored: String,
    /// `http` for keys of requests, `once` for those of plain functions, `token` for form tokens.
    pub domain: String,
    /// As the policy's closure named it, or a digest where that is too long.
    pub tenant: Option<String>,
    /// The same; by default a digest of the credential. `None`: the anonymous one.
    pub principal: Option<String>,
    /// `POST /orders`, or the name that the policy gives.
    pub resource: String,
    /// What the client sent.
    pub key: String,
    /// By what the logs know the request that claimed it first ([`Policy::request_id`](crate::Policy::request_id)); a
    /// retry leaves it as it is. `None` where that brought none.
    pub request_id: Option<String>,
    /// What it is doing.
    pub state: State,
    /// Which attempt has it, or had it last. The first is 1.
    pub attempt: u32,
    /// When the first attempt claimed it.
    pub created_at: SystemTime,
    /// When the lease ends, or ended. `None`: it is held without end, as
    /// [`OnFailure`](crate::OnFailure) may ask for.
    pub leased_until: Option<SystemTime>,
    /// When the answer was stored.
    pub completed_at: Option<SystemTime>,
    /// When it was looked at: this and all times here are those of the database's clock.
    pub seen_at: SystemTime,
    /// What is left of the lease. `None` where nobody has one, or it has no end.
    pub lease_left: Option<Duration>,
    /// What is left until it expires; zero where it has expired. `None`: it never does.
    pub expires_in: Option<Duration>,
    /// Of the stored answer, or of the attempt that gave the key back.
    pub status: Option<u16>,
    /// Whether an attempt that gave the key back has done what a ROLLBACK does not undo, or was sure of its success:
    /// what it has done is unknown, whatever its status. See [`Admin::steps`](super::Admin::steps).
    pub acted: bool,
    /// Those of the stored answer, in their order.
    pub header_names: Vec<String>,
    /// Bytes of the stored body. `None` where there is none.
    pub body_size: Option<u64>,
    /// Whether the body was too large to keep.
    pub body_omitted: bool,
}

impl Entry {
    /// `None` where the row was not written by this crate.
    pub(super) fn of((pin, shown, life, kept): Row) -> Option<Self> {
        let Pin { id, owner, state: stored } = pin;
        let state = State::named(&life.state)?;
        Some(Self {
            id: KeyId(id.try_into().ok()?),
            owner,
            stored,
            domain: shown.domain,
            tenant: shown.tenant,
            principal: shown.principal,
            resource: shown.resource,
            key: shown.key,
            request_id: shown.request_id,
            state,
            attempt: life.attempt.unsigned_abs(),
            created_at: life.created_at,
            leased_until: life.leased_until,
            completed_at: life.completed_at,
            seen_at: life.seen_at,
            lease_left: life.lease_left_ms.filter(|_| state == State::Outstanding).map(left),
            expires_in: life.expires_in_ms.map(left),
            status: kept.status.map(i16::cast_unsigned),
            acted: kept.acted,
            header_names: kept.header_names.unwrap_or_default(),
            body_size: kept.body_size.map(|bytes| bytes.unsigned_abs().into()),
            body_omitted: kept.body_omitted,
        })
    }

    /// The id of the row, in hex. Its first twelve digits are the `id` of log lines.
    #[must_use]
    pub fn id(&self) -> String {
        hex::encode(self.id.0)
    }

    /// What a page that shows this attempt may say of its owner: another one for every claim, completion and release,
    /// and nothing that a write could name.
    pub(crate) fn seen(&self) -> String {
        let mut digest = Digest::new("actix-idempotency seen 1");
        digest.part(self.id.0).part(&self.owner).part(&self.stored).part(self.attempt.to_be_bytes());
        hex::encode(&digest.finish()[..16])
    }

    /// Whether nobody has written the row since `seen`, but for a lease that was renewed.
    pub(super) fn is_as(&self, seen: &Self) -> bool {
        self.id == seen.id && self.owner == seen.owner && self.stored == seen.stored
    }
}

/// Something that an attempt has done, by [`IdemKey::step`](crate::IdemKey::step). Its result is not told.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Step {
    /// As the handler calls it.
    pub name: String,
    /// By the database's clock.
    pub done_at: SystemTime,
    /// Bytes of its result. `None` where that was too large to keep.
    pub result_size: Option<u64>,
}

impl Step {
    pub(super) fn of(row: DoneStep) -> Self {
        let result_size = row.result_size.map(|bytes| bytes.unsigned_abs().into());
        Self { name: row.name, done_at: row.done_at, result_size }
    }
}

fn left(ms: i64) -> Duration {
    Duration::from_millis(ms.try_into().unwrap_or_default())
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("id", &self.id)
            .field("domain", &self.domain)
            .field("tenant", &self.tenant.as_deref().map(redacted))
            .field("principal", &self.principal.as_deref().map(redacted))
            .field("resource", &self.resource)
            .field("state", &self.state)
            .field("attempt", &self.attempt)
            .field("request_id", &self.request_id)
            .field("lease_left", &self.lease_left)
            .field("expires_in", &self.expires_in)
            .field("status", &self.status)
            .field("acted", &self.acted)
            .field("body_size", &self.body_size)
            .finish_non_exhaustive()
    }
}
