"""Text to token ids and back, as the base model's own tokenizer does it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from tunerack.errors import Invalid

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _bytes_of_letters() -> dict[str, int]:
    """The alphabet of byte-level BPE: bytes that can be seen stand for themselves, the others for letters past 255."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """A fast tokenizer with its chat template; special tokens come from the text only, none is added."""

    def __init__(self, fast: FastTokenizer, config: dict[str, Any], chat_template: str | None) -> None:
        self._fast = fast
        self.chat_template = chat_template
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token")) or ""
        self.bos_token_id = fast.token_to_id(self.bos_token) if self.bos_token else None
        eos = fast.token_to_id(self.eos_token) if self.eos_token else None
        if eos is None:
            raise Invalid("names no end-of-text token", where="tokenizer_config.json: eos_token")
        self.eos_token_id: int = eos
        self.stop_token_ids = frozenset({eos, *config.get("stop_token_ids", ())})
        self.vocab_size = fast.get_vocab_size()
        self.adds_bos = self.bos_token_id is not None and fast.encode("a").ids[:1] == [self.bos_token_id]
        self._added = frozenset(fast.get_added_tokens_decoder())
        self._letters = _bytes_of_letters() if "ByteLevel" in repr(fast.decoder) else {}
        self._special = {
            i for i, token in fast.get_added_tokens_decoder().items() if token.special or i in self.stop_token_ids
        }

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read `tokenizer.json` and its configuration; raises Invalid when the folder has none."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise Invalid("is missing", where="tokenizer.json", hint="save the tokenizer in its fast form")
        config = _read_json(directory / "tokenizer_config.json")
        generation = _read_json(directory / "generation_config.json")
        stop = generation.get("eos_token_id")
        config["stop_token_ids"] = [i for i in (stop if isinstance(stop, list) else [stop]) if isinstance(i, int)]
        template_file = directory / "chat_template.jinja"
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        if isinstance(template, list):
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        return cls(FastTokenizer.from_file(str(path)), config, template)

    def encode(self, text: str) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and, for each, the characters [begin, end) of `text` that it covers."""
        encoding = self._fast.encode(text, add_special_tokens=False)
        return list(encoding.ids), [(int(begin), int(end)) for begin, end in encoding.offsets]

    def decode(self, ids: list[int], *, skip_special: bool = False) -> str:
        if skip_special:
            ids = [i for i in ids if i not in self._special]
        return str(self._fast.decode(ids, skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for by itself: part of a character is bytes, though no text."""
        word = self._fast.id_to_token(token)
        if word is not None and token not in self._added:
            single = _BYTE_TOKEN.fullmatch(word)
            if single is not None and not self._letters:
                return bytes.fromhex(single[1])
            if self._letters and all(letter in self._letters for letter in word):
                return bytes(self._letters[letter] for letter in word)
        return self.decode([token]).encode()


class TextStream:
    """Text of a growing list of tokens, given out only as far as no later token can change it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that became certain with this token; empty while a character is incomplete."""
        self._ids.append(token)
        before = self._decode(self._begin, self._shown)
        now = self._decode(self._begin, len(self._ids))
        if now.endswith("�"):
            return ""
        text = now[len(before) :]
        self._begin, self._shown = self._shown, len(self._ids)
        return text

    def finish(self) -> str:
        """What is left at the end, an incomplete character shown as the replacement sign."""
        before = self._decode(self._begin, self._shown)
        now = self._decode(self._begin, len(self._ids))
        self._shown = len(self._ids)
        return now[len(before) :]

    def _decode(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[begin:end], skip_special=True)


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
