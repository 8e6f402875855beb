-- One row per idempotency key: the lock, the record and the store.
--
-- The stamp of this migration sorts before any date, so that `diesel migration revert` in a project
-- of yours always finds a migration of yours last.
CREATE TABLE idempotency_keys (
    -- What it is: SHA-256 over domain, tenant, principal, resource and key, each length-prefixed.
    -- 32 bytes index better than four texts, and no text is too long for the index.
    id bytea NOT NULL,

    -- The same for people who look. Only `id` decides. A value longer than its column allows is
    -- shown as its digest. `tenant` is null where there is none, `principal` for the anonymous one.
    domain text NOT NULL,
    tenant text,
    principal text,
    resource text NOT NULL,
    key text NOT NULL,

    -- What was asked: a digest of the request, and of the way it was made.
    fingerprint bytea NOT NULL,
    recipe bytea NOT NULL,
    recipe_version smallint NOT NULL,

    -- Who answers: `owner` is drawn anew by every claim; every later write names it.
    state text NOT NULL,
    owner bytea NOT NULL,
    attempt integer NOT NULL,
    seed bytea NOT NULL,

    -- When, by the database's clock alone. `leased_until`: while outstanding, when the lease ends
    -- unless renewed; afterwards, when it ended. `expires_at` is set by the claim and never by the
    -- completion, which therefore touches no index; it is a lower bound, and the row really
    -- expires at coalesce(completed_at, leased_until) + (expires_at - created_at).
    -- Null: never.
    created_at timestamptz NOT NULL,
    leased_until timestamptz NOT NULL,
    completed_at timestamptz,
    expires_at timestamptz,

    -- The answer. A released row remembers the status of the attempt that gave the key back.
    status smallint,
    header_names text[],
    header_values bytea[],
    body bytea,
    body_omitted boolean NOT NULL DEFAULT false,
    snapshot_version smallint,

    CONSTRAINT idempotency_keys_pkey PRIMARY KEY (id),
    CONSTRAINT idempotency_keys_id_check CHECK (octet_length(id) = 32),
    CONSTRAINT idempotency_keys_domain_check CHECK (domain IN ('http', 'once', 'token')),
    CONSTRAINT idempotency_keys_tenant_check CHECK (octet_length(tenant) BETWEEN 1 AND 255),
    CONSTRAINT idempotency_keys_principal_check CHECK (octet_length(principal) BETWEEN 1 AND 255),
    CONSTRAINT idempotency_keys_resource_check CHECK (octet_length(resource) BETWEEN 1 AND 255),
    CONSTRAINT idempotency_keys_key_check CHECK (octet_length(key) BETWEEN 1 AND 255),
    CONSTRAINT idempotency_keys_fingerprint_check CHECK (octet_length(fingerprint) = 32),
    CONSTRAINT idempotency_keys_recipe_check CHECK (octet_length(recipe) = 8 AND recipe_version > 0),
    CONSTRAINT idempotency_keys_state_check CHECK (state IN ('outstanding', 'released', 'completed')),
    CONSTRAINT idempotency_keys_owner_check CHECK (octet_length(owner) = 16),
    CONSTRAINT idempotency_keys_attempt_check CHECK (attempt > 0),
    CONSTRAINT idempotency_keys_seed_check CHECK (octet_length(seed) = 32),
    CONSTRAINT idempotency_keys_status_check CHECK (status BETWEEN 100 AND 999),
    CONSTRAINT idempotency_keys_times_check CHECK (completed_at >= created_at AND expires_at >= created_at),
    -- The state and its columns say the same.
    CONSTRAINT idempotency_keys_answer_check CHECK (
        CASE state
            WHEN 'completed' THEN
                completed_at IS NOT NULL AND status IS NOT NULL
                AND snapshot_version IS NOT NULL AND snapshot_version > 0
                AND header_names IS NOT NULL AND header_values IS NOT NULL
                AND cardinality(header_names) = cardinality(header_values)
                AND (body IS NULL) = body_omitted
            ELSE
                completed_at IS NULL AND snapshot_version IS NULL
                AND header_names IS NULL AND header_values IS NULL
                AND body IS NULL AND NOT body_omitted
                AND (status IS NULL OR state = 'released')
        END
    )
) WITH (
    -- A row is written twice: by the claim, and, grown by the answer, by the completion. Room on
    -- its own page makes the second a heap-only update, which touches no index.
    fillfactor = 50,
    -- Every row dies, by completion (its first version) and by expiry. The defaults wait for a fifth
    -- of the table, which is too late for one that is all churn.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);

-- For the sweeper. No other index: one that names state, leased_until or completed_at would end the
-- heap-only updates.
CREATE INDEX idempotency_keys_expires_at_idx ON idempotency_keys (expires_at) WHERE expires_at IS NOT NULL;

-- lz4 stores bodies of 20 KB in little more than half the time, at the same size; a server may be
-- built without it.
DO $$
BEGIN
    IF EXISTS (
        SELECT FROM pg_settings
        WHERE name = 'default_toast_compression' AND 'lz4' = ANY (enumvals)
    ) THEN
        ALTER TABLE idempotency_keys ALTER COLUMN body SET COMPRESSION lz4;
    END IF;
END
$$;
