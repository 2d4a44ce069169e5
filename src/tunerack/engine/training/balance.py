"""The load-balancing loss of a training pass, and how each job's tokens were spread over the experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tunerack.engine.routing import Loads, Routing, document_indices
from tunerack.engine.training.route import Document


@dataclass(frozen=True)
class JobRouting:
    """A job's part of a pass, or of many passes added up: its balancing loss and its tokens' experts."""

    balance_loss: float
    loads: Loads

    def __add__(self, other: JobRouting) -> JobRouting:
        return JobRouting(self.balance_loss + other.balance_loss, self.loads + other.loads)


def balance(
    routing: Routing, batch: Mapping[str, tuple[Document, ...]], denominators: Mapping[str, float]
) -> tuple[Tensor, dict[str, JobRouting]]:
    """The scalar to differentiate, before the coefficient, and each job's part of it.

    A row's balancing loss counts as its trained tokens do: Σ over rows of (the row's weights / the weights of the
    job's whole step) · loss of the row. So neither the split into micro-batches nor a neighbour shows in it.
    """
    rows = [(name, document) for name, documents in batch.items() for document in documents]
    device = routing.chosen[0].device
    lengths = [len(document.tokens) for _, document in rows]
    shares = torch.tensor([sum(document.weights) / denominators[name] for name, document in rows], device=device)
    weighted = routing.balance(document_indices(lengths, device), len(rows)) * shares
    found: dict[str, JobRouting] = {}
    row = token = 0
    for name, documents in batch.items():
        end = token + sum(len(document.tokens) for document in documents)
        loss = float(weighted.detach()[row : row + len(documents)].sum())
        found[name] = JobRouting(loss, routing.loads(token, end))
        row, token = row + len(documents), end
    return weighted.sum(), found
