-- By what the logs know the request that claimed the key first: what a client or a gateway sent, visible ASCII. It
-- decides nothing. Null where none came, and in rows that are older than this column.
--
-- A column without a default rewrites nothing, and a constraint that old rows are not asked about reads nothing:
-- they have no request id.
ALTER TABLE idempotency_keys
    ADD COLUMN request_id text,
    ADD CONSTRAINT idempotency_keys_request_id_check CHECK (octet_length(request_id) BETWEEN 1 AND 128) NOT VALID;
