"""The peak of a real training step without its memory: the same code runs on fake tensors.

Fake tensors have shapes and types but no data. Every storage that an operation makes is counted from its birth until
nothing refers to it any more, which is when the real one would be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tunerack.engine.attention import DocumentAttention
from tunerack.engine.base import BaseModel
from tunerack.engine.decoder import Decoder
from tunerack.engine.experts import StackedLinear
from tunerack.engine.kernels import TokenLoss
from tunerack.engine.linear import AdaptableLinear, stored
from tunerack.engine.sample_jobs import Setting, jobs_of
from tunerack.engine.training.microbatch import LOSS_CHUNK_ROWS, pack
from tunerack.engine.training.parameters import AdapterParameters
from tunerack.engine.training.route import Segment, TrainingRoute
from tunerack.errors import Invalid

# What one kernel takes for itself, in copies of its input: log-sum-exp exponentiates into a buffer of its own.
WORKSPACE = {"aten::logsumexp": 1.0}


class Tally(TorchDispatchMode):
    """Counts the bytes of living storages; `highest` is their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 0
        self.highest = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Sequence[Any] = (), options: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*arguments, **(options or {}))
        workspace = WORKSPACE.get(operation._schema.name, 0.0)
        if workspace:
            self.highest = max(self.highest, self.used + round(workspace * _bytes(arguments[0])))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def count(self, tensor: Tensor) -> None:
        """A tensor that was there before."""
        self._count(tensor)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.used += size
        self.highest = max(self.highest, self.used)
        weakref.finalize(storage, self._freed(key, size))

    def _freed(self, key: int, size: int) -> Callable[[], None]:
        def freed() -> None:
            self.used -= size
            self._seen.discard(key)

        return freed


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def step_peak(base: BaseModel, setting: Setting, micro_batch_tokens: int) -> int:
    """Peak bytes of tensors in one optimizer step of `setting`, weights, adapters and moments included."""
    documents = {name: job.documents() for name, job in jobs_of(base, setting).items()}
    batches = pack(documents, micro_batch_tokens)
    config = base.lora(setting.lora)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, Tally() as tally:
        decoder = _fake_decoder(base.decoder, fake.from_tensor)
        adapters = {name: AdapterParameters(config, decoder.groups(), seed=0) for name in documents}
        moments = [torch.zeros(2 * len(one.values)) for one in adapters.values()]
        for tensor in _tensors(decoder):
            tally.count(tensor)
        for batch in batches:
            _fake_pass(decoder, batch, adapters, setting.lora.dropout)
        del moments
    return tally.highest


def _fake_pass(decoder: Decoder, batch: Any, adapters: dict[str, AdapterParameters], dropout: float) -> None:
    """As `run_pass`, without the bookkeeping that reads values."""
    segments, begin = [], 0
    for name, rows in batch.items():
        end = begin + sum(len(document.tokens) for document in rows)
        segments.append(Segment(adapters[name], rows, begin, end, 0, 0, dropout))
        begin = end
    documents = [document for rows in batch.values() for document in rows]
    trained = sum(weight > 0 for document in documents for weight in document.weights)
    tokens = torch.zeros(begin, dtype=torch.int64)
    positions = torch.zeros(begin, dtype=torch.int64)
    chosen = torch.zeros(trained, dtype=torch.int64)
    attention = DocumentAttention([len(document.tokens) for document in documents])
    hidden = decoder.hidden(tokens, positions, attention, TrainingRoute(segments))
    weights = torch.zeros(trained)
    total, _ = TokenLoss.apply(hidden[chosen], decoder.head, tokens[chosen], weights, LOSS_CHUNK_ROWS)
    total.backward()


class _TracedDecoder(Decoder):
    """Takes the rotation of each position from a table of one row: its size would need the values of the positions."""

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.zeros(1, self.architecture.head_dim // 2, dtype=self.dtype, device=self.device)
        return table[positions][:, None], table[positions][:, None]


def _fake_decoder(decoder: Decoder, fake: Callable[[Tensor], Tensor]) -> Decoder:
    layers = [_faked(layer, fake) for layer in decoder.layers]
    embedding = fake(decoder.embedding)
    head = embedding if decoder.head is decoder.embedding else fake(decoder.head)
    norm_bias = None if decoder.norm_bias is None else fake(decoder.norm_bias)
    return _TracedDecoder(decoder.architecture, embedding, layers, fake(decoder.norm), head, norm_bias)


def _faked(value: Any, fake: Callable[[Tensor], Tensor]) -> Any:
    """The same block on fake tensors; blocks are dataclasses of tensors, groups and blocks."""
    if isinstance(value, Tensor):
        return fake(value)
    if isinstance(value, StackedLinear):
        raise Invalid(
            "which rows an expert computes depends on the values; fake tensors have none",
            where="--trace",
            hint="leave --trace out, or measure real steps",
        )
    if isinstance(value, AdaptableLinear):
        if not isinstance(value.weight, Tensor):
            raise Invalid("the operations of packed base weights are not traced", hint="trace the base in fp32")
        bias = None if value.bias is None else fake(value.bias)
        return AdaptableLinear(value.index, value.projections, fake(value.weight), bias)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _faked(getattr(value, field.name), fake) for field in fields(value)})
    return value


def _tensors(decoder: Decoder) -> list[Tensor]:
    found = [decoder.embedding, decoder.norm, decoder.head]
    for layer in decoder.layers:
        found += layer.vectors()
    for group in decoder.groups():
        found += [*stored(group.weight), *(() if group.bias is None else (group.bias,))]
    return found
