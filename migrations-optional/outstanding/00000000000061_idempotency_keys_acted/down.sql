DROP INDEX CONCURRENTLY IF EXISTS idempotency_keys_acted_idx;
