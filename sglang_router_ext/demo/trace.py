"""Which kernels routed, from a torch profiler trace of a served model: names and microseconds of a layer. Imports no torch.

The selection is found by name. The gate GEMM is often a library kernel whose name says nothing, so it is found by place: what
the selection's stream runs between the norm in front of the MoE block and the selection.
"""

from __future__ import annotations

import gzip
import json
import pathlib
import re
import statistics
from collections import Counter
from typing import NamedTuple

import msgspec

SELECTION = re.compile(
    r"warp_select_kernel|triton_select_kernel|_router_triton_kernel|moe_fused_gate|route_radix|radix_gate|topkGating|moeTopK"
    r"|grouped_topk|fused_topk"
)
NORM = re.compile(r"norm", re.IGNORECASE)
LONGEST_GATE = 4
"""Kernels of the slowest gate GEMM that is looked for: casts, the product, and the sum of its parts."""


class Kernel(NamedTuple):
    start_us: float
    end_us: float
    name: str
    stream: int


class RouterTime(msgspec.Struct, frozen=True):
    """The router of one MoE layer in a decode step."""

    kernels: list[str]
    median_us: float
    """From the start of the first kernel to the end of the last."""
    layers: int
    """Layers that were seen, over all steps."""


def kernels(file: str | pathlib.Path) -> list[Kernel]:
    """Every kernel of a ``.json`` or ``.json.gz`` trace, by start."""
    raw = pathlib.Path(file).read_bytes()
    events = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"]
    found = [
        Kernel(event["ts"], event["ts"] + event["dur"], event["name"], event["args"]["stream"])
        for event in events
        if event.get("cat") == "kernel"
    ]
    return sorted(found)


def routers(listed: list[Kernel]) -> list[list[Kernel]]:
    """The kernels of each router call, in order; the last one is the selection."""
    streams: dict[int, list[Kernel]] = {}
    found = []
    for kernel in listed:
        before = streams.setdefault(kernel.stream, [])
        if SELECTION.search(kernel.name):
            gate: list[Kernel] = []
            for earlier in reversed(before[-LONGEST_GATE:]):
                if NORM.search(earlier.name):
                    break
                gate.insert(0, earlier)
            found.append([*gate, kernel])
        before.append(kernel)
    return found


def router_time(listed: list[Kernel]) -> RouterTime | None:
    """The most frequent router, which is that of the decode steps; None where no selection is known by name."""
    calls = routers(listed)
    if not calls:
        return None
    names = Counter(tuple(short(kernel.name) for kernel in call) for call in calls)
    (most, count), *_ = names.most_common()
    spans = [
        max(kernel.end_us for kernel in call) - call[0].start_us
        for call in calls
        if tuple(short(kernel.name) for kernel in call) == most
    ]
    return RouterTime(list(most), round(statistics.median(spans), 2), count)


def short(name: str) -> str:
    """A kernel's name without template arguments, parameters, namespaces and return type."""
    depth, kept = 0, []
    for character in name.replace("(anonymous namespace)::", ""):
        if character == "(" and depth == 0:
            break
        depth += (character == "<") - (character == ">")
        if depth == 0 and character != ">":
            kept.append(character)
    return "".join(kept).split("::")[-1].split(" ")[-1]
