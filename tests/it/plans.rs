//! What is sent for every request or message is planned a few times on a connection, and then kept.

use actix_idempotency::{Handled, Inbox, InboxError, Policy};
use futures_util::future::join_all;

use crate::support::{app::order, client::RequestExt, rig::Rig, statements::counting};

/// Statements with these words are sent more than often enough to tell.
const HOT: [&str; 7] = [
    "INSERT INTO idempotency_keys (id",
    "UPDATE idempotency_keys SET state",
    "AS asked (id)",
    "pg_try_advisory_xact_lock",
    "LEFT JOIN idempotency_keys AS k ON k.id",
    "INSERT INTO idempotency_inbox",
    "DELETE FROM idempotency_inbox_attempts",
];

/// Postgres plans anew each time where it reckons that knowing the parameters makes a plan cheap enough. It
/// reckons so for a list of which it sees how short it is.
#[actix_web::test]
async fn what_is_sent_for_each_request_or_message_is_not_planned_each_time() {
    let Some((_cluster, db)) = counting().await else { return };
    let rig = Rig::builder().database(db).start().await;
    let atomic = rig.other(Policy::new().anonymous().atomic());
    join_all((0..8).map(async |client| {
        for n in 0..40 {
            for server in [rig.post("/orders"), atomic.post("/refunds")] {
                assert_eq!(server.key(&format!("{client}-{n}")).json(&order("a")).answer().await.status, 201);
            }
        }
    }))
    .await;
    // How many of them one statement serves is a matter of time.
    while rig.db.calls("%AS asked (id)%").await < 80 {
        join_all((0..8).map(async |client| {
            for n in 0..40 {
                let retry = rig.post("/orders").key(&format!("{client}-{n}"));
                assert!(retry.json(&order("a")).answer().await.is_replay());
            }
        }))
        .await;
    }
    let conn = &mut rig.db.connect().await;
    for n in 0..100 {
        let handled = Inbox::new("c").handle(conn, &format!("m{n}"), async |_| Ok::<_, InboxError>(())).await;
        assert_eq!(handled.unwrap(), Handled::Handled(()));
    }
    for words in HOT {
        let calls = rig.db.calls(&format!("%{words}%")).await;
        assert!(calls >= 80, "{words}: sent {calls} times");
    }
    let planned = "SELECT (SELECT plans || ' plans for ' || calls || ' calls: ' || query FROM pg_stat_statements \
                   WHERE query LIKE '%idempotency%' AND calls >= 80 AND plans * 2 > calls LIMIT 1) AS value";
    assert_eq!(rig.db.text(planned).await, None);
}
