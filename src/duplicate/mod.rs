//! The last line of defence, in words: a unique constraint.
//!
//! A key protects against the same request, a version against a stale one. Two *different* requests for
//! what there can be only one of are stopped by the database alone, and its answer is `duplicate key value
//! violates unique constraint "orders_user_product_campaign_key"`. Two things make something of it:
//!
//! - [`Duplicates`] turns the violation of a constraint, known by its name, into an error of yours;
//! - [`InsertOrFetch::insert_or_fetch`] turns it into the row that is there already.

mod insert_or_fetch;
mod violation;

pub use self::{
    insert_or_fetch::{InsertError, InsertOrFetch, Inserted, Inserting},
    violation::{Duplicate, DuplicateError, Duplicates},
};
pub use crate::postgres::duplicate::{AndOn, On, Unique};
