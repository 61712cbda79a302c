"""What a profile of a server says of its routers: which kernels they are, their time in a layer, and their share of a step.

Reads torch profiler traces (``.json``, ``.json.gz``: what SGLang's ``/start_profile`` writes) and Nsight Systems exports
(``nsys export --type sqlite``). Finding steps and routers in a list of kernels is ``demo/trace.py``'s. Imports no torch.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import sqlite3
import statistics
from collections.abc import Sequence

import msgspec

from sglang_router_ext.bench.names import short
from sglang_router_ext.choose import Choice
from sglang_router_ext.contract import expect
from sglang_router_ext.demo import trace
from sglang_router_ext.demo.trace import Kernel

TRACES = ("*.json", "*.json.gz", "*.sqlite")
"""What of a folder is read."""
KERNELS_OF = {
    "single": ("single_kernel",),
    "hash_rows": ("hash_rows_kernel",),
    "pair": ("small_rows_kernel", "warp_select_kernel"),
    "tensor_pair": ("tensor_core_kernel", "select_ranges_kernel"),
    "select_plan": ("select_ranges_kernel",),
    "warp_select": ("warp_select_kernel",),
    "triton_select": ("triton_select_kernel",),
    "small_rows": ("small_rows_kernel",),
    "tensor_core": ("tensor_core_kernel",),
    "split_gemm": ("split_weight_kernel", "add_parts_kernel"),
}
"""Design -> its kernels. Those of ``naive`` and ``cublas_gemm`` are libraries', as SGLang's own are."""
OURS = tuple(dict.fromkeys(kernel for kernels in KERNELS_OF.values() for kernel in kernels))
GATES = {
    "small_rows": "small_rows_kernel",
    "tensor_core": "tensor_core_kernel",
    "split_gemm": "split_weight_kernel|add_parts_kernel",
    "SGLang's tiny GEMM": "tiny_gemm|tiny_n_gemm",
    "cuBLAS": "nvjet|splitKreduce|gemm|gemv|cublas|cutlass",
}
SELECTIONS = {
    "warp_select": "warp_select_kernel",
    "selection that counts": "select_ranges_kernel",
    "triton_select": "triton_select_kernel",
    "SGLang's Triton router": "_router_triton_kernel",
    "SGLang's fused gate": "moe_fused_gate",
    "SGLang's radix select": "radix",
    "FlashInfer's routing": "moeTopK",
    "SGLang's top-k": "topkGating|grouped_topk|fused_topk",
}
WHOLE = {"single": "single_kernel", "hash_rows": "hash_rows_kernel"}
"""Words for a router, or a stage of one -> what its kernels' names have."""


class Path(msgspec.Struct, frozen=True):
    """Routers of the same kernels."""

    what: str
    kernels: list[str]
    calls: int
    """In all steps."""
    a_step: float
    """Calls in a step; layers, where all take this path."""
    median_us: float
    """From the start of the first kernel to the end of the last."""


class Steps(msgspec.Struct, frozen=True):
    """Decode steps, or what was launched kernel by kernel."""

    what: str
    steps: int
    step_us: float
    """Median, from the first kernel to the last."""
    router_us: float
    """Of it all routers, median over steps."""
    sorting_us: float
    """And all kernels that sort slots by expert."""
    paths: list[Path]
    sorting: dict[str, float]
    """Such kernels -> calls in a step."""

    @property
    def share(self) -> float:
        """Of a step, the routers and the sorting."""
        return (self.router_us + self.sorting_us) / self.step_us


def files_of(places: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Files as they are, folders as the traces in them. Raises ContractError for what is neither."""
    found: list[pathlib.Path] = []
    for place in places:
        inside = sorted({file for pattern in TRACES for file in place.glob(pattern)}) if place.is_dir() else [place]
        expect(bool(inside) and all(file.is_file() for file in inside), "file", str(place), f"a trace, or a folder: {TRACES}")
        found += inside
    return found


def read(file: pathlib.Path) -> list[Kernel]:
    """Every kernel of ``file``, by start. Raises ContractError for a file that is no trace, or one without kernels."""
    allowed = "a torch profiler trace (.json, .json.gz), or `nsys export --type sqlite`"
    try:
        found = _of_nsight(file) if file.suffix == ".sqlite" else trace.kernels(file)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, sqlite3.Error) as error:
        expect(False, "file", f"{file}: {type(error).__name__}: {error}", allowed)
        raise
    expect(bool(found), "file", f"{file}: no kernel", "a trace of GPU activity")
    return found


def _of_nsight(file: pathlib.Path) -> list[Kernel]:
    query = (
        "SELECT k.start / 1e3, k.end / 1e3, s.value, k.streamId, k.correlationId "
        "FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName ORDER BY k.start"
    )
    with contextlib.closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        return [Kernel(*row) for row in connection.execute(query)]


def look(listed: list[Kernel]) -> list[Steps]:
    """Decode steps, which are replays of a graph, if there are any; and what ran before the first, or else everything."""
    replays = trace.replays(listed)
    found = [_steps("decode steps (replays of a CUDA graph)", replays, trace.LONGEST_GATE)] if replays else []
    before = trace.prefill(listed)
    if before:
        found.append(_steps("kernel by kernel (prefills, or eager steps)", [before], trace.LONGEST_PREFILL_GATE))
    return [steps for steps in found if steps.paths]


def _steps(what: str, steps: list[list[Kernel]], longest: int) -> Steps:
    calls = [trace.routers(step, longest) for step in steps]
    paths: dict[tuple[str, ...], list[float]] = {}
    for call in (call for of_step in calls for call in of_step):
        paths.setdefault(tuple(short(kernel.name) for kernel in call), []).append(_span(call))
    sorting = [[kernel for kernel in step if trace.SORTING.search(kernel.name)] for step in steps]
    names = [short(kernel.name) for some in sorting for kernel in some]
    return Steps(
        what,
        len(steps),
        round(statistics.median(_span(step) for step in steps), 2),
        round(statistics.median(sum(_span(call) for call in of_step) for of_step in calls), 2),
        round(statistics.median(sum(kernel.end_us - kernel.start_us for kernel in some) for some in sorting), 2),
        [
            Path(words(kernels), list(kernels), len(us), round(len(us) / len(steps), 2), round(statistics.median(us), 2))
            for kernels, us in sorted(paths.items(), key=lambda one: -len(one[1]))
        ],
        {name: round(names.count(name) / len(steps), 2) for name in sorted(set(names))},
    )


def _span(kernels: list[Kernel]) -> float:
    return max(kernel.end_us for kernel in kernels) - kernels[0].start_us


def words(kernels: Sequence[str]) -> str:
    """What a router is, by the names of its ``kernels``, of which the last is the selection or all of it."""
    whole = _named(WHOLE, kernels[-1:])
    if whole:
        return whole
    gate = _named(GATES, kernels[:-1]) or ("no gate seen" if len(kernels) == 1 else "another gate")
    return f"{gate} + {_named(SELECTIONS, kernels[-1:]) or 'another selection'}"


def _named(known: dict[str, str], kernels: Sequence[str]) -> str:
    return next((text for text, pattern in known.items() if any(re.search(pattern, name) for name in kernels)), "")


def mismatches(steps: Steps, choice: Choice) -> list[str]:
    """Where the routers of ``steps`` are not those of ``choice``; empty: they are, as far as kernels' names say."""
    wanted = {kernel for design in {choice.gate, choice.selection} for kernel in KERNELS_OF.get(design, ())}
    found = []
    for path in steps.paths:
        mine = {kernel for kernel in OURS if any(kernel in name for name in path.kernels)}
        missing, more = wanted - mine, mine - wanted
        if missing or more:
            parts = [f"without {', '.join(sorted(missing))}"] * bool(missing) + [f"with {', '.join(sorted(more))}"] * bool(more)
            found.append(f"{path.what}, {path.calls} calls: {' and '.join(parts)}")
    return found
