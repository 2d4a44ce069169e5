"""Serving: each row of a mixed batch gets its own adapter's answer, whatever else is in the batch."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tunerack.engine.adapter_file import read_adapter
from tunerack.engine.attention import DocumentAttention
from tunerack.engine.kv import BLOCK_TOKENS
from tunerack.engine.loop import Engine
from tunerack.engine.serving.answer import GenerationRequest
from tunerack.engine.serving.bank import AdapterBank
from tunerack.engine.serving.route import Range, ServingRoute, decode_order
from tunerack.engine.serving.sampling import SamplingParams, choose_token, token_logprob
from tunerack.engine.serving.server import Limits, Server
from tunerack.engine.tokenizer import TextStream
from tunerack.errors import Invalid, NotFound

from .conftest import make_peft_adapter, merged_logits

GREEDY = SamplingParams(temperature=0)


def test_rows_of_a_mixed_batch_have_the_logits_of_each_adapter_merged(smollm2, smollm2_folder, adapters):
    """Three adapters of ranks 4, 8 and 16 (rsLoRA, patterns) and the base, as one fp32 batch: within 1e-4."""
    bank = AdapterBank(smollm2.decoder.groups())
    served = {name: bank.load(name, read_adapter(path, smollm2.identity)) for name, path in adapters.items()}
    text = "Which of the orders were late, and why?"
    ids = smollm2.tokenizer.encode(text)
    n = len(ids)
    names = ["rank4", None, "rank16", "rank8"]
    ranges = [Range(served[name], i * n, (i + 1) * n) for i, name in enumerate(names) if name]
    with torch.inference_mode():
        hidden = smollm2.decoder.hidden(
            torch.tensor(ids * 4), torch.arange(n).repeat(4), DocumentAttention([n] * 4), ServingRoute(ranges, [])
        )
        rows = smollm2.decoder.logits(hidden).split(n)
    plain = merged_logits(smollm2_folder, None, ids, exact=True)
    for name, ours in zip(names, rows, strict=True):
        reference = merged_logits(smollm2_folder, adapters[name] if name else None, ids, exact=True)
        assert float((ours - reference).abs().max()) < 1e-4
        if name:
            assert float((reference - plain).abs().max()) > 0.1


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [2, 1, 2, 1], [1, 5, 1, 1], [1, 0, 0, 1], [3, 3, 3, 3]])
def test_gathered_rows_equal_plain_products(tiny, tiny_llama, tmp_path, counts):
    """One-token rows of many adapters of one layout: in place, copied and by ranges, all the same sums."""
    bank = AdapterBank(tiny.decoder.groups())
    served = []
    for i in range(4):
        path = make_peft_adapter(
            tiny_llama,
            tmp_path / str(i),
            seed=i,
            base_name="tiny",
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj"],
        )
        served.append(bank.load(str(i), read_adapter(path, tiny.identity)))
    ranges, begin = [], 2
    for adapter, count in sorted(zip(served, counts, strict=True), key=lambda pair: decode_order(pair[0])):
        if count:
            ranges.append(Range(adapter, begin, begin + count))
            begin += count
    x = torch.randn(begin + 1, 48)
    group = tiny.decoder.layers[1].mixer.qkv
    with torch.inference_mode():
        ours = ServingRoute([], ranges).apply(group, x)
        expected = group.base(x)
        for item in ranges:
            weights = item.adapter.weights
            for projection in group.projections:
                lora = weights.modules.get(projection.module)
                if lora:
                    update = x[item.begin : item.end] @ weights.a[projection.module].T @ weights.b[projection.module].T
                    expected[item.begin : item.end, projection.begin : projection.end] += lora.scale * update
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def greedy_reference(folder: Path, adapter: Path | None, prompt: list[int], n: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(merged_logits(folder, adapter, ids)[-1].argmax()))
    return ids[len(prompt) :]


class Collected:
    """Answers of one request, by choice."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.reason: dict[int, str | None] = {}
        self.tokens: dict[int, int] = {}
        self.error: str | None = None

    def __call__(self, piece) -> None:
        self.text[piece.choice] = self.text.get(piece.choice, "") + piece.text
        self.tokens[piece.choice] = piece.tokens
        self.error = piece.error or self.error
        if piece.finish_reason:
            assert piece.choice not in self.reason, "an answer ended twice"
            self.reason[piece.choice] = piece.finish_reason


def ask(server, prompt, adapter=None, *, params=GREEDY, max_tokens=6, n=1, stop=(), stop_tokens=frozenset()):
    sink = Collected()
    answers = server.submit(
        GenerationRequest(tuple(prompt), adapter, params, max_tokens, n, tuple(stop), stop_tokens, sink)
    )
    sink.answers = answers
    return sink


def finish(server) -> None:
    for _ in range(2000):
        if not server.has_work:
            return
        server.step()
    raise AssertionError("the server did not finish")


@pytest.fixture(scope="module")
def tiny_adapters(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-adapters")
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    configs = [
        {"r": 4, "lora_alpha": 64, "target_modules": every},
        {"r": 4, "lora_alpha": 32, "target_modules": every},
        {"r": 8, "lora_alpha": 64, "target_modules": every, "use_rslora": True},
        {"r": 2, "lora_alpha": 64, "target_modules": ["q_proj", "down_proj"]},
    ]
    return {
        f"a{i}": make_peft_adapter(tiny_llama, folder / f"a{i}", seed=20 + i, base_name="tiny", **config)
        for i, config in enumerate(configs)
    }


PROMPTS = [list(range(60, 60 + n)) for n in (3, 17, 40, 70)]


@pytest.fixture(scope="module")
def references(tiny_llama, tiny_adapters):
    """Greedy answers of transformers with each adapter merged, 6 tokens."""
    return {
        (name, i): greedy_reference(tiny_llama, path, prompt, 6)
        for name, path in [(None, None), *tiny_adapters.items()]
        for i, prompt in enumerate(PROMPTS)
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from([None, "a0", "a1", "a2", "a3"]), st.integers(0, 3), st.integers(0, 4), st.booleans()),
        min_size=1,
        max_size=10,
    ),
    blocks=st.sampled_from([5, 8, 100]),
    running=st.sampled_from([1, 3, 8]),
    prefill=st.sampled_from([7, 64]),
)
def test_any_schedule_gives_the_tokens_of_the_merged_models(
    tiny, tiny_adapters, references, arrivals, blocks, running, prefill
):
    """Random arrivals and cancels, few cache blocks (so that requests are preempted), small chunks."""
    bank = AdapterBank(tiny.decoder.groups())
    for name, path in tiny_adapters.items():
        bank.load(name, read_adapter(path, tiny.identity))
    a = tiny.decoder.architecture
    block_bytes = a.n_layers * BLOCK_TOKENS * 2 * a.n_kv_heads * a.head_dim * 4
    server = Server(tiny, bank, Limits(running, blocks * block_bytes, prefill))
    sinks = []
    for adapter, prompt, wait, cancelled in arrivals:
        sink = ask(server, PROMPTS[prompt], adapter)
        sinks.append((adapter, prompt, cancelled, sink))
        for _ in range(wait):
            server.step()
        if cancelled:
            server.cancel(sink.answers)
    finish(server)
    for adapter, prompt, cancelled, sink in sinks:
        expected = tiny.tokenizer.decode(references[adapter, prompt], skip_special=True)
        if cancelled:
            assert expected.startswith(sink.text.get(0, "").rstrip("�"))
        else:
            assert sink.error is None
            assert sink.text[0] == expected
            assert sink.tokens[0] == 6
            assert sink.reason[0] == "length"
    assert server.cache.used_bytes == 0
    assert all(bank.get(name).references == 0 for name in tiny_adapters)


def test_a_request_that_can_never_fit_is_refused_and_others_go_on(tiny):
    a = tiny.decoder.architecture
    block_bytes = a.n_layers * BLOCK_TOKENS * 2 * a.n_kv_heads * a.head_dim * 4
    server = Server(tiny, AdapterBank(tiny.decoder.groups()), Limits(4, 2 * block_bytes))
    large, small = ask(server, range(100, 200)), ask(server, range(5, 9))
    finish(server)
    assert "do not fit" in large.error
    assert small.reason == {0: "length"}


def test_the_same_seed_gives_the_same_text_whatever_else_runs(tiny):
    server = Server(tiny, AdapterBank(tiny.decoder.groups()), Limits(16, 1 << 24))
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=7)
    alone = ask(server, range(5, 15), params=params, max_tokens=12)
    finish(server)
    others = [ask(server, range(30, 30 + n), params=SamplingParams(seed=n), max_tokens=9) for n in (4, 9, 13)]
    beside = ask(server, range(5, 15), params=params, max_tokens=12)
    finish(server)
    assert beside.text == alone.text
    assert all(o.reason == {0: "length"} for o in others)
    different = ask(server, range(5, 15), params=SamplingParams(temperature=1.3, top_p=0.95, seed=8), max_tokens=12)
    finish(server)
    assert different.text != alone.text


def test_the_answers_of_one_request_differ_and_repeat_with_the_seed(tiny):
    server = Server(tiny, AdapterBank(tiny.decoder.groups()), Limits(16, 1 << 24))
    for seed in (7, 2**64 - 1):
        params = SamplingParams(temperature=1.3, seed=seed)
        first, again = (ask(server, range(5, 15), params=params, max_tokens=12, n=3) for _ in range(2))
        alone = ask(server, range(5, 15), params=params, max_tokens=12)
        finish(server)
        assert len(set(first.text.values())) == 3
        assert first.text == again.text
        assert first.text[0] == alone.text[0]


def test_sampling_follows_the_distribution_and_its_limits():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    empty = __import__("collections").Counter()

    def frequencies(**values):
        params = SamplingParams(**values)
        counts = np.zeros(4)
        for position in range(4000):
            counts[choose_token(logits, params, position, empty)] += 1
        return counts / 4000

    np.testing.assert_allclose(frequencies(), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(frequencies(top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(frequencies(top_p=0.6), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(frequencies(top_k=2, top_p=0.6), [1, 0, 0, 0])
    np.testing.assert_allclose(frequencies(temperature=1e-300), [1, 0, 0, 0])
    np.testing.assert_allclose(frequencies(min_p=0.25), [10 / 19, 6 / 19, 3 / 19, 0], atol=0.03)
    np.testing.assert_allclose(frequencies(logit_bias={0: -100.0}), [0, 0.6, 0.3, 0.1], atol=0.03)
    heated = np.sqrt([0.5, 0.3, 0.15, 0.05])
    np.testing.assert_allclose(frequencies(temperature=2.0), heated / heated.sum(), atol=0.03)
    shown = token_logprob(logits, 2, 2)
    assert shown.logprob == pytest.approx(np.log(0.15), abs=1e-6)
    assert [t for t, _ in shown.top] == [0, 1]


def test_stop_strings_across_tokens_are_cut_and_never_shown(smollm2):
    engine_text = "SELECT name FROM customers; -- all of them"
    ids = smollm2.tokenizer.encode(engine_text)
    from tunerack.engine.serving.answer import Answer

    for stop, expected in ((("; --",), "SELECT name FROM customers"), (("customers;",), "SELECT name FROM ")):
        request = GenerationRequest((1,), None, GREEDY, 100, 1, stop, frozenset(), print)
        answer = Answer(request, 0, None, smollm2.tokenizer)
        shown = ""
        for token in ids:
            piece = answer.accept(token, None, 100)
            shown += piece.text
            assert expected.startswith(shown)
            if piece.finish_reason:
                break
        assert shown == expected
        assert piece.finish_reason == "stop"


def test_text_streams_hold_back_half_characters(smollm2):
    text = "Größe: 3 × ½ 🚀 日本語 naïve"
    ids = smollm2.tokenizer.encode(text)
    assert smollm2.tokenizer.decode(ids) == text
    stream = TextStream(smollm2.tokenizer)
    parts = [stream.push(token) for token in ids]
    assert all("�" not in part for part in parts)
    assert "".join(parts) + stream.finish() == text


def test_the_bytes_of_tokens_are_the_text(smollm2):
    tokenizer = smollm2.tokenizer
    text = "Größe: 3 × ½ 🚀🐱 日本語\tnaïve\n"
    assert b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text)) == text.encode()
    assert tokenizer.token_bytes(tokenizer.eos_token_id) == tokenizer.eos_token.encode()


def test_tokens_of_single_bytes_are_those_bytes():
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models

    from tunerack.engine.tokenizer import Tokenizer

    vocab = {"<0xF0>": 0, "<0x9F>": 1, "▁cat": 2, "</s>": 3}
    fast = FastTokenizer(models.WordLevel(vocab, unk_token="</s>"))
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(fast, {"eos_token": "</s>"}, None)
    assert [tokenizer.token_bytes(token) for token in range(4)] == [b"\xf0", b"\x9f", b" cat", b"</s>"]


def test_a_new_version_under_a_name_leaves_requests_in_flight_on_the_old(tiny, tiny_adapters, references):
    bank = AdapterBank(tiny.decoder.groups())
    bank.load("name", read_adapter(tiny_adapters["a0"], tiny.identity))
    server = Server(tiny, bank, Limits(4, 1 << 24))
    before = ask(server, PROMPTS[1], "name")
    server.step()
    bank.load("name", read_adapter(tiny_adapters["a1"], tiny.identity))
    after = ask(server, PROMPTS[1], "name")
    server.step()
    assert bank.unload("name")
    with pytest.raises(NotFound):
        ask(server, PROMPTS[1], "name")
    finish(server)
    decode = tiny.tokenizer.decode
    assert before.text[0] == decode(references["a0", 1], skip_special=True)
    assert after.text[0] == decode(references["a1", 1], skip_special=True)
    assert references["a0", 1] != references["a1", 1]
    assert not bank._stacks, "the memory of unloaded adapters is given back"


def test_an_adapter_that_gives_nan_fails_alone(tiny, tiny_adapters, tiny_llama, tmp_path, references):
    huge = make_peft_adapter(
        tiny_llama, tmp_path / "huge", seed=1, base_name="tiny", r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"]
    )
    tensors = {k: v * 1e25 for k, v in load_file(huge / "adapter_model.safetensors").items()}
    save_file(tensors, huge / "adapter_model.safetensors", {"format": "pt"})
    bank = AdapterBank(tiny.decoder.groups())
    bank.load("huge", read_adapter(huge, tiny.identity))
    bank.load("a0", read_adapter(tiny_adapters["a0"], tiny.identity))
    server = Server(tiny, bank, Limits(4, 1 << 20))
    for _ in range(2):
        bad, good, base = (
            ask(server, PROMPTS[2], "huge"),
            ask(server, PROMPTS[2], "a0"),
            ask(server, PROMPTS[2]),
        )
        finish(server)
        assert "not finite" in bad.error
        assert good.text[0] == tiny.tokenizer.decode(references["a0", 2], skip_special=True)
        assert base.text[0] == tiny.tokenizer.decode(references[None, 2], skip_special=True)


def edit_config(adapter: Path, target: Path, **changes) -> Path:
    target.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    (target / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    return target


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj", "w_pack"]}, "'w_pack' is no adaptable layer"),
        ({"target_modules": ["q_proj"]}, "target_modules doesn't select"),
        ({"base_model_name_or_path": "meta/Llama-9"}, "is for the base model 'meta/Llama-9'"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"r": 8}, "has shape"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"some_new_method": {"x": 1}}, "some_new_method"),
        ({"rank_pattern": {"(a+)+": 3}}, "repeats a group"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_dropout": "x"}, "lora_dropout"),
        ({"rank_pattern": {"q_proj": 10**400}}, "rank_pattern"),
    ],
)
def test_the_gate_refuses_what_would_not_be_applied(tiny, tiny_adapters, tmp_path, changes, reason):
    with pytest.raises(Invalid) as caught:
        read_adapter(edit_config(tiny_adapters["a0"], tmp_path / "x", **changes), tiny.identity)
    assert reason in str(caught.value)
    assert caught.value.code == "adapter_refused"


def test_the_gate_lists_every_reason_and_opens_no_pickle(tiny, tiny_adapters, tmp_path):
    folder = edit_config(tiny_adapters["a0"], tmp_path / "x", base_model_name_or_path="other")
    tensors = load_file(folder / "adapter_model.safetensors")
    first = next(iter(tensors))
    del tensors[first]
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 48)
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude"] = torch.zeros(4)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(Invalid) as caught:
        read_adapter(folder, tiny.identity)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    for part in ("base model 'other'", "lm_head", "lora_magnitude", "has no lora_A"):
        assert part in text
    save_file(
        {k: v * float("nan") for k, v in load_file(tiny_adapters["a0"] / "adapter_model.safetensors").items()},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_bytes((tiny_adapters["a0"] / "adapter_config.json").read_bytes())
    with pytest.raises(Invalid, match="not finite"):
        read_adapter(folder, tiny.identity)
    (folder / "adapter_model.safetensors").write_bytes(b"\x10")
    with pytest.raises(Invalid, match="not a complete safetensors"):
        read_adapter(folder, tiny.identity)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(Invalid, match="pickle"):
        read_adapter(folder, tiny.identity)


def test_version_depends_on_what_decides_the_result_only(tiny, tiny_adapters, tmp_path):
    original = read_adapter(tiny_adapters["a0"], tiny.identity).version
    same = edit_config(tiny_adapters["a0"], tmp_path / "same", lora_dropout=0.3, inference_mode=False)
    assert read_adapter(same, tiny.identity).version == original
    other = edit_config(tiny_adapters["a0"], tmp_path / "alpha", lora_alpha=65)
    assert read_adapter(other, tiny.identity).version != original
    tensors = load_file(same / "adapter_model.safetensors")
    tensors[next(iter(tensors))][0, 0] += 1e-6
    save_file(tensors, same / "adapter_model.safetensors")
    assert read_adapter(same, tiny.identity).version != original


def test_one_engine_serves_while_it_trains(tiny, tiny_adapters, references, tmp_path):
    """Both kinds of work go through one loop on one base: answers are right, and the job ends as if alone."""
    from .test_training import largest_difference, request_of, run, spec_of, weights

    alone = request_of("job", tmp_path / "alone", spec_of(lora={"dropout": 0.1}))
    run(tiny, [alone])
    engine = Engine(tiny, limits=Limits(8, 1 << 24), micro_batch_tokens=256)
    engine.start()
    engine.load_adapter("a0", tiny_adapters["a0"], in_place=False)
    beside = request_of("job", tmp_path / "beside", spec_of(lora={"dropout": 0.1}))
    engine.train([beside])
    texts = []
    while engine.trainer.records["job"].live:
        done = threading.Event()
        pieces: list = []

        def emit(piece, pieces=pieces, done=done):
            pieces.append(piece)
            if piece.finish_reason or piece.error:
                done.set()

        engine.generate(GenerationRequest(tuple(PROMPTS[0]), "a0", GREEDY, 6, 1, (), frozenset(), emit))
        assert done.wait(60)
        texts.append("".join(p.text for p in pieces))
    engine.stop()
    assert set(texts) == {tiny.tokenizer.decode(references["a0", 0], skip_special=True)}
    assert engine.trainer.records["job"].state == "succeeded"
    assert largest_difference(weights(alone), weights(beside)) == 0.0


def test_a_pass_left_in_its_middle_for_requests_gives_the_same_bits(tiny, tiny_adapters, references, tmp_path):
    """Serving steps between the layers of a pass, forward and back, with dropout; nothing of the job moves."""
    from .test_training import largest_difference, losses, request_of, run, spec_of, weights

    alone = request_of("job", tmp_path / "alone", spec_of(lora={"dropout": 0.1}))
    expected = losses(run(tiny, [alone]), "job")
    engine = Engine(tiny, limits=Limits(8, 1 << 24), micro_batch_tokens=256)
    engine.bank.load("a0", read_adapter(tiny_adapters["a0"], tiny.identity))
    beside = request_of("job", tmp_path / "beside", spec_of(lora={"dropout": 0.1}))
    engine.trainer.submit([beside])
    sinks, pauses = [], []

    def pause() -> None:
        pauses.append(1)
        if len(pauses) % 7 == 0:
            sinks.append(ask(engine.server, PROMPTS[2], "a0"))
        if engine.server.has_work:
            engine.server.step()

    engine.trainer.between_layers = pause
    while engine.trainer.records["job"].live:
        engine.trainer.advance()
    finish(engine.server)
    groups = len(tiny.decoder.groups())
    assert len(pauses) == len(expected) * (2 * groups - 1), "each group forward, and back but for the first"
    assert losses(engine.trainer, "job") == expected
    assert largest_difference(weights(alone), weights(beside)) == 0.0
    assert {s.text[0] for s in sinks} == {tiny.tokenizer.decode(references["a0", 2], skip_special=True)}


def test_a_request_does_not_wait_for_the_end_of_a_pass(smollm2, smollm2_folder, tmp_path):
    """The first token beside a pass of seconds comes sooner than the pass ends, and adapters load meanwhile."""
    from .test_training import request_of, spec_of

    engine = Engine(smollm2, limits=Limits(8, 1 << 26), micro_batch_tokens=4096)
    passes, advance = [], engine.trainer.advance

    def timed() -> None:
        started = time.monotonic()
        advance()
        passes.append(time.monotonic() - started)

    engine.trainer.advance = timed  # type: ignore[method-assign]
    spec = spec_of(n_epochs=1, batch_size=32, seq_len=128, lora={"rank": 8})
    engine.train([request_of("job", tmp_path / "job", spec, rows=32)])
    in_pass = threading.Event()
    between = engine._between_layers

    def watched() -> None:
        in_pass.set()
        between()

    engine.trainer.between_layers = watched
    engine.start()
    assert in_pass.wait(120)
    started, done = time.monotonic(), threading.Event()
    engine.generate(GenerationRequest((40, 41, 42), None, GREEDY, 1, 1, (), frozenset(), lambda piece: done.set()))
    assert done.wait(120)
    waited, in_passes = time.monotonic() - started, len(passes)
    while engine.trainer.records["job"].live:
        time.sleep(0.05)
    engine.stop()
    assert waited < 0.5 * passes[in_passes], "an answer came out of the middle of the pass that was under way"


def test_a_step_that_raises_ends_its_answers_and_no_others(tiny, monkeypatch):
    engine = Engine(tiny, limits=Limits(1, 1 << 24), micro_batch_tokens=256)
    real, calls = engine.server._forward, []

    def failing(prompts, decodes):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken step")
        return real(prompts, decodes)

    monkeypatch.setattr(engine.server, "_forward", failing)
    first, second = ask(engine.server, PROMPTS[0]), ask(engine.server, PROMPTS[1])
    engine.start()
    for _ in range(600):
        if second.reason:
            break
        threading.Event().wait(0.05)
    engine.stop()
    assert first.error == "RuntimeError: broken step"
    assert second.reason == {0: "length"}
    assert engine.server.cache.used_bytes == 0
