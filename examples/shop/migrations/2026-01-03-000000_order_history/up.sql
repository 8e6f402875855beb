CREATE TABLE order_history (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id bigint NOT NULL REFERENCES orders (id),
    status text NOT NULL,
    moved_at timestamptz NOT NULL DEFAULT now()
);
