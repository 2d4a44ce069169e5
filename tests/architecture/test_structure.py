"""The rules that keep the code a house one would live in, checked on the code itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tunerack"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 400
MAX_FUNCTION_LINES = 60
CATCH_ALLS = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers", "tools"}
# Every layer may import those below it only; what stands together in one row may not import its neighbours, apart from
# packages that the row names as allowed.
ENVIRONMENT_READER = "settings.py"


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_module_is_short_and_has_a_name_of_the_field(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_LINES, f"{len(lines)} lines; split it into two rooms"
    assert not CATCH_ALLS & set(path.relative_to(SOURCE).with_suffix("").parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_functions_fit_a_screen(path):
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long


def imports_of(path: Path, names: set[str]) -> set[str]:
    """Modules of the package that this one names in an import, also inside functions and for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found & names


def test_no_module_imports_itself_in_a_circle():
    names = {name_of(path) for path in MODULES}
    graph = {name_of(path): imports_of(path, names) - {name_of(path)} for path in MODULES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for other in sorted(graph[module]):
                # A package's own __init__ is run before its modules; it holds no code here.
                if not module.startswith(f"{other}."):
                    visit(other, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_the_environment_is_read_in_one_place():
    readers = [
        str(path.relative_to(SOURCE))
        for path in MODULES
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text()) and path.name != ENVIRONMENT_READER
    ]
    assert readers == []


def test_imports_go_one_way():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=SOURCE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_control_runs_without_torch():
    """The control process, the command line and the estimate import no torch, directly or through others."""
    program = (
        "import sys, tunerack.api.serve, tunerack.controller, tunerack.cli.main, tunerack.estimate.plan\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'safetensors'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
