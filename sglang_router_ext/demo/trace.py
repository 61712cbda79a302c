"""Decode steps and prefills in torch profiler traces of a served model, and which kernels routed in them: microseconds.

A decode step is one replay of a CUDA graph, so its kernels are known by the launch that they share: a kernel outside a graph
has a launch of its own. The first prefill is outside, and so is what picks the next token after each step. Imports no torch.

A selection is found by name, and so is a kernel that is the whole router. The gate GEMM is often a library kernel whose name
says nothing, so it is found by place: what the selection's stream runs between the norm in front of the MoE block and the
selection.
"""

from __future__ import annotations

import gzip
import json
import math
import pathlib
import re
import statistics
from collections import Counter
from typing import NamedTuple

import msgspec

from sglang_router_ext.bench.names import short
from sglang_router_ext.demo.pace import Spread, spread

SELECTION = re.compile(
    r"warp_select_kernel|select_ranges_kernel|triton_select_kernel|_router_triton_kernel|moe_fused_gate|route_radix|radix_gate|topkGating|moeTopK"
    r"|grouped_topk|fused_topk"
)
ROUTER = re.compile(r"(?:^|[\s:])(?:single|hash_rows)_kernel\b")
SORTING = re.compile(r"moe_align|count_and_sort|sort_expert|many_blocks")
"""Kernels that sort slots by expert, SGLang's and ours."""
NORM = re.compile(r"norm", re.IGNORECASE)
LONGEST_GATE = 4
"""Kernels of the slowest gate GEMM that is looked for: casts, the product, and the sum of its parts."""
ACTIVATION = re.compile(r"act_and_mul|silu", re.IGNORECASE)
QUANTISING = re.compile(r"quant", re.IGNORECASE)
LONGEST_PREFILL_GATE = 12
"""The same with a shared expert in front of it on the same stream, as SGLang has it outside of CUDA graphs."""


class Kernel(NamedTuple):
    start_us: float
    end_us: float
    name: str
    stream: int
    launch: int = 0
    """The call that launched it, which a graph's kernels share; 0: the trace does not say."""


class StepTime(msgspec.Struct, frozen=True):
    """A decode step, or a prefill, on the GPU, over all that were seen. Times in microseconds."""

    span_us: Spread
    """From the start of the first kernel to the end of the last."""
    busy_us: float
    """Of it, the time in which at least one kernel ran; median."""
    sum_us: float
    """All kernels' times together, kernels that overlap counted each; median."""
    kernels: int
    profiles_us: list[float]
    """Median span in each profile: where these differ, something else than the router did."""
    kernel_us: dict[str, float]
    """Name -> times of all kernels of that name together; median."""


class RouterTime(msgspec.Struct, frozen=True):
    """The router of one MoE layer in a decode step or a prefill."""

    kernels: list[str]
    median_us: float
    """From the start of the first kernel to the end of the last."""
    layers: int
    """Layers that were seen, over all steps or prefills."""
    sorting: dict[str, float] = {}
    """Name -> how many kernels a layer has beside these that sort its slots by expert."""


def kernels(file: str | pathlib.Path) -> list[Kernel]:
    """Every kernel of a ``.json`` or ``.json.gz`` trace, by start."""
    raw = pathlib.Path(file).read_bytes()
    events = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"]
    return sorted(_kernel(event) for event in events if event.get("cat") == "kernel")


def _kernel(event: dict) -> Kernel:
    start, args = event["ts"], event["args"]
    return Kernel(start, start + event["dur"], event["name"], args["stream"], args.get("correlation", 0))


def replays(listed: list[Kernel]) -> list[list[Kernel]]:
    """The kernels of each replay of the graph that was replayed most often; of two, the one with more kernels."""
    launches: dict[int, list[Kernel]] = {}
    for kernel in listed:
        if kernel.launch:
            launches.setdefault(kernel.launch, []).append(kernel)
    counts = Counter(len(launch) for launch in launches.values() if len(launch) > 1)
    size = max(counts, key=lambda size: (counts[size], size), default=0)
    return [launch for launch in launches.values() if len(launch) == size]


def step_time(traces: list[list[Kernel]], steps: int) -> StepTime | None:
    """The decode steps of traces in which there are ``steps`` each; None where not even half of them are found."""
    profiles = [replays(listed) for listed in traces]
    found = [replay for profile in profiles for replay in profile]
    if not found or len(found) < steps * len(traces) / 2:
        return None
    return _times(profiles)


def prefill(listed: list[Kernel]) -> list[Kernel]:
    """The kernels before the first replay of a graph: SGLang starts a decode step before it knows that nobody wants it."""
    first = min((step[0].start_us for step in replays(listed)), default=math.inf)
    return [kernel for kernel in listed if kernel.start_us < first]


def prefill_time(traces: list[list[Kernel]]) -> StepTime | None:
    """The prefills of traces that have one each, launched kernel by kernel; None where one has none."""
    found = [prefill(listed) for listed in traces]
    return _times([[one] for one in found]) if found and all(found) else None


def prefill_router_time(traces: list[list[Kernel]]) -> RouterTime | None:
    """The most frequent router of the prefills of ``traces``; None where no selection is known by name."""
    return _router_time([prefill(listed) for listed in traces], longest=LONGEST_PREFILL_GATE)


def _times(profiles: list[list[list[Kernel]]]) -> StepTime:
    """Of [profile][step] kernels."""
    found = [step for profile in profiles for step in profile]
    return StepTime(
        spread([_span(step) for step in found]),
        round(statistics.median(_covered(step) for step in found), 2),
        round(statistics.median(sum(kernel.end_us - kernel.start_us for kernel in step) for step in found), 2),
        len(found[0]),
        [round(statistics.median(map(_span, profile)), 2) for profile in profiles if profile],
        _by_name(found),
    )


def _span(step: list[Kernel]) -> float:
    return max(kernel.end_us for kernel in step) - step[0].start_us


def _by_name(steps: list[list[Kernel]]) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    for number, step in enumerate(steps):
        for kernel in step:
            mine = times.setdefault(short(kernel.name), [0.0] * len(steps))
            mine[number] += kernel.end_us - kernel.start_us
    return {name: round(statistics.median(mine), 2) for name, mine in sorted(times.items())}


def _covered(listed: list[Kernel]) -> float:
    """Microseconds in which at least one of the kernels runs; they are in order of their starts."""
    covered, reached = 0.0, listed[0].start_us
    for kernel in listed:
        covered += max(0.0, kernel.end_us - max(kernel.start_us, reached))
        reached = max(reached, kernel.end_us)
    return covered


def routers(listed: list[Kernel], longest: int = LONGEST_GATE) -> list[list[Kernel]]:
    """The kernels of each router call, in order; the last one is the selection, or the only one the whole router.

    ``longest``: kernels before a selection that may be its gate's.
    """
    streams: dict[int, list[Kernel]] = {}
    found = []
    for kernel in listed:
        before = streams.setdefault(kernel.stream, [])
        if ROUTER.search(kernel.name):
            found.append([kernel])
        if SELECTION.search(kernel.name):
            gate: list[Kernel] = []
            for earlier in reversed(before[-longest:]):
                if NORM.search(earlier.name):
                    break
                if longest > LONGEST_GATE and ACTIVATION.search(earlier.name):
                    del gate[: _down(gate)]
                    break
                gate.insert(0, earlier)
            found.append([*gate, kernel])
        before.append(kernel)
    return found


def _down(listed: list[Kernel]) -> int:
    """How many of the kernels behind a shared expert's activation are still that expert's: its last product."""
    product = next((number for number, kernel in enumerate(listed) if not QUANTISING.search(kernel.name)), len(listed))
    return product + 1


def router_time(traces: list[list[Kernel]]) -> RouterTime | None:
    """The most frequent router of the decode steps; None where no selection is known by name.

    Without replays of a graph, that of all steps: the first prefill is one of many.
    """
    return _router_time([step for listed in traces for step in replays(listed) or [listed]])


def _router_time(steps: list[list[Kernel]], longest: int = LONGEST_GATE) -> RouterTime | None:
    calls = [call for step in steps for call in routers(step, longest)]
    if not calls:
        return None
    names = Counter(tuple(short(kernel.name) for kernel in call) for call in calls)
    (most, count), *_ = names.most_common()
    spans = [
        max(kernel.end_us for kernel in call) - call[0].start_us
        for call in calls
        if tuple(short(kernel.name) for kernel in call) == most
    ]
    sorting = Counter(short(kernel.name) for step in steps for kernel in step if SORTING.search(kernel.name))
    a_layer = {name: round(number / len(calls), 2) for name, number in sorted(sorting.items())}
    return RouterTime(list(most), round(statistics.median(spans), 2), count, a_layer)
