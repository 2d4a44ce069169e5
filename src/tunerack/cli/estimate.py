"""tunerack estimate."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunerack.cli.output import emit, json_option
from tunerack.errors import Invalid, Problem
from tunerack.settings import Settings
from tunerack.units import is_number, path_as_given

if TYPE_CHECKING:
    from tunerack.catalog.shape import Shape
    from tunerack.estimate.request import Answer
    from tunerack.spec.estimate import EstimateSpec

# Option, field of EstimateSpec, help. A flag has no metavar.
OPTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("--model", "model", "NAME", "Catalogue name, config.json, or a folder that holds one."),
    ("--data", "data", "FILE", "JSONL file of rows."),
    ("--rows", "rows", "N", "Rows, where there is no file."),
    ("--mean-tokens", "mean_tokens", "N", "Tokens of a row, where there is no file."),
    ("--method", "method", "full|lora|qlora", "How the model is changed.  [lora]"),
    ("--weights", "weights", "FORMAT", "Storage of the base: bf16, int8, nf4, nf4-single, gptq-int4, fp32."),
    ("--rank", "rank", "N", "Rank of adapters.  [16]"),
    ("--dropout", "dropout", "P", "Dropout of adapters."),
    ("--target-modules", "targets", "NAMES", "Adapted modules.  [all-linear]"),
    ("--adapters", "adapters", "N", "Adapters trained together on one base.  [1]"),
    ("--optimizer", "optimizer", "NAME", "adamw, adamw_fused, adamw_8bit, paged_adamw_8bit, lion, sgd."),
    ("--seq-len", "seq_len", "N", "Longest row in tokens.  [longest in the data]"),
    ("--micro-batch", "micro_batch", "N", "Rows in one forward and backward pass.  [largest that fits]"),
    ("--batch-size", "batch_size", "N", "Rows per optimizer step.  [16]"),
    ("--epochs", "n_epochs", "N", "Passes over the rows.  [3]"),
    ("--max-steps", "max_steps", "N", "Ends earlier."),
    ("--attention", "attention", "flash|sdpa|eager", "Attention kernel.  [flash]"),
    ("--loss", "loss", "plain|fused|chunked", "Loss kernel.  [plain]"),
    ("--evaluations", "evaluations", "N", "Evaluations on a tenth of the rows."),
    ("--gpus", "gpus", "NAMES", "For example a40,h100:2 or cpu.  [all that have a price]"),
    ("--strategy", "strategy", "NAME", "Over several devices: ddp, fsdp, zero1, zero2, zero3."),
    ("--price-kind", "price_kind", "KIND", "Prices that count: on-demand, spot.  [all]"),
    ("--max-usd", "max_usd", "DOLLARS", "Take the cheapest that holds this."),
    ("--by", "by", "usd|time", "Rank by dollars or by time.  [usd]"),
)


def _options(command: Any) -> Any:
    for option, field, metavar, text in reversed(OPTIONS):
        command = click.option(option, field, metavar=metavar, help=text)(command)
    return command


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@_options
@click.option("--packing", is_flag=True, default=None, help="Lay rows end to end into full sequences.")
@click.option("--amp", is_flag=True, default=None, help="Full fine-tuning holds fp32 weights, computes in 16 bit.")
@click.option("--no-checkpointing", is_flag=True, help="Keep all activations.")
@click.option("--deadline", metavar="TIME", help="Take the cheapest that is done by then: 6h, 90m, 2d.")
@click.option("--price", "prices", multiple=True, metavar="GPU=USD", help="Your price per GPU and hour.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="tokenizer.json, to count tokens exactly.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write dollars over hours to a .png or .svg file.")
@click.option("--trace", is_flag=True, help="Run the step on fake tensors and report its peak (needs torch).")
@click.option("--model-of", type=click.Choice(["tunerack", "paper"]), default="tunerack", help="Whose model.")
@click.option("--variant", type=click.Choice(["code", "text"]), default="code", help="Of the paper.")
@json_option
@click.pass_obj
def command(
    settings: Settings,
    file: Path | None,
    no_checkpointing: bool,
    deadline: str | None,
    prices: tuple[str, ...],
    tokenizer: Path | None,
    plot: Path | None,
    trace: bool,
    model_of: str,
    variant: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Say what a fine-tune needs, takes and costs, before it starts.

    FILE is a job file of tunerack, a configuration of axolotl, LLaMA-Factory or TRL, or an OpenAI job body. Options
    win over it. Nothing is started and nothing is downloaded.
    """
    if model_of == "paper":
        from tunerack.cli.paper import show

        show(values.get("gpus"), variant, as_json=as_json)
        return
    given = {name: value for name, value in values.items() if value is not None}
    if no_checkpointing:
        given["checkpointing"] = False
    if deadline is not None:
        given["deadline_s"] = seconds(deadline)
    answer, notes, how = estimate(settings, file, given, prices, tokenizer)
    traced = None
    if trace:
        from tunerack.cli.trace import peak

        traced = peak(answer.spec, answer, settings)
    if plot is not None:
        from tunerack.cli.cost_plot import write

        write(plot, answer)
        notes.append(f"plot written to {plot}")
    from tunerack.cli import estimate_text

    if as_json:
        emit(estimate_text.as_json(answer, notes, how, traced))
    else:
        click.echo(estimate_text.render(answer, notes, how, traced))


def estimate(
    settings: Settings, file: Path | None, given: dict[str, Any], prices: tuple[str, ...], tokenizer: Path | None
) -> tuple[Answer, list[str], str]:
    """The answer, notes on what was read, and how the tokens were counted. Raises Invalid."""
    from tunerack.catalog import gpus
    from tunerack.estimate import request
    from tunerack.store.calibrations import load as load_calibrations

    spec, notes, folder = read_spec(file, given)
    shape, model_folder = shape_of(spec.model, settings, folder)
    lengths, how = None, ""
    if spec.data:
        from tunerack.cli.tokens import count

        path = Path(spec.data) if Path(spec.data).is_absolute() else folder / spec.data
        counted = count(path, tokenizer or model_folder)
        lengths, how = counted.lengths, counted.how
        if counted.malformed:
            shown = ", ".join(str(line) for line in counted.malformed[:5])
            notes.append(f"{len(counted.malformed)} lines of {path.name} hold no row: {shown}")
    hardware = gpus.load(settings.home)
    own = own_prices(prices, hardware)
    return request.answer(spec, shape, lengths, hardware, load_calibrations(settings.home), own), notes, how


def read_spec(file: Path | None, given: dict[str, Any]) -> tuple[EstimateSpec, list[str], Path]:
    """The spec of a file and options, what was read over, and the folder that relative paths start at.

    Raises Invalid with all problems; `where` is `job.yaml:3: rank` or `--rank`.
    """
    from tunerack.spec import estimate as spec_of
    from tunerack.spec import foreign

    flags = {field: option for option, field, _, _ in OPTIONS}
    if file is None:
        if "model" not in given:
            raise Invalid("no model", hint="tunerack estimate --model smollm2-135m --data train.jsonl")
        return spec_of.from_mapping(given, lambda field: flags.get(field, f"--{field}")), [], Path()
    from tunerack.spec.jobfile import line_of, load_job_file

    mapping, lines = load_job_file(file)

    def place(field: str) -> str:
        if field in given:
            return flags.get(field, f"--{field}")
        return f"{file.name}:{line_of(lines, field)}: {field}" if field else file.name

    if foreign.origin_of(mapping) is not None:
        read = foreign.read(mapping, place, **given)
        notes = [f"read as a configuration of {read.origin}"]
        if read.unused:
            notes.append(f"not used: {', '.join(read.unused)}")
        return read.spec, notes, file.parent
    if "training_file" in mapping:
        return _of_job(mapping, given, place), [], file.parent
    return spec_of.from_mapping({**mapping, **given}, place), [], file.parent


def _of_job(mapping: dict[str, Any], given: dict[str, Any], place: Any) -> EstimateSpec:
    """A job file of `tunerack train`."""
    from tunerack.spec import estimate as spec_of
    from tunerack.spec.job import AUTO
    from tunerack.spec.parse import parse_job

    job = parse_job(mapping, place)
    if job.lora.use_dora:
        raise Invalid(
            Problem("DoRA is not estimated", place("lora"), "estimate it as plain LoRA: it takes less memory and time"),
            param="lora.use_dora",
        )
    values: dict[str, Any] = {
        "model": job.model,
        "method": job.method,
        "data": job.training_file,
        "rank": job.lora.rank,
        "dropout": job.lora.dropout,
        "targets": list(job.lora.target_modules),
        "max_steps": job.max_steps,
    }
    for name in ("n_epochs", "batch_size", "seq_len"):
        value = getattr(job, name)
        if value != AUTO:
            values[name] = value
    return spec_of.from_mapping({**values, **given}, place)


def shape_of(model: str, settings: Settings, folder: Path) -> tuple[Shape, Path | None]:
    """Shape by catalogue name, or from a config.json or the folder of one; and that folder. Raises Invalid."""
    from tunerack.catalog import config, models

    entry = models.find(model, settings.home / "catalog" / "models.toml")
    if entry is not None:
        return entry.shape, None
    for path in (path_as_given(model), folder / model):
        if path.exists():
            return config.read_file(path), path if path.is_dir() else path.parent
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)[bB]", model):
        from tunerack.catalog.shape import scaled

        return scaled(float(size[1]) * 1e9), None
    from tunerack.spec.parse import did_you_mean

    names = models.names(settings.home / "catalog" / "models.toml")
    hint = did_you_mean(model, names) or "give a catalogue name, a config.json, or a size such as 7b"
    raise Invalid(Problem(f"model {model!r} is not in the catalogue, and no such file", "--model", hint), param="model")


def seconds(text: str) -> float:
    """`6h` -> 21600. Raises Invalid; a time that is already over is one that is not above zero."""
    found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([smhd]?)\s*", text)
    if found is None:
        raise Invalid(Problem(f"{text!r} is no time", "--deadline", "for example 6h, 90m or 2d"), param="deadline")
    value = float(found[1]) * {"": 3600, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    if value <= 0:
        raise Invalid(
            Problem(f"{text.strip()} from now is already past", "--deadline", "give a time ahead, such as 6h"),
            param="deadline",
        )
    return value


def own_prices(texts: tuple[str, ...], hardware: Any) -> dict[str, float]:
    """`a40=0.5` by catalogue name. Raises Invalid with all problems."""
    found: dict[str, float] = {}
    problems: list[Problem] = []
    for text in texts:
        name, _, value = text.partition("=")
        try:
            price = float(value)
            if price < 0 or not is_number(price):
                raise ValueError
        except ValueError:
            problems.append(Problem(f"{text!r} is no price", "--price", "for example --price a40=0.37"))
            continue
        if name.lower() == "cpu":
            found["cpu"] = price
            continue
        try:
            found[hardware.find(name).name] = price
        except Invalid as error:
            problems += error.problems
    if problems:
        raise Invalid(problems, param="price")
    return found
