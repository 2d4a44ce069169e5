"""Jobs with made-up rows, for measuring and tracing steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerack.data.dataset import Dataset, Example, Report
from tunerack.engine.base import BaseModel
from tunerack.engine.training.job import TrainingJob
from tunerack.engine.training.parameters import AdapterParameters
from tunerack.spec.job import JobSpec, LoraSpec

# Every which token of a made-up row carries loss.
TRAINED_SHARE = 3


@dataclass(frozen=True)
class Setting:
    """adapters of `lora` train together, each with `rows` rows of `seq_len` tokens in a step."""

    lora: LoraSpec
    rows: int
    seq_len: int
    adapters: int = 1

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Setting:
        lora = dict(values.get("lora", {}))
        if "target_modules" in lora:
            lora["target_modules"] = tuple(lora["target_modules"])
        return cls(LoraSpec(**lora), int(values["rows"]), int(values["seq_len"]), int(values.get("adapters", 1)))

    @property
    def tokens(self) -> int:
        """Tokens of a step that are computed: those after the last trained one of a row are not."""
        return self.adapters * self.rows * self.computed

    @property
    def computed(self) -> int:
        return ((self.seq_len - 1) // TRAINED_SHARE) * TRAINED_SHARE

    @property
    def trained(self) -> int:
        return self.adapters * self.rows * ((self.seq_len - 1) // TRAINED_SHARE)


def jobs_of(base: BaseModel, setting: Setting) -> dict[str, TrainingJob]:
    """Jobs with made-up rows, all alike but for the seed."""
    ids = tuple(10 + position % 1000 for position in range(setting.seq_len))
    weights = tuple(float(position > 0 and position % TRAINED_SHARE == 0) for position in range(setting.seq_len))
    examples = tuple(Example(line, ids, weights) for line in range(1, setting.rows + 1))
    dataset = Dataset(examples, Report(setting.rows, setting.rows, (), ()))
    config = base.lora(setting.lora)
    found = {}
    for seed in range(setting.adapters):
        spec = JobSpec(
            base.name, "made-up", n_epochs=1000, batch_size=setting.rows, learning_rate=1e-6, warmup_steps=0,
            seq_len=setting.seq_len, checkpoint_steps=1000, seed=seed, lora=setting.lora,
        )  # fmt: skip
        parameters = AdapterParameters(config, base.decoder.groups(), seed=seed)
        found[f"job-{seed}"] = TrainingJob(f"job-{seed}", spec, dataset, None, parameters, Path())
    return found
