"""The five data sets of `learning.py`: their rows as conversations, and each set's own score of an answer.

A set names the prompt that its adapter is trained and scored with ("own") and others that the base is scored with too,
so that the base is not held to a form that does not suit it.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """prompts: per name the system and user text; answer: what is trained; gold: what the score compares with."""

    prompts: Mapping[str, tuple[str, str]]
    answer: str
    gold: Any

    def messages(self, prompt: str) -> Messages:
        system, user = self.prompts[prompt]
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]


@dataclass(frozen=True)
class TaskSet:
    """A data set: how it is read, how an answer is scored, and the recipe of its adapter.

    read: (folder, split) -> rows; split is train, dev (for choosing the recipe) or test (scored once)
    score: (answer, gold) -> [0, 1]; lenient: the same for what can be made out in an answer of another form
    """

    name: str
    read: Callable[[Path, str], list[Sample]]
    score: Callable[[str, Any], float]
    lenient: Callable[[str, Any], float] | None
    metric: str
    rows: int
    epochs: int
    learning_rate: float
    n_dev: int
    n_test: int
    max_new_tokens: int
    batch_rows: int = 8
    base_prompts: tuple[str, ...] = ("own",)


def shuffled(rows: Sequence[Any], seed: int) -> list[Any]:
    """The same order everywhere: raw draws of Philox, which no version of numpy changes."""
    draws = np.random.Philox(key=seed).random_raw(len(rows))
    return [rows[i] for i in np.argsort(draws, kind="stable")]


def split_of(rows: Sequence[Any], split: str, n_dev: int) -> list[Any]:
    """The last `n_dev` of the shuffled rows are for choosing the recipe, the others for training."""
    mixed = shuffled(rows, 1)
    return mixed[-n_dev:] if split == "dev" else mixed[:-n_dev]


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


# -- gsm8k: the number after #### -------------------------------------------------------------------------------------

EQUATIONS = "Write each step as one equation on a line of its own, then write #### and the number that answers."
STEPS = "Solve the problem step by step. End your answer with #### and then the number alone."
ANNOTATED = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
MARKED_NUMBER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def read_gsm8k(folder: Path, split: str) -> list[Sample]:
    rows = json_lines(folder / "gsm8k" / f"{'test' if split == 'test' else 'train'}.jsonl")
    rows = shuffled(rows, 2) if split == "test" else split_of(rows, split, 200)
    return [gsm8k_sample(row, split) for row in rows if split != "train" or ANNOTATED.search(row["answer"])]


def gsm8k_sample(row: Mapping[str, Any], split: str) -> Sample:
    """What is trained is the equations that the set marks in its worked answers, without the words between."""
    number = row["answer"].rsplit("####", 1)[1].strip()
    steps = [f"{left.strip()} = {right.strip()}" for left, right in ANNOTATED.findall(row["answer"])]
    prompts = {"own": (EQUATIONS, row["question"]), "steps": (STEPS, row["question"])}
    return Sample(prompts, "\n".join([*steps, f"#### {number}"]), as_number(number))


def as_number(text: str) -> float:
    return float(text.replace(",", ""))


def score_gsm8k(answer: str, gold: float) -> float:
    found = MARKED_NUMBER.search(answer)
    return float(found is not None and as_number(found[1]) == gold)


def last_number(answer: str, gold: float) -> float:
    found = NUMBER.findall(answer)
    return float(bool(found) and as_number(found[-1]) == gold)


# -- openbookqa, banking77: the exact label ---------------------------------------------------------------------------

TEXT_THEN_LABEL = "Write the text of the correct answer, then its label after a colon."
LABEL_ONLY = "Write only the label of the correct answer: answer1, answer2, answer3 or answer4."
OPTION = re.compile(r"Answer(\d): (.*?)(?= Answer\d: |$)")
LABEL = re.compile(r"answer\s?([1-4])", re.IGNORECASE)


def read_openbookqa(folder: Path, split: str) -> list[Sample]:
    path = folder / "openbookqa" / f"{'test' if split == 'test' else 'train'}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    rows = shuffled(rows, 2) if split == "test" else split_of(rows, split, 200)
    return [openbookqa_sample(row) for row in rows]


def openbookqa_sample(row: Mapping[str, Any]) -> Sample:
    question, rest = (
        row["instruction"].removeprefix("Please choose the correct answer to the question: ").split("\n\n", 1)
    )
    options = dict(OPTION.findall(rest.split("\n\n", 1)[0]))
    shown = "\n".join([question, *(f"answer{number}: {text}" for number, text in options.items())])
    prompts = {"own": (TEXT_THEN_LABEL, shown), "label": (LABEL_ONLY, shown)}
    gold = row["answer"]
    return Sample(prompts, f"{options[gold.removeprefix('answer')]}: {gold}", gold)


def score_openbookqa(answer: str, gold: str) -> float:
    """The label that the answer ends with, which is the whole answer where only the label was asked for."""
    ends = re.search(r"(answer[1-4])[.\s]*$", answer.lower())
    return float(ends is not None and ends[1] == gold)


def any_label(answer: str, gold: str) -> float:
    """The first label that is named anywhere."""
    found = LABEL.search(answer)
    return float(found is not None and f"answer{found[1]}" == gold)


INTENT = "Name the intent of the bank customer's message, in lower-case words joined by underscores."


def read_banking77(folder: Path, split: str) -> list[Sample]:
    with (folder / "banking77" / f"{'test' if split == 'test' else 'train'}.csv").open(
        encoding="utf-8", newline=""
    ) as f:
        rows = list(csv.DictReader(f))
    labels = json.loads((folder / "banking77" / "categories.json").read_text(encoding="utf-8"))
    rows = shuffled(rows, 2) if split == "test" else split_of(rows, split, 200)
    listed = f"{INTENT} Answer with one of these names and nothing else: {', '.join(labels)}."
    return [
        Sample(
            {"own": (INTENT, row["text"].strip()), "listed": (listed, row["text"].strip())},
            row["category"],
            row["category"],
        )
        for row in rows
    ]


def score_label(answer: str, gold: str) -> float:
    return float(answer.strip().strip(".\"'`").lower() == gold.lower())


def contains_label(answer: str, gold: str) -> float:
    """The label stands somewhere in the answer as a word of its own."""
    return float(re.search(rf"(?<!\w){re.escape(gold.lower())}(?!\w)", answer.lower().replace(" ", "_")) is not None
                 or re.search(rf"(?<!\w){re.escape(gold.lower())}(?!\w)", answer.lower()) is not None)  # fmt: skip


# -- scitldr: ROUGE-L, best of the references -------------------------------------------------------------------------

SUMMARISE = "Summarise the abstract of the paper in one short sentence of about 20 words."


def read_scitldr(folder: Path, split: str) -> list[Sample]:
    rows = json_lines(folder / "scitldr" / f"{'test' if split == 'test' else 'dev'}.jsonl")
    rows = shuffled(rows, 2) if split == "test" else split_of(rows, split, 60)
    return [Sample({"own": (SUMMARISE, " ".join(row["source"]))}, row["target"][0], row["target"]) for row in rows]


def rouge_l(candidate: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004, section 3.1), words as Google's rouge-score finds them
    without its stemmer: runs of a-z and 0-9 of the lower-cased text."""
    a, b = (re.findall(r"[a-z0-9]+", text.lower()) for text in (candidate, reference))
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if word == other else max(row[j], row[j - 1])
    common = row[-1]
    if not common:
        return 0.0
    precision, recall = common / len(a), common / len(b)
    return 2 * precision * recall / (precision + recall)


def score_scitldr(answer: str, references: Sequence[str]) -> float:
    return max(rouge_l(answer, reference) for reference in references)


# -- toolcall (BFCL): the call's name, and each argument in the accepted list -----------------------------------------

CALL = 'Answer with one call of a function, as JSON: {"name": "...", "arguments": {...}}'


def read_toolcall(folder: Path, split: str) -> list[Sample]:
    """The rows of both files mixed; the first 200 are the test, then come 60 to choose the recipe by."""
    samples = []
    for kind in ("simple_python", "multiple"):
        rows = json_lines(folder / "toolcall" / f"BFCL_v4_{kind}.json")
        accepted = {
            r["id"]: r["ground_truth"] for r in json_lines(folder / "toolcall/possible_answer" / f"BFCL_v4_{kind}.json")
        }
        samples += [toolcall_sample(row, accepted[row["id"]][0]) for row in rows]
    mixed = shuffled(samples, 2)
    return {"test": mixed[:200], "dev": mixed[200:260], "train": mixed[260:]}[split]


def toolcall_sample(row: Mapping[str, Any], accepted: Mapping[str, Any]) -> Sample:
    shown = "\n".join(signature(function) for function in row["function"])
    ((name, arguments),) = accepted.items()
    wanted = {key: chosen(values) for key, values in arguments.items() if "" not in values}
    answer = json.dumps({"name": name, "arguments": wanted}, ensure_ascii=False)
    return Sample({"own": (f"{CALL}\n{shown}", row["question"][0][0]["content"])}, answer, accepted)


def signature(function: Mapping[str, Any]) -> str:
    required = function["parameters"].get("required", ())
    lines = [f"{function['name']}: {function['description']}"]
    for name, field in function["parameters"]["properties"].items():
        optional = "" if name in required else ", optional"
        lines.append(f"- {name} ({field.get('type')}{optional}): {field.get('description', '')}")
    return "\n".join(lines)


def chosen(values: Sequence[Any]) -> Any:
    """The first accepted value; an accepted object lists accepted values for each of its keys."""
    return plain_value(values[0])


def plain_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: chosen(inner) for key, inner in value.items() if "" not in inner}
    return [plain_value(inner) for inner in value] if isinstance(value, list) else value


def score_toolcall(answer: str, gold: Mapping[str, Any]) -> float:
    call = first_object(answer)
    ((name, accepted),) = gold.items()
    if call is None or call.get("name") != name or not isinstance(call.get("arguments"), dict):
        return 0.0
    return float(fits(call["arguments"], accepted))


def first_object(answer: str) -> dict[str, Any] | None:
    """The first JSON object in the text."""
    start = answer.find("{")
    if start < 0:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(answer[start:])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def fits(arguments: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]]) -> bool:
    """No unknown argument, every given one accepted, and only those left out whose list accepts ""."""
    if any(key not in accepted for key in arguments):
        return False
    return all(
        any(equal(arguments[key], value) for value in values) if key in arguments else "" in values
        for key, values in accepted.items()
    )


def equal(given: Any, accepted: Any) -> bool:
    """Texts by letters and figures alone, without case, as the benchmark's own checker compares them; an integer is as
    good as the float of its value; lists by their entries; objects by the accepted values of their keys."""
    if isinstance(accepted, dict) and isinstance(given, dict):
        if all(isinstance(values, list) for values in accepted.values()):
            return fits(given, accepted)
        return given == accepted
    if isinstance(accepted, list) and isinstance(given, list):
        return len(given) == len(accepted) and all(map(equal, given, accepted))
    if isinstance(accepted, str) and isinstance(given, str):
        return plain(given) == plain(accepted)
    if isinstance(accepted, bool) or isinstance(given, bool):
        return given is accepted
    if isinstance(accepted, int | float) and isinstance(given, int | float):
        return float(given) == float(accepted)
    return False


def plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')


SETS: Mapping[str, TaskSet] = {
    task.name: task
    for task in (
        TaskSet("banking77", read_banking77, score_label, contains_label, "exact label", rows=500, epochs=1,
                learning_rate=2e-3, n_dev=60, n_test=150, max_new_tokens=20, base_prompts=("own", "listed")),
        TaskSet("toolcall", read_toolcall, score_toolcall, None, "name and every argument", rows=100, epochs=1,
                learning_rate=1e-3, n_dev=30, n_test=100, max_new_tokens=100),
        TaskSet("scitldr", read_scitldr, score_scitldr, None, "ROUGE-L, best reference", rows=80, epochs=1,
                learning_rate=1e-3, n_dev=30, n_test=200, max_new_tokens=50),
        TaskSet("openbookqa", read_openbookqa, score_openbookqa, any_label, "exact label", rows=400, epochs=1,
                learning_rate=1e-3, n_dev=60, n_test=300, max_new_tokens=24, base_prompts=("own", "label")),
        TaskSet("gsm8k", read_gsm8k, score_gsm8k, last_number, "number after ####", rows=640, epochs=1,
                learning_rate=1e-3, n_dev=40, n_test=400, max_new_tokens=120, base_prompts=("own", "steps")),
    )
}  # fmt: skip
