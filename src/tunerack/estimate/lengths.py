"""Token lengths of a data set and what batching makes of them: padding, packing, steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """Rows by token length.

    counts: rows of each length, ascending; sampled_share: of all rows, those that were counted
    token_error: relative error of the lengths themselves, where they were guessed from the text
    """

    counts: tuple[tuple[int, int], ...]
    sampled_share: float = 1.0
    token_error: float = 0.0

    @classmethod
    def of(cls, lengths: Iterable[int], sampled_share: float = 1.0, token_error: float = 0.0) -> Lengths:
        return cls(tuple(sorted(Counter(lengths).items())), sampled_share, token_error)

    @classmethod
    def constant(cls, length: int, rows: int) -> Lengths:
        return cls(((length, rows),))

    @classmethod
    def from_histogram(cls, histogram: Mapping[int, int]) -> Lengths:
        return cls(tuple(sorted((int(length), int(rows)) for length, rows in histogram.items() if rows)))

    @property
    def rows(self) -> int:
        return round(sum(count for _, count in self.counts) / self.sampled_share)

    @property
    def tokens(self) -> int:
        return round(sum(length * count for length, count in self.counts) / self.sampled_share)

    @property
    def longest(self) -> int:
        return self.counts[-1][0] if self.counts else 0

    @property
    def mean(self) -> float:
        return sum(length * count for length, count in self.counts) / max(1, self._sampled)

    @property
    def _sampled(self) -> int:
        return sum(count for _, count in self.counts)

    @property
    def mean_error(self) -> float:
        """Relative standard error of the mean: of sampling, and of guessed lengths; 0 when all were counted."""
        if self.sampled_share >= 1.0 or self._sampled < 2:
            return self.token_error
        variance = sum(count * (length - self.mean) ** 2 for length, count in self.counts) / (self._sampled - 1)
        sampling = math.sqrt(variance / self._sampled * (1 - self.sampled_share)) / self.mean
        return math.hypot(sampling, self.token_error)

    def cut(self, seq_len: int) -> Lengths:
        """Rows longer than `seq_len` are truncated to it."""
        counts: Counter[int] = Counter()
        for length, count in self.counts:
            counts[min(length, seq_len)] += count
        return Lengths(tuple(sorted(counts.items())), self.sampled_share, self.token_error)

    def dropped(self, seq_len: int) -> Lengths:
        """Without the rows that are longer than `seq_len`."""
        kept = tuple(pair for pair in self.counts if pair[0] <= seq_len)
        return Lengths(kept, self.sampled_share, self.token_error)

    def quantile(self, share: float) -> int:
        """Length that `share` of the rows do not exceed."""
        wanted, seen = share * self._sampled, 0
        for length, count in self.counts:
            seen += count
            if seen >= wanted:
                return length
        return self.longest

    def expected_longest(self, batch: int) -> float:
        """E[max of `batch` rows drawn at random]: sum over lengths of P(max > l), independent draws."""
        total, below, previous, seen = self._sampled, 0.0, 0, 0
        for length, count in self.counts:
            below += (length - previous) * (1 - (seen / total) ** batch)
            previous, seen = length, seen + count
        return below

    def padded_tokens(self, batch: int) -> float:
        """Tokens of an average batch, each row padded to the longest of the batch."""
        return batch * self.expected_longest(batch)

    def packed_rows(self, seq_len: int) -> int:
        """Sequences of `seq_len` after packing rows end to end."""
        return max(1, math.ceil(self.cut(seq_len).tokens / seq_len))
