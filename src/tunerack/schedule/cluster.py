"""Nodes, devices and what binds them; the devices that are free, and where a gang goes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tunerack.errors import Invalid, Problem


@dataclass(frozen=True, slots=True)
class Node:
    """A machine. islands: devices of each NVLink island (empty: all are one); spine > rack > node, by name.

    usd_per_device_hour: its price; spot: may be taken away; healthy: gets new work.
    """

    id: str
    devices: int
    kind: str = ""
    islands: tuple[int, ...] = ()
    rack: str = ""
    spine: str = ""
    healthy: bool = True
    usd_per_device_hour: float = 0.0
    spot: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """Devices of one node, as a bit mask."""

    node: int
    mask: int

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.mask.bit_length()) if self.mask >> i & 1)


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of one kind; `slices` are in the order of the ranks, so that a ring crosses each border least."""

    kind: str
    width: int
    slices: tuple[Slice, ...]


class Cluster:
    """The nodes, in ring order: spine by spine, rack by rack. Raises Invalid for nodes that can't be."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = tuple(sorted(nodes, key=lambda node: (node.spine, node.rack)))
        problems = [problem for node in self.nodes for problem in _problems(node)]
        names = Counter(node.id for node in self.nodes)
        problems += [Problem(f"node {name!r} is there {n} times", name) for name, n in names.items() if n > 1]
        if not self.nodes:
            problems.append(Problem("a cluster needs at least one node", "nodes"))
        if problems:
            raise Invalid(problems)

    @classmethod
    def flat(cls, devices: int, kind: str = "") -> Cluster:
        """Devices that are only counted: one node holds them all."""
        return cls([Node("all", devices, kind)])

    @classmethod
    def uniform(cls, nodes: int, per_node: int, kind: str = "", *, nodes_per_rack: int = 0) -> Cluster:
        """Equal nodes; `nodes_per_rack` 0 puts all into one rack."""
        rack = (lambda i: f"r{i // nodes_per_rack:04}") if nodes_per_rack else (lambda i: "")
        return cls([Node(f"n{i:05}", per_node, kind, rack=rack(i)) for i in range(nodes)])

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Healthy devices by kind."""
        found: dict[str, int] = {}
        for node in self.nodes:
            found[node.kind] = found.get(node.kind, 0) + (node.devices if node.healthy else 0)
        return found

    @property
    def devices(self) -> int:
        return sum(self.kinds.values())

    @cached_property
    def racks(self) -> list[int]:
        """Index of each node's rack."""
        return _numbered([(node.spine, node.rack) for node in self.nodes])

    @cached_property
    def spines(self) -> list[int]:
        return _numbered([node.spine for node in self.nodes])

    @cached_property
    def index(self) -> dict[str, int]:
        return {node.id: i for i, node in enumerate(self.nodes)}

    def widest_node(self, kind: str) -> int:
        return max((node.devices for node in self.nodes if node.kind == kind and node.healthy), default=0)


def _numbered(names: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _problems(node: Node) -> Iterable[Problem]:
    if node.devices < 1:
        yield Problem(f"a node has at least one device, not {node.devices}", node.id)
    if node.islands and sum(node.islands) != node.devices:
        yield Problem(f"islands of {node.islands} devices are not its {node.devices} devices", node.id)
    if node.usd_per_device_hour < 0:
        yield Problem(f"a price is not negative: {node.usd_per_device_hour}", node.id)


class Pool:
    """The free devices of a cluster. Only healthy nodes are in it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.masks = [(1 << node.devices) - 1 if node.healthy else 0 for node in cluster.nodes]
        self.free = dict.fromkeys(cluster.kinds, 0)
        # kind -> number of free devices -> nodes that have just so many, in ring order
        self._by_count: dict[str, dict[int, list[int]]] = {kind: {} for kind in cluster.kinds}
        for i, node in enumerate(cluster.nodes):
            if node.healthy:
                self.free[node.kind] += node.devices
                self._by_count[node.kind].setdefault(node.devices, []).append(i)

    def copy(self) -> Pool:
        other = Pool.__new__(Pool)
        other.cluster = self.cluster
        other.masks = self.masks.copy()
        other.free = self.free.copy()
        other._by_count = {
            kind: {n: nodes.copy() for n, nodes in counts.items() if nodes} for kind, counts in self._by_count.items()
        }
        return other

    def take(self, placement: Placement) -> None:
        """Raises ValueError when a device of it is not free: nothing may be given out twice."""
        for piece in placement.slices:
            if piece.mask & ~self.masks[piece.node]:
                raise ValueError(f"devices of node {self.cluster.nodes[piece.node].id} are given out twice")
            self._set(piece.node, self.masks[piece.node] & ~piece.mask)

    def give(self, placement: Placement) -> None:
        """Raises ValueError when a device of it is free already."""
        for piece in placement.slices:
            if not self.cluster.nodes[piece.node].healthy:
                continue
            if piece.mask & self.masks[piece.node]:
                raise ValueError(f"devices of node {self.cluster.nodes[piece.node].id} are given back twice")
            self._set(piece.node, self.masks[piece.node] | piece.mask)

    def _set(self, node: int, mask: int) -> None:
        kind = self.cluster.nodes[node].kind
        old, new = self.masks[node].bit_count(), mask.bit_count()
        counts = self._by_count[kind]
        nodes = counts[old] if old else []
        if old:
            del nodes[bisect_left(nodes, node)]
        if new:
            insort(counts.setdefault(new, []), node)
        self.free[kind] += new - old
        self.masks[node] = mask

    def place(
        self, width: int, kind: str, *, max_nodes: int | None = None, near: frozenset[str] = frozenset()
    ) -> Placement | None:
        """The most compact place for `width` devices of `kind`, or None.

        One node with the least left over; else the rack, then the spine, with the least left over, and there the
        fewest nodes. Among equals a node of `near` comes first.
        """
        if self.free.get(kind, 0) < width:
            return None
        node = self._one_node(width, kind, near)
        if node is not None:
            return Placement(kind, width, (self._slice(node, width),))
        if max_nodes == 1:
            return None
        nodes = self._several(width, kind)
        if nodes is None or (max_nodes is not None and len(nodes) > max_nodes):
            return None
        left, slices = width, []
        for i in nodes:
            n = min(left, self.masks[i].bit_count())
            left -= n
            slices.append(self._slice(i, n))
        slices.sort(key=lambda piece: piece.node)
        return Placement(kind, width, tuple(slices))

    def _one_node(self, width: int, kind: str, near: frozenset[str]) -> int | None:
        index = self.cluster.index
        close = [(self.masks[i].bit_count(), i) for name in near if (i := index.get(name, -1)) >= 0]
        fitting = [found for found in close if found[0] >= width and self.cluster.nodes[found[1]].kind == kind]
        if fitting:
            return min(fitting)[1]
        counts = self._by_count[kind]
        best = min((n for n, nodes in counts.items() if n >= width and nodes), default=0)
        return counts[best][0] if best else None

    def _several(self, width: int, kind: str) -> list[int] | None:
        """Nodes that hold the gang together, largest first; the smallest domain that can, the fullest among equals."""
        counts = self._by_count[kind]
        ordered = [i for n in sorted(counts, reverse=True) for i in counts[n]]
        for domains in (self.cluster.racks, self.cluster.spines):
            if domains[0] == domains[-1]:
                continue
            members: dict[int, list[int]] = {}
            for i in ordered:
                members.setdefault(domains[i], []).append(i)
            fits = [
                (total, nodes)
                for nodes in members.values()
                if (total := sum(self.masks[i].bit_count() for i in nodes)) >= width
            ]
            if fits:
                return self._fewest(min(fits, key=lambda fit: fit[0])[1], width)
        return self._fewest(ordered, width)

    def _fewest(self, nodes: Sequence[int], width: int) -> list[int] | None:
        """The largest first; the last is the smallest that still holds what is left."""
        chosen: list[int] = []
        for position, i in enumerate(nodes):
            n = self.masks[i].bit_count()
            if n >= width:
                rest = [j for j in nodes[position:] if self.masks[j].bit_count() >= width]
                return [*chosen, min(rest, key=lambda j: (self.masks[j].bit_count(), j))]
            chosen.append(i)
            width -= n
        return None

    def _slice(self, node: int, width: int) -> Slice:
        """Devices of one island where it has enough, the fullest such; else whole islands, largest first."""
        mask, islands = self.masks[node], self.cluster.nodes[node].islands
        if len(islands) < 2:
            return Slice(node, _lowest(mask, width))
        parts, offset = [], 0
        for size in islands:
            parts.append(mask & (((1 << size) - 1) << offset))
            offset += size
        holding = [part for part in parts if part.bit_count() >= width]
        if holding:
            return Slice(node, _lowest(min(holding, key=int.bit_count), width))
        chosen = 0
        for part in sorted(parts, key=int.bit_count, reverse=True):
            chosen |= _lowest(part, min(part.bit_count(), width - chosen.bit_count()))
        return Slice(node, chosen)


def _lowest(mask: int, n: int) -> int:
    """The n lowest set bits."""
    if mask.bit_count() == n:
        return mask
    chosen = 0
    for _ in range(n):
        bit = mask & -mask
        chosen |= bit
        mask ^= bit
    return chosen
