CREATE TABLE products (
    id bigint PRIMARY KEY,
    name text NOT NULL,
    stock integer NOT NULL CONSTRAINT products_stock_check CHECK (stock >= 0),
    version integer NOT NULL DEFAULT 1
);
INSERT INTO products (id, name, stock) VALUES (1, 'espresso machine', 1000), (2, 'the last grinder', 1);

CREATE TABLE orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL,
    product_id bigint NOT NULL REFERENCES products (id),
    quantity integer NOT NULL CONSTRAINT orders_quantity_check CHECK (quantity > 0),
    campaign_id bigint,
    status text NOT NULL DEFAULT 'PENDING',
    version integer NOT NULL DEFAULT 1,
    -- The last line of defence: one order for a customer, a product and a campaign, whatever keys say.
    CONSTRAINT orders_customer_product_campaign_key UNIQUE (customer, product_id, campaign_id)
);
CREATE INDEX orders_customer_idx ON orders (customer);
