-- For those who count or erase the keys of a principal. Every claim pays for it with one more index
-- entry; a completion does not touch it.
--
-- Concurrently, and therefore in no transaction (metadata.toml): a plain CREATE INDEX locks the table, and holds up
-- every claim and completion for as long as it builds. A build that was interrupted leaves an index that is not valid,
-- which every write pays for and no query uses; IF NOT EXISTS passes it by. `check()` finds it (`index-invalid`); finish it by
-- REINDEX INDEX CONCURRENTLY idempotency_keys_principal_idx.
CREATE INDEX CONCURRENTLY IF NOT EXISTS idempotency_keys_principal_idx ON idempotency_keys (principal);
