"""The example data set in examples/data/triage: format, labels, balance, no overlap."""

import difflib
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "examples" / "data" / "triage"
ROWS = {"train": 260, "heldout": 40}
VALUES = {
    "team": ["billing", "shipping", "technical", "account", "returns"],
    "urgency": ["low", "normal", "high"],
    "product": ["app", "laptop", "phone", "headphones", "camera", "none"],
    "refund": [True, False],
}
# Lowest and highest share allowed for any value of a field.
SHARES = {"team": (0.15, 0.25), "urgency": (0.28, 0.40), "product": (0.12, 0.25)}
MAX_SIMILARITY = 0.75


def lines(split: str) -> list[str]:
    return (DATA / f"{split}.jsonl").read_bytes().decode("utf-8").splitlines()


def load(split: str) -> list[tuple[str, dict]]:
    pairs = []
    for line in lines(split):
        messages = json.loads(line)["messages"]
        pairs.append((messages[1]["content"], json.loads(messages[2]["content"])))
    return pairs


def similar(a: str, b: str) -> bool:
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return (
        matcher.real_quick_ratio() >= MAX_SIMILARITY
        and matcher.quick_ratio() >= MAX_SIMILARITY
        and matcher.ratio() >= MAX_SIMILARITY
    )


@pytest.mark.parametrize("split", ROWS)
def test_row_count(split):
    assert len(lines(split)) == ROWS[split]


@pytest.mark.parametrize("split", ROWS)
def test_each_line_is_a_chat_row(split):
    for line in lines(split):
        row = json.loads(line)
        assert list(row) == ["messages"]
        assert [list(message) for message in row["messages"]] == [["role", "content"]] * 3
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        system, ticket, _ = (message["content"] for message in row["messages"])
        assert system == "Triage the ticket."
        assert ticket == ticket.strip()
        assert 12 <= len(ticket.split()) <= 45, ticket


@pytest.mark.parametrize("split", ROWS)
def test_record_schema(split):
    for line in lines(split):
        text = json.loads(line)["messages"][2]["content"]
        record = json.loads(text)
        assert list(record) == list(VALUES)
        assert text == json.dumps(record, separators=(",", ":"))
        assert isinstance(record["refund"], bool)
        for field, allowed in VALUES.items():
            assert record[field] in allowed, text


@pytest.mark.parametrize("split", ROWS)
def test_product_is_the_one_the_ticket_names(split):
    for ticket, record in load(split):
        named = {p for p in VALUES["product"] if p != "none" and re.search(rf"\b{p}s?\b", ticket.lower())}
        assert named == {record["product"]} - {"none"}, ticket


@pytest.mark.parametrize("split", ROWS)
def test_a_ticket_in_capitals_is_urgent(split):
    for ticket, record in load(split):
        if ticket.isupper():
            assert record["urgency"] == "high", ticket


@pytest.mark.parametrize("split", ROWS)
def test_balance(split):
    records = [record for _, record in load(split)]
    for field, (low, high) in SHARES.items():
        counts = Counter(record[field] for record in records)
        for value in VALUES[field]:
            assert low <= counts[value] / len(records) <= high, (field, value, counts[value])
    refunds = sum(record["refund"] for record in records) / len(records)
    assert 0.25 <= refunds <= 0.35


def test_no_overlap_between_train_and_heldout():
    def normal(ticket: str) -> str:
        return re.sub(r"\W+", " ", ticket).strip().lower()

    tickets = {split: [normal(ticket) for ticket, _ in load(split)] for split in ROWS}
    for split, items in tickets.items():
        assert len(set(items)) == len(items), split
    assert not set(tickets["train"]) & set(tickets["heldout"])


def test_no_two_tickets_are_near_duplicates():
    tickets = [ticket for split in ROWS for ticket, _ in load(split)]
    assert [(a, b) for a, b in itertools.combinations(tickets, 2) if similar(a, b)] == []
