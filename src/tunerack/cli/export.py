"""tunerack export."""

from __future__ import annotations

from pathlib import Path

import click

from tunerack.cli.output import emit, json_option
from tunerack.errors import Invalid
from tunerack.settings import Settings


@click.command()
@click.argument("adapter")
@click.option("--merge", is_flag=True, help="Write base and adapter as one Hugging Face folder.")
@click.option("--gguf", is_flag=True, help="Write base and adapter as one GGUF file, for llama.cpp.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder, or file, to write.")
@click.option("--model", default=None, metavar="NAME", help="Base model of an adapter that is a folder.")
@json_option
@click.pass_obj
def command(
    settings: Settings, adapter: str, merge: bool, gguf: bool, out: Path, model: str | None, as_json: bool
) -> None:
    """Write the base with ADAPTER merged into it.

    ADAPTER is the name of an adapter on this machine's server, or a folder as PEFT saves it (then --model names its
    base). The sum is made in fp32.
    """
    import importlib.util
    import json
    import subprocess
    import sys

    from tunerack.client import ControlClient
    from tunerack.errors import Problem, TunerackError, Unavailable
    from tunerack.settings import compute_environment

    if merge == gguf:
        raise click.UsageError("give --merge for a folder, or --gguf for a file")
    folder, base = Path(adapter).expanduser(), model
    if not (folder / "adapter_config.json").is_file():
        with ControlClient.of(settings) as client:
            found = client.adapter(adapter)
        folder, base = settings.adapters / found["version"], found["base_model"]
    elif base is None:
        raise Invalid("names the base of an adapter that is a folder", where="--model", hint="--model smollm2-135m")
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("needs torch", hint="pip install 'tunerack[engine]'")
    request = {
        "home": str(settings.home),
        "model": base,
        "adapter": str(folder),
        "out": str(out.expanduser().absolute()),
        "gguf": gguf,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tunerack.engine.export", json.dumps(request)],
        capture_output=True,
        text=True,
        env=compute_environment(),
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise TunerackError(f"the export ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise Invalid([Problem(**problem) for problem in answer["error"]])
    if as_json:
        emit(answer)
    else:
        click.echo(f"wrote {out} with {answer['merged']} layers merged")
