//! One message, one effect: however often, in whatever company, and whoever dies meanwhile.

use std::{collections::HashSet, env, future::poll_fn, panic::AssertUnwindSafe, task::Poll, time::Duration};

use actix_idempotency::{
    Handled, IdemTx, Inbox, InboxError, PgPool, Received, Sweeper,
    inbox::{BatchError, HandleError, InvalidMessageId, MAX_MESSAGE_ID_LENGTH, Message},
};
use actix_web::{
    HttpResponse, Result,
    rt::{self, time::sleep},
    web,
};
use diesel::{QueryResult, result::Error as QueryError, sql_types::Text};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use futures_util::{FutureExt, future::join_all};
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};

use crate::support::{
    client::RequestExt,
    db::{Db, assert_usable, pool},
    eventually,
    gate::Gate,
    points,
    queue::{self, QUEUE},
    repeat,
    rig::Rig,
    worker::Worker,
};

const SECOND: Duration = Duration::from_secs(1);

/// No session is inside a transaction: the server has ended those of the dead.
const NOBODY_IDLE: &str =
    "NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%')";

type Outcome<T> = Result<Handled<T>, HandleError<InboxError>>;

fn inbox() -> Inbox {
    Inbox::new("c1")
}

/// What a message does.
async fn effect(conn: &mut AsyncPgConnection, tag: &str) -> QueryResult<()> {
    diesel::sql_query("INSERT INTO effects (tag) VALUES ($1)").bind::<Text, _>(tag).execute(conn).await.map(drop)
}

/// The message does one effect with its own id for a tag.
async fn handle(inbox: &Inbox, conn: &mut AsyncPgConnection, id: &str) -> Outcome<()> {
    inbox.handle(conn, id, async |conn| Ok(effect(conn, id).await?)).await
}

async fn fail(inbox: &Inbox, conn: &mut AsyncPgConnection, id: &str) -> Outcome<()> {
    let work = async |conn: &mut AsyncPgConnection| {
        effect(conn, id).await?;
        Err(InboxError::Query(QueryError::NotFound))
    };
    inbox.handle(conn, id, work).await
}

async fn marks(db: &Db) -> i64 {
    db.number("SELECT count(*) AS value FROM idempotency_inbox").await
}

async fn attempt_rows(db: &Db) -> i64 {
    db.number("SELECT count(*) AS value FROM idempotency_inbox_attempts").await
}

async fn setting(conn: &mut AsyncPgConnection, name: &str) -> String {
    #[derive(diesel::QueryableByName)]
    struct Setting {
        #[diesel(sql_type = Text)]
        value: String,
    }
    let sql = format!("SELECT current_setting('{name}') AS value");
    diesel::sql_query(sql).get_result::<Setting>(conn).await.unwrap().value
}

// --- copies ------------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn a_message_is_handled_once() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let inbox = inbox();
    let first = inbox.handle(conn, "m1", async |conn| {
        effect(conn, "m1").await?;
        Ok::<_, InboxError>(7)
    });
    assert_eq!(first.await.unwrap(), Handled::Handled(7));
    assert_eq!(handle(&inbox, conn, "m1").await.unwrap(), Handled::Duplicate);
    assert_eq!(handle(&inbox, conn, "m1").await.unwrap().handled(), None);
    assert_eq!((db.all_effects().await, marks(&db).await), (1, 1));
}

/// I01
#[actix_web::test]
async fn of_ten_copies_at_once_one_runs_and_the_others_are_told() {
    let db = Db::new().await;
    for (id, pool) in [("m1", db.pool(10)), ("m2", db.serializable_pool(10))] {
        let gate = Gate::new();
        let copies = (0..10).map(|n| {
            let (pool, gate) = (pool.clone(), gate.clone());
            rt::spawn(async move {
                // Half of them wait for longer than the first takes.
                let inbox = inbox().wait(if n % 2 == 0 { SECOND * 20 } else { SECOND / 20 });
                let mut conn = pool.get().await.unwrap();
                inbox
                    .handle(&mut conn, id, async |conn| {
                        effect(conn, id).await?;
                        gate.pass().await;
                        Ok::<_, InboxError>(())
                    })
                    .await
            })
        });
        let copies: Vec<_> = copies.collect();
        gate.entered(1).await;
        eventually("the impatient have gone", || async {
            copies.iter().filter(|copy| copy.is_finished()).count() >= 4
        })
        .await;
        gate.open(10);
        let outcomes: Vec<_> = join_all(copies).await.into_iter().map(Result::unwrap).collect();
        let mut handled = 0;
        for outcome in outcomes {
            match outcome {
                Ok(Handled::Handled(())) => handled += 1,
                Ok(Handled::Duplicate) | Err(HandleError::Inbox(InboxError::InProgress)) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((handled, db.effects(id).await), (1, 1));
        assert_usable(&pool, 10).await;
    }
}

#[actix_web::test]
async fn a_copy_that_waits_is_told_what_became_of_the_first() {
    let db = Db::read_committed().await;
    for (id, first_commits) in [("commits", true), ("rolls back", false)] {
        let gate = Gate::new();
        let first = rt::spawn({
            let (pool, gate) = (db.pool(1), gate.clone());
            async move {
                let mut conn = pool.get().await.unwrap();
                inbox()
                    .handle(&mut conn, id, async |conn| {
                        effect(conn, id).await?;
                        gate.pass().await;
                        if first_commits { Ok(()) } else { Err(InboxError::Query(QueryError::NotFound)) }
                    })
                    .await
            }
        });
        gate.entered(1).await;
        let second = rt::spawn({
            let pool = db.pool(1);
            async move {
                let mut conn = pool.get().await.unwrap();
                handle(&inbox().wait(SECOND * 20), &mut conn, id).await
            }
        });
        eventually("the second waits", || db.blocked("idempotency_inbox")).await;
        gate.open(1);
        assert_eq!(first.await.unwrap().is_ok(), first_commits);
        let expected = if first_commits { Handled::Duplicate } else { Handled::Handled(()) };
        assert_eq!(second.await.unwrap().unwrap(), expected);
        assert_eq!(db.effects(id).await, 1);
    }
}

/// I03
#[actix_web::test]
async fn each_consumer_handles_a_message_of_its_own() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    for consumer in ["c1", "c2"] {
        assert_eq!(handle(&Inbox::new(consumer), conn, "m1").await.unwrap(), Handled::Handled(()));
    }
    assert_eq!(handle(&inbox(), conn, "m1").await.unwrap(), Handled::Duplicate);
    assert_eq!(db.all_effects().await, 2);
}

// --- ids ---------------------------------------------------------------------------------------------------------

/// I06, K06
#[actix_web::test]
async fn a_message_without_an_id_is_no_duplicate_of_another_one() {
    use InvalidMessageId as Invalid;
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let too_long = "x".repeat(MAX_MESSAGE_ID_LENGTH + 1);
    for (id, why) in [
        ("", Invalid::Empty),
        ("  ", Invalid::Empty),
        ("\u{a0}\t", Invalid::Empty),
        ("id\0x", Invalid::Control),
        ("two\nlines", Invalid::Control),
        ("\u{85}next", Invalid::Control),
        (&too_long, Invalid::TooLong),
    ] {
        let refused = handle(&inbox(), conn, id).await;
        assert!(
            matches!(refused, Err(HandleError::Inbox(InboxError::InvalidId(invalid))) if invalid == why),
            "{id:?}: {refused:?}"
        );
        assert!(refused.as_ref().unwrap_err().is_to_be_parked());
        assert!(!format!("{refused:?}").contains('\n'));
    }
    assert_eq!((db.all_effects().await, marks(&db).await), (0, 0));
    let longest = "é".repeat(MAX_MESSAGE_ID_LENGTH / 2);
    for id in [longest.as_str(), " a", "a", "a b", "日本", "'; DROP TABLE effects; --"] {
        assert_eq!(handle(&inbox(), conn, id).await.unwrap(), Handled::Handled(()), "{id}");
    }
    for consumer in ["", " ", "a\0"] {
        assert!(std::panic::catch_unwind(|| Inbox::new(consumer)).is_err());
    }
}

proptest! {
    #[test]
    fn any_text_is_an_id_or_is_refused(text in any::<String>()) {
        match Message::try_from(&text) {
            Ok(message) => {
                prop_assert_eq!(message.id(), &text);
                prop_assert!(!text.trim().is_empty() && text.len() <= MAX_MESSAGE_ID_LENGTH);
                prop_assert!(!text.chars().any(char::is_control));
            }
            Err(InvalidMessageId::Empty) => prop_assert!(text.trim().is_empty()),
            Err(InvalidMessageId::TooLong) => prop_assert!(text.len() > MAX_MESSAGE_ID_LENGTH),
            Err(InvalidMessageId::Control) => prop_assert!(text.chars().any(char::is_control)),
            Err(_) => prop_assert!(false),
        }
    }
}

/// Whatever is an id, the database tells it from every other, and knows it again.
#[actix_web::test]
async fn ids_are_equal_when_their_bytes_are() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let mut runner = TestRunner::new(ProptestConfig::default());
    let ids: HashSet<String> = (0..200)
        .map(|_| any::<String>().new_tree(&mut runner).unwrap().current())
        .chain(["é".into(), "e\u{301}".into(), "A".into(), "a".into(), "a ".into()])
        .filter(|id| Message::try_from(id).is_ok())
        .collect();
    let ids: Vec<String> = ids.into_iter().collect();
    for expected in [Received::First, Received::Duplicate] {
        let received = conn
            .transaction(async |conn| inbox().receive_all(conn, &ids).await)
            .await
            .unwrap_or_else(|error: BatchError<InboxError>| panic!("{error}"));
        assert_eq!(received, vec![expected; ids.len()]);
    }
    assert_eq!(marks(&db).await, ids.len() as i64);
}

#[actix_web::test]
async fn the_same_id_with_another_content_is_a_mismatch() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let message = |content: &str| Message::try_from("m1").unwrap().content(content);
    let send = async |conn: &mut AsyncPgConnection, message: Message| -> Outcome<()> {
        inbox().handle(conn, message, async |conn| Ok(effect(conn, "m1").await?)).await
    };
    assert_eq!(send(conn, message("a")).await.unwrap(), Handled::Handled(()));
    assert_eq!(send(conn, message("a")).await.unwrap(), Handled::Duplicate);
    assert!(matches!(send(conn, message("b")).await, Err(HandleError::Inbox(InboxError::Mismatch))));
    // Who does not look at the content does not compare it.
    assert_eq!(handle(&inbox(), conn, "m1").await.unwrap(), Handled::Duplicate);
    assert_eq!(handle(&inbox(), conn, "m2").await.unwrap(), Handled::Handled(()));
    let with = Message::try_from("m2").unwrap().content("a");
    assert_eq!(send(conn, with).await.unwrap(), Handled::Duplicate);
    assert_eq!(attempt_rows(&db).await, 0);
}

// --- in a transaction of the caller's ------------------------------------------------------------------------------

/// T03
#[actix_web::test]
async fn whatever_is_received_the_transaction_goes_on() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let content = |content: &str| Message::try_from("m1").unwrap().content(content);
    let other = &mut db.connect().await;
    other.batch_execute("BEGIN; INSERT INTO idempotency_inbox VALUES ('c1', 'busy', NULL, now(), NULL)").await.unwrap();
    let _ = handle(&inbox(), conn, "failed").await.unwrap();
    conn.batch_execute("SET lock_timeout = '7s'").await.unwrap();
    conn.transaction(async |conn| {
        effect(conn, "A").await?;
        assert_eq!(inbox().receive(conn, content("a")).await.unwrap(), Received::First);
        assert_eq!(inbox().receive(conn, "m1").await.unwrap(), Received::Duplicate);
        assert!(matches!(inbox().receive(conn, content("b")).await, Err(InboxError::Mismatch)));
        assert!(matches!(inbox().receive(conn, "").await, Err(InboxError::InvalidId(_))));
        let busy = inbox().wait(SECOND / 20).receive(conn, "busy").await;
        assert!(matches!(busy, Err(InboxError::InProgress)), "{busy:?}");
        let busy = inbox().wait(Duration::ZERO).receive_all(conn, ["z", "busy", "a"]).await.unwrap_err();
        assert!(matches!((busy.index, busy.error), (None, InboxError::InProgress)));
        let mismatch = inbox().receive_all(conn, [content("z"), content("b")]).await.unwrap_err();
        assert!(matches!((mismatch.index, mismatch.error), (Some(1), InboxError::Mismatch)));
        let mismatch = inbox().receive_all(conn, [Message::try_from("m0").unwrap(), content("b")]).await.unwrap_err();
        assert!(matches!((mismatch.index, mismatch.error), (Some(1), InboxError::Mismatch)));
        assert!(matches!(fail(&inbox(), conn, "m3").await, Err(HandleError::Failed { attempts: Some(1), .. })));
        assert_eq!(handle(&inbox(), conn, "m4").await.unwrap(), Handled::Handled(()));
        assert_eq!(setting(conn, "lock_timeout").await, "7s");
        effect(conn, "B").await
    })
    .await
    .unwrap();
    assert_eq!((db.effects("A").await, db.effects("B").await, db.effects("m4").await), (1, 1, 1));
    assert_eq!(db.effects("m3").await, 0);
    let marked = "SELECT string_agg(message_id, ' ' ORDER BY message_id) AS value FROM idempotency_inbox";
    assert_eq!(db.text(marked).await.as_deref(), Some("failed m1 m4"));

    // Outside a transaction the mark would be there before what it stands for.
    assert!(matches!(inbox().receive(conn, "m5").await, Err(InboxError::NoTransaction)));
    assert!(matches!(
        inbox().receive_all(conn, ["m5"]).await,
        Err(BatchError { error: InboxError::NoTransaction, .. })
    ));
    assert_eq!(setting(conn, "lock_timeout").await, "7s");
}

#[actix_web::test]
async fn a_mark_goes_with_the_transaction_that_it_is_in() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let rolled_back: QueryResult<()> = conn
        .transaction(async |conn| {
            assert_eq!(inbox().receive(conn, "m1").await.unwrap(), Received::First);
            let _ = handle(&inbox(), conn, "m2").await.unwrap();
            Err(QueryError::RollbackTransaction)
        })
        .await;
    assert!(rolled_back.is_err());
    assert_eq!((marks(&db).await, db.all_effects().await), (0, 0));
}

/// Above READ COMMITTED a transaction cannot see who was first.
#[actix_web::test]
async fn a_race_that_a_snapshot_cannot_show_is_told_as_such() {
    let db = Db::new().await;
    for isolation in ["REPEATABLE READ", "SERIALIZABLE"] {
        let id = isolation;
        let (conn, other) = (&mut db.connect().await, &mut db.connect().await);
        conn.batch_execute(&format!("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {isolation}"))
            .await
            .unwrap();
        let received: QueryResult<()> = conn
            .transaction(async |conn| {
                conn.batch_execute("SELECT count(*) FROM effects").await?;
                let _ = handle(&inbox(), other, id).await.unwrap();
                let received = inbox().receive(conn, id).await;
                assert!(matches!(received, Err(InboxError::Serialization)), "{received:?}");
                // Not aborted.
                conn.batch_execute("SELECT 1").await?;
                let nested = handle(&inbox(), conn, id).await;
                assert!(matches!(nested, Err(HandleError::Inbox(InboxError::Serialization))), "{nested:?}");
                Err(QueryError::RollbackTransaction)
            })
            .await;
        assert!(received.is_err());
        // A transaction of its own begins anew.
        assert_eq!(handle(&inbox(), conn, id).await.unwrap(), Handled::Duplicate);
        assert_eq!(db.effects(id).await, 1);
    }
}

async fn webhook(mut tx: IdemTx, id: web::Path<String>) -> Result<HttpResponse> {
    let id = id.into_inner();
    let message = Message::try_from(id.trim_end_matches('!')).map_err(InboxError::from)?.content(&id);
    match inbox().receive(&mut tx, message).await? {
        Received::First => {
            effect(&mut tx, "webhook").await.map_err(InboxError::from)?;
            Ok(HttpResponse::Ok().body("first"))
        }
        Received::Duplicate => Ok(HttpResponse::Ok().body("duplicate")),
    }
}

#[actix_web::test]
async fn a_handler_can_receive_in_its_idem_tx() {
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            config.service(web::scope("").wrap(idempotency.clone()).route("/{id}", web::post().to(webhook)));
        })
        .await;
    assert_eq!(rig.post("/m1").answer().await.text(), "first");
    assert_eq!(rig.post("/m1").answer().await.text(), "duplicate");
    for (path, status, code) in [("/m1!", 422, "message-id-reused"), ("/%20", 400, "message-id-invalid")] {
        let refused = rig.post(path).answer().await;
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (status, code), "{path}");
    }
    assert_eq!(rig.db.effects("webhook").await, 1);
}

// --- messages that fail ------------------------------------------------------------------------------------------

/// I08
#[actix_web::test]
async fn a_message_that_failed_is_no_duplicate() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    assert!(matches!(fail(&inbox(), conn, "m1").await, Err(HandleError::Failed { attempts: Some(1), .. })));
    assert_eq!((marks(&db).await, db.all_effects().await, attempt_rows(&db).await), (0, 0, 1));
    assert_eq!(handle(&inbox(), conn, "m1").await.unwrap(), Handled::Handled(()));
    assert_eq!(handle(&inbox(), conn, "m1").await.unwrap(), Handled::Duplicate);
    assert_eq!((db.effects("m1").await, attempt_rows(&db).await), (1, 0));
}

#[actix_web::test]
async fn what_fails_too_often_is_to_be_parked_until_it_is_forgiven() {
    let db = Db::new().await;
    let inbox = inbox().max_attempts(3);
    let pool = db.serializable_pool(1);
    let conn = &mut pool.get().await.unwrap();
    for attempt in 1..=2 {
        let failed = fail(&inbox, conn, "m1").await.unwrap_err();
        assert!(matches!(failed, HandleError::Failed { attempts: Some(n), .. } if n == attempt), "{failed:?}");
        assert!(!failed.is_to_be_parked());
    }
    let parked = fail(&inbox, conn, "m1").await.unwrap_err();
    assert!(matches!(parked, HandleError::Park { error: Some(_), attempts: 3 }), "{parked:?}");
    assert!(parked.is_to_be_parked());
    // Not run any more, though it would succeed; and other messages are not concerned.
    let again = handle(&inbox, conn, "m1").await.unwrap_err();
    assert!(matches!(again, HandleError::Park { error: None, attempts: 3 }), "{again:?}");
    assert_eq!((db.all_effects().await, marks(&db).await), (0, 0));
    assert_eq!(handle(&inbox, conn, "m2").await.unwrap(), Handled::Handled(()));
    let all =
        inbox.handle_all(conn, ["m3", "m1"], async |conn, _| Ok::<_, InboxError>(effect(conn, "all").await?)).await;
    let all = all.unwrap_err();
    assert!(matches!((all.index, all.error), (Some(1), HandleError::Park { error: None, attempts: 3 })));

    assert!(inbox.forgive(conn, "m1").await.unwrap());
    assert!(!inbox.forgive(conn, "m1").await.unwrap());
    assert_eq!(handle(&inbox, conn, "m1").await.unwrap(), Handled::Handled(()));
    assert_eq!((attempt_rows(&db).await, db.effects("all").await), (0, 0));
}

/// Each of them must not be acknowledged: what it should have done is not there.
#[actix_web::test]
async fn a_closure_that_misuses_its_transaction_has_failed() {
    let db = Db::new().await;
    db.run("ALTER TABLE effects ADD CONSTRAINT late UNIQUE (tag) DEFERRABLE INITIALLY DEFERRED").await;
    db.run("INSERT INTO effects (tag) VALUES ('taken')").await;
    let pool = db.pool(1);
    async fn misuse(id: &str, conn: &mut AsyncPgConnection) -> Result<(), InboxError> {
        effect(conn, id).await?;
        match id {
            "swallows" => drop(conn.batch_execute("SELECT 1 / 0").await),
            "rolls back" => conn.batch_execute("ROLLBACK").await?,
            "deferred" => effect(conn, "taken").await?,
            "savepoint" => {
                let _ = actix_web::rt::time::timeout(
                    SECOND / 5,
                    conn.transaction(async |conn| {
                        conn.batch_execute("SELECT pg_sleep(0)").await?;
                        std::future::pending::<QueryResult<()>>().await
                    }),
                )
                .await;
            }
            "panics" => panic!("on purpose"),
            _ => unreachable!(),
        }
        Ok(())
    }
    for id in ["swallows", "rolls back", "deferred", "savepoint", "panics"] {
        for attempt in 1..=2 {
            let mut conn = pool.get().await.unwrap();
            let inbox = inbox();
            let handling = inbox.handle(&mut conn, id, async |conn| misuse(id, conn).await);
            match AssertUnwindSafe(handling).catch_unwind().await {
                Ok(outcome) => {
                    let counted = matches!(
                        outcome,
                        Err(HandleError::Failed { attempts: Some(n), .. }) if n == attempt
                    );
                    assert!(counted, "{id}: {outcome:?}");
                }
                Err(_) => assert_eq!(id, "panics"),
            }
        }
        assert_eq!((marks(&db).await, db.effects(id).await), (0, 0), "{id}");
        let counted = format!("(SELECT attempts = 2 FROM idempotency_inbox_attempts WHERE message_id = '{id}')");
        assert!(db.is(&counted).await, "{id}");
        assert_usable(&pool, 1).await;
        let mut conn = pool.get().await.unwrap();
        let handled = inbox().handle(&mut conn, id, async |conn| Ok::<_, InboxError>(effect(conn, id).await?)).await;
        assert_eq!(handled.unwrap(), Handled::Handled(()));
        assert_eq!((marks(&db).await, db.effects(id).await), (1, 1), "{id}");
        db.run("DELETE FROM idempotency_inbox").await;
    }
    assert_eq!(attempt_rows(&db).await, 0);
}

// --- batches -----------------------------------------------------------------------------------------------------

const FIVE: [&str; 5] = ["m5", "m1", "m3", "m2", "m4"];

/// I09
#[actix_web::test]
async fn a_batch_is_done_whole_or_not_at_all() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let work = async |conn: &mut AsyncPgConnection, n: usize, bad: &str| {
        effect(conn, FIVE[n]).await?;
        if FIVE[n] == bad { Err(InboxError::Query(QueryError::NotFound)) } else { Ok(n) }
    };
    let failed = inbox().handle_all(conn, FIVE, async |conn, n| work(conn, n, "m3").await).await.unwrap_err();
    assert_eq!(failed.index, Some(2));
    assert!(matches!(failed.error, HandleError::Failed { attempts: Some(1), .. }));
    assert_eq!((marks(&db).await, db.all_effects().await), (0, 0));

    let _ = handle(&inbox(), conn, "m1").await.unwrap();
    let handled = inbox().handle_all(conn, FIVE, async |conn, n| work(conn, n, "").await).await.unwrap();
    use Handled::{Duplicate, Handled as H};
    assert_eq!(handled, [H(0), Duplicate, H(2), H(3), H(4)]);
    assert_eq!((marks(&db).await, db.all_effects().await, attempt_rows(&db).await), (5, 5, 0));
    let again = inbox().handle_all(conn, FIVE, async |_, _| Err::<(), _>(InboxError::NoTransaction)).await.unwrap();
    assert_eq!(again, [Duplicate; 5]);

    // One without an id stops the others as well: nothing is begun.
    let invalid = inbox().handle_all(conn, ["m6", ""], async |_, _| Ok::<_, InboxError>(())).await.unwrap_err();
    assert!(matches!((invalid.index, invalid.error), (Some(1), HandleError::Inbox(InboxError::InvalidId(_)))));
    assert_eq!(marks(&db).await, 5);
    let nothing: [&str; 0] = [];
    assert!(inbox().handle_all(conn, nothing, async |_, _| Ok::<_, InboxError>(())).await.unwrap().is_empty());
}

/// I09
#[actix_web::test]
async fn in_a_batch_of_single_messages_one_that_fails_stops_no_other() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let ids = ["m1", "m2", "bad", "", "m4", "m1"];
    let outcomes = inbox()
        .handle_each(conn, ids, async |conn, n| {
            effect(conn, ids[n]).await?;
            if ids[n] == "bad" { Err(InboxError::Query(QueryError::NotFound)) } else { Ok(n) }
        })
        .await;
    let said: Vec<String> = outcomes
        .iter()
        .map(|outcome| match outcome {
            Ok(Handled::Handled(n)) => n.to_string(),
            Ok(Handled::Duplicate) => "duplicate".into(),
            Err(error) => error.to_string(),
        })
        .collect();
    assert_eq!(
        said,
        [
            "0",
            "1",
            "the message could not be handled: the statement failed",
            "the message id is empty",
            "4",
            "duplicate"
        ]
    );
    assert_eq!((marks(&db).await, db.all_effects().await, db.effects("bad").await), (3, 3, 0));
}

#[actix_web::test]
async fn a_batch_knows_the_copies_in_itself() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let ids = ["b", "a", "b", "c", "a"];
    let handled =
        inbox().handle_all(conn, ids, async |conn, n| Ok::<_, InboxError>(effect(conn, ids[n]).await?)).await.unwrap();
    let duplicates: Vec<bool> = handled.iter().map(|handled| *handled == Handled::Duplicate).collect();
    assert_eq!(duplicates, [false, false, true, false, true]);
    assert_eq!(db.all_effects().await, 3);
}

/// In opposite orders, with most messages in common: whoever wrote them as they came would meet a deadlock.
#[actix_web::test]
async fn batches_in_opposite_orders_do_not_stop_each_other() {
    let db = Db::new().await;
    let rounds = repeat(50, 5);
    for round in 0..rounds {
        let batches = (0..4).map(|batch: usize| {
            let pool = if round % 2 == 0 { db.pool(1) } else { db.serializable_pool(1) };
            rt::spawn(async move {
                let mut ids: Vec<String> = (0..100).map(|n| format!("{round}-{n}")).collect();
                if batch.is_multiple_of(2) {
                    ids.reverse();
                }
                let inbox = inbox().wait(SECOND * 20);
                let mut conn = pool.get().await.unwrap();
                loop {
                    let handled = inbox
                        .handle_all(&mut conn, &ids, async |conn, n| Ok::<_, InboxError>(effect(conn, &ids[n]).await?))
                        .await;
                    match handled {
                        Ok(handled) => return handled.iter().filter(|it| **it != Handled::Duplicate).count(),
                        // At COMMIT, where the closures have run already.
                        Err(BatchError { error: HandleError::Inbox(InboxError::Serialization), .. })
                            if round % 2 == 1 => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            })
        });
        let handled: usize = join_all(batches).await.into_iter().map(Result::unwrap).sum();
        assert_eq!(handled, 100);
    }
    assert_eq!(db.all_effects().await, 100 * rounds as i64);
    assert_eq!(
        db.number("SELECT deadlocks AS value FROM pg_stat_database WHERE datname = current_database()").await,
        0
    );
}

// --- retention ---------------------------------------------------------------------------------------------------

/// I07
#[actix_web::test]
async fn a_mark_lasts_for_its_retention_and_a_redelivery_does_not_extend_it() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let sweeper = Sweeper::new(db.pool(1));
    let inbox = inbox().retention(SECOND * 3);
    let _ = handle(&inbox, conn, "m1").await.unwrap();
    let _ = handle(&Inbox::new("c1").retain_forever(), conn, "for ever").await.unwrap();
    let _ = fail(&inbox, conn, "failed").await;
    let expires = "SELECT extract(epoch FROM max(expires_at - handled_at))::bigint AS value FROM idempotency_inbox";
    assert_eq!(db.number(expires).await, 3);
    // By the clock of the database, whose time this test shares with others.
    let expires = db.text("SELECT expires_at::text AS value FROM idempotency_inbox WHERE message_id = 'm1'").await;
    let expires = expires.unwrap();
    let lasts = format!("'{expires}'::timestamptz > clock_timestamp()");
    let mut redeliveries = 0;
    loop {
        let (swept, handled) = (sweeper.sweep_once().await.unwrap(), handle(&inbox, conn, "m1").await.unwrap());
        if !db.is(&lasts).await {
            break;
        }
        assert_eq!((swept, handled), (0, Handled::Duplicate));
        redeliveries += 1;
        sleep(SECOND / 5).await;
    }
    assert!(redeliveries > 0, "the machine is too slow for this test");
    // The round in which it expired may have swept it, and handled it anew.
    db.run(&format!(
        "DELETE FROM idempotency_inbox WHERE message_id = 'm1'; DELETE FROM effects; \
         INSERT INTO effects (tag) VALUES ('m1'); INSERT INTO idempotency_inbox \
         VALUES ('c1', 'm1', NULL, '{expires}'::timestamptz - interval '3 s', '{expires}')"
    ))
    .await;
    // It lasts until somebody sweeps, and no longer.
    assert_eq!(handle(&inbox, conn, "m1").await.unwrap(), Handled::Duplicate);
    eventually("the count has expired too", || {
        db.is("NOT EXISTS (SELECT FROM idempotency_inbox_attempts WHERE expires_at > now())")
    })
    .await;
    assert!(sweeper.sweep_once().await.unwrap() > 0);
    assert_eq!((marks(&db).await, attempt_rows(&db).await), (1, 0));
    assert_eq!(handle(&inbox, conn, "m1").await.unwrap(), Handled::Handled(()));
    assert_eq!(handle(&inbox, conn, "for ever").await.unwrap(), Handled::Duplicate);
    assert_eq!(db.effects("m1").await, 2);
}

/// I07: the consumer was down for longer than the retention. The sweeper that starts with it leaves it the
/// time of a round.
#[actix_web::test]
async fn a_sweeper_that_has_just_started_leaves_expired_marks_for_a_while() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let _ = handle(&inbox(), conn, "m1").await.unwrap();
    db.run(
        "UPDATE idempotency_inbox SET handled_at = now() - interval '8 days', expires_at = now() - interval '1 day'",
    )
    .await;
    let sweeping = Sweeper::new(db.pool(1)).interval(SECOND * 2).spawn();
    assert_eq!(handle(&inbox(), conn, "m1").await.unwrap(), Handled::Duplicate);
    eventually("the mark has gone", || async { marks(&db).await == 0 }).await;
    sweeping.stop().await;
    assert_eq!(handle(&inbox(), conn, "m1").await.unwrap(), Handled::Handled(()));
}

#[actix_web::test]
async fn marks_go_in_small_batches_and_those_that_are_held_stay() {
    let db = Db::new().await;
    db.run(
        "INSERT INTO idempotency_inbox SELECT 'c1', n::text, NULL, now() - interval '8 days', now() - interval '1 day' \
         FROM generate_series(1, 2500) AS n",
    )
    .await;
    let held = &mut db.connect().await;
    held.batch_execute("BEGIN; SELECT FROM idempotency_inbox WHERE message_id = '7' FOR UPDATE").await.unwrap();
    assert_eq!(Sweeper::new(db.pool(1)).sweep_once().await.unwrap(), 2499);
    held.batch_execute("ROLLBACK").await.unwrap();
    let sweeper = Sweeper::new(db.serializable_pool(1));
    assert_eq!(sweeper.sweep_once().await.unwrap(), 1);
    // Without an inbox there is nothing to do.
    db.run("DROP TABLE idempotency_inbox_attempts").await;
    assert_eq!(sweeper.sweep_once().await.unwrap(), 0);
}

// --- the tables --------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn the_tables_of_the_inbox_state_their_own_rules() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let mut broken = HashSet::new();
    for (table, row, rule) in [
        ("inbox", "'', 'm', NULL, now(), NULL", "consumer_check"),
        ("inbox", "repeat('x', 256), 'm', NULL, now(), NULL", "consumer_check"),
        ("inbox", "'c', '', NULL, now(), NULL", "message_id_check"),
        ("inbox", "'c', repeat('é', 128), NULL, now(), NULL", "message_id_check"),
        ("inbox", "'c', 'm', 'short', now(), NULL", "fingerprint_check"),
        ("inbox", "'c', 'm', NULL, now(), now()", "times_check"),
        ("inbox_attempts", "'', 'm', 1, now(), NULL", "consumer_check"),
        ("inbox_attempts", "'c', '', 1, now(), NULL", "message_id_check"),
        ("inbox_attempts", "'c', 'm', 0, now(), NULL", "attempts_check"),
        ("inbox_attempts", "'c', 'm', 1, now(), now() - interval '1 s'", "times_check"),
    ] {
        let error = conn.batch_execute(&format!("INSERT INTO idempotency_{table} VALUES ({row})")).await.unwrap_err();
        let QueryError::DatabaseError(_, info) = error else { panic!("{row}") };
        let name = format!("idempotency_{table}_{rule}");
        assert_eq!(info.constraint_name(), Some(name.as_str()), "{row}");
        broken.insert(name);
    }
    let named = db
        .text(
            "SELECT string_agg(conname, ' ') AS value FROM pg_constraint \
             WHERE conrelid::regclass::text LIKE 'idempotency\\_inbox%' AND contype = 'c'",
        )
        .await
        .unwrap();
    assert_eq!(named.split(' ').map(str::to_owned).collect::<HashSet<_>>(), broken);
}

#[actix_web::test]
async fn a_consumer_needs_no_more_than_the_grants_of_the_documentation() {
    let db = Db::new().await;
    let role = db.service_role().await;
    let keys_only = Sweeper::new(pool(&role.url, 1));
    assert_eq!(keys_only.sweep_once().await.unwrap(), 0);
    db.run(&format!(
        "GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_inbox, idempotency_inbox_attempts TO {}",
        role.name
    ))
    .await;
    let pool = pool(&role.url, 1);
    let mut conn = pool.get().await.unwrap();
    let _ = fail(&inbox(), &mut conn, "m1").await;
    assert_eq!(handle(&inbox(), &mut conn, "m1").await.unwrap(), Handled::Handled(()));
    assert_eq!(handle(&inbox(), &mut conn, "m1").await.unwrap(), Handled::Duplicate);
    let _ = fail(&inbox(), &mut conn, "m2").await;
    assert!(inbox().forgive(&mut conn, "m2").await.unwrap());
    db.run("UPDATE idempotency_inbox SET handled_at = now() - interval '8 days', expires_at = now()").await;
    assert_eq!(keys_only.sweep_once().await.unwrap(), 1);
}

// --- futures that are dropped, and processes that die ------------------------------------------------------------

/// D02
#[actix_web::test]
async fn a_consumer_that_is_dropped_anywhere_leaves_effect_and_mark_or_neither() {
    let db = Db::new().await;
    let pool = db.pool(1);
    let inbox = inbox();
    let mut polls = 0;
    loop {
        polls += 1;
        let id = format!("m{polls}");
        let mut conn = pool.get().await.unwrap();
        let mut handling = Box::pin(handle(&inbox, &mut conn, &id));
        let mut left = polls;
        let ended = poll_fn(|cx| match handling.poll_unpin(cx) {
            Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
            Poll::Pending => {
                left -= 1;
                if left == 0 { Poll::Ready(None) } else { Poll::Pending }
            }
        })
        .await;
        drop(handling);
        drop(conn);
        assert_usable(&pool, 1).await;
        eventually("the server has ended it", || db.is(NOBODY_IDLE)).await;
        let marked = format!("SELECT count(*) AS value FROM idempotency_inbox WHERE message_id = '{id}'");
        assert_eq!(db.number(&marked).await, db.effects(&id).await, "dropped after {polls} polls");
        let mut conn = pool.get().await.unwrap();
        let again = handle(&inbox, &mut conn, &id).await.unwrap();
        assert_eq!(db.effects(&id).await, 1, "dropped after {polls} polls, then {again:?}");
        if let Some(ended) = ended {
            assert_eq!(ended.unwrap(), Handled::Handled(()));
            assert!(polls > 4, "it should have been dropped somewhere, not ended after {polls} polls");
            return;
        }
    }
}

/// T04: stalled, or cut off by the network.
#[actix_web::test]
async fn a_consumer_that_stalls_does_not_keep_its_message() {
    let db = Db::new().await;
    let gate = Gate::new();
    let stalled = rt::spawn({
        let (pool, gate) = (db.pool(1), gate.clone());
        async move {
            let mut conn = pool.get().await.unwrap();
            let inbox = inbox().idle_in_transaction(SECOND / 3);
            let outcome = inbox
                .handle(&mut conn, "m1", async |conn| {
                    effect(conn, "m1").await?;
                    gate.pass().await;
                    Ok::<_, InboxError>(effect(conn, "late").await?)
                })
                .await;
            drop(conn);
            assert_usable(&pool, 1).await;
            outcome
        }
    });
    gate.entered(1).await;
    let conn = &mut db.connect().await;
    assert_eq!(handle(&inbox().wait(SECOND * 20), conn, "m1").await.unwrap(), Handled::Handled(()));
    gate.open(1);
    assert!(matches!(stalled.await.unwrap(), Err(HandleError::Failed { attempts: None, .. })));
    assert_eq!((db.effects("m1").await, db.effects("late").await, attempt_rows(&db).await), (1, 0, 0));
    // It ends with the transaction, and is not set in one of the caller's.
    let idle = "idle_in_transaction_session_timeout";
    conn.transaction(async |conn| {
        assert_eq!(inbox().receive(conn, "m2").await.unwrap(), Received::First);
        assert_eq!(setting(conn, idle).await, "0");
        QueryResult::Ok(())
    })
    .await
    .unwrap();
    assert_eq!(setting(conn, idle).await, "0");
}

/// Takes messages from the queue of the tests, until it is killed.
pub(crate) async fn consume(pool: PgPool) -> QueryResult<()> {
    loop {
        let mut conn = pool.get().await.unwrap();
        let Some(delivery) = queue::receive(&mut conn).await? else {
            sleep(Duration::from_millis(10)).await;
            continue;
        };
        match handle_delivery(&mut conn, &delivery).await {
            Ok(_) => {
                points::reach("before-acknowledge");
                queue::acknowledge(&mut conn, &delivery).await?;
                points::reach("after-acknowledge");
            }
            // A lost race; whatever else happens here is a mistake of the test's.
            Err(HandleError::Inbox(_)) => queue::give_back(&mut conn, &delivery).await?,
            Err(error) => panic!("{error}"),
        }
    }
}

async fn handle_delivery(conn: &mut AsyncPgConnection, delivery: &queue::Delivery) -> Outcome<()> {
    let message = Message::try_from(&delivery.message_id).map_err(InboxError::from)?.content(&delivery.body);
    inbox().handle(conn, message, async |conn| Ok(effect(conn, &delivery.body).await?)).await
}

/// The other process. Among the tests it finds no IT_CONSUME and is done.
#[test]
fn consume_if_asked() {
    let Ok(url) = env::var("IT_CONSUME") else { return };
    points::obey();
    rt::System::new().block_on(async { consume(pool(&url, 2)).await.unwrap() });
}

fn consumer(url: &str) -> Worker {
    Worker::start("inbox::consume_if_asked", &[("IT_CONSUME", url)])
}

/// I02
#[actix_web::test]
async fn a_consumer_that_is_killed_anywhere_has_done_everything_once_or_nothing() {
    for serializable in [false, true] {
        let db = Db::new().await;
        db.run(QUEUE).await;
        if serializable {
            db.run(&format!("ALTER DATABASE {} SET default_transaction_isolation = 'serializable'", db.name)).await;
        }
        let conn = &mut db.connect().await;
        // (where, whether the effect has been committed by then, whether it is delivered again)
        for (point, is_done, again) in [
            ("message-marked", false, true),
            ("message-handled", false, true),
            ("message-done", false, true),
            ("message-committed", true, true),
            ("before-acknowledge", true, true),
            ("after-acknowledge", true, false),
        ] {
            let mut doomed = consumer(&db.url);
            doomed.stop_at(point, 1).await;
            queue::send(conn, point, point).await.unwrap();
            doomed.stopped_at(point).await;
            doomed.kill();
            eventually("the server has ended its transaction", || db.is(NOBODY_IDLE)).await;
            assert_eq!(db.effects(point).await, i64::from(is_done), "{point}");
            assert_eq!(queue::length(&db).await, i64::from(again), "{point}");
            let next = consumer(&db.url);
            eventually("it is acknowledged", || async { queue::length(&db).await == 0 }).await;
            next.kill();
            assert_eq!((db.effects(point).await, attempt_rows(&db).await), (1, 0), "{point}");
        }
        assert_eq!(marks(&db).await, 6);
    }
}
