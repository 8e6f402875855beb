//! A server that is set up otherwise. The whole suite passes there, too:
//! `WITH_POSTGRES_OPTIONS="-c timezone=Asia/Tokyo -c default_transaction_isolation=serializable" ./with-postgres cargo test`;
//! here is the part of it that always runs.

use actix_idempotency::Policy;
use futures_util::future::join_all;

use crate::support::{app::order, client::RequestExt, cluster::Cluster, db::Db, rig::Rig, tour::tour};

#[actix_web::test]
async fn serializable_and_east_of_utc() {
    let cluster = Cluster::start(&["timezone = 'Asia/Tokyo'", "default_transaction_isolation = serializable"]);
    let db = Db::on(&cluster.url()).await;
    let pool = db.pool(5);
    let rig = Rig::builder().on(db, pool).start().await;
    tour(&rig).await;

    // Losing a race is 40001 there, which is ours to deal with.
    let other = rig.other(Policy::new().anonymous());
    for round in 0..5 {
        let key = format!("race-{round}");
        let racers = (0..16).map(|n| {
            let request = if n % 2 == 0 { rig.post("/orders") } else { other.post("/orders") };
            request.key(&key).json(&order(&key)).answer()
        });
        let answers = join_all(racers).await;
        assert!(answers.iter().all(|answer| answer.status == 201 || answer.code() == "outstanding"), "{answers:?}");
        assert_eq!(rig.db.effects(&key).await, 1);
    }
}
