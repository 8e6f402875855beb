DROP TABLE payments;
DROP TABLE coupons;
