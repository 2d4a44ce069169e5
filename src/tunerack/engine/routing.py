"""What the routers of a pass decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Routing:
    """Per layer with experts: probabilities [tokens, experts] fp32 and chosen [tokens, top_k]."""

    probabilities: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)

    def add(self, probabilities: Tensor, chosen: Tensor) -> None:
        self.probabilities.append(probabilities)
        self.chosen.append(chosen)
