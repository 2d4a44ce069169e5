"""The peak of the real training step, on fake tensors."""

from __future__ import annotations

from typing import Any

from tunerack.cli import measuring
from tunerack.errors import Invalid
from tunerack.estimate.groups import PASS_TOKENS
from tunerack.estimate.request import Answer
from tunerack.settings import Settings
from tunerack.spec.estimate import EstimateSpec


def peak(spec: EstimateSpec, answer: Answer, settings: Settings) -> dict[str, Any]:
    """Bytes of tensors at the peak of tunerack's own trainer: one step of the spec's adapters, rows as long as the
    longest. Raises Invalid for what that trainer does not do."""
    if spec.method != "lora":
        raise Invalid(f"the engine trains lora, not {spec.method}", where="--trace", hint="leave --trace out")
    lora: dict[str, Any] = {"rank": spec.rank, "dropout": spec.dropout}
    if spec.targets:
        lora["target_modules"] = list(spec.targets)
    length = min(max(4, answer.lengths.longest), answer.shape.max_len or 1 << 30)
    rows = max(1, min(spec.batch_size, (settings.micro_batch_tokens or PASS_TOKENS["cpu"]) // length or 1))
    step = {"rows": rows, "seq_len": length, "adapters": spec.adapters, "lora": lora}
    found = measuring.run(settings, spec.model, [step], "trace")["results"][0]
    return {"peak_bytes": found["peak_bytes"], "rows": rows, "seq_len": length, "adapters": spec.adapters}
