"""Replays one captured launch very often, with other inputs each time, and judges the result every so often.

What goes wrong once in a million (a word that was not emptied, a wait that never ends, a result of the replay before) does not
show in a check. A graph takes its hidden states from a pool, one batch further at every replay, so that nothing of it waits for
the CPU; a watchdog ends a run that stands still.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_router_ext.agreement import Result, compare
from sglang_router_ext.bench.clock import capture, poison
from sglang_router_ext.bench.inputs import Inputs, random_inputs
from sglang_router_ext.bench.launch import launch, truth
from sglang_router_ext.contract import Problem
from sglang_router_ext.designs import Design

POOL = 7
"""Batches; no divisor of what lies between two judgements, so that all of them come up."""
STANDS_STILL_S = 60.0


class Stuck(RuntimeError):
    """Replays do not end. The GPU is busy with them until the process ends."""


class Soaked(NamedTuple):
    """What came of one design at one row count."""

    rows: int
    replays: int
    judged: int
    seconds: float
    failures: list[str]


class Loop:
    """A launch whose inputs move on by themselves. ``step`` is one replay."""

    def __init__(self, design: Design, problem: Problem, rows: int, device: torch.device | str) -> None:
        self.design, self.problem, self.replays = design, problem, 0
        self.inputs = random_inputs(problem, rows, device=device)
        batches = [random_inputs(problem, rows, seed=seed, device=device).hidden for seed in range(1, POOL + 1)]
        self.pool = torch.stack(batches)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        self.result = Result()
        self.step: Callable[[], object] = self._launch
        if self.pool.is_cuda:
            self._stream = torch.cuda.Stream(device)
            graph, self.result = capture(self._launch, self._stream)
            self._next.zero_()
            torch.cuda.synchronize(device)
            self.step = graph.replay

    def _launch(self) -> Result:
        self.inputs.hidden.copy_(self.pool.index_select(0, self._next)[0])
        self._next.add_(1).remainder_(POOL)
        self.result = launch(self.design, self.problem, self.inputs)
        return self.result

    def run(self, count: int) -> None:
        """``count`` replays, waiting for their end. Raises :class:`Stuck`."""
        if not self.pool.is_cuda:
            for _ in range(count):
                self.step()
        else:
            with torch.cuda.stream(self._stream):
                for _ in range(count):
                    self.step()
                done = torch.cuda.Event()
                done.record()
            started = time.monotonic()
            while not done.query():
                if time.monotonic() - started > STANDS_STILL_S:
                    raise Stuck(f"{self.design.name}: {count} replays after the first {self.replays} do not end")
                time.sleep(0.001)
        self.replays += count

    def judge(self) -> list[str]:
        """What is wrong with the result of the last replay."""
        batch: Inputs = self.inputs._replace(hidden=self.pool[(self.replays - 1) % POOL])
        return compare(self.result, truth(self.design.stages, self.problem, batch), self.problem, self.design)

    def forget(self) -> None:
        """Poison the outputs, so that the next replay cannot be judged by them."""
        tensors = () if self.result.plan is None else tuple(self.result.plan.tensors.values())
        poison((*self.result[:3], tensors))


def soak(
    design: Design,
    problem: Problem,
    rows: int,
    device: torch.device | str,
    *,
    replays: int,
    between: int,
    say: Callable[[int, int], None] = lambda done, failed: None,
) -> Soaked:
    """``replays`` of ``design`` at ``rows`` rows, judged after every ``between``. ``say`` gets replays done and failures.

    Raises :class:`Stuck`.
    """
    started, judged, failures = time.monotonic(), 0, list[str]()
    loop = Loop(design, problem, rows, device)
    while loop.replays < replays:
        loop.forget()
        loop.run(min(between, replays - loop.replays))
        judged += 1
        failures += [f"rows {rows}, replay {loop.replays}: {line}" for line in loop.judge()]
        say(loop.replays, len(failures))
    return Soaked(rows, loop.replays, judged, time.monotonic() - started, failures)
