"""An engine's process as the demo sees it: started, asked one thing after the other, ended. ``engine.py`` runs in it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from sglang_router_ext.demo.engine import Plan, Request

START_LIMIT_S, WORK_LIMIT_S, END_LIMIT_S = 600, 600, 60
QUIET_S = 20
"""A sign of life is given this often."""
POLL_S = 0.01
TAIL_LINES = 30

T = TypeVar("T")


class EngineFailed(RuntimeError):
    """An engine ended before its work was done. The text holds the end of its log."""


class Worker:
    """One process, its log and its answers. ``plugin``: whether ours is loaded in it."""

    def __init__(self, name: str, plan: Plan, say: Callable[[str], None], *, plugin: bool) -> None:
        self.name, self.plan, self.plugin, self._say = name, plan, plugin, say
        self.work = pathlib.Path(plan.work)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Return at once; the engine is not ready yet."""
        self.work.mkdir(parents=True, exist_ok=True)
        self._answer.unlink(missing_ok=True)
        plan = self.work / "plan.json"
        plan.write_bytes(msgspec.json.encode(self.plan))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang_router_ext.demo.engine", str(plan), str(self._answer)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"SGLANG_ROUTER_EXT": "1" if self.plugin else "0", "SGLANG_ROUTER_EXT_GATE": "auto"},
                text=True,
                start_new_session=True,
            )
        self._say(f"{self.name}: starting")

    def wait_ready(self) -> float:
        """Seconds that the engine took to start. Raises :class:`EngineFailed`, as :meth:`ask` does."""
        seconds = self._next(float, START_LIMIT_S)
        self._say(f"{self.name}: ready")
        return seconds

    def ask(self, request: Request, answer: type[T]) -> T:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the wait for the answer reports
            self._process.stdin.write(msgspec.json.encode(request).decode() + "\n")
            self._process.stdin.flush()
        return self._next(answer, WORK_LIMIT_S)

    def finish(self) -> None:
        """Let the engine shut down; :meth:`kill` ends what does not do so in time."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)

    def kill(self) -> None:
        """End the process and what it started, if any of it is left."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def _answer(self) -> pathlib.Path:
        return self.work / "answer.json"

    @property
    def _log(self) -> pathlib.Path:
        return self.work / "log"

    def _next(self, answer: type[T], limit_s: float) -> T:
        assert self._process is not None
        started = spoken = time.monotonic()
        while True:
            ended = self._process.poll() is not None
            if self._answer.exists():
                found = msgspec.json.decode(self._answer.read_bytes(), type=answer)
                self._answer.unlink()
                return found
            now = time.monotonic()
            if now - spoken > QUIET_S:
                self._say(f"{self.name}: at it for {now - started:.0f} s (the first start compiles kernels, 2 minutes)")
                spoken = now
            if ended or now - started > limit_s:
                cause = f"ended with status {self._process.returncode}" if ended else f"not done after {limit_s:.0f} s"
                tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
                raise EngineFailed(f"the engine {self.name} {cause}; the end of its log:\n{tail}")
            time.sleep(POLL_S)


@contextlib.contextmanager
def started(workers: Sequence[Worker]) -> Iterator[dict[str, float]]:
    """Start ``workers`` together: name -> seconds that its start took. What is left of them at the end is killed."""
    with contextlib.ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.kill)
            worker.start()
        yield {worker.name: worker.wait_ready() for worker in workers}
