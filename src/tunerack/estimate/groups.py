"""Which jobs of one engine take part in which joint steps, and how many tokens a pass holds.

A pass costs as much time per token above about a thousand tokens, and memory in proportion to its tokens, so it is as
large as memory allows up to the size that is fast enough. Jobs whose steps hold about as many tokens step together; a
job with far larger steps takes turns with the others in place of holding them back at every border. Pure: the same
jobs give the same groups, so a resumed engine forms them again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunerack.catalog.shape import Shape
from tunerack.estimate import trainer
from tunerack.spec.job import LoraSpec

# Tokens of a pass where memory sets no bound: on two cores 1,024 are as fast per token as 2,048 and keep a waiting
# request half as long; GPUs need more rows to fill their units.
PASS_TOKENS = {"cpu": 1024, "cuda": 8192}
# Passes are not made smaller than this to let more jobs in: the products' weights are then read for too few rows.
LEAST_PASS_TOKENS = 256
# Jobs whose steps differ by less than this factor step together.
CLASS_FACTOR = 4
# Steps of the smallest class in one cycle, at most: bounds how long a large job waits for its next step.
MOST_TURNS = 16
# Share of the memory bound that tensors may take; the rest is for the allocator and what is not a tensor.
FILL = 0.85


@dataclass(frozen=True)
class Member:
    """A job as the planner sees it.

    step_tokens: computed tokens of an average optimizer step; longest: of its longest row; trained_share: share of the
    tokens that carry loss; row_tokens: of an average row
    """

    name: str
    lora: LoraSpec
    step_tokens: float
    longest: int
    trained_share: float
    row_tokens: float


@dataclass(frozen=True)
class Groups:
    """turns: one cycle of joint steps, each with the jobs that take part; waiting: those that don't fit beside them.

    reasons: per job that is not in every turn, why
    """

    pass_tokens: int
    turns: tuple[tuple[str, ...], ...]
    waiting: tuple[str, ...]
    reasons: dict[str, str]

    def at(self, turn: int) -> tuple[str, ...]:
        """Who takes part in a turn; cycles repeat."""
        return self.turns[turn % len(self.turns)] if self.turns else ()


def plan_groups(
    members: Sequence[Member],
    *,
    most_tokens: int,
    shape: Shape | None = None,
    memory_bytes: float = math.inf,
    element_bytes: int = 4,
) -> Groups:
    """Groups of `members`, which are in the order of their arrival; the first one always trains.

    memory_bytes: what the engine may hold, base included; most_tokens: bound of a pass, from the settings or the device
    """
    inside, waiting, reasons = list(members), [], {}
    tokens = most_tokens
    while inside:
        tokens = _pass_tokens(inside, most_tokens, shape, memory_bytes * FILL, element_bytes)
        if tokens >= _least(inside, most_tokens) or len(inside) == 1:
            break
        last = inside.pop()
        waiting.append(last.name)
        reasons[last.name] = (
            f"waits: a pass of {_least([*inside, last], most_tokens)} tokens with the adapters of "
            f"{len(inside) + 1} jobs does not fit into {memory_bytes / 1e9:.1f} GB"
        )
    tokens = max(tokens, 1)
    classes = _classes(inside, tokens)
    largest = max((_class_tokens(members) for members in classes), default=0.0)
    shares = [min(MOST_TURNS, max(1, round(largest / _class_tokens(group)))) for group in classes]
    for group, share in zip(classes, shares, strict=True):
        if len(classes) > 1:
            for member in group:
                reasons[member.name] = (
                    f"takes {share} of {sum(shares)} turns: its steps of about {member.step_tokens:,.0f} tokens are "
                    f"not held back by, and do not hold back, steps of another size"
                )
    return Groups(tokens, _cycle(classes, shares), tuple(reversed(waiting)), reasons)


def _pass_tokens(members: Sequence[Member], most: int, shape: Shape | None, bound: float, element_bytes: int) -> int:
    """The largest pass, by powers of two from `most` down, whose peak is within the bound; 0 where none is."""
    if shape is None or not trainer.supports(shape) or math.isinf(bound):
        return most
    tokens = most
    while tokens >= 1:
        if trainer.peak(shape, _parts(members, tokens), element_bytes).total_bytes <= bound:
            return tokens
        tokens //= 2
    return 0


def _parts(members: Sequence[Member], tokens: int) -> list[trainer.Part]:
    """A full pass of the member whose tokens take most; the others' adapters are there, their rows are not."""
    heaviest = max(members, key=lambda m: (m.lora.rank * len(m.lora.target_modules), m.lora.dropout, m.name))
    trained = max(member.trained_share for member in members)
    documents = max(1, round(tokens / min(member.row_tokens for member in members)))
    return [
        trainer.Part(m.lora, tokens, math.ceil(tokens * trained), documents)
        if m is heaviest
        else trainer.Part(m.lora, 0, 0, 0)
        for m in members
    ]


def _least(members: Sequence[Member], most: int) -> int:
    """A pass must hold the longest row, and be worth its weights' reading."""
    return max(min(LEAST_PASS_TOKENS, most), max(member.longest for member in members))


def _classes(members: Sequence[Member], pass_tokens: int) -> list[list[Member]]:
    """By powers of `CLASS_FACTOR` above a pass; steps that don't fill a pass share one. Smallest steps first."""
    found: dict[int, list[Member]] = {}
    for member in members:
        passes = max(1.0, member.step_tokens / pass_tokens)
        found.setdefault(int(math.log(passes, CLASS_FACTOR) + 1e-9), []).append(member)
    return [found[key] for key in sorted(found)]


def _class_tokens(members: Sequence[Member]) -> float:
    """Tokens of an average member's step."""
    return sum(member.step_tokens for member in members) / len(members)


def _cycle(classes: Sequence[Sequence[Member]], shares: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Each class as often as its share, spread evenly over the cycle."""
    places = sorted(
        ((position + 0.5) / share, index) for index, share in enumerate(shares) for position in range(share)
    )
    names = [tuple(sorted(member.name for member in group)) for group in classes]
    return tuple(names[index] for _, index in places)
