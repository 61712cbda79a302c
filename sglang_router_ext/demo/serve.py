"""The demo with a CUDA GPU: SGLang's Engine as it is and with the plugin, on the same checkpoint and prompts, side by side.

Both engines are processes of their own. They start together where memory allows, and are measured one after the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import msgspec

from sglang_router_ext.bench.record import OtherRecord, decode, new_run
from sglang_router_ext.demo import checkpoint, trace
from sglang_router_ext.demo.checkpoint import Size
from sglang_router_ext.demo.compare import Comparison, Run, Yardstick, compare, verdict, yardstick
from sglang_router_ext.demo.engine import Outcome, Plan, changed_batch
from sglang_router_ext.demo.trace import RouterTime

STOCK, OURS = "stock", "router_ext_pair"
RECORD_KIND = "served"
BATCHES = [1, 6, 16, 96]
SEQUENCES, TOKENS, REPEATS = 96, 32, 5
TOGETHER_SHARE = 0.2
"""Two engines start together where a model's weights take less than this share of the free GPU memory."""
START_LIMIT_S, WORK_LIMIT_S, END_LIMIT_S = 600, 600, 60
QUIET_S = 20
"""A sign of life is given this often."""
TAIL_LINES = 30


class Served(msgspec.Struct, frozen=True):
    """What one engine showed."""

    start_s: float
    step_ms: dict[int, float]
    """Batch size -> milliseconds of a decode step, median."""
    router: dict[int, RouterTime | None]
    """Batch size -> the router of one layer in the profile."""


class Judged(msgspec.Struct, frozen=True):
    """A comparison of two runs and what speaks against their equality."""

    what: str
    found: Comparison
    against: list[str]


class ServeReport(msgspec.Struct, frozen=True):
    gpu: str
    problem: str
    moe_layers: int
    served: dict[str, Served]
    stock: Yardstick | None
    """How far stock runs of different batch sizes are from each other; None with dummy weights."""
    same: list[Judged]
    """Plugin against stock: must be the same computation."""
    changed: list[Judged]
    """Stock with selection biases rounded to bf16 against stock: must be noticed. Then the plugin with these against stock with
    these: must be the same again, as the plugin has to follow an update of the weights."""
    seconds: float

    @property
    def replaced(self) -> bool:
        """The profile shows other router kernels with the plugin than without it, at every batch size."""
        stock, ours = self.served[STOCK].router, self.served[OURS].router
        return all(time is not None and _kernels(time) != _kernels(stock[size]) for size, time in ours.items())

    @property
    def agrees(self) -> bool:
        if self.stock is None:
            return self.replaced
        noticed, followed = self.changed
        same = not followed.against and not any(judged.against for judged in self.same)
        return self.replaced and same and bool(noticed.against)


def _kernels(time: RouterTime | None) -> list[str]:
    return [] if time is None else time.kernels


class EngineFailed(RuntimeError):
    """An engine ended before its work was done. The text holds the end of its log."""


def run(size: Size, say: Callable[[str], None], *, keep: pathlib.Path | None = None, dummy: bool = False) -> ServeReport:
    """Serve the checkpoint of ``size`` with both engines. ``dummy``: random weights that SGLang makes up, so times only.

    ``keep``: folder for the checkpoint, the logs and the traces. Raises :class:`EngineFailed`.
    """
    import torch

    started = time.monotonic()
    model = checkpoint.config(size)
    with _folder(keep) as work:
        if dummy:
            path = work / "dummy"
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(model))
        else:
            path = checkpoint.write(size, checkpoint.folder(size) if keep is None else work / "checkpoint", say)
        free, _total = torch.cuda.mem_get_info()
        together = checkpoint.bytes_of(model) < TOGETHER_SHARE * free
        workers = [_Worker(name, _plan(name, path, model, work / name, dummy=dummy), say) for name in (STOCK, OURS)]
        outcomes = _run_workers(workers, together=together)
        served = {name: _served(outcome) for name, outcome in outcomes.items()}
    stock, same, changed = (None, [], []) if dummy else _judge(outcomes[STOCK], outcomes[OURS])
    return ServeReport(
        torch.cuda.get_device_name(),
        str(checkpoint.problem(model)),
        len(size.moe_layers),
        served,
        stock,
        same,
        changed,
        time.monotonic() - started,
    )


@contextlib.contextmanager
def _folder(keep: pathlib.Path | None) -> Iterator[pathlib.Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="sglang-router-ext-") as work:
            yield pathlib.Path(work)
    else:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()


def _plan(name: str, path: pathlib.Path, model: dict, work: pathlib.Path, *, dummy: bool) -> Plan:
    """What both engines do; they differ in the backend alone. Stock names the expert kernels that the plugin keeps."""
    return Plan(
        arguments={
            "model_path": str(path),
            "load_format": "dummy" if dummy else "auto",
            "moe_runner_backend": "triton" if name == STOCK else name,
            "skip_tokenizer_init": True,
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "enable_fp32_lm_head": True,
            "disable_radix_cache": True,
            "disable_prefill_cuda_graph": True,
            "cuda_graph_bs_decode": BATCHES,
            "max_running_requests": max(BATCHES),
            "max_total_tokens": 65536,
            "mem_fraction_static": 0.85,
            "random_seed": 1,
            "log_level": "info",
        },
        batches=BATCHES,
        sequences=0 if dummy else SEQUENCES,
        tokens=TOKENS,
        repeats=REPEATS,
        vocabulary=model["vocab_size"],
        changed=None if dummy else str(path / "changed"),
        work=str(work),
    )


class _Worker:
    """An engine's process."""

    def __init__(self, name: str, plan: Plan, say: Callable[[str], None]) -> None:
        self.name, self.plan, self._say = name, plan, say
        self.work = pathlib.Path(plan.work)
        self.outcome = self.work / "outcome.json"
        self._told = 0

    def start(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        for stale in ("events", "outcome.json"):
            (self.work / stale).unlink(missing_ok=True)
        (self.work / "plan.json").write_bytes(msgspec.json.encode(self.plan))
        command = [sys.executable, "-m", "sglang_router_ext.demo.engine", str(self.work / "plan.json"), str(self.outcome)]
        environment = os.environ | {"SGLANG_ROUTER_EXT": "0" if self.name == STOCK else "1", "SGLANG_ROUTER_EXT_GATE": "auto"}
        self.log = (self.work / "log").open("w")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            start_new_session=True,
        )
        self._say(f"{self.name}: starting")

    def wait_ready(self) -> None:
        self._wait(lambda: "ready" in self._events(), START_LIMIT_S)

    def work_through(self) -> Outcome:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self._wait(self.outcome.exists, WORK_LIMIT_S)
        with contextlib.suppress(subprocess.TimeoutExpired):  # what does not end by itself is ended by stop()
            self.process.wait(END_LIMIT_S)
        return msgspec.json.decode(self.outcome.read_bytes(), type=Outcome)

    def stop(self) -> None:
        """End the process and what it started, if any of it is left."""
        process = getattr(self, "process", None)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.log.close()

    def _events(self) -> list[str]:
        file = self.work / "events"
        return file.read_text().splitlines() if file.exists() else []

    def _wait(self, done: Callable[[], bool], limit_s: float) -> None:
        started = spoken = time.monotonic()
        while True:
            ended = self.process.poll() is not None
            events = self._events()
            now = time.monotonic()
            for event in events[self._told :]:
                self._say(f"{self.name}: {event}")
                spoken = now
            self._told = len(events)
            if done():
                return
            if now - spoken > QUIET_S:
                self._say(f"{self.name}: at it for {now - started:.0f} s (the first start compiles kernels, 2 minutes)")
                spoken = now
            if ended or now - started > limit_s:
                cause = f"ended with status {self.process.returncode}" if ended else f"not done after {limit_s:.0f} s"
                tail = "\n".join((self.work / "log").read_text(errors="replace").splitlines()[-TAIL_LINES:])
                raise EngineFailed(f"the engine {self.name} {cause}; the end of its log:\n{tail}")
            time.sleep(0.2)


def _run_workers(workers: list[_Worker], *, together: bool) -> dict[str, Outcome]:
    outcomes = {}
    try:
        if together:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.wait_ready()
        for worker in workers:
            if not together:
                worker.start()
                worker.wait_ready()
            outcomes[worker.name] = worker.work_through()
    finally:
        for worker in workers:
            worker.stop()
    return outcomes


def _served(outcome: Outcome) -> Served:
    return Served(
        outcome.start_s,
        outcome.step_ms,
        {size: trace.router_time(trace.kernels(file)) for size, file in outcome.traces.items()},
    )


def record_of(report: ServeReport) -> OtherRecord:
    """The times of a report as a line of ``records/``."""
    body = msgspec.to_builtins(new_run(report.gpu)) | {
        "kind": RECORD_KIND,
        "problem": report.problem,
        "moe_layers": report.moe_layers,
        "weights": "dummy" if report.stock is None else "demo",
        "served": msgspec.to_builtins(report.served, str_keys=True),
    }
    record = decode(msgspec.json.encode(body))
    assert isinstance(record, OtherRecord)
    return record


def _judge(stock: Outcome, ours: Outcome) -> tuple[Yardstick, list[Judged], list[Judged]]:
    sizes = sorted(stock.runs)
    pairs = [(one, other) for i, one in enumerate(sizes) for other in sizes[i + 1 :]]
    measure = yardstick([compare(stock.runs[one], stock.runs[other]) for one, other in pairs])

    def judge(what: str, one: Run, other: Run) -> Judged:
        found = compare(one, other)
        return Judged(what, found, verdict(found, measure))

    same = [judge(f"{OURS} against stock, {size} at a time", stock.runs[size], ours.runs[size]) for size in sizes]
    assert stock.changed is not None
    assert ours.changed is not None
    changed = [
        judge("stock with bf16 selection biases against stock", stock.runs[changed_batch(sizes)], stock.changed),
        judge(f"{OURS} against stock, both with bf16 selection biases", stock.changed, ours.changed),
    ]
    return measure, same, changed
