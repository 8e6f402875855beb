//! A database for each test.

use std::{
    env,
    sync::atomic::{AtomicU32, Ordering},
};

use actix_idempotency::{PgPool, PoolBuilder, migrations};
use diesel::{
    QueryableByName,
    sql_types::{BigInt, Bool, Nullable, Text},
};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};

/// The business table of the tests: a row for every time business code really ran.
const EFFECTS: &str = "CREATE TABLE effects (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tag text NOT NULL
)";

/// A database of a server; dropped with the value.
pub struct Db {
    pub url: String,
    pub name: String,
    server: String,
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

    /// The same on another server.
    pub async fn on(server: &str) -> Self {
        let db = Self::empty_on(server).await;
        migrations::run(&db.url).await.unwrap();
        db.run(EFFECTS).await;
        db
    }

    /// Without any table.
    pub async fn empty() -> Self {
        Self::empty_on(&server_url()).await
    }

    pub async fn empty_on(server: &str) -> Self {
        let name = fresh_name();
        let mut conn = AsyncPgConnection::establish(server).await.unwrap();
        conn.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        Self { url: with_database(server, &name), name, server: server.into() }
    }

    pub async fn connect(&self) -> AsyncPgConnection {
        AsyncPgConnection::establish(&self.url).await.unwrap()
    }

    pub fn pool(&self, size: u32) -> PgPool {
        PoolBuilder::new(&self.url).max_size(size.try_into().unwrap()).build().unwrap()
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
        let rows: Vec<Truth> =
            diesel::sql_query(format!("SELECT {condition} AS value")).load(&mut self.connect().await).await.unwrap();
        rows[0].value
    }

    /// How often business code ran, with this tag.
    pub async fn effects(&self, tag: &str) -> i64 {
        self.number(&format!("SELECT count(*) AS value FROM effects WHERE tag = '{tag}'")).await
    }

    pub async fn all_effects(&self) -> i64 {
        self.number("SELECT count(*) AS value FROM effects").await
    }

    /// How many rows the key table has.
    pub async fn keys(&self) -> i64 {
        self.number("SELECT count(*) AS value FROM idempotency_keys").await
    }

    /// The state of the row with this key, or `None`.
    pub async fn state(&self, key: &str) -> Option<String> {
        self.text(&format!("SELECT state AS value FROM idempotency_keys WHERE key = '{key}'")).await
    }
}

impl Drop for Db {
    fn drop(&mut self) {
        let (server, name) = (self.server.clone(), self.name.clone());
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                // The server of the test may be gone, on purpose.
                if let Ok(mut conn) = AsyncPgConnection::establish(&server).await {
                    let _ = conn.batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await;
                }
            });
        });
        let _ = dropped.join();
    }
}
