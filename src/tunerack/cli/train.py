"""tunerack train."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunerack.cli import full
from tunerack.cli.options import flag, given, spec_options
from tunerack.cli.output import emit, json_option, took
from tunerack.errors import Invalid, TunerackError
from tunerack.settings import Settings
from tunerack.spec.job import JobSpec
from tunerack.units import path_as_given

if TYPE_CHECKING:
    from tunerack.client import ControlClient
    from tunerack.estimate.cost import Offer


@click.command()
@click.argument("data", required=False, type=click.Path(path_type=Path))
@click.option("--job", "job_file", type=click.Path(path_type=Path), help="YAML or JSON file of the options below.")
@spec_options
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the model that --method full makes.")
@click.option("-y", "--yes", is_flag=True, help="Submit without asking.")
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@click.option("--deadline", metavar="TIME", help="Submit only when this machine is done by then: 6h, 90m, 2d.")
@click.option(
    "--max-usd",
    type=click.FloatRange(0),
    default=0.0,
    metavar="DOLLARS",
    help="Mark the offers beside the plan that cost more.",
)
@click.option("--follow", "wait", is_flag=True, help="Show events until the job is finished.")
@json_option
@click.pass_obj
def command(
    settings: Settings,
    data: Path | None,
    job_file: Path | None,
    out: Path | None,
    yes: bool,
    dry_run: bool,
    deadline: str | None,
    max_usd: float,
    wait: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Plan a fine-tune on the rows of DATA and submit it.

    DATA is a JSONL file of {messages}, {prompt, completion} or {instruction, input, output} rows, or the id of an
    uploaded file. Options given here win over those of the job file, whose paths start at its own folder.
    """
    from tunerack.cli.estimate import seconds
    from tunerack.cli.offers import check_here, offers
    from tunerack.cli.submission import body_of, check_files, local_files, upload
    from tunerack.client import ControlClient

    deadline_s = 0.0 if deadline is None else seconds(deadline)
    spec, folder = read_spec(data, job_file, given(values))
    files = local_files(spec, folder)
    check_files(list(files.values()))
    full.check(spec, out)
    if not (yes or dry_run) and (as_json or not sys.stdin.isatty()):
        raise click.UsageError("nobody can be asked here; add --yes to submit or --dry-run to see the plan only")
    if out is not None:
        if deadline_s:
            raise click.UsageError("--deadline is not held against a model that --out writes; leave one of them out")
        full.train(settings, spec, files, out, yes=yes, dry_run=dry_run, as_json=as_json)
        return
    with ControlClient.of(settings) as client:
        client.health()
        sent = upload(client, spec, folder)
        submitted = False
        try:
            body = body_of(sent.spec)
            plan = client.plan(body)
            elsewhere = offers(plan, settings, deadline_s, max_usd)
            _show(plan, elsewhere, as_json=as_json, dry_run=dry_run)
            if dry_run:
                return
            check_here(plan, elsewhere, deadline_s)
            if not yes:
                click.confirm("submit?", default=True, abort=True)
            job = client.create_job(body)
            submitted = True
        finally:
            if not submitted:
                _take_back(client, sent.uploaded)
        if as_json and not wait:
            emit({"plan": plan, "job": job})
        elif not as_json:
            click.echo(f"\nsubmitted {job['id']}\nwatch it: tunerack logs -f {job['id']}")
        if wait:
            _follow(client, job["id"], plan, as_json=as_json)


def _take_back(client: ControlClient, uploaded: Sequence[str]) -> None:
    """Remove the files of a job that was not submitted."""
    for file_id in uploaded:
        with contextlib.suppress(TunerackError):
            client.delete_file(file_id)


def _show(plan: dict[str, Any], elsewhere: Sequence[Offer], *, as_json: bool, dry_run: bool) -> None:
    """The plan and the offers beside it, as text, or as JSON when nothing else will be printed."""
    from tunerack.cli.offers import offer_line, text
    from tunerack.cli.submission import plan_text

    if not as_json:
        click.echo(f"{plan_text(plan)}\n\n{text(plan, elsewhere)}\n")
    elif dry_run:
        emit({"plan": plan, "offers": [offer_line(entry) for entry in elsewhere]})


def read_spec(data: Path | None, job_file: Path | None, asked: dict[str, Any]) -> tuple[JobSpec, Path]:
    """The spec of a command line, with paths in place of file ids, and the folder that relative ones start at.

    Raises Invalid with all problems; `where` is the flag, or the line of the job file.
    """
    from tunerack.cli.submission import FILE_ID
    from tunerack.spec.jobfile import line_of, load_job_file
    from tunerack.spec.parse import parse_job

    mapping: dict[str, Any] = {}
    lines: dict[str, int] = {}
    folder = Path()
    if job_file is not None:
        mapping, lines = load_job_file(job_file)
        folder = job_file.parent
    if data is not None:
        asked["training_file"] = str(data)
    for field in {"training_file", "validation_file"} & asked.keys():
        # Unlike the paths of a job file, these start where the person is.
        if not FILE_ID.fullmatch(asked[field]):
            asked[field] = str(path_as_given(asked[field]).absolute())
    from_flags = set(asked) | {f"lora.{name}" for name in asked.get("lora", {})}
    lora = mapping.get("lora", {})
    if "lora" in asked and isinstance(lora, dict):
        asked["lora"] = {**lora, **asked["lora"]}
    merged = {**mapping, **asked}
    if "training_file" not in merged:
        raise Invalid("nothing to train on", hint="tunerack train DATA.jsonl --model smollm2-135m")
    return parse_job(merged, _places(from_flags, lines, job_file, line_of)), folder


def _places(
    from_flags: set[str], lines: dict[str, int], job_file: Path | None, line_of: Callable[..., int]
) -> Callable[[str], str]:
    def place(field: str) -> str:
        if job_file is None or field in from_flags:
            return "DATA" if field == "training_file" else flag(field.removeprefix("lora."))
        return f"{job_file.name}:{line_of(lines, field)}: {field}"

    return place


def _follow(client: Any, job_id: str, plan: Any, *, as_json: bool) -> None:
    from tunerack.cli.follow import event_line, follow, raise_unless_succeeded

    for event in follow(client, job_id):
        if not as_json:
            click.echo(event_line(event))
    job = client.job(job_id)
    if as_json:
        emit({"plan": plan, "job": job})
    raise_unless_succeeded(job)
    if job["status"] != "succeeded":
        raise TunerackError(f"job {job_id} was {job['status']}")
    if not as_json:
        click.echo(f"\n{took(job['tunerack'])}; talk to it: tunerack chat {job['fine_tuned_model']}")
