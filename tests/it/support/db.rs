//! A database for each test.

use std::{
    env,
    sync::atomic::{AtomicU32, Ordering},
};

use actix_idempotency::{PgPool, PoolBuilder, migrations};
use diesel::{
    QueryableByName,
    sql_types::{BigInt, Bool, Integer, Nullable, Text},
};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};

/// The business table of the tests: a row for every time business code really ran.
const EFFECTS: &str = "CREATE TABLE effects (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tag text NOT NULL
)";

/// For [`Db::run`]: every key is as it would be had its process died long ago.
pub const LAPSED: &str = "UPDATE idempotency_keys SET state = 'outstanding', completed_at = NULL, status = NULL,
    header_names = NULL, header_values = NULL, body = NULL, body_omitted = false, snapshot_version = NULL,
    leased_until = now() - interval '1 minute'";

/// For [`Db::run`]: every key is three days older.
pub const THREE_DAYS_LATER: &str = "UPDATE idempotency_keys SET created_at = created_at - interval '3 days',
    leased_until = leased_until - interval '3 days', completed_at = completed_at - interval '3 days',
    expires_at = expires_at - interval '3 days'";

/// The lowest level and the highest, for [`Db::connect_at`].
pub const ISOLATIONS: [&str; 2] = ["read committed", "serializable"];

/// A database of a server; dropped with the value.
pub struct Db {
    pub url: String,
    pub name: String,
    server: String,
    roles: AtomicU32,
}

/// A role of the server.
pub struct Role {
    pub name: String,
    pub url: String,
}

pub fn pool(url: &str, size: u32) -> PgPool {
    PoolBuilder::new(url).max_size(size.try_into().unwrap()).build().unwrap()
}

#[derive(QueryableByName)]
struct Number {
    #[diesel(sql_type = Nullable<BigInt>)]
    value: Option<i64>,
}

#[derive(QueryableByName)]
struct Words {
    #[diesel(sql_type = Nullable<Text>)]
    value: Option<String>,
}

#[derive(QueryableByName)]
struct Truth {
    #[diesel(sql_type = Bool)]
    value: bool,
}

/// The server that `./with-postgres` names.
pub fn server_url() -> String {
    env::var("DATABASE_URL").expect("DATABASE_URL is not set: run the tests by ./with-postgres cargo test")
}

/// `url` with another database.
pub fn with_database(url: &str, name: &str) -> String {
    let (base, query) = url.split_once('?').map_or((url, None), |(base, query)| (base, Some(query)));
    let authority = base.find("://").map_or(0, |at| at + 3);
    let end = base[authority..].find('/').map_or(base.len(), |at| authority + at);
    let query = query.map(|query| format!("?{query}")).unwrap_or_default();
    format!("{}/{name}{query}", &base[..end])
}

fn fresh_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("it_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

impl Db {
    /// With the tables of the crate and `effects`.
    pub async fn new() -> Self {
        Self::on(&server_url()).await
    }

    /// The same where transactions are READ COMMITTED whatever the server's default is: for tests whose own schedule
    /// loses a race above it, or changes a row that a handler's transaction has locked there.
    pub async fn read_committed() -> Self {
        let db = Self::new().await;
        db.run(&format!("ALTER DATABASE {} SET default_transaction_isolation = 'read committed'", db.name)).await;
        db
    }

    /// The same on another server.
    pub async fn on(server: &str) -> Self {
        let db = Self::empty_on(server).await;
        migrations::run(&db.url).await.unwrap();
        db.create_effects().await;
        db
    }

    pub async fn create_effects(&self) {
        self.run(EFFECTS).await;
    }

    /// Without any table.
    pub async fn empty() -> Self {
        Self::empty_on(&server_url()).await
    }

    pub async fn empty_on(server: &str) -> Self {
        let name = fresh_name();
        let mut conn = AsyncPgConnection::establish(server).await.unwrap();
        conn.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        Self { url: with_database(server, &name), name, server: server.into(), roles: AtomicU32::new(0) }
    }

    /// READ COMMITTED, whatever the server's default is: the test's own statements lose no races.
    pub async fn connect(&self) -> AsyncPgConnection {
        self.connect_at(ISOLATIONS[0]).await
    }

    /// At another level.
    pub async fn connect_at(&self, isolation: &str) -> AsyncPgConnection {
        let mut conn = AsyncPgConnection::establish(&self.url).await.unwrap();
        conn.batch_execute(&format!("SET default_transaction_isolation = '{isolation}'")).await.unwrap();
        conn
    }

    pub fn pool(&self, size: u32) -> PgPool {
        pool(&self.url, size)
    }

    /// A role that may log in and nothing else; gone with the database.
    pub async fn role(&self) -> Role {
        let name = format!("{}_{}", self.name, self.roles.fetch_add(1, Ordering::Relaxed));
        self.run(&format!("CREATE ROLE {name} LOGIN PASSWORD 'it'")).await;
        let at = self.url.find('@').expect("the URL should name a user");
        Role { url: format!("postgres://{name}:it{}", &self.url[at..]), name }
    }

    /// A role that may do what the service does, and nothing else.
    pub async fn service_role(&self) -> Role {
        let role = self.role().await;
        let name = &role.name;
        self.run(&format!(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_keys TO {name}; GRANT SELECT, INSERT ON effects TO {name}"
        ))
        .await;
        role
    }

    /// Whose transactions are serializable unless they say otherwise.
    pub fn serializable_pool(&self, size: u32) -> PgPool {
        let mark = if self.url.contains('?') { '&' } else { '?' };
        let url = format!("{}{mark}options=-c%20default_transaction_isolation%3Dserializable", self.url);
        PoolBuilder::new(url).max_size(size.try_into().unwrap()).build().unwrap()
    }

    pub async fn run(&self, sql: &str) {
        self.connect().await.batch_execute(sql).await.unwrap();
    }

    /// A single number; `sql` names it `value`.
    pub async fn number(&self, sql: &str) -> i64 {
        let rows: Vec<Number> = diesel::sql_query(sql).load(&mut self.connect().await).await.unwrap();
        rows.into_iter().next().and_then(|row| row.value).unwrap_or_else(|| panic!("no number: {sql}"))
    }

    pub async fn text(&self, sql: &str) -> Option<String> {
        let rows: Vec<Words> = diesel::sql_query(sql).load(&mut self.connect().await).await.unwrap();
        rows.into_iter().next().and_then(|row| row.value)
    }

    pub async fn is(&self, condition: &str) -> bool {
        let rows: Vec<Truth> = diesel::sql_query(format!("SELECT coalesce({condition}, false) AS value"))
            .load(&mut self.connect().await)
            .await
            .unwrap();
        rows[0].value
    }

    /// How often business code ran, with this tag.
    pub async fn effects(&self, tag: &str) -> i64 {
        self.number(&format!("SELECT count(*) AS value FROM effects WHERE tag = '{tag}'")).await
    }

    pub async fn all_effects(&self) -> i64 {
        self.number("SELECT count(*) AS value FROM effects").await
    }

    /// Whether somebody waits for a lock, in a statement that has these words.
    pub async fn blocked(&self, words: &str) -> bool {
        self.is(&format!(
            "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' \
             AND query LIKE '%{words}%')"
        ))
        .await
    }

    /// Makes a completed row what its owner's death would have left: outstanding, the lease lapsed.
    pub async fn lapse(&self, key: &str) {
        self.run(&format!(
            "UPDATE idempotency_keys SET state = 'outstanding', leased_until = clock_timestamp() - interval '1 ms', \
             owner = decode(md5(random()::text), 'hex'), completed_at = NULL, status = NULL, header_names = NULL, \
             header_values = NULL, body = NULL, body_omitted = false, snapshot_version = NULL WHERE key = '{key}'"
        ))
        .await;
    }

    /// Moves a row into the past.
    pub async fn age(&self, key: &str, interval: &str) {
        self.run(&format!(
            "UPDATE idempotency_keys SET created_at = created_at - interval '{interval}', \
             leased_until = leased_until - interval '{interval}', completed_at = completed_at - interval '{interval}', \
             expires_at = expires_at - interval '{interval}' WHERE key = '{key}'"
        ))
        .await;
    }

    /// How many rows the key table has.
    pub async fn keys(&self) -> i64 {
        self.number("SELECT count(*) AS value FROM idempotency_keys").await
    }

    /// By what log lines name the row with this key.
    pub async fn id(&self, key: &str) -> String {
        let id = "SELECT encode(substr(id, 1, 6), 'hex') AS value FROM idempotency_keys WHERE key =";
        self.text(&format!("{id} '{key}'")).await.unwrap()
    }

    /// The state of the row with this key, or `None`.
    pub async fn state(&self, key: &str) -> Option<String> {
        self.text(&format!("SELECT state AS value FROM idempotency_keys WHERE key = '{key}'")).await
    }
}

/// The process of the server that serves this connection.
pub async fn backend(conn: &mut AsyncPgConnection) -> i32 {
    diesel::select(diesel::dsl::sql::<Integer>("pg_backend_pid()")).get_result(conn).await.unwrap()
}

/// Every connection that a pool of this size may have can be had at once, and none is inside a
/// transaction.
pub async fn assert_usable(pool: &PgPool, size: u32) {
    let mut all = Vec::new();
    for _ in 0..size {
        all.push(pool.get().await.unwrap());
    }
    for conn in &mut all {
        let rows: Vec<Words> = diesel::sql_query("SELECT pg_current_xact_id_if_assigned()::text AS value, 1 AS alive")
            .load(conn)
            .await
            .unwrap();
        assert!(rows[0].value.is_none());
    }
}

impl Drop for Db {
    fn drop(&mut self) {
        let (server, name, roles) = (self.server.clone(), self.name.clone(), *self.roles.get_mut());
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                // The server of the test may be gone, on purpose.
                if let Ok(mut conn) = AsyncPgConnection::establish(&server).await {
                    let _ = conn.batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await;
                    for role in 0..roles {
                        let _ = conn.batch_execute(&format!("DROP ROLE IF EXISTS {name}_{role}")).await;
                    }
                }
            });
        });
        let _ = dropped.join();
    }
}
