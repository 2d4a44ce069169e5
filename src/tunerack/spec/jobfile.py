"""Job files in YAML or JSON, with the line of every field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tunerack.errors import Invalid, Problem
from tunerack.spec.job import JobSpec
from tunerack.spec.parse import parse_job


def job_from_file(path: Path) -> JobSpec:
    """A job file in YAML or JSON. Raises Invalid; each `where` reads `job.yaml:3: lora.rank`."""
    mapping, lines = load_job_file(path)
    return parse_job(mapping, lambda field: f"{path.name}:{line_of(lines, field)}: {field}")


class _JobLoader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number, as people mean it (YAML 1.1 asks for a dot)."""


_JobLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def load_job_file(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a YAML or JSON file, and the line of each dotted field. Raises Invalid (`job.yaml:7: ...`)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Invalid(f"can't be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise Invalid("is not UTF-8 text", where=str(path)) from error
    loader = _JobLoader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise Invalid("a job file is a mapping of fields", where=path.name, hint="for example: model: smollm2-135m")
        lines: dict[str, int] = {}
        repeated = _note_lines(node, "", lines)
        if repeated:
            raise Invalid([Problem("given twice", f"{path.name}:{line}: {field}") for field, line in repeated])
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path.name}:{mark.line + 1}" if mark else path.name
        raise Invalid(f"not valid YAML or JSON: {error.problem}", where=where) from error
    except yaml.YAMLError as error:
        raise Invalid(f"not valid YAML or JSON: {error}", where=path.name) from error
    finally:
        loader.dispose()


def line_of(lines: Mapping[str, int], field: str) -> int:
    """Line of a dotted field, or of the nearest field around it; 1 for a field that is missing."""
    while field:
        if field in lines:
            return lines[field]
        field = field.rpartition(".")[0]
    return 1


def _note_lines(node: yaml.MappingNode, prefix: str, lines: dict[str, int]) -> list[tuple[str, int]]:
    repeated = []
    for key, value in node.value:
        field, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if field in lines:
            repeated.append((field, line))
        lines[field] = line
        if isinstance(value, yaml.MappingNode):
            repeated += _note_lines(value, f"{field}.", lines)
    return repeated
