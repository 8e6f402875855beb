//! A change of one row at a version: built as diesel's are, and sent with a guard.

use diesel::{
    expression::{AppearsOnTable, Expression, SelectableExpression},
    expression_methods::EqAll,
    query_builder::AsChangeset,
    query_source::Column,
    sql_types::BoolOrNullableBool,
};
use diesel_async::AsyncPgConnection;

use super::{Expected, Keyed, VersionError, Versioned, WholeNumber};
use crate::postgres::{
    guarded::{self, Both, Delete, Look, Piece, Returns, TRIES, Update},
    version::{self, Admitted, AsBigInt, IsAdmitted, Raise},
};

/// A row at a version: see [`Versioned::at`].
#[derive(Debug, Clone)]
#[must_use = "nothing is changed until the change is sent"]
pub struct At<T, K, W> {
    table: T,
    key: K,
    row: W,
    expected: Expected,
}

impl<T: Keyed<K>, K: Clone> At<T, K, <T::PrimaryKey as EqAll<K>>::Output> {
    pub(super) fn new(table: T, key: K, expected: Expected) -> Self {
        let row = table.primary_key().eq_all(key.clone());
        Self { table, key, row, expected }
    }
}

impl<T: Versioned, K, W> At<T, K, W> {
    /// Narrows the row, to one that the caller may see for example. A row that is excluded is
    /// [`Gone`](VersionError::Gone).
    pub fn filter<P>(self, predicate: P) -> At<T, K, Both<W, P>>
    where
        P: AppearsOnTable<T, SqlType: BoolOrNullableBool> + Piece,
    {
        let Self { table, key, row, expected } = self;
        At { table, key, row: Both(row, predicate), expected }
    }

    /// What changes, as diesel's `set` takes it: `column.eq(…)`, a tuple of them, or an `AsChangeset`
    /// struct. The version is raised in any case, also where all fields of the struct are `None`.
    ///
    /// Unlike diesel's, the statement is prepared once per connection and text, which saves a round trip from
    /// the second time on: one for each combination of `None` fields that occurs.
    pub fn set<S>(self, changes: S) -> VersionedUpdate<T, K, W, S::Changeset, AsBigInt<T::Version>>
    where
        S: AsChangeset<Target = T>,
        S::Changeset: Piece,
    {
        VersionedUpdate { at: self, changes: changes.as_changeset(), returning: AsBigInt(T::Version::default()) }
    }

    /// Raises the version, and changes nothing else.
    pub fn touch(self) -> VersionedUpdate<T, K, W, (), AsBigInt<T::Version>> {
        VersionedUpdate { at: self, changes: (), returning: AsBigInt(T::Version::default()) }
    }

    /// Deletes the row.
    pub fn delete(self) -> VersionedDelete<T, K, W, AsBigInt<T::Version>> {
        VersionedDelete { at: self, returning: AsBigInt(T::Version::default()) }
    }
}

impl<T: Versioned, K, W: Piece> At<T, K, W>
where
    T::FromClause: Piece,
{
    /// The versions that the row may have.
    fn admitted(&self) -> Result<Admitted, VersionError> {
        match &self.expected {
            Expected::Version(version) => Ok(Admitted::One(*version)),
            Expected::IfMatch(if_match) => Ok(if_match.admitted()?),
        }
    }

    /// Why the guard did not hold. `Ok`: it does by now, so the change may be sent again.
    async fn why(
        &self,
        admitted: &Admitted,
        max: Option<i64>,
        conn: &mut AsyncPgConnection,
    ) -> Result<i64, VersionError> {
        let look = Look { what: AsBigInt(T::Version::default()), from: &self.table.from_clause(), row: &self.row };
        let current = guarded::one::<AsBigInt<T::Version>, i64, _>(look, conn).await?.ok_or(VersionError::Gone)?;
        if !admitted.contains(current) {
            return Err(self.stale(current));
        }
        if max.is_some_and(|max| current >= max) {
            return Err(VersionError::Overflow);
        }
        Ok(current)
    }

    fn stale(&self, current: i64) -> VersionError {
        VersionError::Stale { expected: self.expected.clone(), current }
    }
}

/// A change of one row, ready to be sent; what a [`batch`](super::batch()) is made of.
pub trait Change<U> {
    /// The type of the primary key.
    type Key;

    /// The row that it changes.
    fn key(&self) -> &Self::Key;

    /// Sends it.
    fn send(&self, conn: &mut AsyncPgConnection) -> impl Future<Output = Result<U, VersionError>> + Send;
}

/// `UPDATE … WHERE id = … AND version = …`: see [`Versioned::at`].
#[derive(Debug, Clone)]
#[must_use = "nothing is changed until `execute` or `get_result`"]
pub struct VersionedUpdate<T, K, W, S, R> {
    at: At<T, K, W>,
    changes: S,
    returning: R,
}

impl<T: Versioned, K, W, S> VersionedUpdate<T, K, W, S, AsBigInt<T::Version>> {
    /// What [`get_result`](VersionedUpdate::get_result) returns of the new row.
    pub fn returning<R: SelectableExpression<T> + Piece>(self, returning: R) -> VersionedUpdate<T, K, W, S, R> {
        VersionedUpdate { at: self.at, changes: self.changes, returning }
    }

    /// Sends it, and returns the new version: what the next change in the same transaction expects.
    ///
    /// # Errors
    ///
    /// See [`VersionError`]. Nothing is changed then.
    pub async fn execute(self, conn: &mut AsyncPgConnection) -> Result<i64, VersionError>
    where
        Self: Change<i64>,
    {
        self.send(conn).await
    }
}

impl<T, K, W, S, R> VersionedUpdate<T, K, W, S, R> {
    /// Sends it, and returns the new row.
    ///
    /// # Errors
    ///
    /// See [`VersionError`]. Nothing is changed then.
    pub async fn get_result<U>(self, conn: &mut AsyncPgConnection) -> Result<U, VersionError>
    where
        Self: Change<U>,
    {
        self.send(conn).await
    }
}

impl<U, T, K, W, S, R> Change<U> for VersionedUpdate<T, K, W, S, R>
where
    U: Send,
    T: Versioned<FromClause: Piece> + Send + Sync,
    K: Send + Sync,
    W: Piece,
    S: Piece,
    R: Returns<U>,
{
    type Key = K;

    fn key(&self) -> &K {
        &self.at.key
    }

    async fn send(&self, conn: &mut AsyncPgConnection) -> Result<U, VersionError> {
        if version::sets(&self.changes, T::Version::NAME) {
            return Err(VersionError::SetsVersion { field: T::Version::NAME });
        }
        let column = T::Version::default();
        let admitted = self.at.admitted()?;
        let max = Some(<<T::Version as Expression>::SqlType as WholeNumber>::MAX);
        let update = Update {
            from: &self.at.table.from_clause(),
            set: (Raise(column), &self.changes),
            row: &self.at.row,
            guard: IsAdmitted { column, admitted: &admitted, max },
            returning: &self.returning,
        };
        let mut current = 0;
        for _ in 0..TRIES {
            if let Some(row) = guarded::one::<R, U, _>(update, conn).await? {
                return Ok(row);
            }
            current = self.at.why(&admitted, max, conn).await?;
        }
        Err(self.at.stale(current))
    }
}

/// `DELETE … WHERE id = … AND version = …`: see [`Versioned::at`].
#[derive(Debug, Clone)]
#[must_use = "nothing is deleted until `execute` or `get_result`"]
pub struct VersionedDelete<T, K, W, R> {
    at: At<T, K, W>,
    returning: R,
}

impl<T: Versioned, K, W> VersionedDelete<T, K, W, AsBigInt<T::Version>> {
    /// What [`get_result`](VersionedDelete::get_result) returns of the row that is gone.
    pub fn returning<R: SelectableExpression<T> + Piece>(self, returning: R) -> VersionedDelete<T, K, W, R> {
        VersionedDelete { at: self.at, returning }
    }

    /// Sends it, and returns the version that the row had.
    ///
    /// # Errors
    ///
    /// See [`VersionError`]. Nothing is deleted then.
    pub async fn execute(self, conn: &mut AsyncPgConnection) -> Result<i64, VersionError>
    where
        Self: Change<i64>,
    {
        self.send(conn).await
    }
}

impl<T, K, W, R> VersionedDelete<T, K, W, R> {
    /// Sends it, and returns the row that is gone.
    ///
    /// # Errors
    ///
    /// See [`VersionError`]. Nothing is deleted then.
    pub async fn get_result<U>(self, conn: &mut AsyncPgConnection) -> Result<U, VersionError>
    where
        Self: Change<U>,
    {
        self.send(conn).await
    }
}

impl<U, T, K, W, R> Change<U> for VersionedDelete<T, K, W, R>
where
    U: Send,
    T: Versioned<FromClause: Piece> + Send + Sync,
    K: Send + Sync,
    W: Piece,
    R: Returns<U>,
{
    type Key = K;

    fn key(&self) -> &K {
        &self.at.key
    }

    async fn send(&self, conn: &mut AsyncPgConnection) -> Result<U, VersionError> {
        let column = T::Version::default();
        let admitted = self.at.admitted()?;
        let delete = Delete {
            from: &self.at.table.from_clause(),
            row: &self.at.row,
            guard: IsAdmitted { column, admitted: &admitted, max: None },
            returning: &self.returning,
        };
        let mut current = 0;
        for _ in 0..TRIES {
            if let Some(row) = guarded::one::<R, U, _>(delete, conn).await? {
                return Ok(row);
            }
            current = self.at.why(&admitted, None, conn).await?;
        }
        Err(self.at.stale(current))
    }
}
