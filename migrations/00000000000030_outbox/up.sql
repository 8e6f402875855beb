-- One row per event that has still to be delivered, written in the transaction of what it tells of. A
-- delivered event has no row.
--
-- The stamp sorts before any date, see 00000000000010_idempotency_keys.
CREATE TABLE idempotency_outbox (
    -- The order within a key: publishers of one key take turns until they commit, so that here a
    -- larger number really is later.
    position bigint GENERATED ALWAYS AS IDENTITY,

    -- What the event is known by outside, the same on every delivery.
    id uuid NOT NULL,
    topic text COLLATE "C" NOT NULL,
    key text COLLATE "C",
    payload bytea NOT NULL,

    -- `attempts` counts deliveries that began. `due_at`, by the database's clock: not to be delivered
    -- before; while somebody delivers it, when the lease ends. `owner` is drawn anew by every claim;
    -- who settles the event names it.
    state text NOT NULL DEFAULT 'pending',
    attempts integer NOT NULL DEFAULT 0,
    owner bytea,
    created_at timestamptz NOT NULL,
    due_at timestamptz NOT NULL,

    CONSTRAINT idempotency_outbox_pkey PRIMARY KEY (position),
    CONSTRAINT idempotency_outbox_topic_check CHECK (octet_length(topic) BETWEEN 1 AND 255),
    CONSTRAINT idempotency_outbox_key_check CHECK (octet_length(key) BETWEEN 1 AND 255),
    CONSTRAINT idempotency_outbox_payload_check CHECK (octet_length(payload) <= 1048576),
    CONSTRAINT idempotency_outbox_state_check CHECK (state IN ('pending', 'parked')),
    CONSTRAINT idempotency_outbox_attempts_check CHECK (attempts >= 0),
    CONSTRAINT idempotency_outbox_owner_check CHECK (owner IS NULL OR (octet_length(owner) = 16 AND attempts > 0)),
    CONSTRAINT idempotency_outbox_parked_check CHECK (state <> 'parked' OR (attempts > 0 AND owner IS NULL))
) WITH (
    -- A queue: every row is written, claimed and deleted within moments, and a claim, which moves
    -- `due_at`, is never a heap-only update. The defaults wait for a fifth of the table, whose size is
    -- zero most of the time; what is dead is passed over by every claim until it is vacuumed.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);

-- For the claim: what is due, the longest waiting first. Parked events and those in backoff do not
-- stand in its way.
CREATE INDEX idempotency_outbox_due_idx ON idempotency_outbox (due_at, position) WHERE state = 'pending';

-- For the question whether an earlier event of the same key is still there.
CREATE INDEX idempotency_outbox_key_idx ON idempotency_outbox (topic, key, position) WHERE key IS NOT NULL;

-- For those who look after parked events. Ids of other events are drawn at random and never looked up.
CREATE INDEX idempotency_outbox_parked_idx ON idempotency_outbox (id) WHERE state = 'parked';
