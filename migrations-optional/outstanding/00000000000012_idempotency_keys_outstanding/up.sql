-- For those who look for keys whose attempt has died (`Completer`) or still runs. Its price: a
-- completion takes the row out of this index, so that it is no longer a heap-only update, and writes
-- into every index of the table.
CREATE INDEX idempotency_keys_outstanding_idx ON idempotency_keys (leased_until) WHERE state = 'outstanding';
