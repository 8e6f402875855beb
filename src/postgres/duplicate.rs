//! An insert that leaves an existing row alone.

use diesel::{
    QueryResult,
    expression::Expression,
    pg::Pg,
    query_builder::{AstPass, Query, QueryFragment, QueryId},
    query_source::Column,
};

use super::guarded::Piece;

/// `INSERT INTO into values ON CONFLICT (unique) DO NOTHING RETURNING returning`.
#[derive(Clone, Copy)]
pub(crate) struct InsertNew<F, X, U, R> {
    pub(crate) into: F,
    pub(crate) values: X,
    pub(crate) unique: U,
    pub(crate) returning: R,
}

impl<F: Piece, X: Piece, U: Unique, R: Piece> QueryFragment<Pg> for InsertNew<F, X, U, R> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("INSERT INTO ");
        self.into.walk_ast(out.reborrow())?;
        out.push_sql(" ");
        self.values.walk_ast(out.reborrow())?;
        out.push_sql(" ON CONFLICT (");
        self.unique.push_names(out.reborrow())?;
        out.push_sql(") DO NOTHING RETURNING ");
        self.returning.walk_ast(out)
    }
}

impl<F, X, U, R> QueryId for InsertNew<F, X, U, R> {
    type QueryId = ();
    const HAS_STATIC_QUERY_ID: bool = false;
}

impl<F, X, U, R: Expression> Query for InsertNew<F, X, U, R> {
    type SqlType = R::SqlType;
}

/// The columns of a unique constraint, and the values that a row has there: a predicate, and a
/// conflict target.
pub trait Unique: Piece {
    /// The bare names, separated by commas.
    #[doc(hidden)]
    fn push_names(&self, out: AstPass<'_, '_, Pg>) -> QueryResult<()>;
}

impl<U: Unique> Unique for &U {
    fn push_names(&self, out: AstPass<'_, '_, Pg>) -> QueryResult<()> {
        U::push_names(self, out)
    }
}

/// `orders.product_id = …`.
#[derive(Debug, Clone, Copy)]
pub struct On<C, X>(pub(crate) C, pub(crate) X);

impl<C: Column + Piece, X: Piece> Unique for On<C, X> {
    fn push_names(&self, mut out: AstPass<'_, '_, Pg>) -> QueryResult<()> {
        out.push_identifier(C::NAME)
    }
}

impl<C: Piece, X: Piece> QueryFragment<Pg> for On<C, X> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.0.walk_ast(out.reborrow())?;
        out.push_sql(" = ");
        self.1.walk_ast(out)
    }
}

/// `… AND orders.product_id = …`.
#[derive(Debug, Clone, Copy)]
pub struct AndOn<U, C, X>(pub(crate) U, pub(crate) On<C, X>);

impl<U: Unique, C: Column + Piece, X: Piece> Unique for AndOn<U, C, X> {
    fn push_names(&self, mut out: AstPass<'_, '_, Pg>) -> QueryResult<()> {
        self.0.push_names(out.reborrow())?;
        out.push_sql(", ");
        self.1.push_names(out)
    }
}

impl<U: Piece, C: Piece, X: Piece> QueryFragment<Pg> for AndOn<U, C, X> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.0.walk_ast(out.reborrow())?;
        out.push_sql(" AND ");
        self.1.walk_ast(out)
    }
}
