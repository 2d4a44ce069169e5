"""The shop data set under examples/data/sql: rows are valid chats, queries run, and the two files do not overlap."""

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "examples" / "data" / "sql"
SYSTEM = "Write SQL for the shop."
KEYWORD = re.compile(
    "SELECT|DISTINCT|FROM|JOIN|ON|WHERE|AND|NOT|IN|LIKE|BETWEEN|GROUP|BY|HAVING|ORDER|DESC|LIMIT|COUNT|SUM|AVG|MIN|MAX"
)


def read_rows(name: str) -> list[dict]:
    text = (DATA / name).read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def pairs(name: str) -> list[tuple[str, str]]:
    return [(row["messages"][1]["content"], row["messages"][2]["content"]) for row in read_rows(name)]


TRAIN = pairs("train.jsonl")
HELDOUT = pairs("heldout.jsonl")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("sql") / "shop.db"
    con = sqlite3.connect(path)
    con.execute("PRAGMA foreign_keys = ON")
    con.executescript((DATA / "schema.sql").read_text(encoding="utf-8"))
    con.executescript((DATA / "shop.sql").read_text(encoding="utf-8"))
    con.close()
    return path


def read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)


def rounded(rows: list[tuple]) -> list[tuple]:
    return [tuple(round(value, 6) if isinstance(value, float) else value for value in row) for row in rows]


def test_counts() -> None:
    assert len(TRAIN) == 260
    assert len(HELDOUT) == 40


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_each_line_is_a_chat_row(name: str) -> None:
    for row in read_rows(name):
        assert list(row) == ["messages"]
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        assert all(set(message) == {"role", "content"} for message in row["messages"])
        assert row["messages"][0]["content"] == SYSTEM
        assert all(message["content"] == message["content"].strip() for message in row["messages"])


def test_shop_has_the_rows_the_readme_names(shop: Path) -> None:
    con = read_only(shop)
    tables = ("customers", "products", "orders", "items")
    assert [con.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables] == [16, 22, 42, 88]
    assert con.execute("PRAGMA foreign_key_check").fetchall() == []
    early = "SELECT orders.id FROM orders JOIN customers ON orders.customer_id = customers.id WHERE placed < joined"
    assert con.execute(early).fetchall() == []
    con.close()


def test_every_query_runs_read_only_and_answers_something(shop: Path) -> None:
    con = read_only(shop)
    for question, sql in TRAIN + HELDOUT:
        rows = con.execute(sql).fetchall()
        assert rows, question
        assert all(value is not None for row in rows for value in row), question
        assert rows not in ([(0,)], [(1,)]), question
    con.close()


def test_no_answer_depends_on_how_ties_are_broken(shop: Path) -> None:
    forward, backward = read_only(shop), read_only(shop)
    backward.execute("PRAGMA reverse_unordered_selects = ON")
    for question, sql in TRAIN + HELDOUT:
        one, other = rounded(forward.execute(sql).fetchall()), rounded(backward.execute(sql).fetchall())
        if "ORDER BY" in sql:
            assert one == other, question
        assert Counter(one) == Counter(other), question
    forward.close()
    backward.close()


def test_one_style_of_sql() -> None:
    for _, sql in TRAIN + HELDOUT:
        assert sql.startswith("SELECT ")
        assert "  " not in sql
        assert ";" not in sql
        words = re.findall(r"[A-Za-z_]+", re.sub(r"'[^']*'", "", sql))
        assert all(KEYWORD.fullmatch(word) or word.islower() for word in words), sql


def test_questions_and_queries_are_unique() -> None:
    for position in (0, 1):
        assert len({pair[position].lower() for pair in TRAIN + HELDOUT}) == len(TRAIN) + len(HELDOUT)


def test_heldout_questions_are_not_close_to_training_ones() -> None:
    for question, _ in HELDOUT:
        close = [other for other, _ in TRAIN if SequenceMatcher(None, question.lower(), other.lower()).ratio() >= 0.85]
        assert not close, (question, close)


def test_heldout_uses_only_tables_and_columns_seen_in_training() -> None:
    def names(rows: list[tuple[str, str]]) -> set[str]:
        return {name for _, sql in rows for name in re.findall(r"[a-z_.]+", re.sub(r"'[^']*'", "", sql))}

    assert names(HELDOUT) <= names(TRAIN)


def test_questions_are_short_and_do_not_share_one_opening() -> None:
    questions = [question for question, _ in TRAIN + HELDOUT]
    assert all(5 <= len(question.split()) <= 16 for question in questions)
    openings = Counter(" ".join(question.lower().split()[:3]) for question in questions)
    assert openings.most_common(1)[0][1] <= 0.08 * len(questions)


@pytest.mark.parametrize("rows", [TRAIN, HELDOUT], ids=["train", "heldout"])
def test_mix_of_joins(rows: list[tuple[str, str]]) -> None:
    joins = Counter(sql.count(" JOIN ") for _, sql in rows)
    assert [round(100 * joins[n] / len(rows)) for n in range(3)] == [70, 25, 5]
