-- For those who look for keys that were given back half-done (`Completer`). Beside the index of what is outstanding it
-- costs a completion nothing: only the release of such a key writes into it.
--
-- After the column that it asks for. Concurrently, see 00000000000012_idempotency_keys_outstanding; one statement to a
-- migration, because several at once would be a transaction. Finish it by
-- REINDEX INDEX CONCURRENTLY idempotency_keys_acted_idx.
CREATE INDEX CONCURRENTLY IF NOT EXISTS idempotency_keys_acted_idx ON idempotency_keys (leased_until)
    WHERE state = 'released' AND acted;
