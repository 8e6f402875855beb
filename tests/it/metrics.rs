//! What can be counted and measured of a service, as its dashboards get it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::{Arc, OnceLock, mpsc},
    time::Duration,
};

use actix_idempotency::{
    Gauges, Idempotency,
    migrations::{self, OUTSTANDING_INDEX},
    telemetry,
};
use actix_web::rt::spawn;
use metrics_exporter_prometheus::PrometheusBuilder;
use serde_json::Value;

use crate::support::{
    PATIENCE,
    app::order,
    client::{RequestExt, client},
    db::{Db, LAPSED, THREE_DAYS_LATER},
    eventually,
    example::{Example, Session},
    log,
    rig::Rig,
};

/// The lines of the Prometheus format: values by name and labels, and the kind of each metric.
struct Scrape {
    values: BTreeMap<String, f64>,
    kinds: BTreeMap<String, String>,
}

impl Scrape {
    async fn of(example: &Example) -> Self {
        let answer = client().get(example.url("/metrics")).answer().await;
        assert_eq!(answer.status, 200);
        let (mut values, mut kinds) = (BTreeMap::new(), BTreeMap::new());
        for line in answer.text().lines().filter(|line| !line.is_empty()) {
            match line.strip_prefix("# ") {
                Some(about) => {
                    if let Some((name, kind)) = about.strip_prefix("TYPE ").and_then(|rest| rest.split_once(' ')) {
                        let before = kinds.insert(name.to_owned(), kind.to_owned());
                        assert_eq!(before, None, "{name} twice");
                    }
                }
                None => {
                    let (name, value) = line.rsplit_once(' ').unwrap();
                    assert_eq!(values.insert(name.to_owned(), value.parse().unwrap()), None, "{name} twice");
                }
            }
        }
        Self { values, kinds }
    }

    #[track_caller]
    fn value(&self, name: &str) -> f64 {
        *self.values.get(name).unwrap_or_else(|| panic!("{name} in {:?}", self.values.keys()))
    }

    /// The values of a label, of those that are not zero.
    fn by(&self, metric: &str, label: &str) -> BTreeMap<&str, f64> {
        let prefix = format!("{metric}{{{label}=\"");
        let values = self.values.iter().filter(|(_, value)| **value != 0.0);
        values.filter_map(|(name, value)| Some((name.strip_prefix(&prefix)?.strip_suffix("\"}")?, *value))).collect()
    }
}

fn file(path: &str) -> String {
    fs::read_to_string(format!("{}/{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// The shell lines at the head of the example.
fn lines() -> String {
    let source = file("examples/metrics.rs");
    let head = source.lines().map_while(|line| line.strip_prefix("//!"));
    let lines = head.filter_map(|line| line.strip_prefix("     ")).filter(|line| !line.starts_with("./with-postgres"));
    // The last one asks for the numbers, which is done here.
    lines.filter(|line| !line.contains("/metrics")).collect::<Vec<_>>().join("\n")
}

/// The rows of a table in the docs, as name and second column.
fn documented(header: &str) -> BTreeMap<String, String> {
    let docs = file("src/telemetry/mod.rs");
    let table = docs.lines().skip_while(|line| !line.starts_with(&format!("//! | {header} |"))).skip(2);
    let cells = table.map_while(|line| line.strip_prefix("//! | ")).map(|row| {
        let mut cells = row.split(" | ").map(|cell| cell.trim_matches('`').to_owned());
        (cells.next().unwrap(), cells.next().unwrap())
    });
    cells.collect()
}

/// Every word of a text that begins so.
fn words<'a>(text: &'a str, prefix: &str) -> BTreeSet<&'a str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with(prefix)).collect()
}

#[actix_web::test]
async fn every_number_is_that_of_the_requests_just_sent() {
    if !Session::can_run() {
        return;
    }
    let db = Db::empty().await;
    let example = Example::start("metrics", &db.url, &[]);

    let scrape = Scrape::of(&example).await;
    let zero = |name: &String| scrape.value(&format!("idempotency_events_total{{event=\"{name}\"}}")) == 0.0;
    assert!(documented("`event`").keys().all(zero), "an alarm on the first of its kind needs a zero before it");

    let busy = || db.is("(SELECT EXISTS (SELECT FROM idempotency_keys WHERE state = 'outstanding'))");
    let answers = Session::at(&example, &lines()).answers(busy).await;
    assert_eq!(answers, [201, 201, 422, 500, 500, 201, 201]);

    let scrape = Scrape::of(&example).await;
    let events = scrape.by("idempotency_events_total", "event");
    let sent = [
        ("fresh", 3.0),
        ("replayed", 2.0),
        ("key-reused", 1.0),
        ("rejected", 1.0),
        ("released", 2.0),
        ("retried", 1.0),
        ("waited", 1.0),
    ];
    assert_eq!(events, BTreeMap::from(sent));
    assert_eq!(scrape.by("idempotency_refusals_total", "code"), BTreeMap::from([("key-reused", 1.0)]));
    assert_eq!(scrape.value("idempotency_swept_rows_total"), 0.0);
    // Each of seven requests looks once; the one that waits looks before it sits down, then, and when it is woken.
    assert_eq!(scrape.value("idempotency_claim_seconds_count"), 9.0);
    assert_eq!(scrape.value("idempotency_handler_seconds_count"), 4.0);
    assert_eq!(scrape.value("idempotency_completion_seconds_count"), 2.0);
    assert_eq!(scrape.value("idempotency_wait_seconds_count"), 1.0);
    let handlers = scrape.value("idempotency_handler_seconds_sum");
    assert!((3.0..PATIENCE.as_secs_f64()).contains(&handlers), "{handlers}");
    let wait = scrape.value("idempotency_wait_seconds_sum");
    assert!(wait > 0.0 && wait < handlers, "{wait}");
    assert_eq!(scrape.value("idempotency_outstanding"), 0.0);
    assert_eq!(scrape.value("idempotency_oldest_outstanding_seconds"), 0.0);
    assert_eq!(scrape.value("idempotency_oldest_expired_seconds"), 0.0);
    assert_eq!(scrape.by("idempotency_pool_connections", "state").keys().collect::<Vec<_>>(), [&"idle"]);

    // The names, each once, are those of the documentation.
    assert_eq!(scrape.kinds, documented("metric"));
    // So are those of the dashboard, and none is missing there.
    let dashboard = file("examples/metrics-dashboard.json");
    let shown = words(&dashboard, "idempotency_");
    let shown: BTreeSet<_> = shown.iter().map(|name| name.trim_end_matches("_bucket")).collect();
    assert_eq!(shown, scrape.kinds.keys().map(String::as_str).collect());
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let expressions = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut events = 0;
    for expression in expressions.map(|target| target["expr"].as_str().unwrap()) {
        let Some(listed) = expression.split("event=~\"").nth(1) else { continue };
        for event in listed.split('"').next().unwrap().split('|') {
            assert!(scrape.values.contains_key(&format!("idempotency_events_total{{event=\"{event}\"}}")), "{event}");
            events += 1;
        }
    }
    assert!(events > 10, "{events}");
}

#[actix_web::test]
async fn the_gauges_say_what_is_held_and_how_old_the_oldest_rows_are() {
    let rig = Rig::start().await;
    let gauges = Gauges::of(&rig.idempotency);
    let held = spawn(rig.post("/held").key("held").body("a").answer());
    rig.gate.entered(1).await;
    let sample = gauges.sample_once().await.unwrap();
    assert_eq!((sample.outstanding, sample.oldest_outstanding, sample.oldest_expired), (1, None, Duration::ZERO));
    rig.gate.open(1);
    assert_eq!(held.await.unwrap().status, 201);

    // Its own connection is back in the pool each time.
    let idle = sample.connections_in_use + sample.connections_idle;
    let conn = rig.pool.get().await.unwrap();
    let sample = gauges.sample_once().await.unwrap();
    assert_eq!((sample.connections_in_use, sample.connections_idle + 1 >= idle), (1, true), "{sample:?}");
    drop(conn);

    migrations::run_pending(&rig.db.url, OUTSTANDING_INDEX).await.unwrap();
    let sample = gauges.sample_once().await.unwrap();
    assert_eq!((sample.outstanding, sample.oldest_outstanding), (0, Some(Duration::ZERO)));

    // Retained for a day, and completed three days ago; nobody has swept it.
    rig.db.run(THREE_DAYS_LATER).await;
    let sample = gauges.sample_once().await.unwrap();
    let days = |days: u64| Duration::from_secs(days * 24 * 60 * 60);
    assert!(sample.oldest_expired > days(2) && sample.oldest_expired < days(2) + PATIENCE, "{sample:?}");

    // Claimed three days ago, by a process that has died a minute ago: `expires_at` has passed, the row has not
    // expired.
    rig.db.run(LAPSED).await;
    let sample = gauges.sample_once().await.unwrap();
    assert_eq!((sample.outstanding, sample.oldest_expired), (0, Duration::ZERO));
    let age = sample.oldest_outstanding.unwrap();
    assert!(age > days(3) && age < days(3) + PATIENCE, "{sample:?}");
}

#[actix_web::test]
async fn the_gauges_follow_by_themselves_where_they_are_told_to() {
    let rig = Rig::start().await;
    rig.post("/orders").key("follow").json(&order("x")).answer().await;
    // Long ago enough to be told from what other tests sample meanwhile.
    let aged = "UPDATE idempotency_keys SET created_at = created_at - interval '9 years',
        leased_until = leased_until - interval '9 years', completed_at = completed_at - interval '9 years',
        expires_at = expires_at - interval '9 years'";
    rig.db.run(aged).await;
    let recorded = PrometheusBuilder::new().install_recorder().unwrap();
    let sampling = Gauges::of(&rig.idempotency).interval(Duration::ZERO).spawn();
    eventually("nine years are seen", async || {
        let text = recorded.render();
        let age = text.lines().find_map(|line| line.strip_prefix("idempotency_oldest_expired_seconds "));
        age.is_some_and(|age| age.parse::<f64>().unwrap() > 8.0 * 365.0 * 24.0 * 60.0 * 60.0)
    })
    .await;
    sampling.stop().await;
}

#[actix_web::test]
async fn a_store_that_is_gone_is_an_error_of_the_sample_and_harms_no_connection() {
    let rig = Rig::builder().pool_size(1).start().await;
    let gauges = Gauges::of(&rig.idempotency);
    rig.db.run("ALTER TABLE idempotency_keys RENAME TO away").await;
    assert!(gauges.sample_once().await.is_err());
    rig.db.run("ALTER TABLE away RENAME TO idempotency_keys").await;
    gauges.sample_once().await.unwrap();
    assert_eq!(rig.post("/orders").key("after").json(&order("x")).answer().await.status, 201);
}

#[actix_web::test]
#[should_panic(expected = "has no engine of its own")]
async fn there_are_no_gauges_without_an_engine() {
    let _ = Gauges::of(&Idempotency::from_app_data());
}

#[actix_web::test]
async fn a_listener_is_told_of_every_event_and_harms_nobody_by_a_panic() {
    log::listen();
    let rig = Rig::start().await;
    let panics_about = Arc::new(OnceLock::<String>::new());
    let about = Arc::clone(&panics_about);
    telemetry::on_event(move |notice| {
        let is_ours = notice.id.is_some_and(|id| about.get().is_some_and(|about| about == id));
        assert!(!is_ours, "this listener panics");
    });
    let (says, said) = mpsc::channel();
    telemetry::on_event(move |notice| {
        let _ = says.send((notice.event, notice.id.map(str::to_owned), notice.code));
    });
    let post = async |sku: &str| rig.post("/orders").key("listened-to").json(&order(sku)).answer().await;
    let first = post("x").await;
    let id = rig.db.id("listened-to").await;
    panics_about.set(id.clone()).unwrap();
    let (replay, reused) = (post("x").await, post("y").await);
    first.assert_replayed_by(&replay);
    assert_eq!((reused.status.as_u16(), reused.code().as_str()), (422, "key-reused"));

    // Of the whole process, in which other tests run.
    let said: Vec<_> = said.try_iter().collect();
    let ours = said.iter().filter(|(_, about, _)| about.as_ref() == Some(&id));
    assert_eq!(ours.map(|(event, ..)| *event).collect::<Vec<_>>(), ["fresh", "replayed", "key-reused"]);
    assert!(said.contains(&("rejected", None, Some("key-reused"))), "{said:?}");
    assert!(said.iter().all(|(event, _, code)| code.is_none() || *event == "rejected"));
    assert_eq!(log::count(&id, "listener-panicked"), 2);
}
