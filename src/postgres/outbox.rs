//! Events on their way: published, claimed, settled.

use diesel::{
    QueryResult,
    sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, Text},
};
use diesel_async::RunQueryDsl;

use super::{AsyncPgConnection, statement};

/// An event before it has an id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewEvent<'a> {
    pub(crate) topic: &'a str,
    pub(crate) key: Option<&'a str>,
    pub(crate) payload: &'a [u8],
    /// What publishers of the same topic and key have in common.
    pub(crate) lock: i64,
}

statement! {
    /// The position is drawn with the lock in hand, which ends after the commit has become visible: of one
    /// key, no smaller position can appear later. The lock is only tried, because waiting for it could fail,
    /// and would take the caller's transaction along.
    struct Publish { lock: i64, topic: str, key: Option<&'a str>, payload: [u8] }
    returns Binary;
    [
        "WITH turn AS MATERIALIZED (SELECT CASE WHEN ", (key: Nullable<Text>),
        " IS NULL THEN true ELSE pg_try_advisory_xact_lock(", (lock: BigInt), ") END AS ours) \
         INSERT INTO idempotency_outbox (id, topic, key, payload, created_at, due_at) \
         SELECT gen_random_uuid(), ", (topic: Text), ", ", (key: Nullable<Text>), ", ", (payload: Binary),
        ", t.now, t.now FROM turn CROSS JOIN (SELECT clock_timestamp() AS now) AS t WHERE turn.ours \
         RETURNING uuid_send(id)",
    ]
}

/// The id of the event; `None` where another publisher of the same key has not committed yet.
pub(crate) async fn publish(conn: &mut AsyncPgConnection, new: NewEvent<'_>) -> QueryResult<Option<Vec<u8>>> {
    let NewEvent { topic, key, payload, lock } = new;
    let ids: Vec<Vec<u8>> = Publish { lock: &lock, topic, key: &key, payload }.load(conn).await?;
    Ok(ids.into_iter().next())
}

/// An event that is to be delivered, or has just been parked.
#[derive(diesel::Queryable)]
pub(crate) struct Claimed {
    pub(crate) position: i64,
    pub(crate) id: Vec<u8>,
    pub(crate) topic: String,
    pub(crate) key: Option<String>,
    pub(crate) payload: Vec<u8>,
    pub(crate) attempts: i32,
    pub(crate) is_parked: bool,
}

/// How events are claimed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claim<'a> {
    pub(crate) owner: &'a [u8],
    pub(crate) lease_ms: i64,
    pub(crate) limit: i64,
    pub(crate) max_attempts: i32,
    /// Whether a parked event holds up the later ones of its key.
    pub(crate) holds: bool,
}

/// How many due events are looked at, the longest waiting first, before keys are asked one by one.
const WINDOW: i64 = 1000;

statement! {
    /// Of each key the first event only, whether it is due or not.
    ///
    /// An empty queue is the rule, so that this is planned for one, and the plan stays when ten thousand events come
    /// at once. In this shape no plan asks more than once for each event of the window whether an earlier one is there.
    struct Due { window: i64, holds: bool }
    returns BigInt;
    [
        "WITH due AS MATERIALIZED (SELECT position, topic, key, due_at FROM idempotency_outbox \
         WHERE state = 'pending' AND due_at <= now() ORDER BY due_at, position LIMIT ", (window: BigInt), ") \
         SELECT due.position FROM due \
         WHERE due.key IS NULL OR NOT EXISTS (SELECT FROM idempotency_outbox AS earlier \
         WHERE earlier.topic = due.topic AND earlier.key = due.key AND earlier.position < due.position \
         AND (earlier.state = 'pending' OR ", (holds: Bool), ")) ORDER BY due.due_at, due.position",
    ]
}

statement! {
    /// The same from key to key, for when the window is full: of events, most likely, that wait for the first of
    /// their key. It stops as soon as it has enough.
    struct DueHeads { window: i64, holds: bool, limit: i64 }
    returns BigInt;
    [
        "WITH RECURSIVE head AS ((SELECT topic, key, position, state, due_at FROM idempotency_outbox \
         WHERE key IS NOT NULL AND (state = 'pending' OR ", (holds: Bool), ") AND (SELECT count(*) FROM \
         (SELECT FROM idempotency_outbox WHERE state = 'pending' AND due_at <= now() LIMIT ", (window: BigInt),
        ") AS due) >= ", (window: BigInt), " ORDER BY topic, key, position LIMIT 1) \
         UNION ALL SELECT next.* FROM head CROSS JOIN LATERAL (SELECT topic, key, position, state, due_at \
         FROM idempotency_outbox AS o WHERE o.key IS NOT NULL AND (o.topic, o.key) > (head.topic, head.key) \
         AND (o.state = 'pending' OR ", (holds: Bool), ") ORDER BY o.topic, o.key, o.position LIMIT 1) AS next) \
         SELECT position FROM head WHERE state = 'pending' AND due_at <= now() LIMIT ", (limit: BigInt),
    ]
}

statement! {
    /// In this order, each by its position, until there are enough. What another relay has, or has just had, is
    /// passed by.
    struct Lock { positions: &'a [i64], limit: i64 }
    returns BigInt;
    [
        "SELECT e.position FROM unnest(", (positions: Array<BigInt>), ") WITH ORDINALITY AS due (position, place) \
         CROSS JOIN LATERAL (SELECT o.position FROM idempotency_outbox AS o WHERE o.position = due.position \
         AND o.state = 'pending' AND o.due_at <= now() LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED) AS e LIMIT ",
        (limit: BigInt),
    ]
}

/// Those of these that are ours until the transaction ends.
async fn lock(conn: &mut AsyncPgConnection, positions: &[i64], limit: i64) -> QueryResult<Vec<i64>> {
    if positions.is_empty() {
        return Ok(Vec::new());
    }
    Lock { positions: &positions, limit: &limit }.load(conn).await
}

statement! {
    /// Who has been tried often enough by relays that died is parked instead.
    struct Lease { positions: &'a [i64], owner: [u8], lease_ms: i64, max_attempts: i32 }
    returns (BigInt, Binary, Text, Nullable<Text>, Binary, Integer, Bool);
    [
        "UPDATE idempotency_outbox AS e \
         SET state = CASE WHEN e.attempts >= ", (max_attempts: Integer), " THEN 'parked' ELSE 'pending' END, \
         attempts = CASE WHEN e.attempts >= ", (max_attempts: Integer), " THEN e.attempts ELSE e.attempts + 1 END, \
         owner = CASE WHEN e.attempts >= ", (max_attempts: Integer), " THEN NULL ELSE ", (owner: Binary), " END, \
         due_at = clock_timestamp() + ", (lease_ms: BigInt), " * interval '1 millisecond' \
         WHERE e.position = ANY (", (positions: Array<BigInt>), ") \
         RETURNING e.position, uuid_send(e.id), e.topic, e.key, e.payload, e.attempts, e.state = 'parked'",
    ]
}

/// Events that are now the owner's for as long as the lease, those that wait longest. Waits for nobody.
///
/// READ COMMITTED, whatever the default: relays that meet must pass each other by.
pub(crate) async fn claim(conn: &mut AsyncPgConnection, claim: Claim<'_>) -> QueryResult<Vec<Claimed>> {
    let Claim { owner, lease_ms, limit, max_attempts, holds } = claim;
    let mut claimed: Vec<Claimed> = conn
        .build_transaction()
        .read_committed()
        .run(async |conn| {
            let due: Vec<i64> = Due { window: &WINDOW, holds: &holds }.load(conn).await?;
            let mut positions = lock(conn, &due, limit).await?;
            let left = limit - i64::try_from(positions.len()).unwrap_or(limit);
            if left > 0 {
                let heads: Vec<i64> = DueHeads { window: &WINDOW, holds: &holds, limit: &limit }.load(conn).await?;
                let new: Vec<i64> = heads.into_iter().filter(|position| !positions.contains(position)).collect();
                positions.extend(lock(conn, &new, left).await?);
            }
            if positions.is_empty() {
                return Ok(Vec::new());
            }
            let positions = &positions[..];
            Lease { positions: &positions, owner, lease_ms: &lease_ms, max_attempts: &max_attempts }.load(conn).await
        })
        .await?;
    claimed.sort_by_key(|event| event.position);
    Ok(claimed)
}

statement! {
    struct DeleteDelivered { positions: &'a [i64], owners: &'a [&'a [u8]] }
    [
        "DELETE FROM idempotency_outbox AS e USING unnest(", (positions: Array<BigInt>), ", ", (owners: Array<Binary>),
        ") AS done (position, owner) WHERE e.position = ANY (", (positions: Array<BigInt>),
        ") AND e.position = done.position AND e.owner = done.owner",
    ]
}

/// How many of them were still their owner's; the lease of the others has lapsed.
pub(crate) async fn delivered(conn: &mut AsyncPgConnection, positions: &[i64], owners: &[&[u8]]) -> QueryResult<usize> {
    conn.build_transaction()
        .read_committed()
        .run(async |conn| DeleteDelivered { positions: &positions, owners: &owners }.execute(conn).await)
        .await
}

statement! {
    struct PutBack { positions: &'a [i64], owners: &'a [&'a [u8]], waits_ms: &'a [i64], max_attempts: i32 }
    returns (BigInt, Bool);
    [
        "UPDATE idempotency_outbox AS e SET owner = NULL, \
         due_at = clock_timestamp() + failed.wait_ms * interval '1 millisecond', \
         state = CASE WHEN e.attempts >= ", (max_attempts: Integer), " THEN 'parked' ELSE 'pending' END FROM unnest(",
        (positions: Array<BigInt>), ", ", (owners: Array<Binary>), ", ", (waits_ms: Array<BigInt>),
        ") AS failed (position, owner, wait_ms) WHERE e.position = ANY (", (positions: Array<BigInt>),
        ") AND e.position = failed.position AND e.owner = failed.owner RETURNING e.position, e.state = 'parked'",
    ]
}

/// Events whose delivery has failed wait for another attempt, or are parked: the positions of those that are
/// parked now.
pub(crate) async fn put_back(
    conn: &mut AsyncPgConnection,
    positions: &[i64],
    owners: &[&[u8]],
    waits_ms: &[i64],
    max_attempts: i32,
) -> QueryResult<Vec<i64>> {
    let rows: Vec<(i64, bool)> = conn
        .build_transaction()
        .read_committed()
        .run(async |conn| {
            let statement =
                PutBack { positions: &positions, owners: &owners, waits_ms: &waits_ms, max_attempts: &max_attempts };
            statement.load(conn).await
        })
        .await?;
    Ok(rows.into_iter().filter(|(_, is_parked)| *is_parked).map(|(position, _)| position).collect())
}

statement! {
    struct LookParked { limit: i64 }
    returns (BigInt, Binary, Text, Nullable<Text>, Binary, Integer, Bool);
    [
        "SELECT position, uuid_send(id), topic, key, payload, attempts, true FROM idempotency_outbox \
         WHERE state = 'parked' ORDER BY position LIMIT ", (limit: BigInt),
    ]
}

/// The first parked events.
pub(crate) async fn parked(conn: &mut AsyncPgConnection, limit: i64) -> QueryResult<Vec<Claimed>> {
    LookParked { limit: &limit }.load(conn).await
}

statement! {
    struct Unpark { id: str }
    [
        "UPDATE idempotency_outbox SET state = 'pending', attempts = 0, due_at = clock_timestamp() \
         WHERE state = 'parked' AND id = ", (id: Text), "::uuid",
    ]
}

/// Whether there was such a parked event.
pub(crate) async fn unpark(conn: &mut AsyncPgConnection, id: &str) -> QueryResult<bool> {
    Ok(Unpark { id }.execute(conn).await? > 0)
}

statement! {
    struct Discard { id: str }
    ["DELETE FROM idempotency_outbox WHERE state = 'parked' AND id = ", (id: Text), "::uuid"]
}

/// Whether there was such a parked event.
pub(crate) async fn discard(conn: &mut AsyncPgConnection, id: &str) -> QueryResult<bool> {
    Ok(Discard { id }.execute(conn).await? > 0)
}
