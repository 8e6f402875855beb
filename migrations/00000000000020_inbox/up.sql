-- One row per message that a consumer has handled, written in the transaction of what it did.
--
-- The stamp sorts before any date, see 00000000000010_idempotency_keys.
CREATE TABLE idempotency_inbox (
    -- "C": batches insert in the order of the bytes, whatever the collation of the database, so that
    -- two of them never wait for each other in a circle; and bytes are what makes two ids equal.
    consumer text COLLATE "C" NOT NULL,
    message_id text COLLATE "C" NOT NULL,

    -- A digest of the content, where the consumer gives it: the same id with another content shows.
    fingerprint bytea,

    -- By the database's clock, when the mark was written. Until `expires_at` the message is not
    -- handled again; null: never.
    handled_at timestamptz NOT NULL,
    expires_at timestamptz,

    CONSTRAINT idempotency_inbox_pkey PRIMARY KEY (consumer, message_id),
    CONSTRAINT idempotency_inbox_consumer_check CHECK (octet_length(consumer) BETWEEN 1 AND 255),
    CONSTRAINT idempotency_inbox_message_id_check CHECK (octet_length(message_id) BETWEEN 1 AND 255),
    CONSTRAINT idempotency_inbox_fingerprint_check CHECK (octet_length(fingerprint) = 32),
    CONSTRAINT idempotency_inbox_times_check CHECK (expires_at > handled_at)
) WITH (
    -- A row is written once and deleted once. Every row dies: the defaults wait for a fifth of the
    -- table, which is too late for one that is all churn.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);

-- For the sweeper.
CREATE INDEX idempotency_inbox_expires_at_idx ON idempotency_inbox (expires_at) WHERE expires_at IS NOT NULL;

-- How often a message has failed. Written after the transaction that failed was rolled back, and gone
-- when the message is handled: most messages never have a row here.
CREATE TABLE idempotency_inbox_attempts (
    consumer text COLLATE "C" NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    attempts integer NOT NULL,
    failed_at timestamptz NOT NULL,
    expires_at timestamptz,

    CONSTRAINT idempotency_inbox_attempts_pkey PRIMARY KEY (consumer, message_id),
    CONSTRAINT idempotency_inbox_attempts_consumer_check CHECK (octet_length(consumer) BETWEEN 1 AND 255),
    CONSTRAINT idempotency_inbox_attempts_message_id_check CHECK (octet_length(message_id) BETWEEN 1 AND 255),
    CONSTRAINT idempotency_inbox_attempts_attempts_check CHECK (attempts > 0),
    CONSTRAINT idempotency_inbox_attempts_times_check CHECK (expires_at > failed_at)
) WITH (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);

CREATE INDEX idempotency_inbox_attempts_expires_at_idx ON idempotency_inbox_attempts (expires_at)
    WHERE expires_at IS NOT NULL;
