"""Where the time, the memory and the operations of training steps go: read from torch's own record of them.

Every operation belongs to the innermost span around it. A backward operation is of the kind of the forward one that
made its node, which autograd's sequence numbers tell. An operation's own time is its duration without that of the
operations inside it, so that all own times add up to the time of the outermost spans.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._C._profiler import _EventType

STAGES = ("data", "forward", "backward", "optimizer", "evaluation", "checkpoint", "other")
SPAN = "tunerack:"
# What an operation says of itself, where no span does.
OPERATION_KINDS = {
    "RmsNorm": "norm",
    "Rotate": "attention",
    "SwiGlu": "mlp",
    "TokenLoss": "head and loss",
    "aten::embedding": "embedding",
    "aten::scaled_dot_product_attention": "attention",
}
_BACKWARD = "autograd::engine::evaluate_function: "
_ACCUMULATE = "AccumulateGrad"


@dataclass(frozen=True)
class Place:
    """What the operations inside a span belong to.

    weights: shapes [out, in] of the frozen weights whose products are not the adapter's part; empty outside adaptable
    layers
    """

    stage: str = "other"
    kind: str = "other"
    weights: frozenset[tuple[int, ...]] = frozenset()


@dataclass
class Part:
    """Sums over the steps. held_bytes: alive at the moment of the overall peak, of what was allocated in the steps."""

    seconds: float = 0.0
    flops: float = 0.0
    held_bytes: int = 0


@dataclass
class Breakdown:
    """parts: by (stage, kind); peak_bytes: by stage, the highest sum of what the steps had allocated."""

    parts: dict[tuple[str, str], Part] = field(default_factory=lambda: defaultdict(Part))
    peak_bytes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts.values())

    def by_stage(self) -> dict[str, Part]:
        return self._summed(0)

    def by_kind(self) -> dict[str, Part]:
        return self._summed(1)

    def _summed(self, place: int) -> dict[str, Part]:
        sums: dict[str, Part] = defaultdict(Part)
        for key, part in self.parts.items():
            one = sums[key[place]]
            one.seconds += part.seconds
            one.flops += part.flops
            one.held_bytes += part.held_bytes
        return dict(sums)


def read(roots: Sequence[Any]) -> Breakdown:
    """From `kineto_results.experimental_event_tree()` of a profile with shapes and memory.

    Only what is inside spans whose names begin with `SPAN` counts: what else the process did meanwhile does not.
    """
    reader = _Reader()
    for root in roots:
        reader.outside(root)
    reader.memory()
    return reader.breakdown


class _Reader:
    def __init__(self) -> None:
        self.breakdown = Breakdown()
        self._places: dict[int, Place] = {}
        self._allocations: list[tuple[int, int, int, Place]] = []

    def outside(self, node: Any) -> None:
        if node.name.startswith(SPAN):
            self.breakdown.seconds += node.duration_time_ns / 1e9
            self._visit(node, Place())
            return
        for child in node.children:
            self.outside(child)

    def _visit(self, node: Any, around: Place) -> None:
        kind, extra = node.typed
        if kind == _EventType.Allocation:
            self._allocations.append((node.start_time_ns, int(extra.ptr), int(extra.alloc_size), around))
            return
        place = self._place(node, extra, around)
        own_ns = node.duration_time_ns
        for child in node.children:
            own_ns -= child.duration_time_ns
            self._visit(child, place)
        inside = self._share(node, extra, place)
        part = self.breakdown.parts[inside.stage, inside.kind]
        part.seconds += max(0, own_ns) / 1e9
        part.flops += flops_of(node.name, _shapes(extra))

    def _place(self, node: Any, extra: Any, around: Place) -> Place:
        name: str = node.name
        if name.startswith(SPAN):
            return _of_span(name, around)
        sequence = getattr(extra, "sequence_number", -1)
        if name.startswith(_BACKWARD):
            if name.endswith(_ACCUMULATE):
                return Place("backward", "lora")
            made = self._places.get(sequence, Place())
            return Place("backward", made.kind, made.weights)
        if around.stage == "backward":
            return around
        place = around
        if name in OPERATION_KINDS and around.kind in ("other", "attention", "mlp"):
            place = Place(around.stage, OPERATION_KINDS[name])
        if 0 <= sequence < 1 << 62:
            # The last operation of a number is the one that made the node.
            self._places[sequence] = place
        return place

    def _share(self, node: Any, extra: Any, place: Place) -> Place:
        """In an adaptable layer, everything but the product with the frozen weight is the adapter's part; in experts,
        which have work of their own, the other products are."""
        if not place.weights or (place.kind == "experts" and node.name not in _PRODUCTS):
            return place
        frozen = any(shape in place.weights or shape[::-1] in place.weights for shape in _shapes(extra))
        return place if frozen and node.name in _PRODUCTS else Place(place.stage, "lora")

    def memory(self) -> None:
        """Peaks by stage, and who holds what at the highest one."""
        alive: dict[int, tuple[int, Place]] = {}
        held: dict[tuple[str, str], int] = defaultdict(int)
        used, highest, at_peak = 0, 0, dict(held)
        for _, pointer, size, place in sorted(self._allocations, key=lambda one: one[0]):
            if size >= 0:
                alive[pointer] = (size, place)
            else:
                before = alive.pop(pointer, None)
                if before is None:
                    # From before the first step.
                    continue
                place_then = before[1]
                used -= before[0]
                held[place_then.stage, place_then.kind] -= before[0]
                continue
            used += size
            held[place.stage, place.kind] += size
            self.breakdown.peak_bytes[place.stage] = max(self.breakdown.peak_bytes.get(place.stage, 0), used)
            if used > highest:
                highest, at_peak = used, dict(held)
        for key, size in at_peak.items():
            self.breakdown.parts[key].held_bytes = size


def _of_span(name: str, around: Place) -> Place:
    """Names are `tunerack:stage=S`, `tunerack:kind=K` and `tunerack:kind=K,weights=OUTxIN+OUTxIN`."""
    values = dict(re.findall(r"(\w+)=([^,]+)", name[len(SPAN) :]))
    stage = around.stage
    if "stage" in values and around.stage != "evaluation":
        stage = values["stage"]
    shapes = [tuple(map(int, shape.split("x"))) for shape in values.get("weights", "").split("+") if shape]
    own = stage if stage in ("data", "optimizer", "checkpoint") else around.kind
    kind = values.get("kind", own)
    return Place(stage, kind, frozenset(shapes))


_ONEDNN = "mkldnn::_linear_pointwise"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::linear", "aten::matmul", "aten::t", _ONEDNN)


def _shapes(extra: Any) -> list[tuple[int, ...]]:
    return list(_sizes(getattr(extra, "inputs", ())))


def _sizes(inputs: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    for one in inputs:
        if isinstance(one, list):
            yield from _sizes(one)
        elif hasattr(one, "sizes"):
            yield tuple(one.sizes)


def flops_of(name: str, shapes: Sequence[tuple[int, ...]]) -> float:
    """Floating-point operations of the products, 2·m·k·n each, from the shapes of an operation's inputs.

    Causal attention is counted as computed: half of the n·m scores of a document. Its backward pass is five products of
    the same size where the forward one is two (Dao et al., arXiv 2205.14135, section 3.1 and algorithm 4).
    """
    if name == "aten::mm" and len(shapes) >= 2:
        return _product(shapes[0], shapes[1])
    if name == _ONEDNN and len(shapes) >= 2:
        return _product(shapes[0], shapes[1][::-1])
    if name in ("aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_") and len(shapes) >= 3:
        return _product(shapes[1], shapes[2])
    if name in ("aten::bmm", "aten::_grouped_mm") and len(shapes) >= 2:
        return _product(shapes[0], shapes[1])
    if name.startswith("aten::_scaled_dot_product") and shapes:
        backward = name.endswith("_backward")
        query, key = (shapes[1], shapes[2]) if backward and len(shapes) > 2 else (shapes[0], shapes[1])
        batch, heads, n, width = query
        causal = 0.5 if n == key[2] and n > 1 else 1.0
        return (5 if backward else 2) * 2.0 * batch * heads * n * key[2] * width * causal
    return 0.0


def _product(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """[m, k]·[k, n]; [e, m, k]·[e, k, n]; and [tokens, k] against [experts, k, n], where a row meets one expert."""
    if len(a) == 3:
        return 2.0 * a[0] * a[1] * a[2] * b[-1]
    return 2.0 * a[0] * a[1] * b[-1]
