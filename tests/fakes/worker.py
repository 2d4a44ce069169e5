"""A worker without a model: the worker's HTTP interface, real files, real sockets, answers that can be told in advance.

Environment: FAKE_LOAD_S (seconds to load a base), FAKE_BROKEN (base that fails to load), FAKE_EXIT (base whose worker
ends while it loads), FAKE_STEP_S (seconds a training step takes).

A chat answer repeats the words of the last message, each as one token, behind the name of who answers. Words that do
something: `slow` (50 ms a token), `die` (the process ends after two tokens), `drop` (the connection breaks after two
tokens).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from tunerack.methods.identity import adapter_version

STEPS = 12
CHECKPOINT_STEPS = 3
TOKENS_PER_STEP = 100
RANK = 4


def write_adapter(folder: Path, base: str, seed: int, rank: int = RANK) -> Path:
    """An adapter in PEFT's format whose weights follow from `seed`: one layer, A [rank, 8] and B [8, rank], F32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors, data = {}, b""
    for name, shape in ((f"{module}.lora_A.weight", [rank, 8]), (f"{module}.lora_B.weight", [8, rank])):
        values = struct.pack(f"<{rank * 8}f", *(seed + 0.25 * n for n in range(rank * 8)))
        tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    header = json.dumps(tensors).encode()
    weights = len(header).to_bytes(8, "little") + header + data
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def error(status: int, message: str, code: str | None, param: str | None = None) -> JSONResponse:
    body = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JSONResponse({"error": body}, status)


class Training:
    """A job: a step every FAKE_STEP_S; the state is the step, kept in checkpoints."""

    def __init__(self, asked: dict, base: str) -> None:
        self.asked, self.base = asked, base
        self.state, self.step, self.error, self.adapter = "preparing", 0, None, None
        self.events: list[dict] = []
        self.checkpoints: list[dict] = []
        self.cancel = self.pause = False
        self.directory = Path(asked["directory"])
        self.task = asyncio.create_task(self.run())

    def say(self, message: str, kind: str = "message", data: dict | None = None, level: str = "info") -> None:
        event = {"seq": len(self.events) + 1, "created_at": time.time(), "level": level, "type": kind}
        self.events.append({**event, "message": message, "data": data or {}})

    async def run(self) -> None:
        step_s = float(os.environ.get("FAKE_STEP_S", "0.02"))
        training = Path(self.asked["training_path"]).read_bytes()
        if b"SLOW" in training:
            step_s = 0.2
        if b"BAD" in training:
            message = "train.jsonl:1: is not a chat row"
            self.error = {"code": "invalid_training_file", "message": message, "param": "training_file"}
            self.say(message, level="error")
            self.state = "failed"
            return
        kept = sorted(self.directory.glob("checkpoints/step-*"))
        if kept:
            self.step = int(kept[-1].name.split("-")[1])
            self.say(f"resumed from step {self.step}")
        self.state = "running"
        while self.step < STEPS:
            await asyncio.sleep(step_s)
            if self.cancel:
                self.state = "cancelled"
                return
            if self.pause:
                self.save()
                self.state = "paused"
                return
            self.step += 1
            self.say(f"step {self.step}", "metrics", {"step": self.step, "train_loss": 4.0 / self.step})
            if self.step % CHECKPOINT_STEPS == 0:
                self.save()
        # Seeded by the data alone: the result must not depend on how often the job was interrupted.
        path = write_adapter(self.directory / "adapter", self.base, seed=len(training))
        self.adapter = {"path": str(path), "version": adapter_version(path)}
        self.state = "succeeded"

    def save(self) -> None:
        if not self.step or self.step in [made["step"] for made in self.checkpoints]:
            return
        path = self.directory / "checkpoints" / f"step-{self.step:08d}"
        path.mkdir(parents=True, exist_ok=True)
        metrics = {"step": self.step, "train_loss": 4.0 / self.step}
        made = {"step": self.step, "path": str(path), "version": None, "created_at": time.time()}
        self.checkpoints.append({**made, "metrics": metrics})

    def status(self, after: int = 0) -> dict:
        spec = {**self.asked["spec"], "n_epochs": 3, "batch_size": 4, "learning_rate": 2e-4}
        return {
            "job_id": self.asked["job_id"],
            "lease": self.asked["lease"],
            "state": self.state,
            "step": self.step,
            "total_steps": STEPS,
            "epoch": 3 * self.step / STEPS,
            "trained_tokens": TOKENS_PER_STEP * self.step,
            "tokens_per_s": 1000.0,
            "eta_s": 1.0,
            "spec": spec,
            "report": {"rows_in": 4, "rows_kept": 4, "dropped": []},
            "plan": {"steps": STEPS, "predicted_s": {"low": 1, "mid": 2, "high": 3, "basis": "fake"}},
            "timing": {
                "device": "cpu",
                "steps": self.step,
                "tokens": TOKENS_PER_STEP * self.step,
                "seconds": 0.5 * self.step,
            },
            "error": self.error,
            "adapter": self.adapter,
            "events": [event for event in self.events if event["seq"] > after],
            "checkpoints": self.checkpoints,
        }


class FakeWorker:
    def __init__(self, base: str, worker_id: str, home: Path) -> None:
        self.base, self.id, self.home = base, worker_id, home
        self.token = (home / "workers" / f"{worker_id}.token").read_text().strip()
        self.status, self.error = "loading", None
        self.adapters: dict[str, Path] = {}
        self.jobs: dict[str, Training] = {}
        self.running = 0

    async def load(self) -> None:
        await asyncio.sleep(float(os.environ.get("FAKE_LOAD_S", "0.1")))
        if self.base == os.environ.get("FAKE_EXIT"):
            print("the fake ends while it loads", flush=True)
            os._exit(3)
        if self.base == os.environ.get("FAKE_BROKEN"):
            self.status, self.error = "failed", "no such weights"
        else:
            self.status = "ok"

    async def health(self, request: Request) -> JSONResponse:
        live = [job_id for job_id, job in self.jobs.items() if job.state in ("preparing", "running")]
        health = {"status": self.status, "base": self.base, "error": self.error, "pid": os.getpid()}
        rest = {"fingerprint": "f00d", "adapters": list(self.adapters), "running": self.running, "waiting": 0}
        return JSONResponse({**health, **rest, "jobs": live, "max_model_len": 2048})

    async def load_adapter(self, request: Request) -> JSONResponse:
        body = await request.json()
        path = Path(body["lora_path"])
        config = json.loads((path / "adapter_config.json").read_text())
        if config["base_model_name_or_path"] != self.base:
            reasons = f"adapter_config.json: is for {config['base_model_name_or_path']}\nadapter_model: no module"
            return error(400, reasons, "adapter_refused")
        self.adapters[body["lora_name"]] = path
        return JSONResponse({"version": adapter_version(path), "rank": config["r"], "modules": 1, "parameters": 64})

    async def unload_adapter(self, request: Request) -> JSONResponse:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return error(404, f"{name} is not loaded", "model_not_found")
        return JSONResponse({})

    async def generate(self, request: Request) -> JSONResponse | StreamingResponse:
        body = await request.json()
        if body["model"] != self.base and body["model"] not in self.adapters:
            return error(404, f"{body['model']} is not loaded", "model_not_found", "model")
        if not 0 <= body.get("temperature", 1) <= 2:
            return error(400, "temperature is from 0 to 2", "invalid_request", "temperature")
        chat = request.url.path.endswith("chat/completions")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        words = [body["model"][:14] + ":", *prompt.split()]
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": 0, "total_tokens": len(prompt.split())}
        if body.get("stream"):
            return StreamingResponse(self.stream(body, words, usage, chat), media_type="text/event-stream")
        await asyncio.sleep(0.05 * len(words) if "slow" in words else 0)
        usage["completion_tokens"] = len(words)
        usage["total_tokens"] += len(words)
        text = " ".join(words)
        if chat:
            choice = {"index": 0, "message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None}
        else:
            choice = {"index": 0, "text": text, "logprobs": None}
        answer = {"id": "cmpl-1", "created": 1, "model": body["model"], "usage": usage}
        answer["object"] = "chat.completion" if chat else "text_completion"
        return JSONResponse({**answer, "choices": [{**choice, "finish_reason": "stop"}]})

    async def stream(self, body: dict, words: list[str], usage: dict, chat: bool):
        options = body.get("stream_options") or {}
        head = {"id": "cmpl-1", "created": 1, "model": body["model"]}
        head["object"] = "chat.completion.chunk" if chat else "text_completion"

        def chunk(choices: list, *, last: bool = False) -> str:
            shown = {**head, "choices": choices}
            if options.get("continuous_usage_stats") or last:
                shown["usage"] = {**usage, "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]}
            return f"data: {json.dumps(shown)}\n\n"

        def choice(text: str, finish: str | None, role: bool = False) -> list:
            if not chat:
                return [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]
            delta = {"role": "assistant", "content": ""} if role else {"content": text} if text else {}
            return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]

        self.running += 1
        try:
            if chat:
                yield chunk(choice("", None, role=True))
            for number, word in enumerate(words):
                await asyncio.sleep(0.05 if "slow" in words else 0)
                usage["completion_tokens"] += 1
                yield chunk(choice(f" {word}" if number else word, None))
                if number == 1 and "die" in words:
                    await asyncio.sleep(0.05)
                    os._exit(9)
                if number == 1 and "drop" in words:
                    raise ConnectionResetError("the fake drops the connection")
            yield chunk(choice("", "stop"))
            yield chunk([], last=True)
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1
            with (self.home / "streams.log").open("a") as log:
                log.write(json.dumps({"tokens": usage["completion_tokens"], "of": len(words)}) + "\n")

    async def plan(self, request: Request) -> JSONResponse:
        body = await request.json()
        if b"BAD" in Path(body["training_path"]).read_bytes():
            return error(400, "train.jsonl:1: is not a chat row", "invalid_training_file", "training_file")
        resolved = {"batch_size": 4, "n_epochs": 1, "seq_len": 256, "learning_rate": 2e-4, "warmup_steps": 0}
        spec = {**body["spec"], **{k: v for k, v in resolved.items() if body["spec"].get(k) in (None, "auto")}}
        return JSONResponse(
            {
                "spec": spec,
                "report": {"rows_in": 8, "rows_kept": 8, "dropped": []},
                "tokens_per_epoch": STEPS * TOKENS_PER_STEP,
                "trained_tokens_per_epoch": STEPS * TOKENS_PER_STEP // 2,
                "longest": 200,
                "steps": STEPS,
                "total_tokens": STEPS * TOKENS_PER_STEP,
                "trainable_parameters": 1000,
                "predicted_s": {"low": 1, "mid": 2, "high": 3, "basis": "fake"},
            }
        )

    async def submit(self, request: Request) -> JSONResponse:
        for asked in (await request.json())["jobs"]:
            if asked["job_id"] not in self.jobs:
                self.jobs[asked["job_id"]] = Training(asked, self.base)
                with (self.home / "assignments.log").open("a") as log:
                    log.write(json.dumps({"job": asked["job_id"], "worker": self.id}) + "\n")
        return JSONResponse({"jobs": []}, 202)

    async def listed(self, request: Request) -> JSONResponse:
        return JSONResponse({"jobs": [job.status() for job in self.jobs.values()]})

    async def job(self, request: Request) -> JSONResponse:
        job = self.jobs.get(request.path_params["job_id"])
        if job is None:
            return error(404, "no such job", "not_found")
        if request.method == "DELETE":
            del self.jobs[request.path_params["job_id"]]
            return JSONResponse({})
        verb = request.url.path.rpartition("/")[2]
        if verb == "cancel":
            job.cancel = True
        if verb == "pause":
            job.pause = True
        if verb == "checkpoint":
            job.save()
        return JSONResponse(job.status(int(request.query_params.get("after", 0))))

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
            Route("/v1/chat/completions", self.generate, methods=["POST"]),
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/training/plan", self.plan, methods=["POST"]),
            Route("/training/jobs", self.submit, methods=["POST"]),
            Route("/training/jobs", self.listed, methods=["GET"]),
            Route("/training/jobs/{job_id}/cancel", self.job, methods=["POST"]),
            Route("/training/jobs/{job_id}/pause", self.job, methods=["POST"]),
            Route("/training/jobs/{job_id}/checkpoint", self.job, methods=["POST"]),
            Route("/training/jobs/{job_id}", self.job, methods=["GET", "DELETE"]),
        ]

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette):
            loading = asyncio.create_task(self.load())
            yield
            loading.cancel()

        inner = Starlette(routes=routes, lifespan=lifespan)

        async def app(scope, receive, send) -> None:
            sent = dict(scope.get("headers") or []).get(b"authorization", b"").decode()
            if scope["type"] == "http" and sent != f"Bearer {self.token}":
                await error(401, "wrong token", "invalid_api_key")(scope, receive, send)
            else:
                await inner(scope, receive, send)

        return app


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("base", "id", "home", "host", "port"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    home = Path(options.home)
    worker = FakeWorker(options.base, options.id, home)
    listener = socket.create_server((options.host, int(options.port)))
    announced = {"pid": os.getpid(), "port": listener.getsockname()[1], "base": options.base, "started_at": time.time()}
    aside = home / "workers" / f"{options.id}.json.tmp"
    aside.write_text(json.dumps(announced))
    shutil.move(aside, home / "workers" / f"{options.id}.json")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    config = uvicorn.Config(worker.app(), log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    asyncio.run(server.serve(sockets=[listener]))


if __name__ == "__main__":
    sys.exit(main())
