"""`python -m tunerack.engine.full REQUEST`: one full fine-tune; each line of the output is a JSON object.

REQUEST is JSON: home, spec, training_path, validation_path, out, threads, micro_batch_tokens, dry_run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from tunerack.catalog import models
from tunerack.engine.base import load_base
from tunerack.engine.device import use_threads
from tunerack.engine.full.run import FullTraining
from tunerack.engine.source import prepare_base
from tunerack.engine.training.record import prepare_data
from tunerack.errors import Invalid, TunerackError
from tunerack.methods.parts import parts_of
from tunerack.spec.parse import job_from_json


def main() -> None:
    try:
        _run(json.loads(sys.argv[1]))
    except TunerackError as error:
        problems = [{"message": p.message, "where": p.where, "hint": p.hint} for p in error.problems]
        _tell({"error": problems})
        sys.exit(1)


def _run(request: Mapping[str, Any]) -> None:
    home, out, spec = Path(request["home"]), Path(request["out"]), job_from_json(request["spec"])
    model = models.find(spec.model, home / "catalog" / "models.toml")
    if model is None:
        raise Invalid(f"{spec.model!r} is not in the catalogue", where="--model", hint="tunerack up --model NAME=PATH")
    use_threads(request["threads"])
    base = load_base(prepare_base(model, home / "bases"), name=model.name, aliases=model.aliases)
    validation = Path(request["validation_path"]) if request["validation_path"] else None
    training = Path(request["training_path"])
    rows, held_out, resolved = prepare_data(spec, training, validation, base, now=datetime.now())
    work, budget = out.with_name(f"{out.name}.training"), int(request["micro_batch_tokens"])
    run = FullTraining(base, resolved, rows, held_out, work, micro_batch_tokens=budget)
    plan = {
        "spec": resolved.to_json(),
        "report": rows.report.to_json(),
        "parts": [part.to_json() for part in parts_of(None, base.identity, base.tensors)],
        # fp32 weights, their gradients, and the two moments of AdamW.
        "state_bytes": run.weights.count * 16,
        "steps": run.total_steps,
        "steps_done": run.step,
    }
    _tell({"plan": plan})
    if request["dry_run"]:
        return
    for step in run.run():
        _tell({"step": asdict(step)})
    run.write_result(out)
    _tell({"result": str(out)})


def _tell(line: Mapping[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
