//! The same in a transaction of the caller's: the work's writes and its result commit together, with whatever
//! else the caller writes.

use diesel_async::AsyncPgConnection;
use serde::{Serialize, de::DeserializeOwned};

use super::{
    Once, OnceError, Outcome,
    run::{Run, json_of},
};
use crate::{
    ask::{Ask, Columns},
    atomic,
    engine::leases::Owner,
    error::{Error, ErrorKind},
    postgres::{keys, savepoint, transactions},
    refusal::Code,
    scope::Scope,
    telemetry,
    told::Told,
    transaction::{Parts, code_of},
};

impl Once {
    /// Runs `work` in the caller's transaction, unless it was done under this key. The result is stored in the same
    /// transaction: rolled back, nothing is left of either.
    ///
    /// ```no_run
    /// use actix_idempotency::{IdemTx, Once, OnceError, Outcome, Scope};
    /// # use actix_web::{HttpResponse, web};
    /// # use diesel_async::AsyncPgConnection;
    /// # async fn book(conn: &mut AsyncPgConnection, room: i64) -> actix_web::Result<i64> { Ok(room) }
    ///
    /// async fn handler(mut tx: IdemTx, once: web::Data<Once>, room: web::Path<i64>) -> actix_web::Result<HttpResponse> {
    ///     let night = format!("room-{room}");
    ///     let booking = once
    ///         .run_in(&mut tx, Scope::once("booking"), &night, &*room, async |conn| book(conn, *room).await)
    ///         .await?;
    ///     Ok(match booking {
    ///         Outcome::Ran(id) | Outcome::Replayed(id) => HttpResponse::Ok().json(id),
    ///         Outcome::Outstanding(_) => HttpResponse::Conflict().finish(),
    ///     })
    /// }
    /// ```
    ///
    /// No claim is written first and no lease kept: a lock that ends with the transaction makes whoever comes meanwhile
    /// [`Outcome::Outstanding`], at once and without blocking; the primary key is the guarantee. It never waits,
    /// whatever [`Policy::on_outstanding`](crate::Policy::on_outstanding) says: the caller's transaction is open. Outside a
    /// transaction it opens one and commits it.
    ///
    /// The work runs in a savepoint. Where it fails, or where it turns out that somebody else was first, its writes are
    /// rolled back and the caller's transaction goes on. Above READ COMMITTED, somebody who was first since the caller's
    /// snapshot was taken is [`Code::Serialization`].
    ///
    /// For work whose only effects are in this database: there is no key to derive others from.
    ///
    /// # Errors
    ///
    /// See [`OnceError`]; [`Code::TransactionAborted`] where the work has swallowed the error of a statement.
    pub async fn run_in<T, E>(
        &self,
        conn: &mut AsyncPgConnection,
        scope: Scope,
        key: &str,
        input: &(impl Serialize + ?Sized),
        work: impl AsyncFnOnce(&mut AsyncPgConnection) -> Result<T, E>,
    ) -> Result<Outcome<T>, OnceError<E>>
    where
        T: Serialize + DeserializeOwned,
    {
        let run = Run::new(&self.engine, &self.policy, self.ask(scope, key, input)?);
        savepoint::begin(conn).await.map_err(store)?;
        let outcome = match self.within(conn, run.ask(), work).await {
            Ok(Within::Finished(value)) => match savepoint::commit(conn).await {
                Ok(()) => Ok(Outcome::Ran(value)),
                Err(error) => Err(not_committed(&error.into())),
            },
            Ok(Within::Told(told)) => {
                savepoint::roll_back(conn).await.map_err(store)?;
                run.answered(told)
            }
            Ok(Within::Lost) => {
                savepoint::roll_back(conn).await.map_err(store)?;
                let row = keys::look(conn, &run.ask().id.0).await.map_err(store)?;
                let told = row.map(|row| Told::by(row, run.ask(), &self.policy)).transpose();
                match told.map_err(OnceError::Store)?.flatten() {
                    Some(told) => run.answered(told),
                    None => Err(Code::LeaseLost.into()),
                }
            }
            Err(error) => {
                savepoint::roll_back(conn).await.map_err(store)?;
                Err(error)
            }
        };
        run.report(&outcome);
        outcome
    }

    async fn within<T: Serialize, E>(
        &self,
        conn: &mut AsyncPgConnection,
        ask: &Ask,
        work: impl AsyncFnOnce(&mut AsyncPgConnection) -> Result<T, E>,
    ) -> Result<Within<T>, OnceError<E>> {
        let met = atomic::meet(&self.engine, conn, ask, &self.policy).await.map_err(store)?;
        match met.told {
            Some(told) => return Ok(Within::Told(told)),
            None if self.engine.is_draining() => return Ok(Within::Told(Told::Draining)),
            None if !met.locked => return Ok(Within::Told(atomic::outstanding())),
            None => {}
        }
        let depth = transactions::depth(conn);
        let value = work(conn).await.map_err(OnceError::Failed)?;
        if transactions::depth(conn) != depth {
            telemetry::misconfigured("the work of Once::run_in has left the transaction as it must not");
            return Err(Code::TransactionMisused.into());
        }
        let columns = Columns::of(ask);
        let (owner, seed) = (rand::random::<Owner>(), rand::random::<[u8; 32]>());
        let new = columns.new_claim(ask, &owner, &seed, &self.policy);
        let snapshot = self.policy.stored(json_of(&value).fit_for(&self.policy));
        let parts = Parts::of(&snapshot);
        let answer = parts.answer(&snapshot);
        match transactions::finish(conn, &new, &answer, None, met.seen.as_ref()).await {
            Ok(true) => {
                self.engine.recent.remember(&ask.id);
                self.engine.sweep(self.policy.retention);
                Ok(Within::Finished(value))
            }
            Ok(false) => Ok(Within::Lost),
            Err(error) => Err(code_of(&error.into()).into()),
        }
    }
}

/// What came of it, before the savepoint ends.
enum Within<T> {
    Finished(T),
    Told(Told),
    /// Somebody else has written the row since it was looked for.
    Lost,
}

fn store<E>(error: impl Into<Error>) -> OnceError<E> {
    match error.into() {
        error if error.kind() == ErrorKind::Serialization => Code::Serialization.into(),
        error => OnceError::Store(error),
    }
}

/// Of a COMMIT that got no answer nobody knows what it did.
fn not_committed<E>(error: &Error) -> OnceError<E> {
    match code_of(error) {
        Code::StoreUnavailable => Code::OutcomeUnknown.into(),
        code => code.into(),
    }
}
