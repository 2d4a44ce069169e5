"""From the widths that jobs are to have to decisions: places first, and nobody is stopped whose devices go unused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunerack.schedule.cluster import Placement, Pool, Slice
from tunerack.schedule.decisions import Decision, Preempt, Resize, Start
from tunerack.schedule.job import Job
from tunerack.schedule.state import State


def realise(
    state: State, targets: Mapping[str, tuple[str, int]], order: Sequence[Job], reasons: Mapping[str, str]
) -> list[Decision]:
    """Decisions that bring each job to its (kind, width); jobs that `targets` lacks get none.

    order: who is placed first. A gang that no free devices hold waits; a running job goes on as it is then.
    """
    pool = state.free()
    left: list[Job] = []
    shrunk: dict[str, Placement] = {}
    for job in state.running:
        assert job.placement is not None
        kind, width = targets.get(job.id, ("", 0))
        if width == 0 and job.preemptible:
            pool.give(job.placement)
            left.append(job)
        elif kind == job.placement.kind and 0 < width < job.width:
            shrunk[job.id] = narrowed(job.placement, width)
            pool.give(job.placement)
            pool.take(shrunk[job.id])
    placed = _place_all(pool, targets, order)
    users = {job.id: placement for job, placement in placed}
    return [*_stops(pool, left, users), *_narrower(pool, state, shrunk, reasons), *_placed(placed, left, reasons)]


def _place_all(pool: Pool, targets: Mapping[str, tuple[str, int]], order: Sequence[Job]) -> list[tuple[Job, Placement]]:
    placed: list[tuple[Job, Placement]] = []
    for job in order:
        kind, width = targets.get(job.id, ("", 0))
        have = job.placement
        if width == 0 or (have is not None and kind == have.kind and width <= job.width):
            continue
        if have is not None:
            pool.give(have)
        near = frozenset(pool.cluster.nodes[piece.node].id for piece in have.slices) if have else job.nodes
        placement = pool.place(width, kind, max_nodes=job.max_nodes, near=near)
        if placement is not None:
            pool.take(placement)
            placed.append((job, placement))
        elif have is not None:
            pool.take(have)
    return placed


def _stops(pool: Pool, left: Sequence[Job], users: Mapping[str, Placement]) -> list[Decision]:
    """The stops whose devices somebody takes; the others keep theirs."""
    made: list[Decision] = []
    for job in left:
        assert job.placement is not None
        user = next((name for name, placement in users.items() if overlap(placement, job.placement)), None)
        if user is None:
            pool.take(job.placement)
        else:
            made.append(Preempt(job.id, user, f"{user} goes before it and needs its place"))
    return made


def _narrower(pool: Pool, state: State, shrunk: Mapping[str, Placement], reasons: Mapping[str, str]) -> list[Decision]:
    """Those whose devices nobody takes stay as wide as they are."""
    made: list[Decision] = []
    for job in state.running:
        if job.id in shrunk and job.placement is not None:
            freed = [Slice(p.node, p.mask & ~_mask(shrunk[job.id], p.node)) for p in job.placement.slices]
            if any(piece.mask & ~pool.masks[piece.node] for piece in freed):
                made.append(Resize(job.id, shrunk[job.id], reasons.get(job.id, "others need some of its devices")))
            else:
                whole = Placement(job.placement.kind, 0, tuple(piece for piece in freed if piece.mask))
                pool.take(whole)
    return made


def _placed(placed: Sequence[tuple[Job, Placement]], left: Sequence[Job], reasons: Mapping[str, str]) -> list[Decision]:
    made: list[Decision] = []
    for job, placement in placed:
        reason = reasons.get(job.id, f"{placement.width} devices are free")
        if job.running:
            made.append(Resize(job.id, placement, reason))
        else:
            victims = tuple(v.id for v in left if v.placement is not None and overlap(placement, v.placement))
            made.append(Start(job.id, placement, reason, victims))
    return made


def _mask(placement: Placement, node: int) -> int:
    return next((piece.mask for piece in placement.slices if piece.node == node), 0)


def overlap(one: Placement, other: Placement) -> bool:
    return any(piece.mask & _mask(other, piece.node) for piece in one.slices)


def narrowed(placement: Placement, width: int) -> Placement:
    """`width` of its devices, on as few of its nodes as hold them."""
    kept, left = [], width
    for piece in sorted(placement.slices, key=lambda piece: -piece.mask.bit_count()):
        mask, n = 0, min(left, piece.mask.bit_count())
        for device in Slice(piece.node, piece.mask).devices[:n]:
            mask |= 1 << device
        if mask:
            kept.append(Slice(piece.node, mask))
        left -= n
    return Placement(placement.kind, width, tuple(sorted(kept, key=lambda piece: piece.node)))
