//! The pieces that concern a quantity.

use diesel::{
    QueryResult,
    pg::Pg,
    query_builder::{AstPass, QueryFragment},
    query_source::Column,
    sql_types::BigInt,
};

/// `stock = products.stock - n`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Less<'a, C> {
    pub(crate) column: C,
    pub(crate) n: &'a i64,
}

impl<C: Column + QueryFragment<Pg>> QueryFragment<Pg> for Less<'_, C> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_identifier(C::NAME)?;
        out.push_sql(" = ");
        self.column.walk_ast(out.reborrow())?;
        out.push_sql(" - ");
        out.push_bind_param::<BigInt, _>(self.n)
    }
}

/// `products.stock >= n`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Has<'a, C> {
    pub(crate) column: C,
    pub(crate) n: &'a i64,
}

impl<C: QueryFragment<Pg>> QueryFragment<Pg> for Has<'_, C> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.column.walk_ast(out.reborrow())?;
        out.push_sql(" >= ");
        out.push_bind_param::<BigInt, _>(self.n)
    }
}
