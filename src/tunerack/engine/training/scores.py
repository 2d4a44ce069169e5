"""What the validation rows said of a job so far; saved with every checkpoint, since it decides when the job ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Scores:
    """Losses on the validation rows, mean per trained token.

    base_loss: before the first step, when the adapter adds nothing; step: of the newest evaluation; stale: evaluations
    in a row that were not better than the best one; stopped: the job ends here
    """

    base_loss: float | None = None
    step: int | None = None
    loss: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    stale: int = 0
    stopped: bool = False

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Scores:
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def take(self, step: int, loss: float, *, patience: int) -> bool:
        """Count the evaluation at `step`; True when it is the best of those after training began.

        patience: so many evaluations in a row without a better one stop the job; 0 never does
        """
        self.step, self.loss = step, loss
        if step == 0:
            self.base_loss = loss
            return False
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_step, self.best_loss, self.stale = step, loss, 0
            return True
        self.stale += 1
        self.stopped = bool(patience) and self.stale >= patience
        return False
