"""A merged folder and a GGUF file compute what PEFT's merged model computes; what can't be exported is refused."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from click.testing import CliRunner

from tunerack.cli.main import command
from tunerack.engine.base import load_base
from tunerack.engine.gguf_file import write_gguf
from tunerack.engine.merge import merge
from tunerack.errors import Invalid

from .conftest import make_peft_adapter, merged_logits

IDS = list(range(60, 90))
TARGETS = ["q_proj", "k_proj", "down_proj"]


def adapter_of(folder, target, **values):
    return make_peft_adapter(folder, target, seed=2, base_name="tiny", r=4, target_modules=TARGETS, **values)


def logits_of(path, **values):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **values).eval()
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize(
    ("family", "values"), [("llama", {"use_rslora": True}), ("llama-untied-bias", {"use_dora": True})]
)
def test_a_merged_folder_has_pefts_logits(tiny_folder, tmp_path, family, values):
    folder = tiny_folder(family)
    adapter = adapter_of(folder, tmp_path / "adapter", lora_alpha=8, **values)
    base = load_base(folder, name="tiny")
    assert merge(base, adapter, tmp_path / "out") == 2 * len(TARGETS)
    reference = merged_logits(folder, adapter, IDS)
    torch.testing.assert_close(logits_of(tmp_path / "out"), reference, rtol=1e-4, atol=1e-4)
    assert float((reference - merged_logits(folder, None, IDS)).abs().max()) > 1e-2
    merge(base, adapter, tmp_path / "again")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()
    assert load_base(tmp_path / "out", name="out").identity.fingerprint != base.identity.fingerprint
    with pytest.raises(Invalid, match="is there already"):
        merge(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_read_back_has_the_same_logits_and_tokens(tiny_folder, tmp_path, family):
    folder = tiny_folder(family)
    write_gguf(folder, tmp_path / "model.gguf")
    read = logits_of(tmp_path, gguf_file="model.gguf")
    torch.testing.assert_close(read, logits_of(folder), rtol=1e-4, atol=1e-4)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = load_base(folder, name="tiny").tokenizer
    text = "Quick red foxes, 3 of them"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)


def test_a_rotation_that_the_file_would_not_hold_is_refused(tiny_folder, tmp_path):
    with pytest.raises(Invalid, match="llama3"):
        write_gguf(tiny_folder("llama3-rope"), tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*gguf*"))


def test_the_command_exports_a_folder_of_peft(tiny_folder, tmp_path):
    folder = tiny_folder("llama")
    adapter = adapter_of(folder, tmp_path / "adapter", lora_alpha=8)
    home = tmp_path / "home"
    (home / "catalog").mkdir(parents=True)
    (home / "catalog" / "models.toml").write_text(f'[models.tiny]\nsource = {{ kind = "path", path = "{folder}" }}\n')
    arguments = ["--home", str(home), "export", str(adapter), "--out", str(tmp_path / "m.gguf"), "--gguf", "--json"]
    assert CliRunner().invoke(command, arguments).exit_code != 0
    done = CliRunner().invoke(command, [*arguments, "--model", "tiny"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["merged"] == 2 * len(TARGETS)
    read = logits_of(tmp_path, gguf_file="m.gguf")
    torch.testing.assert_close(read, merged_logits(folder, adapter, IDS), rtol=1e-4, atol=1e-4)
