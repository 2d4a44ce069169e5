"""Scores of the quickstart: what counts as right, and what a query can't do."""

from __future__ import annotations

import time

import pytest

from tunerack.cli.scores import Database, bare, query_score, record_score

SHOP = """
CREATE TABLE products (name TEXT, price REAL, stock INTEGER);
INSERT INTO products VALUES ('mug', 4.5, 3), ('rake', 20.1, 0), ('kite', 9.0, 0);
"""


def test_records_are_compared_as_json_and_by_field() -> None:
    gold = '{"team":"billing","refund":true}'
    answers = [
        '{ "refund": true, "team": "billing" }',
        '```json\n{"team":"billing","refund":true}\n```',
        '{"team":"billing","refund":1}',
        '{"team":"shipping","refund":true}',
        '{"team":"billing","refund":true,"note":"x"}',
        "billing",
        '{"team":"billing"',
        "[1]",
    ]
    score = record_score([gold] * len(answers), answers)
    assert (score.exact, score.total) == (2, 8)
    assert score.partial == (2 + 2 + 1 + 1 + 2) / 16
    assert score.share == 0.25


def test_queries_are_compared_by_their_rows() -> None:
    gold = "SELECT name FROM products WHERE stock = 0"
    answers = [
        gold,
        "select name from products where stock < 1 order by name desc;",
        "```sql\nSELECT name FROM products WHERE stock = 0\n```",
        "SELECT name FROM products",
        "SELECT title FROM products",
        "There are two.",
        "",
        "SELECT name FROM products WHERE stock = 0; DROP TABLE products",
    ]
    score = query_score(SHOP, [gold] * len(answers), answers)
    assert (score.exact, score.total) == (3, 8)
    assert score.partial == 2 / 8


def test_order_counts_where_it_is_asked_for() -> None:
    gold = "SELECT name FROM products ORDER BY price"
    assert query_score(SHOP, [gold], ["SELECT name FROM products ORDER BY price DESC"]).exact == 0
    assert query_score(SHOP, [gold], ["SELECT name FROM products ORDER BY price * 2"]).exact == 1
    twice = "SELECT stock FROM products"
    assert query_score(SHOP, [twice], ["SELECT DISTINCT stock FROM products"]).exact == 0


def test_sums_of_floats_are_equal_in_any_order() -> None:
    gold = "SELECT SUM(price) FROM products"
    assert query_score(SHOP, [gold], ["SELECT 20.1 + 9.0 + 4.5"]).exact == 1


def test_an_expected_query_that_fails_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected query fails"):
        query_score(SHOP, ["SELECT nothing FROM nowhere"], ["SELECT 1"])


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM products",
        "UPDATE products SET stock = 1 RETURNING name",
        "INSERT INTO products VALUES ('x', 1, 1)",
        "CREATE TABLE x (y)",
        "ATTACH '/tmp/x.db' AS x",
        "PRAGMA user_version = 3",
        "SELECT load_extension('x')",
        "SELECT randomblob(100000000)",
    ],
)
def test_queries_can_only_read(query: str) -> None:
    database = Database(SHOP)
    assert database.rows(query) is None
    assert database.rows("SELECT COUNT(*), SUM(stock) FROM products") == [(3, 3)]


def test_an_endless_query_is_stopped_and_the_next_one_runs() -> None:
    database = Database(SHOP)
    began = time.monotonic()
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT SUM(i) FROM n"
    assert database.rows(endless) is None
    assert time.monotonic() - began < 5
    assert database.rows("SELECT 1") == [(1,)]


def test_bare() -> None:
    assert bare("  x\n") == "x"
    assert bare("```\nx\ny\n```") == "x\ny"
