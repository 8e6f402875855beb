//! Once through everything that a service does with its store: for stores that are set up in their own way.

use actix_idempotency::Sweeper;
use actix_web::rt;

use super::{app::order, client::RequestExt, rig::Rig};

/// On a rig with the routes of `app.rs` and nothing in its tables.
pub async fn tour(rig: &Rig) {
    rig.idempotency.check().await.unwrap();
    let send = |key: &str, sku: &str| rig.post("/orders").key(key).json(&order(sku)).answer();

    // First, replayed, reused.
    let first = send("x", "x").await;
    assert_eq!(first.status, 201, "{first:?}");
    first.assert_replayed_by(&send("x", "x").await);
    assert_eq!(send("x", "y").await.code(), "key-reused");

    // Outstanding, then completed.
    let held = rt::spawn(rig.post("/held").key("held").body("held").answer());
    rig.gate.entered(1).await;
    assert_eq!(rig.post("/held").key("held").body("held").answer().await.code(), "outstanding");
    rig.gate.open(1);
    held.await.unwrap().assert_replayed_by(&rig.post("/held").key("held").body("held").answer().await);

    // Released, retried.
    for (mode, status) in [("err", 500), ("r400", 400)] {
        let send = || rig.post(&format!("/flaky?mode={mode}")).key(mode).answer();
        assert_eq!(send().await.status, status);
        let retry = send().await;
        assert_eq!(retry.status, 201, "{retry:?}");
        retry.assert_replayed_by(&send().await);
    }

    // Lapsed, taken over.
    rig.db.lapse("x").await;
    let second = send("x", "x").await;
    assert_eq!((second.status.as_u16(), second.is_replay()), (201, false), "{second:?}");
    second.assert_replayed_by(&send("x", "x").await);

    // Expired, new, whatever it was before.
    rig.db.age("x", "2 days").await;
    let third = send("x", "z").await;
    assert_eq!((third.status.as_u16(), third.is_replay()), (201, false), "{third:?}");
    third.assert_replayed_by(&send("x", "z").await);

    // Expired, swept.
    let keys = rig.db.keys().await;
    rig.db.age("x", "2 days").await;
    assert_eq!(Sweeper::new(rig.pool.clone()).sweep_once().await.unwrap(), 1);
    assert_eq!(rig.db.keys().await, keys - 1);
    assert_eq!((rig.db.effects("x").await, rig.db.effects("z").await), (2, 1));
}
