//! The shop of the README, as a process of its own: the code that newcomers copy does what it says.

use std::fs;

use actix_web::rt::{spawn, time::sleep};
use futures_util::future::join_all;
use reqwest::{Client, RequestBuilder};
use serde_json::{Value, json};

use crate::support::{
    PATIENCE,
    client::{Answer, RequestExt, client},
    db::Db,
    eventually,
    example::{Example, Session},
};

struct Shop {
    server: Example,
    db: Db,
    client: Client,
}

impl Shop {
    async fn open() -> Self {
        Self::open_with(&[]).await
    }

    /// With these in its environment.
    async fn open_with(environment: &[(&str, &str)]) -> Self {
        let db = Db::empty().await;
        let server = Example::start("shop", &db.url, environment);
        Self { server, db, client: client() }
    }

    /// Whether a request is in its handler: the shop's keys are claimed by a lock, or under a lease by a row.
    async fn is_busy(&self) -> bool {
        self.db
            .is("EXISTS (SELECT FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database \
                 WHERE locktype = 'advisory' AND granted AND datname = current_database()) \
                 OR EXISTS (SELECT FROM idempotency_keys WHERE state = 'outstanding')")
            .await
    }

    fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(self.server.url(path)).user("alice")
    }

    fn post(&self, path: &str, body: Value) -> RequestBuilder {
        self.client.post(self.server.url(path)).json(&body)
    }

    fn order(&self, key: &str, product: i64, quantity: i64) -> RequestBuilder {
        self.post("/orders", json!({"product_id": product, "quantity": quantity})).user("alice").key(key)
    }

    fn change(&self, id: i64, quantity: i64) -> RequestBuilder {
        self.client.put(self.server.url(&format!("/orders/{id}"))).user("alice").json(&json!({"quantity": quantity}))
    }

    fn paid(&self, order: i64, number: &str) -> RequestBuilder {
        self.post("/payments/callback", json!({"order_id": order, "out_trade_no": number}))
    }

    async fn stock(&self, product: i64) -> i64 {
        self.get(&format!("/products/{product}")).answer().await.json()["stock"].as_i64().unwrap()
    }

    async fn history(&self, order: i64) -> i64 {
        self.db.number(&format!("SELECT count(*) AS value FROM order_history WHERE order_id = {order}")).await
    }

    /// A product of the test's own, with so many pieces.
    async fn product(&self, id: i64, pieces: i64) {
        self.db.run(&format!("INSERT INTO products (id, name, stock) VALUES ({id}, 'kettle', {pieces})")).await;
    }

    /// What was sold and what is left are all the pieces that there were.
    async fn assert_adds_up(&self, product: i64, pieces: i64) {
        let sold = "SELECT coalesce(sum(quantity), 0)::bigint AS value FROM orders WHERE product_id =";
        let sold = self.db.number(&format!("{sold} {product}")).await;
        let left = self.stock(product).await;
        assert!(left >= 0 && sold + left == pieces, "{sold} sold, {left} left, of {pieces}");
    }
}

/// As the README tells clients: wait and send the same again where there is a `Retry-After`.
async fn insist(request: RequestBuilder) -> Answer {
    let began = std::time::Instant::now();
    loop {
        let answer = request.try_clone().unwrap().answer().await;
        if answer.retry_after().is_none() {
            return answer;
        }
        assert!(began.elapsed() < PATIENCE, "{answer:?}");
        sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// All of them at once.
async fn at_once(requests: impl IntoIterator<Item = RequestBuilder>) -> Vec<Answer> {
    let racers: Vec<_> = requests.into_iter().map(|request| spawn(insist(request))).collect();
    join_all(racers).await.into_iter().map(Result::unwrap).collect()
}

#[track_caller]
fn assert_refused(answer: &Answer, status: u16, code: &str) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (status, code), "{answer:?}");
}

#[actix_web::test]
async fn an_order_is_made_once_shown_and_listed() {
    let shop = Shop::open().await;
    let first = shop.order("a", 1, 2).answer().await;
    let order = json!({"id": 1, "product_id": 1, "quantity": 2, "status": "PENDING", "version": 1});
    assert_eq!((first.status.as_u16(), first.json()), (201, order.clone()));
    assert_eq!((first.header("location"), first.header("etag")), (Some("/orders/1"), Some("\"1\"")));
    first.assert_replayed_by(&shop.order("a", 1, 2).answer().await);
    assert_refused(&shop.order("a", 1, 3).answer().await, 422, "key-reused");

    let shown = shop.get("/orders/1").answer().await;
    assert_eq!((shown.status.as_u16(), shown.header("etag"), shown.json()), (200, Some("\"1\""), order.clone()));
    assert_eq!(shop.get("/orders").answer().await.json(), json!([order]));
    let product = shop.get("/products/1").answer().await.json();
    assert_eq!(product, json!({"id": 1, "name": "espresso machine", "stock": 998, "version": 2}));

    let failed = shop.order("b", 1, 2).header("X-Demo-Fail", "500").answer().await;
    assert_eq!(failed.status, 500);
    assert_refused(&shop.order("c", 2, 2).answer().await, 409, "not-enough");
    assert_refused(&shop.order("d", 9, 1).answer().await, 404, "not-found");
    assert_eq!(shop.order("e", 1, 0).answer().await.status, 422);
    shop.assert_adds_up(1, 1000).await;
    shop.assert_adds_up(2, 1).await;
}

#[actix_web::test]
async fn an_order_is_changed_by_whoever_has_seen_it_as_it_is() {
    let shop = Shop::open().await;
    shop.order("a", 1, 2).answer().await;
    let change = async |quantity: i64, tag: &str| shop.change(1, quantity).header("If-Match", tag).answer().await;

    // As it came with the GET.
    let seen = shop.get("/orders/1").answer().await;
    let changed = change(5, seen.header("etag").unwrap()).await;
    assert_eq!((changed.status.as_u16(), changed.header("etag")), (200, Some("\"2\"")));
    assert_eq!(changed.json(), json!({"id": 1, "product_id": 1, "quantity": 5, "status": "PENDING", "version": 2}));
    assert_eq!(shop.stock(1).await, 995);

    // Stale: told what is there now.
    let stale = change(9, seen.header("etag").unwrap()).await;
    assert_refused(&stale, 412, "if-match-failed");
    assert_eq!(stale.header("etag"), Some("\"2\""));

    // As a proxy weakens it, as sloppy clients write it, whatever there is, one of several; fewer, more, as many.
    let accepted = [("W/\"2\"", 1), ("3", 7), ("*", 7), ("\"77\", \"5\"", 3)];
    for (version, (tag, quantity)) in (3..).zip(accepted) {
        let changed = change(quantity, tag).await;
        assert_eq!((changed.status.as_u16(), changed.json()["version"].as_i64()), (200, Some(version)), "{tag}");
        assert_eq!(shop.stock(1).await, 1000 - quantity, "{tag}");
    }

    let now = shop.get("/orders/1").answer().await;
    assert_refused(&shop.change(1, 4).answer().await, 428, "if-match-missing");
    for unreadable in ["", "\"6", "six", "*, \"6\""] {
        assert_refused(&change(4, unreadable).await, 400, "if-match-invalid");
    }
    let not_ascii = reqwest::header::HeaderValue::from_bytes(b"\"\xc3\xa9\"").unwrap();
    assert_refused(&shop.change(1, 4).header("If-Match", not_ascii).answer().await, 400, "if-match-invalid");
    assert_refused(&change(4, "\"six\"").await, 412, "if-match-failed");
    assert_refused(&change(2000, "*").await, 409, "not-enough");
    assert_eq!(change(0, "*").await.status, 422);
    assert_eq!(shop.change(9, 4).header("If-Match", "*").answer().await.status, 404);
    assert_eq!(shop.get("/orders/1").answer().await.json(), now.json(), "none of these has changed anything");
    shop.assert_adds_up(1, 1000).await;
}

#[actix_web::test]
async fn somebody_elses_order_is_none() {
    let shop = Shop::open().await;
    shop.order("a", 1, 2).answer().await;
    let bob = |request: RequestBuilder| request.user("bob").header("If-Match", "*").answer();
    let url = shop.server.url("/orders/1");
    assert_eq!(bob(shop.client.put(&url).json(&json!({"quantity": 9}))).await.status, 404);
    assert_eq!(bob(shop.client.get(&url)).await.status, 404);
    assert_eq!(shop.client.put(&url).header("If-Match", "*").json(&json!({"quantity": 9})).answer().await.status, 401);
    assert_eq!(shop.stock(1).await, 998);
}

#[actix_web::test]
async fn a_change_that_is_sent_again_moves_the_stock_once() {
    let shop = Shop::open().await;
    shop.order("a", 1, 2).answer().await;
    let change = || shop.change(1, 5).header("If-Match", "\"1\"");
    let first = change().key("b").answer().await;
    assert_eq!(first.status, 200);
    first.assert_replayed_by(&change().key("b").answer().await);
    // The same of another version is another change.
    assert_refused(&shop.change(1, 5).header("If-Match", "\"2\"").key("b").answer().await, 422, "key-reused");
    // Without a key it is the version that stops it.
    assert_refused(&change().answer().await, 412, "if-match-failed");
    // It came to nothing, and gave its key back.
    let failed = shop.change(1, 9).header("If-Match", "*").key("c").header("X-Demo-Fail", "503").answer().await;
    assert_eq!((failed.status.as_u16(), shop.stock(1).await), (503, 995));
    let again = shop.change(1, 9).header("If-Match", "*").key("c").answer().await;
    assert_eq!((again.status.as_u16(), again.is_replay(), shop.stock(1).await), (200, false, 991));
}

#[actix_web::test]
async fn a_hundred_buyers_get_the_thirty_pieces_there_are() {
    let shop = Shop::open().await;
    shop.product(3, 30).await;
    let answers = at_once((0..100).map(|n| shop.order(&n.to_string(), 3, 1))).await;
    for refused in answers.iter().filter(|answer| answer.status != 201) {
        assert_refused(refused, 409, "not-enough");
    }
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 30);
    assert_eq!(shop.stock(3).await, 0);
    shop.assert_adds_up(3, 30).await;
}

#[actix_web::test]
async fn orders_and_changes_at_once_add_up() {
    let shop = Shop::open().await;
    shop.product(3, 60).await;
    for n in 1..=3 {
        assert_eq!(shop.order(&format!("first-{n}"), 3, 5).answer().await.status, 201);
    }
    let orders = (0..20).map(|n| shop.order(&format!("more-{n}"), 3, 2));
    // Each order by many, to more and to fewer.
    let changes =
        (0..30).map(|n| shop.change(1 + n % 3, 1 + n * 7 % 19).header("If-Match", "*").key(&format!("change-{n}")));
    let answers = at_once(orders.chain(changes)).await;
    for answer in &answers {
        assert!([200, 201].contains(&answer.status.as_u16()) || answer.code() == "not-enough", "{answer:?}");
    }
    assert!(answers.iter().any(|answer| answer.status == 200) && answers.iter().any(|answer| answer.status == 201));
    shop.assert_adds_up(3, 60).await;
}

#[actix_web::test]
async fn of_many_who_have_seen_the_same_one_changes_it() {
    let shop = Shop::open().await;
    shop.order("a", 1, 2).answer().await;
    let answers = at_once((0..20).map(|n| shop.change(1, 3 + n).header("If-Match", "\"1\""))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 200).count(), 1);
    for stale in answers.iter().filter(|answer| answer.status != 200) {
        assert_refused(stale, 412, "if-match-failed");
        assert_eq!(stale.header("etag"), Some("\"2\""));
    }
    shop.assert_adds_up(1, 1000).await;
}

#[actix_web::test]
async fn a_payment_that_is_told_again_is_a_success_without_history() {
    let shop = Shop::open().await;
    shop.order("a", 1, 2).answer().await;
    let first = shop.paid(1, "T1").answer().await;
    let paid = json!({"id": 1, "product_id": 1, "quantity": 2, "status": "PAID", "version": 2});
    assert_eq!((first.status.as_u16(), first.json()), (200, paid.clone()));
    first.assert_replayed_by(&shop.paid(1, "T1").answer().await);
    // The same payment in other words, another payment, and a key that was forgotten.
    let resent = json!({"sent_at": "later", "out_trade_no": "T1", "order_id": 1});
    first.assert_replayed_by(&shop.post("/payments/callback", resent).answer().await);
    let other = shop.paid(1, "T2").answer().await;
    assert_eq!((other.status.as_u16(), other.is_replay(), other.json()), (200, false, paid.clone()));
    shop.db.run("DELETE FROM idempotency_keys").await;
    let forgotten = shop.paid(1, "T1").answer().await;
    assert_eq!((forgotten.status.as_u16(), forgotten.is_replay(), forgotten.json()), (200, false, paid));
    assert_eq!(shop.history(1).await, 1);
    assert_eq!(shop.db.number("SELECT count(*) AS value FROM payments").await, 2);

    assert_refused(&shop.paid(2, "T1").answer().await, 422, "key-reused");
    assert_refused(&shop.paid(9, "T9").answer().await, 404, "not-found");
    // Whoever has seen it before it was paid is stale, and nobody changes it any more.
    assert_eq!(shop.get("/orders/1").answer().await.header("etag"), Some("\"2\""));
    for (tag, status) in [("\"2\"", 409), ("*", 409), ("\"2", 400)] {
        assert_eq!(shop.change(1, 9).header("If-Match", tag).answer().await.status, status, "{tag}");
    }
    shop.assert_adds_up(1, 1000).await;
}

#[actix_web::test]
async fn of_many_callbacks_at_once_one_writes_history() {
    let shop = Shop::open().await;
    for key in ["a", "b"] {
        shop.order(key, 1, 2).answer().await;
    }
    // One message twenty times, and twenty messages about one order.
    let same = (0..20).map(|_| shop.paid(1, "T1"));
    let different = (0..20).map(|n| shop.paid(2, &format!("U{n}")));
    for answer in at_once(same.chain(different)).await {
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!((&answer.json()["status"], &answer.json()["version"]), (&json!("PAID"), &json!(2)));
    }
    assert_eq!((shop.history(1).await, shop.history(2).await), (1, 1));
}

#[actix_web::test]
async fn a_payment_and_a_change_at_once_leave_an_order_that_was_one_of_both() {
    let shop = Shop::open().await;
    for n in 1..=10 {
        shop.order(&n.to_string(), 1, 2).answer().await;
        let answers = at_once([shop.paid(n, &format!("T{n}")), shop.change(n, 7).header("If-Match", "\"1\"")]).await;
        assert_eq!(answers[0].status, 200);
        let order = shop.get(&format!("/orders/{n}")).answer().await.json();
        let changed = answers[1].status == 200;
        assert!(changed || [409, 412].contains(&answers[1].status.as_u16()), "{answers:?}");
        assert_eq!(order["status"], "PAID");
        let (quantity, version) = if changed { (7, 3) } else { (2, 2) };
        assert_eq!((order["quantity"].as_i64(), order["version"].as_i64()), (Some(quantity), Some(version)));
    }
    shop.assert_adds_up(1, 1000).await;
}

#[actix_web::test]
async fn two_orders_of_one_campaign_are_told_so_and_take_no_stock() {
    let shop = Shop::open().await;
    let order = |key: &str| {
        let body = json!({"product_id": 1, "quantity": 1, "campaign_id": 7});
        shop.post("/orders", body).user("alice").key(key)
    };
    let answers = at_once(["a", "b", "c", "d", "e", "f"].map(order)).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 1);
    for refused in answers.iter().filter(|answer| answer.status != 201) {
        assert_refused(refused, 409, "campaign-used");
        assert_eq!(refused.json()["detail"], "One to a customer in this campaign.");
    }
    assert_eq!(shop.stock(1).await, 999);
    // A coupon, by its own constraint: the window of the double click is over.
    let coupon = || shop.post("/coupons", json!({"coupon": "SPRING"})).user("alice");
    assert_eq!(coupon().answer().await.status, 201);
    shop.db.run("DELETE FROM idempotency_keys").await;
    assert_refused(&coupon().answer().await, 409, "coupon-claimed");
}

#[actix_web::test]
async fn a_shop_that_is_killed_in_a_change_leaves_nothing_of_it() {
    let mut shop = Shop::open().await;
    shop.order("a", 1, 2).answer().await;
    let change = |shop: &Shop| shop.change(1, 5).header("If-Match", "\"1\"").key("b");
    let cut = spawn(change(&shop).header("X-Demo-Slow-Ms", "60000").try_answer());
    eventually("it has written the order and the stock", async || {
        shop.db
            .is("EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
                 AND state = 'idle in transaction' AND query LIKE 'UPDATE \"products\"%')")
            .await
    })
    .await;
    shop.server.kill();
    assert!(cut.await.unwrap().is_err());

    shop.server = Example::start("shop", &shop.db.url, &[]);
    assert_eq!((shop.get("/orders/1").answer().await.header("etag"), shop.stock(1).await), (Some("\"1\""), 998));
    let again = insist(change(&shop)).await;
    assert_eq!((again.status.as_u16(), again.is_replay(), shop.stock(1).await), (200, false, 995));
    again.assert_replayed_by(&change(&shop).answer().await);
}

#[actix_web::test]
async fn the_session_that_the_shop_prints_is_answered_as_it_says() {
    // Under a lease too, as the advice about takeovers has it.
    for environment in [&[][..], &[("LEASE_SECONDS", "30")]] {
        if !Session::can_run() {
            return;
        }
        let shop = Shop::open_with(environment).await;
        let advice = shop.server.advice("A crash:");
        let session = Session::of(advice.split_once("terminal:").unwrap().1);
        #[rustfmt::skip]
        let told = [
            201, 201, 409, 201, 422, 201, 500, 201, // orders
            409, 201, 409, 201,                     // coupons
            200, 200, 412, 428, 400, 404,           // changes
            200, 200, 200, 409,                     // payments
            201, 409,                               // a campaign
        ];
        assert_eq!(session.answers(async || shop.is_busy().await).await, told, "{environment:?}");
        shop.assert_adds_up(1, 1000).await;
    }
}

#[actix_web::test]
async fn the_session_of_the_readme_is_answered_as_its_comments_say() {
    if !Session::can_run() {
        return;
    }
    let shop = Shop::open().await;
    let readme = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let session = readme.split("```sh\n").find(|block| block.starts_with("order() {")).unwrap();
    let session = Session::at(&shop.server, session.split("```").next().unwrap());
    let told = [201, 201, 422, 201, 409, 201, 500, 201, 200, 412, 428, 200, 200];
    assert_eq!(session.answers(async || shop.is_busy().await).await, told);
    shop.assert_adds_up(1, 1000).await;
}
