//! Optimistic locking: nobody overwrites what they have not seen.

use actix_idempotency::{
    IdemTx, IfMatch, PgPool, Retry, VersionError, Versioned,
    version::{self, BatchError, Expected, Race, Retryable, etag},
    versioned,
};
use actix_web::{
    HttpResponse, Result,
    error::ErrorInternalServerError,
    http::header::{HeaderMap, HeaderValue, IF_MATCH},
    web::{self, Data, Json, Path},
};
use diesel::{prelude::*, result::Error as QueryError};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use futures_util::future::join_all;
use reqwest::Method;

use crate::support::{
    client::{Answer, RequestExt},
    db::{Db, ISOLATIONS},
    rig::Rig,
    statements::Statements,
};

diesel::table! {
    notes (id) {
        id -> BigInt,
        owner -> Text,
        text -> Text,
        stars -> Nullable<Integer>,
        version -> Integer,
    }
}
versioned!(notes.version);

mod schema {
    diesel::table! {
        seats (hall, number) {
            hall -> Text,
            number -> Integer,
            guest -> Text,
            version -> BigInt,
        }
    }
}
use schema::seats;
versioned!(schema::seats.version);

const TABLES: &str = "CREATE TABLE notes (
    id bigint PRIMARY KEY, owner text NOT NULL DEFAULT 'alice', text text NOT NULL, stars int,
    version int NOT NULL DEFAULT 1
);
CREATE TABLE seats (
    hall text, number int, guest text NOT NULL DEFAULT '', version bigint NOT NULL DEFAULT 1, PRIMARY KEY (hall, number)
);
INSERT INTO notes (id, text) VALUES (1, 'one'), (2, 'two'), (3, 'three');
INSERT INTO seats VALUES ('a', 1), ('a', 2);";

#[derive(Debug, Clone, PartialEq, Queryable, Selectable)]
struct Note {
    id: i64,
    text: String,
    version: i32,
}

#[derive(AsChangeset)]
#[diesel(table_name = notes)]
struct Edit {
    text: Option<String>,
    stars: Option<i32>,
}

async fn db() -> Db {
    let db = Db::empty().await;
    db.run(TABLES).await;
    db
}

async fn note(conn: &mut AsyncPgConnection, id: i64) -> Note {
    notes::table.find(id).select(Note::as_select()).get_result(conn).await.unwrap()
}

fn if_match(value: &'static str) -> IfMatch {
    let headers: HeaderMap = [(IF_MATCH, HeaderValue::from_static(value))].into_iter().collect();
    IfMatch::of(&headers).unwrap()
}

async fn touch(conn: &mut AsyncPgConnection, id: i64, expected: Expected) -> Result<i64, VersionError> {
    notes::table.at(id, expected).touch().execute(conn).await
}

#[track_caller]
fn assert_stale<T: std::fmt::Debug>(outcome: Result<T, VersionError>, expected: i64, current: i64) {
    match outcome {
        Err(VersionError::Stale { expected: Expected::Version(e), current: c }) => {
            assert_eq!((e, c), (expected, current));
        }
        other => panic!("not stale: {other:?}"),
    }
}

/// L01, L03
#[actix_web::test]
async fn the_second_of_two_writers_is_told_and_changes_nothing() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let (a, b) = (note(conn, 1).await, note(conn, 1).await);
    let change = |seen: &Note, text: &str| {
        notes::table.at(seen.id, seen.version).set(notes::text.eq(text.to_owned())).returning(Note::as_returning())
    };
    let changed: Note = change(&a, "A").get_result(conn).await.unwrap();
    assert_eq!(changed, Note { id: 1, text: "A".into(), version: 2 });
    for _ in 0..2 {
        // The same struct again: it is as stale as before (L03).
        assert_stale(change(&b, "B").get_result::<Note>(conn).await, 1, 2);
    }
    assert_eq!(note(conn, 1).await, changed);
}

#[actix_web::test]
async fn of_many_writers_one_wins_a_version() {
    let db = db().await;
    for pool in [db.pool(8), db.serializable_pool(8)] {
        let seen = note(&mut db.connect().await, 1).await.version;
        let racers = (0..30).map(|racer| {
            let pool = pool.clone();
            actix_web::rt::spawn(async move {
                let mut conn = pool.get().await.unwrap();
                notes::table.at(1, seen).set(notes::text.eq(racer.to_string())).execute(&mut conn).await
            })
        });
        let outcomes: Vec<_> = join_all(racers).await.into_iter().map(Result::unwrap).collect();
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1, "{outcomes:?}");
        for lost in outcomes.into_iter().filter(Result::is_err) {
            assert_stale(lost, seen.into(), i64::from(seen) + 1);
        }
        assert_eq!(note(&mut db.connect().await, 1).await.version, seen + 1);
    }
}

/// L04
#[actix_web::test]
async fn changes_in_one_transaction_chain_by_the_new_version() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let thrice = async |conn: &mut AsyncPgConnection| {
        let mut version = 1;
        for text in ["a", "b", "c"] {
            version = notes::table.at(1, version).set(notes::text.eq(text)).execute(conn).await?;
        }
        Ok::<i64, VersionError>(version)
    };
    let rolled_back = conn
        .transaction(async |conn| {
            let mut version = 1;
            for text in ["a", "b", "c"] {
                version = notes::table.at(1, version).set(notes::text.eq(text)).execute(conn).await?;
            }
            assert_eq!(version, 4);
            Err::<(), VersionError>(QueryError::RollbackTransaction.into())
        })
        .await;
    assert!(rolled_back.is_err());
    assert_eq!(note(conn, 1).await.version, 1);
    assert_eq!(thrice(conn).await.unwrap(), 4);
    assert_eq!(note(conn, 1).await, Note { id: 1, text: "c".into(), version: 4 });
}

/// L10
#[actix_web::test]
async fn structs_tuples_and_nothing_at_all_raise_the_version() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let edit = |text: Option<&str>, stars| Edit { text: text.map(str::to_owned), stars };
    assert_eq!(notes::table.at(1, 1).set(edit(Some("x"), None)).execute(conn).await.unwrap(), 2);
    assert_eq!(notes::table.at(1, 2).set(&edit(None, Some(5))).execute(conn).await.unwrap(), 3);
    assert_eq!(notes::table.at(1, 3).set(edit(None, None)).execute(conn).await.unwrap(), 4);
    assert_eq!(notes::table.at(1, 4).touch().execute(conn).await.unwrap(), 5);
    let both = (notes::text.eq("y"), notes::stars.eq(None::<i32>));
    assert_eq!(notes::table.at(1, 5).set(both).execute(conn).await.unwrap(), 6);
    let computed = (notes::stars.eq((notes::version + 1).nullable()), notes::text.eq(notes::owner));
    assert_eq!(notes::table.at(1, 6).set(computed).execute(conn).await.unwrap(), 7);
    assert!(db.is("(SELECT (text, stars) = ('alice', 7) FROM notes WHERE id = 1)").await);
}

#[actix_web::test]
async fn composite_keys_and_bigint_versions_work() {
    let db = db().await;
    let conn = &mut db.connect().await;
    assert_eq!(seats::table.at(("a", 2), 1).set(seats::guest.eq("bob")).execute(conn).await.unwrap(), 2);
    assert!(db.is("(SELECT count(*) = 1 FROM seats WHERE guest = 'bob' AND number = 2)").await);
    assert_stale(seats::table.at(("a", 2), 1).touch().execute(conn).await, 1, 2);
}

#[actix_web::test]
async fn a_changeset_that_sets_the_version_is_refused_by_name() {
    #[derive(AsChangeset)]
    #[diesel(table_name = notes)]
    struct Whole {
        text: String,
        version: i32,
    }
    let db = db().await;
    let conn = &mut db.connect().await;
    conn.begin_test_transaction().await.unwrap();
    let whole = Whole { text: "x".into(), version: 7 };
    let refused = notes::table.at(1, 1).set(&whole).execute(conn).await.unwrap_err();
    assert!(matches!(refused, VersionError::SetsVersion { field: "version" }), "{refused:?}");
    assert!(refused.to_string().contains("`version`"));
    // Nothing was sent: the transaction lives.
    assert_eq!(note(conn, 1).await.version, 1);
}

#[actix_web::test]
async fn a_row_that_is_gone_or_not_mine_is_gone() {
    let db = db().await;
    let conn = &mut db.connect().await;
    assert!(matches!(notes::table.at(9, 1).touch().execute(conn).await, Err(VersionError::Gone)));
    let theirs = notes::table.at(1, 7).filter(notes::owner.eq("bob")).touch().execute(conn).await;
    assert!(matches!(theirs, Err(VersionError::Gone)), "{theirs:?}");
    let mine = notes::table.at(1, 7).filter(notes::owner.eq("alice").or(notes::id.eq(2))).touch().execute(conn).await;
    assert_stale(mine, 7, 1);
}

#[actix_web::test]
async fn the_largest_version_is_not_raised() {
    let db = db().await;
    db.run("UPDATE notes SET version = 2147483647 WHERE id = 1").await;
    let conn = &mut db.connect().await;
    conn.begin_test_transaction().await.unwrap();
    assert!(matches!(notes::table.at(1, i32::MAX).touch().execute(conn).await, Err(VersionError::Overflow)));
    assert_stale(notes::table.at(1, i64::MAX).touch().execute(conn).await, i64::MAX, i32::MAX.into());
    assert_eq!(notes::table.at(1, i32::MAX).delete().execute(conn).await.unwrap(), i64::from(i32::MAX));
}

/// L07
#[actix_web::test]
async fn a_stale_delete_deletes_nothing() {
    let db = db().await;
    let conn = &mut db.connect().await;
    notes::table.at(1, 1).touch().execute(conn).await.unwrap();
    assert_stale(notes::table.at(1, 1).delete().execute(conn).await, 1, 2);
    let deleted: Note = notes::table.at(1, 2).delete().returning(Note::as_returning()).get_result(conn).await.unwrap();
    assert_eq!((deleted.text.as_str(), deleted.version), ("one", 2));
    assert!(matches!(notes::table.at(1, 2).delete().execute(conn).await, Err(VersionError::Gone)));
}

/// L07
#[actix_web::test]
async fn a_batch_is_all_or_nothing_and_names_the_lost() {
    let db = db().await;
    let conn = &mut db.connect().await;
    notes::table.at(2, 1).touch().execute(conn).await.unwrap();
    let batch = |versions: [i32; 4]| {
        [3, 2, 9, 1].into_iter().zip(versions).map(|(id, version)| notes::table.at(id, version).set(notes::stars.eq(5)))
    };
    let lost = version::batch::<_, i64>(conn, batch([1, 1, 1, 1])).await.unwrap_err();
    let BatchError::Lost(lost) = lost else { panic!("{lost:?}") };
    assert_eq!(lost.iter().map(|lost| lost.key).collect::<Vec<_>>(), [2, 9]);
    assert!(matches!(lost[0].error, VersionError::Stale { current: 2, .. }));
    assert!(matches!(lost[1].error, VersionError::Gone));
    assert!(db.is("NOT EXISTS (SELECT FROM notes WHERE stars = 5)").await);

    // The versions come in the order of the changes, not of the keys.
    let versions: Vec<i64> = version::batch(conn, batch([1, 2, 1, 1]).take(2)).await.unwrap();
    assert_eq!(versions, [2, 3]);
    let gone: Vec<i64> =
        version::batch(conn, [(3, 2), (1, 1)].map(|(id, v)| notes::table.at(id, v).delete())).await.unwrap();
    assert_eq!(gone, [2, 1]);
}

#[actix_web::test]
async fn batches_in_opposite_orders_do_not_deadlock() {
    let db = db().await;
    // A connection for each: what they wait for is each other's rows.
    let pool = db.pool(24);
    let batches = (0..24).map(|n| {
        let pool = pool.clone();
        actix_web::rt::spawn(async move {
            let mut conn = pool.get().await.unwrap();
            Retry::new()
                .tries(100)
                .run(&mut conn, async |conn| {
                    let mut rows: Vec<(i64, i32)> = notes::table.select((notes::id, notes::version)).load(conn).await?;
                    rows.sort_by_key(|(id, _)| if n % 2 == 0 { *id } else { -*id });
                    version::batch::<_, i64>(conn, rows.iter().map(|(id, v)| notes::table.at(*id, *v).touch())).await
                })
                .await
        })
    });
    for outcome in join_all(batches).await {
        outcome.unwrap().unwrap();
    }
    assert!(db.is("(SELECT bool_and(version = 25) FROM notes)").await);
}

/// T03: in one transaction: a row, a helper that loses, another row.
#[actix_web::test]
async fn whoever_loses_can_go_on_in_the_same_transaction() {
    for isolation in ISOLATIONS {
        let db = db().await;
        db.run("UPDATE notes SET version = 2147483647 WHERE id = 3").await;
        let mut conn = db.connect_at(isolation).await;
        conn.transaction(async |conn| {
            conn.batch_execute("INSERT INTO notes (id, text) VALUES (10, 'A')").await?;
            assert_stale(touch(conn, 1, 7.into()).await, 7, 1);
            assert!(matches!(touch(conn, 99, 1.into()).await, Err(VersionError::Gone)));
            assert!(matches!(touch(conn, 3, i32::MAX.into()).await, Err(VersionError::Overflow)));
            let unreadable = if_match("\"1").into();
            assert!(matches!(touch(conn, 1, unreadable).await, Err(VersionError::InvalidIfMatch(_))));
            assert!(matches!(touch(conn, 1, if_match("\"7\"").into()).await, Err(VersionError::Stale { .. })));
            assert_stale(notes::table.at(1, 7).delete().execute(conn).await, 7, 1);
            assert!(matches!(notes::table.at(99, 7).delete().execute(conn).await, Err(VersionError::Gone)));
            let itself = notes::table.at(1, 1).set(notes::version.eq(9)).execute(conn).await;
            assert!(matches!(itself, Err(VersionError::SetsVersion { .. })));
            let lost = [(1, 1), (2, 7)].map(|(id, v)| notes::table.at(id, v).set(notes::text.eq("lost")));
            assert!(matches!(version::batch::<_, i64>(conn, lost).await, Err(BatchError::Lost(_))));
            let given_up = Retry::new().tries(2).run(conn, async |conn| touch(conn, 1, 7.into()).await).await;
            assert_stale(given_up, 7, 1);
            conn.batch_execute("INSERT INTO notes (id, text) VALUES (11, 'B')").await
        })
        .await
        .unwrap();
        assert!(db.is("(SELECT array_agg(text ORDER BY id) = '{one,two,three,A,B}' FROM notes)").await, "{isolation}");
    }
}

#[actix_web::test]
async fn who_wins_sends_one_statement_and_only_who_loses_a_second() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let statements = Statements::of(conn);
    notes::table.at(1, 1).set(notes::text.eq("x")).execute(conn).await.unwrap();
    assert_eq!(statements.sent(), 1);
    assert_stale(notes::table.at(1, 1).set(notes::text.eq("y")).execute(conn).await, 1, 2);
    assert_eq!(statements.sent(), 2);
    assert!(notes::table.at(9, 1).delete().execute(conn).await.is_err());
    assert_eq!(statements.sent(), 2);
    notes::table.at(1, if_match("\"2\"")).delete().execute(conn).await.unwrap();
    assert_eq!(statements.sent(), 1);
    assert!(notes::table.at(2, 1).set(notes::version.eq(9)).execute(conn).await.is_err());
    assert!(notes::table.at(2, if_match("\"")).touch().execute(conn).await.is_err());
    assert_eq!(statements.sent(), 0);
}

#[actix_web::test]
async fn above_read_committed_a_savepoint_keeps_the_transaction() {
    let db = db().await;
    let mut conn = db.connect().await;
    conn.transaction(async |conn| {
        conn.batch_execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ").await?;
        note(conn, 2).await;
        notes::table.at(1, 1).touch().execute(&mut db.connect().await).await.unwrap();
        let lost = conn.transaction(async |conn| notes::table.at(1, 1).touch().execute(conn).await).await;
        assert!(matches!(
            lost,
            Err(VersionError::Query(QueryError::DatabaseError(
                diesel::result::DatabaseErrorKind::SerializationFailure,
                _
            )))
        ));
        conn.batch_execute("INSERT INTO notes (id, text) VALUES (10, 'A')").await
    })
    .await
    .unwrap();
    assert!(db.is("EXISTS (SELECT FROM notes WHERE id = 10)").await);
}

async fn increment(conn: &mut AsyncPgConnection, id: i64) -> Result<i64, VersionError> {
    Retry::new()
        .tries(200)
        .run(conn, async |conn| {
            let (stars, version): (Option<i32>, i32) =
                notes::table.find(id).select((notes::stars, notes::version)).get_result(conn).await?;
            notes::table.at(id, version).set(notes::stars.eq(stars.unwrap_or(0) + 1)).execute(conn).await
        })
        .await
}

/// L08
#[actix_web::test]
async fn twenty_increments_are_twenty() {
    let db = db().await;
    for (id, pool) in [(1, db.pool(8)), (2, db.serializable_pool(8))] {
        let tasks = (0..20).map(|_| {
            let pool = pool.clone();
            actix_web::rt::spawn(async move { increment(&mut pool.get().await.unwrap(), id).await })
        });
        for outcome in join_all(tasks).await {
            outcome.unwrap().unwrap();
        }
        assert!(db.is(&format!("(SELECT (stars, version) = (20, 21) FROM notes WHERE id = {id})")).await);
    }
}

/// L08
#[actix_web::test]
async fn a_retry_ends() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let mut attempts = 0;
    let lost = Retry::new()
        .tries(3)
        .run(conn, async |conn| {
            attempts += 1;
            notes::table.at(1, 7).touch().execute(conn).await
        })
        .await;
    assert_stale(lost, 7, 1);
    assert_eq!(attempts, 3);
    // A client that named a version has decided on what it saw.
    let if_match = if_match("\"7\"");
    let mut attempts = 0;
    let told = Retry::new()
        .run(conn, async |conn| {
            attempts += 1;
            notes::table.at(1, &if_match).touch().execute(conn).await
        })
        .await;
    assert!(matches!(told, Err(VersionError::Stale { current: 1, .. })));
    assert_eq!(attempts, 1);
    for other in [9, 10] {
        let mut attempts = 0;
        let failed = Retry::new()
            .run(conn, async |conn| {
                attempts += 1;
                match other {
                    9 => notes::table.at(9, 1).touch().execute(conn).await.map(drop),
                    _ => conn.batch_execute("SELECT 1 / 0").await.map_err(VersionError::Query),
                }
            })
            .await;
        assert!(failed.is_err());
        assert_eq!(attempts, 1, "another error is not retried");
    }
}

#[actix_web::test]
async fn a_lost_transaction_is_retried_unless_it_is_the_callers() {
    let db = db().await;
    let conn = &mut db.connect_at("serializable").await;
    // Somebody else changes the row after the first attempt has seen it.
    let overtaken = async |conn: &mut AsyncPgConnection, attempts: &mut i32| {
        *attempts += 1;
        let stars = note(conn, 1).await.version;
        if *attempts == 1 {
            notes::table.at(1, stars).touch().execute(&mut db.connect().await).await?;
        }
        diesel::update(notes::table.find(1)).set(notes::stars.eq(stars)).execute(conn).await?;
        Ok::<_, VersionError>(())
    };
    let mut attempts = 0;
    Retry::new().run(conn, async |conn| overtaken(conn, &mut attempts).await).await.unwrap();
    assert_eq!(attempts, 2);
    assert!(db.is("(SELECT stars = 2 FROM notes WHERE id = 1)").await);

    let mut attempts = 0;
    conn.begin_test_transaction().await.unwrap();
    let lost = Retry::new().run(conn, async |conn| overtaken(conn, &mut attempts).await).await;
    assert!(matches!(lost, Err(VersionError::Query(error)) if error.lost_race() == Some(Race::Transaction)));
    assert_eq!(attempts, 1, "its snapshot would be the same");
}

#[actix_web::test]
async fn a_deadlock_is_retried() {
    let db = db().await;
    let pool = db.pool(2);
    let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(2));
    let tasks = [(1, 2), (2, 1)].map(|(first, second)| {
        let (pool, barrier) = (pool.clone(), barrier.clone());
        actix_web::rt::spawn(async move {
            let mut conn = pool.get().await.unwrap();
            let mut attempts = 0;
            let done: Result<(), VersionError> = Retry::new()
                .run(&mut conn, async |conn| {
                    attempts += 1;
                    let lock = async |conn: &mut AsyncPgConnection, id: i64| {
                        conn.batch_execute(&format!("UPDATE notes SET stars = coalesce(stars, 0) + 1 WHERE id = {id}"))
                            .await
                    };
                    lock(conn, first).await?;
                    if attempts == 1 {
                        barrier.wait().await;
                    }
                    lock(conn, second).await?;
                    Ok(())
                })
                .await;
            done.map(|()| attempts)
        })
    });
    let attempts: Vec<i32> = join_all(tasks).await.into_iter().map(|task| task.unwrap().unwrap()).collect();
    assert!(attempts.iter().sum::<i32>() >= 3, "one of them was the victim: {attempts:?}");
    assert!(db.is("(SELECT sum(stars) = 4 FROM notes)").await);
}

#[actix_web::test]
async fn a_retry_does_not_believe_an_ok_in_an_aborted_transaction() {
    let db = db().await;
    let conn = &mut db.connect().await;
    let outcome: Result<(), QueryError> = Retry::new()
        .run(conn, async |conn| {
            conn.batch_execute("INSERT INTO notes (id, text) VALUES (10, 'A')").await?;
            let _ = conn.batch_execute("SELECT 1 / 0").await;
            Ok(())
        })
        .await;
    assert!(outcome.is_err());
    assert!(db.is("NOT EXISTS (SELECT FROM notes WHERE id = 10)").await);
    assert_eq!(note(conn, 1).await.version, 1);
}

/// L10
#[actix_web::test]
async fn the_trigger_stops_whoever_does_not_raise_the_version() {
    let db = db().await;
    db.run(&version::trigger("notes", "version")).await;
    let conn = &mut db.connect().await;
    let plain = diesel::update(notes::table.find(1)).set(notes::text.eq("x")).execute(conn).await.unwrap_err();
    let QueryError::DatabaseError(kind, info) = plain else { panic!("{plain:?}") };
    assert!(matches!(kind, diesel::result::DatabaseErrorKind::CheckViolation));
    assert_eq!(info.constraint_name(), Some("notes_version_raised"));
    assert_eq!(note(conn, 1).await.text, "one");
    assert_eq!(notes::table.at(1, 1).set(notes::text.eq("y")).execute(conn).await.unwrap(), 2);
    assert_eq!(notes::table.at(1, 2).touch().execute(conn).await.unwrap(), 3);
}

async fn show(pool: Data<PgPool>, id: Path<i64>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let note = note(&mut conn, *id).await;
    Ok(HttpResponse::Ok().insert_header(etag(note.version)).body(note.text))
}

async fn put(pool: Data<PgPool>, id: Path<i64>, if_match: IfMatch, text: String) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let version = notes::table.at(*id, if_match).set(notes::text.eq(text)).execute(&mut conn).await?;
    Ok(HttpResponse::Ok().insert_header(etag(version)).finish())
}

async fn put_optionally(tx: IdemTx, id: Path<i64>, if_match: Option<IfMatch>, text: String) -> Result<HttpResponse> {
    let mut tx = tx;
    let version = match if_match {
        Some(if_match) => notes::table.at(*id, if_match.strict()).set(notes::text.eq(text)).execute(&mut tx).await?,
        None => 0,
    };
    Ok(HttpResponse::Ok().insert_header(etag(version)).finish())
}

async fn batch(pool: Data<PgPool>, rows: Json<Vec<(i64, i32)>>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    let touched: Vec<i64> =
        version::batch(&mut conn, rows.iter().map(|(id, v)| notes::table.at(*id, *v).touch())).await?;
    Ok(HttpResponse::Ok().json(touched))
}

async fn post(pool: Data<PgPool>, row: Path<(i64, i32)>) -> Result<HttpResponse> {
    let mut conn = pool.get().await.map_err(ErrorInternalServerError)?;
    Ok(HttpResponse::Ok().json(notes::table.at(row.0, row.1).touch().execute(&mut conn).await?))
}

async fn rig() -> Rig {
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            config
                .route("/notes/{id}", web::get().to(show))
                .route("/notes/{id}", web::put().to(put))
                .route("/batch", web::post().to(batch))
                .route("/touch/{id}/{version}", web::post().to(post))
                .service(
                    web::scope("/tx").wrap(idempotency.clone()).route("/notes/{id}", web::post().to(put_optionally)),
                );
        })
        .await;
    rig.db.run(TABLES).await;
    rig
}

async fn put_with(rig: &Rig, path: &str, if_match: &[&[u8]]) -> Answer {
    let mut request = rig.request(Method::PUT, path).body("new");
    for line in if_match {
        request = request.header("If-Match", reqwest::header::HeaderValue::from_bytes(line).unwrap());
    }
    request.answer().await
}

#[actix_web::test]
async fn the_etag_of_a_get_is_the_if_match_of_a_put() {
    let rig = rig().await;
    let seen = rig.get("/notes/1").answer().await;
    assert_eq!(seen.header("etag"), Some("\"1\""));
    let tag = seen.header("etag").unwrap().as_bytes();
    let changed = put_with(&rig, "/notes/1", &[tag]).await;
    assert_eq!((changed.status.as_u16(), changed.header("etag")), (200, Some("\"2\"")));
    let stale = put_with(&rig, "/notes/1", &[tag]).await;
    assert_eq!((stale.status.as_u16(), stale.code().as_str()), (412, "if-match-failed"));
    assert_eq!(stale.header("etag"), Some("\"2\""));
    assert_eq!(rig.get("/notes/1").answer().await.text(), "new");
}

#[actix_web::test]
async fn if_match_is_read_as_clients_send_it() {
    let rig = rig().await;
    let mut version = 1;
    for tag in ["\"{}\"", "W/\"{}\"", "{}", "\"7777\", \"{}\"", "*", " , \"{}\" ,"] {
        let tag = tag.replace("{}", &version.to_string());
        let changed = put_with(&rig, "/notes/1", &[tag.as_bytes()]).await;
        assert_eq!(changed.status, 200, "{tag}: {changed:?}");
        version += 1;
    }
    let two_lines = put_with(&rig, "/notes/1", &[b"\"7777\"", version.to_string().as_bytes()]).await;
    assert_eq!(two_lines.status, 200);
    for (tag, status, code) in [
        (&b"\"abc\""[..], 412, "if-match-failed"),
        (b"\"1\", \"2\"", 412, "if-match-failed"),
        (b"", 400, "if-match-invalid"),
        (b"\"1", 400, "if-match-invalid"),
        (b"\"\xc3\xa9\"", 400, "if-match-invalid"),
        (b"*, \"1\"", 400, "if-match-invalid"),
    ] {
        let refused = put_with(&rig, "/notes/1", &[tag]).await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (status, code), "{}", tag.escape_ascii());
    }
    let missing = put_with(&rig, "/notes/1", &[]).await;
    assert_eq!((missing.status.as_u16(), missing.code().as_str()), (428, "if-match-missing"));
    let gone = put_with(&rig, "/notes/99", &[b"*"]).await;
    assert_eq!((gone.status.as_u16(), gone.code().as_str()), (404, "not-found"));
}

#[actix_web::test]
async fn an_optional_if_match_is_never_taken_for_absent_and_strict_ones_are_strong() {
    let rig = rig().await;
    let post = async |tag: Option<&str>| {
        let request = rig.post("/tx/notes/1").body("x");
        match tag {
            Some(tag) => request.header("If-Match", tag).answer().await,
            None => request.answer().await,
        }
    };
    assert_eq!(post(None).await.status, 200);
    assert_eq!(post(Some("\"1")).await.status, 400);
    assert_eq!(post(Some("")).await.status, 400);
    assert_eq!(post(Some("W/\"1\"")).await.status, 412);
    assert_eq!(post(Some("\"1\"")).await.header("etag"), Some("\"2\""));
}

/// L01
#[actix_web::test]
async fn without_if_match_stale_is_a_conflict() {
    let rig = rig().await;
    let stale = rig.post("/touch/1/7").answer().await;
    assert_eq!((stale.status.as_u16(), stale.code().as_str()), (409, "stale"));
    assert_eq!(rig.post("/touch/9/7").answer().await.code(), "not-found");
    let lost = rig.post("/batch").json(&[(3, 9), (1, 1), (2, 9)]).answer().await;
    assert_eq!((lost.status.as_u16(), lost.code().as_str()), (409, "stale"));
    assert_eq!(lost.json()["detail"], "Nothing was changed, because of: 2, 3.");
    assert_eq!(rig.post("/batch").json(&[(3, 1), (1, 1)]).answer().await.json(), serde_json::json!([2, 2]));
}

#[actix_web::test]
async fn what_the_database_says_stays_in_the_log() {
    let rig = rig().await;
    rig.db.run("ALTER TABLE notes RENAME TO elsewhere").await;
    let failed = rig.post("/touch/1/1").answer().await;
    assert_eq!((failed.status.as_u16(), failed.code().as_str()), (500, "query-failed"));
    assert!(!failed.text().contains("notes"), "{}", failed.text());
}
