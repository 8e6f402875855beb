//! The checkout page of `examples/shop` in a real browser, without a script: what people do to forms.

use diesel_async::SimpleAsyncConnection;
use fantoccini::Locator;
use futures_util::future::join;

use crate::support::{
    browser::Browser,
    client::{RequestExt, client},
    db::Db,
    eventually,
    example::Example,
    forms::{FormExt, db_with_a_clock, set_clock},
};

const BUTTON: &str = "button";
const TOKEN: &str = "input[name=form_token]";
const QUANTITY: &str = "input[name=quantity]";

/// A browser at the checkout page of a shop.
struct Checkout {
    browser: Browser,
    shop: Example,
    db: Db,
}

impl Checkout {
    /// `None` where there is no browser, which is said.
    async fn open() -> Option<Self> {
        let browser = Browser::start().await?;
        let db = db_with_a_clock().await;
        let shop = Example::start("shop", &db.url, &[("RUST_LOG", "warn,actix_idempotency=debug")]);
        let checkout = Self { browser, shop, db };
        checkout.load().await;
        Some(checkout)
    }

    /// A new form.
    async fn load(&self) {
        self.browser.goto(&self.shop.url("/checkout").replace("://", "://alice:secret@")).await.unwrap();
        self.browser.sees("Place the order").await;
    }

    async fn orders(&self) -> i64 {
        self.db.number("SELECT count(*) AS value FROM orders").await
    }

    /// The number of the order that the page confirms.
    async fn confirmed(&self) -> String {
        self.browser.sees("Your order has the number").await;
        self.browser.element("b").await.text().await.unwrap()
    }

    /// Stock and orders add up.
    async fn assert_orders(&self, orders: i64) {
        assert_eq!(self.orders().await, orders);
        let sold = "SELECT 1000 - stock AS value FROM products WHERE id = 1";
        let ordered = "SELECT coalesce(sum(quantity), 0) AS value FROM orders";
        assert_eq!(self.db.number(&format!("SELECT value::bigint FROM ({sold}) AS s")).await, {
            self.db.number(&format!("SELECT value::bigint FROM ({ordered}) AS o")).await
        });
    }
}

/// O04: the first click is still being worked on when the second comes, and the browser waits for that one only.
#[actix_web::test]
async fn a_double_click_places_one_order_and_shows_its_confirmation() {
    let Some(checkout) = Checkout::open().await else { return };
    let Checkout { browser, shop, db } = &checkout;
    assert!(!browser.source().await.unwrap().contains("<script"));
    let token = browser.value(TOKEN).await;

    // Somebody has the product in hand, so that the first click takes as long as the test wants.
    let mut hand = db.connect().await;
    hand.batch_execute("BEGIN; SELECT FROM products WHERE id = 1 FOR UPDATE").await.unwrap();
    let let_go = async {
        eventually("the first click is being worked on", || db.blocked("products")).await;
        eventually("the second click waits for it", || async { shop.has_said("\"waited\"") > 0 }).await;
        hand.batch_execute("COMMIT").await.unwrap();
    };
    join(browser.double_click(BUTTON), let_go).await;
    let number = checkout.confirmed().await;
    assert_eq!(shop.has_said("\"fresh\""), 1);
    checkout.assert_orders(1).await;

    // What a third one gets.
    let form = [("form_token", &*token), ("product_id", "1"), ("quantity", "1")];
    let third =
        client().post(shop.url("/checkout/order")).basic_auth("alice", Some("secret")).form(&form).answer().await;
    assert!(
        third.status == 201 && third.is_replay() && third.text().contains(&format!("<b>{number}</b>")),
        "{third:?}"
    );
    checkout.assert_orders(1).await;
}

#[actix_web::test]
async fn back_and_once_more_is_the_same_order() {
    let Some(checkout) = Checkout::open().await else { return };
    let Checkout { browser, .. } = &checkout;
    let token = browser.value(TOKEN).await;
    browser.click(BUTTON).await;
    let number = checkout.confirmed().await;
    for _ in 0..2 {
        browser.back().await.unwrap();
        browser.sees("Place the order").await;
        assert_eq!(browser.value(TOKEN).await, token, "the back button should show the form as it was");
        browser.click(BUTTON).await;
        assert_eq!(checkout.confirmed().await, number);
    }
    checkout.assert_orders(1).await;

    // With another wish in it, it is told apart.
    browser.back().await.unwrap();
    browser.sees("Place the order").await;
    browser.fill_in(QUANTITY, "3").await;
    browser.click(BUTTON).await;
    browser.sees("This form was sent already").await;
    checkout.assert_orders(1).await;
}

/// O06
#[actix_web::test]
async fn two_tabs_are_two_orders() {
    let Some(checkout) = Checkout::open().await else { return };
    let Checkout { browser, .. } = &checkout;
    let first = browser.window().await.unwrap();
    let second = browser.new_window(true).await.unwrap().handle;
    browser.switch_to_window(second.clone()).await.unwrap();
    checkout.load().await;
    browser.switch_to_window(first.clone()).await.unwrap();
    browser.click(BUTTON).await;
    let one = checkout.confirmed().await;
    browser.switch_to_window(second).await.unwrap();
    browser.click(BUTTON).await;
    let other = checkout.confirmed().await;
    assert_ne!(one, other);
    checkout.assert_orders(2).await;
    browser.switch_to_window(first).await.unwrap();
    browser.back().await.unwrap();
    browser.sees("Place the order").await;
    browser.click(BUTTON).await;
    assert_eq!(checkout.confirmed().await, one);
    checkout.assert_orders(2).await;
}

#[actix_web::test]
async fn the_answer_reloaded_is_the_same_order() {
    let Some(checkout) = Checkout::open().await else { return };
    let Checkout { browser, db, .. } = &checkout;
    browser.click(BUTTON).await;
    let number = checkout.confirmed().await;
    for reloads in 1..=2 {
        // So that it can be seen to have been asked for again.
        browser.execute("document.body.textContent = ''", Vec::new()).await.unwrap();
        assert!(!browser.text().await.contains("number"));
        browser.refresh().await.unwrap();
        assert_eq!(checkout.confirmed().await, number, "after {reloads} reloads");
    }
    checkout.assert_orders(1).await;
    assert_eq!(db.keys().await, 1);
}

#[actix_web::test]
async fn a_form_that_was_open_for_too_long_orders_nothing_and_leads_to_a_new_one() {
    let Some(checkout) = Checkout::open().await else { return };
    let Checkout { browser, db, .. } = &checkout;
    set_clock(db, "11 min").await;
    browser.click(BUTTON).await;
    browser.sees("This form was open for too long").await;
    checkout.assert_orders(0).await;
    set_clock(db, "0").await;
    browser.find(Locator::LinkText("Start again")).await.unwrap().click().await.unwrap();
    browser.sees("Place the order").await;
    browser.click(BUTTON).await;
    checkout.confirmed().await;
    checkout.assert_orders(1).await;
}

/// O02
#[actix_web::test]
async fn a_rejected_form_is_corrected_and_goes_through_with_its_token() {
    let Some(checkout) = Checkout::open().await else { return };
    let Checkout { browser, .. } = &checkout;
    let token = browser.value(TOKEN).await;
    for (quantity, told) in [("many", "How many?"), ("5000", "There are 1000 left.")] {
        browser.fill_in(QUANTITY, quantity).await;
        browser.click(BUTTON).await;
        browser.sees(told).await;
        assert_eq!((browser.value(TOKEN).await, browser.value(QUANTITY).await), (token.clone(), quantity.into()));
    }
    checkout.assert_orders(0).await;
    browser.fill_in(QUANTITY, "2").await;
    browser.click(BUTTON).await;
    let number = checkout.confirmed().await;
    checkout.assert_orders(1).await;

    // Back to the rejected form, and once more.
    browser.back().await.unwrap();
    browser.sees("Place the order").await;
    browser.fill_in(QUANTITY, "2").await;
    browser.click(BUTTON).await;
    assert_eq!(checkout.confirmed().await, number);
    checkout.assert_orders(1).await;
}
