"""On a GPU the engine gives what it gives on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the engine extra")

from engine.conftest import make_peft_adapter, smollm2_folder, tiny_folder  # noqa: E402, F401
from engine.test_serving import ask, finish  # noqa: E402
from engine.test_training import largest_difference, losses, request_of, run, spec_of, weights  # noqa: E402
from tunerack.engine.adapter_file import read_adapter  # noqa: E402
from tunerack.engine.base import load_base  # noqa: E402
from tunerack.engine.serving.bank import AdapterBank  # noqa: E402
from tunerack.engine.serving.server import Limits, Server  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]


@pytest.fixture(scope="module")
def both(tiny_folder):  # noqa: F811
    """The same tiny model on the CPU and on the GPU, fp32."""
    folder = tiny_folder("llama")
    return folder, load_base(folder, name="tiny"), load_base(folder, name="tiny", device="cuda")


def test_training_gives_the_losses_and_weights_of_the_cpu(both, tmp_path: Path):
    _, cpu, gpu = both
    on_cpu = request_of("job", tmp_path / "cpu", spec_of(lora={"dropout": 0.1}), validation=3)
    on_gpu = request_of("job", tmp_path / "gpu", spec_of(lora={"dropout": 0.1}), validation=3)
    first, second = run(cpu, [on_cpu]), run(gpu, [on_gpu])
    assert losses(second, "job") == pytest.approx(losses(first, "job"), abs=1e-3)
    assert largest_difference(weights(on_cpu), weights(on_gpu)) < 1e-3


def test_a_mixed_batch_gives_the_answers_of_the_cpu(both, tmp_path: Path):
    folder, cpu, gpu = both
    values = {"base_name": "tiny", "r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "down_proj"]}
    paths = [make_peft_adapter(folder, tmp_path / str(i), seed=i, **values) for i in range(4)]
    texts = []
    for base in (cpu, gpu):
        bank = AdapterBank(base.decoder.groups())
        for i, path in enumerate(paths):
            bank.load(str(i), read_adapter(path, base.identity))
        server = Server(base, bank, Limits(8, 1 << 24))
        sinks = [ask(server, range(60, 90 + i), name) for i, name in enumerate(["0", "2", None, "1", "3"])]
        finish(server)
        texts.append([sink.text[0] for sink in sinks])
    assert texts[0] == texts[1]
