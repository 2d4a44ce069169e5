"""Which documents share a pass, and the pass itself."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tunerack.engine.attention import DocumentAttention
from tunerack.engine.decoder import Decoder
from tunerack.engine.kernels import TokenLoss
from tunerack.engine.routing import Routing
from tunerack.engine.training.balance import JobRouting, balance
from tunerack.engine.training.pause import Pause
from tunerack.engine.training.route import Document, Segment, TrainingRoute

if TYPE_CHECKING:
    from tunerack.engine.training.job import TrainingJob

LOSS_CHUNK_ROWS = 256

MicroBatch = Mapping[str, tuple[Document, ...]]


def pack(documents: Mapping[str, Sequence[Document]], budget_tokens: int) -> list[MicroBatch]:
    """Put the documents of all jobs into few micro-batches of at most `budget_tokens`: best-fit decreasing.

    Each document, longest first, goes where the least room is left over. A document longer than the budget gets a
    micro-batch of its own. The result depends on the arguments alone; inside a micro-batch the documents lie job by job
    (in the order of the names), then by row.
    """
    flat = [(job, document) for job, rows in documents.items() for document in rows]
    flat.sort(key=lambda item: (-len(item[1].tokens), item[0], item[1].row))
    bins: list[list[tuple[str, Document]]] = [[] for _ in range(len(flat))]
    places = best_fit([len(document.tokens) for _, document in flat], budget_tokens)
    for place, item in zip(places, flat, strict=True):
        bins[place].append(item)
    return [_by_job(content) for content in bins if content]


def best_fit(sizes: Sequence[int], room: int) -> list[int]:
    """The bin of each size, in their order: the fullest of those (opened first among equals) that still have room.

    A size above `room` opens a bin that takes nothing else. n · log n for bins that are found by bisection.
    """
    left: list[tuple[int, int]] = []  # (room left, bin), sorted
    places = []
    opened = 0
    for size in sizes:
        at = bisect.bisect_left(left, (size, 0))
        if at < len(left):
            free, place = left.pop(at)
            rest = free - size
        else:
            place, rest = opened, room - size
            opened += 1
        if rest > 0:
            bisect.insort(left, (rest, place))
        places.append(place)
    return places


def _by_job(content: list[tuple[str, Document]]) -> MicroBatch:
    result: dict[str, list[Document]] = {}
    for job, document in sorted(content, key=lambda item: (item[0], item[1].row)):
        result.setdefault(job, []).append(document)
    return {job: tuple(documents) for job, documents in result.items()}


@dataclass(frozen=True)
class PassResult:
    """Per job: Σ weight · loss and tokens of the pass; on a base with experts, how it used them."""

    weighted_loss: Mapping[str, float]
    tokens: Mapping[str, int]
    routing: Mapping[str, JobRouting] = field(default_factory=dict)


def run_pass(
    decoder: Decoder,
    batch: MicroBatch,
    jobs: Mapping[str, TrainingJob],
    *,
    denominators: Mapping[str, float],
    training: bool,
    pause: Pause | None = None,
) -> PassResult:
    """One forward pass over a micro-batch, and, when training, one backward pass that adds to each job's gradients.

    Each job's loss is Σ weight · loss / denominator, where the denominator counts its whole optimizer step: the split
    into micro-batches does not show in the sum. On a base with experts the balancing loss is added, with the model's
    own coefficient.
    """
    segments, begin = [], 0
    for name, rows in batch.items():
        job, end = jobs[name], begin + sum(len(d.tokens) for d in rows)
        dropout = job.spec.lora.dropout if training else 0.0
        segments.append(Segment(job.parameters, rows, begin, end, job.spec.seed, job.step, dropout))
        begin = end
    documents = [d for rows in batch.values() for d in rows]
    tokens = torch.tensor([t for d in documents for t in d.tokens], device=decoder.device)
    positions = torch.cat([torch.arange(len(d.tokens)) for d in documents]).to(decoder.device)
    weights = torch.tensor([w for d in documents for w in d.weights], dtype=torch.float32, device=decoder.device)
    targets = torch.tensor([t for d in documents for t in d.targets], device=decoder.device)
    owners = torch.cat([torch.full((s.end - s.begin,), i) for i, s in enumerate(segments)]).to(decoder.device)
    chosen = weights.nonzero()[:, 0]
    per_job = torch.tensor([1 / denominators[name] for name in batch], device=decoder.device)
    experts = decoder.architecture.experts
    routing = None if experts is None else Routing()
    with torch.set_grad_enabled(training):
        attention = DocumentAttention([len(d.tokens) for d in documents])
        hidden = decoder.hidden(tokens, positions, attention, TrainingRoute(segments, pause), routing)
        total, losses = TokenLoss.apply(
            hidden[chosen],
            decoder.head,
            targets[chosen],
            (weights * per_job[owners])[chosen],
            LOSS_CHUNK_ROWS,
        )
        used: dict[str, JobRouting] = {}
        if routing is not None and experts is not None:
            balancing, used = balance(routing, batch, denominators)
            total = total + experts.balance_coefficient * balancing
        if training:
            total.backward()
    sums = torch.zeros(len(segments), dtype=torch.float64)
    sums.index_add_(0, owners[chosen].cpu(), (losses * weights[chosen]).double().cpu())
    return PassResult(
        dict(zip(batch, sums.tolist(), strict=True)),
        {name: s.end - s.begin for name, s in zip(batch, segments, strict=True)},
        used,
    )
