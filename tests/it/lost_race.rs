//! Transactions that another one has beaten: told as such, in whatever language the server says it and whatever
//! the handler makes of it.

use std::{fmt, time::Duration};

use actix_idempotency::{IdemTx, Idempotency, Inbox, InboxError, Isolation, Keep, Policy, inbox::HandleError};
use actix_web::{
    HttpResponse, ResponseError, Result,
    error::ErrorInternalServerError,
    rt::{spawn, task::JoinHandle},
    web::{self, Data, Query, ServiceConfig},
};
use diesel::{QueryableByName, sql_types::BigInt};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use serde::Deserialize;

use crate::support::{
    client::{Answer, RequestExt},
    cluster::{Cluster, LANGUAGES},
    db::{Db, pool},
    gate::Gate,
    rig::Rig,
};

#[derive(Deserialize)]
struct Move {
    /// Takes from this account and gives to the other one.
    from: i64,
    /// What the handler makes of a statement that fails.
    with: String,
}

#[derive(QueryableByName)]
struct Balance {
    #[diesel(sql_type = BigInt)]
    balance: i64,
}

/// An error that shows nothing of what it was made from.
#[derive(Debug)]
struct Opaque;

impl fmt::Display for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it went wrong")
    }
}

impl ResponseError for Opaque {}

/// The error comes with the rows that a statement returns, as that of most statements of handlers.
async fn add(conn: &mut AsyncPgConnection, id: i64, amount: i64) -> diesel::QueryResult<i64> {
    let sql = format!("UPDATE accounts SET balance = balance + {amount} WHERE id = {id} RETURNING balance");
    diesel::sql_query(sql).get_result::<Balance>(conn).await.map(|row| row.balance)
}

async fn transfer(mut tx: IdemTx, gate: Data<Gate>, wanted: Query<Move>) -> Result<HttpResponse> {
    add(&mut tx, wanted.from, -1).await.map_err(ErrorInternalServerError)?;
    gate.pass().await;
    let to = 3 - wanted.from;
    let added = match wanted.with.as_str() {
        "savepoint" => tx.transaction(async |conn| add(conn, to, 1).await).await,
        _ => add(&mut tx, to, 1).await,
    };
    match (added, wanted.with.as_str()) {
        (Ok(balance), _) => Ok(HttpResponse::Created().body(balance.to_string())),
        (Err(error), "text") => Err(ErrorInternalServerError(error)),
        (Err(_), "opaque") => Err(Opaque.into()),
        (Err(_), "answer") => Ok(HttpResponse::BadGateway().body("try another server")),
        // A savepoint is rolled back, and the transaction goes on.
        (Err(_), "success" | "savepoint") => Ok(HttpResponse::Created().body("half")),
        (_, other) => panic!("{other}?"),
    }
}

fn routes(config: &mut ServiceConfig, idempotency: &Idempotency) {
    config.service(web::resource("/transfer").wrap(idempotency.clone()).route(web::post().to(transfer)));
}

async fn rig(db: Db, policy: Policy) -> Rig {
    db.run("CREATE TABLE accounts AS SELECT id, 100::bigint AS balance FROM generate_series(1, 2) AS id").await;
    let policy = policy.anonymous();
    Rig::builder().database(db).policy(policy).serve(|config, idempotency, _| routes(config, idempotency)).await
}

impl Rig {
    fn transfer(&self, key: &str, from: i64, with: &str) -> JoinHandle<Answer> {
        let request = self.post(&format!("/transfer?from={from}&with={with}"));
        spawn(if key.is_empty() { request.answer() } else { request.key(key).answer() })
    }

    /// Both have taken from one account each before either gives to the other's.
    async fn cross(&self, keys: [&str; 2], with: &str) -> [Answer; 2] {
        let before = self.gate.count();
        let both = [self.transfer(keys[0], 1, with), self.transfer(keys[1], 2, with)];
        self.gate.entered(before + 2).await;
        self.gate.open(2);
        let [one, two] = both;
        [one.await.unwrap(), two.await.unwrap()]
    }
}

#[track_caller]
fn assert_lost(answer: &Answer) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (409, "serialization"), "{}", answer.text());
    assert!(answer.retry_after().is_some());
}

fn policies() -> [Policy; 4] {
    [Policy::new(), Policy::new().atomic()]
        .into_iter()
        .flat_map(|policy| [policy.clone(), policy.keep(Keep::Everything)])
        .collect::<Vec<_>>()
        .try_into()
        .unwrap()
}

/// 40P01, and the server speaks German.
#[actix_web::test]
async fn a_deadlock_is_409_whatever_the_handler_makes_of_it_and_its_retry_runs() {
    let cluster = Cluster::speaking("de", &["deadlock_timeout = 10ms"]);
    for policy in policies() {
        let rig = rig(Db::on(&cluster.url()).await, policy).await;
        for with in ["text", "opaque", "answer", "success"] {
            let keys = [format!("{with}-1"), format!("{with}-2")];
            let answers = rig.cross([&keys[0], &keys[1]], with).await;
            let lost = answers.iter().position(|answer| answer.status != 201).unwrap_or_else(|| panic!("{answers:?}"));
            assert_lost(&answers[lost]);
            assert_eq!(answers[1 - lost].status, 201);
            assert!(!answers[1 - lost].text().contains("half"));
            rig.gate.open(1);
            let retry = rig.transfer(&keys[lost], if lost == 0 { 1 } else { 2 }, with).await.unwrap();
            assert_eq!((retry.status.as_u16(), retry.text().as_str()), (201, "100"), "{with}");
        }
        assert!(rig.db.is("(SELECT bool_and(balance = 100) FROM accounts)").await);
    }
}

/// 40001.
#[actix_web::test]
async fn a_row_that_has_changed_since_the_snapshot_is_409_and_the_retry_runs() {
    for policy in policies() {
        let rig = rig(Db::new().await, policy.isolation(Isolation::RepeatableRead)).await;
        for with in ["text", "opaque", "answer", "success"] {
            let before = rig.gate.count();
            let transfer = rig.transfer(with, 1, with);
            rig.gate.entered(before + 1).await;
            rig.db.run("UPDATE accounts SET balance = balance + 10 WHERE id = 2").await;
            rig.gate.open(1);
            assert_lost(&transfer.await.unwrap());
            rig.gate.open(1);
            let retry = rig.transfer(with, 1, with).await.unwrap();
            assert_eq!(retry.status, 201, "{}", retry.text());
        }
        assert!(rig.db.is("(SELECT sum(balance) = 240 FROM accounts)").await);
    }
}

#[actix_web::test]
async fn a_race_that_a_savepoint_has_lost_is_the_handlers_business() {
    let cluster = Cluster::start(&["deadlock_timeout = 10ms"]);
    for policy in [Policy::new(), Policy::new().atomic()] {
        let rig = rig(Db::on(&cluster.url()).await, policy).await;
        let answers = rig.cross(["a", "b"], "savepoint").await;
        assert!(answers.iter().all(|answer| answer.status == 201), "{answers:?}");
        assert_eq!(answers.iter().filter(|answer| answer.text() == "half").count(), 1);
        assert!(rig.db.is("(SELECT sum(balance) = 199 FROM accounts)").await);
    }
}

#[actix_web::test]
async fn without_a_key_it_is_409_too() {
    let cluster = Cluster::speaking("ja", &["deadlock_timeout = 10ms"]);
    let rig = rig(Db::on(&cluster.url()).await, Policy::new()).await;
    for with in ["opaque", "success"] {
        let answers = rig.cross(["", ""], with).await;
        assert_lost(answers.iter().find(|answer| answer.status != 201).unwrap());
    }
}

/// The driver opens no socket of Unix for somebody who reads along.
#[actix_web::test]
async fn through_a_socket_of_unix_it_is_the_same() {
    let cluster = Cluster::start(&["deadlock_timeout = 10ms"]);
    let db = Db::on(&cluster.url()).await;
    let socket = cluster.socket_url().replace("dbname=postgres", &format!("dbname={}", db.name));
    let pool = pool(&socket, 5);
    db.run("CREATE TABLE accounts AS SELECT id, 100::bigint AS balance FROM generate_series(1, 2) AS id").await;
    let rig = Rig::builder().on(db, pool).policy(Policy::new().anonymous());
    let rig = rig.serve(|config, idempotency, _| routes(config, idempotency)).await;
    let answers = rig.cross(["a", "b"], "opaque").await;
    assert_lost(answers.iter().find(|answer| answer.status != 201).unwrap());
    assert!(
        rig.db
            .is("EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND client_addr IS NULL)")
            .await
    );
}

/// 55P03.
#[actix_web::test]
async fn a_lock_that_is_held_too_long_is_in_progress_in_every_language() {
    let mut cluster = Cluster::start(&[]);
    let db = Db::on(&cluster.url()).await;
    for language in LANGUAGES {
        cluster.speak(language);
        let mut first = db.connect().await;
        let insert = "INSERT INTO idempotency_inbox (consumer, message_id, handled_at)";
        first.batch_execute(&format!("BEGIN; {insert} VALUES ('c', '{language}', now())")).await.unwrap();
        let inbox = Inbox::new("c").wait(Duration::from_millis(10));
        let mut second = db.connect().await;
        let handled = inbox.handle(&mut second, language, async |_| Ok::<_, InboxError>(())).await;
        assert!(
            matches!(handled, Err(HandleError::Inbox(InboxError::InProgress))),
            "{language}: {handled:?}, and the log says {}",
            cluster.log().lines().next_back().unwrap()
        );
        first.batch_execute("ROLLBACK").await.unwrap();
    }
}
