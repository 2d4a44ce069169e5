CREATE TABLE customers (
  id INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  city TEXT NOT NULL,
  joined TEXT NOT NULL -- YYYY-MM-DD
);

CREATE TABLE products (
  id INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  category TEXT NOT NULL, -- kitchen, garden, office, toys
  price REAL NOT NULL,
  stock INTEGER NOT NULL
);

CREATE TABLE orders (
  id INTEGER PRIMARY KEY,
  customer_id INTEGER NOT NULL REFERENCES customers (id),
  placed TEXT NOT NULL, -- YYYY-MM-DD
  status TEXT NOT NULL -- open, shipped, delivered, cancelled
);

CREATE TABLE items (
  order_id INTEGER NOT NULL REFERENCES orders (id),
  product_id INTEGER NOT NULL REFERENCES products (id),
  qty INTEGER NOT NULL,
  PRIMARY KEY (order_id, product_id)
);
