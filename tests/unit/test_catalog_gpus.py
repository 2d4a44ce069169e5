"""Devices, links and prices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunerack.catalog import gpus
from tunerack.errors import Invalid


def test_names_and_aliases_find_a_card() -> None:
    hardware = gpus.load()
    for name in ("A100-SXM4-80GB", "a100 80gb", "NVIDIA A100-SXM4-80GB", "a100_80gb"):
        assert hardware.find(name).name == "a100-80gb"


def test_an_unknown_card_gets_the_nearest_names() -> None:
    with pytest.raises(Invalid, match="did you mean a40"):
        gpus.load().find("a41")


def test_every_card_has_a_source_and_every_price_a_date() -> None:
    hardware = gpus.load()
    assert {"t4", "a40", "h100", "h200", "b200", "mi300x"} <= set(hardware.gpus)
    for gpu in hardware.gpus.values():
        assert gpu.source, gpu.name
        assert gpu.peak_flops > 5e12, gpu.name
        assert gpu.link in hardware.links, gpu.name
    for price in hardware.prices:
        assert price.date, price
        assert price.source, price
        assert price.gpu in hardware.gpus, price


def test_cards_without_bf16_count_fp16() -> None:
    assert gpus.load().find("t4").peak_flops == 65e12


def test_the_papers_prices_are_those_of_table_4() -> None:
    paper = {p.gpu: p.usd_per_hour for p in gpus.load().prices if p.source.startswith("arXiv 2408.04693")}
    assert paper == {"a40": 0.79, "a100-80gb": 1.67, "h100": 2.1}


def test_a_users_files_override_and_add(tmp_path: Path) -> None:
    folder = tmp_path / "catalog"
    folder.mkdir()
    (folder / "gpus.toml").write_text(
        "[gpus.ours]\nmemory_mib = 1000\nbandwidth_gb_s = 1\nbf16_tflops = 1\nfp16_tflops = 1\nfp32_tflops = 1\n"
    )
    (folder / "prices.toml").write_text(
        '[[prices]]\ngpu = "a40"\nusd_per_hour = 0.1\ndate = "2026-11-01"\n'
        '[[prices]]\ngpu = "ours"\nusd_per_hour = 0.2\ndate = "2026-11-01"\n'
    )
    hardware = gpus.load(tmp_path)
    assert hardware.find("OURS").memory_mib == 1000
    assert [price.usd_per_hour for price in hardware.prices_of("a40")] == [0.1]
    assert hardware.prices_of("h100")


def test_a_price_without_a_date_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "catalog"
    folder.mkdir()
    (folder / "prices.toml").write_text('[[prices]]\ngpu = "a40"\nusd_per_hour = 0.1\n')
    with pytest.raises(Invalid, match="needs date"):
        gpus.load(tmp_path)


def test_the_cpu_of_this_machine_is_a_device() -> None:
    cpu = gpus.this_cpu(threads=2, memory_mib=4096)
    assert cpu.memory_bytes == 4 * 2**30
    assert cpu.peak_flops == 2 * 3e9 * 32
