//! The statements of the protocol as a user would write them, prepared once per connection: what the
//! middleware has to measure up to.

use actix_idempotency::PgPool;
use actix_web::{
    HttpRequest, HttpResponse, Result,
    error::ErrorInternalServerError,
    web::{Data, Json},
};
use diesel::{
    QueryResult,
    pg::Pg,
    query_builder::{AstPass, Query, QueryFragment, QueryId},
    sql_types::{BigInt, Binary, Bool, Integer, Nullable, Text},
};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, TransactionManager};
use sha2::{Digest, Sha256};

use crate::server::{NewOrder, answer, insert_order};

type Manager = <AsyncPgConnection as AsyncConnection>::TransactionManager;

/// SQL and binary or integer parameters, with an identity of its own.
macro_rules! prepared {
    ($name:ident ($($field:ident: $type:ty as $sql_type:ty),*) $(-> $returns:ty)? { $($piece:tt)* }) => {
        struct $name<'a> { $($field: &'a $type),* }
        impl QueryFragment<Pg> for $name<'_> {
            fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
                $(prepared!(@ self out $piece);)*
                Ok(())
            }
        }
        impl QueryId for $name<'_> {
            type QueryId = $name<'static>;
            const HAS_STATIC_QUERY_ID: bool = true;
        }
        $(impl Query for $name<'_> { type SqlType = $returns; })?
    };
    (@ $self:ident $out:ident ($field:ident as $sql_type:ty)) => { $out.push_bind_param::<$sql_type, _>($self.$field)? };
    (@ $self:ident $out:ident $sql:literal) => { $out.push_sql($sql) };
}
pub(crate) use prepared;

prepared! { Claim(id: [u8] as Binary, owner: [u8] as Binary, key: str as Text) {
    "WITH s AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true) AS v) \
     INSERT INTO idempotency_keys (id, domain, principal, resource, key, fingerprint, recipe, recipe_version, state, \
     owner, attempt, seed, created_at, leased_until, expires_at) SELECT " (id as Binary)
    ", 'http', 'alice', 'POST /order', " (key as Text) ", " (id as Binary)
    ", '\\x0000000000000000', 1, 'outstanding', " (owner as Binary) ", 1, " (id as Binary)
    ", now(), now() + interval '30 s', now() + interval '1 day' FROM s WHERE s.v = 'off' ON CONFLICT (id) DO NOTHING"
} }
prepared! { Complete(id: [u8] as Binary, owner: [u8] as Binary, body: [u8] as Binary) {
    "UPDATE idempotency_keys SET state = 'completed', completed_at = clock_timestamp(), status = 201, \
     header_names = '{content-type}', header_values = '{application/json}', snapshot_version = 1, body = "
    (body as Binary) " WHERE id = " (id as Binary) " AND owner = " (owner as Binary) " AND state = 'outstanding'"
} }
prepared! { LockAndLook(lock: i64 as BigInt, id: [u8] as Binary) -> (Bool, Nullable<Integer>) {
    "SELECT pg_try_advisory_xact_lock(" (lock as BigInt)
    "), k.attempt FROM (SELECT) AS one LEFT JOIN idempotency_keys AS k ON k.id = " (id as Binary)
} }
prepared! { Finish(id: [u8] as Binary, owner: [u8] as Binary, key: str as Text, body: [u8] as Binary) {
    "INSERT INTO idempotency_keys (id, domain, principal, resource, key, fingerprint, recipe, recipe_version, state, \
     owner, attempt, seed, created_at, leased_until, completed_at, expires_at, status, header_names, header_values, \
     body, snapshot_version) SELECT " (id as Binary) ", 'http', 'alice', 'POST /order', " (key as Text) ", "
    (id as Binary) ", '\\x0000000000000000', 1, 'completed', " (owner as Binary) ", 1, " (id as Binary)
    ", t.now, t.now, t.now, t.now + interval '1 day', 201, '{content-type}', '{application/json}', " (body as Binary)
    ", 1 FROM (SELECT clock_timestamp() AS now) AS t ON CONFLICT (id) DO NOTHING"
} }

fn key_of(request: &HttpRequest) -> (String, [u8; 32], [u8; 16]) {
    let key = request.headers().get("idempotency-key").and_then(|key| key.to_str().ok()).unwrap_or_default();
    (key.to_owned(), Sha256::digest(key).into(), rand::random())
}

fn one(rows: QueryResult<usize>) -> Result<()> {
    if rows.map_err(ErrorInternalServerError)? == 1 { Ok(()) } else { Err(ErrorInternalServerError("no row")) }
}

/// Three commits, on a connection for each as the middleware has to.
pub async fn order(request: HttpRequest, pool: Data<PgPool>, new: Json<NewOrder>) -> Result<HttpResponse> {
    let (key, id, owner) = key_of(&request);
    {
        let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
        one(Claim { id: &id, owner: &owner, key: &key }.execute(&mut conn).await)?;
    }
    let order = {
        let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
        insert_order(&mut conn, &new).await?
    };
    let body = serde_json::to_vec(&order)?;
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    one(Complete { id: &id, owner: &owner, body: &body }.execute(&mut conn).await)?;
    Ok(answer(&order))
}

/// The claim, and the rest in one transaction.
pub async fn default(request: HttpRequest, pool: Data<PgPool>, new: Json<NewOrder>) -> Result<HttpResponse> {
    let (key, id, owner) = key_of(&request);
    {
        let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
        one(Claim { id: &id, owner: &owner, key: &key }.execute(&mut conn).await)?;
    }
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    Manager::begin_transaction(&mut *conn).await.map_err(ErrorInternalServerError)?;
    let order = insert_order(&mut conn, &new).await?;
    let body = serde_json::to_vec(&order)?;
    one(Complete { id: &id, owner: &owner, body: &body }.execute(&mut conn).await)?;
    Manager::commit_transaction(&mut *conn).await.map_err(ErrorInternalServerError)?;
    Ok(answer(&order))
}

/// All in one transaction.
pub async fn atomic(request: HttpRequest, pool: Data<PgPool>, new: Json<NewOrder>) -> Result<HttpResponse> {
    let (key, id, owner) = key_of(&request);
    let lock = i64::from_be_bytes(id[..8].try_into().map_err(ErrorInternalServerError)?);
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    Manager::begin_transaction(&mut *conn).await.map_err(ErrorInternalServerError)?;
    let seen: (bool, Option<i32>) =
        LockAndLook { lock: &lock, id: &id }.get_result(&mut conn).await.map_err(ErrorInternalServerError)?;
    if seen != (true, None) {
        return Err(ErrorInternalServerError("taken"));
    }
    let order = insert_order(&mut conn, &new).await?;
    let body = serde_json::to_vec(&order)?;
    one(Finish { id: &id, owner: &owner, key: &key, body: &body }.execute(&mut conn).await)?;
    Manager::commit_transaction(&mut *conn).await.map_err(ErrorInternalServerError)?;
    Ok(answer(&order))
}
