//! All SQL, and nothing but SQL: each function takes a connection, sends one statement and returns
//! what came of it. No pool, no policy, no actix.
//!
//! Hot statements are query fragments of our own ([`statement!`]): diesel prepares every UPDATE and
//! every batch anew, which costs a second round trip and a parse for each.

pub(crate) mod decrement;
pub(crate) mod duplicate;
pub(crate) mod ending;
pub(crate) mod gauges;
pub(crate) mod guarded;
pub(crate) mod inbox;
pub(crate) mod inspect;
pub(crate) mod intervene;
pub(crate) mod keys;
pub(crate) mod lapsed;
pub(crate) mod outbox;
pub(crate) mod row;
pub(crate) mod savepoint;
pub(crate) mod server;
pub(crate) mod stand_in;
pub(crate) mod steps;
pub(crate) mod sweep;
pub(crate) mod tables;
pub(crate) mod transactions;
pub(crate) mod transition;
pub(crate) mod unfinished;
pub(crate) mod version;
pub(crate) mod witness;

pub(crate) use diesel_async::AsyncPgConnection;

/// A pool of connections as diesel-async and bb8 make them.
///
/// [`pool()`](fn@crate::pool) makes one that suits this crate; any other of this type will do.
pub type PgPool = diesel_async::pooled_connection::bb8::Pool<AsyncPgConnection>;

/// Declares a statement that is prepared once per connection: pieces of SQL and, between them, typed
/// parameters.
///
/// The text must depend on nothing but the type: `QueryId` is what a connection finds its prepared
/// statement by.
///
/// An array is unnested by way of a sub-select, `unnest((SELECT …))`, where the statement is hot: otherwise
/// Postgres sees how few elements it has, reckons that a plan for so few beats one for any number, and
/// plans anew each time.
macro_rules! statement {
    (
        $(#[$meta:meta])*
        struct $name:ident { $($field:ident : $type:ty),* $(,)? }
        $(returns $returns:ty;)?
        [ $($piece:tt),* $(,)? ]
    ) => {
        $(#[$meta])*
        #[derive(Debug)]
        struct $name<'a> {
            $($field: &'a $type,)*
        }

        impl diesel::query_builder::QueryFragment<diesel::pg::Pg> for $name<'_> {
            fn walk_ast<'b>(
                &'b self,
                mut out: diesel::query_builder::AstPass<'_, 'b, diesel::pg::Pg>,
            ) -> diesel::QueryResult<()> {
                $(statement!(@piece self, out, $piece);)*
                Ok(())
            }
        }

        impl diesel::query_builder::QueryId for $name<'_> {
            type QueryId = $name<'static>;
            const HAS_STATIC_QUERY_ID: bool = true;
        }

        $(impl diesel::query_builder::Query for $name<'_> {
            type SqlType = $returns;
        })?
    };
    (@piece $self:ident, $out:ident, ($field:ident: $sql_type:ty)) => {
        $out.push_bind_param::<$sql_type, _>($self.$field)?
    };
    (@piece $self:ident, $out:ident, $sql:tt) => {
        $out.push_sql($sql)
    };
}
pub(crate) use statement;
