diesel::table! {
    products (id) {
        id -> BigInt,
        name -> Text,
        stock -> Integer,
        version -> Integer,
    }
}

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
