DROP TABLE order_history;
