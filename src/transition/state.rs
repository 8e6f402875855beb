//! The states of a row.

use std::fmt::Debug;

use diesel::{associations::HasTable, query_source::Column};

use crate::{postgres::transition::StateType, version::Piece};

/// The states that a row can be in, by the text that its column holds: an enum made by
/// [`states!`](crate::states).
///
/// An enum belongs to one column of one table. The states of another table are another type:
///
/// ```compile_fail,E0308
/// # diesel::table! { orders (id) { id -> BigInt, status -> Text, } }
/// # diesel::table! { tickets (id) { id -> BigInt, status -> Text, } }
/// actix_idempotency::states! { enum Order for orders.status { Open = "OPEN", Paid = "PAID" } }
/// actix_idempotency::states! { enum Ticket for tickets.status { Open = "OPEN", Done = "DONE" } }
///
/// fn pay(machine: &actix_idempotency::Machine<Order>) {
///     let paid = machine.transition(7, Ticket::Open, Order::Paid);
/// }
/// ```
///
/// ```
/// # diesel::table! { orders (id) { id -> BigInt, status -> Text, } }
/// actix_idempotency::states! { enum Order for orders.status { Open = "OPEN", Paid = "PAID" } }
///
/// fn pay(machine: &actix_idempotency::Machine<Order>) {
///     let paid = machine.transition(7, Order::Open, Order::Paid);
/// }
/// ```
///
/// and so are its columns:
///
/// ```compile_fail,E0271
/// # use diesel::prelude::*;
/// # diesel::table! { orders (id) { id -> BigInt, status -> Text, note -> Text, } }
/// # diesel::table! { tickets (id) { id -> BigInt, note -> Text, } }
/// # actix_idempotency::states! { enum Order for orders.status { Open = "OPEN", Paid = "PAID" } }
/// fn pay(machine: &actix_idempotency::Machine<Order>) {
///     let paid = machine.transition(7, Order::Open, Order::Paid).set(tickets::note.eq("by card"));
/// }
/// ```
///
/// ```
/// # use diesel::prelude::*;
/// # diesel::table! { orders (id) { id -> BigInt, status -> Text, note -> Text, } }
/// # actix_idempotency::states! { enum Order for orders.status { Open = "OPEN", Paid = "PAID" } }
/// fn pay(machine: &actix_idempotency::Machine<Order>) {
///     let paid = machine.transition(7, Order::Open, Order::Paid).set(orders::note.eq("by card"));
/// }
/// ```
pub trait State: Copy + Eq + Debug + Send + Sync + 'static {
    /// The column that holds it: `Text`, or a Postgres enum, not NULL.
    type Column: Column<SqlType: StateType, Table: HasTable<Table = <Self::Column as Column>::Table>>
        + Piece
        + Default
        + Copy;

    /// All of them.
    const ALL: &'static [Self];

    /// What the column holds.
    fn label(self) -> &'static str;

    /// The state with this label.
    #[must_use]
    fn of_label(label: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|state| state.label() == label)
    }
}

/// What a column holds is no state: another version of the service wrote it, or somebody by hand.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{label}` is no state of {column}")]
#[non_exhaustive]
pub struct UnknownState {
    /// What it holds.
    pub label: String,
    /// The column.
    pub column: &'static str,
}

impl UnknownState {
    #[doc(hidden)]
    #[must_use]
    pub fn new(label: String, column: &'static str) -> Self {
        Self { label, column }
    }
}

/// Declares the states of a row, and the column that holds them: an enum that implements
/// [`State`](crate::transition::State), and that diesel stores and loads.
///
/// ```
/// use diesel::prelude::*;
///
/// diesel::table! {
///     orders (id) { id -> BigInt, status -> Text, }
/// }
///
/// actix_idempotency::states! {
///     /// The life of an order.
///     pub enum OrderState for orders.status {
///         Pending = "PENDING",
///         Paid = "PAID",
///         Cancelled = "CANCELLED",
///     }
/// }
///
/// #[derive(Queryable, Selectable)]
/// struct Order {
///     id: i64,
///     status: OrderState,
/// }
///
/// let open = orders::table.filter(orders::status.eq(OrderState::Pending));
/// assert_eq!(OrderState::Paid.to_string(), "PAID");
/// ```
///
/// The table is named as for [`versioned!`](crate::versioned). The column is `Text`, or the SQL type of a Postgres enum as `diesel print-schema` writes it. Derives of your
/// own (`#[derive(serde::Serialize)]`) go on the enum. Loading a row with any other text fails with
/// [`UnknownState`](crate::transition::UnknownState) inside diesel's `DeserializationError`.
#[macro_export]
macro_rules! states {
    (
        $(#[$meta:meta])*
        $vis:vis enum $name:ident for $($table:ident)::+ . $column:ident {
            $($(#[$state_meta:meta])* $state:ident = $label:literal),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ::diesel::expression::AsExpression, ::diesel::deserialize::FromSqlRow)]
        #[diesel(sql_type = ::diesel::dsl::SqlTypeOf<$($table)::+ ::$column>)]
        $vis enum $name {
            $($(#[$state_meta])* $state),+
        }

        impl $crate::transition::State for $name {
            type Column = $($table)::+ ::$column;

            const ALL: &'static [Self] = &[$(Self::$state),+];

            fn label(self) -> &'static str {
                match self {
                    $(Self::$state => $label),+
                }
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str($crate::transition::State::label(*self))
            }
        }

        impl ::diesel::serialize::ToSql<::diesel::dsl::SqlTypeOf<$($table)::+ ::$column>, ::diesel::pg::Pg> for $name {
            fn to_sql<'b>(
                &'b self,
                out: &mut ::diesel::serialize::Output<'b, '_, ::diesel::pg::Pg>,
            ) -> ::diesel::serialize::Result {
                ::std::io::Write::write_all(out, $crate::transition::State::label(*self).as_bytes())?;
                Ok(::diesel::serialize::IsNull::No)
            }
        }

        impl ::diesel::deserialize::FromSql<::diesel::dsl::SqlTypeOf<$($table)::+ ::$column>, ::diesel::pg::Pg> for $name {
            fn from_sql(bytes: ::diesel::pg::PgValue<'_>) -> ::diesel::deserialize::Result<Self> {
                let label = ::std::str::from_utf8(bytes.as_bytes())?;
                $crate::transition::State::of_label(label).ok_or_else(|| {
                    let column = concat!(stringify!($($table)::+), ".", stringify!($column));
                    $crate::transition::UnknownState::new(label.to_owned(), column).into()
                })
            }
        }
    };
}
