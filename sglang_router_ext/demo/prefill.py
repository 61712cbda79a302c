"""``demo --prefill``: the time to the first token of long prompts, stock SGLang against the plugin.

Each prompt has as many tokens as a chunk of SGLang's prefill takes, so it is one forward pass in which a router gets all of
them as rows. The prompts differ from each other, and no prefix is kept. They are served one after the other, and the engines
take turns.

First tokens are held against what stock differs from itself by: the same prompts queued at once behind a short one, which moves
where their chunks end.
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_router_ext.bench.record import OtherRecord
from sglang_router_ext.demo import checkpoint, trace, weights
from sglang_router_ext.demo.checkpoint import Size
from sglang_router_ext.demo.compare import Run, Yardstick, compare, yardstick
from sglang_router_ext.demo.engine import Change, First, Plan, Profile, Tokens
from sglang_router_ext.demo.pace import Spread, in_turn, spread
from sglang_router_ext.demo.serve import (
    PROFILES,
    STOCK,
    Judged,
    engine_plan,
    fits,
    folder,
    free_memory,
    hold_against,
    model_path,
    served_record,
)
from sglang_router_ext.demo.trace import RouterTime, StepTime
from sglang_router_ext.demo.worker import Worker, started

RECORD_KIND = "prefill"
TOKENS = 8192
"""Of a prompt, and of a chunk of the prefill."""
CONTEXT = 2 * TOKENS
"""What the model is told that it can take; the positions of a prompt mean the same whatever this is."""
FEWEST, PROMPTS, MOST = 2, 8, 64
"""Prompts: a queue of one would leave nothing to measure stock by."""


class Prefilled(msgspec.Struct, frozen=True):
    """What one engine showed."""

    start_s: float
    clock_ms: Spread
    """Milliseconds to the first token, over the prompts."""
    gpu: StepTime | None
    """A prefill in the profiles; None where none is found."""
    router: RouterTime | None
    """The router of one layer in these."""


class PrefillReport(msgspec.Struct, frozen=True):
    gpu: str
    problem: str
    size: Size
    backend: str
    """Of ours; the name of its engine too."""
    prompts: int
    together: bool
    """Whether both engines ran at the same time, so that they took turns; if not, one ran after the other."""
    served: dict[str, Prefilled]
    stock: Yardstick
    """How far stock is from itself where the chunks end elsewhere."""
    same: list[Judged]
    """Plugin against stock: must be the same computation."""
    seconds: float

    @property
    def whole(self) -> bool:
        """Every engine's profiles show each layer's router once a prompt, so a prompt was one chunk."""
        once = PROFILES * len(self.size.moe_layers)
        return all(one.router is not None and one.router.layers == once for one in self.served.values())

    @property
    def agrees(self) -> bool:
        return not any(judged.against for judged in self.same)


class Outcome(msgspec.Struct, kw_only=True):
    """What one engine answered; its fields fill while it works."""

    start_s: float
    alone: Run | None = None
    """First tokens, a prompt at a time."""
    queued: Run | None = None
    """Those of prompts that came at once, behind a short one."""
    first_ms: list[float] = []
    """Of each prompt in order."""
    traces: list[str] = []


def run(
    size: Size,
    backend: str,
    prompts: int,
    say: Callable[[str], None],
    *,
    keep: pathlib.Path | None = None,
    in_memory: bool = False,
) -> PrefillReport:
    """Serve ``prompts`` prompts stock and with ``backend``; the rest as :func:`~sglang_router_ext.demo.serve.run`."""
    import torch

    began = time.monotonic()
    model = checkpoint.config(size)
    free = free_memory(size, model)
    with folder(keep) as work:
        path = model_path(size, model, work, say, keep=keep is not None, in_memory=in_memory)
        workers = [
            Worker(name, prefill_plan(name, path, model, work / name, free, in_memory=in_memory), say, plugin=name == backend)
            for name in (STOCK, backend)
        ]
        together = fits(2, model, free)
        outcomes: dict[str, Outcome] = {}
        for group in [workers] if together else [[worker] for worker in workers]:
            outcomes |= _work(group, prompts, say, in_memory=in_memory)
        for name, outcome in outcomes.items():
            (work / name / "prefill.json").write_bytes(msgspec.json.encode(outcome))
        say("reading the profiles")
        served = {name: _prefilled(outcome) for name, outcome in outcomes.items()}
    stock, same = judge(outcomes[STOCK], outcomes[backend], backend)
    return PrefillReport(
        torch.cuda.get_device_name(),
        str(checkpoint.problem(model)),
        size,
        backend,
        prompts,
        together,
        served,
        stock,
        same,
        time.monotonic() - began,
    )


def prefill_plan(name: str, path: pathlib.Path, model: dict, work: pathlib.Path, free: int, *, in_memory: bool) -> Plan:
    """As for decode steps, with room for a prompt of TOKENS in one chunk."""
    plan = engine_plan(name, path, model, work, free, in_memory=in_memory)
    room: dict[str, Any] = {
        "chunked_prefill_size": TOKENS,
        "json_model_override_args": json.dumps({"max_position_embeddings": CONTEXT}),
        "cuda_graph_bs_decode": [1],
    }
    changes: dict[str, Any] = {"batches": [1], "tokens": 1, "prompt_tokens": TOKENS}
    return msgspec.structs.replace(plan, arguments=plan.arguments | room, **changes)


def _work(workers: list[Worker], prompts: int, say: Callable[[str], None], *, in_memory: bool) -> dict[str, Outcome]:
    """All that is asked of ``workers``, which run together."""
    with started(workers) as seconds:
        outcomes = {worker.name: Outcome(start_s=seconds[worker.name]) for worker in workers}
        for worker in workers:
            if in_memory:
                say(f"{worker.name}: drawing weights")
                worker.ask(Change(weights.DRAW), type(None))
            say(f"{worker.name}: first tokens of {prompts} prompts of {TOKENS} tokens")
            outcomes[worker.name].alone = worker.ask(Tokens(1, prompts), Run)
            outcomes[worker.name].queued = worker.ask(Tokens(prompts, prompts, shifted=True), Run)
        say(f"{' and '.join(worker.name for worker in workers)}: timing first tokens")
        for turn, worker in enumerate(in_turn(workers, prompts)):
            outcomes[worker.name].first_ms.append(worker.ask(First(turn // len(workers)), float))
        for worker in in_turn(workers, PROFILES):
            outcomes[worker.name].traces.append(worker.ask(Profile(1, 1), str))
        for worker in workers:
            worker.finish()
    return outcomes


def _prefilled(outcome: Outcome) -> Prefilled:
    traces = [trace.kernels(file) for file in outcome.traces]
    times = trace.prefill_time(traces), trace.prefill_router_time(traces)
    return Prefilled(outcome.start_s, spread(outcome.first_ms), *times)


def judge(stock: Outcome, ours: Outcome, backend: str) -> tuple[Yardstick, list[Judged]]:
    """Ours against stock, by what stock differs from itself by."""
    assert stock.alone is not None and stock.queued is not None and ours.alone is not None and ours.queued is not None
    measure = yardstick([compare(stock.alone, stock.queued)])
    return measure, [
        hold_against(f"{backend} against stock, a prompt at a time", stock.alone, ours.alone, measure),
        hold_against(f"{backend} against stock, queued behind a short one", stock.queued, ours.queued, measure),
    ]


def record_of(report: PrefillReport) -> OtherRecord:
    """The times of a report as a line of ``records/``. What was measured stands in its texts and whole numbers alone."""
    found = {
        "backend": report.backend,
        "weights": "demo",
        "prompt_tokens": TOKENS,
        "how": {"together": report.together, "prompts": report.prompts, "one_chunk": report.whole},
        "served": msgspec.to_builtins(report.served, str_keys=True),
    }
    return served_record(RECORD_KIND, report.gpu, report.problem, report.size, report.same, found)
