"""Pages against the program: links lead somewhere, commands and options exist, settings and endpoints are all named."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import click
import pytest

from tunerack.cli.main import command as cli
from tunerack.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{target} is not there"


def command_lines(page: Path) -> list[list[str]]:
    """Every `tunerack ...` line of the page's shell blocks."""
    found = []
    for block in re.findall(r"```(?:bash|console|sh)\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.removeprefix("$ ").split("#")[0].strip()
            if words.startswith("tunerack "):
                found.append(shlex.split(words)[1:])
    return found


def follow(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these words reach, and the words that are left."""
    command: click.Command = cli
    while isinstance(command, click.Group) and arguments:
        if arguments[0] == "--home":
            arguments = arguments[2:]
            continue
        inner = command.get_command(click.Context(command), arguments[0])
        if inner is None:
            raise AssertionError(f"there is no command {arguments[0]!r}")
        command, arguments = inner, arguments[1:]
    return command, arguments


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_options_exist(page):
    for words in command_lines(page):
        command, rest = follow(words)
        known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        for word in rest:
            if word.startswith("-") and len(word) > 1:
                assert word.split("=")[0] in known, f"tunerack {' '.join(words)}: {word} is not an option"


def test_the_pages_hold_commands_to_check():
    assert sum(len(command_lines(page)) for page in PAGES) > 15


def test_every_setting_is_named():
    text = "".join(page.read_text() for page in PAGES)
    for field in fields(Settings):
        assert f"TUNERACK_{field.name.upper()}" in text, f"TUNERACK_{field.name.upper()} is on no page"


def test_every_endpoint_is_on_the_page_of_the_api():
    from tunerack.api import adapters, files, generation, health, jobs, models, usage

    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    named = {re.sub(r"\{[^}]*\}", "{}", path) for path in re.findall(r"(/(?:v1/[\w/{}]+|health|metrics))", page)}
    modules = (adapters, files, generation, health, jobs, models, usage)
    routes = {route.path for module in modules for route in module.ROUTES}
    assert len(routes) > 20
    # SGLang's spelling of two that are named.
    extra = ("/load_lora_adapter", "/unload_lora_adapter")
    plain = {re.sub(r"\{[^}]*\}", "{}", route) for route in routes if not route.endswith(extra)}
    assert plain <= named, plain - named
