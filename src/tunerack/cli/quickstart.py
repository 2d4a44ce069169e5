"""tunerack quickstart."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from typing import Any

import click

from tunerack.cli.output import emit, json_option
from tunerack.settings import Settings
from tunerack.units import format_duration

# What a former quickstart has left; the converted base model stays, as it takes the longest.
REMADE = ("files", "jobs", "adapters", "workers", "logs", "control.json")


@click.command()
@click.option("--stop", is_flag=True, help="Stop the server that an earlier quickstart left running.")
@json_option
@click.pass_obj
def command(settings: Settings, stop: bool, as_json: bool) -> None:
    """Train two adapters at once on one base model, and talk to both.

    Works in a folder of its own (quickstart in the home folder), which is made anew each time, and leaves the server
    running. Takes less than five minutes on two CPU cores.
    """
    from tunerack.cli import daemon

    home = settings.home / "quickstart"
    settings = replace(settings.at(home), host="127.0.0.1", port=0)
    if stop:
        ended = daemon.stop(settings)
        if as_json:
            emit({"ended": ended})
        else:
            click.echo("\n".join(f"stopped {what}" for what in ended) or "nothing was running")
        return
    result = run(settings, quiet=as_json)
    if as_json:
        emit(result)


def run(settings: Settings, *, quiet: bool) -> dict[str, Any]:
    """The whole of it: plans, scores before, training, scores after, answers and usage, as one JSON value."""
    from tunerack.cli import daemon
    from tunerack.cli.demo import Demo, load_tasks
    from tunerack.client import ControlClient

    tasks = load_tasks()
    began = time.monotonic()
    daemon.stop(settings)
    settings.home.mkdir(parents=True, exist_ok=True)
    for name in REMADE:
        path = settings.home / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in settings.home.glob("tunerack.db*"):
        path.unlink()

    def say(text: str = "") -> None:
        if not quiet:
            click.echo(text)

    base = tasks[0].spec.model
    say(f"starting a server with one copy of {base} in {settings.home}")
    url = daemon.start(settings, [base])
    with ControlClient(url, settings.api_key) as client:
        demo = Demo(client, tasks, settings, say=say, live=not quiet)
        result = demo.run(began)
    result["total_s"] = time.monotonic() - began
    say(f"\ndone in {format_duration(result['total_s'])}. The server is still running; go on with it:\n")
    say(next_steps(url, settings, [task.name for task in tasks]))
    return {"url": url, "home": str(settings.home), **result}


def next_steps(url: str, settings: Settings, adapters: list[str]) -> str:
    """Lines to paste: curl, the openai package, the command line."""
    header = " -H 'Authorization: Bearer $TUNERACK_API_KEY'" if settings.api_key else ""
    key = "<your TUNERACK_API_KEY>" if settings.api_key else "none"
    triage, sql = adapters
    return f"""\
curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\
  -d '{{"model": "{sql}", "temperature": 0, "messages": [{{"role": "system", "content": "Write SQL for the shop."}},
       {{"role": "user", "content": "Which products cost less than 10?"}}]}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
messages = [{{"role": "system", "content": "Triage the ticket."}},
            {{"role": "user", "content": "My phone never came, I want my money back today."}}]
answer = client.chat.completions.create(model="{triage}", temperature=0, messages=messages)
print(answer.choices[0].message.content)

tunerack --home {settings.home} chat {triage} --system "Triage the ticket." "The app crashes when I log in."
tunerack quickstart --stop    # ends the server"""
