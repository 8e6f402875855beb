//! A server that is set up otherwise. The whole suite passes there, too:
//! `WITH_POSTGRES_OPTIONS="-c timezone=Asia/Tokyo -c default_transaction_isolation=serializable" ./with-postgres cargo test`;
//! here is the part of it that always runs.

use std::time::{Duration, Instant};

use actix_idempotency::{Policy, Sweeper};
use actix_web::rt::{self, time::sleep};
use futures_util::future::join_all;

use crate::support::{app::order, client::RequestExt, cluster::Cluster, db::Db, rig::Rig, tour::tour};

const SECOND: Duration = Duration::from_secs(1);

fn policy() -> Policy {
    Policy::new().anonymous()
}

async fn serializable() -> (Cluster, Rig) {
    let cluster = Cluster::start(&["timezone = 'Asia/Tokyo'", "default_transaction_isolation = serializable"]);
    let db = Db::on(&cluster.url()).await;
    let pool = db.pool(5);
    let rig = Rig::builder().policy(policy().lease(2 * SECOND)).on(db, pool).start().await;
    (cluster, rig)
}

#[actix_web::test]
async fn serializable_and_east_of_utc() {
    let (_cluster, rig) = serializable().await;
    tour(&rig).await;

    // Losing a race is 40001 there, which is ours to deal with.
    let other = rig.other(policy());
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

/// Leases are renewed and rows swept by statements that touch many rows, each of which may be lost to another
/// transaction.
#[actix_web::test]
async fn renewal_and_sweeping_go_on_beside_writers_under_serializable() {
    let (_cluster, rig) = serializable().await;
    let held: Vec<_> = (0..20)
        .map(|n| {
            let key = format!("held-{n}");
            rt::spawn(rig.post("/held").key(&key).body(key.clone()).answer())
        })
        .collect();
    rig.gate.entered(20).await;
    let until = Instant::now() + 5 * SECOND;
    let writers = join_all((0..4).map(|writer| {
        let rig = &rig;
        async move {
            for n in 0.. {
                if Instant::now() > until {
                    break;
                }
                let key = format!("{writer}-{n}");
                assert_eq!(rig.post("/orders").key(&key).json(&order("x")).answer().await.status, 201);
                if n % 5 == 0 {
                    rig.db.age(&key, "2 days").await;
                }
            }
        }
    }));
    let sweeper = async {
        let mut swept = 0;
        while Instant::now() < until {
            swept += Sweeper::new(rig.pool.clone()).sweep_once().await.unwrap();
            sleep(SECOND / 100).await;
        }
        swept
    };
    let leases = async {
        while Instant::now() < until {
            let live =
                "(SELECT bool_and(leased_until > clock_timestamp()) FROM idempotency_keys WHERE key LIKE 'held-%')";
            assert!(rig.db.is(live).await, "a lease has lapsed");
            sleep(SECOND / 20).await;
        }
    };
    let (_, swept, ()) = tokio::join!(writers, sweeper, leases);
    assert!(swept > 0);
    rig.gate.open(20);
    for held in join_all(held).await {
        assert_eq!(held.unwrap().status, 201);
    }
}
