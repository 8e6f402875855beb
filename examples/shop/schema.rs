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
