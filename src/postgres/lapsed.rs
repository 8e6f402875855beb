//! Keys whose attempt has died, or has given them back half-done, and that nobody retries: taken over a batch at a time.

use diesel::{
    QueryResult, Queryable,
    sql_types::{BigInt, Binary, Bool, Integer, Nullable, SmallInt, Text},
};
use diesel_async::RunQueryDsl;

use super::{
    AsyncPgConnection, statement,
    unfinished::{UNFINISHED, UNFINISHED_WITHOUT_STEPS},
};

/// Which keys are taken over, and for whom.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) domain: &'a str,
    pub(crate) resource: &'a str,
    /// For so long their lease has been over, or they have been released.
    pub(crate) grace_ms: i64,
    /// Those that have had so many attempts are left alone.
    pub(crate) max_attempts: i32,
    pub(crate) recipe_version: i16,
    pub(crate) limit: i64,
    pub(crate) owner: &'a [u8],
    pub(crate) lease_ms: i64,
}

/// A stretch of the table: after the one id, up to the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) after: Vec<u8>,
    pub(crate) to: Vec<u8>,
}

impl Stretch {
    /// All of it: an id has 32 bytes.
    pub(crate) fn whole() -> Self {
        Self { after: Vec::new(), to: vec![u8::MAX; 33] }
    }
}

/// A key that was taken over.
#[derive(Debug, Queryable)]
pub(crate) struct Lapsed {
    pub(crate) id: Vec<u8>,
    pub(crate) tenant: Option<String>,
    pub(crate) principal: Option<String>,
    pub(crate) key: String,
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) recipe: Vec<u8>,
    pub(crate) attempt: i32,
    pub(crate) seed: Vec<u8>,
    /// Of the request that claimed it first.
    pub(crate) request_id: Option<String>,
    /// Whether it was given back, and not left outstanding.
    pub(crate) was_released: bool,
}

statement! {
    /// As a retry would take it over, but for any number of keys. One that has expired is nobody's. What the attempt that
    /// has died has done is unknown from then on.
    struct TakeLapsed {
        domain: str, resource: str, grace_ms: i64, max_attempts: i32, recipe_version: i16, after: [u8], to: [u8],
        limit: i64, owner: [u8], lease_ms: i64,
    }
    returns (Binary, Nullable<Text>, Nullable<Text>, Text, Binary, Binary, Integer, Binary, Nullable<Text>, Bool);
    [
        "WITH lapsed AS MATERIALIZED (SELECT id, owner FROM idempotency_keys WHERE state = 'outstanding' \
         AND leased_until <= now() - ", (grace_ms: BigInt), " * interval '1 millisecond' AND domain = ",
        (domain: Text), " AND resource = ", (resource: Text), " AND attempt < ", (max_attempts: Integer),
        " AND recipe_version <= ", (recipe_version: SmallInt),
        " AND coalesce(leased_until + (expires_at - created_at) > now(), true) AND id > ", (after: Binary),
        " AND id <= ", (to: Binary), " ORDER BY leased_until LIMIT ", (limit: BigInt),
        " FOR NO KEY UPDATE SKIP LOCKED) \
         UPDATE idempotency_keys AS k SET owner = ", (owner: Binary), ", attempt = attempt + 1, acted = true, \
         leased_until = now() + ", (lease_ms: BigInt), " * interval '1 millisecond' \
         FROM lapsed WHERE k.id = lapsed.id AND k.owner = lapsed.owner AND k.state = 'outstanding' \
         RETURNING k.id, k.tenant, k.principal, k.key, k.fingerprint, k.recipe, k.attempt, k.seed, k.request_id, \
         false",
    ]
}

/// The statement, for rows of which it is asked in this way whether they are half-done.
macro_rules! taking_released {
    ($name:ident, $unfinished:tt) => {
        statement! {
            /// Half-done keys that were given back, as a retry would claim them. All of them have acted: it is what the
            /// optional index asks for.
            struct $name {
                domain: str, resource: str, grace_ms: i64, max_attempts: i32, recipe_version: i16, after: [u8], to: [u8],
                limit: i64, owner: [u8], lease_ms: i64,
            }
            returns (Binary, Nullable<Text>, Nullable<Text>, Text, Binary, Binary, Integer, Binary, Nullable<Text>, Bool);
            [
                "WITH released AS MATERIALIZED (SELECT k.id, k.owner FROM idempotency_keys AS k \
                 WHERE k.state = 'released' AND k.acted AND k.leased_until <= now() - ",
                (grace_ms: BigInt), " * interval '1 millisecond' AND k.domain = ", (domain: Text), " AND k.resource = ",
                (resource: Text), " AND k.attempt < ", (max_attempts: Integer), " AND k.recipe_version <= ",
                (recipe_version: SmallInt),
                " AND coalesce(k.leased_until + (k.expires_at - k.created_at) > now(), true) AND k.id > ",
                (after: Binary), " AND k.id <= ", (to: Binary), " AND ", $unfinished, " ORDER BY k.leased_until LIMIT ",
                (limit: BigInt), " FOR NO KEY UPDATE OF k SKIP LOCKED) \
                 UPDATE idempotency_keys AS k SET state = 'outstanding', status = NULL, owner = ", (owner: Binary),
                ", attempt = attempt + 1, leased_until = now() + ", (lease_ms: BigInt), " * interval '1 millisecond' \
                 FROM released WHERE k.id = released.id AND k.owner = released.owner AND k.state = 'released' \
                 RETURNING k.id, k.tenant, k.principal, k.key, k.fingerprint, k.recipe, k.attempt, k.seed, k.request_id, \
                 true",
            ]
        }
    };
}

taking_released!(TakeReleased, UNFINISHED);
taking_released!(TakeReleasedUnseen, UNFINISHED_WITHOUT_STEPS);

/// The fields are those of the statements, which are the same.
macro_rules! of_wanted {
    ($name:ident, $wanted:expr, $stretch:expr, $limit:expr) => {
        $name {
            domain: $wanted.domain,
            resource: $wanted.resource,
            grace_ms: &$wanted.grace_ms,
            max_attempts: &$wanted.max_attempts,
            recipe_version: &$wanted.recipe_version,
            after: &$stretch.after,
            to: &$stretch.to,
            limit: &$limit,
            owner: $wanted.owner,
            lease_ms: &$wanted.lease_ms,
        }
    };
}

/// Where it is looked.
#[derive(Debug)]
pub(crate) struct Stretches {
    pub(crate) lapsed: Stretch,
    pub(crate) released: Stretch,
    /// Whether steps may be read.
    pub(crate) sees_steps: bool,
}

/// Takes over what has lapsed, longest first, and then what was given back half-done. Whoever else is at it, a client that
/// retries or another process, gets other keys.
///
/// READ COMMITTED whatever the default is: above it every row that somebody has written since would
/// fail the whole batch.
pub(crate) async fn take(
    conn: &mut AsyncPgConnection,
    wanted: &Wanted<'_>,
    stretches: &Stretches,
) -> QueryResult<Vec<Lapsed>> {
    let taking = async |conn: &mut AsyncPgConnection| {
        let mut taken: Vec<Lapsed> = of_wanted!(TakeLapsed, wanted, stretches.lapsed, wanted.limit).load(conn).await?;
        let room = wanted.limit - i64::try_from(taken.len()).unwrap_or(i64::MAX);
        if room > 0 {
            let released: Vec<Lapsed> = match stretches.sees_steps {
                true => of_wanted!(TakeReleased, wanted, stretches.released, room).load(conn).await?,
                false => of_wanted!(TakeReleasedUnseen, wanted, stretches.released, room).load(conn).await?,
            };
            taken.extend(released);
        }
        Ok(taken)
    };
    conn.build_transaction().read_committed().run(taking).await
}

statement! {
    struct IsIndexed { index: str }
    returns Bool;
    ["SELECT EXISTS (SELECT FROM pg_index WHERE indexrelid = to_regclass(", (index: Text), ") AND indisvalid)"]
}

/// Whether there is an index of those that are outstanding, and finished.
pub(crate) async fn is_indexed(conn: &mut AsyncPgConnection) -> QueryResult<bool> {
    IsIndexed { index: "idempotency_keys_outstanding_idx" }.get_result(conn).await
}

/// Whether there is an index of those that were given back and have acted, and finished.
pub(crate) async fn is_released_indexed(conn: &mut AsyncPgConnection) -> QueryResult<bool> {
    IsIndexed { index: "idempotency_keys_acted_idx" }.get_result(conn).await
}

statement! {
    struct End { after: [u8], rows: i64 }
    returns Binary;
    [
        "SELECT id FROM (SELECT id FROM idempotency_keys WHERE id > ", (after: Binary), " ORDER BY id LIMIT ",
        (rows: BigInt), ") AS stretch ORDER BY id DESC LIMIT 1",
    ]
}

/// Where so many rows after this id end; `None` where there are none.
pub(crate) async fn end(conn: &mut AsyncPgConnection, after: &[u8], rows: i64) -> QueryResult<Option<Vec<u8>>> {
    let ends: Vec<Vec<u8>> = End { after, rows: &rows }.load(conn).await?;
    Ok(ends.into_iter().next())
}
