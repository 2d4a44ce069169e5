"""Token lengths of a file of rows, without torch: by the model's tokenizer where it is at hand, else from the text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerack.errors import Invalid, Problem
from tunerack.estimate.lengths import Lengths

# Characters per token of English text and code under vocabularies of 32k to 152k, and how far models differ in it.
CHARACTERS_PER_TOKEN, ERROR = 4.0, 0.12
# Tokens of a chat template around each message.
MESSAGE_TOKENS = 5
# Rows that are tokenised; their ratio of tokens to characters stands for all.
SAMPLE = 2000


@dataclass(frozen=True)
class Counted:
    """lengths of the rows, how they were found, and the lines that hold no row."""

    lengths: Lengths
    how: str
    malformed: tuple[int, ...]


def count(path: Path, tokenizer: Path | None = None) -> Counted:
    """Lengths of all rows of a JSONL file. Raises Invalid when it can't be read or holds no row.

    tokenizer: a tokenizer.json, or a folder that holds one
    """
    rows: list[tuple[str, int]] = []
    malformed: list[int] = []
    for number, line in _lines(path):
        try:
            rows.append(_text(json.loads(line)))
        except (ValueError, TypeError, AttributeError):
            malformed.append(number)
    if not rows:
        raise Invalid(
            Problem("holds no row", str(path), 'one JSON object a line, such as {"messages": [...]}'), param="data"
        )
    file = tokenizer / "tokenizer.json" if tokenizer is not None and tokenizer.is_dir() else tokenizer
    encode = _encoder(file) if file is not None and file.exists() else None
    if encode is None:
        lengths = [max(1, round(len(text) / CHARACTERS_PER_TOKEN) + extra) for text, extra in rows]
        how = f"from the text, {CHARACTERS_PER_TOKEN:g} characters a token, within {ERROR:.0%}"
        return Counted(Lengths.of(lengths, token_error=ERROR), how, tuple(malformed))
    sample = rows if len(rows) <= SAMPLE else random.Random(0).sample(rows, SAMPLE)
    counted = [size + extra for size, (_, extra) in zip(encode([text for text, _ in sample]), sample, strict=True)]
    share = len(sample) / len(rows)
    how = "tokenised" if share == 1 else f"{len(sample):,} of {len(rows):,} rows tokenised"
    return Counted(Lengths.of(counted, share), how, tuple(malformed))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig", errors="strict") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise Invalid(Problem(f"can't be read: {error.strerror}", str(path)), param="data") from error
    except UnicodeDecodeError as error:
        raise Invalid(Problem("is not UTF-8 text", str(path), "save it as UTF-8"), param="data") from error


def _text(row: Any) -> tuple[str, int]:
    """All text of a row, and the tokens that a template adds."""
    messages = row.get("messages") or row.get("conversations")
    if messages:
        parts = [str(message.get("content") or message.get("value") or "") for message in messages]
        return "\n".join(parts), MESSAGE_TOKENS * len(parts)
    parts = [value for value in row.values() if isinstance(value, str)]
    if not parts:
        raise ValueError("no text")
    return "\n".join(parts), 2 * MESSAGE_TOKENS


def _encoder(file: Path) -> Any:
    """Lengths of texts by a tokenizer.json, or None when the tokenizers package is missing."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise Invalid(Problem(f"is no tokenizer: {error}", str(file)), param="tokenizer") from error
    return lambda texts: [len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
