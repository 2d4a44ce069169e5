"""The two tasks of the quickstart, taken through plan, training, scores and answers on a running server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tunerack.cli import offers
from tunerack.cli.chat import Answer, ask
from tunerack.cli.follow import FINISHED, raise_unless_succeeded
from tunerack.cli.output import table
from tunerack.cli.scores import Score, query_score, record_score
from tunerack.cli.submission import body_of, job_line, minutes, plan_text, upload
from tunerack.cli.usage import COLUMNS
from tunerack.client import ControlClient
from tunerack.data.rows import read_rows
from tunerack.errors import NotFound
from tunerack.settings import Settings
from tunerack.spec.job import JobSpec
from tunerack.spec.jobfile import job_from_file
from tunerack.units import format_duration

TASKS = ("triage", "sql")
# The longest answers of both sets have 50 tokens; a base that goes on and on is cut here.
MOST_TOKENS = 56
CONCURRENT = 16
POLL_S = 1.0
# Between two lines of progress where lines can't be drawn again.
QUIET_S = 10.0
QUESTION = "I paid twice for order 1042 and the laptop still has not arrived. Which orders are open?"


@dataclass(frozen=True)
class Task:
    """A job of the quickstart with its rows kept out of training."""

    name: str
    spec: JobSpec
    folder: Path
    prompts: tuple[tuple[dict[str, str], ...], ...]
    expected: tuple[str, ...]
    score: Callable[[Sequence[str], Sequence[str]], Score]


def examples_folder() -> Path:
    """The folder `examples`: inside the installed package, or in the clone it runs from."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "examples", package.parent.parent / "examples"):
        if (folder / "quickstart").is_dir():
            return folder
    raise NotFound(
        "the example data of the quickstart are not here",
        where=str(package / "examples"),
        hint="run it from a clone of the repository, installed with pip install -e .",
    )


def load_tasks() -> list[Task]:
    """Job files and held-out rows of both tasks; raises the errors of a broken file."""
    folder = examples_folder()
    shop = folder / "data" / "sql"
    script = "".join((shop / name).read_text(encoding="utf-8") for name in ("schema.sql", "shop.sql"))
    scores: dict[str, Callable[[Sequence[str], Sequence[str]], Score]] = {
        "triage": record_score,
        "sql": lambda expected, answers: query_score(script, expected, answers),
    }
    tasks = []
    for name in TASKS:
        spec = job_from_file(folder / "quickstart" / f"{name}.yaml")
        prompts, expected = _held_out(folder / "data" / name / "heldout.jsonl")
        tasks.append(Task(name, spec, folder / "quickstart", prompts, expected, scores[name]))
    return tasks


def _held_out(path: Path) -> tuple[tuple[tuple[dict[str, str], ...], ...], tuple[str, ...]]:
    """Each row without its last message, and that message."""
    prompts, expected = [], []
    for row in read_rows(path).require():
        assert row.messages is not None
        prompts.append(tuple({"role": turn.role, "content": turn.content} for turn in row.messages[:-1]))
        expected.append(row.messages[-1].content)
    return tuple(prompts), tuple(expected)


class Demo:
    """One run over a client; `say` prints a line, `live` allows progress to be drawn."""

    def __init__(
        self,
        client: ControlClient,
        tasks: Sequence[Task],
        settings: Settings,
        *,
        say: Callable[[str], None],
        live: bool,
    ) -> None:
        self.client = client
        self.settings = settings
        self.tasks = tasks
        self.say = say
        self.live = live

    def run(self, began: float) -> dict[str, Any]:
        bodies, plans = {}, {}
        for task in self.tasks:
            bodies[task.name] = body_of(upload(self.client, task.spec, task.folder).spec)
            plans[task.name] = self.client.plan(bodies[task.name])
            self.say(f"\nplan of {task.name}\n{plan_text(plans[task.name])}")
            elsewhere = offers.offers(plans[task.name], self.settings)
            self.say(f"\nhere, and what GPUs for rent would take\n{offers.text(plans[task.name], elsewhere, shown=3)}")
        self.say(f"\n{format_duration(time.monotonic() - began)} so far; scoring the base on rows kept out of training")
        before = self.scores([(task, task.spec.model) for task in self.tasks])

        self.say("\ntraining both at once, on one copy of the base")
        jobs = {task.name: self.client.create_job(bodies[task.name])["id"] for task in self.tasks}
        trained_s = self.watch(jobs)
        names = {name: self.client.job(job_id)["fine_tuned_model"] for name, job_id in jobs.items()}
        planned = " + ".join(minutes(plan["predicted_s"]["mid"]) for plan in plans.values())
        self.say(f"trained both in {minutes(trained_s)} minutes; the plans said {planned} for each alone")
        self.say("\nscoring the adapters on the same rows")
        after = self.scores([(task, names[task.name]) for task in self.tasks])
        self.say("\n" + self.comparison(before, after))
        # All three at once: rows of one batch belong to the base and to each adapter.
        answers = self.one_question([self.tasks[0].spec.model, *names.values()])
        usage = self.client.usage()
        self.say("\ntokens used by each")
        self.say(table(list(COLUMNS.values()), [[row.get(column) for column in COLUMNS] for row in usage]))
        return {
            "plans": plans,
            "jobs": jobs,
            "adapters": names,
            "training_s": trained_s,
            "scores": {
                task.name: {"before": before[task.name].to_json(), "after": after[task.name].to_json()}
                for task in self.tasks
            },
            "question": QUESTION,
            "answers": {model: answer.to_json() for model, answer in answers.items()},
            "usage": usage,
        }

    def comparison(self, before: dict[str, Score], after: dict[str, Score]) -> str:
        rows = []
        for name, new in after.items():
            old = before[name]
            also = f"{new.partial_name}: {old.partial:.0%} -> {new.partial:.0%}"
            rows.append((name, new.total, f"{old.share:.0%}", f"{new.share:.0%}", also))
        return table(("TASK", "ROWS", "EXACT BEFORE", "EXACT AFTER", "ALSO"), rows)

    def scores(self, asked: Sequence[tuple[Task, str]]) -> dict[str, Score]:
        """Answers of all tasks at once, so that they share batches, scored by task."""
        requests = [(model, prompt) for task, model in asked for prompt in task.prompts]
        options = {"temperature": 0.0, "max_tokens": MOST_TOKENS}
        with ThreadPoolExecutor(CONCURRENT) as pool:
            answers = list(pool.map(lambda r: ask(self.client, r[0], r[1], options, show=False).content, requests))
        scores, start = {}, 0
        for task, model in asked:
            own = answers[start : start + len(task.prompts)]
            start += len(task.prompts)
            scores[task.name] = task.score(task.expected, own)
            self.say(f"  {task.name:<8} {model}: {scores[task.name]}")
        return scores

    def watch(self, jobs: dict[str, str]) -> float:
        """Show where both jobs stand until they are finished; returns seconds. Raises when one failed."""
        began = time.monotonic()
        drawn, said_at = 0, -QUIET_S
        redraw = self.live and sys.stdout.isatty()
        while True:
            found = {name: self.client.job(job_id) for name, job_id in jobs.items()}
            finished = all(job["status"] in FINISHED for job in found.values())
            lines = [f"  {name:<8} {self._line(job)}" for name, job in found.items()]
            now = time.monotonic()
            if redraw:
                up = f"\x1b[{drawn}F" if drawn else ""
                click.echo(up + "\n".join(f"\x1b[2K{line}" for line in lines))
                drawn = len(lines)
            elif finished or now - said_at >= QUIET_S:
                self.say("\n".join(lines))
                said_at = now
            if finished:
                for job in found.values():
                    raise_unless_succeeded(job)
                return now - began
            time.sleep(POLL_S)

    def _line(self, job: dict[str, Any]) -> str:
        latest = self.client.events(job["id"], limit=5)
        loss = next((e["data"]["train_loss"] for e in latest if (e.get("data") or {}).get("train_loss")), None)
        return job_line(job) + (f"  loss {loss:.3f}" if loss is not None else "")

    def one_question(self, models: Sequence[str]) -> dict[str, Answer]:
        """The same question to all models at the same moment."""
        self.say(f"\none question to all at once: {QUESTION}")
        messages = [{"role": "user", "content": QUESTION}]
        options = {"temperature": 0.0, "max_tokens": MOST_TOKENS}
        with ThreadPoolExecutor(len(models)) as pool:
            asked = {model: pool.submit(ask, self.client, model, messages, options, show=False) for model in models}
            answers = {model: future.result() for model, future in asked.items()}
        for model, answer in answers.items():
            self.say(f"  {model}: {answer.content.strip()}")
        return answers
