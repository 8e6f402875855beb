CREATE TABLE orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL,
    product_id bigint NOT NULL,
    quantity integer NOT NULL CHECK (quantity > 0),
    status text NOT NULL DEFAULT 'PENDING',
    version integer NOT NULL DEFAULT 1
);
CREATE INDEX orders_customer_idx ON orders (customer);
