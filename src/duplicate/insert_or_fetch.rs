//! Insert a row, or fetch the one that is there.

use std::{fmt, marker::PhantomData};

use actix_web::{HttpRequest, HttpResponse, Responder, ResponseError, body::BoxBody, http::StatusCode};
use diesel::{
    associations::HasTable,
    expression::{AsExpression, SelectableExpression},
    insertable::{CanInsertInSingleQuery, Insertable},
    pg::Pg,
    query_source::{Column, Table},
    result::Error as QueryError,
    sql_types::SqlType,
};
use diesel_async::AsyncPgConnection;
use serde::Serialize;

use crate::{
    error::{code_of, refuse, words::is_lost_race},
    postgres::{
        duplicate::{AndOn, InsertNew, On, Unique},
        guarded::{self, Look, Piece, Returns, TRIES},
    },
    refusal::{Code, Refusal},
    version::{Race, Retryable},
};

/// A table that rows are inserted into, unless they are there.
pub trait InsertOrFetch: Table + HasTable<Table = Self> {
    /// Inserts a row, or fetches the one that has the same values in the columns that
    /// [`on`](Inserting::on) names.
    ///
    /// ```no_run
    /// use actix_idempotency::{Inserted, InsertOrFetch};
    /// # use diesel::prelude::*;
    /// # use diesel_async::AsyncPgConnection;
    /// # diesel::table! { orders (id) { id -> BigInt, user_id -> BigInt, product_id -> BigInt, quantity -> Integer, } }
    /// # async fn example(conn: &mut AsyncPgConnection) -> actix_web::Result<()> {
    /// let order: Inserted<i64> = orders::table
    ///     .insert_or_fetch((orders::user_id.eq(7), orders::product_id.eq(3), orders::quantity.eq(1)))
    ///     .on(orders::user_id, 7)
    ///     .on(orders::product_id, 3)
    ///     .returning(orders::id)
    ///     .get_result(conn)
    ///     .await?;
    /// match order {
    ///     Inserted::Created(id) => println!("order {id} is new"),
    ///     Inserted::Existing(id) => println!("order {id} was there"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// `INSERT … ON CONFLICT (user_id, product_id) DO NOTHING RETURNING …`, and for the loser
    /// `SELECT … WHERE user_id = … AND product_id = …`. Of any number of callers at once one creates the row and
    /// the others get it. Nothing fails on the way, so that a transaction around it goes on; the row
    /// that is there is not locked, and its other columns are as they are.
    ///
    /// The columns are those of a unique constraint or a unique index without `WHERE`, and the values those that
    /// are inserted. They are asked for because a conflict on *another* constraint is another matter: it
    /// fails, as [`InsertError::Query`]. NULL is equal to nothing: such a row is always new.
    fn insert_or_fetch<X>(self, values: X) -> Inserting<Self, X::Values, (), ()>
    where
        X: Insertable<Self>,
    {
        Inserting { values: values.values(), unique: (), returning: (), table: PhantomData }
    }
}

impl<T: Table + HasTable<Table = Self>> InsertOrFetch for T {}

/// An insert under construction: see [`InsertOrFetch::insert_or_fetch`].
#[derive(Debug, Clone)]
#[must_use = "nothing is inserted until `get_result`"]
pub struct Inserting<T, X, U, R> {
    values: X,
    unique: U,
    returning: R,
    table: PhantomData<fn() -> T>,
}

impl<T, X, R> Inserting<T, X, (), R> {
    /// A column of the unique constraint, and the value that is inserted into it. Call it for each.
    pub fn on<C, V>(self, column: C, value: V) -> Inserting<T, X, On<C, V::Expression>, R>
    where
        C: Column<Table = T, SqlType: SqlType>,
        V: AsExpression<C::SqlType>,
    {
        let Self { values, returning, table, .. } = self;
        Inserting { values, unique: On(column, value.as_expression()), returning, table }
    }
}

impl<T, X, U: Unique, R> Inserting<T, X, U, R> {
    /// One column more.
    pub fn on<C, V>(self, column: C, value: V) -> Inserting<T, X, AndOn<U, C, V::Expression>, R>
    where
        C: Column<Table = T, SqlType: SqlType>,
        V: AsExpression<C::SqlType>,
    {
        let Self { values, unique, returning, table } = self;
        Inserting { values, unique: AndOn(unique, On(column, value.as_expression())), returning, table }
    }
}

impl<T, X, U, R> Inserting<T, X, U, R> {
    /// What [`get_result`](Inserting::get_result) returns of the row.
    pub fn returning<R2>(self, returning: R2) -> Inserting<T, X, U, R2>
    where
        R2: SelectableExpression<T> + Piece,
    {
        let Self { values, unique, table, .. } = self;
        Inserting { values, unique, returning, table }
    }
}

impl<T, X, U, R> Inserting<T, X, U, R>
where
    T: Table<FromClause: Piece> + HasTable<Table = T>,
    X: CanInsertInSingleQuery<Pg> + Piece,
    U: Unique,
{
    /// Inserts the row, or fetches the one that is there.
    ///
    /// # Errors
    ///
    /// See [`InsertError`].
    pub async fn get_result<Row: Send>(self, conn: &mut AsyncPgConnection) -> Result<Inserted<Row>, InsertError>
    where
        R: Returns<Row>,
    {
        if self.values.rows_to_insert() != Some(1) {
            let advice = "insert_or_fetch inserts exactly one row";
            return Err(InsertError::Query(QueryError::QueryBuilderError(advice.into())));
        }
        let table = T::table().from_clause();
        let insert = InsertNew { into: &table, values: &self.values, unique: &self.unique, returning: &self.returning };
        let look = Look { what: &self.returning, from: &table, row: &self.unique };
        for _ in 0..TRIES {
            if let Some(row) = guarded::one::<R, Row, _>(insert, conn).await? {
                return Ok(Inserted::Created(row));
            }
            // A statement of its own: one together with the insert would not see who was first.
            if let Some(row) = guarded::one::<R, Row, _>(look, conn).await? {
                return Ok(Inserted::Existing(row));
            }
            // Whoever was first has gone again.
        }
        Err(InsertError::Elusive)
    }
}

/// A row, and whether it is new.
///
/// As the answer of a handler it is JSON, 201 for a row that is new and 200 for one that was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a row that was there is told from one that is new"]
pub enum Inserted<T> {
    /// This call inserted it.
    Created(T),
    /// It was there.
    Existing(T),
}

impl<T> Inserted<T> {
    /// The row, new or not.
    pub fn into_inner(self) -> T {
        match self {
            Self::Created(row) | Self::Existing(row) => row,
        }
    }

    /// Whether this call inserted it.
    #[must_use]
    pub fn is_created(&self) -> bool {
        matches!(self, Self::Created(_))
    }
}

impl<T: Serialize> Responder for Inserted<T> {
    type Body = BoxBody;

    fn respond_to(self, _: &HttpRequest) -> HttpResponse<BoxBody> {
        match self {
            Self::Created(row) => HttpResponse::Created().json(row),
            Self::Existing(row) => HttpResponse::Ok().json(row),
        }
    }
}

/// Why there is no row, neither new nor old.
///
/// | | with `?` in a handler |
/// |---|---|
/// | `Serialization` | 409 `serialization` |
/// | `Elusive` | 409 `serialization` |
/// | `Query` | 409 `constraint-violated`, 503 `store-unavailable`, else 500 `query-failed` |
#[derive(Debug)]
#[non_exhaustive]
pub enum InsertError {
    /// Above READ COMMITTED: somebody else has inserted it since the transaction of the caller's took its
    /// snapshot, which therefore cannot see it. The transaction is over; a new one sees the row
    /// ([`Retry`](crate::version::Retry)). Put a savepoint (`conn.transaction(…)`) around the call to go on
    /// without it.
    Serialization,
    /// It was there whenever it was inserted, and gone whenever it was looked for: the columns are not
    /// those of the row that is in the way, or they do not have the values that are inserted.
    Elusive,
    /// A statement failed, for another constraint for example. In a transaction of the caller's, Postgres
    /// takes no other until that is rolled back.
    Query(QueryError),
}

impl fmt::Display for InsertError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Serialization => "another transaction has inserted the row, and this one cannot see it",
            Self::Elusive => "a row is in the way, and the columns that were named do not find it",
            Self::Query(_) => "the statement failed",
        })
    }
}

impl std::error::Error for InsertError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Query(error) => Some(error),
            _ => None,
        }
    }
}

impl From<QueryError> for InsertError {
    fn from(error: QueryError) -> Self {
        if is_lost_race(&error) { Self::Serialization } else { Self::Query(error) }
    }
}

impl Retryable for InsertError {
    fn lost_race(&self) -> Option<Race> {
        match self {
            Self::Serialization => Some(Race::Transaction),
            Self::Elusive => Some(Race::Stale),
            Self::Query(error) => error.lost_race(),
        }
    }

    fn failed(error: QueryError) -> Self {
        error.into()
    }
}

impl InsertError {
    fn code(&self) -> Code {
        match self {
            Self::Serialization | Self::Elusive => Code::Serialization,
            Self::Query(error) => code_of(error),
        }
    }
}

impl ResponseError for InsertError {
    fn status_code(&self) -> StatusCode {
        self.code().status()
    }

    fn error_response(&self) -> HttpResponse<BoxBody> {
        match self {
            Self::Query(error) => refuse("an insert failed", error).error_response(),
            _ => Refusal::new(self.code()).error_response(),
        }
    }
}
