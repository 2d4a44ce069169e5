"""Token ids and loss weights of a row, by the base model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from tunerack.data.chat import Tokenizer as Tokenizer
from tunerack.data.chat import chat_text as chat_text
from tunerack.data.formats import Message, Row, RowError
from tunerack.data.probe import end_mark, writes_tools

TrainOn = Literal["assistant", "last", "all", "custom"]


@dataclass(frozen=True)
class Rendered:
    """Token ids of a whole row; `weights[i]` is the weight of the loss of predicting `ids[i]` from those before.

    `merged` is True when a token holds the last characters of a prompt and the first of its answer, so that a server,
    which tokenises the prompt alone, will never see it.
    """

    ids: list[int]
    weights: list[float]
    merged: bool = False


def render(row: Row, tokenizer: Tokenizer, train_on: TrainOn = "assistant", now: datetime | None = None) -> Rendered:
    """Ids and weights of one row; raises RowError when the template can't show where the answers are.

    The whole text is tokenised once and answers are found by character, so that ids are those of the template itself.
    An answer's trained tokens are its content, its tool calls and the mark that ends the turn; of another turn, which
    only `train_on` "custom" trains, the content and the mark. All of a plain text is trained, and the end token. `now`
    is what a template that writes the date is told.
    """
    messages = row.messages
    if row.text is not None:
        return _render_plain("", row.text, tokenizer, "all")
    if messages is None:
        assert row.prompt is not None
        assert row.completion is not None
        train_on = "assistant" if train_on == "custom" else train_on
        if tokenizer.chat_template is None:
            return _render_plain(row.prompt, row.completion, tokenizer, train_on)
        messages = (Message("user", row.prompt), Message("assistant", row.completion))
    elif tokenizer.chat_template is None:
        hint = "give {prompt, completion} or {text} rows, or another base"
        raise RowError("the base model has no chat template", hint, "template")
    _refuse_tools(messages, row.tools, tokenizer)
    conversation = _Conversation(messages, row.tools, tokenizer, now or datetime.now())
    return _render_chat(conversation, train_on)


class _Conversation:
    """The turns of a row, and the texts that the template makes of the first ones."""

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, now: datetime
    ) -> None:
        self.messages = messages
        self.tokenizer = tokenizer
        self._turns = [_as_mapping(message) for message in messages]
        self._tools = tools
        self._now = now
        self.whole = self.text(len(messages))

    def text(self, turns: int, *, prompt: bool = False) -> str:
        return chat_text(
            self._turns[:turns], self.tokenizer, add_generation_prompt=prompt, tools=self._tools, now=self._now
        )


def _render_chat(conversation: _Conversation, train_on: TrainOn) -> Rendered:
    messages, tokenizer = conversation.messages, conversation.tokenizer
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if train_on == "last":
        answers = answers[-1:]
    if train_on == "custom":
        chosen = {index: message.weight for index, message in enumerate(messages) if message.weight}
    else:
        chosen = {index: 0.0 if messages[index].weight == 0 else 1.0 for index in answers}
    spans = []
    for index, weight in chosen.items():
        if messages[index].role == "assistant":
            start = _answer_start(conversation, index)
            end = _answer_end(conversation, index, start)
        else:
            start, end = _turn_span(conversation, index)
        spans.append((start, end, float(weight)))
    ids, offsets = tokenizer.encode_with_offsets(conversation.whole)
    _refuse_double_bos(ids, tokenizer)
    weights = [1.0 if train_on == "all" else 0.0] * len(ids)
    merged = _apply_spans(weights, offsets, spans)
    return Rendered(ids, _without_first(weights), merged)


def _refuse_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> None:
    calls = any(message.tool_calls or message.role == "tool" for message in messages)
    if (tools or calls) and not writes_tools(tokenizer):
        said = "the base's chat template does not write tools, so this row would lose its tool calls"
        raise RowError(said, "write tools and calls as plain contents, or take another base", "tool_calls")


def _answer_start(conversation: _Conversation, index: int) -> int:
    """Character at which the answer starts: the length of what a server would give the model to answer."""
    if index == 0:
        hint = "put a user message before it"
        raise RowError("the conversation starts with an assistant message", hint, "template")
    before = conversation.text(index, prompt=True)
    if conversation.whole.startswith(before):
        return len(before)
    raise RowError(
        f"the base's chat template writes the turns before messages[{index}] in another way once it is answered, "
        "so what is trained would differ from what is served",
        'split the conversation into rows that end at each answer, or train with train_on "last"',
        "template",
    )


def _answer_end(conversation: _Conversation, index: int, start: int) -> int:
    """Character after the mark that ends the turn."""
    through = _through(conversation, index)
    answer = through[start:].rstrip()
    message = conversation.messages[index]
    content = message.content.strip()
    found = answer.find(content)
    mark = end_mark(conversation.tokenizer) if message.tool_calls else None
    if not answer or (mark is not None and not answer.endswith(mark)):
        said = f"the base's chat template ends the tool calls of messages[{index}] with no stop token"
        raise RowError(said, "take another base", "template")
    if mark is None and found >= 0 and not answer[found + len(content) :].strip():
        raise RowError(
            "the base's chat template ends an answer with no stop token, so the adapter would never learn to stop",
            "use a base whose template ends assistant turns",
            "template",
        )
    return start + len(answer)


def _turn_span(conversation: _Conversation, index: int) -> tuple[int, int]:
    """Characters of a turn that is not the assistant's: its content and the mark after it."""
    through = _through(conversation, index).rstrip()
    content = conversation.messages[index].content.strip()
    start = through.rfind(content)
    if start < 0:
        said = f"the base's chat template does not write the content of messages[{index}] as it is"
        raise RowError(said, "leave its weight out", "template")
    return start, len(through)


def _through(conversation: _Conversation, index: int) -> str:
    """Text up to and with a turn, which the whole text must begin with."""
    through = conversation.text(index + 1)
    if not conversation.whole.startswith(through):
        raise RowError(
            f"the base's chat template writes messages[{index}] in another way once more turns follow",
            'split the conversation into rows that end at each answer, or train with train_on "last"',
            "template",
        )
    return through


def _render_plain(prompt: str, completion: str, tokenizer: Tokenizer, train_on: TrainOn) -> Rendered:
    """Prompt, completion and the end token; only the last two are trained unless `train_on` is "all"."""
    ids, offsets = tokenizer.encode_with_offsets(prompt + completion)
    weights = [1.0 if train_on == "all" else 0.0] * len(ids)
    _apply_spans(weights, offsets, [(len(prompt), len(prompt) + len(completion), 1.0)])
    prompt_ids = tokenizer.encode(prompt)
    merged = ids[: len(prompt_ids)] != prompt_ids
    if tokenizer.adds_bos and tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
        ids, weights = [tokenizer.bos_token_id, *ids], [0.0, *weights]
    _refuse_double_bos(ids, tokenizer)
    return Rendered([*ids, tokenizer.eos_token_id], _without_first([*weights, 1.0]), merged)


def _apply_spans(
    weights: list[float], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, float]]
) -> bool:
    """Set the weights of the tokens that begin inside a span; True when a token reaches into a span from before it."""
    merged = False
    position = 0
    for start, end, weight in spans:
        while position < len(offsets) and offsets[position][0] < start:
            merged = merged or offsets[position][1] > start
            position += 1
        while position < len(offsets) and offsets[position][0] < end:
            weights[position] = weight
            position += 1
    return merged


def _without_first(weights: list[float]) -> list[float]:
    """Nothing comes before the first token that could predict it."""
    return [0.0, *weights[1:]]


def _refuse_double_bos(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    bos = tokenizer.bos_token_id
    if bos is not None and bos != tokenizer.eos_token_id and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
        raise RowError("begins with two BOS tokens", f"remove {tokenizer.bos_token!r} from the text", "template")


def _as_mapping(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    optional = {"name": message.name, "tool_call_id": message.tool_call_id, "tool_calls": list(message.tool_calls)}
    return turn | {key: value for key, value in optional.items() if value}
