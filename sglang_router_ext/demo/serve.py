"""The demo with a CUDA GPU: SGLang's Engine as it is and with the plugin, on the same checkpoint and prompts, side by side.

Both engines are processes of their own. Where memory allows they run together and are measured in turn, so that what drifts
on the machine hits both; where it does not, one runs after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from sglang_router_ext.bench.record import OtherRecord, new_run, other_record
from sglang_router_ext.contract import expect
from sglang_router_ext.demo import checkpoint, pace, quantise, trace, weights
from sglang_router_ext.demo.checkpoint import Size
from sglang_router_ext.demo.compare import Comparison, Run, Yardstick, compare, more_than, verdict, yardstick
from sglang_router_ext.demo.engine import PROFILED_STEPS, Change, Plan, Profile, Time, Tokens
from sglang_router_ext.demo.pace import Spread, in_turn, spread
from sglang_router_ext.demo.trace import RouterTime, StepTime
from sglang_router_ext.demo.worker import Worker, started

STOCK = "stock"
RECORD_KIND = "served"
BATCHES = [1, 6, 16, 96]
CHANGED_BATCH = BATCHES[2]
"""At which the engines run with changed routers."""
SEQUENCES, TOKENS = 96, 32
ROUNDS, PROFILES = 8, 2
"""Of the clock and of the profiler, for each engine and batch size."""
CACHE_TOKENS = 65536
MARK = ".sglang-router-ext-demo"
"""In a folder that the demo may write into: it made it, or found it empty."""
RESERVE = 8 * 2**30
"""Bytes of GPU memory that an engine may take beside weights and key-value cache: context, CUDA graphs, activations."""


Spans = dict[int, tuple[Spread, Spread] | None]
"""Batch size -> span of a decode step on the GPU, stock's and ours; None where one of them is not found."""


class Served(msgspec.Struct, frozen=True):
    """What one engine showed. All of it by batch size."""

    start_s: float
    clock_ms: dict[int, Spread]
    """Milliseconds of a decode step, over the rounds."""
    gpu: dict[int, StepTime | None]
    """A decode step in the profiles; None where none is found."""
    router: dict[int, RouterTime | None]
    """The router of one layer in the profiles."""


class Judged(msgspec.Struct, frozen=True):
    """A comparison of two runs and what speaks against their equality."""

    what: str
    found: Comparison
    against: list[str]


class ServeReport(msgspec.Struct, frozen=True):
    gpu: str
    problem: str
    size: Size
    backend: str
    """Of ours; the name of its engine too."""
    together: bool
    """Whether both engines ran at the same time, so that their rounds alternate; if not, one ran after the other."""
    served: dict[str, Served]
    slower: dict[int, list[str]]
    """Batch size -> by which measures a decode step takes longer with the plugin: ``clock``, beyond the spread of the rounds,
    and ``gpu``, by more than a percent."""
    stock: Yardstick
    """How far stock runs of different batch sizes are from each other."""
    same: list[Judged]
    """Plugin against stock: must be the same computation."""
    changed: list[Judged]
    """Stock with routers of less precision (``checkpoint.mistake``) against stock: must be noticed. Then the plugin with these
    against stock with these: must be the same again, as the plugin has to follow an update of the weights."""
    seconds: float

    @property
    def spans(self) -> Spans:
        return spans(self.served, self.backend)

    @property
    def replaced(self) -> bool:
        """The profile shows other router kernels with the plugin than without it, at every batch size."""
        stock, ours = self.served[STOCK].router, self.served[self.backend].router
        return all(time is not None and _kernels(time) != _kernels(stock[size]) for size, time in ours.items())

    @property
    def too_slow(self) -> list[int]:
        """Batch sizes at which a decode step takes so much longer on the GPU that the demo fails."""
        return [size for size, pair in self.spans.items() if pair is not None and pace.too_slow(*pair)]

    @property
    def timed(self) -> bool:
        """The profiles show decode steps of both engines, at every batch size."""
        return all(self.spans.values())

    @property
    def right(self) -> bool:
        """All that must hold but the pace, so that the times are worth keeping, lost ones too."""
        noticed, followed = self.changed
        same = not followed.against and not any(judged.against for judged in self.same)
        return self.replaced and self.timed and same and bool(noticed.against)

    @property
    def agrees(self) -> bool:
        return self.right and not self.too_slow


def _kernels(time: RouterTime | None) -> list[str]:
    return [] if time is None else time.kernels


def spans(served: dict[str, Served], backend: str) -> Spans:
    stock, ours = served[STOCK].gpu, served[backend].gpu
    pairs = ((size, stock[size], ours[size]) for size in stock)
    return {size: (one.span_us, other.span_us) if one and other else None for size, one, other in pairs}


def _slower(served: dict[str, Served], backend: str) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for size, pair in spans(served, backend).items():
        words = {"clock": pace.by_clock(served[STOCK].clock_ms[size], served[backend].clock_ms[size])}
        if pair is not None:
            words["gpu"] = pace.by_gpu(*pair)
        found[size] = [measure for measure, word in words.items() if word == pace.SLOWER]
    return found


class Outcome(msgspec.Struct, kw_only=True):
    """What one engine answered; its fields fill while it works."""

    start_s: float
    runs: dict[int, Run] = {}
    """Batch size -> what was generated."""
    step_ms: dict[int, list[float]] = {}
    """Batch size -> milliseconds of a decode step, of every round in order."""
    traces: dict[int, list[str]] = {}
    """Batch size -> profiler traces."""
    changed: Run | None = None
    """As ``runs`` at CHANGED_BATCH, with the changed routers."""


def run(
    size: Size, backend: str, say: Callable[[str], None], *, keep: pathlib.Path | None = None, in_memory: bool = False
) -> ServeReport:
    """Serve the checkpoint of ``size`` stock and with ``backend``. ``in_memory``: each draws its weights on the GPU.

    ``keep``: folder for the checkpoint, the logs and the traces. Raises :class:`~sglang_router_ext.demo.worker.EngineFailed`.
    """
    import torch

    began = time.monotonic()
    model = checkpoint.config(size)
    free = free_memory(size, model)
    with folder(keep) as work:
        path = model_path(size, model, work, say, keep=keep is not None, in_memory=in_memory)
        together = fits(2, model, free)
        workers = [
            Worker(name, engine_plan(name, path, model, work / name, free, in_memory=in_memory), say, plugin=name == backend)
            for name in (STOCK, backend)
        ]
        outcomes: dict[str, Outcome] = {}
        for group in [workers] if together else [[worker] for worker in workers]:
            outcomes |= _work(group, say, in_memory=in_memory, marlin=checkpoint.stock_backend(model) == "marlin")
        for name, outcome in outcomes.items():
            (work / name / "outcome.json").write_bytes(msgspec.json.encode(outcome))
        say("reading the profiles")
        served = {name: _served(outcome) for name, outcome in outcomes.items()}
    stock, same, changed = _judge(outcomes[STOCK], outcomes[backend], backend, checkpoint.mistake(model))
    return ServeReport(
        torch.cuda.get_device_name(),
        str(checkpoint.problem(model)),
        size,
        backend,
        together,
        served,
        _slower(served, backend),
        stock,
        same,
        changed,
        time.monotonic() - began,
    )


def free_memory(size: Size, model: dict) -> int:
    """Free bytes of the GPU; refuses if an engine needs more."""
    import torch

    free, _total = torch.cuda.mem_get_info()
    need = engine_bytes(model)
    expect(free >= need, "free GPU memory", f"{free / 1e9:.1f} GB", f"at least {need / 1e9:.1f} GB for {size.layers} layers")
    return free


def model_path(
    size: Size, model: dict, work: pathlib.Path, say: Callable[[str], None], *, keep: bool, in_memory: bool
) -> pathlib.Path:
    """What engines load: the configuration alone, or a checkpoint, which is written if need be."""
    if not in_memory:
        return checkpoint.write(size, work / "checkpoint" if keep else checkpoint.folder(size), say)
    path = work / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(model))
    return path


@contextlib.contextmanager
def folder(keep: pathlib.Path | None) -> Iterator[pathlib.Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="sglang-router-ext-") as temporary:
            yield pathlib.Path(temporary)
    else:
        yield _kept(keep)


def _kept(keep: pathlib.Path) -> pathlib.Path:
    """``keep``, made if need be. One that holds anything but an earlier demo is refused: its files might be overwritten."""
    try:
        work = keep.resolve()
        work.mkdir(parents=True, exist_ok=True)
        ours = (work / MARK).is_file() or not any(work.iterdir())
        expect(ours, "keep", f"{keep}, which holds something else", "a new or an empty folder, or one of an earlier demo")
        (work / MARK).touch()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        expect(False, "keep", f"{keep}: {error}", "a folder that can be made and written")
    return work


def engine_bytes(model: dict) -> int:
    """GPU memory that one engine needs."""
    return checkpoint.bytes_of(model) + cache_bytes(model) + RESERVE


def fits(engines: int, model: dict, free: int) -> bool:
    """Whether so many engines fit in ``free`` bytes of GPU memory at a time."""
    return engines * engine_bytes(model) <= free


def cache_bytes(model: dict) -> int:
    """Of the key-value cache, in bf16."""
    latent = "kv_lora_rank" in model
    token = (
        model["kv_lora_rank"] + model["qk_rope_head_dim"] if latent else 2 * model["num_key_value_heads"] * model["head_dim"]
    )
    return 2 * CACHE_TOKENS * model["num_hidden_layers"] * token


def memory_fraction(free: int) -> float:
    """``mem_fraction_static`` of an engine on a GPU with ``free`` bytes that another one may share at any time.

    SGLang allows the cache what is free after loading, less (1 - fraction) of what was free before. Between the two the other
    engine may have taken all that it needs. The cache needs CACHE_TOKENS and no more, so no more than RESERVE is kept back.
    """
    return round(max(0.5, 1 - RESERVE / free), 4)


def engine_plan(name: str, path: pathlib.Path, model: dict, work: pathlib.Path, free: int, *, in_memory: bool) -> Plan:
    """What both engines do; they differ in the backend alone. Stock names the expert kernels that the plugin keeps."""
    return Plan(
        arguments={
            "model_path": str(path),
            "load_format": "dummy" if in_memory else "auto",
            "custom_weight_loader": [weights.DRAW, weights.NARROW],
            "moe_runner_backend": checkpoint.stock_backend(model) if name == STOCK else name,
            "disable_shared_experts_fusion": quantise.kind_of(model) == "nvfp4",  # they stay in bf16
            "skip_tokenizer_init": True,
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "enable_fp32_lm_head": True,
            "disable_radix_cache": True,
            "disable_prefill_cuda_graph": True,
            "cuda_graph_bs_decode": BATCHES,
            "max_running_requests": max(BATCHES),
            "max_total_tokens": CACHE_TOKENS,
            "mem_fraction_static": memory_fraction(free),
            "sleep_on_idle": True,  # an engine that polls takes a CPU core from the one that is timed
            "random_seed": 1,
            "log_level": "info",
        },
        batches=BATCHES,
        tokens=TOKENS,
        vocabulary=model["vocab_size"],
        work=str(work),
    )


def _work(workers: list[Worker], say: Callable[[str], None], *, in_memory: bool, marlin: bool = False) -> dict[str, Outcome]:
    """All that is asked of ``workers``, which run together. ``marlin``: their experts' layout cannot be made twice."""
    with started(workers) as seconds:
        outcomes = {worker.name: Outcome(start_s=seconds[worker.name]) for worker in workers}
        for worker in workers:
            if in_memory:
                say(f"{worker.name}: drawing weights")
                worker.ask(Change(weights.DRAW), type(None))
            for size in BATCHES:
                count = min(SEQUENCES, 16 * size)
                say(f"{worker.name}: {count} sequences in batches of {size}")
                outcomes[worker.name].runs[size] = worker.ask(Tokens(size, count), Run)
        names = " and ".join(worker.name for worker in workers)
        for size in BATCHES:
            say(f"{names}: timing decode steps of {size}")
            for worker in in_turn(workers, ROUNDS):
                outcomes[worker.name].step_ms.setdefault(size, []).append(worker.ask(Time(size), float))
        for size in BATCHES:
            say(f"{names}: profiling decode steps of {size}")
            for worker in in_turn(workers, PROFILES):
                outcomes[worker.name].traces.setdefault(size, []).append(worker.ask(Profile(size), str))
        for worker in workers:
            say(f"{worker.name}: the same with changed routers")
            worker.ask(Change(weights.NARROW, layouts=not marlin), type(None))
            outcomes[worker.name].changed = worker.ask(Tokens(CHANGED_BATCH, SEQUENCES), Run)
        for worker in workers:
            worker.finish()
    return outcomes


def _served(outcome: Outcome) -> Served:
    traces = {size: [trace.kernels(file) for file in files] for size, files in outcome.traces.items()}
    return Served(
        outcome.start_s,
        {size: spread(rounds) for size, rounds in outcome.step_ms.items()},
        {size: trace.step_time(listed, PROFILED_STEPS) for size, listed in traces.items()},
        {size: trace.router_time(listed) for size, listed in traces.items()},
    )


def record_of(report: ServeReport) -> OtherRecord:
    """The times of a report as a line of ``records/``. What was measured stands in its texts and whole numbers alone."""
    found = {
        "backend": report.backend,
        "weights": "demo",
        "how": {"together": report.together},
        "served": msgspec.to_builtins(report.served, str_keys=True),
        "slower": report.slower,
    }
    return served_record(RECORD_KIND, report.gpu, report.problem, report.size, [*report.same, *report.changed], found)


def served_record(
    kind: str, gpu: str, problem: str, size: Size, tokens: Sequence[Judged], found: dict[str, Any]
) -> OtherRecord:
    """A line about engines that served a model of ``size``: which model, how their tokens compare, and what was ``found``."""
    model = {
        "problem": problem,
        "moe_layers": len(size.moe_layers),
        "moe_intermediate": size.moe_intermediate,
        "experts": size.experts,
    }
    compared = [
        {"what": one.what, "equal": one.found.equal, "sequences": one.found.sequences, "against": one.against} for one in tokens
    ]
    return other_record(new_run(gpu), kind, model | found | {"tokens": compared})


def hold_against(what: str, one: Run, other: Run, measure: Yardstick) -> Judged:
    """Whether ``other`` is the same computation as ``one``, by what stock runs differ among themselves."""
    found = compare(one, other)
    lost = len(other.tokens) != len(one.tokens)
    against = [f"{len(other.tokens)} sequences came back instead of {len(one.tokens)}"] if lost else []
    return Judged(what, found, against + verdict(found, measure))


def among_stock(runs: dict[int, Run]) -> Yardstick:
    """How far stock runs of different batch sizes are from each other."""
    return yardstick([compare(runs[one], runs[other]) for one, other in itertools.combinations(sorted(runs), 2)])


def hold_all_against(backend: str, stock: dict[int, Run], ours: dict[int, Run], measure: Yardstick) -> list[Judged]:
    return [
        hold_against(f"{backend} against stock, {size} at a time", stock[size], ours[size], measure) for size in sorted(stock)
    ]


def _judge(stock: Outcome, ours: Outcome, backend: str, mistake: str) -> tuple[Yardstick, list[Judged], list[Judged]]:
    measure = among_stock(stock.runs)
    same = hold_all_against(backend, stock.runs, ours.runs, measure)
    assert stock.changed is not None
    assert ours.changed is not None
    noticed = hold_against(f"stock with {mistake} against stock", stock.runs[CHANGED_BATCH], stock.changed, measure)
    followed = hold_against(f"{backend} against stock, both with {mistake}", stock.changed, ours.changed, measure)
    # With FP8 experts stock runs of other batch sizes are as far apart. A wrong router moves as many sequences as this change.
    more = more_than(noticed.found, followed.found)
    return measure, same, [msgspec.structs.replace(noticed, against=[*noticed.against, *more]), followed]
