DROP INDEX CONCURRENTLY IF EXISTS idempotency_keys_outstanding_idx;
