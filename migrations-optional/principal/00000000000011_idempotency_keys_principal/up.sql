-- For those who count or erase the keys of a principal. Every claim pays for it with one more index
-- entry; a completion does not touch it.
CREATE INDEX idempotency_keys_principal_idx ON idempotency_keys (principal);
