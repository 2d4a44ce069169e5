"""The mixture of experts of BlackMamba (Anthony et al., arXiv 2402.01771): each expert's weight stands for itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tunerack.engine.blocks import Pass
from tunerack.engine.experts import Experts, apply_experts
from tunerack.engine.linear import AdaptableLinear


@dataclass(frozen=True)
class SwitchFeedForward:
    """Σ over the top_k experts e of σ(router_e x) · e(x); with top_k 1 as published: the best expert times its weight.

    The sigmoids are neither made to sum to 1 nor balanced by a loss; what is collected about the routing are their
    shares.
    """

    router: AdaptableLinear
    experts: Experts
    top_k: int

    def __call__(self, x: Tensor, given: Pass) -> Tensor:
        scores = self.router(x, given.route).float().sigmoid()
        weights, chosen = scores.topk(self.top_k, -1)
        if given.routing is not None:
            given.routing.add(scores / scores.sum(-1, keepdim=True), chosen)
        if given.route is None:
            return apply_experts(self.experts, x, weights, chosen, ())
        return given.route.apply_experts(self.experts, x, weights, chosen)

    def groups(self) -> list[AdaptableLinear]:
        return [self.router, self.experts.gate_up, self.experts.down]
