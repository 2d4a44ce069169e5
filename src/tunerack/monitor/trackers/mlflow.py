"""MLflow, in a file store of the job's folder: `mlflow ui --backend-store-uri FOLDER` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunerack.monitor.tracking import Run

LIBRARY = "mlflow"
EXPERIMENT = "tunerack"
_LONGEST_PARAM = 500


class StoredRun:
    """A run of the store; a resumed job goes on in it."""

    def __init__(self, run: Run) -> None:
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE

        # The small package has no database; its file store has to be asked for.
        MLFLOW_ALLOW_FILE_STORE.set(True)
        self._client = MlflowClient(tracking_uri=(run.folder / "store").absolute().as_uri())
        if run.run_id is not None:
            self.run_id = run.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT)
        self.run_id = self._client.create_run(experiment, run_name=run.job).info.run_id
        for key, value in run.config.items():
            self._client.log_param(self.run_id, key, str(value)[:_LONGEST_PARAM])

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(
            self.run_id, [Metric(tag, value, round(at * 1e3), step) for tag, value in values.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


def start(run: Run) -> StoredRun:
    return StoredRun(run)
