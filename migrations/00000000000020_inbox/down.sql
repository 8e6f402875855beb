DROP TABLE idempotency_inbox_attempts;
DROP TABLE idempotency_inbox;
