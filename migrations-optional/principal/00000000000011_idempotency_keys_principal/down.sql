DROP INDEX CONCURRENTLY IF EXISTS idempotency_keys_principal_idx;
