"""How long a training step takes here, measured before the first job."""

from __future__ import annotations

import time

import torch

from tunerack.engine.attention import DocumentAttention
from tunerack.engine.base import BaseModel
from tunerack.engine.kernels import TokenLoss
from tunerack.engine.training.microbatch import LOSS_CHUNK_ROWS
from tunerack.engine.training.parameters import AdapterParameters
from tunerack.engine.training.route import Document, Segment, TrainingRoute
from tunerack.estimate.plan import Rate
from tunerack.spec.job import LoraSpec

_PROBE_TOKENS = (64, 320)
_DOCUMENT_TOKENS = 64
_TRAINED_SHARE = 3


def measure_rate(base: BaseModel) -> Rate:
    """Seconds of an optimizer step = α + β · tokens, from two sizes of real passes with a throwaway adapter."""
    config = base.lora(LoraSpec())
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
