"""tunerack estimate as a person starts it: in a process of its own, quickly, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

ASK = ["estimate", "--model", "llama-3.1-8b", "--method", "qlora", "--gpus", "a40,h100:2", "--json"]


def started(*arguments: str, home: Path) -> tuple[float, str]:
    begun = time.perf_counter()
    command = [sys.executable, "-m", "tunerack.cli.main", "--home", str(home), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - begun, done.stdout


def test_it_answers_in_under_a_second(tmp_path: Path) -> None:
    # The quickest of five: others may use the machine.
    taken = min(started(*ASK, home=tmp_path)[0] for _ in range(5))
    assert taken < 1.0


def test_fifty_thousand_rows_take_under_five_seconds(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "word " * 40}, {"role": "assistant", "content": "word " * 60}]}
    file = tmp_path / "train.jsonl"
    file.write_text((json.dumps(row) + "\n") * 50_000)
    taken, printed = started(*ASK, "--data", str(file), home=tmp_path)
    assert json.loads(printed)["data"]["rows"] == 50_000
    assert taken < 5.0


def test_it_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from tunerack.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, "--home", str(tmp_path), *ASK], check=True, capture_output=True)
