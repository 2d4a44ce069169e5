"""The file of results that a finished job leaves: its metrics by step, as the OpenAI API has them."""

from __future__ import annotations

import csv
import hashlib
import io

from tunerack.store.disk import write_file
from tunerack.store.files import File, new_file_id
from tunerack.store.home import Store

# Column of the file, and the metric it shows.
COLUMNS = {
    "step": "step",
    "train_loss": "train_loss",
    "train_accuracy": "train_mean_token_accuracy",
    "valid_loss": "valid_loss",
    "valid_mean_token_accuracy": "valid_mean_token_accuracy",
}


def write_results(store: Store, job_id: str, now: float) -> File:
    """Write `files/<id>` with the metrics that the store has of a job; the row is the caller's to write."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for metrics in store.events.metrics(job_id):
        rows.writerow([metrics.get(name, "") for name in COLUMNS.values()])
    data = text.getvalue().encode()
    file = File(
        id=new_file_id(),
        filename="step_metrics.csv",
        purpose="fine-tune-results",
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        created_at=now,
    )
    write_file(store.settings.files / file.id, data)
    return file
