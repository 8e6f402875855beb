DROP TABLE idempotency_steps;
