"""Whose turn the next joint step is, kept from border to border."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tunerack.catalog.shape import Shape
from tunerack.engine.decoder import Decoder
from tunerack.engine.training.job import TrainingJob
from tunerack.estimate.groups import PASS_TOKENS, Groups, Member, plan_groups


class Rota:
    """The groups of the jobs that are in, and the number of the next turn; that number is part of a border.

    micro_batch_tokens: bound of a pass; 0 takes the device's. shape: of the base; memory_bytes: what the engine may
    hold, base included, by which passes are made smaller and jobs that don't fit wait; 0 knows no bound
    """

    def __init__(
        self, decoder: Decoder, *, micro_batch_tokens: int, shape: Shape | None = None, memory_bytes: int = 0
    ) -> None:
        self.most_tokens = micro_batch_tokens or PASS_TOKENS.get(decoder.device.type, PASS_TOKENS["cpu"])
        self._bound = self.most_tokens
        self.worked_s = 0.0
        self._worked_before: dict[str, float] = {}
        self.turn = 0
        self._shape, self._memory_bytes = shape, memory_bytes
        self._element_bytes = decoder.dtype.itemsize
        self._order: list[str] = []
        self._groups: Groups = self._plan([])

    @property
    def pass_tokens(self) -> int:
        """Most tokens of a pass of the jobs that are in."""
        return self._groups.pass_tokens

    @property
    def sizes(self) -> tuple[int, Groups]:
        """How large passes are now; can be set again after a try with smaller ones."""
        return self.most_tokens, self._groups

    @sizes.setter
    def sizes(self, value: tuple[int, Groups]) -> None:
        self.most_tokens, self._groups = value

    def alone(self, job: TrainingJob) -> int:
        """Most tokens of a pass of one job."""
        return self._plan([job]).pass_tokens

    def replan(self, jobs: Mapping[str, TrainingJob], turn: int = 0) -> dict[str, str]:
        """After a change of who is in; returns, for each job that is not in every joint step, why."""
        staying = [name for name in self._order if name in jobs]
        if len(staying) < len(self._order):
            # What did not fit may have been the job that left.
            self.most_tokens = self._bound
        self._order = staying
        self._worked_before = {name: s for name, s in self._worked_before.items() if name in jobs}
        self._order += sorted(name for name in jobs if name not in self._order)
        self._groups = self._plan([jobs[name] for name in self._order])
        self.turn = turn
        return self._groups.reasons

    def members(self) -> tuple[str, ...]:
        """Who takes part in the next joint step."""
        return self._groups.at(self.turn)

    def halve(self, tokens: int, longest: int) -> bool:
        """After an out-of-memory of a pass of `tokens`: smaller passes from here on; False when it held no more than
        the longest row."""
        if tokens <= max(1, longest):
            return False
        self.most_tokens = max(longest, tokens // 2)
        self._groups = replace(self._groups, pass_tokens=min(self.pass_tokens, self.most_tokens))
        return True

    def step_took(self, name: str, seconds: float) -> float:
        """Seconds of work since the job's last step: steps of others in between are part of what its own takes."""
        before = self._worked_before.get(name, self.worked_s - seconds)
        self._worked_before[name] = self.worked_s
        return self.worked_s - before

    def _plan(self, jobs: Sequence[TrainingJob]) -> Groups:
        return plan_groups(
            [member_of(job) for job in jobs],
            most_tokens=self.most_tokens,
            shape=self._shape,
            memory_bytes=self._memory_bytes or float("inf"),
            element_bytes=self._element_bytes,
        )


def member_of(job: TrainingJob) -> Member:
    """A job by the lengths of its rows."""
    examples = job.dataset.examples
    tokens = job.dataset.tokens
    return Member(
        name=job.name,
        lora=job.spec.lora,
        step_tokens=min(job.batch_size, len(examples)) * tokens / len(examples),
        longest=job.dataset.longest,
        trained_share=job.dataset.trained_tokens / tokens,
        row_tokens=tokens / len(examples),
    )
