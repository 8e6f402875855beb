//! Take from a quantity only where there is enough.
//!
//! ```no_run
//! use actix_idempotency::{Decrement, IdemTx};
//! use actix_web::{HttpResponse, Result, web};
//!
//! diesel::table! {
//!     products (id) { id -> BigInt, stock -> Integer, }
//! }
//!
//! async fn reserve(mut tx: IdemTx, id: web::Path<i64>, quantity: web::Json<i32>) -> Result<HttpResponse> {
//!     let left = products::stock.decrement(*id, *quantity).execute(&mut tx).await?;
//!     Ok(HttpResponse::Ok().json(left))
//! }
//! ```
//!
//! It is one statement, `UPDATE … SET stock = stock - n WHERE id = … AND stock >= n`. Nothing is read
//! before, so that nobody can act on what is no longer true: any number of buyers get what is there, and
//! not one piece more. Buyers of one row queue for its lock, and none has to try again.
//!
//! Who gets nothing pays for a second look, which tells [`NotEnough`](GuardedError::NotEnough), with what is
//! left, from [`Gone`](GuardedError::Gone). Neither is a failed statement: a transaction around it goes on.

use std::fmt;

use actix_web::{HttpResponse, ResponseError, body::BoxBody, http::StatusCode};
use diesel::{
    associations::HasTable,
    expression::{AppearsOnTable, Expression, SelectableExpression},
    expression_methods::EqAll,
    query_builder::AsChangeset,
    query_source::{Column, QuerySource, Table},
    result::Error as QueryError,
    sql_types::BoolOrNullableBool,
};
use diesel_async::AsyncPgConnection;

use crate::{
    error::{code_of, refuse},
    postgres::{
        decrement::{Has, Less},
        guarded::{self, Both, Look, Piece, Returns, TRIES, Update},
        version::{self, AsBigInt, NotRaised, Raised, Raises, WholeNumber},
    },
    refusal::{Code, Refusal},
    telemetry,
    version::{Keyed, Race, Retryable, Versioned},
};

/// A quantity: a column of type `Integer` or `BigInt` that may not be NULL.
pub trait Decrement:
    Column<SqlType: WholeNumber, Table: HasTable<Table = Self::Table>> + Piece + Default + Copy
{
    /// Takes `n` from the row with this primary key. See [`guarded`](crate::guarded).
    fn decrement<K>(self, key: K, n: impl Into<i64>) -> Taking<Self, RowOf<Self, K>, (), NotRaised, AsBigInt<Self>>
    where
        Self::Table: Keyed<K>,
    {
        Taking {
            n: n.into(),
            row: Self::Table::table().primary_key().eq_all(key),
            changes: (),
            raises: NotRaised,
            returning: AsBigInt(self),
            column: self,
        }
    }
}

impl<C> Decrement for C where C: Column<SqlType: WholeNumber, Table: HasTable<Table = C::Table>> + Piece + Default + Copy
{}

/// What finds the row of a column's table by its primary key.
pub type RowOf<C, K> = <<<C as Column>::Table as Table>::PrimaryKey as EqAll<K>>::Output;

/// A decrement under construction: see [`Decrement::decrement`].
#[derive(Debug, Clone)]
#[must_use = "nothing is taken until `execute` or `get_result`"]
pub struct Taking<C, W, S, V, R> {
    column: C,
    n: i64,
    row: W,
    changes: S,
    raises: V,
    returning: R,
}

impl<C: Decrement, W, S, V, R> Taking<C, W, S, V, R> {
    /// Narrows the row, to one that the caller may see for example. A row that is excluded is
    /// [`Gone`](GuardedError::Gone).
    pub fn filter<P>(self, predicate: P) -> Taking<C, Both<W, P>, S, V, R>
    where
        P: AppearsOnTable<C::Table, SqlType: BoolOrNullableBool> + Piece,
    {
        let Self { column, n, row, changes, raises, returning } = self;
        Taking { column, n, row: Both(row, predicate), changes, raises, returning }
    }

    /// Other columns that change along, only where there was enough.
    pub fn set<S2>(self, changes: S2) -> Taking<C, W, S2::Changeset, V, R>
    where
        S2: AsChangeset<Target = C::Table>,
    {
        let Self { column, n, row, raises, returning, .. } = self;
        Taking { column, n, row, changes: changes.as_changeset(), raises, returning }
    }

    /// Raises the version of the row as well. Without it, those who have read the row before do not notice
    /// that its quantity has changed, which is often just right.
    pub fn raise_version(self) -> Taking<C, W, S, Raised<<C::Table as Versioned>::Version>, R>
    where
        C::Table: Versioned,
    {
        let Self { column, n, row, changes, returning, .. } = self;
        Taking { column, n, row, changes, raises: Raised::new(), returning }
    }

    /// What [`get_result`](Self::get_result) returns of the row as it is afterwards.
    pub fn returning<R2>(self, returning: R2) -> Taking<C, W, S, V, R2>
    where
        R2: SelectableExpression<C::Table> + Piece,
    {
        let Self { column, n, row, changes, raises, .. } = self;
        Taking { column, n, row, changes, raises, returning }
    }
}

impl<C, W, S, V> Taking<C, W, S, V, AsBigInt<C>>
where
    C: Decrement<Table: QuerySource<FromClause: Piece>>,
    W: Piece,
    S: Piece,
    V: Raises,
{
    /// Sends it, and returns what is left.
    ///
    /// # Errors
    ///
    /// See [`GuardedError`]. Nothing is taken then.
    pub async fn execute(self, conn: &mut AsyncPgConnection) -> Result<i64, GuardedError> {
        self.get_result(conn).await
    }
}

impl<C, W, S, V, R> Taking<C, W, S, V, R>
where
    C: Decrement<Table: QuerySource<FromClause: Piece>>,
    W: Piece,
    S: Piece,
    V: Raises,
{
    /// Sends it, and returns what [`returning`](Self::returning) names.
    ///
    /// # Errors
    ///
    /// See [`GuardedError`]. Nothing is taken then.
    pub async fn get_result<U: Send>(self, conn: &mut AsyncPgConnection) -> Result<U, GuardedError>
    where
        R: Returns<U>,
    {
        self.check()?;
        let from = C::Table::table().from_clause();
        let update = Update {
            from: &from,
            set: (Less { column: self.column, n: &self.n }, &self.changes, V::set()),
            row: &self.row,
            guard: Both(Has { column: self.column, n: &self.n }, V::guard()),
            returning: &self.returning,
        };
        let mut left = 0;
        for _ in 0..TRIES {
            if let Some(row) = guarded::one::<R, U, _>(update, conn).await? {
                return Ok(row);
            }
            let look = Look { what: AsBigInt(self.column), from: &from, row: &self.row };
            left = guarded::one::<AsBigInt<C>, i64, _>(look, conn).await?.ok_or(GuardedError::Gone)?;
            if left < self.n {
                break;
            }
            // There is enough by now.
        }
        match V::COLUMN {
            Some(_) if left >= self.n => Err(GuardedError::Overflow),
            _ => Err(GuardedError::NotEnough { asked: self.n, left }),
        }
    }

    /// What is wrong with it, whatever the row is.
    fn check(&self) -> Result<(), GuardedError> {
        if !(1..=<C as Expression>::SqlType::MAX).contains(&self.n) {
            return Err(GuardedError::Amount { asked: self.n });
        }
        let own = [Some(C::NAME), V::COLUMN];
        match own.into_iter().flatten().find(|column| version::sets(&self.changes, column)) {
            Some(field) => Err(GuardedError::SetsItself { field }),
            None => Ok(()),
        }
    }
}

/// Why nothing was taken. A transaction around it can go on, but for [`Query`](Self::Query).
///
/// | | with `?` in a handler |
/// |---|---|
/// | `NotEnough` | 409 `not-enough`; its `detail` says how much is left |
/// | `Gone` | 404 `not-found` |
/// | `Amount` | 422 `amount-invalid` |
/// | `Overflow` | 409 `version-overflow` |
/// | `SetsItself` | 500 `misconfigured`, and a log line |
/// | `Query` | 409 `serialization` or `constraint-violated`, 503 `store-unavailable`, else 500 `query-failed` |
#[derive(Debug)]
#[non_exhaustive]
pub enum GuardedError {
    /// Less is there than was asked for.
    NotEnough {
        /// So much was asked for.
        asked: i64,
        /// So much was there.
        left: i64,
    },
    /// There is no such row.
    Gone,
    /// Not a positive number, or more than the column can hold: nothing was sent.
    Amount {
        /// So much was asked for.
        asked: i64,
    },
    /// The version that is raised along is the largest its column can hold.
    Overflow,
    /// The other changes assign to the quantity, or to the version that is raised.
    SetsItself {
        /// The column.
        field: &'static str,
    },
    /// The statement failed. In a transaction of the caller's, Postgres takes no other until that is
    /// rolled back.
    Query(QueryError),
}

impl fmt::Display for GuardedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotEnough { asked, left } => write!(f, "{asked} were asked for, {left} are left"),
            Self::Gone => f.write_str("there is no such row"),
            Self::Amount { asked } => write!(f, "{asked} cannot be taken: an amount is 1 or more, and fits the column"),
            Self::Overflow => f.write_str("the row has the largest version its column can hold"),
            Self::SetsItself { field } => write!(f, "the other changes set `{field}`, which this one changes itself"),
            Self::Query(_) => f.write_str("the statement failed"),
        }
    }
}

impl std::error::Error for GuardedError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Query(error) => Some(error),
            _ => None,
        }
    }
}

impl From<QueryError> for GuardedError {
    fn from(error: QueryError) -> Self {
        Self::Query(error)
    }
}

/// In [`Retry`](crate::Retry), only what a new transaction helps against.
impl Retryable for GuardedError {
    fn lost_race(&self) -> Option<Race> {
        match self {
            Self::Query(error) => error.lost_race(),
            _ => None,
        }
    }

    fn failed(error: QueryError) -> Self {
        Self::Query(error)
    }
}

impl GuardedError {
    fn code(&self) -> Code {
        match self {
            Self::NotEnough { .. } => Code::NotEnough,
            Self::Gone => Code::NotFound,
            Self::Amount { .. } => Code::AmountInvalid,
            Self::Overflow => Code::VersionOverflow,
            Self::SetsItself { .. } => Code::Misconfigured,
            Self::Query(error) => code_of(error),
        }
    }
}

impl ResponseError for GuardedError {
    fn status_code(&self) -> StatusCode {
        self.code().status()
    }

    fn error_response(&self) -> HttpResponse<BoxBody> {
        let refusal = Refusal::new(self.code());
        match self {
            Self::NotEnough { .. } => refusal.detailed(format!("Nothing was done: {self}.")).error_response(),
            Self::SetsItself { .. } => {
                telemetry::misconfigured(&self.to_string());
                refusal.error_response()
            }
            Self::Query(error) => refuse("a decrement failed", error).error_response(),
            _ => refusal.error_response(),
        }
    }
}
