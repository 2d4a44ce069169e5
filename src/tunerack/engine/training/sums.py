"""What the passes of one joint step or evaluation add up to, per job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunerack.engine.training.balance import JobRouting


@dataclass
class Sums:
    """Per job, over the passes of one joint step or evaluation."""

    loss: dict[str, float]
    denominator: dict[str, float]
    tokens: dict[str, int]
    routing: dict[str, JobRouting] = field(default_factory=dict)

    @classmethod
    def of(cls, documents: Mapping[str, Sequence[object]]) -> Sums:
        zero = dict.fromkeys(documents, 0.0)
        return cls(dict(zero), dict(zero), dict.fromkeys(documents, 0))
