"""`python -m tunerack.engine.export REQUEST`: an adapter merged into its base; the answer is a line of JSON.

REQUEST is JSON: home, model, adapter (a folder), out, gguf.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunerack.catalog import models
from tunerack.engine.base import load_base
from tunerack.engine.gguf_file import write_gguf
from tunerack.engine.merge import merge
from tunerack.engine.source import prepare_base
from tunerack.errors import Invalid, TunerackError


def main() -> None:
    try:
        print(json.dumps(_export(json.loads(sys.argv[1]))))
    except TunerackError as error:
        print(json.dumps({"error": [{"message": p.message, "where": p.where, "hint": p.hint} for p in error.problems]}))
        sys.exit(1)


def _export(request: Mapping[str, Any]) -> dict[str, Any]:
    home, out = Path(request["home"]), Path(request["out"])
    model = models.find(request["model"], home / "catalog" / "models.toml")
    if model is None:
        raise Invalid(f"{request['model']!r} is not in the catalogue", where="--model", hint="give --model NAME")
    base = load_base(prepare_base(model, home / "bases"), name=model.name, aliases=model.aliases)
    if not request["gguf"]:
        return {"out": str(out), "merged": merge(base, Path(request["adapter"]), out)}
    if out.exists():
        raise Invalid("is there already", where=str(out), hint="give the name of a new file")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as aside:
        merged = merge(base, Path(request["adapter"]), Path(aside) / "model")
        write_gguf(Path(aside) / "model", out)
    return {"out": str(out), "merged": merged}


if __name__ == "__main__":
    main()
