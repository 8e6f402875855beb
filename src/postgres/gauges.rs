//! How old the oldest rows are, and how many are half-done. Each question looks at a bounded stretch of an index and writes nothing.

use diesel::{
    QueryResult,
    sql_types::{BigInt, Double, Nullable},
};
use diesel_async::RunQueryDsl;

use super::{
    AsyncPgConnection, lapsed, statement, steps,
    unfinished::{FINISHED, UNFINISHED, UNFINISHED_WITHOUT_STEPS},
};

/// How many rows are looked at: those that are really the oldest are among the first.
const ROWS: i64 = 1000;

statement! {
    /// `expires_at` is a lower bound, by which the index finds them.
    struct OldestExpired { rows: i64 }
    returns Nullable<Double>;
    [
        "SELECT extract(epoch FROM clock_timestamp() - min(expired_at))::float8 FROM (SELECT \
         coalesce(completed_at, leased_until) + (expires_at - created_at) AS expired_at FROM idempotency_keys \
         WHERE expires_at <= now() AND ", FINISHED, " ORDER BY expires_at LIMIT ", (rows: BigInt),
        ") AS first WHERE expired_at <= now()",
    ]
}

statement! {
    /// In the order of the optional index: those whose attempt has died come first.
    struct OldestOutstanding { rows: i64 }
    returns Nullable<Double>;
    [
        "SELECT extract(epoch FROM clock_timestamp() - min(created_at))::float8 FROM (SELECT created_at \
         FROM idempotency_keys WHERE state = 'outstanding' ORDER BY leased_until LIMIT ", (rows: BigInt), ") AS first",
    ]
}

/// The statement, for rows of which it is asked in this way whether they are half-done.
macro_rules! counting {
    ($name:ident, $unfinished:tt) => {
        statement! {
            /// Those that are kept expired first.
            struct $name { rows: i64 }
            returns BigInt;
            [
                "SELECT count(*) FROM (SELECT * FROM idempotency_keys WHERE expires_at <= now() ORDER BY expires_at LIMIT ",
                (rows: BigInt),
                ") AS k WHERE coalesce(k.completed_at, k.leased_until) + (k.expires_at - k.created_at) <= now() AND ",
                $unfinished,
            ]
        }
    };
}

counting!(Unfinished, UNFINISHED);
counting!(UnfinishedUnseen, UNFINISHED_WITHOUT_STEPS);

/// In seconds; 0 where there is none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Oldest {
    /// `None`: there is no index that finds it.
    pub(crate) outstanding: Option<f64>,
    pub(crate) expired: f64,
    /// How many half-done keys have expired.
    pub(crate) unfinished: i64,
}

/// For how long the oldest row has been expired, in seconds; 0 where there is none.
pub(crate) async fn oldest_expired(conn: &mut AsyncPgConnection) -> QueryResult<f64> {
    let asking = async |conn: &mut AsyncPgConnection| OldestExpired { rows: &ROWS }.get_result(conn).await;
    let expired: Option<f64> = conn.build_transaction().read_committed().read_only().run(asking).await?;
    Ok(expired.unwrap_or_default())
}

/// READ COMMITTED whatever the default is: to have read a stretch of an index is not to fail the claims that write
/// into it.
pub(crate) async fn oldest(conn: &mut AsyncPgConnection) -> QueryResult<Oldest> {
    conn.build_transaction()
        .read_committed()
        .read_only()
        .run(async |conn| {
            let expired: Option<f64> = OldestExpired { rows: &ROWS }.get_result(conn).await?;
            let outstanding = if lapsed::is_indexed(conn).await? {
                let age: Option<f64> = OldestOutstanding { rows: &ROWS }.get_result(conn).await?;
                Some(age.unwrap_or_default())
            } else {
                None
            };
            let unfinished = if steps::may_be_read(conn).await? {
                Unfinished { rows: &ROWS }.get_result(conn).await?
            } else {
                UnfinishedUnseen { rows: &ROWS }.get_result(conn).await?
            };
            Ok(Oldest { outstanding, expired: expired.unwrap_or_default(), unfinished })
        })
        .await
}
