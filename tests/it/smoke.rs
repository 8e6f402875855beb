use std::time::Duration;

use crate::support::{
    app::order,
    client::{RequestExt, client},
    cluster::Cluster,
    db::Db,
    process::Setup,
    rig::Rig,
};

#[actix_web::test]
async fn a_retry_gets_the_first_answer() {
    let rig = Rig::start().await;
    let first = rig.post("/orders").key("a").json(&order("x")).answer().await;
    let retry = rig.post("/orders").key("a").json(&order("x")).answer().await;
    first.assert_replayed_by(&retry);
    assert_eq!(rig.db.effects("x").await, 1);
}

#[actix_web::test]
async fn process_and_cluster() {
    let cluster = Cluster::start(&[]);
    let db = Db::on(&cluster.url()).await;
    let setup = Setup { lease: Duration::from_secs(1), ..Setup::new(&db.url) };
    let server = setup.start();
    let first = client().post(server.url("/orders")).key("a").json(&order("x")).answer().await;
    assert_eq!(first.status, 201);
    server.kill();
    let server = setup.start();
    let retry = client().post(server.url("/orders")).key("a").json(&order("x")).answer().await;
    first.assert_replayed_by(&retry);
}
