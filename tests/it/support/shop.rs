//! Orders that take from a stock, in one transaction with their key: what a crash must not tear apart.

use std::{sync::Arc, time::Duration};

use actix_idempotency::{IdemKey, IdemTx, Idempotency, Isolation, Policy};
use actix_web::{
    FromRequest, HttpRequest, HttpResponse, Result,
    error::{ErrorConflict, ErrorInternalServerError},
    rt::time::sleep,
    web::{self, Json},
};
use diesel::sql_types::{BigInt, Text};
use diesel_async::RunQueryDsl;
use reqwest::Client;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{
    PATIENCE,
    client::{Answer, RequestExt, client},
    db::Db,
    points,
};

const TABLES: &str = "
    CREATE TABLE orders (key text NOT NULL, product bigint NOT NULL, qty bigint NOT NULL, ticket text NOT NULL);
    CREATE TABLE stock (product bigint PRIMARY KEY, pieces bigint NOT NULL);
    INSERT INTO stock SELECT product, 1000000 FROM generate_series(0, 9) AS product;
";

/// How the keys of a route are protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// By a lease, under the default policy.
    Leased,
    Atomic,
    /// By a lease, under REPEATABLE READ.
    Repeatable,
}

impl Way {
    fn path(self) -> &'static str {
        match self {
            Self::Leased => "/shop/leased",
            Self::Atomic => "/shop/atomic",
            Self::Repeatable => "/shop/repeatable",
        }
    }
}

pub fn routes(config: &mut web::ServiceConfig, idempotency: &Idempotency, policy: &Policy) {
    let repeatable = policy.clone().isolation(Isolation::RepeatableRead);
    for (way, policy) in
        [(Way::Leased, policy.clone()), (Way::Atomic, policy.clone().atomic()), (Way::Repeatable, repeatable)]
    {
        config.service(web::resource(way.path()).wrap(idempotency.with(policy)).route(web::post().to(buy)));
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Wish {
    product: i64,
    qty: i64,
}

#[derive(Serialize)]
struct Receipt {
    qty: i64,
    /// Every run draws another one.
    ticket: String,
}

/// With `x-fail` it changes its mind at the end.
async fn buy(mut tx: IdemTx, wish: Json<Wish>, request: HttpRequest) -> Result<HttpResponse> {
    let key = request.headers().get("idempotency-key").unwrap().to_str().unwrap();
    let ticket = rand::random::<u64>().to_string();
    diesel::sql_query("INSERT INTO orders (key, product, qty, ticket) VALUES ($1, $2, $3, $4)")
        .bind::<Text, _>(key)
        .bind::<BigInt, _>(wish.product)
        .bind::<BigInt, _>(wish.qty)
        .bind::<Text, _>(&ticket)
        .execute(&mut *tx)
        .await
        .map_err(ErrorInternalServerError)?;
    points::reach("in-handler");
    diesel::sql_query("UPDATE stock SET pieces = pieces - $2 WHERE product = $1")
        .bind::<BigInt, _>(wish.product)
        .bind::<BigInt, _>(wish.qty)
        .execute(&mut *tx)
        .await
        .map_err(ErrorInternalServerError)?;
    if request.headers().contains_key("x-fail") {
        // And says that nothing was done, by no attempt.
        IdemKey::extract(&request).await?.release();
        return Err(ErrorConflict("changed my mind"));
    }
    Ok(HttpResponse::Created().json(Receipt { qty: wish.qty, ticket }))
}

/// Its tables in a database.
pub struct Shop {
    pub db: Db,
}

impl Shop {
    pub async fn open(db: Db) -> Self {
        db.run(TABLES).await;
        Self { db }
    }

    /// Orders and stock add up, and no key has two orders: at any moment, whatever is running.
    pub async fn adds_up(&self) -> Result<(), String> {
        let torn = "SELECT count(*) AS value FROM stock LEFT JOIN (SELECT product, sum(qty) AS sold FROM orders GROUP BY \
                    product) AS o USING (product) WHERE pieces + coalesce(sold, 0) <> 1000000";
        let twice = "SELECT count(*) AS value FROM (SELECT FROM orders GROUP BY key HAVING count(*) > 1) AS o";
        for (sql, what) in [(torn, "stocks do not add up with their orders"), (twice, "keys have more than one order")]
        {
            match self.db.number(sql).await {
                0 => {}
                n => return Err(format!("{n} {what}")),
            }
        }
        Ok(())
    }

    /// The answer speaks of the one order that there is, and that is what was asked for.
    pub async fn delivered(&self, purchase: &Purchase, answer: &Answer) -> Result<(), String> {
        let key = &purchase.key;
        let orders = self
            .db
            .text(&format!(
                "SELECT string_agg(format('{{\"qty\":%s,\"ticket\":\"%s\"}}', qty, ticket), ' ') AS value FROM orders \
                 WHERE key = '{key}'"
            ))
            .await;
        if answer.status != 201 || orders.as_deref() != Some(&answer.text()) {
            return Err(format!("{key}: answered {} {}, ordered {orders:?}", answer.status, answer.text()));
        }
        if answer.json()["qty"] != purchase.wish.qty {
            return Err(format!("{key}: asked for {}, got {}", purchase.wish.qty, answer.text()));
        }
        Ok(())
    }
}

/// A client that keeps its key until it has its order.
#[derive(Debug, Clone)]
pub struct Purchase {
    pub key: String,
    pub way: Way,
    wish: Wish,
    /// How many attempts change their mind.
    fails: u32,
}

impl Purchase {
    pub fn new(key: impl Into<String>, way: Way, product: i64) -> Self {
        Self { key: key.into(), way, wish: Wish { product, qty: 1 + product % 3 }, fails: 0 }
    }

    pub fn qty(mut self, qty: i64) -> Self {
        self.wish.qty = qty;
        self
    }

    pub fn failing_first(mut self, attempts: u32) -> Self {
        self.fails = attempts;
        self
    }

    /// One attempt, at whatever server there is.
    pub async fn attempt(&self, client: &Client, server: &str, fail: bool) -> reqwest::Result<Answer> {
        let mut request = client.post(format!("{server}{}", self.way.path())).key(&self.key).json(&self.wish);
        if fail {
            request = request.header("x-fail", "1");
        }
        request.try_answer().await
    }

    /// Until there is a 201: at servers that go and come, with whatever they say in between.
    pub async fn insist(self: Arc<Self>, server: watch::Receiver<String>) -> Attempts {
        let client = client();
        let mut attempts = Attempts::default();
        let began = std::time::Instant::now();
        loop {
            let here = server.borrow().clone();
            match self.attempt(&client, &here, attempts.answered < self.fails).await {
                Ok(answer) if answer.status == 201 => {
                    attempts.last = Some(answer);
                    return attempts;
                }
                Ok(answer) => {
                    attempts.answered += 1;
                    attempts.refusals.push(format!("{} {}", answer.status.as_u16(), answer.text()));
                }
                Err(_) => attempts.unanswered += 1,
            }
            assert!(began.elapsed() < PATIENCE, "{} is not served: {attempts:?}", self.key);
            sleep(Duration::from_millis(25)).await;
        }
    }
}

/// How a purchase went.
#[derive(Debug, Default)]
pub struct Attempts {
    pub answered: u32,
    pub unanswered: u32,
    pub refusals: Vec<String>,
    pub last: Option<Answer>,
}
