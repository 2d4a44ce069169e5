"""The controller over real processes: what it does when workers, bases or control itself come and go."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from fakes.control import MODEL, ControlProcess, until
from fakes.worker import STEPS, TOKENS_PER_STEP, write_adapter
from tunerack.client import ControlClient
from tunerack.errors import NotFound, TunerackError, Unavailable
from tunerack.methods.identity import adapter_version
from tunerack.settings import Settings
from tunerack.store import calibrations
from tunerack.store.home import Store

OTHER = "qwen2.5-0.5b"
THIRD = "qwen2.5-1.5b"
ROW = b'{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def train_file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_bytes(ROW)
    return path


@pytest.fixture
def started(home: Path) -> Iterator[list[ControlProcess]]:
    """Control processes that a test has started; all are ended after it."""
    processes: list[ControlProcess] = []
    yield processes
    for process in processes:
        process.end()


def up(home: Path, started: list[ControlProcess], model: str | None = None, **environment: str) -> ControlProcess:
    process = ControlProcess(home, model, **environment)
    started.append(process)
    process.start()
    return process


def ended(client: ControlClient, job_id: str) -> dict:
    def look() -> dict | None:
        job = client.job(job_id)
        return job if job["finished_at"] else None

    return until(look)


def body(file_id: str, name: str, model: str = MODEL) -> dict:
    return {"model": model, "training_file": file_id, "adapter_name": name}


class TestLearning:
    def test_a_finished_job_feeds_estimates_and_the_plan_of_the_next(
        self, home: Path, started: list[ControlProcess], train_file: Path
    ) -> None:
        control = up(home, started, FAKE_STEP_S="0.02")
        with ControlClient(control.url) as client:
            file_id = client.upload(train_file)["id"]
            first = ended(client, client.create_job(body(file_id, "first"))["id"])
            second = ended(client, client.create_job(body(file_id, "second"))["id"])
            assert first["tunerack"]["planned_s"] == 2
            assert first["tunerack"]["timing"]["steps"] == STEPS
            # Each step took half a second, and two seconds were planned for all: the next plan says what they took.
            assert second["tunerack"]["planned_s"] == pytest.approx(0.5 * STEPS)
            assert second["tunerack"]["plan"]["predicted_s"]["basis"] == "similar runs"
        kept = calibrations.load(home)
        assert [(entry.device, entry.model, entry.kind) for entry in kept] == [("cpu", MODEL, "job")] * 2
        assert kept[0].points == ((TOKENS_PER_STEP, 0.5),)


class TestWorkers:
    def test_a_worker_killed_three_times_does_not_change_the_result(
        self, home: Path, started: list[ControlProcess], train_file: Path, tmp_path: Path
    ) -> None:
        control = up(home, started, FAKE_STEP_S="0.15")
        with ControlClient(control.url) as client:
            job = client.create_job(body(client.upload(train_file)["id"], "kept"))
            killed: list[str] = []

            def trains_anew(step: int) -> bool:
                now = client.job(job["id"])
                own = now["tunerack"]
                return now["status"] == "running" and own["step"] >= step and own["worker"] not in killed

            for step in (1, 4, 7):
                until(lambda step=step: trains_anew(step))
                [worker] = client.workers()
                killed.append(worker["id"])
                os.kill(worker["pid"], signal.SIGKILL)
            done = ended(client, job["id"])
            assert (done["status"], done["tunerack"]["restarts"]) == ("succeeded", 3)
            assert done["trained_tokens"] == STEPS * TOKENS_PER_STEP
            # The fake's weights follow from the data alone: written here anew, by nobody who was killed.
            expected = adapter_version(write_adapter(tmp_path / "expected", MODEL, seed=len(ROW)))
            assert done["tunerack"]["adapter_version"] == expected
            assert adapter_version(home / "adapters" / expected) == expected
            events = client.events(job["id"], limit=1000, order="asc")
            steps = [event["data"]["step"] for event in events if event["type"] == "metrics"]
            assert steps == list(range(1, STEPS + 1)), "each step once, though some were trained again"
            assert sum(event["level"] == "warn" for event in events) == 3

    def test_jobs_of_one_base_share_its_worker_and_others_get_theirs(
        self, home: Path, started: list[ControlProcess], train_file: Path
    ) -> None:
        control = up(home, started, FAKE_STEP_S="0.05")
        with ControlClient(control.url) as client:
            file_id = client.upload(train_file)["id"]
            models = [MODEL, OTHER, MODEL, THIRD, MODEL]
            jobs = [client.create_job(body(file_id, f"a{n}", model)) for n, model in enumerate(models)]
            most = 0
            while not all(client.job(job["id"])["finished_at"] for job in jobs):
                most = max(most, len(client.workers()))
                time.sleep(0.05)
            done = [client.job(job["id"]) for job in jobs]
            assert [job["status"] for job in done] == ["succeeded"] * 5
            workers = [job["tunerack"]["worker"] for job in done]
            assert workers[0] == workers[2] == workers[4]
            assert len(set(workers)) == 3
            assert most == 2, "the third base waited for a place"

    def test_a_base_that_can_not_be_loaded_fails_those_who_wait_and_nobody_else(
        self, home: Path, started: list[ControlProcess], train_file: Path
    ) -> None:
        control = up(home, started, FAKE_BROKEN=OTHER)
        with ControlClient(control.url) as client:
            file_id = client.upload(train_file)["id"]
            bad = client.create_job(body(file_id, "bad", OTHER))
            good = client.create_job(body(file_id, "good"))
            failed = ended(client, bad["id"])
            assert (failed["status"], failed["error"]["code"]) == ("failed", "base_load_failed")
            assert "no such weights" in failed["error"]["message"]
            assert ended(client, good["id"])["status"] == "succeeded"
            with pytest.raises(TunerackError, match="no such weights"):
                list(client.chat(OTHER, [{"role": "user", "content": "hi"}]))
            assert control.log().count(f"starting worker {OTHER}") == 1, "no tight loop"

    def test_a_worker_that_ends_while_it_loads_is_tried_three_times(
        self, home: Path, started: list[ControlProcess], train_file: Path
    ) -> None:
        control = up(home, started, FAKE_EXIT=OTHER)
        with ControlClient(control.url) as client:
            job = client.create_job(body(client.upload(train_file)["id"], "bad", OTHER))
            failed = ended(client, job["id"])
            assert failed["error"]["code"] == "base_load_failed"
            assert "the fake ends while it loads" in failed["error"]["message"]
            assert control.log().count(f"starting worker {OTHER}") == 3

    def test_a_request_starts_the_worker_of_its_base(self, home: Path, started: list[ControlProcess]) -> None:
        control = up(home, started, FAKE_LOAD_S="1")
        with ControlClient(control.url) as client:
            assert client.workers() == []
            chunks = list(client.chat(MODEL, [{"role": "user", "content": "hi"}]))
            assert chunks[-1]["usage"]["completion_tokens"] == 2
            assert [worker["base"] for worker in client.workers()] == [MODEL]

    def test_cancel_of_a_running_job(self, home: Path, started: list[ControlProcess], train_file: Path) -> None:
        control = up(home, started, FAKE_STEP_S="0.5")
        with ControlClient(control.url) as client:
            job = client.create_job(body(client.upload(train_file)["id"], "x"))
            until(lambda: client.job(job["id"])["status"] == "running")
            assert client.cancel_job(job["id"])["status"] == "cancelled"
            assert client.adapters() == []
            client.create_job(body(client.files()[0]["id"], "x"))


class TestControl:
    def test_killed_at_many_moments_it_loses_and_doubles_nothing(
        self, home: Path, started: list[ControlProcess], train_file: Path
    ) -> None:
        """Files and jobs that were accepted are there after every kill; each job is registered and counted once."""
        control = up(home, started, MODEL, FAKE_STEP_S="0.04")
        accepted: list[tuple[str, str]] = []
        files: list[str] = []
        for number, pause_s in enumerate([0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 0.02]):
            with ControlClient(control.url) as client:
                files.append(client.upload(train_file)["id"])
                name = f"job-{number}"
                accepted.append((client.create_job(body(files[-1], name))["id"], name))
            time.sleep(pause_s)
            control.kill()
            control.start()
        with ControlClient(control.url) as client:
            done = [ended(client, job_id) for job_id, _ in accepted]
            assert [job["status"] for job in done] == ["succeeded"] * len(accepted)
            assert [job["fine_tuned_model"] for job in done] == [name for _, name in accepted]
            assert all(job["trained_tokens"] == STEPS * TOKENS_PER_STEP for job in done)
            uploads = [file["id"] for file in client.files() if file["purpose"] == "fine-tune"]
            assert set(uploads) == set(files)
            results = [file["id"] for file in client.files() if file["purpose"] == "fine-tune-results"]
            assert sorted(results) == sorted(job["result_files"][0] for job in done)
            assert {path.name for path in (home / "files").iterdir()} == {*uploads, *results}
            usage = {row["name"]: row["trained_tokens"] for row in client.usage() if row["kind"] == "training"}
            assert usage == {name: STEPS * TOKENS_PER_STEP for _, name in accepted}, "counted once each"
            for job_id, _ in accepted:
                events = client.events(job_id, limit=1000)
                steps = Counter(event["data"]["step"] for event in events if event["type"] == "metrics")
                assert steps == Counter(range(1, STEPS + 1))
                assert sum("has successfully completed" in event["message"] for event in events) == 1
            # The worker outlived every kill, so no job was given out a second time.
            assert len(client.workers()) == 1
            assert all(job["tunerack"]["restarts"] == 0 for job in done)
            assigned = Counter(json.loads(line)["job"] for line in (home / "assignments.log").read_text().splitlines())
            assert assigned == Counter(job_id for job_id, _ in accepted)
            shelf = {path.name for path in (home / "adapters").iterdir()}
            assert shelf == {adapter["version"] for adapter in client.adapters()}
            list(client.chat("job-0", [{"role": "user", "content": "hi"}]))

    def test_killed_in_the_middle_of_uploads_it_keeps_whole_files_only(
        self, home: Path, started: list[ControlProcess], tmp_path: Path
    ) -> None:
        control = up(home, started)
        big = tmp_path / "big.jsonl"
        big.write_bytes(ROW * 100_000)
        told: list[str] = []

        def send() -> None:
            with ControlClient(control.url) as client:
                try:
                    while True:
                        told.append(client.upload(big)["id"])
                except (Unavailable, OSError):
                    return

        with ThreadPoolExecutor(3) as pool:
            sending = [pool.submit(send) for _ in range(3)]
            until(lambda: len(told) >= 3)
            control.kill()
            for one in sending:
                one.result()
        control.start()
        with ControlClient(control.url) as client:
            listed = {file["id"] for file in client.files()}
            assert set(told) <= listed
            assert {path.name for path in (home / "files").iterdir()} == listed
            assert {path.stat().st_size for path in (home / "files").iterdir()} == {big.stat().st_size}

    def test_a_clean_stop_ends_the_workers_and_the_jobs_go_on_afterwards(
        self, home: Path, started: list[ControlProcess], train_file: Path
    ) -> None:
        control = up(home, started, FAKE_STEP_S="0.1")
        with ControlClient(control.url) as client:
            job = client.create_job(body(client.upload(train_file)["id"], "later"))
            until(lambda: client.job(job["id"])["tunerack"]["step"] >= 4)
        pids = control.worker_pids()
        assert control.stop() == 0
        assert not (home / "control.json").exists()
        assert control.worker_pids() == []
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        control.start()
        with ControlClient(control.url) as client:
            done = ended(client, job["id"])
            assert (done["status"], done["tunerack"]["restarts"]) == ("succeeded", 0)
            messages = [event["message"] for event in client.events(job["id"], limit=1000)]
            assert any(message.startswith("resumed from step") for message in messages)

    def test_an_open_stream_ends_with_an_error_event_when_control_stops(
        self, home: Path, started: list[ControlProcess]
    ) -> None:
        control = up(home, started, MODEL)
        ask = {"model": MODEL, "messages": [{"role": "user", "content": "slow " * 200}], "stream": True}
        with httpx2.Client(base_url=control.url, timeout=30, trust_env=False) as http:
            with http.stream("POST", "/v1/chat/completions", json=ask) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert control.process is not None
                control.process.terminate()
                rest = [line for line in lines if line.startswith("data:")]
            assert "stopping" in json.loads(rest[-1][5:])["error"]["message"]
        assert control.process.wait(20) == 0
        store = Store(Settings(home=home))
        [used] = store.usage.all()
        assert (used.requests, used.prompt_tokens) == (1, 200)
        assert 0 < used.completion_tokens < 200
        store.close()

    def test_one_control_for_one_home(self, home: Path, started: list[ControlProcess]) -> None:
        control = up(home, started)
        second = ControlProcess(home)
        with pytest.raises(AssertionError, match="a tunerack is running with"):
            second.start()
        with ControlClient(control.url) as client:
            assert client.health()["status"] == "ok"

    def test_it_does_not_listen_beyond_loopback_without_a_key(self, home: Path) -> None:
        open_to_all = ControlProcess(home, TUNERACK_HOST="0.0.0.0")
        with pytest.raises(AssertionError, match="set TUNERACK_API_KEY"):
            open_to_all.start()

    def test_a_worker_that_died_with_control_is_replaced(
        self, home: Path, started: list[ControlProcess], train_file: Path
    ) -> None:
        control = up(home, started, FAKE_STEP_S="0.1")
        with ControlClient(control.url) as client:
            job = client.create_job(body(client.upload(train_file)["id"], "again"))
            until(lambda: client.job(job["id"])["tunerack"]["step"] >= 4)
        [pid] = control.worker_pids()
        control.kill()
        os.kill(pid, signal.SIGKILL)
        control.start()
        with ControlClient(control.url) as client:
            done = ended(client, job["id"])
            assert (done["status"], done["tunerack"]["restarts"]) == ("succeeded", 1)


class TestClient:
    def test_no_control(self, tmp_path: Path) -> None:
        with (
            ControlClient.of(Settings(home=tmp_path, port=1)) as client,
            pytest.raises(Unavailable, match="tunerack up"),
        ):
            client.health()

    def test_errors_come_through_as_they_were(self, home: Path, started: list[ControlProcess]) -> None:
        up(home, started)
        with ControlClient.of(Settings(home=home)) as client:
            with pytest.raises(NotFound, match="no fine-tuning job with id 'x y'"):
                client.job("x y")
            with pytest.raises(NotFound) as caught:
                client.adapter("no/such:one")
            assert caught.value.code == "model_not_found"
            assert client.models() == []
