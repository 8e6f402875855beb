-- What an attempt has done already, step by step: the next attempt at the same operation goes on from
-- there.
CREATE TABLE idempotency_steps (
    -- The operation: the key, and the seed that all attempts at it share. A corrected request, and a later
    -- operation under the same key, have another seed and find nothing here.
    id bytea NOT NULL,
    seed bytea NOT NULL,
    name text NOT NULL,

    -- JSON; null where it was too large to keep.
    result bytea,
    done_at timestamptz NOT NULL,

    CONSTRAINT idempotency_steps_pkey PRIMARY KEY (id, seed, name),
    -- Steps go with their key, whoever deletes it.
    CONSTRAINT idempotency_steps_id_fkey FOREIGN KEY (id) REFERENCES idempotency_keys (id) ON DELETE CASCADE,
    CONSTRAINT idempotency_steps_seed_check CHECK (octet_length(seed) = 32),
    CONSTRAINT idempotency_steps_name_check CHECK (octet_length(name) BETWEEN 1 AND 255)
) WITH (
    -- Written once and deleted once: what has gone makes room early.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);
