//! The crash campaign: a server process and clients that keep their keys until they have their orders, while
//! the server is killed (SIGKILL) and Postgres stopped (immediate shutdown) at every named point of the path
//! and at random moments.
//!
//! Two hundred kills by default; two thousand by hand, and again with the seed that it prints:
//!
//! ```text
//! REPEAT=full ./with-postgres cargo test --test it -- campaign --nocapture
//! IT_SEED=42 ./with-postgres cargo test --test it -- campaign --nocapture
//! ```

use std::{
    collections::BTreeMap,
    env,
    sync::Arc,
    time::{Duration, Instant},
};

use actix_web::rt::{self, task::JoinHandle, time::sleep};
use futures_util::future::join_all;
use tokio::sync::watch;

use crate::support::{
    client::client,
    cluster::Cluster,
    db::Db,
    eventually,
    process::{ServerProcess, Setup},
    proxy::Proxy,
    repeat,
    shop::{Attempts, Purchase, Shop, Way},
};

const LEASE: Duration = Duration::from_millis(250);
/// How much longer than its lease a key may be outstanding, on a machine that is busy.
const SLACK: Duration = Duration::from_secs(10);
const CLIENTS: u32 = 4;

/// The path under each policy; what is reached only by an attempt that fails, comes last.
const LEASED: [&str; 11] = [
    "before-claim",
    "after-claim",
    "before-begin",
    "in-handler",
    "before-complete",
    "after-complete",
    "after-commit",
    "before-rollback",
    "after-rollback",
    "before-release",
    "after-release",
];
const ATOMIC: [&str; 9] = [
    "before-claim",
    "before-begin",
    "after-claim",
    "in-handler",
    "before-complete",
    "after-complete",
    "after-commit",
    "before-rollback",
    "after-rollback",
];
const HITS: usize = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Server,
    Postgres,
}

#[derive(Debug, Clone, Copy)]
struct Round {
    victim: Victim,
    /// At this point under that policy, or at a random moment.
    at: Option<(Way, &'static str)>,
}

/// Whatever is random, from one seed.
struct Dice(u64);

impl Dice {
    fn new() -> Self {
        let seed = env::var("IT_SEED").map_or_else(|_| rand::random::<u32>().into(), |seed| seed.parse().unwrap());
        println!("IT_SEED={seed}");
        Self(seed)
    }

    /// Below `sides`. (SplitMix64)
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % sides
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.roll(last as u64 + 1) as usize);
        }
    }
}

/// Every point five times by killing the server, once or more by stopping Postgres, and random moments.
fn rounds(dice: &mut Dice) -> Vec<Round> {
    let points: Vec<_> = LEASED
        .iter()
        .map(|point| (Way::Leased, *point))
        .chain(ATOMIC.iter().map(|point| (Way::Atomic, *point)))
        .collect();
    let every = |times: usize| points.iter().copied().cycle().take(points.len() * times).map(Some);
    let moments = |times: usize| std::iter::repeat_n(None, times);
    let times = repeat(10, 1);
    let server = every(HITS * times).chain(moments(60 * times)).map(|at| Round { victim: Victim::Server, at });
    let postgres = every(times).chain(moments(20 * times)).map(|at| Round { victim: Victim::Postgres, at });
    let mut rounds: Vec<_> = server.chain(postgres).collect();
    dice.shuffle(&mut rounds);
    rounds
}

struct Campaign {
    cluster: Cluster,
    shop: Shop,
    setup: Setup,
    server: Option<ServerProcess>,
    address: watch::Sender<String>,
    dice: Dice,
    hits: BTreeMap<(String, &'static str), usize>,
    slowest: Duration,
}

impl Campaign {
    async fn begin() -> Self {
        let cluster = Cluster::start(&[]);
        let shop = Shop::open(Db::on(&cluster.url()).await).await;
        let setup = Setup { lease: LEASE, store_timeout: Some(Duration::from_secs(5)), ..Setup::new(&shop.db.url) };
        let mut campaign = Self {
            cluster,
            shop,
            setup,
            server: None,
            address: watch::channel(String::new()).0,
            dice: Dice::new(),
            hits: BTreeMap::new(),
            slowest: Duration::ZERO,
        };
        campaign.start_server();
        campaign
    }

    fn start_server(&mut self) {
        let server = self.setup.start();
        self.address.send_replace(server.url(""));
        self.server = Some(server);
    }

    fn server(&mut self) -> &mut ServerProcess {
        self.server.as_mut().unwrap()
    }

    async fn round(&mut self, number: usize, round: Round) {
        let stops_at_rollback = |point: &str| point.contains("rollback") || point.contains("release");
        let purchases: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let way = round.at.map_or([Way::Leased, Way::Atomic][client as usize % 2], |(way, _)| way);
                let fails = match round.at {
                    Some((_, point)) => stops_at_rollback(point),
                    None => self.dice.roll(3) == 0,
                };
                let purchase = Purchase::new(format!("{number}-{client}"), way, client.into());
                Arc::new(purchase.failing_first(fails.into()))
            })
            .collect();
        if let Some((_, point)) = round.at {
            let nth = 1 + self.dice.roll(CLIENTS.into()) as u32;
            self.server().stop_at(point, nth).await;
        }
        let shopping: Vec<JoinHandle<Attempts>> =
            purchases.iter().map(|purchase| rt::spawn(Arc::clone(purchase).insist(self.address.subscribe()))).collect();
        match round.at {
            Some((way, point)) => {
                self.server().stopped_at(point).await;
                *self.hits.entry((format!("{way:?}"), point)).or_default() += 1;
            }
            None => sleep(Duration::from_micros(self.dice.roll(40_000))).await,
        }
        self.strike(round).await;

        let struck = Instant::now();
        let mut unanswered = 0;
        for (purchase, shopping) in purchases.iter().zip(join_all(shopping).await) {
            let attempts = shopping.unwrap();
            unanswered += attempts.unanswered;
            if let Some(strange) = attempts.refusals.iter().find(|refusal| !is_expected(refusal, round.victim)) {
                panic!("{round:?}: {} was told {strange}", purchase.key);
            }
            let answer = attempts.last.unwrap();
            let retry = purchase.attempt(&client(), &self.address.borrow().clone(), false).await.unwrap();
            assert!(retry.is_replay(), "{round:?}: {} ran again: {retry:?}", purchase.key);
            assert_eq!((retry.status, &retry.body), (answer.status, &answer.body), "{round:?}: {}", purchase.key);
            self.shop.delivered(purchase, &answer).await.unwrap_or_else(|wrong| panic!("{round:?}: {wrong}"));
        }
        if let Round { victim: Victim::Server, at: Some((_, point)) } = round {
            assert!(unanswered > 0, "{point}: the kill has interrupted nobody");
        }
        self.slowest = self.slowest.max(struck.elapsed());
        assert!(struck.elapsed() < LEASE + SLACK, "{round:?}: keys were outstanding for {:?}", struck.elapsed());
        self.shop.adds_up().await.unwrap_or_else(|wrong| panic!("{round:?}: {wrong}"));
        let left = "SELECT count(*) AS value FROM idempotency_keys WHERE state <> 'completed'";
        assert_eq!(self.shop.db.number(left).await, 0, "{round:?}: keys without an answer");
    }

    async fn strike(&mut self, round: Round) {
        match round.victim {
            Victim::Server => {
                self.server.take().unwrap().kill();
                self.start_server();
            }
            Victim::Postgres => {
                self.cluster.down();
                // Whoever has stopped meets no database, or one that knows nothing of its connection.
                let sees_it_down = self.dice.roll(2) == 0;
                if sees_it_down {
                    self.server().go_on();
                    sleep(Duration::from_millis(self.dice.roll(100))).await;
                }
                self.cluster.up();
                self.server().go_on();
            }
        }
    }
}

/// What a client may be told until it has its order.
fn is_expected(refusal: &str, victim: Victim) -> bool {
    let code = |code: &str| refusal.contains(&format!("\"code\":\"{code}\""));
    let retry = code("outstanding") || code("lease-lost") || code("store-unavailable") || code("outcome-unknown");
    let own_mind = refusal == "409 changed my mind";
    // The error of a statement of the handler's own; and that a server is going down has a code that diesel
    // does not tell.
    let down = victim == Victim::Postgres
        && (refusal.starts_with("500") && !refusal.contains("\"code\"") || code("transaction-aborted"));
    retry || own_mind || down
}

#[actix_web::test]
async fn whatever_is_killed_and_wherever_every_key_has_one_order_and_one_answer() {
    let mut campaign = Campaign::begin().await;
    let rounds = rounds(&mut campaign.dice);
    assert!(rounds.len() >= repeat(2000, 200));
    let began = Instant::now();
    for (number, round) in rounds.iter().enumerate() {
        campaign.round(number, *round).await;
    }
    println!(
        "{} kills in {:?}; a round's orders took at most {:?} from the kill on",
        rounds.len(),
        began.elapsed(),
        campaign.slowest
    );
    for (way, points) in [(Way::Leased, &LEASED[..]), (Way::Atomic, &ATOMIC)] {
        for point in points {
            let hits = campaign.hits.get(&(format!("{way:?}"), *point)).copied().unwrap_or_default();
            assert!(hits >= HITS, "{point} under {way:?}: hit {hits} times");
        }
    }
}

/// An attempt that was stalled beyond its lease comes back to a key that somebody uses for something else by
/// now. What the clients got is right, or the words say what is wrong.
async fn comes_back_late(fenced: bool) -> Result<(), String> {
    let shop = Shop::open(Db::read_committed().await).await;
    let proxy = Proxy::before(&shop.db.url);
    if !fenced {
        proxy.rewrite(
            " AND owner = $8 AND state = 'outstanding'",
            " AND $8::bytea IS NOT NULL AND state = 'outstanding'",
        );
    }
    let lease = Duration::from_millis(300);
    let mut slow = Setup { lease, ..Setup::new(&proxy.url(&shop.db.url)) }.start();
    let mut fast = Setup { lease, ..Setup::new(&shop.db.url) }.start();
    let attempt = |purchase: &Purchase, server: &ServerProcess, fail| {
        let (purchase, url) = (purchase.clone(), server.url(""));
        rt::spawn(async move { purchase.attempt(&client(), &url, fail).await.unwrap() })
    };
    let one = Purchase::new("k", Way::Leased, 0).qty(1);
    let two = one.clone().qty(2);

    slow.stop_at("in-handler", 1).await;
    let late = attempt(&one, &slow, false);
    slow.stopped_at("in-handler").await;
    slow.signal("STOP");
    eventually("its lease has lapsed", async || {
        shop.db.is("EXISTS (SELECT FROM idempotency_keys WHERE leased_until < clock_timestamp())").await
    })
    .await;
    // The same request takes over, and nothing is done: the key may be used for another one.
    let given_up = attempt(&one, &fast, true).await.unwrap();
    assert_eq!(given_up.text(), "changed my mind");
    fast.stop_at("in-handler", 1).await;
    let other = attempt(&two, &fast, false);
    fast.stopped_at("in-handler").await;

    slow.signal("CONT");
    slow.go_on();
    let late = late.await.unwrap();
    fast.go_on();
    let other = other.await.unwrap();
    assert_eq!(proxy.has_rewritten(), !fenced, "the statement that completes has changed");

    shop.adds_up().await?;
    shop.delivered(&two, &other).await?;
    match late.status.as_u16() {
        422 => Ok(()),
        status => Err(format!("the late one was told {status} {}", late.text())),
    }
}

/// X03
#[actix_web::test]
async fn an_attempt_that_comes_back_late_completes_nothing() {
    assert_eq!(comes_back_late(true).await, Ok(()));
}

/// So that the campaign's invariant can fail.
#[actix_web::test]
async fn a_completion_that_does_not_name_its_owner_is_caught() {
    let wrong = comes_back_late(false).await.unwrap_err();
    assert!(wrong.contains("asked for 2, got"), "{wrong}");
}
