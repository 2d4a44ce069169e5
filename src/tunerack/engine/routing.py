"""What the routers of a pass decided: the balancing loss, and how the experts are used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Routing:
    """Per layer with experts: probabilities [tokens, experts] fp32 and chosen [tokens, top_k]."""

    probabilities: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)

    def add(self, probabilities: Tensor, chosen: Tensor) -> None:
        self.probabilities.append(probabilities)
        self.chosen.append(chosen)

    def balance(self, documents: Tensor, n_documents: int) -> Tensor:
        """The load-balancing loss of each document [n_documents]; documents [tokens] says whose each token is.

        Switch Transformer's equations 4 to 6 (Fedus et al., arXiv 2101.03961) in transformers' form: over the tokens
        of all layers, E · Σ_e f_e · P_e with f_e the choices of expert e per token and P_e its mean probability. It is
        taken document by document, because a product of two means over a batch would depend on who is in the batch.
        """
        probabilities = torch.stack(self.probabilities).sum(0)
        choices = torch.zeros_like(probabilities)
        for chosen in self.chosen:
            choices.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=choices.dtype))
        n_experts = probabilities.shape[1]
        zeros = probabilities.new_zeros(n_documents, n_experts)
        rows = len(self.chosen) * torch.bincount(documents, minlength=n_documents)[:, None]
        mean_choices = zeros.index_add(0, documents, choices) / rows
        mean_probability = zeros.index_add(0, documents, probabilities) / rows
        return n_experts * (mean_choices * mean_probability).sum(1)

    @torch.no_grad()
    def loads(self, begin: int, end: int) -> Loads:
        """Of the tokens [begin, end)."""
        choices, entropy = [], []
        for probabilities, chosen in zip(self.probabilities, self.chosen, strict=True):
            part = probabilities[begin:end]
            choices.append(torch.bincount(chosen[begin:end].flatten(), minlength=part.shape[1]))
            entropy.append(torch.special.entr(part).sum(dtype=torch.float64))
        return Loads(end - begin, torch.stack(choices).cpu(), torch.stack(entropy).cpu())


@dataclass(frozen=True)
class Loads:
    """How tokens were spread.

    choices: [layers, experts] int64; entropy_sum: Σ over tokens of the router's entropy, [layers], in nats
    """

    tokens: int
    choices: Tensor
    entropy_sum: Tensor

    def __add__(self, other: Loads) -> Loads:
        return Loads(self.tokens + other.tokens, self.choices + other.choices, self.entropy_sum + other.entropy_sum)

    def layers(self) -> list[LayerLoad]:
        """Layer by layer, for a report."""
        shares = self.choices.double() / self.choices.sum(1, keepdim=True)
        entropy = self.entropy_sum / self.tokens
        return [LayerLoad(tuple(share.tolist()), float(value)) for share, value in zip(shares, entropy, strict=True)]

    def summary(self) -> dict[str, float]:
        """Over all layers: mean and largest coefficient of variation, dead experts, mean entropy of the router."""
        layers = self.layers()
        return {
            "load_cv": round(sum(layer.variation for layer in layers) / len(layers), 4),
            "load_cv_max": round(max(layer.variation for layer in layers), 4),
            "dead_experts": sum(len(layer.dead) for layer in layers),
            "router_entropy": round(sum(layer.entropy for layer in layers) / len(layers), 4),
        }


@dataclass(frozen=True)
class LayerLoad:
    """share: of a layer's choices, each expert's; entropy: the router's mean over tokens, nats (at most ln experts)."""

    share: tuple[float, ...]
    entropy: float

    @property
    def variation(self) -> float:
        """Standard deviation of the shares over their mean; 0 when all experts are used alike."""
        mean = 1 / len(self.share)
        return math.sqrt(sum((share - mean) ** 2 for share in self.share) / len(self.share)) / mean

    @property
    def dead(self) -> tuple[int, ...]:
        """Experts that no token chose."""
        return tuple(expert for expert, share in enumerate(self.share) if share == 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "load": [round(share, 5) for share in self.share],
            "variation": round(self.variation, 4),
            "dead": list(self.dead),
            "entropy": round(self.entropy, 4),
        }


def document_indices(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[tokens], of documents that lie one after another."""
    return torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))
