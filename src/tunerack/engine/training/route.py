"""The route of a training pass: each job's rows go through that job's adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunerack.engine.experts import ExpertLora, Experts, ExpertUpdate, StackedLinear, apply_experts
from tunerack.engine.linear import AdaptableLinear, TrainedLinear, Update, UpdatePart, dense
from tunerack.engine.magnitude import dropped_update, rescale, row_norms
from tunerack.engine.training.dropout import keep_mask
from tunerack.engine.training.parameters import AdaptedGroup, AdapterParameters
from tunerack.engine.training.pause import Pause, PauseBefore


@dataclass(frozen=True)
class Document:
    """One row of a job in one optimizer step.

    row: position in the step's batch; targets[i] is the token after tokens[i], weights[i] the weight of its loss.
    Tokens after the last weighted target are left out: nothing depends on them.
    """

    row: int
    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, row: int, ids: Sequence[int], weights: Sequence[float]) -> Document:
        last = max(i for i, weight in enumerate(weights) if weight)
        return cls(row, tuple(ids[:last]), tuple(ids[1 : last + 1]), tuple(weights[1 : last + 1]))


@dataclass(frozen=True)
class Segment:
    """The documents of one job in a micro-batch, which lie in rows [begin, end).

    dropout is 0 outside training.
    """

    parameters: AdapterParameters
    documents: tuple[Document, ...]
    begin: int
    end: int
    seed: int
    step: int
    dropout: float


class TrainingRoute:
    """Applies to each segment the adapter of its job; every row has one. `pause` is called before every group."""

    def __init__(self, segments: Sequence[Segment], pause: Pause | None = None) -> None:
        self.segments = tuple(segments)
        self.pause = pause

    def apply(self, group: AdaptableLinear, x: Tensor) -> Tensor:
        if self.pause is not None:
            x = PauseBefore.apply(x, self.pause)
        updates, parameters = [], []
        adapted = [segment.parameters.groups.get(group.index) for segment in self.segments]
        for segment, found in zip(self.segments, adapted, strict=True):
            if found is not None and not (found.has_magnitude and segment.dropout):
                updates.append(_update(segment, found, group))
                parameters += [found.a, *(p.b for p in found.projections)]
        y = TrainedLinear.apply(x, group.weight, group.bias, tuple(updates), *parameters) if updates else group.base(x)
        if not any(found is not None and found.has_magnitude for found in adapted):
            return y
        sizes = [segment.end - segment.begin for segment in self.segments]
        rows = zip(self.segments, adapted, x.split(sizes), y.split(sizes), strict=True)
        return torch.cat([_with_magnitude(s, found, group, xs, ys) for s, found, xs, ys in rows])

    def apply_experts(self, experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if self.pause is not None:
            x = PauseBefore.apply(x, self.pause)
        updates = []
        for segment in self.segments:
            gate_up, down = (_expert_lora(segment, layer, chosen.shape[1]) for layer in (experts.gate_up, experts.down))
            if gate_up is not None or down is not None:
                updates.append(ExpertUpdate(segment.begin, segment.end, gate_up, down))
        return apply_experts(experts, x, weights, chosen, updates)


def _with_magnitude(
    segment: Segment, adapted: AdaptedGroup | None, group: AdaptableLinear, x: Tensor, y: Tensor
) -> Tensor:
    """DoRA's output for the rows of one segment; y holds W·x + bias, and, without dropout, the update of LoRA."""
    if adapted is None or not adapted.has_magnitude:
        return y
    weight = dense(group.weight)
    factors = []
    for p in adapted.projections:
        assert p.magnitude is not None
        norms = row_norms(weight[p.begin : p.end], adapted.a[p.rank_begin : p.rank_end], p.b, p.scale)
        factors.append(p.magnitude / norms)
    if not segment.dropout:
        columns = [(p.begin, p.end, factor) for p, factor in zip(adapted.projections, factors, strict=True)]
        return rescale(group, y, columns)
    added, at = [], 0
    for p, factor in zip(adapted.projections, factors, strict=True):
        mask = _mask(segment, p.layer, group)
        a, kept = adapted.a[p.rank_begin : p.rank_end], 1 - segment.dropout
        update = dropped_update(x, weight[p.begin : p.end], a, p.b, factor, p.scale, mask, kept)
        added += [y.new_zeros(len(y), p.begin - at), update]
        at = p.end
    return y + torch.cat([*added, y.new_zeros(len(y), group.out_features - at)], -1)


def _expert_lora(segment: Segment, layer: StackedLinear, top_k: int) -> ExpertLora | None:
    """Dropout is drawn for each token and slot: which experts a token has depends on that token alone."""
    adapted = segment.parameters.groups.get(layer.index)
    if adapted is None:
        return None
    (projection,) = adapted.projections
    mask = None
    if segment.dropout > 0:
        mask = _mask(segment, projection.layer, layer, top_k).view(-1, layer.in_features)
    return ExpertLora(adapted.a, projection.b, projection.scale / (1 - segment.dropout), mask)


def _update(segment: Segment, adapted: AdaptedGroup, group: AdaptableLinear) -> Update:
    masks = None
    if segment.dropout > 0:
        masks = tuple(_mask(segment, p.layer, group) for p in adapted.projections)
    kept = 1 - segment.dropout
    parts = tuple(
        UpdatePart(p.begin, p.end, p.rank_begin, p.rank_end, p.scale / kept, p.b) for p in adapted.projections
    )
    return Update(segment.begin, segment.end, adapted.a, parts, masks)


def _mask(segment: Segment, layer: int, group: AdaptableLinear, copies: int = 1) -> Tensor:
    masks = [
        keep_mask(
            seed=segment.seed,
            step=segment.step,
            row=document.row,
            layer=layer,
            shape=(len(document.tokens), copies * group.in_features),
            p=segment.dropout,
        )
        for document in segment.documents
    ]
    return torch.cat(masks).to(group.weight.device)
