//! The tables, and what two of their columns mean.

use actix_idempotency::{states, versioned};
use serde::Serialize;

diesel::table! {
    products (id) {
        id -> BigInt,
        name -> Text,
        stock -> Integer,
        version -> Integer,
    }
}
versioned!(products.version);

diesel::table! {
    orders (id) {
        id -> BigInt,
        customer -> Text,
        product_id -> BigInt,
        quantity -> Integer,
        campaign_id -> Nullable<BigInt>,
        status -> Text,
        version -> Integer,
    }
}
versioned!(orders.version);

states! {
    /// The life of an order.
    #[derive(Serialize)]
    #[serde(rename_all = "UPPERCASE")]
    pub enum Status for orders.status {
        Pending = "PENDING",
        Paid = "PAID",
    }
}

diesel::table! {
    order_history (id) {
        id -> BigInt,
        order_id -> BigInt,
        status -> Text,
    }
}

diesel::table! {
    coupons (id) {
        id -> BigInt,
        customer -> Text,
        coupon -> Text,
    }
}

diesel::table! {
    payments (out_trade_no) {
        out_trade_no -> Text,
        order_id -> BigInt,
    }
}
