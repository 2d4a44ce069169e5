"""A job on its way to the server: its files checked and uploaded, its plan shown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerack.cli.output import cell, duration, pairs, took
from tunerack.client import ControlClient
from tunerack.data.rows import read_rows
from tunerack.errors import Invalid, Problem
from tunerack.spec.job import AUTO, JobSpec
from tunerack.units import path_as_given

TOP_LEVEL = ("model", "training_file", "validation_file", "suffix", "adapter_name", "lora")
# Id of a file that the server has already, in place of a path.
FILE_ID = re.compile(r"file-[A-Za-z0-9]+")


@dataclass(frozen=True)
class Upload:
    """A spec whose files are on the server, and those that this upload put there."""

    spec: JobSpec
    uploaded: tuple[str, ...]


def local_files(spec: JobSpec, folder: Path) -> dict[str, Path]:
    """Paths by field; relative ones start at `folder`. Ids of files that the server has already are left out."""
    asked = {"training_file": spec.training_file, "validation_file": spec.validation_file}
    return {
        field: folder / path_as_given(value)
        for field, value in asked.items()
        if value is not None and not FILE_ID.fullmatch(value)
    }


def check_files(paths: Sequence[Path]) -> None:
    """Read every row before anything is sent; raises Invalid with the problems of all files."""
    problems: list[Problem] = []
    for path in dict.fromkeys(paths):
        try:
            read_rows(path, str(path)).require()
        except Invalid as error:
            problems += error.problems
    if problems:
        raise Invalid(problems, code="invalid_training_file", param="training_file")


def upload(client: ControlClient, spec: JobSpec, folder: Path) -> Upload:
    """Send the files of a spec; returns it with their ids in place of paths."""
    paths = local_files(spec, folder)
    ids = {path: client.upload(path)["id"] for path in dict.fromkeys(paths.values())}
    return Upload(spec.with_values(**{field: ids[path] for field, path in paths.items()}), tuple(ids.values()))


def body_of(spec: JobSpec) -> dict[str, Any]:
    """The body of `POST /v1/fine_tuning/jobs` for a spec; what is left to "auto" is left out."""
    values = {name: value for name, value in spec.to_json().items() if value is not None and value != AUTO}
    body = {name: values.pop(name) for name in TOP_LEVEL if name in values}
    return {**body, "training": values}


def plan_text(plan: Mapping[str, Any]) -> str:
    """The answer of `POST /v1/plan` as a person reads it."""
    spec, report, time = plan["spec"], plan["report"], plan["predicted_s"]
    rows = f"{cell(report['rows_kept'])} kept of {cell(report['rows_in'])}"
    lines = {"base model": spec["model"], "rows": rows}
    for dropped in report["dropped"]:
        lines[f"  {dropped['reason']}"] = f"{cell(dropped['count'])} dropped, {_lines(dropped['lines'])}"
    for warning in report.get("warnings", ()):
        lines[f"  {warning['reason']}"] = f"{cell(warning['count'])} kept, {_lines(warning['lines'])}"
    trained = cell(plan["trained_tokens_per_epoch"])
    lines["tokens"] = (
        f"{cell(plan['tokens_per_epoch'])} per epoch, {trained} of them trained; "
        f"longest row {cell(plan['longest'])}; {cell(plan['total_tokens'])} in all"
    )
    lines["steps"] = f"{cell(plan['steps'])} of {spec['batch_size']} rows, {spec['n_epochs']} epochs"
    lines["learning rate"] = f"{spec['learning_rate']:g}, {spec['lr_schedule']} after {spec['warmup_steps']} steps"
    lora = spec["lora"]
    lines["adapter"] = f"rank {lora['rank']}, alpha {lora['alpha']:g} on {', '.join(lora['target_modules'])}"
    lines["trainable"] = f"{cell(plan['trainable_parameters'])} parameters"
    for part in plan.get("parts", ()):
        lines[f"  {part['kind']}"] = _part(part)
    low, high = minutes(time["low"]), minutes(time["high"])
    lines["predicted time"] = f"{minutes(time['mid'])} minutes ({low} to {high}; {time['basis']})"
    return pairs(lines)


def _part(part: Mapping[str, Any]) -> str:
    adapted = f"{cell(part['adapted_modules'])} adapted, {cell(part['trained_parameters'])} trained parameters"
    frozen = f"{cell(part['frozen_tensors'])} tensors frozen, {cell(part['frozen_parameters'])} parameters"
    shown = [text for text, count in ((adapted, part["adapted_modules"]), (frozen, part["frozen_tensors"])) if count]
    return "; ".join(shown)


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}"


def job_line(job: Mapping[str, Any]) -> str:
    """Where a job stands, on one line."""
    own = job.get("tunerack") or {}
    state = own.get("state") or job["status"]
    if not own.get("total_steps"):
        return str(state)
    parts = [f"{state:<9}", f"step {own.get('step') or 0:>3}/{own['total_steps']}"]
    if own.get("tokens_per_s"):
        parts.append(f"{own['tokens_per_s']:.0f} tokens/s")
    if own.get("eta_s") is not None:
        parts.append(f"eta {duration(own['eta_s'])}")
    if own.get("planned_s") and own.get("elapsed_s") is not None:
        parts.append(took(own))
    return "  ".join(parts)


def _lines(lines: Sequence[int], shown: int = 8) -> str:
    rest = ", ..." if len(lines) > shown else ""
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:shown]))}{rest}"
