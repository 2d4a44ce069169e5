"""Files and fine-tuning jobs as the official SDK sees them, over a real control process."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx2
import openai
import pytest
from openai import OpenAI

from fakes.control import MODEL, ControlProcess, until

ROWS = b'{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}\n'
_numbers = iter(range(10_000))


@pytest.fixture(scope="module")
def training_file(sdk: OpenAI) -> str:
    return sdk.files.create(file=("train.jsonl", ROWS), purpose="fine-tune").id


def finished(sdk: OpenAI, job_id: str):
    def look():
        job = sdk.fine_tuning.jobs.retrieve(job_id)
        return job if job.status in ("succeeded", "failed", "cancelled") else None

    return until(look)


class TestFiles:
    def test_life_of_a_file(self, sdk: OpenAI, control: ControlProcess) -> None:
        file = sdk.files.create(
            file=("tickets.jsonl", ROWS),
            purpose="fine-tune",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (file.bytes, file.filename, file.status) == (len(ROWS), "tickets.jsonl", "processed")
        assert file.expires_at == file.created_at + 3600
        assert sdk.files.wait_for_processing(file.id).id == file.id
        assert sdk.files.content(file.id).read() == ROWS
        assert (control.home / "files" / file.id).read_bytes() == ROWS
        assert file.id in [row.id for row in sdk.files.list()]
        assert sdk.files.delete(file.id).deleted
        assert not (control.home / "files" / file.id).exists()
        with pytest.raises(openai.NotFoundError) as caught:
            sdk.files.retrieve(file.id)
        assert caught.value.request_id

    def test_pages(self, sdk: OpenAI) -> None:
        ids = [sdk.files.create(file=(f"{n}.jsonl", ROWS), purpose="batch").id for n in range(5)]
        listed = [file.id for file in sdk.files.list(purpose="batch", limit=2)]
        assert listed == ids[::-1]
        assert [file.id for file in sdk.files.list(purpose="batch", order="asc", limit=3)] == ids

    @pytest.mark.parametrize("name", ["../../etc/passwd", "a/b.jsonl", "a\\b.jsonl", "..", "x\x07y"])
    def test_a_name_that_is_a_path_is_refused(self, http: httpx2.Client, control: ControlProcess, name: str) -> None:
        body = (
            b'--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
            b'--X\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\nrow\r\n--X--\r\n' % name.encode()
        )
        headers = {"content-type": "multipart/form-data; boundary=X"}
        answer = http.post("/v1/files", content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "file"
        assert not list((control.home / "files").glob(".*"))

    def test_a_broken_form_is_one_clear_error(self, http: httpx2.Client, control: ControlProcess) -> None:
        headers = {"content-type": "multipart/form-data; boundary=X"}
        cut = b'--X\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nrow'
        for content, kind in ((cut, headers), (b"junk", headers), (b"{}", {"content-type": "application/json"})):
            answer = http.post("/v1/files", content=content, headers=kind)
            assert answer.status_code == 400, content
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert not list((control.home / "files").glob(".*"))

    def test_an_unknown_purpose_and_a_missing_file(self, sdk: OpenAI, http: httpx2.Client) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.files.create(file=("a", ROWS), purpose="finetune")  # type: ignore[arg-type]
        assert caught.value.param == "purpose"
        answer = http.post("/v1/files", data={"purpose": "fine-tune"}, files={"other": ("a", b"x")})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")

    def test_a_retried_upload_is_one_file(self, http: httpx2.Client) -> None:
        def send(**headers: str) -> str:
            form = {"data": {"purpose": "fine-tune"}, "files": {"file": ("once.jsonl", ROWS)}}
            return http.post("/v1/files", headers={k.replace("_", "-"): v for k, v in headers.items()}, **form).json()[
                "id"
            ]

        first = send()
        assert send(x_stainless_retry_count="1") == first
        assert send() != first
        keyed = send(idempotency_key="upload-1")
        assert send(idempotency_key="upload-1") == keyed
        content = http.get(f"/v1/files/{keyed}/content")
        assert content.content == ROWS


class TestJobs:
    def test_from_a_file_to_an_adapter(self, sdk: OpenAI, training_file: str) -> None:
        job = sdk.fine_tuning.jobs.create(
            model=MODEL,
            training_file=training_file,
            suffix="tickets",
            seed=7,
            metadata={"team": "support"},
            method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}},
            extra_body={"lora": {"r": 4, "alpha": 8}},
        )
        assert (job.status, job.seed, job.metadata) == ("queued", 7, {"team": "support"})
        assert job.method.supervised.hyperparameters.n_epochs == 3
        done = finished(sdk, job.id)
        assert (done.status, done.error) == ("succeeded", None)
        assert done.fine_tuned_model == f"ft:{MODEL}:tunerack:tickets:{job.id[6:14]}"
        # The fake trains 12 steps of 100 tokens and reports 4 batches of 3 epochs at 2e-4.
        assert done.trained_tokens == 1200
        assert done.hyperparameters.learning_rate_multiplier == 1.0
        assert done.tunerack["spec"]["lora"]["rank"] == 4
        assert done.tunerack["report"]["rows_in"] == 4
        events = list(sdk.fine_tuning.jobs.list_events(job.id, limit=4))
        losses = [event.data["train_loss"] for event in events if event.type == "metrics"]
        assert losses == [4.0 / step for step in range(12, 0, -1)]
        assert len({event.id for event in events}) == len(events)
        checkpoints = list(sdk.fine_tuning.jobs.checkpoints.list(job.id, limit=3))
        assert [row.step_number for row in checkpoints] == [12, 9, 6, 3]
        assert checkpoints[0].metrics.train_loss == 4.0 / 12
        [result] = done.result_files
        assert sdk.files.retrieve(result).purpose == "fine-tune-results"
        lines = sdk.files.content(result).read().decode().splitlines()
        assert lines[0] == "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
        assert lines[1:3] == ["1,4.0,,,", "2,2.0,,,"]
        assert len(lines) == 13
        assert done.fine_tuned_model in [model.id for model in sdk.models.list()]
        assert "support" in [job.metadata["team"] for job in sdk.fine_tuning.jobs.list(metadata={"team": "support"})]

    def test_two_jobs_are_trained_by_one_worker(self, sdk: OpenAI, training_file: str) -> None:
        jobs = [
            sdk.fine_tuning.jobs.create(
                model=MODEL, training_file=training_file, extra_body={"adapter_name": f"team/pair-{n}"}
            )
            for n in range(2)
        ]
        done = [finished(sdk, job.id) for job in jobs]
        assert [job.fine_tuned_model for job in done] == ["team/pair-0", "team/pair-1"]
        assert done[0].tunerack["worker"] == done[1].tunerack["worker"]

    def test_everything_that_is_wrong_is_said_at_once(self, sdk: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.fine_tuning.jobs.create(
                model="smollm2-135n",
                training_file="file-none",
                suffix="../x",
                extra_body={"lora": {"rank": 0}, "adapter_name": MODEL},
                metadata={"k": "v" * 600},
            )
        message = caught.value.body["message"]
        for part in (
            "the model 'smollm2-135n' does not exist",
            "did you mean smollm2-135m",
            "no file with id 'file-none'",
            "suffix",
            "lora.rank",
            "metadata.k",
            "is the name of a base model",
        ):
            assert part in message, part

    @pytest.mark.parametrize(
        ("change", "param", "code"),
        [
            ({"model": "nobody"}, "model", "model_not_found"),
            ({"training_file": "file-none"}, "training_file", "file_not_found"),
            ({"method": {"type": "dpo"}}, "method.type", "invalid_request"),
            ({"extra_body": {"adapter_name": "a/../b"}}, "adapter_name", "invalid_request"),
            ({"extra_body": {"training": {"epochs": 3}}}, "training.epochs", "invalid_request"),
        ],
    )
    def test_one_wrong_field(self, sdk: OpenAI, training_file: str, change: dict, param: str, code: str) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.fine_tuning.jobs.create(**{"model": MODEL, "training_file": training_file, **change})
        assert (caught.value.param, caught.value.code) == (param, code)

    def test_a_file_of_another_purpose(self, sdk: OpenAI) -> None:
        other = sdk.files.create(file=("b.jsonl", ROWS), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="has the purpose 'batch'"):
            sdk.fine_tuning.jobs.create(model=MODEL, training_file=other.id)

    def test_refused_data_fail_the_job_with_its_file(self, sdk: OpenAI) -> None:
        bad = sdk.files.create(file=("bad.jsonl", b"BAD\n"), purpose="fine-tune")
        job = finished(sdk, sdk.fine_tuning.jobs.create(model=MODEL, training_file=bad.id).id)
        assert job.status == "failed"
        assert (job.error.code, job.error.param) == ("invalid_training_file", "training_file")
        assert "train.jsonl:1" in job.error.message
        errors = [event.message for event in sdk.fine_tuning.jobs.list_events(job.id) if event.level == "error"]
        assert errors == [job.error.message]

    def test_a_name_that_is_taken(self, sdk: OpenAI, training_file: str) -> None:
        body = {"model": MODEL, "training_file": training_file, "extra_body": {"adapter_name": "taken"}}
        job = sdk.fine_tuning.jobs.create(**body)
        for _ in range(2):
            with pytest.raises(openai.BadRequestError) as caught:
                sdk.fine_tuning.jobs.create(**body)
            assert caught.value.code == "adapter_exists"
            assert caught.value.response.headers["x-should-retry"] == "false"
            finished(sdk, job.id)

    def test_a_retried_creation_is_one_job(self, http: httpx2.Client, training_file: str) -> None:
        body = {"model": MODEL, "training_file": training_file, "adapter_name": f"retried-{next(_numbers)}"}
        path = "/v1/fine_tuning/jobs"
        first = http.post(path, json=body).json()["id"]
        assert http.post(path, json=body, headers={"x-stainless-retry-count": "1"}).json()["id"] == first
        key = {"idempotency-key": "job-1"}
        keyed = {"model": MODEL, "training_file": training_file, "suffix": "keyed"}
        second = http.post(path, json=keyed, headers=key).json()["id"]
        assert http.post(path, json=keyed, headers=key).json()["id"] == second
        clash = http.post(path, json={**keyed, "suffix": "other"}, headers=key)
        assert (clash.status_code, clash.json()["error"]["code"]) == (400, "idempotency_key_reused")

    def test_cancel(self, sdk: OpenAI, training_file: str) -> None:
        job = sdk.fine_tuning.jobs.create(model=MODEL, training_file=training_file)
        cancelled = sdk.fine_tuning.jobs.cancel(job.id)
        assert cancelled.status in ("cancelled", "succeeded")
        if cancelled.status == "cancelled":
            assert sdk.fine_tuning.jobs.cancel(job.id).status == "cancelled"
            assert cancelled.fine_tuned_model is None

    def test_pause_and_resume(self, sdk: OpenAI) -> None:
        """It stays where it is while it is paused, and ends with every step trained once."""
        slow = sdk.files.create(file=("slow.jsonl", ROWS.replace(b"q", b"SLOW")), purpose="fine-tune").id
        job = sdk.fine_tuning.jobs.create(model=MODEL, training_file=slow)
        until(lambda: sdk.fine_tuning.jobs.retrieve(job.id).tunerack["step"])
        paused = sdk.fine_tuning.jobs.pause(job.id)
        assert (paused.status, paused.tunerack["state"]) == ("queued", "paused")
        step = paused.tunerack["step"]
        time.sleep(1.2)
        held = sdk.fine_tuning.jobs.retrieve(job.id)
        assert (held.tunerack["state"], held.tunerack["step"], held.tunerack["worker"]) == ("paused", step, None)
        assert sdk.fine_tuning.jobs.pause(job.id).tunerack["state"] == "paused"
        assert sdk.fine_tuning.jobs.resume(job.id).tunerack["state"] in ("waiting", "preparing", "running")
        done = finished(sdk, job.id)
        assert (done.status, done.tunerack["step"], done.tunerack["restarts"]) == ("succeeded", 12, 0)
        events = list(sdk.fine_tuning.jobs.list_events(job.id, limit=100))
        assert len([event for event in events if event.type == "metrics"]) == 12
        for call in (sdk.fine_tuning.jobs.pause, sdk.fine_tuning.jobs.resume):
            with pytest.raises(openai.BadRequestError) as caught:
                call(job.id)
            assert caught.value.code in ("job_finished", "job_not_paused")

    def test_a_checkpoint_on_demand(self, sdk: OpenAI, http: httpx2.Client) -> None:
        slow = sdk.files.create(file=("slow.jsonl", ROWS.replace(b"q", b"SLOW")), purpose="fine-tune").id
        job = sdk.fine_tuning.jobs.create(model=MODEL, training_file=slow)
        path = f"/v1/fine_tuning/jobs/{job.id}/checkpoints"
        made = until(lambda: saved if "step_number" in (saved := http.post(path).json()) else None)
        assert made["step_number"] >= 1
        assert made["id"] in [row.id for row in sdk.fine_tuning.jobs.checkpoints.list(job.id, limit=100)]
        finished(sdk, job.id)
        assert http.post(path).json()["error"]["code"] == "job_not_running"

    def test_a_file_in_use_is_kept(self, sdk: OpenAI, training_file: str) -> None:
        file = sdk.files.create(file=("kept.jsonl", ROWS + b"\n"), purpose="fine-tune")
        job = sdk.fine_tuning.jobs.create(model=MODEL, training_file=file.id)
        with pytest.raises(openai.BadRequestError, match=job.id):
            sdk.files.delete(file.id)
        finished(sdk, job.id)
        assert sdk.files.delete(file.id).deleted

    def test_pages(self, sdk: OpenAI, http: httpx2.Client) -> None:
        every = http.get("/v1/fine_tuning/jobs", params={"limit": 1000}).json()
        assert [job.id for job in sdk.fine_tuning.jobs.list(limit=3)] == [job["id"] for job in every["data"]]
        assert (every["first_id"], every["has_more"]) == (every["data"][0]["id"], False)
        for query in ({"limit": "0"}, {"limit": "x"}, {"after": "ftjob-none"}):
            answer = http.get("/v1/fine_tuning/jobs", params=query)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))

    def test_plan(self, http: httpx2.Client, training_file: str) -> None:
        body = {"model": MODEL, "training_file": training_file, "training": {"n_epochs": 2}}
        plan = http.post("/v1/plan", json=body).json()
        assert (plan["steps"], plan["total_tokens"], plan["spec"]["n_epochs"]) == (12, 1200, 2)
        bad = http.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("b", b"BAD")}).json()["id"]
        answer = http.post("/v1/plan", json={"model": MODEL, "training_file": bad})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_training_file")


def test_a_full_disk_is_one_clear_error_and_control_goes_on(tmp_path: Path) -> None:
    """The limit on the size of files that the shell sets for a control process stands for a full disk."""
    import resource

    control = ControlProcess(tmp_path / "home")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, limits[1]))
        url = control.start()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with httpx2.Client(base_url=url, timeout=60, trust_env=False) as http:
            form = {"data": {"purpose": "fine-tune"}, "files": {"file": ("big.jsonl", b"x" * 2**22)}}
            answer = http.post("/v1/files", **form)
            assert (answer.status_code, answer.json()["error"]["code"]) == (507, "disk_full")
            assert answer.headers["x-should-retry"] == "false"
            assert list((control.home / "files").iterdir()) == []
            small = http.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("s", ROWS)})
            assert small.status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        control.end()


def test_an_upload_past_the_limit_is_refused(tmp_path: Path) -> None:
    control = ControlProcess(tmp_path / "home", TUNERACK_MAX_UPLOAD_BYTES="1000")
    try:
        with httpx2.Client(base_url=control.start(), timeout=60, trust_env=False) as http:
            form = {"data": {"purpose": "fine-tune"}, "files": {"file": ("big.jsonl", b"x" * 1001)}}
            answer = http.post("/v1/files", **form)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "file_too_large")
            assert list((control.home / "files").iterdir()) == []
    finally:
        control.end()


def test_a_key_is_asked_for_everywhere_but_health(tmp_path: Path) -> None:
    control = ControlProcess(tmp_path / "home", TUNERACK_API_KEY="s3cret")
    try:
        with httpx2.Client(base_url=control.start(), timeout=60, trust_env=False) as http:
            assert http.get("/health").json()["status"] == "ok"
            for path in ("/v1/models", "/metrics", "/v1/usage", "/nowhere"):
                answer = http.get(path)
                assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
                assert answer.headers["x-request-id"]
            wrong = http.get("/v1/models", headers={"authorization": "Bearer s3cre"})
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
            assert http.get("/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200
    finally:
        control.end()


def test_announcement(control: ControlProcess) -> None:
    announced = json.loads((control.home / "control.json").read_text())
    assert announced["pid"] == control.process.pid
    assert announced["started_at"] <= time.time()
    assert (control.home / "control.json").stat().st_mode & 0o777 == 0o600
