"""The bar of a trainer of many adapters: splits and packing do not show, neighbours do not show, served is trained.

docs/explain/training-bar.md names the test of each item.
"""

from __future__ import annotations

import pytest
import torch

from tunerack.engine.adapter_file import read_adapter
from tunerack.engine.attention import DocumentAttention
from tunerack.engine.serving.answer import GenerationRequest
from tunerack.engine.serving.bank import AdapterBank
from tunerack.engine.serving.sampling import SamplingParams
from tunerack.engine.serving.server import Limits, Server
from tunerack.engine.training.microbatch import pack, run_pass
from tunerack.engine.training.record import JobRecord, build_job
from tunerack.engine.training.route import Document
from tunerack.engine.training.trainer import Trainer
from tunerack.methods.lora import LoraConfig, read_peft_config

from .test_training import largest_difference, losses, request_of, run, spec_of, weights


def built(base, request):
    return build_job(request, base, JobRecord(request))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_loss_and_gradient_do_not_depend_on_the_split(tiny, tmp_path, dropout):
    """One pass, a few, or one for each row, and the step in two processes' halves: equal to 1e-6 of the largest."""
    job = built(tiny, request_of("a", tmp_path, spec_of(batch_size=8, lora={"dropout": dropout})))
    for group in job.parameters.groups.values():
        for projection in group.projections:
            projection.b.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(projection.layer))
    documents = {"a": job.documents()}
    denominators = {"a": sum(sum(d.weights) for d in documents["a"])}

    def step(batches) -> tuple[float, torch.Tensor]:
        job.parameters.gradients.zero_()
        loss = 0.0
        for batch in batches:
            result = run_pass(tiny.decoder, batch, {"a": job}, denominators=denominators, training=True)
            loss += result.weighted_loss["a"]
        return loss / denominators["a"], job.parameters.gradients.clone()

    loss, gradient = step(pack(documents, 4096))
    halves = [{"a": documents["a"][i::2]} for i in range(2)]
    splits = {"few": pack(documents, 100), "each": pack(documents, 1), "halves": halves}
    assert {name: len(batches) for name, batches in splits.items()}["each"] == 8
    for name, batches in splits.items():
        other, change = step(batches)
        assert other == pytest.approx(loss, rel=1e-6), name
        assert float((change - gradient).abs().max()) <= 1e-6 * float(gradient.abs().max()), name


def test_the_last_short_step_of_an_epoch_is_normalised_by_itself(tiny, tmp_path):
    """8 rows in steps of 3: the third has 2 rows, and its loss is the mean over the tokens of those two."""
    job = built(tiny, request_of("a", tmp_path, spec_of(batch_size=3)))
    job.step = 2
    rows = job.documents()
    assert len(rows) == 2
    each = [
        run_pass(tiny.decoder, {"a": (row,)}, {"a": job}, denominators={"a": 1.0}, training=False).weighted_loss["a"]
        for row in rows
    ]
    by_hand = sum(each) / sum(sum(row.weights) for row in rows)
    request = request_of("b", tmp_path, spec_of(batch_size=3, n_epochs=1, learning_rate=1e-30))
    assert losses(run(tiny, [request]), "b")[2] == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_packed_logits_equal_those_of_separate_passes(family, tiny_folder):
    from tunerack.engine.base import load_base

    base = load_base(tiny_folder(family), name="tiny")
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, 49000, (n,), generator=generator) for n in (1, 37, 5, 64, 2)]

    def logits(parts: list[torch.Tensor]) -> torch.Tensor:
        positions = torch.cat([torch.arange(len(part)) for part in parts])
        attention = DocumentAttention([len(part) for part in parts])
        return base.decoder.logits(base.decoder.hidden(torch.cat(parts), positions, attention, None))

    with torch.inference_mode():
        together = logits(documents)
        alone = torch.cat([logits([document]) for document in documents])
    assert float((together - alone).abs().max()) <= 1e-5 * float(alone.abs().max())


@pytest.mark.parametrize(("dropout", "rank"), [(0.1, 4), (0.5, 64)])
def test_taking_turns_changes_no_bit(tiny, tmp_path, dropout, rank):
    """Two trainers on one base, one unit of work each in turn: each ends as if the other were not there."""
    mine = spec_of(lora={"dropout": dropout, "rank": rank})
    other = spec_of(batch_size=2, n_epochs=1, seed=9, learning_rate=1e-2, lora={"rank": 16, "dropout": 0.3})
    alone = [request_of("a", tmp_path / "alone", mine), request_of("b", tmp_path / "alone", other, seed=5)]
    for request in alone:
        run(tiny, [request])
    turns = [request_of("a", tmp_path / "turns", mine), request_of("b", tmp_path / "turns", other, seed=5)]
    trainers = [Trainer(tiny, micro_batch_tokens=256) for _ in turns]
    for trainer, request in zip(trainers, turns, strict=True):
        trainer.submit([request])
    while any(trainer.has_work for trainer in trainers):
        for trainer in trainers:
            if trainer.has_work:
                trainer.advance()
    for one, two in zip(alone, turns, strict=True):
        assert largest_difference(weights(one), weights(two)) == 0.0


@pytest.mark.parametrize(("dropout", "rank"), [(0.1, 4), (0.1, 64), (0.5, 4), (0.5, 64)])
def test_neighbours_that_leave_fail_or_go_wild_do_not_show(tiny, tmp_path, dropout, rank):
    """Beside a job that is cancelled, one whose loss becomes NaN, and one of another rank that stays: 1e-5.

    At a usual learning rate: Adam lets rounding noise move a weight by a share of it (docs/explain/training-bar.md).
    """
    mine = spec_of(learning_rate=1e-3, lora={"dropout": dropout, "rank": rank})
    alone = request_of("m", tmp_path / "alone", mine)
    single = run(tiny, [alone])
    beside = request_of("m", tmp_path / "beside", mine)
    wild = spec_of(learning_rate=1e30, lr_schedule="constant", warmup_steps=0, seed=4)
    stays = spec_of(n_epochs=3, batch_size=2, seed=6, lora={"rank": 68 - rank, "dropout": 0.2})
    trainer = Trainer(tiny, micro_batch_tokens=200)
    trainer.submit(
        [
            beside,
            request_of("leaves", tmp_path / "beside", spec_of(seed=8), seed=3),
            request_of("stays", tmp_path / "beside", stays, seed=4),
            request_of("wild", tmp_path / "beside", wild, seed=2),
        ]
    )
    while trainer.has_work:
        trainer.advance()
        if trainer.records["leaves"].step == 2:
            trainer.cancel("leaves")
    states = {name: record.state for name, record in trainer.records.items()}
    assert states == {"m": "succeeded", "leaves": "cancelled", "stays": "succeeded", "wild": "failed"}
    assert trainer.records["wild"].failure.code == "non_finite_loss"
    assert losses(trainer, "m") == pytest.approx(losses(single, "m"), abs=1e-5)
    assert largest_difference(weights(alone), weights(beside)) < 1e-5


def test_served_log_probabilities_are_the_trainers(tiny, tmp_path):
    """An answer that the server gives, with the log-probability of each token, scored again as a training row."""
    specs = {"a": spec_of(lora={"rank": 8}), "b": spec_of(seed=11, lora={"rank": 4, "use_rslora": True})}
    requests = [request_of(name, tmp_path, spec, seed=i) for i, (name, spec) in enumerate(specs.items())]
    run(tiny, requests)
    bank = AdapterBank(tiny.decoder.groups())
    server = Server(tiny, bank, Limits(8, 1 << 24))
    prompt = tuple(range(60, 90))
    served: dict[str, list] = {}
    for request in requests:
        bank.load(request.job_id, read_adapter(request.directory / "adapter", tiny.identity))
        pieces = served.setdefault(request.job_id, [])
        params = SamplingParams(temperature=1.0, seed=5, logprobs=0)
        asked = GenerationRequest(prompt, request.job_id, params, 12, 1, (), frozenset(), pieces.append)
        server.submit(asked)
    while server.has_work:
        server.step()
    for request in requests:
        found = [piece.logprob for piece in served[request.job_id] if piece.logprob is not None]
        assert len(found) == 12
        job = built(tiny, request)
        job.parameters.load(_stored(request))
        ids = (*prompt, *(item.token for item in found))
        scores = []
        for i in range(len(prompt), len(ids)):
            row = Document.of(0, ids[: i + 1], (0.0,) * i + (1.0,))
            result = run_pass(tiny.decoder, {"x": (row,)}, {"x": job}, denominators={"x": 1.0}, training=False)
            scores.append(-result.weighted_loss["x"])
        assert [item.logprob for item in found] == pytest.approx(scores, abs=1e-4)
    assert served["a"][3].logprob != served["b"][3].logprob


def _stored(request) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(request.directory / "adapter" / "adapter_model.safetensors")


def test_one_scale_for_training_serving_and_merging(tiny, tmp_path):
    """The factor of B·A: the trainer's, the bank's, and PEFT's own of the file, with rank and alpha by pattern."""
    import peft

    pattern = {"down_proj": 2}
    for rslora in (False, True):
        lora = {"rank": 8, "alpha": 12.0, "use_rslora": rslora, "rank_pattern": pattern, "alpha_pattern": {"q_proj": 5}}
        request = request_of(f"r{rslora}", tmp_path, spec_of(max_steps=1, n_epochs=1, lora=lora))
        run(tiny, [request])
        folder = request.directory / "adapter"
        read = read_adapter(folder, tiny.identity)
        config = peft.PeftConfig.from_pretrained(str(folder))
        job = built(tiny, request)
        trained = {p.module: p.scale for group in job.parameters.groups.values() for p in group.projections}
        assert isinstance(read.config, LoraConfig)
        assert read_peft_config(config.to_dict() | {"peft_type": "LORA"}).use_rslora == rslora
        for module, lora_of in read.modules.items():
            rank = 2 if module.endswith("down_proj") else config.r
            alpha = 5 if module.endswith("q_proj") else config.lora_alpha
            expected = alpha / rank**0.5 if rslora else alpha / rank
            assert lora_of.scale == pytest.approx(expected)
            assert trained[module] == pytest.approx(expected)
