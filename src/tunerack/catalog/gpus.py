"""Accelerators, their links and their prices, with source and date."""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from tunerack.errors import Invalid, Problem

CPU = "cpu"
# What the driver keeps for itself: torch sees 81,158 of the 81,920 MiB of an A100.
DRIVER_SHARE = 0.01


@dataclass(frozen=True)
class Gpu:
    """A device. memory_mib: what the driver's tool prints; TFLOP/s dense; link_gb_s: both directions together."""

    name: str
    memory_mib: int
    bandwidth_gb_s: float
    bf16_tflops: float
    fp16_tflops: float
    fp32_tflops: float
    link_gb_s: float = 0.0
    link: str = "pcie4"
    tdp_w: float = 0.0
    architecture: str = ""
    source: str = ""
    note: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> float:
        return self.memory_mib * 2.0**20

    @property
    def usable_bytes(self) -> float:
        """What a process can have."""
        return self.memory_bytes * (1 - DRIVER_SHARE)

    @property
    def peak_flops(self) -> float:
        """Dense FLOP/s of the 16-bit format that the device has, fp32 where it has none."""
        return 1e12 * (self.bf16_tflops or self.fp16_tflops or self.fp32_tflops)

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bandwidth_gb_s * 1e9


@dataclass(frozen=True)
class Link:
    name: str
    gb_s: float
    latency_s: float
    measured_share: float
    source: str = ""


@dataclass(frozen=True)
class Price:
    """Dollars per GPU and hour; kind: "on-demand" or "spot"."""

    gpu: str
    usd_per_hour: float
    kind: str
    provider: str
    date: str
    source: str = ""
    note: str = ""


@dataclass(frozen=True)
class Hardware:
    gpus: Mapping[str, Gpu]
    links: Mapping[str, Link]
    prices: tuple[Price, ...]

    def find(self, name: str) -> Gpu:
        """By name or alias in any case; raises Invalid with the nearest names."""
        wanted = _plain(name)
        for gpu in self.gpus.values():
            if wanted in {_plain(alias) for alias in (gpu.name, *gpu.aliases)}:
                return gpu
        near = difflib.get_close_matches(name.lower(), self.gpus, 3, 0.4)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise Invalid(
            Problem(f"GPU {name!r} is not in the catalogue", "gpus", f"{hint}known: {', '.join(sorted(self.gpus))}"),
            param="gpus",
        )

    def prices_of(self, gpu: str) -> list[Price]:
        return [price for price in self.prices if price.gpu == gpu]


def load(home: Path | None = None) -> Hardware:
    """The shipped facts with those of `<home>/catalog/{gpus,prices,links}.toml` in their place or beside them.

    Raises Invalid with every malformed entry.
    """
    shipped = _shipped()
    if home is None:
        return shipped
    folder = home / "catalog"
    gpus, links, prices = dict(shipped.gpus), dict(shipped.links), list(shipped.prices)
    if (own := _own(folder / "gpus.toml")) is not None:
        gpus.update(_gpus(own[0], own[1]))
    if (own := _own(folder / "links.toml")) is not None:
        links.update(_links(own[0], own[1]))
    if (own := _own(folder / "prices.toml")) is not None:
        mine = _prices(own[0], own[1], Hardware(gpus, links, ()))
        named = {price.gpu for price in mine}
        prices = [price for price in prices if price.gpu not in named] + mine
    return Hardware(gpus, links, tuple(prices))


def this_cpu(threads: int | None = None, memory_mib: int | None = None) -> Gpu:
    """The CPU of this machine as a device.

    Peak: cores x 3 GHz x 32 FLOP per cycle (two 8-wide fp32 multiply-adds), the AVX2 rate; bandwidth of two channels
    of DDR4-3200. Both are priors; `tunerack calibrate` measures.
    """
    cores = threads or os.cpu_count() or 1
    if memory_mib is None:
        memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    tflops = cores * 3e9 * 32 / 1e12
    return Gpu(CPU, memory_mib, 40.0, 0.0, 0.0, tflops, architecture="cpu", link="pcie4", source="this machine")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum()).removeprefix("nvidia")


@functools.cache
def _shipped() -> Hardware:
    tables = {}
    for kind in ("gpus", "links", "prices"):
        text = resources.files("tunerack.catalog").joinpath(f"{kind}.toml").read_text(encoding="utf-8")
        tables[kind] = tomllib.loads(text)
    gpus = _gpus(tables["gpus"], "gpus.toml")
    links = _links(tables["links"], "links.toml")
    prices = _prices(tables["prices"], "prices.toml", Hardware(gpus, links, ()))
    return Hardware(gpus, links, tuple(prices))


def _own(file: Path) -> tuple[dict[str, Any], str] | None:
    if not file.exists():
        return None
    try:
        return tomllib.loads(file.read_text(encoding="utf-8")), str(file)
    except tomllib.TOMLDecodeError as error:
        raise Invalid(Problem(f"not TOML: {error}", str(file))) from error


def _build(kind: type, name: str, table: Mapping[str, Any], where: str) -> Any:
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(table) - known)
    if unknown:
        raise Invalid(Problem(f"unknown key {', '.join(unknown)}", where, f"known: {', '.join(sorted(known))}"))
    values = dict(table)
    if "aliases" in values:
        values["aliases"] = tuple(values["aliases"])
    if "name" in known:
        values["name"] = name
    try:
        return kind(**values)
    except TypeError as error:
        raise Invalid(Problem(str(error).split("__init__() ")[-1], where)) from error


def _gpus(tables: Mapping[str, Any], where: str) -> dict[str, Gpu]:
    return {name: _build(Gpu, name, table, f"{where}: gpus.{name}") for name, table in tables.get("gpus", {}).items()}


def _links(tables: Mapping[str, Any], where: str) -> dict[str, Link]:
    return {name: _build(Link, name, table, f"{where}: links.{name}") for name, table in tables["links"].items()}


def _prices(tables: Mapping[str, Any], where: str, hardware: Hardware) -> list[Price]:
    prices: list[Price] = []
    problems: list[Problem] = []
    for number, table in enumerate(tables.get("prices", ()), 1):
        place = f"{where}: prices {number}"
        missing = [key for key in ("gpu", "usd_per_hour", "date") if not table.get(key)]
        if missing:
            problems.append(Problem(f"needs {', '.join(missing)}", place, "a price counts only with its date"))
            continue
        if not isinstance(table["usd_per_hour"], int | float) or table["usd_per_hour"] < 0:
            problems.append(
                Problem(f"usd_per_hour is {table['usd_per_hour']!r}", place, "give dollars per GPU and hour")
            )
            continue
        values = {"kind": "on-demand", "provider": "yours", **table, "gpu": hardware.find(table["gpu"]).name}
        prices.append(_build(Price, "", values, place))
    if problems:
        raise Invalid(problems)
    return prices
