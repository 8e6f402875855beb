//! A state machine whose repeat is success.
//!
//! A payment provider calls back twice, a queue delivers again, two people press two buttons. Each wants to
//! move a row from one state to another; one of them does, and the others are told what they need to know:
//!
//! ```no_run
//! use actix_idempotency::{IdemTx, Machine, Transition, states};
//! use actix_web::{HttpResponse, Result, web};
//! use diesel::prelude::*;
//!
//! diesel::table! {
//!     orders (id) { id -> BigInt, status -> Text, payment -> Nullable<Text>, }
//! }
//! # diesel::table! { history (id) { id -> BigInt, order_id -> BigInt, status -> Text, } }
//!
//! states! {
//!     pub enum OrderState for orders.status { Pending = "PENDING", Paid = "PAID", Cancelled = "CANCELLED" }
//! }
//! use OrderState::{Cancelled, Paid, Pending};
//!
//! /// Called once, where the program starts; shared as app data.
//! fn machine() -> Machine<OrderState> {
//!     Machine::starting_at(Pending).allow(Pending, [Paid, Cancelled]).ending_at([Paid, Cancelled]).build()
//! }
//!
//! async fn callback(
//!     mut tx: IdemTx,
//!     machine: web::Data<Machine<OrderState>>,
//!     payment: web::Json<(i64, String)>,
//! ) -> Result<HttpResponse> {
//!     let (id, payment) = payment.into_inner();
//!     let order = machine
//!         .transition(id, Pending, Paid)
//!         .set(orders::payment.eq(payment))
//!         .record(diesel::insert_into(history::table).values((history::order_id.eq(id), history::status.eq("PAID"))))
//!         .execute(&mut tx)
//!         .await?;
//!     Ok(match order {
//!         Transition::Applied(()) => HttpResponse::Ok().body("thank you"),
//!         Transition::Already(()) => HttpResponse::Ok().body("we know"),
//!     })
//! }
//! ```
//!
//! It is one statement, `UPDATE … SET status = 'PAID', payment = … WHERE id = … AND status = 'PENDING'`, and
//! its row count decides: of any number of movers one wins. The others look once more:
//!
//! - the row is where they wanted it: [`Transition::Already`], a success;
//! - it is somewhere else: [`TransitionError::Elsewhere`], 409; nothing of theirs was saved;
//! - there is no row: [`TransitionError::Gone`], 404.
//!
//! None of these is a failed statement: a transaction around it goes on. A move that the [`Machine`] does not
//! allow is refused before anything is sent.
//!
//! # What follows a move
//!
//! The winner alone writes the row of [`record`](Moving::record), and the winner alone runs the closure of
//! [`get_result_and`](Moving::get_result_and), the place for the event that must follow. Both are in the
//! transaction of the move: the caller's, or else one of its own. If they fail, nothing has moved.
//!
//! # Isolation
//!
//! As for [`version`](crate::version#isolation): above READ COMMITTED, a move that loses is sent again, but
//! inside a transaction of the caller's it fails with 40001 ([`TransitionError::Query`]).

mod error;
mod machine;
mod moving;
mod state;

pub use self::{
    error::TransitionError,
    machine::{InvalidMachine, Machine, MachineBuilder},
    moving::{Begun, Moving, RowOf},
    state::{State, UnknownState},
};
pub use crate::postgres::transition::{AsText, Follows, Label, Nothing, Recorded, StateType};

/// Where a row is that was to be moved: in the state that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a repeat is told from the first time"]
pub enum Transition<T> {
    /// It was moved, by this call.
    Applied(T),
    /// It was there already: a repeat, or somebody else who wanted the same. Nothing was written.
    Already(T),
}

impl<T> Transition<T> {
    /// The row, whoever moved it.
    pub fn into_inner(self) -> T {
        match self {
            Self::Applied(row) | Self::Already(row) => row,
        }
    }

    /// Whether this call moved it.
    #[must_use]
    pub fn is_applied(&self) -> bool {
        matches!(self, Self::Applied(_))
    }

    /// The row if this call moved it, for moves that must not be repeated.
    #[must_use]
    pub fn applied(self) -> Option<T> {
        match self {
            Self::Applied(row) => Some(row),
            Self::Already(_) => None,
        }
    }

    /// The same with another row.
    pub fn map<U>(self, map: impl FnOnce(T) -> U) -> Transition<U> {
        match self {
            Self::Applied(row) => Transition::Applied(map(row)),
            Self::Already(row) => Transition::Already(map(row)),
        }
    }
}
