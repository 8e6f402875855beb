//! [`Admin`]: crate::Admin
//! [`Completer`]: crate::Completer
//! [`Drain`]: crate::Drain
//! [`check`]: crate::check
//! [`Gauges`]: crate::Gauges
//! [`IdemKey`]: crate::IdemKey
//! [`IdemTx`]: crate::IdemTx
//! [`Inspector`]: crate::Inspector
//! [`Once`]: crate::Once
//! [`Policy`]: crate::Policy
//! [`Sweeper`]: crate::Sweeper
//! [`inbox`]: crate::inbox
//! [`form_token`]: crate::form_token
//! [`migrations`]: crate::migrations
//! [`outbox`]: crate::outbox
//! [`refusal`]: crate::refusal
//! [`telemetry`]: crate::telemetry
//! [`transition`]: crate::transition
//! [`version`]: crate::version
//! [简体中文]: https://docs.rs/crate/actix-idempotency/latest/source/README.zh-CN.md
//!
#![doc = include_str!("../README.md")]
#![deny(missing_docs, missing_debug_implementations, unreachable_pub)]
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

pub mod admin;
mod ask;
mod atomic;
mod body;
mod case;
pub mod check;
mod claim;
mod coding;
pub mod completer;
mod decision;
mod digest;
mod document;
pub mod drain;
pub mod duplicate;
mod engine;
mod error;
mod extract;
#[doc(hidden)]
pub mod failpoint;
mod fingerprint;
pub mod form_token;
pub mod gauges;
pub mod guarded;
pub mod header;
mod idempotency;
pub mod inbox;
pub mod inspector;
mod isolation;
mod json;
mod keep;
mod key;
mod lease;
mod middleware;
pub mod migrations;
pub mod once;
pub mod outbox;
pub mod policy;
pub mod pool;
mod postgres;
pub mod refusal;
mod request_id;
mod scope;
mod secret;
mod selection;
mod settle;
mod snapshot;
mod source;
mod status;
pub mod sweeper;
pub mod telemetry;
#[cfg(feature = "testing")]
pub mod testing;
mod token;
mod told;
mod transaction;
pub mod transition;
pub mod version;

pub use crate::{
    admin::Admin,
    completer::{Completer, Completing},
    drain::Drain,
    duplicate::{DuplicateError, Duplicates, InsertError, InsertOrFetch, Inserted},
    error::{Error, ErrorKind},
    extract::{IdemKey, IdemTx, MAX_STEP_NAME, MAX_STEP_RESULT, StepError},
    form_token::TokenIssuer,
    gauges::{Gauges, Sample},
    guarded::{Decrement, GuardedError},
    idempotency::Idempotency,
    inbox::{Handled, Inbox, InboxError, Received},
    inspector::Inspector,
    isolation::Isolation,
    keep::Keep,
    key::{IdempotencyKey, InvalidKey, MAX_KEY_LENGTH},
    middleware::IdempotencyMiddleware,
    once::{Once, OnceError, Outcome},
    outbox::{Event, OutboxError, Relay},
    policy::{OnCompleted, OnFailure, OnOutstanding, Part, Policy, Quota},
    pool::{PoolBuilder, pool},
    postgres::PgPool,
    refusal::{Code, Refusal, Wording},
    request_id::MAX_REQUEST_ID_LENGTH,
    scope::Scope,
    secret::Secret,
    selection::Fields,
    snapshot::ResponseSnapshot,
    source::KeySource,
    sweeper::{Sweeper, Sweeping},
    token::{DEFAULT_TOKEN_LIFETIME, FORM_TOKEN_FIELD, FormToken, FormTokens},
    transition::{Machine, Transition, TransitionError},
    version::{IfMatch, Retry, VersionError, Versioned},
};
