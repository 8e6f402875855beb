//! Optimistic locking: a row is changed only where it still is what the caller has seen.
//!
//! A table has a version column, declared once, and every change names the version it expects:
//!
//! ```no_run
//! use actix_idempotency::{PgPool, Versioned, version::IfMatch, versioned};
//! use actix_web::{HttpResponse, Result, error::ErrorInternalServerError, web};
//! use diesel::prelude::*;
//! # #[derive(serde::Serialize)]
//! #[derive(Queryable, Selectable)]
//! struct Order { id: i64, quantity: i32, version: i32 }
//!
//! diesel::table! {
//!     orders (id) { id -> BigInt, quantity -> Integer, version -> Integer, }
//! }
//! versioned!(orders.version);
//!
//! async fn change(
//!     pool: web::Data<PgPool>,
//!     id: web::Path<i64>,
//!     if_match: IfMatch,
//!     quantity: web::Json<i32>,
//! ) -> Result<HttpResponse> {
//!     let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
//!     let order: Order = orders::table
//!         .at(*id, if_match)
//!         .set(orders::quantity.eq(*quantity))
//!         .returning(Order::as_returning())
//!         .get_result(&mut conn)
//!         .await?;
//!     Ok(HttpResponse::Ok().insert_header(actix_idempotency::version::etag(order.version)).json(order))
//! }
//! ```
//!
//! It is one statement, `UPDATE … SET quantity = …, version = version + 1 WHERE id = … AND version = …`,
//! and its row count decides. Only who loses pays for a second one, which tells
//! [`Stale`](VersionError::Stale) from [`Gone`](VersionError::Gone). Losing is an answer and not a failed
//! statement: a transaction around it, [`IdemTx`](crate::IdemTx) for example, goes on.
//!
//! - **Filters** narrow the row: `.at(id, 7).filter(orders::customer.eq(me))`. A row that they exclude is
//!   gone, for the second look too.
//! - **Nothing to set** still raises the version: a struct whose fields are all `None`, and [`touch`](At::touch).
//! - **Many rows**, all or nothing: [`batch`].
//! - **Try again** with what is there now: [`Retry`].
//! - **Writers who do not play along** are stopped by a trigger: [`trigger`].
//!
//! # When another shape is better
//!
//! Where the new value can be computed in SQL, a guarded statement beats every kind of locking:
//! [`Decrement`](crate::Decrement). On one hot row with many writers most attempts are stale, and
//! `SELECT … FOR UPDATE` before a plain UPDATE does better; versions win as soon as writers rarely meet.
//!
//! # Isolation
//!
//! Above READ COMMITTED, Postgres itself refuses to change a row that was changed since the
//! transaction's snapshot: 40001. Outside a transaction the statement is simply sent again. Inside one it
//! arrives as [`VersionError::Query`], and the transaction is over, as it is for any other statement there;
//! to go on regardless, put a savepoint (`conn.transaction(…)`) around the call.

mod batch;
mod change;
mod error;
mod if_match;
mod retry;
mod trigger;

use diesel::{
    associations::HasTable,
    expression_methods::EqAll,
    query_source::{Column, Table},
};

pub use self::{
    batch::{BatchError, Lost, batch},
    change::{At, Change, VersionedDelete, VersionedUpdate},
    error::{Expected, VersionError},
    if_match::{IfMatch, InvalidIfMatch, etag},
    retry::{DEFAULT_TRIES, Race, Retry, Retryable},
    trigger::trigger,
};
pub use crate::postgres::{
    guarded::{Both, Piece, Returns},
    version::{AsBigInt, NotRaised, Raised, Raises, WholeNumber},
};

/// A table with a version column, of type `Integer` or `BigInt`, that may not be NULL. Declared by
/// [`versioned!`](crate::versioned).
///
/// A table that is not declared has no `at`:
///
/// ```compile_fail,E0599
/// use actix_idempotency::Versioned;
/// diesel::table! { notes (id) { id -> BigInt, text -> Text, } }
///
/// let note = notes::table.at(1, 7);
/// ```
///
/// and one that is, has:
///
/// ```
/// use actix_idempotency::{Versioned, versioned};
/// diesel::table! { notes (id) { id -> BigInt, text -> Text, version -> Integer, } }
/// versioned!(notes.version);
///
/// let note = notes::table.at(1, 7);
/// ```
///
/// A column that is no number of versions cannot be declared:
///
/// ```compile_fail,E0277
/// diesel::table! { notes (id) { id -> BigInt, text -> Text, version -> Nullable<Integer>, } }
/// actix_idempotency::versioned!(notes.version);
/// ```
///
/// ```
/// diesel::table! { notes (id) { id -> BigInt, text -> Text, version -> BigInt, } }
/// actix_idempotency::versioned!(notes.version);
/// ```
pub trait Versioned: Table + HasTable<Table = Self> {
    /// The column.
    type Version: Column<Table = Self, SqlType: WholeNumber> + Piece + Default + Copy;

    /// The row with this primary key, if its version is the expected one: a number that was read
    /// before, or an [`IfMatch`] from a client.
    fn at<K>(self, key: K, expected: impl Into<Expected>) -> At<Self, K, <Self::PrimaryKey as EqAll<K>>::Output>
    where
        Self: Keyed<K>,
        K: Clone,
    {
        At::new(self, key, expected.into())
    }
}

/// A table whose rows are found by a primary key of type `K`. Every diesel table is, for the types
/// that `find` takes.
pub trait Keyed<K>: Table<PrimaryKey: EqAll<K, Output: Piece>, FromClause: Piece> {}

impl<T, K> Keyed<K> for T where T: Table<PrimaryKey: EqAll<K, Output: Piece>, FromClause: Piece> {}

/// Declares the version column of a table: `versioned!(orders.version);` where the module `orders` of
/// `diesel::table!` is in scope, `versioned!(schema::orders.version);` elsewhere. See
/// [`version`](crate::version).
#[macro_export]
macro_rules! versioned {
    ($($table:ident)::+ . $column:ident) => {
        impl $crate::Versioned for $($table)::+ ::table {
            type Version = $($table)::+ ::$column;
        }
    };
}
