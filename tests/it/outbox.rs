//! The event that follows: there exactly when its rows are, delivered at least once, and in order.

use std::{
    cell::Cell,
    collections::{HashMap, HashSet},
    env,
    num::NonZeroU32,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use actix_idempotency::{
    Event, IdemTx, Inbox, InboxError, Machine, OutboxError, PgPool, Relay, Transition,
    outbox::{self, MAX_PAYLOAD_LENGTH, Relayed, Uuid},
    states,
};
use actix_web::{
    HttpResponse, Result,
    error::ErrorInternalServerError,
    rt::{
        self,
        time::{sleep, timeout},
    },
    web,
};
use diesel::{prelude::*, result::Error as QueryError, sql_types::Text};
use diesel_async::{AsyncConnection, RunQueryDsl, SimpleAsyncConnection};
use futures_util::future::join_all;

use crate::{
    inbox::consume,
    support::{
        client::RequestExt,
        db::{Db, pool},
        eventually,
        gate::Gate,
        log, points,
        queue::{self, QUEUE},
        repeat,
        rig::Rig,
        worker::Worker,
    },
};

const SECOND: Duration = Duration::from_secs(1);

/// For [`Db::run`]: every claimed or waiting event is due, as after its lease or its backoff; but for one that is
/// being written to.
const LATER: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; UPDATE idempotency_outbox SET due_at = clock_timestamp() \
     WHERE id IN (SELECT id FROM idempotency_outbox FOR UPDATE SKIP LOCKED); COMMIT";

/// What was delivered, in order, as `key:payload/attempt`; an event whose payload begins with `bad` fails.
#[derive(Clone, Default)]
struct Receiver {
    events: Arc<Mutex<Vec<Event>>>,
}

impl Receiver {
    async fn take(self, event: Event) -> Result<(), String> {
        let is_bad = event.payload.starts_with(b"bad");
        self.events.lock().unwrap().push(event);
        if is_bad { Err("on purpose".into()) } else { Ok(()) }
    }

    fn relay(
        &self,
        pool: PgPool,
    ) -> Relay<impl Fn(Event) -> futures_util::future::BoxFuture<'static, Result<(), String>> + use<>> {
        let receiver = self.clone();
        Relay::new(pool, move |event| Box::pin(receiver.clone().take(event)) as _)
    }

    fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap().clone()
    }

    fn payloads(&self) -> Vec<String> {
        self.events().into_iter().map(|event| String::from_utf8(event.payload).unwrap()).collect()
    }
}

async fn publish(db: &Db, payloads: &[&str]) {
    for payload in payloads {
        let conn = &mut db.connect().await;
        conn.transaction(async |conn| outbox::publish_in_order(conn, "t", "k", payload).await).await.unwrap();
    }
}

async fn events(db: &Db) -> i64 {
    db.number("SELECT count(*) AS value FROM idempotency_outbox").await
}

fn relayed(relayed: Relayed) -> (usize, usize, usize) {
    (relayed.delivered, relayed.failed, relayed.parked)
}

// --- publishing --------------------------------------------------------------------------------------------------

diesel::table! { orders (id) { id -> BigInt, state -> Text, } }
states! { enum Order for orders.state { Open = "open", Paid = "paid" } }

async fn order(mut tx: IdemTx, path: web::Path<(String, bool)>) -> Result<HttpResponse> {
    let (tag, is_well) = path.into_inner();
    diesel::sql_query("INSERT INTO effects (tag) VALUES ($1)")
        .bind::<Text, _>(&tag)
        .execute(&mut *tx)
        .await
        .map_err(ErrorInternalServerError)?;
    outbox::publish(&mut tx, "orders", &tag).await?;
    Ok(if is_well { HttpResponse::Created().finish() } else { HttpResponse::BadRequest().finish() })
}

#[actix_web::test]
async fn an_event_is_there_exactly_when_the_rows_are_that_it_tells_of() {
    let rig = Rig::builder()
        .serve(|config, idempotency, _| {
            config.service(web::scope("").wrap(idempotency.clone()).route("/{tag}/{is_well}", web::post().to(order)));
        })
        .await;
    let db = &rig.db;
    // IdemTx: a retry publishes nothing.
    for _ in 0..2 {
        assert_eq!(rig.post("/idem/true").key("a").answer().await.status, 201);
    }
    assert_eq!(rig.post("/none/false").key("b").answer().await.status, 400);
    // The inbox, and its rollback.
    let conn = &mut db.connect().await;
    let inbox = Inbox::new("c1");
    for (id, is_well) in [("m1", true), ("m1", true), ("m2", false)] {
        let _ = inbox
            .handle(conn, id, async |conn| {
                outbox::publish(conn, "orders", "inbox").await.map_err(|_| InboxError::NoTransaction)?;
                if is_well { Ok(()) } else { Err(InboxError::Query(QueryError::NotFound)) }
            })
            .await;
    }
    // What follows a transition: by the winner alone.
    db.run("CREATE TABLE orders (id bigint PRIMARY KEY, state text NOT NULL); INSERT INTO orders VALUES (1, 'open')")
        .await;
    let machine = Machine::starting_at(Order::Open).allow(Order::Open, [Order::Paid]).ending_at([Order::Paid]).build();
    for _ in 0..2 {
        let moved: Result<Transition<i64>> = machine
            .transition(1, Order::Open, Order::Paid)
            .returning(orders::id)
            .get_result_and(conn, async |conn, id| {
                outbox::publish(conn, "orders", format!("transition {id}")).await?;
                Ok(())
            })
            .await;
        let _ = moved.unwrap();
    }
    let receiver = Receiver::default();
    assert_eq!(relayed(receiver.relay(db.pool(1)).relay_once().await.unwrap()), (3, 0, 0));
    assert_eq!(receiver.payloads(), ["idem", "inbox", "transition 1"]);
    assert_eq!((db.effects("idem").await, db.effects("none").await, events(db).await), (1, 0, 0));
}

#[actix_web::test]
async fn what_cannot_be_published_leaves_the_transaction_as_it_was() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    assert!(matches!(outbox::publish(conn, "t", "x").await, Err(OutboxError::NoTransaction)));
    conn.transaction(async |conn| {
        for (topic, key) in [("", "k"), ("t", " "), ("t\0", "k"), ("t", "k\n"), (&*"x".repeat(256), "k")] {
            let refused = outbox::publish_in_order(conn, topic, key, "x").await;
            assert!(matches!(refused, Err(OutboxError::InvalidName(_))), "{refused:?}");
        }
        let large = vec![b'x'; MAX_PAYLOAD_LENGTH + 1];
        assert!(matches!(outbox::publish(conn, "t", &large).await, Err(OutboxError::PayloadTooLarge)));
        outbox::publish(conn, "t", &large[1..]).await?;
        outbox::publish(conn, "t", b"\0\xff").await?;
        outbox::publish(conn, "t", "").await
    })
    .await
    .unwrap();
    let receiver = Receiver::default();
    receiver.relay(db.pool(1)).relay_once().await.unwrap();
    let payloads: HashSet<_> = receiver.events().into_iter().map(|event| event.payload).collect();
    assert!(payloads.contains(&b"\0\xff"[..]) && payloads.contains(&b""[..]) && payloads.len() == 3);
    assert_eq!(events(&db).await, 0);
    assert!(!format!("{:?}", receiver.events()).contains("payload"));
}

/// The number is drawn before the commit: without turns the second publisher, who commits first, would be
/// delivered first, and the first one after it.
#[actix_web::test]
async fn publishers_of_one_key_take_turns_until_they_commit() {
    let db = Db::new().await;
    let (first, other) = (&mut db.connect().await, &mut db.connect().await);
    first.batch_execute("SET application_name = 'first'").await.unwrap();
    let gate = Gate::new();
    let receiver = Receiver::default();
    let relay = receiver.relay(db.pool(1));
    let second = rt::spawn({
        let (pool, gate) = (db.pool(1), gate.clone());
        async move {
            gate.pass().await;
            let mut conn = pool.get().await.unwrap();
            conn.transaction(async |conn| outbox::publish_in_order(conn, "t", "k", "second").await).await.unwrap();
        }
    });
    first
        .transaction(async |conn| {
            outbox::publish_in_order(conn, "t", "k", "first").await?;
            gate.open(1);
            gate.entered(1).await;
            // Nothing of it can be there before the first has ended. Others are not held up.
            sleep(SECOND / 2).await;
            assert!(!second.is_finished());
            other
                .transaction(async |conn| {
                    outbox::publish_in_order(conn, "t", "other key", "x").await?;
                    outbox::publish_in_order(conn, "other topic", "k", "x").await?;
                    outbox::publish(conn, "t", "x").await
                })
                .await?;
            assert_eq!(relay.relay_once().await.unwrap().delivered, 3);
            Ok::<_, OutboxError>(())
        })
        .await
        .unwrap();
    second.await.unwrap();
    relay.relay_once().await.unwrap();
    assert_eq!(receiver.payloads(), ["x", "x", "x", "first", "second"]);
}

/// T03
#[actix_web::test]
async fn a_publisher_does_not_wait_for_ever_and_can_go_on() {
    let db = Db::new().await;
    let (holder, conn) = (&mut db.connect().await, &mut db.connect().await);
    holder
        .transaction(async |holder| {
            outbox::publish_in_order(holder, "t", "k", "1").await?;
            conn.transaction(async |conn| {
                let busy = outbox::publish_in_order(conn, "t", "k", "2").await;
                assert!(matches!(busy, Err(OutboxError::KeyBusy)), "{busy:?}");
                outbox::publish(conn, "t", "3").await
            })
            .await
        })
        .await
        .unwrap();
    assert_eq!(events(&db).await, 2);
}

/// Many publishers and several relays, a third of whose first deliveries fail: within each key the first deliveries
/// are in the order of the commits.
#[actix_web::test]
async fn events_of_one_key_come_in_order_whatever_happens() {
    const KEYS: usize = 5;
    let each = repeat(40, 10);
    for serializable in [false, true] {
        let db = Db::new().await;
        let a_pool = |size| if serializable { db.serializable_pool(size) } else { db.pool(size) };
        db.run("CREATE TABLE counters (key text PRIMARY KEY, value int NOT NULL)").await;
        db.run("INSERT INTO counters SELECT n::text, 0 FROM generate_series(0, 4) AS n").await;
        let seen: Arc<Mutex<HashMap<String, Vec<usize>>>> = Arc::default();
        let relays: Vec<_> = (0..3)
            .map(|_| {
                let seen = Arc::clone(&seen);
                let relay = Relay::new(a_pool(1), move |event: Event| {
                    let seen = Arc::clone(&seen);
                    async move {
                        let number: usize = event.json().unwrap();
                        let mut seen = seen.lock().unwrap();
                        let seen = seen.entry(event.key.clone().unwrap()).or_default();
                        // A repeat of the last one is no surprise; whatever else comes again would be.
                        if seen.last() != Some(&number) {
                            seen.push(number);
                        }
                        if (number + event.id.as_bytes()[0] as usize).is_multiple_of(3) && event.attempt == 1 {
                            return Err("on purpose");
                        }
                        Ok(())
                    }
                });
                let quick = Duration::from_millis(20);
                relay.interval(quick).backoff(quick, quick * 10).batch(NonZeroU32::new(4).unwrap()).spawn()
            })
            .collect();
        let publishers = (0..6).map(|_| {
            let pool = a_pool(1);
            rt::spawn(async move {
                let mut conn = pool.get().await.unwrap();
                for n in 0..each * KEYS / 6 + 1 {
                    let key = (n % KEYS).to_string();
                    // The turn comes first, or under SERIALIZABLE most of them would have lost when it comes.
                    loop {
                        let published = conn
                            .transaction(async |conn| {
                                let next: i32 = diesel::sql_query(
                                    "UPDATE counters SET value = value + 1 WHERE key = $1 RETURNING value",
                                )
                                .bind::<Text, _>(&key)
                                .get_result::<Counter>(conn)
                                .await?
                                .value;
                                outbox::publish_in_order(conn, "t", &key, next.to_string()).await
                            })
                            .await;
                        match published {
                            Ok(_) => break,
                            Err(OutboxError::Query(error)) if error.to_string().contains("could not serialize") => {}
                            Err(error) => panic!("{error:?}"),
                        }
                    }
                }
            })
        });
        join_all(publishers).await.into_iter().for_each(|publisher| publisher.unwrap());
        eventually("all are delivered", || async { events(&db).await == 0 }).await;
        for relay in relays {
            relay.stop().await;
        }
        let seen = seen.lock().unwrap().clone();
        for key in 0..KEYS {
            let last = db.number(&format!("SELECT value::bigint AS value FROM counters WHERE key = '{key}'")).await;
            let expected: Vec<usize> = (1..=last as usize).collect();
            assert_eq!(seen[&key.to_string()], expected, "serializable: {serializable}");
        }
    }
}

#[derive(QueryableByName)]
struct Counter {
    #[diesel(sql_type = diesel::sql_types::Integer)]
    value: i32,
}

// --- deliveries that fail ----------------------------------------------------------------------------------------

#[actix_web::test]
async fn a_failed_event_comes_again_with_the_same_id_and_holds_up_its_key_meanwhile() {
    let db = Db::new().await;
    log::listen();
    let receiver = Receiver::default();
    let relay = receiver.relay(db.pool(1));
    publish(&db, &["bad 1", "2"]).await;
    let conn = &mut db.connect().await;
    conn.transaction(async |conn| outbox::publish_in_order(conn, "t", "other", "3").await).await.unwrap();
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (1, 1, 0));
    // In backoff: not due, and in the way.
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (0, 0, 0));
    assert!(
        db.is("(SELECT due_at BETWEEN now() AND now() + interval '2 s' FROM idempotency_outbox WHERE attempts = 1)")
            .await
    );
    db.run(LATER).await;
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (0, 1, 0));
    db.run("UPDATE idempotency_outbox SET payload = 'good' WHERE payload = 'bad 1'").await;
    db.run(LATER).await;
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (2, 0, 0));
    assert_eq!(receiver.payloads(), ["bad 1", "3", "bad 1", "good", "2"]);
    let events = receiver.events();
    assert_eq!((events[0].id, events[2].id), (events[2].id, events[3].id));
    assert_eq!([0, 2, 3].map(|n| events[n].attempt), [1, 2, 3]);
    assert_eq!(events.iter().map(|event| event.id).collect::<HashSet<_>>().len(), 3);
    // The log has the receiver's words for it, and nothing of what the event says.
    let id = events[0].id.to_string();
    let lines: Vec<_> = log::all().into_iter().filter(|line| line.get("event_id") == Some(&id)).collect();
    assert_eq!(lines.len(), 2);
    for line in lines {
        assert_eq!((line.get("event"), line.get("error")), (Some("event-failed"), Some("on purpose")));
        assert!(!format!("{line:?}").contains("bad 1"));
    }
}

#[actix_web::test]
async fn what_fails_too_often_is_parked_and_holds_up_its_key_until_somebody_decides() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    publish(&db, &["bad 1", "bad 2", "3"]).await;
    let receiver = Receiver::default();
    let relay = receiver.relay(db.pool(1)).max_attempts(2);
    for expected in [(0, 1, 0), (0, 0, 1), (0, 0, 0)] {
        assert_eq!(relayed(relay.relay_once().await.unwrap()), expected);
        db.run(LATER).await;
    }
    let parked = outbox::parked(conn, 10).await.unwrap();
    assert_eq!(parked.len(), 1);
    assert_eq!((&parked[0].payload[..], parked[0].attempt), (&b"bad 1"[..], 2));
    assert!(!outbox::discard(conn, Uuid::nil()).await.unwrap() && !outbox::unpark(conn, Uuid::nil()).await.unwrap());

    // Tried again, parked again; then given up, so that the next one has its turn.
    assert!(outbox::unpark(conn, parked[0].id).await.unwrap());
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (0, 1, 0));
    db.run(LATER).await;
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (0, 0, 1));
    assert!(outbox::discard(conn, parked[0].id).await.unwrap());
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (0, 1, 0));
    db.run(LATER).await;
    // Who can do without it goes on.
    let skipping = receiver.relay(db.pool(1)).max_attempts(2).skip_parked();
    assert_eq!(relayed(skipping.relay_once().await.unwrap()), (1, 0, 1));
    assert_eq!(receiver.payloads().last().unwrap(), "3");
    assert_eq!(outbox::parked(conn, 10).await.unwrap().len(), 1);
}

#[actix_web::test]
async fn a_delivery_that_panics_or_takes_too_long_has_failed() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    conn.transaction(async |conn| {
        outbox::publish(conn, "panics", "").await?;
        outbox::publish(conn, "hangs", "").await?;
        outbox::publish(conn, "works", "").await
    })
    .await
    .unwrap();
    let relay = Relay::new(db.pool(1), |event: Event| async move {
        match event.topic.as_str() {
            "panics" => panic!("on purpose"),
            "hangs" => std::future::pending().await,
            _ => Ok::<_, String>(()),
        }
    });
    assert_eq!(relayed(relay.timeout(SECOND / 5).relay_once().await.unwrap()), (1, 2, 0));
    assert_eq!(db.number("SELECT sum(attempts)::bigint AS value FROM idempotency_outbox").await, 2);
}

// --- relays that stall, stop or die ------------------------------------------------------------------------------

#[actix_web::test]
async fn no_connection_of_the_pool_waits_for_a_slow_receiver() {
    let db = Db::new().await;
    publish(&db, &["1"]).await;
    let (gate, pool) = (Gate::new(), db.pool(1));
    let relaying = {
        let gate = gate.clone();
        Relay::new(pool.clone(), move |_| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                Ok::<_, String>(())
            }
        })
        .spawn()
    };
    gate.entered(1).await;
    timeout(SECOND * 10, pool.get()).await.expect("a connection should be free").unwrap();
    let open = "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%')";
    assert!(!db.is(open).await, "no transaction should be open");
    gate.open(1);
    // Waits for the delivery, and for the note of it.
    relaying.stop().await;
    assert_eq!(events(&db).await, 0);
}

#[actix_web::test]
async fn a_relay_that_comes_back_after_its_lease_changes_nothing() {
    let db = Db::new().await;
    publish(&db, &["1", "2"]).await;
    let (gate, receiver) = (Gate::new(), Receiver::default());
    let stalled = rt::spawn({
        let (gate, receiver) = (gate.clone(), receiver.clone());
        let relay = Relay::new(db.pool(1), move |event: Event| {
            let (gate, receiver) = (gate.clone(), receiver.clone());
            async move {
                gate.pass().await;
                let fails = event.payload == b"1";
                receiver.take(event).await?;
                // Too late to put it back as well.
                if fails { Err("on purpose".to_owned()) } else { Ok(()) }
            }
        });
        async move { relay.relay_once().await.unwrap() }
    });
    gate.entered(1).await;
    db.run(LATER).await;
    assert_eq!(relayed(receiver.relay(db.pool(1)).relay_once().await.unwrap()), (2, 0, 0));
    gate.open(1);
    assert_eq!(stalled.await.unwrap().delivered, 0);
    assert_eq!(receiver.payloads(), ["1", "2", "1"]);
    assert_eq!(events(&db).await, 0);
}

#[actix_web::test]
async fn a_handle_that_is_dropped_stops_its_relay_and_the_event_comes_again() {
    let db = Db::new().await;
    publish(&db, &["1"]).await;
    let gate = Gate::new();
    let relaying = {
        let gate = gate.clone();
        Relay::new(db.pool(1), move |_| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                Ok::<_, String>(())
            }
        })
        .spawn()
    };
    gate.entered(1).await;
    drop(relaying);
    gate.open(1);
    let receiver = Receiver::default();
    let relay = receiver.relay(db.pool(1));
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (0, 0, 0));
    db.run(LATER).await;
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (1, 0, 0));
    assert_eq!(receiver.events()[0].attempt, 2);
}

/// Deliveries count when they begin: an event that kills its relay each time is parked too.
#[actix_web::test]
async fn an_event_whose_relays_die_is_parked_in_the_end() {
    let db = Db::new().await;
    publish(&db, &["1"]).await;
    for _ in 0..2 {
        let mut doomed = relay_process(&db.url);
        doomed.stop_at("events-claimed", 1).await;
        db.run(LATER).await;
        doomed.stopped_at("events-claimed").await;
        doomed.kill();
    }
    db.run(LATER).await;
    log::listen();
    let worker = log::thread();
    let relay = Receiver::default().relay(db.pool(1)).max_attempts(2);
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (0, 0, 1));
    assert!(log::on(&worker).iter().any(|line| line.get("event") == Some("event-parked")));
}

/// Its statements were planned while there was nothing to do, and nobody plans them anew for a while.
#[actix_web::test]
async fn a_relay_that_was_idle_is_a_match_for_a_sudden_crowd() {
    let db = Db::new().await;
    db.run("ALTER TABLE idempotency_outbox SET (autovacuum_enabled = false)").await;
    let receiver = Receiver::default();
    let relaying = receiver.relay(db.pool(1)).interval(SECOND / 100).spawn();
    // More often than a statement is planned for the parameters that it has.
    for n in 0..12 {
        publish(&db, &[&format!("alone {n}")]).await;
        eventually("it is delivered", || async { events(&db).await == 0 }).await;
    }
    db.run(
        "INSERT INTO idempotency_outbox (id, topic, key, payload, created_at, due_at) SELECT gen_random_uuid(), 't', \
         (n % 3)::text, 'x', clock_timestamp(), clock_timestamp() FROM generate_series(1, 20000) AS n",
    )
    .await;
    eventually("some of each key are delivered", || async { events(&db).await <= 20_000 - 30 }).await;
    relaying.stop().await;
}

#[actix_web::test]
async fn a_store_that_is_away_for_a_moment_stops_no_relay() {
    let db = Db::new().await;
    let receiver = Receiver::default();
    let relaying = receiver.relay(db.pool(1)).interval(SECOND / 20).spawn();
    publish(&db, &["1"]).await;
    eventually("it is delivered", || async { events(&db).await == 0 }).await;
    db.run(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
         WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    .await;
    publish(&db, &["2"]).await;
    eventually("it is delivered", || async { events(&db).await == 0 }).await;
    relaying.stop().await;
    assert_eq!(receiver.payloads(), ["1", "2"]);
}

/// The other process: takes events to the queue of the tests.
#[test]
fn relay_if_asked() {
    let Ok(url) = env::var("IT_RELAY") else { return };
    points::obey();
    rt::System::new().block_on(async {
        let (events, messages) = (pool(&url, 1), pool(&url, 4));
        let _relaying = Relay::new(events, move |event: Event| {
            let messages = messages.clone();
            async move {
                let mut conn = messages.get().await.map_err(|error| error.to_string())?;
                queue::send_event(&mut conn, &event).await.map_err(|error| error.to_string())
            }
        })
        .interval(Duration::from_millis(20))
        // A relay that dies has tried: of so many deaths some events see more than the default allows.
        .max_attempts(1000)
        .spawn();
        std::future::pending::<()>().await;
    });
}

fn relay_process(url: &str) -> Worker {
    Worker::start("outbox::relay_if_asked", &[("IT_RELAY", url)])
}

/// By which its connections are told from those of others.
fn doomed_url(db: &Db) -> String {
    let mark = if db.url.contains('?') { '&' } else { '?' };
    format!("{}{mark}application_name=doomed", db.url)
}

fn consumer_process(url: &str) -> Worker {
    Worker::start("inbox::consume_if_asked", &[("IT_CONSUME", url)])
}

/// The pair: whoever dies between the commit of an order and the acknowledgement of its message, at every named
/// point of both and at random moments, each order has one effect, and the numbers of each key come in order.
#[actix_web::test]
async fn from_the_outbox_to_the_inbox_one_effect_whoever_is_killed() {
    for serializable in [false, true] {
        let db = Db::new().await;
        db.run(QUEUE).await;
        if serializable {
            db.run(&format!("ALTER DATABASE {} SET default_transaction_isolation = 'serializable'", db.name)).await;
        }
        let relays = [Some("events-claimed"), Some("events-delivered"), Some("events-noted"), None];
        let consumers = [
            Some("message-marked"),
            Some("message-handled"),
            Some("message-done"),
            Some("message-committed"),
            Some("before-acknowledge"),
            Some("after-acknowledge"),
            None,
        ];
        let published = AtomicUsize::new(0);
        let kills = repeat(10, 1);
        // Of each kind one is always about to die; the leases of dead relays are ended for them.
        let relay_deaths = async {
            for point in relays.iter().cycle().take(relays.len() * kills) {
                die(relay_process(&doomed_url(&db)), *point, &db, &published).await;
                // What it had sent may still be on its way: a claim that lands after this is one of thirty seconds.
                eventually("its connections are gone", async || {
                    db.is("NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'doomed' \
                           AND datname = current_database())")
                        .await
                })
                .await;
                db.run(LATER).await;
            }
        };
        let consumer_deaths = async {
            for point in consumers.iter().cycle().take(consumers.len() * kills) {
                die(consumer_process(&db.url), *point, &db, &published).await;
            }
        };
        // A second pair that lives, so that there is always somebody to meet.
        let living = (relay_process(&db.url), rt::spawn(consume(db.pool(2))));
        futures_util::join!(relay_deaths, consumer_deaths);
        let published = published.into_inner();
        // However many there are: what is left becomes less until nothing is.
        let left = Cell::new(i64::MAX);
        while left.get() > 0 {
            let before = left.get();
            eventually("another one is handled", || async {
                assert!(!living.1.is_finished(), "the consumer in this process should live");
                left.set(events(&db).await + queue::length(&db).await);
                left.get() < before
            })
            .await;
        }
        living.1.abort();
        assert_eq!(db.all_effects().await, published as i64, "serializable: {serializable}");
        assert!(db.is("NOT EXISTS (SELECT FROM effects GROUP BY tag HAVING count(*) > 1)").await);
        assert_eq!(db.number("SELECT count(*) AS value FROM idempotency_inbox_attempts").await, 0);
    }
}

/// Publishes until the process has come to its point (or for a random moment), and kills it there.
async fn die(mut doomed: Worker, point: Option<&str>, db: &Db, published: &AtomicUsize) {
    let conn = &mut db.connect().await;
    if let Some(point) = point {
        doomed.stop_at(point, 1).await;
    }
    let is_there = Cell::new(false);
    let publishing = async {
        while !is_there.get() {
            let n = published.fetch_add(1, Ordering::Relaxed);
            let key = (n % 3).to_string();
            conn.transaction(async |conn| outbox::publish_in_order(conn, "orders", &key, n.to_string()).await)
                .await
                .unwrap();
            sleep(Duration::from_millis(20)).await;
        }
    };
    let coming = async {
        match point {
            Some(point) => doomed.stopped_at(point).await,
            None => sleep(Duration::from_millis(rand::random_range(0..200))).await,
        }
        is_there.set(true);
    };
    futures_util::join!(publishing, coming);
    doomed.kill();
}

// --- the table ---------------------------------------------------------------------------------------------------

#[actix_web::test]
async fn the_table_of_the_outbox_states_its_own_rules() {
    let db = Db::new().await;
    let conn = &mut db.connect().await;
    let mut broken = HashSet::new();
    for (column, value, rule) in [
        ("topic", "''", "topic_check"),
        ("topic", "repeat('é', 128)", "topic_check"),
        ("key", "''", "key_check"),
        ("payload", "convert_to(repeat('x', 1048577), 'utf8')", "payload_check"),
        ("state", "'delivered'", "state_check"),
        ("attempts", "-1", "attempts_check"),
        ("owner", "'short'", "owner_check"),
        ("state", "'parked'", "parked_check"),
    ] {
        let mut row = HashMap::from([
            ("id", "gen_random_uuid()"),
            ("topic", "'t'"),
            ("payload", "''"),
            ("created_at", "now()"),
            ("due_at", "now()"),
        ]);
        row.insert(column, value);
        let (columns, values): (Vec<_>, Vec<_>) = row.into_iter().unzip();
        let sql = format!("INSERT INTO idempotency_outbox ({}) VALUES ({})", columns.join(", "), values.join(", "));
        let QueryError::DatabaseError(_, info) = conn.batch_execute(&sql).await.unwrap_err() else { panic!("{sql}") };
        let name = format!("idempotency_outbox_{rule}");
        assert_eq!(info.constraint_name(), Some(name.as_str()), "{column} = {value}");
        broken.insert(name);
    }
    let named = db
        .text(
            "SELECT string_agg(conname, ' ') AS value FROM pg_constraint \
             WHERE conrelid = 'idempotency_outbox'::regclass AND contype = 'c'",
        )
        .await
        .unwrap();
    assert_eq!(named.split(' ').map(str::to_owned).collect::<HashSet<_>>(), broken);
}

#[actix_web::test]
async fn publisher_and_relay_need_no_more_than_the_grants_of_the_documentation() {
    let db = Db::new().await;
    let role = db.service_role().await;
    db.run(&format!("GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_outbox TO {}", role.name)).await;
    let pool = pool(&role.url, 1);
    let mut conn = pool.get().await.unwrap();
    conn.transaction(async |conn| {
        outbox::publish_in_order(conn, "t", "k", "bad").await?;
        outbox::publish(conn, "t", "good").await
    })
    .await
    .unwrap();
    let relay = Receiver::default().relay(pool.clone()).max_attempts(1);
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (1, 0, 1));
    let parked = outbox::parked(&mut conn, 1).await.unwrap();
    assert!(outbox::unpark(&mut conn, parked[0].id).await.unwrap());
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (0, 0, 1));
    assert!(outbox::discard(&mut conn, parked[0].id).await.unwrap());
}

/// A queue that is long does not make the claim slow: it reads what it claims, and not what waits.
#[actix_web::test]
async fn a_claim_does_not_read_what_waits() {
    let db = Db::new().await;
    db.run(
        "INSERT INTO idempotency_outbox (id, topic, payload, attempts, created_at, due_at) \
         SELECT gen_random_uuid(), 't', '', 1, now(), now() + interval '1 hour' FROM generate_series(1, 20000); \
         ANALYZE idempotency_outbox",
    )
    .await;
    publish(&db, &["1"]).await;
    let receiver = Receiver::default();
    assert_eq!(relayed(receiver.relay(db.pool(1)).relay_once().await.unwrap()), (1, 0, 0));
    // A session reports what it has read when it ends.
    let read = "SELECT coalesce(sum(s.seq_tup_read), 0)::bigint AS value FROM pg_stat_user_tables AS s \
                WHERE relname = 'idempotency_outbox'";
    let due = "SELECT coalesce(sum(idx_tup_read), 0)::bigint AS value FROM pg_stat_user_indexes \
               WHERE indexrelname = 'idempotency_outbox_due_idx'";
    eventually("the claim is counted", || async { db.number(due).await > 0 }).await;
    let (read, due) = (db.number(read).await, db.number(due).await);
    // ANALYZE and the first INSERT have read the table as well, in samples.
    assert!(due < 100 && read < 20_000, "{due} entries of the index, {read} rows");
}

/// Of a key whose first event is in backoff, thousands wait: the other keys go on.
#[actix_web::test]
async fn a_long_queue_of_one_key_stands_in_nobodys_way() {
    let db = Db::new().await;
    db.run(
        "INSERT INTO idempotency_outbox (id, topic, key, payload, attempts, created_at, due_at) \
         SELECT gen_random_uuid(), 't', 'hot', n::text::bytea, 1, now(), \
         CASE n WHEN 1 THEN now() + interval '1 hour' ELSE now() - interval '1 hour' END \
         FROM generate_series(1, 20000) AS n",
    )
    .await;
    let conn = &mut db.connect().await;
    conn.transaction(async |conn| {
        outbox::publish_in_order(conn, "t", "a", "a").await?;
        outbox::publish_in_order(conn, "t", "z", "z1").await?;
        outbox::publish_in_order(conn, "t", "z", "z2").await
    })
    .await
    .unwrap();
    let receiver = Receiver::default();
    let relay = receiver.relay(db.pool(1));
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (3, 0, 0));
    assert_eq!(receiver.payloads(), ["a", "z1", "z2"]);
    // And the long one in its order, once it may.
    db.run("DELETE FROM idempotency_outbox WHERE length(payload) > 2").await;
    db.run("UPDATE idempotency_outbox SET due_at = now() - interval '1 minute' WHERE payload = '1'").await;
    let left = events(&db).await;
    assert_eq!(relayed(relay.relay_once().await.unwrap()), (left as usize, 0, 0));
    let numbers: Vec<u32> = receiver.payloads()[3..].iter().map(|payload| payload.parse().unwrap()).collect();
    assert!(numbers.is_sorted() && numbers[0] == 1, "{numbers:?}");
}
