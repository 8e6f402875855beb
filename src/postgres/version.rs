//! The pieces that concern a version: raised, expected, and whether a changeset sets it by itself.

use std::{
    fmt::{self, Write as _},
    marker::PhantomData,
};

use diesel::{
    QueryResult,
    expression::Expression,
    pg::Pg,
    query_builder::{AstPass, QueryFragment},
    query_source::Column,
    sql_types::{Array, BigInt, Integer},
};

use super::guarded::Piece;

/// `version = orders.version + 1`.
#[derive(Debug, Clone, Copy)]
pub struct Raise<C>(pub(crate) C);

impl<C: Column + QueryFragment<Pg>> QueryFragment<Pg> for Raise<C> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_identifier(C::NAME)?;
        out.push_sql(" = ");
        self.0.walk_ast(out.reborrow())?;
        out.push_sql(" + 1");
        Ok(())
    }
}

/// The version as a `bigint`, whatever the column is.
#[derive(Debug, Clone, Copy)]
pub struct AsBigInt<C>(pub(crate) C);

impl<C: QueryFragment<Pg>> QueryFragment<Pg> for AsBigInt<C> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("CAST(");
        self.0.walk_ast(out.reborrow())?;
        out.push_sql(" AS bigint)");
        Ok(())
    }
}

impl<C: Expression> Expression for AsBigInt<C> {
    type SqlType = BigInt;
}

/// Which versions a row may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Admitted {
    One(i64),
    Listed(Vec<i64>),
    All,
}

impl Admitted {
    pub(crate) fn contains(&self, version: i64) -> bool {
        match self {
            Self::One(admitted) => *admitted == version,
            Self::Listed(admitted) => admitted.contains(&version),
            Self::All => true,
        }
    }
}

/// The version is one of those, and below `max`, so that `version + 1` does not overflow.
#[derive(Debug, Clone, Copy)]
pub struct IsAdmitted<'a, C> {
    pub(crate) column: C,
    pub(crate) admitted: &'a Admitted,
    pub(crate) max: Option<i64>,
}

impl<C: QueryFragment<Pg>> QueryFragment<Pg> for IsAdmitted<'_, C> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.column.walk_ast(out.reborrow())?;
        match self.admitted {
            Admitted::One(version) => {
                out.push_sql(" = ");
                out.push_bind_param::<BigInt, _>(version)?;
            }
            Admitted::Listed(versions) => {
                out.push_sql(" = ANY(");
                out.push_bind_param::<Array<BigInt>, _>(versions)?;
                out.push_sql(")");
            }
            Admitted::All => out.push_sql(" IS NOT NULL"),
        }
        if let Some(max) = &self.max {
            out.push_sql(" AND ");
            self.column.walk_ast(out.reborrow())?;
            out.push_sql(" < ");
            out.push_bind_param::<BigInt, _>(max)?;
        }
        Ok(())
    }
}

/// Whether a statement that is guarded by something else raises the version as well.
pub trait Raises: Send + Sync {
    #[doc(hidden)]
    type Set: Piece + Copy;
    #[doc(hidden)]
    type Guard: Piece + Copy;

    #[doc(hidden)]
    const COLUMN: Option<&'static str>;

    #[doc(hidden)]
    fn set() -> Self::Set;

    #[doc(hidden)]
    fn guard() -> Self::Guard;
}

/// The version stays as it is, or there is none.
#[derive(Debug, Clone, Copy)]
pub struct NotRaised;

impl Raises for NotRaised {
    type Set = ();
    type Guard = Always;

    const COLUMN: Option<&'static str> = None;

    fn set() {}

    fn guard() -> Always {
        Always
    }
}

/// The version of the table, in its column `C`, is raised along.
#[derive(Debug, Clone, Copy)]
pub struct Raised<C>(PhantomData<fn() -> C>);

impl<C> Raised<C> {
    pub(crate) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<C> Raises for Raised<C>
where
    C: Column<SqlType: WholeNumber> + Piece + Default + Copy,
{
    type Set = Raise<C>;
    type Guard = IsAdmitted<'static, C>;

    const COLUMN: Option<&'static str> = Some(C::NAME);

    fn set() -> Raise<C> {
        Raise(C::default())
    }

    fn guard() -> IsAdmitted<'static, C> {
        IsAdmitted { column: C::default(), admitted: &Admitted::All, max: Some(C::SqlType::MAX) }
    }
}

/// `TRUE`.
#[derive(Debug, Clone, Copy)]
pub struct Always;

impl QueryFragment<Pg> for Always {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("TRUE");
        Ok(())
    }
}

/// What the column of a version, or of a quantity, can be: `Integer` or `BigInt`, not NULL.
#[diagnostic::on_unimplemented(message = "this column must be an `Integer` or a `BigInt`, and not NULL")]
pub trait WholeNumber: sealed::Sealed {
    #[doc(hidden)]
    const MAX: i64;
}

impl WholeNumber for Integer {
    const MAX: i64 = i32::MAX as i64;
}

impl WholeNumber for BigInt {
    const MAX: i64 = i64::MAX;
}

mod sealed {
    pub trait Sealed {}

    impl Sealed for diesel::sql_types::Integer {}
    impl Sealed for diesel::sql_types::BigInt {}
}

/// Whether a changeset assigns to this column: Postgres would refuse the second assignment to it, and
/// the caller's transaction with it.
pub(crate) fn sets(changes: &impl Piece, column: &str) -> bool {
    let mut sql = Sql(String::new());
    // It fails on purpose once it has the SQL: the values of the parameters need not be printed.
    let _ = write!(sql, "{}", diesel::debug_query::<Pg, _>(changes));
    assigns(&sql.0, column)
}

/// The first piece that is written to it.
struct Sql(String);

impl fmt::Write for Sql {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        if !self.0.is_empty() {
            return Err(fmt::Error);
        }
        self.0.push_str(piece);
        Ok(())
    }
}

/// Whether `"column" = …` is among assignments separated by commas.
fn assigns(sql: &str, column: &str) -> bool {
    let target = format!("\"{}\" = ", column.replace('"', "\"\""));
    let (mut depth, mut quote, mut starts) = (0_i32, None, true);
    for (at, byte) in sql.bytes().enumerate() {
        if starts && sql[at..].starts_with(&target) {
            return true;
        }
        match (quote, byte) {
            (Some(open), _) => quote = Some(open).filter(|open| *open != byte),
            (None, b'\'' | b'"') => quote = Some(byte),
            (None, b'(' | b'[') => depth += 1,
            (None, b')' | b']') => depth -= 1,
            _ => {}
        }
        starts = quote.is_none() && depth == 0 && (byte == b',' || starts && byte == b' ');
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_assignment_is_told_from_a_mention() {
        assert!(assigns(r#""version" = $1"#, "version"));
        assert!(assigns(r#""status" = $1, "version" = $2"#, "version"));
        assert!(!assigns(r#""status" = $1"#, "version"));
        assert!(!assigns(r#""old_version" = $1, "version_note" = $2"#, "version"));
        assert!(!assigns(r#""same" = ("orders"."version" = $1)"#, "version"));
        assert!(!assigns(r#""copy" = "orders"."version""#, "version"));
        assert!(!assigns(r#""x" = coalesce($1, "version" = 2)"#, "version"));
        assert!(!assigns(r#""x" = ', "version" = 2'"#, "version"));
        assert!(!assigns("", "version"));
    }
}
