CREATE TABLE coupons (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL,
    coupon text NOT NULL,
    -- The window of the double click ends; this does not.
    CONSTRAINT coupons_customer_coupon_key UNIQUE (customer, coupon)
);

CREATE TABLE payments (
    -- The number that the provider knows a payment by.
    out_trade_no text PRIMARY KEY,
    order_id bigint NOT NULL REFERENCES orders (id)
);
