"""What a job will take on this engine: exact counts from its data, time from passes measured here."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tunerack.engine.attention import DocumentAttention
from tunerack.engine.base import BaseModel
from tunerack.engine.kernels import TokenLoss
from tunerack.engine.loop import Engine
from tunerack.engine.training.microbatch import LOSS_CHUNK_ROWS
from tunerack.engine.training.parameters import AdapterParameters
from tunerack.engine.training.record import prepare_data
from tunerack.engine.training.route import Document, Segment, TrainingRoute
from tunerack.estimate.plan import Rate, plan
from tunerack.methods.lora import LoraConfig
from tunerack.spec.job import JobSpec, LoraSpec

_PROBE_TOKENS = (64, 320)
_DOCUMENT_TOKENS = 64
_TRAINED_SHARE = 3
_RATES: dict[str, Rate] = {}


def plan_job(engine: Engine, spec: JobSpec, training: Path, validation: Path | None) -> dict[str, Any]:
    """Counts, resolved spec and predicted time of a job; raises Invalid with all that is wrong with its data."""
    base = engine.base
    dataset, _, resolved = prepare_data(spec, training, validation, base, now=datetime.now(UTC))
    lengths = [len(example.ids) for example in dataset.examples]
    trained = [example.trained_tokens for example in dataset.examples]
    predicted = plan(resolved, lengths=lengths, trained=trained, rate=_rate(engine))
    config = LoraConfig.from_spec(resolved.lora, base_model=base.adapter_base_name)
    parameters = sum(
        lora.rank * sum(base.identity.modules[module]) for module, lora in config.select(base.identity.modules).items()
    )
    return {
        "spec": resolved.to_json(),
        "report": dataset.report.to_json(),
        "tokens_per_epoch": dataset.tokens,
        "trained_tokens_per_epoch": dataset.trained_tokens,
        "longest": dataset.longest,
        "steps": predicted.steps,
        "total_tokens": predicted.tokens,
        "predicted_s": predicted.predicted_s.to_json(),
        "trainable_parameters": parameters,
    }


def _rate(engine: Engine) -> Rate:
    fingerprint = engine.base.identity.fingerprint
    if fingerprint not in _RATES:
        _RATES[fingerprint] = engine.call(lambda: measure_rate(engine.base))
    return _RATES[fingerprint]


def measure_rate(base: BaseModel) -> Rate:
    """Seconds of an optimizer step = α + β · tokens, from two sizes of real passes with a throwaway adapter."""
    config = LoraConfig.from_spec(LoraSpec(), base_model=base.name)
    parameters = AdapterParameters(config, base.decoder.groups(), seed=0)
    times = [min(_timed_pass(base, parameters, tokens) for _ in range(2)) for tokens in _PROBE_TOKENS]
    beta = max(1e-9, (times[1] - times[0]) / (_PROBE_TOKENS[1] - _PROBE_TOKENS[0]))
    alpha = max(0.0, times[0] - beta * _PROBE_TOKENS[0])
    return Rate(alpha, beta, "calibrated here")


def _timed_pass(base: BaseModel, parameters: AdapterParameters, tokens: int) -> float:
    ids = tuple(range(10, 10 + _DOCUMENT_TOKENS))
    weights = tuple(float(i % _TRAINED_SHARE == 0) for i in range(_DOCUMENT_TOKENS))
    documents = tuple(Document(row, ids, ids, weights) for row in range(tokens // _DOCUMENT_TOKENS))
    segment = Segment(parameters, documents, 0, tokens, 0, 0, 0.0)
    decoder = base.decoder
    flat = torch.tensor(ids * len(documents), device=decoder.device)
    positions = torch.arange(_DOCUMENT_TOKENS, device=decoder.device).repeat(len(documents))
    chosen = torch.tensor(weights * len(documents), device=decoder.device).nonzero()[:, 0]
    started = time.perf_counter()
    attention = DocumentAttention([_DOCUMENT_TOKENS] * len(documents))
    hidden = decoder.hidden(flat, positions, attention, TrainingRoute([segment]))
    ones = torch.ones(len(chosen), device=decoder.device)
    total, _ = TokenLoss.apply(hidden[chosen], decoder.head, flat[chosen], ones, LOSS_CHUNK_ROWS)
    total.backward()
    return time.perf_counter() - started
