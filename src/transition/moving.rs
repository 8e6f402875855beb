//! A move under construction, and how it is sent.

use diesel::{
    QueryResult,
    associations::HasTable,
    expression::{AppearsOnTable, SelectableExpression},
    expression_methods::EqAll,
    pg::Pg,
    query_builder::{AsChangeset, QueryFragment, QueryId},
    query_source::{Column, QuerySource, Table},
    sql_types::BoolOrNullableBool,
};
use diesel_async::AsyncPgConnection;

use super::{Machine, State, Transition, TransitionError, UnknownState};
use crate::{
    error::words::is_lost_race,
    postgres::{
        guarded::{self, Both, Look, Piece, Returns, TRIES, Update},
        savepoint,
        transition::{AsText, Follows, IsState, Label, Nothing, Recorded, SetState},
        version::{self, NotRaised, Raised, Raises},
    },
    version::{Keyed, Versioned},
};

type TableOf<S> = <<S as State>::Column as Column>::Table;

/// What finds the row by its primary key.
pub type RowOf<S, K> = <<TableOf<S> as Table>::PrimaryKey as EqAll<K>>::Output;

/// A move as it begins: nothing but the state is changed.
pub type Begun<S, W> = Moving<S, W, (), NotRaised, Nothing, AsText<<S as State>::Column>>;

impl<S: State> Machine<S> {
    /// Moves the row with this primary key. See [`transition`](crate::transition).
    pub fn transition<K>(&self, key: K, from: S, to: S) -> Begun<S, RowOf<S, K>>
    where
        TableOf<S>: Keyed<K>,
    {
        Moving {
            is_allowed: self.allows(from, to),
            from,
            to,
            row: TableOf::<S>::table().primary_key().eq_all(key),
            changes: (),
            raises: NotRaised,
            follows: Nothing,
            returning: AsText(S::Column::default()),
        }
    }
}

/// A move under construction: see [`Machine::transition`].
#[derive(Debug, Clone)]
#[must_use = "nothing moves until `execute` or `get_result`"]
pub struct Moving<S, W, C, V, H, R> {
    is_allowed: bool,
    from: S,
    to: S,
    row: W,
    changes: C,
    raises: V,
    follows: H,
    returning: R,
}

impl<S: State, W, C, V, H, R> Moving<S, W, C, V, H, R> {
    /// Narrows the row, to one that the caller may see for example. A row that is excluded is
    /// [`Gone`](TransitionError::Gone).
    pub fn filter<P>(self, predicate: P) -> Moving<S, Both<W, P>, C, V, H, R>
    where
        P: AppearsOnTable<TableOf<S>, SqlType: BoolOrNullableBool> + Piece,
    {
        let Self { is_allowed, from, to, row, changes, raises, follows, returning } = self;
        Moving { is_allowed, from, to, row: Both(row, predicate), changes, raises, follows, returning }
    }

    /// Other columns that change along, in the same statement: all of them, or none where the row does
    /// not move.
    pub fn set<C2>(self, changes: C2) -> Moving<S, W, C2::Changeset, V, H, R>
    where
        C2: AsChangeset<Target = TableOf<S>>,
    {
        let Self { is_allowed, from, to, row, raises, follows, returning, .. } = self;
        Moving { is_allowed, from, to, row, changes: changes.as_changeset(), raises, follows, returning }
    }

    /// Raises the version of the row as well, so that whoever has read it before its move is stale.
    pub fn raise_version(self) -> Moving<S, W, C, Raised<<TableOf<S> as Versioned>::Version>, H, R>
    where
        TableOf<S>: Versioned,
    {
        let Self { is_allowed, from, to, row, changes, follows, returning, .. } = self;
        Moving { is_allowed, from, to, row, changes, raises: Raised::new(), follows, returning }
    }

    /// A statement that follows the move in the same transaction, sent by the winner alone: the row of a
    /// history, for example.
    pub fn record<Q>(self, statement: Q) -> Moving<S, W, C, V, Recorded<Q>, R>
    where
        Q: QueryFragment<Pg> + QueryId + Send + Sync,
    {
        let Self { is_allowed, from, to, row, changes, raises, returning, .. } = self;
        Moving { is_allowed, from, to, row, changes, raises, follows: Recorded(statement), returning }
    }

    /// What [`get_result`](Self::get_result) returns of the row, moved now or before.
    pub fn returning<R2>(self, returning: R2) -> Moving<S, W, C, V, H, R2>
    where
        R2: SelectableExpression<TableOf<S>> + Piece,
    {
        let Self { is_allowed, from, to, row, changes, raises, follows, .. } = self;
        Moving { is_allowed, from, to, row, changes, raises, follows, returning }
    }
}

impl<S, W, C, V, H> Moving<S, W, C, V, H, AsText<S::Column>>
where
    S: State<Column: Column<Table: QuerySource<FromClause: Piece>>>,
    W: Piece,
    C: Piece,
    V: Raises,
    H: Follows,
{
    /// Moves the row.
    ///
    /// # Errors
    ///
    /// See [`TransitionError`]. Nothing has moved then.
    pub async fn execute(self, conn: &mut AsyncPgConnection) -> Result<Transition<()>, TransitionError<S>> {
        let moved: Transition<String> = self.get_result(conn).await?;
        Ok(moved.map(drop))
    }
}

impl<S, W, C, V, H, R> Moving<S, W, C, V, H, R>
where
    S: State<Column: Column<Table: QuerySource<FromClause: Piece>>>,
    W: Piece,
    C: Piece,
    V: Raises,
    H: Follows,
{
    /// Moves the row, and returns it.
    ///
    /// # Errors
    ///
    /// See [`TransitionError`]. Nothing has moved then.
    pub async fn get_result<U: Send>(self, conn: &mut AsyncPgConnection) -> Result<Transition<U>, TransitionError<S>>
    where
        R: Returns<U>,
    {
        let transition = self.send(H::FOLLOWS, conn).await?;
        if !H::FOLLOWS || !transition.is_applied() {
            return Ok(transition);
        }
        let followed = self.follows.write(conn).await.map_err(TransitionError::Query);
        savepoint::end(conn, followed.map(|()| transition)).await
    }

    /// Moves the row, and lets the winner do what must follow in the same transaction: the event that is sent
    /// once it is committed, for example. It runs after [`record`](Self::record).
    ///
    /// ```no_run
    /// # use actix_idempotency::{Machine, Transition, states};
    /// # use diesel::prelude::*;
    /// # use diesel_async::{AsyncPgConnection, RunQueryDsl};
    /// # diesel::table! { orders (id) { id -> BigInt, status -> Text, } }
    /// # diesel::table! { events (id) { id -> BigInt, order_id -> BigInt, } }
    /// # states! { enum OrderState for orders.status { Pending = "PENDING", Paid = "PAID" } }
    /// # use OrderState::*;
    /// # async fn example(machine: &Machine<OrderState>, conn: &mut AsyncPgConnection) -> actix_web::Result<()> {
    /// let order: Transition<i64> = machine
    ///     .transition(7, Pending, Paid)
    ///     .returning(orders::id)
    ///     .get_result_and(conn, async |conn, id| {
    ///         let event = diesel::insert_into(events::table).values(events::order_id.eq(*id));
    ///         event.execute(conn).await.map_err(actix_web::error::ErrorInternalServerError)?;
    ///         Ok::<_, actix_web::Error>(())
    ///     })
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// See [`TransitionError`], and the closure's own. Nothing has moved then; a closure that has swallowed the
    /// error of a statement fails with what Postgres says to the next one.
    pub async fn get_result_and<U: Send, E>(
        self,
        conn: &mut AsyncPgConnection,
        then: impl AsyncFnOnce(&mut AsyncPgConnection, &U) -> Result<(), E>,
    ) -> Result<Transition<U>, E>
    where
        R: Returns<U>,
        E: From<TransitionError<S>>,
    {
        let transition = self.send(true, conn).await?;
        let Transition::Applied(row) = &transition else {
            return Ok(transition);
        };
        let mut followed = match self.follows.write(conn).await {
            Ok(()) => then(conn, row).await,
            Err(error) => Err(TransitionError::Query(error).into()),
        };
        if followed.is_ok()
            && let Err(error) = savepoint::check(conn).await
        {
            followed = Err(TransitionError::Query(error).into());
        }
        match followed {
            Ok(()) => savepoint::end(conn, Ok(transition)).await.map_err(|error: TransitionError<S>| error.into()),
            Err(error) => {
                savepoint::roll_back(conn).await.map_err(TransitionError::Query)?;
                Err(error)
            }
        }
    }

    /// Moves the row, or finds out why not. Where something follows, a row that was moved leaves the
    /// transaction (a savepoint in the caller's) open for it.
    async fn send<U: Send>(
        &self,
        something_follows: bool,
        conn: &mut AsyncPgConnection,
    ) -> Result<Transition<U>, TransitionError<S>>
    where
        R: Returns<U>,
    {
        self.check()?;
        let is_nested = guarded::is_in_transaction(conn);
        let mut tries = 0..TRIES;
        loop {
            let last = tries.next().is_none();
            let moved = match something_follows {
                true => self.begin_and_update(conn).await,
                false => self.update(conn).await,
            };
            match moved {
                Ok(Some(row)) => return Ok(Transition::Applied(row)),
                // Another transaction was first: nothing was done, and a new one sees what it did.
                Err(error) if is_lost_race(&error) && !is_nested && !last => continue,
                Err(error) => return Err(error.into()),
                Ok(None) => {}
            }
            let current = self.look(conn).await?;
            if current == self.to {
                if let Some(row) = self.arrived(conn).await? {
                    return Ok(Transition::Already(row));
                }
            } else if current != self.from {
                return Err(TransitionError::Elsewhere { current });
            }
            // It is back where the move starts, or has just left again.
            if last {
                return Err(match V::COLUMN {
                    Some(_) if current == self.from => TransitionError::Overflow,
                    _ => TransitionError::Elsewhere { current },
                });
            }
        }
    }

    /// What is wrong with it, whatever the row is.
    fn check(&self) -> Result<(), TransitionError<S>> {
        let Self { from, to, .. } = *self;
        if !self.is_allowed {
            return Err(TransitionError::NotAllowed { from, to });
        }
        let own = [Some(S::Column::NAME), V::COLUMN];
        match own.into_iter().flatten().find(|column| version::sets(&self.changes, column)) {
            Some(field) => Err(TransitionError::SetsItself { field }),
            None => Ok(()),
        }
    }

    /// Leaves the transaction open only where the row has moved.
    async fn begin_and_update<U: Send>(&self, conn: &mut AsyncPgConnection) -> QueryResult<Option<U>>
    where
        R: Returns<U>,
    {
        savepoint::begin(conn).await?;
        let moved = self.update(conn).await;
        if !matches!(moved, Ok(Some(_))) {
            savepoint::roll_back(conn).await?;
        }
        moved
    }

    async fn update<U: Send>(&self, conn: &mut AsyncPgConnection) -> QueryResult<Option<U>>
    where
        R: Returns<U>,
    {
        let column = S::Column::default();
        let update = Update {
            from: &TableOf::<S>::table().from_clause(),
            set: (SetState { _column: column, label: Label(self.to.label()) }, &self.changes, V::set()),
            row: &self.row,
            guard: Both(IsState { column, label: Label(self.from.label()) }, V::guard()),
            returning: &self.returning,
        };
        guarded::one::<R, U, _>(update, conn).await
    }

    /// Where the row is.
    async fn look(&self, conn: &mut AsyncPgConnection) -> Result<S, TransitionError<S>> {
        let what = AsText(S::Column::default());
        let look = Look { what, from: &TableOf::<S>::table().from_clause(), row: &self.row };
        let label = guarded::one::<AsText<S::Column>, String, _>(look, conn).await?.ok_or(TransitionError::Gone)?;
        S::of_label(&label).ok_or_else(|| TransitionError::UnknownState(UnknownState::new(label, S::Column::NAME)))
    }

    /// The row, if it is where it was to go.
    async fn arrived<U: Send>(&self, conn: &mut AsyncPgConnection) -> QueryResult<Option<U>>
    where
        R: Returns<U>,
    {
        let is_there = IsState { column: S::Column::default(), label: Label(self.to.label()) };
        let from = TableOf::<S>::table().from_clause();
        let look = Look { what: &self.returning, from: &from, row: Both(&self.row, is_there) };
        guarded::one::<R, U, _>(look, conn).await
    }
}
