-- Whether an attempt that gave the key back has done what a ROLLBACK does not undo: it has derived a key for another
-- service, come to a step, or was sure of its success. Then its effects are unknown, whatever its status: the same
-- request may try again, and no other may have the key.
--
-- A constant default rewrites nothing, and what is true of all rows that are there need not be read in them.
ALTER TABLE idempotency_keys
    ADD COLUMN acted boolean NOT NULL DEFAULT false,
    -- It is said when an attempt ends.
    ADD CONSTRAINT idempotency_keys_acted_check CHECK (NOT acted OR state <> 'outstanding' OR attempt > 1) NOT VALID;
