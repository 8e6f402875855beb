//! The task of a request is dropped at every await of its path, one after the other: right after that poll,
//! when what it has sent may not have left yet, and once it would be woken, when what it waited for has
//! happened.
//!
//! It is the task that the middleware spawns, cut by `failpoint::cut`; its client is told 503
//! `outcome-unknown`, which tells the test that there was a point.

use std::{cell::OnceCell, time::Duration};

use actix_idempotency::{IdemKey, IdemTx, Idempotency, PgPool, Policy, ResponseSnapshot, failpoint};
use actix_web::{
    HttpRequest, HttpResponse, Result,
    error::{ErrorInternalServerError, InternalError},
    http::StatusCode,
    web::{self, Data, ServiceConfig},
};
use diesel::{
    QueryableByName,
    sql_types::{Bool, Text},
};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};

use crate::support::{
    app::{created, effect},
    client::{Answer, RequestExt, client},
    db::Db,
    eventually,
    gate::Gate,
    rig::Server,
};

async fn insert(conn: &mut AsyncPgConnection, tag: &str) -> diesel::QueryResult<()> {
    diesel::sql_query("INSERT INTO effects (tag) VALUES ($1)").bind::<Text, _>(tag).execute(conn).await.map(drop)
}

/// Whether the handler is asked to fail in the end.
fn fails(request: &HttpRequest) -> bool {
    request.headers().contains_key("x-fail")
}

fn teapot() -> actix_web::Error {
    InternalError::new("", StatusCode::IM_A_TEAPOT).into()
}

async fn within(mut tx: IdemTx, request: HttpRequest, tag: String) -> Result<HttpResponse> {
    insert(&mut tx, &tag).await.map_err(ErrorInternalServerError)?;
    if fails(&request) { Err(teapot()) } else { Ok(created(1)) }
}

async fn apart(pool: Data<PgPool>, request: HttpRequest, tag: String) -> Result<HttpResponse> {
    if fails(&request) { Err(teapot()) } else { Ok(created(effect(&pool, &tag).await?)) }
}

async fn own(key: IdemKey, pool: Data<PgPool>, request: HttpRequest, tag: String) -> Result<ResponseSnapshot> {
    let fails = fails(&request);
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    conn.transaction(async |conn| {
        insert(conn, &tag).await?;
        let answer = ResponseSnapshot::json(StatusCode::CREATED, &rand::random::<u64>().to_string())?;
        key.complete_in(conn, answer.clone()).await?;
        if fails {
            return Err("rolled back".into());
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(answer)
    })
    .await
    .map_err(
        |error: Box<dyn std::error::Error + Send + Sync>| {
            if error.to_string() == "rolled back" { teapot() } else { ErrorInternalServerError(error) }
        },
    )
}

fn routes(config: &mut ServiceConfig, idempotency: &Idempotency, _: &PgPool) {
    config.service(
        web::scope("")
            .wrap(idempotency.clone())
            .route("/within", web::post().to(within))
            .route("/apart", web::post().to(apart))
            .route("/own", web::post().to(own)),
    );
}

#[derive(QueryableByName)]
struct Open {
    #[diesel(sql_type = Bool)]
    open: bool,
}

/// A server under test. A cold one has opened no connection and prepared no statement yet, which makes its
/// path longer.
struct Tried<'a> {
    db: &'a Db,
    pool: PgPool,
    server: Server,
    path: &'static str,
}

impl<'a> Tried<'a> {
    fn cold(db: &'a Db, policy: &Policy, path: &'static str) -> Self {
        let pool = db.pool(3);
        let idempotency = Idempotency::postgres(pool.clone()).with(policy.clone());
        let server = Server::start(1, pool.clone(), idempotency, Gate::new(), routes);
        Self { db, pool, server, path }
    }

    async fn ask(&self, key: &str, fails: bool) -> Answer {
        let request = client().post(self.server.url(self.path)).key(key).body(key.to_owned());
        if fails { request.header("x-fail", "1").answer().await } else { request.answer().await }
    }

    /// Long before its lease ends, a retry has an answer.
    async fn insist(&self, key: &str) -> Answer {
        let answered = OnceCell::new();
        eventually(&format!("a retry with {key} has an answer"), async || {
            let answer = self.ask(key, false).await;
            if answer.status != 201 {
                assert_eq!(answer.code(), "outstanding");
                return false;
            }
            answered.set(answer).is_ok()
        })
        .await;
        answered.into_inner().unwrap()
    }

    /// Every connection comes back, and none has anything open.
    async fn assert_whole(&self) {
        eventually("all connections are back, and none is in a transaction", async || {
            let state = self.pool.state();
            state.connections == state.idle_connections
                && self
                    .db
                    .is("NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
                         AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%')")
                    .await
        })
        .await;
        let mut all = Vec::new();
        for _ in 0..self.pool.config().max_size {
            all.push(self.pool.get().await.unwrap());
        }
        for conn in &mut all {
            let asked: Open = diesel::sql_query("SELECT pg_current_xact_id_if_assigned() IS NOT NULL AS open")
                .get_result(conn)
                .await
                .unwrap();
            assert!(!asked.open, "a connection has a transaction open");
        }
    }
}

/// Cuts at every point there is. `at_most`: how often the business code may have committed for one key.
async fn drop_everywhere(policy: Policy, path: &'static str, at_most: i64) {
    let policy = policy.anonymous().lease(Duration::from_secs(600));
    let db = Db::new().await;
    let warm = Tried::cold(&db, &policy, path);
    let mut points = 0;
    for sweep in 0..12 {
        // The last four begin with an attempt that gives the key back: they claim it again.
        let (early, fails, is_warm, again) = (sweep & 1 == 0, sweep & 2 == 0, sweep & 4 != 0, sweep & 8 != 0);
        for polls in 1.. {
            assert!(polls < 200, "it never ends");
            let cold;
            let tried = if is_warm {
                &warm
            } else {
                cold = Tried::cold(&db, &policy, path);
                &cold
            };
            // The database has a name that no other test has.
            let key = format!("{}-{sweep}-{polls}", db.name);
            if again {
                assert_eq!(tried.ask(&key, true).await.status, 418);
            }
            failpoint::cut(
                &key,
                if early { failpoint::Drop::After(polls) } else { failpoint::Drop::WokenAfter(polls) },
            );
            let cut = tried.ask(&key, fails).await;
            let is_over = cut.status == if fails { 418 } else { 201 };
            if !is_over {
                assert_eq!(cut.code(), "outcome-unknown", "{key}");
                points += u32::from(sweep < 4);
            }
            let answer = tried.insist(&key).await;
            let replay = tried.ask(&key, false).await;
            assert!(replay.is_replay(), "{key}: {replay:?}");
            assert_eq!((answer.status, answer.body), (replay.status, replay.body), "{key}");
            let effects = db.effects(&key).await;
            assert!((1..=at_most).contains(&effects), "{key}: {effects} effects");
            tried.assert_whole().await;
            if is_over {
                break;
            }
        }
    }
    println!("{path}: {points} points");
    assert!(points >= 20, "only {points} points were found");
}

/// D02
#[actix_web::test]
async fn with_a_transaction_under_a_lease() {
    drop_everywhere(Policy::new(), "/within", 1).await;
}

/// D02
#[actix_web::test]
async fn with_a_transaction_under_an_atomic_policy() {
    drop_everywhere(Policy::new().atomic(), "/within", 1).await;
}

/// Its effect is a commit of its own: at least once is what is promised, and each attempt makes it once.
#[actix_web::test]
async fn with_effects_of_its_own() {
    drop_everywhere(Policy::new(), "/apart", 2).await;
}

/// Nothing is written, so nothing can be left behind.
#[actix_web::test]
async fn on_the_way_to_a_replay() {
    for policy in [Policy::new(), Policy::new().atomic()] {
        let policy = policy.anonymous().lease(Duration::from_secs(600));
        let db = Db::new().await;
        let key = db.name.clone();
        let first = Tried::cold(&db, &policy, "/within").ask(&key, false).await;
        let mut points = 0;
        for polls in 1.. {
            let tried = Tried::cold(&db, &policy, "/within");
            failpoint::cut(&key, failpoint::Drop::After(polls));
            let cut = tried.ask(&key, false).await;
            first.assert_replayed_by(&tried.ask(&key, false).await);
            tried.assert_whole().await;
            if cut.is_replay() {
                break;
            }
            assert_eq!(cut.code(), "outcome-unknown");
            points += 1;
        }
        assert!(points >= 3, "only {points} points were found");
        assert_eq!(db.effects(&key).await, 1);
    }
}

#[actix_web::test]
async fn with_a_transaction_of_the_handlers_own() {
    drop_everywhere(Policy::new(), "/own", 1).await;
}
