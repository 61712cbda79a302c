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
from sglang_router_ext.designs import DESIGNS, source_hash

RECORD_KIND = "launches"
KEPT = "launch.json"
ROUNDS = 6
"""Of the clock, for each batch size of a launch."""


class Launch(msgspec.Struct, frozen=True):
    """One start of an engine."""

    variant: str
    start_s: float
    step_ms: dict[int, Spread]
    """Batch size -> milliseconds of a decode step by the clock, over the rounds."""


class Kept(msgspec.Struct, frozen=True):
    """A launch as it stays in its folder, so that a comparison that was cut short goes on where it was."""

    made_by: str
    launch: Launch
    runs: dict[int, Run] | None
    """Batch size -> what was generated; of a variant's first launch, as is ``router``."""
    router: dict[int, RouterTime | None] | None


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

    ``keep``, ``in_memory`` and errors as in :func:`~sglang_router_ext.demo.serve.run`. Launches that an earlier call left in
    ``keep``, of the same kind and order, are not repeated.
    """
    import torch

    started = time.monotonic()
    model = checkpoint.config(size)
    free = free_memory(size, model)
    variants = [STOCK, *backends]
    order = list(enumerate(mixed(variants, launches), 1))
    made_by = _made_by(size, in_memory=in_memory)
    with folder(keep) as work:
        path = model_path(size, model, work, say, keep=keep is not None, in_memory=in_memory)
        places = {number: work / f"{number}-{name}" for number, name in order}
        done = {number: kept for number, name in order if (kept := _kept(places[number], name, made_by)) is not None}
        for variant in set(variants) - _shown(done):
            done.pop(next(number for number, name in order if name == variant), None)  # somebody must show tokens
        if done:
            say(f"launches {', '.join(map(str, done))} are taken from {work}, which an earlier call left")
        at_once = len(variants) if fits(len(variants), model, free) else 1
        for first in range(0, len(order), at_once):
            todo = [one for one in order[first : first + at_once] if one[0] not in done]
            if not todo:
                continue
            say(f"launch {' and '.join(f'{number} ({name})' for number, name in todo)} of {len(order)}")
            workers = {
                number: Worker(
                    name, engine_plan(name, path, model, places[number], free, in_memory=in_memory), say, plugin=name != STOCK
                )
                for number, name in todo
            }
            for number, kept in _launch(workers, made_by, in_memory=in_memory, new=set(variants) - _shown(done)):
                done[number] = kept
                (places[number] / KEPT).write_bytes(msgspec.json.encode(kept))
    made = [done[number] for number, _name in order]
    runs = {kept.launch.variant: kept.runs for kept in made if kept.runs is not None}
    router = {kept.launch.variant: kept.router for kept in made if kept.router is not None}
    stock = runs[STOCK]
    measure = among_stock(stock)
    same = [one for name in backends for one in hold_all_against(name, stock, runs[name], measure)]
    return LaunchReport(
        torch.cuda.get_device_name(),
        str(checkpoint.problem(model)),
        size,
        variants,
        [kept.launch for kept in made],
        router,
        measure,
        same,
        time.monotonic() - started,
    )


def _shown(done: dict[int, Kept]) -> set[str]:
    """Variants whose tokens are there."""
    return {kept.launch.variant for kept in done.values() if kept.runs is not None}


def _made_by(size: Size, *, in_memory: bool) -> str:
    """What must be the same for launches to be of one comparison."""
    import torch

    sources = source_hash(tuple(sorted({source for design in DESIGNS for source in design.sources})))
    return f"{torch.cuda.get_device_name()}, {size}, in memory {in_memory}, sources {sources}"


def _kept(place: pathlib.Path, variant: str, made_by: str) -> Kept | None:
    """What an earlier call left of this launch; None if that is of something else, or in pieces."""
    try:
        kept = msgspec.json.decode((place / KEPT).read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):
        return None
    return kept if (kept.made_by, kept.launch.variant) == (made_by, variant) else None


def _launch(workers: dict[int, Worker], made_by: str, *, in_memory: bool, new: set[str]) -> Iterator[tuple[int, Kept]]:
    """Start ``workers`` together and time one after the other. Those that are ``new`` also show tokens and a profile, by batch
    size.
    """
    with contextlib.ExitStack() as stack:
        for worker in workers.values():
            stack.callback(worker.kill)
            worker.start()
        started = {number: worker.wait_ready() for number, worker in workers.items()}
        for number, worker in workers.items():
            if in_memory:
                worker.ask(Change(weights.DRAW), type(None))
            tokens = router = None
            if worker.name in new:
                tokens = {batch: worker.ask(Tokens(batch, min(SEQUENCES, 16 * batch)), Run) for batch in BATCHES}
                files = {batch: worker.ask(Profile(batch), str) for batch in BATCHES}
                router = {batch: trace.router_time([trace.kernels(file)]) for batch, file in files.items()}
            steps = {batch: spread([worker.ask(Time(batch), float) for _ in range(ROUNDS)]) for batch in BATCHES}
            worker.finish()
            yield number, Kept(made_by, Launch(worker.name, started[number], steps), tokens, router)


def record_of(report: LaunchReport) -> OtherRecord:
    """The times of a report as a line of ``records/``. What was measured stands in its texts and whole numbers alone."""
    found = {
        "backends": " ".join(report.variants[1:]),
        "launches": [msgspec.to_builtins(launch, str_keys=True) for launch in report.launches],
        "router": msgspec.to_builtins(report.router, str_keys=True),
    }
    return served_record(RECORD_KIND, report.gpu, report.problem, report.size, report.same, found)
