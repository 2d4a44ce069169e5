"""The mixture-of-experts feed-forward: a router gives each token a few experts and their weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tunerack.engine.blocks import Pass
from tunerack.engine.experts import Experts, apply_experts
from tunerack.engine.linear import AdaptableLinear


@dataclass(frozen=True)
class MoeFeedForward:
    """Softmax over all experts, the top_k of them, their weights made to sum to 1 where `renormalise` says so
    (Mixtral, arXiv 2401.04088, section 2.1)."""

    router: AdaptableLinear
    experts: Experts
    top_k: int
    renormalise: bool

    def __call__(self, x: Tensor, given: Pass) -> Tensor:
        probabilities = self.router(x, given.route).float().softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, -1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if given.routing is not None:
            given.routing.add(probabilities, chosen)
        if given.route is None:
            return apply_experts(self.experts, x, weights, chosen, ())
        return given.route.apply_experts(self.experts, x, weights, chosen)

    def groups(self) -> list[AdaptableLinear]:
        return [self.router, self.experts.gate_up, self.experts.down]
