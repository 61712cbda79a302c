"""Engines that are launched again and again, in mixed order: what a backend of ours is worth to a client.

Within one launch the time of a decode step repeats well; between two launches of the same engine it differs more, by where
memory came to lie and by what else the machine did. So every variant is launched several times, each time at another place of
the order, and a launch is one measurement. A start takes most of a minute, so the engines of a round start together where
memory allows; they are timed one after the other, and an engine that waits sleeps.
"""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from sglang_router_ext.bench.record import OtherRecord
from sglang_router_ext.demo import checkpoint, trace, weights
from sglang_router_ext.demo.checkpoint import Size
from sglang_router_ext.demo.compare import Run, Yardstick
from sglang_router_ext.demo.engine import Change, Profile, Time, Tokens
from sglang_router_ext.demo.pace import Spread, spread
from sglang_router_ext.demo.serve import (
    BATCHES,
    SEQUENCES,
    STOCK,
    Judged,
    among_stock,
    engine_plan,
    fits,
    folder,
    free_memory,
    hold_all_against,
    model_path,
    served_record,
)
from sglang_router_ext.demo.trace import RouterTime
from sglang_router_ext.demo.worker import Worker

RECORD_KIND = "launches"
ROUNDS = 6
"""Of the clock, for each batch size of a launch."""


class Launch(msgspec.Struct, frozen=True):
    """One start of an engine."""

    variant: str
    start_s: float
    step_ms: dict[int, Spread]
    """Batch size -> milliseconds of a decode step by the clock, over the rounds."""


class LaunchReport(msgspec.Struct, frozen=True):
    gpu: str
    problem: str
    size: Size
    variants: list[str]
    """Stock first."""
    launches: list[Launch]
    """In the order in which they ran."""
    router: dict[str, dict[int, RouterTime | None]]
    """Variant -> batch size -> the router of one layer, in a profile of its first launch."""
    stock: Yardstick
    same: list[Judged]
    """Each variant against stock: must be the same computation."""
    seconds: float

    def over_launches(self, variant: str, batch: int) -> Spread:
        """Milliseconds of a decode step; one launch, by its median, is one measurement."""
        return spread([launch.step_ms[batch].median for launch in self.launches if launch.variant == variant])

    @property
    def agrees(self) -> bool:
        return not any(one.against for one in self.same)


def mixed(variants: Sequence[str], launches: int) -> list[str]:
    """Every variant ``launches`` times, at every place of the order equally often if there are as many rounds as variants."""
    return [variants[(place + number) % len(variants)] for number in range(launches) for place in range(len(variants))]


def run(
    size: Size,
    backends: Sequence[str],
    launches: int,
    say: Callable[[str], None],
    *,
    keep: pathlib.Path | None = None,
    in_memory: bool = False,
) -> LaunchReport:
    """Launch stock and ``backends`` ``launches`` times each on the checkpoint of ``size``, one after the other.

    ``keep``, ``in_memory`` and errors as in :func:`~sglang_router_ext.demo.serve.run`.
    """
    import torch

    started = time.monotonic()
    model = checkpoint.config(size)
    free = free_memory(size, model)
    variants = [STOCK, *backends]
    done: list[Launch] = []
    runs: dict[str, dict[int, Run]] = {}
    router: dict[str, dict[int, RouterTime | None]] = {}
    with folder(keep) as work:
        path = model_path(size, model, work, say, keep=keep is not None, in_memory=in_memory)
        order = mixed(variants, launches)
        at_once = len(variants) if fits(len(variants), model, free) else 1
        for first in range(0, len(order), at_once):
            numbered = list(enumerate(order[first : first + at_once], first + 1))
            say(f"launch {' and '.join(f'{number} ({name})' for number, name in numbered)} of {len(order)}")
            workers = [
                Worker(
                    name,
                    engine_plan(name, path, model, work / f"{n}-{name}", free, in_memory=in_memory),
                    say,
                    plugin=name != STOCK,
                )
                for n, name in numbered
            ]
            for launch, found in _launch(workers, in_memory=in_memory, new=set(variants) - set(runs)):
                done.append(launch)
                if found is not None:
                    runs[launch.variant], files = found
                    router[launch.variant] = {b: trace.router_time([trace.kernels(file)]) for b, file in files.items()}
    stock = runs[STOCK]
    measure = among_stock(stock)
    same = [one for name in backends for one in hold_all_against(name, stock, runs[name], measure)]
    seconds = time.monotonic() - started
    problem = str(checkpoint.problem(model))
    return LaunchReport(torch.cuda.get_device_name(), problem, size, variants, done, router, measure, same, seconds)


def _launch(
    workers: list[Worker], *, in_memory: bool, new: set[str]
) -> Iterator[tuple[Launch, tuple[dict[int, Run], dict[int, str]] | None]]:
    """Start ``workers`` together and time one after the other. Those that are ``new`` also show tokens and a profile, by batch
    size.
    """
    with contextlib.ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.kill)
            worker.start()
        started = {worker: worker.wait_ready() for worker in workers}
        for worker, start_s in started.items():
            if in_memory:
                worker.ask(Change(weights.DRAW), type(None))
            found = None
            if worker.name in new:
                tokens = {batch: worker.ask(Tokens(batch, min(SEQUENCES, 16 * batch)), Run) for batch in BATCHES}
                found = tokens, {batch: worker.ask(Profile(batch), str) for batch in BATCHES}
            steps = {batch: spread([worker.ask(Time(batch), float) for _ in range(ROUNDS)]) for batch in BATCHES}
            worker.finish()
            yield Launch(worker.name, start_s, steps), found


def record_of(report: LaunchReport) -> OtherRecord:
    """The times of a report as a line of ``records/``. What was measured stands in its texts and whole numbers alone."""
    found = {
        "backends": " ".join(report.variants[1:]),
        "launches": [msgspec.to_builtins(launch, str_keys=True) for launch in report.launches],
        "router": msgspec.to_builtins(report.router, str_keys=True),
    }
    return served_record(RECORD_KIND, report.gpu, report.problem, report.size, report.same, found)
