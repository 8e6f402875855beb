//! The pieces that concern a state, stored as text or as a Postgres enum, and what follows its change.

use std::io::Write;

use diesel::{
    QueryResult,
    expression::Expression,
    pg::Pg,
    query_builder::{AstPass, QueryFragment, QueryId},
    query_source::Column,
    serialize::{IsNull, Output, ToSql},
    sql_types::{HasSqlType, SingleValue, SqlType, Text, is_nullable::NotNull},
};
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use futures_util::{FutureExt, future::BoxFuture};

/// The text of a state. Postgres sends and takes the label of an enum as it does text.
#[derive(Debug, Clone, Copy)]
pub struct Label(pub(crate) &'static str);

impl<ST> ToSql<ST, Pg> for Label {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> diesel::serialize::Result {
        out.write_all(self.0.as_bytes())?;
        Ok(IsNull::No)
    }
}

/// What a state column can be: `Text`, or an enum of Postgres's, not NULL.
pub trait StateType: SqlType<IsNull = NotNull> + SingleValue {
    #[doc(hidden)]
    fn push<'b>(label: &'b Label, out: AstPass<'_, 'b, Pg>) -> QueryResult<()>;
}

impl<ST> StateType for ST
where
    ST: SqlType<IsNull = NotNull> + SingleValue,
    Pg: HasSqlType<ST>,
{
    fn push<'b>(label: &'b Label, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_bind_param::<ST, Label>(label)
    }
}

/// `status = 'PAID'`, as an assignment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SetState<C> {
    pub(crate) _column: C,
    pub(crate) label: Label,
}

impl<C: Column<SqlType: StateType>> QueryFragment<Pg> for SetState<C> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_identifier(C::NAME)?;
        out.push_sql(" = ");
        C::SqlType::push(&self.label, out)
    }
}

/// `orders.status = 'PAID'`, as a predicate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IsState<C> {
    pub(crate) column: C,
    pub(crate) label: Label,
}

impl<C: Column<SqlType: StateType> + QueryFragment<Pg>> QueryFragment<Pg> for IsState<C> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.column.walk_ast(out.reborrow())?;
        out.push_sql(" = ");
        C::SqlType::push(&self.label, out)
    }
}

/// The state as text, whatever the column is.
#[derive(Debug, Clone, Copy)]
pub struct AsText<C>(pub(crate) C);

impl<C: QueryFragment<Pg>> QueryFragment<Pg> for AsText<C> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("CAST(");
        self.0.walk_ast(out.reborrow())?;
        out.push_sql(" AS text)");
        Ok(())
    }
}

impl<C: Expression> Expression for AsText<C> {
    type SqlType = Text;
}

/// What follows a move.
pub trait Follows: Send + Sync {
    #[doc(hidden)]
    const FOLLOWS: bool;

    #[doc(hidden)]
    fn write<'a>(self, conn: &'a mut AsyncPgConnection) -> BoxFuture<'a, QueryResult<()>>
    where
        Self: 'a;
}

/// Nothing follows.
#[derive(Debug, Clone, Copy)]
pub struct Nothing;

impl Follows for Nothing {
    const FOLLOWS: bool = false;

    fn write<'a>(self, _: &'a mut AsyncPgConnection) -> BoxFuture<'a, QueryResult<()>>
    where
        Self: 'a,
    {
        std::future::ready(Ok(())).boxed()
    }
}

/// A statement follows: see [`Moving::record`](crate::transition::Moving::record).
#[derive(Debug, Clone, Copy)]
pub struct Recorded<Q>(pub(crate) Q);

impl<Q: QueryFragment<Pg> + QueryId + Send + Sync> Follows for Recorded<Q> {
    const FOLLOWS: bool = true;

    fn write<'a>(self, conn: &'a mut AsyncPgConnection) -> BoxFuture<'a, QueryResult<()>>
    where
        Self: 'a,
    {
        async move { self.0.execute(conn).await.map(drop) }.boxed()
    }
}
