"""The command line: commands are files of this folder, imported when they are called."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from tunerack.errors import Invalid, Problem, TunerackError, Unavailable
from tunerack.settings import Settings

# Name, and its line in --help: so that help needs none of the modules.
COMMANDS = {
    "quickstart": "Train two adapters at once and talk to both, in a few minutes.",
    "up": "Start the server of this machine.",
    "down": "Stop the server and its workers.",
    "estimate": "Say what a fine-tune needs, takes and costs.",
    "calibrate": "Run a few training steps here, so that estimates fit this device.",
    "data": "Show rows as a base will be trained on them.",
    "train": "Plan a fine-tune and submit it.",
    "profile": "Show where the time of training steps goes.",
    "ps": "List jobs and workers.",
    "logs": "Show the events of a job.",
    "plot": "Draw the loss of JOB over its steps.",
    "cancel": "Stop a job.",
    "pause": "Save a job and let it wait.",
    "resume": "Let a paused job go on.",
    "checkpoint": "Save a running job now.",
    "adapters": "List, show and remove adapters.",
    "export": "Write a base with an adapter merged into it.",
    "chat": "Talk to a base model or an adapter.",
    "usage": "Show the tokens that each model used.",
    "upcycle": "Make a mixture of experts from a dense base model.",
    "simulate": "Replay a trace of jobs under a scheduling policy.",
    "doctor": "Check this installation, and repair it.",
    "version": "Show versions.",
}


class Commands(click.Group):
    """Imports the module of a command only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tunerack.cli.{name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            from tunerack.spec.parse import did_you_mean

            close = did_you_mean(name, COMMANDS)
            raise click.UsageError(f"No such command {name!r}." + (f" D{close[1:]}" if close else ""), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: tunerack quickstart. Settings are read from TUNERACK_* variables.",
)
@click.option(
    "--home", metavar="FOLDER", type=click.Path(path_type=Path), help="Folder of the server.  [default: ~/.tunerack]"
)
@click.pass_context
def command(context: click.Context, home: Path | None) -> None:
    """Plan, train and serve many fine-tuned language models on a few shared GPUs."""
    settings = Settings.from_environment()
    context.obj = settings.at(home) if home is not None else settings


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line; exits with 0, 1 (an error that was told), 2 (a wrong command line) or 130 (interrupted)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        command.main(args=list(arguments), prog_name="tunerack", standalone_mode=False)
        sys.exit(0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except TunerackError as error:
        sys.stderr.write(error_text(error, as_json="--json" in arguments))
        sys.exit(1)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("\ninterrupted\n")
        sys.exit(130)
    except BrokenPipeError:
        # The reader has gone; without this Python complains again when it flushes at exit.
        sys.stdout = None
        sys.exit(0)
    except UnicodeError as error:
        # Bytes of the terminal, of a file's name or of standard input that are no text.
        told = Invalid(f"a text is not UTF-8: {error}", hint="write it in UTF-8")
        sys.stderr.write(error_text(told, as_json="--json" in arguments))
        sys.exit(1)
    except OSError as error:
        lost = Unavailable(error.strerror or str(error), where=str(error.filename) if error.filename else None)
        sys.stderr.write(error_text(lost, as_json="--json" in arguments))
        sys.exit(1)


def error_text(error: TunerackError, *, as_json: bool) -> str:
    """All problems of an error, each with its hint on a line of its own; or one line of JSON."""
    if as_json:
        problems = [{"message": p.message, "where": p.where, "hint": p.hint} for p in error.problems]
        return json.dumps({"error": {"code": error.code, "param": error.param, "problems": problems}}) + "\n"
    return "".join(_problem_text(problem) for problem in error.problems)


def _problem_text(problem: Problem) -> str:
    place = f"{problem.where}: " if problem.where else ""
    hint = f"  hint: {problem.hint}\n" if problem.hint else ""
    return f"error: {place}{problem.message}\n{hint}"


if __name__ == "__main__":
    main()
