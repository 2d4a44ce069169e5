"""tunerack estimate, in this process: what it prints, and ten wrong inputs with one clear answer each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tunerack.cli.estimate import command
from tunerack.errors import Invalid
from tunerack.settings import Settings

QUICK = ["--model", "llama-3.2-1b", "--rows", "500", "--mean-tokens", "200"]


def run(*arguments: str, home: Path) -> str:
    result = CliRunner().invoke(command, list(arguments), obj=Settings(home=home), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def estimate(*arguments: str, home: Path) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json", home=home))


def problems(*arguments: str, home: Path) -> list[str]:
    with pytest.raises(Invalid) as caught:
        run(*arguments, home=home)
    return [str(problem) for problem in caught.value.problems]


def write_rows(path: Path, rows: int = 300) -> Path:
    line = json.dumps(
        {"messages": [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "y" * 90}]}
    )
    path.write_text((line + "\n") * rows)
    return path


def test_text_names_memory_time_price_and_date(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "train.jsonl")
    text = run("--model", "llama-3.2-1b", "--data", str(data), "--gpus", "a40,h100:2", home=tmp_path)
    assert "1.24 B parameters" in text
    assert "300 rows" in text
    assert "logits" in text
    assert "CUDO compute, on-demand, catalogue v8" in text
    assert "h100 x2" in text
    assert "take    a40: cheapest that fits" in text


def test_json_holds_the_whole_answer(tmp_path: Path) -> None:
    found = estimate(*QUICK, "--gpus", "a40", "--price", "a40=1.5", home=tmp_path)
    offer = found["offers"][found["chosen"]]
    # 500 rows in batches of 16, three epochs.
    assert offer["steps"] == 96
    assert offer["usd"]["mid"] == pytest.approx(offer["time_s"]["mid"] / 3600 * 1.5)
    assert sum(offer["memory"]["terms_bytes"].values()) == pytest.approx(offer["memory"]["allocated_bytes"]["mid"])
    assert offer["time_s"]["basis"] == "prior"


def test_a_foreign_file_and_a_job_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl")
    (tmp_path / "axolotl.yaml").write_text(
        "base_model: meta-llama/Llama-3.2-1B\nadapter: lora\nlora_r: 8\nlora_target_linear: true\n"
        "datasets: [{path: train.jsonl}]\nmicro_batch_size: 2\nflash_attention: true\n"
    )
    found = estimate(str(tmp_path / "axolotl.yaml"), "--gpus", "a40", home=tmp_path)
    assert "read as a configuration of axolotl" in found["notes"]
    assert found["data"]["rows"] == 300
    (tmp_path / "job.yaml").write_text("model: smollm2-135m\ntraining_file: train.jsonl\nlora: {rank: 4}\n")
    found = estimate(str(tmp_path / "job.yaml"), "--gpus", "cpu", home=tmp_path)
    assert found["spec"]["rank"] == 4
    assert found["offers"][0]["gpu"] == "cpu"


def test_a_job_file_is_estimated_as_what_it_is(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl")
    lines = "model: smollm2-135m\ntraining_file: train.jsonl\n"
    (tmp_path / "full.yaml").write_text(lines + "method: full\n")
    (tmp_path / "plain.yaml").write_text(lines)
    found, plain = (run(str(tmp_path / f"{name}.yaml"), "--gpus", "a40", home=tmp_path) for name in ("full", "plain"))
    assert "full trains 135 M" in found
    assert "lora trains" in plain
    (tmp_path / "dora.yaml").write_text(lines + "lora: {use_dora: true}\n")
    (told,) = problems(str(tmp_path / "dora.yaml"), home=tmp_path)
    assert "DoRA is not estimated" in told


def test_a_seq_len_above_every_row_takes_no_more_memory(tmp_path: Path) -> None:
    """Nothing is padded beyond the longest row; packed rows do fill the whole length."""
    fixed = ("--gpus", "a40", "--micro-batch", "4")
    rows = run(*QUICK, *fixed, home=tmp_path)
    assert run(*QUICK, *fixed, "--seq-len", "2048", home=tmp_path) == rows
    assert run(*QUICK, *fixed, "--seq-len", "100", home=tmp_path) != rows
    assert run(*QUICK, *fixed, "--seq-len", "2048", "--packing", home=tmp_path) != rows


def test_a_config_json_of_its_own(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = estimate("--model", str(tmp_path / "config.json"), "--gpus", "t4", home=tmp_path)
    # Two layers of 4 * 64^2 + 3 * 64 * 128 + 2 * 64, embedding and head of 100 * 64, a norm of 64.
    assert found["model"]["parameters"] == 2 * (4 * 64**2 + 3 * 64 * 128 + 128) + 2 * 6400 + 64


def test_deadline_and_budget_choose(tmp_path: Path) -> None:
    free = ["--gpus", "a40,h100", "--price", "a40=0.1", "--price", "h100=9"]
    plain = estimate(*QUICK, *free, home=tmp_path)
    by_name = {offer["gpu"]: offer for offer in plain["offers"]}
    assert plain["offers"][plain["chosen"]]["gpu"] == "a40"
    between = (by_name["a40"]["time_s"]["high"] + by_name["h100"]["time_s"]["high"]) / 2
    held = estimate(*QUICK, *free, "--deadline", f"{between:.0f}s", home=tmp_path)
    assert held["offers"][held["chosen"]]["gpu"] == "h100"
    assert estimate(*QUICK, *free, "--max-usd", "0.00001", home=tmp_path)["chosen"] is None


def test_the_papers_mode(tmp_path: Path) -> None:
    text = run("--model-of", "paper", home=tmp_path)
    assert "32.7" in text
    assert "C0 62 C1 0.89" in text
    assert "C0 82 C1 0.95" in run("--model-of", "paper", "--variant", "text", home=tmp_path)
    found = estimate("--model-of", "paper", "--gpus", "a40", home=tmp_path)
    assert found["maximum_batch"][0]["Mixtral CS sparse"] == 8


# --- wrong inputs ------------------------------------------------------------------------------------------------


def test_unknown_gpu(tmp_path: Path) -> None:
    assert problems(*QUICK, "--gpus", "a41,h100:zero", home=tmp_path) == [
        "gpus: GPU 'a41' is not in the catalogue (did you mean a40, a10, a10g? known: "
        + problems(*QUICK, "--gpus", "a41", home=tmp_path)[0].split("known: ")[1],
        "gpus: 'h100:zero': 'zero' is no number of devices (for example h100:2)",
    ]


def test_negative_rank(tmp_path: Path) -> None:
    assert problems(*QUICK, "--rank", "-4", home=tmp_path) == ["--rank: is -4; the least is 1"]


@pytest.mark.parametrize("value", ["nan", "inf", "1" + "0" * 400])
@pytest.mark.parametrize("flag", ["--dropout", "--rank", "--max-usd"])
def test_numbers_that_are_none(tmp_path: Path, flag: str, value: str) -> None:
    assert problems(*QUICK, flag, value, home=tmp_path) == [f"{flag}: {value!r} is not a number"]


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "cheap"])
def test_prices_that_are_none(tmp_path: Path, value: str) -> None:
    assert problems(*QUICK, "--price", f"a40={value}", home=tmp_path)[0].startswith(f"--price: 'a40={value}' is no")


def test_mixture_of_experts_without_a_count(tmp_path: Path) -> None:
    config = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 100, "num_experts_per_tok": 2}  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert "mixtral needs the key 'num_experts'" in problems("--model", str(file), home=tmp_path)[0]


def test_price_missing(tmp_path: Path) -> None:
    text = run(*QUICK, "--gpus", "t4", home=tmp_path)
    assert "no price is known for t4: give --price t4=DOLLARS_PER_HOUR" in text
    assert problems(*QUICK, "--price", "a40=cheap", home=tmp_path) == [
        "--price: 'a40=cheap' is no price (for example --price a40=0.37)"
    ]


def test_three_gb_model_on_a_two_gb_card(tmp_path: Path) -> None:
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "gpus.toml").write_text(
        "[gpus.small]\nmemory_mib = 2048\nbandwidth_gb_s = 100\nbf16_tflops = 10\nfp16_tflops = 10\nfp32_tflops = 5\n"
    )
    text = run("--model", "qwen2.5-1.5b", "--gpus", "small", "--rows", "10", "--mean-tokens", "64", home=tmp_path)
    assert "does not fit, because it needs" in text
    assert "try " in text


def test_deadline_already_past(tmp_path: Path) -> None:
    assert problems(*QUICK, "--deadline", "-2h", home=tmp_path) == [
        "--deadline: -2h from now is already past (give a time ahead, such as 6h)"
    ]


def test_yaml_with_an_unknown_key(tmp_path: Path) -> None:
    file = tmp_path / "estimate.yaml"
    file.write_text("model: smollm2-135m\nranck: 8\n")
    assert problems(str(file), home=tmp_path) == ["estimate.yaml:2: ranck: unknown field (did you mean rank?)"]


def test_model_that_is_nowhere(tmp_path: Path) -> None:
    assert "did you mean" in problems("--model", "llama-3.1-8c", home=tmp_path)[0]


def test_targets_that_the_model_has_not(tmp_path: Path) -> None:
    found = problems("--model", "gpt2", "--target-modules", "q_proj,c_attn", home=tmp_path)
    assert found == ["target_modules: gpt2 has no module 'q_proj' (it has c_attn, c_proj, c_fc)"]


def test_data_that_holds_no_row(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("not json\n\n[1, 2]\n")
    found = problems("--model", "smollm2-135m", "--data", str(file), home=tmp_path)
    assert found[0].startswith(f"{file}: holds no row")


def test_seq_len_beyond_the_model(tmp_path: Path) -> None:
    assert problems(*QUICK, "--seq-len", "200000", home=tmp_path) == [
        "seq_len: seq_len 200000 is beyond the model's 131072 tokens (give 131072 or less)"
    ]


def test_some_bad_lines_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "train.jsonl", rows=20)
    file.write_text(file.read_text() + "{broken\n")
    text = run("--model", "smollm2-135m", "--data", str(file), "--gpus", "a40", home=tmp_path)
    assert "1 lines of train.jsonl hold no row: 21" in text


# --- the plot, and calibrations ------------------------------------------------------------------------------------


def test_plot_as_png_has_the_right_size_and_is_not_blank(tmp_path: Path) -> None:
    import struct
    import zlib

    run(*QUICK, "--gpus", "a40,h100", "--plot", str(tmp_path / "cost.png"), home=tmp_path)
    data = (tmp_path / "cost.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (800, 500)
    start = data.index(b"IDAT") + 4
    size = struct.unpack(">I", data[start - 8 : start - 4])[0]
    pixels = zlib.decompress(data[start : start + size])
    assert len(pixels) == 500 * (1 + 3 * 800)
    assert bytes((200, 60, 40)) in pixels


def test_plot_as_svg_names_the_offers(tmp_path: Path) -> None:
    run(*QUICK, "--gpus", "a40,h100", "--plot", str(tmp_path / "cost.svg"), home=tmp_path)
    text = (tmp_path / "cost.svg").read_text()
    assert text.count("<circle") == len(estimate(*QUICK, "--gpus", "a40,h100", home=tmp_path)["offers"])
    assert "h100 1.25 spot" in text


def test_plot_of_another_kind_is_refused(tmp_path: Path) -> None:
    found = problems(*QUICK, "--gpus", "a40", "--plot", str(tmp_path / "cost.gif"), home=tmp_path)
    assert found == ["--plot: cost.gif is neither .png nor .svg (for example --plot cost.png)"]


def test_a_calibration_of_this_device_is_used_from_then_on(tmp_path: Path) -> None:
    from tunerack.estimate.calibration import Measured
    from tunerack.store import calibrations

    asked = ["--model", "smollm2-135m", "--rows", "160", "--mean-tokens", "128", "--batch-size", "16", "--gpus", "cpu"]
    before = estimate(*asked, home=tmp_path)["offers"][0]
    assert before["time_s"]["basis"] == "prior"
    points = ((63.0, 1.5), (504.0, 6.0))
    calibrations.add(tmp_path, Measured("cpu", "smollm2-135m", "lora", 0.5, 0.01, points, 1.0))
    after = estimate(*asked, home=tmp_path)["offers"][0]
    assert after["time_s"]["basis"] == "calibrated here"
    # Passes of 8 rows of 128 tokens: two in each of 10 steps, three epochs.
    assert after["parts_s"]["training"] == pytest.approx(30 * 2 * (0.5 + 0.01 * 1024))


def test_a_damaged_calibration_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "calibration.json").write_text("[{]")
    assert "remove it and calibrate again" in problems(*QUICK, "--gpus", "a40", home=tmp_path)[0]
