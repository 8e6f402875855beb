#![doc = include_str!("../README.md")]
#![deny(missing_docs, missing_debug_implementations, unreachable_pub)]
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

mod atomic;
mod body;
mod check;
mod claim;
mod digest;
pub mod drain;
mod engine;
mod error;
mod extract;
mod fingerprint;
pub mod header;
mod isolation;
mod json;
mod keep;
mod key;
mod lease;
mod middleware;
pub mod migrations;
pub mod policy;
pub mod pool;
mod postgres;
pub mod refusal;
mod scope;
mod settle;
mod snapshot;
pub mod sweeper;
pub mod telemetry;
mod transaction;

pub use crate::{
    drain::Drain,
    error::{Error, ErrorKind},
    extract::{IdemKey, IdemTx},
    isolation::Isolation,
    keep::Keep,
    key::{IdempotencyKey, InvalidKey, MAX_KEY_LENGTH},
    middleware::{Idempotency, IdempotencyMiddleware},
    policy::{OnOutstanding, Policy},
    pool::{PoolBuilder, pool},
    postgres::PgPool,
    refusal::{Code, Refusal},
    scope::Scope,
    snapshot::ResponseSnapshot,
    sweeper::{Sweeper, Sweeping},
};
