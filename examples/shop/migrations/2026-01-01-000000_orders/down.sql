DROP TABLE orders;
DROP TABLE products;
