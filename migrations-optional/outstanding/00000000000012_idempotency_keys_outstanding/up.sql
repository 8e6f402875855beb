-- For those who look for keys whose attempt has died (`Completer`) or still runs. Its price: a
-- completion takes the row out of this index, so that it is no longer a heap-only update, and writes
-- into every index of the table.
--
-- Concurrently, and therefore in no transaction (metadata.toml): a plain CREATE INDEX locks the table, and holds up
-- every claim and completion for as long as it builds. A build that was interrupted leaves an index that is not valid,
-- which every write pays for and no query uses; IF NOT EXISTS passes it by. `check()` finds it (`index-invalid`); finish it by
-- REINDEX INDEX CONCURRENTLY idempotency_keys_outstanding_idx.
CREATE INDEX CONCURRENTLY IF NOT EXISTS idempotency_keys_outstanding_idx ON idempotency_keys (leased_until)
    WHERE state = 'outstanding';
