//! A write that says what it expects: 1 row = it held, 0 rows = it did not.
//!
//! The one statement behind versions, decrements and transitions, built from pieces of diesel's and
//! our own, which it borrows: the losing path asks about the same row with the same pieces.
//!
//! Unlike diesel's own UPDATE, these are prepared once per connection and text: pieces whose text varies
//! without end (`sql("…")` and the like) say so themselves, and are not kept.

use diesel::{
    QueryResult,
    deserialize::FromSqlRow,
    expression::{Expression, QueryMetadata},
    pg::Pg,
    query_builder::{AstPass, Query, QueryFragment, QueryId},
    query_dsl::CompatibleType,
};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, TransactionManager};
use futures_util::{FutureExt, future::BoxFuture};

use crate::error::words::is_lost_race;

/// A piece of SQL.
pub trait Piece: QueryFragment<Pg> + Send + Sync {}

impl<P: QueryFragment<Pg> + Send + Sync> Piece for P {}

/// What a statement returns, as a `U`: a column, a tuple of them, `U::as_returning()`.
pub trait Returns<U>: Expression + Piece {
    #[doc(hidden)]
    fn load<'a, Q>(query: Q, conn: &'a mut AsyncPgConnection) -> BoxFuture<'a, QueryResult<Vec<U>>>
    where
        Q: Query<SqlType = Self::SqlType> + QueryFragment<Pg> + QueryId + Send + 'a;
}

impl<R, U, ST> Returns<U> for R
where
    R: Expression + Piece,
    R::SqlType: CompatibleType<U, Pg, SqlType = ST>,
    U: FromSqlRow<ST, Pg> + Send + 'static,
    Pg: QueryMetadata<R::SqlType>,
    ST: 'static,
{
    fn load<'a, Q>(query: Q, conn: &'a mut AsyncPgConnection) -> BoxFuture<'a, QueryResult<Vec<U>>>
    where
        Q: Query<SqlType = Self::SqlType> + QueryFragment<Pg> + QueryId + Send + 'a,
    {
        query.load(conn).boxed()
    }
}

/// `UPDATE from SET set WHERE row AND guard RETURNING returning`.
#[derive(Clone, Copy)]
pub(crate) struct Update<F, S, W, G, R> {
    pub(crate) from: F,
    pub(crate) set: S,
    pub(crate) row: W,
    pub(crate) guard: G,
    pub(crate) returning: R,
}

impl<F: Piece, S: Piece, W: Piece, G: Piece, R: Piece> QueryFragment<Pg> for Update<F, S, W, G, R> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("UPDATE ");
        self.from.walk_ast(out.reborrow())?;
        out.push_sql(" SET ");
        self.set.walk_ast(out.reborrow())?;
        out.push_sql(" WHERE ");
        self.row.walk_ast(out.reborrow())?;
        out.push_sql(" AND ");
        self.guard.walk_ast(out.reborrow())?;
        out.push_sql(" RETURNING ");
        self.returning.walk_ast(out)
    }
}

/// `DELETE FROM from WHERE row AND guard RETURNING returning`.
#[derive(Clone, Copy)]
pub(crate) struct Delete<F, W, G, R> {
    pub(crate) from: F,
    pub(crate) row: W,
    pub(crate) guard: G,
    pub(crate) returning: R,
}

impl<F: Piece, W: Piece, G: Piece, R: Piece> QueryFragment<Pg> for Delete<F, W, G, R> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("DELETE FROM ");
        self.from.walk_ast(out.reborrow())?;
        out.push_sql(" WHERE ");
        self.row.walk_ast(out.reborrow())?;
        out.push_sql(" AND ");
        self.guard.walk_ast(out.reborrow())?;
        out.push_sql(" RETURNING ");
        self.returning.walk_ast(out)
    }
}

/// `SELECT what FROM from WHERE row`: the second look of those who lost.
#[derive(Clone, Copy)]
pub(crate) struct Look<R, F, W> {
    pub(crate) what: R,
    pub(crate) from: F,
    pub(crate) row: W,
}

impl<R: Piece, F: Piece, W: Piece> QueryFragment<Pg> for Look<R, F, W> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("SELECT ");
        self.what.walk_ast(out.reborrow())?;
        out.push_sql(" FROM ");
        self.from.walk_ast(out.reborrow())?;
        out.push_sql(" WHERE ");
        self.row.walk_ast(out)
    }
}

/// What makes a fragment a query of diesel's that is found again by its text.
macro_rules! query {
    ($name:ident<$($piece:ident),*> returns $returning:ident) => {
        impl<$($piece),*> QueryId for $name<$($piece),*> {
            type QueryId = ();
            const HAS_STATIC_QUERY_ID: bool = false;
        }

        impl<$($piece),*> Query for $name<$($piece),*>
        where
            $returning: Expression,
        {
            type SqlType = $returning::SqlType;
        }
    };
}

query!(Update<F, S, W, G, R> returns R);
query!(Delete<F, W, G, R> returns R);
query!(Look<R, F, W> returns R);

/// Both predicates.
#[derive(Debug, Clone, Copy)]
pub struct Both<A, B>(pub(crate) A, pub(crate) B);

impl<A: Piece, B: Piece> QueryFragment<Pg> for Both<A, B> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.0.walk_ast(out.reborrow())?;
        out.push_sql(" AND (");
        self.1.walk_ast(out.reborrow())?;
        out.push_sql(")");
        Ok(())
    }
}

/// How often a statement is sent again that lost against others, when that changes nothing else.
pub(crate) const TRIES: usize = 10;

/// The row that a statement returns, if it returns one.
///
/// Above READ COMMITTED a statement that loses against another transaction fails with 40001. Where it
/// is a transaction of its own, nothing was done, and it is sent again.
pub(crate) async fn one<R, U, Q>(query: Q, conn: &mut AsyncPgConnection) -> QueryResult<Option<U>>
where
    R: Returns<U>,
    Q: Query<SqlType = R::SqlType> + QueryFragment<Pg> + QueryId + Copy + Send,
{
    for _ in 1..TRIES {
        match R::load(query, conn).await {
            Err(error) if is_lost_race(&error) && !is_in_transaction(conn) => {}
            rows => return Ok(rows?.into_iter().next()),
        }
    }
    Ok(R::load(query, conn).await?.into_iter().next())
}

type Manager = <AsyncPgConnection as AsyncConnection>::TransactionManager;

pub(crate) fn is_in_transaction(conn: &mut AsyncPgConnection) -> bool {
    // An error means a broken transaction, which is one.
    Manager::transaction_manager_status_mut(conn).transaction_depth().map_or(true, |depth| depth.is_some())
}
