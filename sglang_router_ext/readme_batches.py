"""Parts of the README about batches: rows that flip between their sizes, served determinism, prefills. ``readme.py`` asks for
them; a line is a record of ``flips``, ``demo --deterministic`` or ``demo --prefill``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from sglang_router_ext.demo.pace import Spread

Table = Callable[[Sequence[str], Iterable[Sequence[str]]], str]
Line = dict[str, Any]


def _where(line: Line) -> str:
    size = f"{line['experts']} experts of {line['moe_intermediate']}"
    return f"{line['moe_layers']} MoE layers on {line['gpu']} ({line['problem']}, {size})"


def flips(line: Line, table: Table, run: str) -> str:
    """Rows whose logits, order of experts or experts depend on the size of their batch."""
    header = ("router", "batches of", "rows", "other bits", "other order", "other experts", "largest margin of those")
    rows = []
    for one in line["flips"]:
        margin = "-" if one["margin"] is None else f"{one['margin']:.1e}"
        counts = (f"{one[name]:,}" for name in ("rows", "bits", "order", "experts"))
        rows.append((f"`{one['path']}`", f"{one['batch']} against {one['first']}", *counts, margin))
    title = f"The same {line['rows']:,} rows of {line['case']} in batches of other sizes on {line['gpu']}"
    return f"{title}; {run}.\n\n{table(header, rows)}"


def determinism(line: Line, table: Table, run: str) -> str:
    """Whether a prompt's experts depend on who else is served."""
    header = ("engine", "at a time", "sequences that part", "expert ids", "ids that differ")
    rows = [
        (name, str(one["size"]), str(one["tokens_apart"]), f"{one['ids']:,}", f"{one['ids_apart']:,}")
        for name, found in line["compared"].items()
        for one in found
    ]
    what = f"The same {line['sequences']} prompts one at a time and among others"
    return f"{what}, while their tokens are equal: {_where(line)}; {run}.\n\n{table(header, rows)}"


def prefill(line: Line, table: Table, run: str) -> str:
    """The time to the first token of long prompts."""

    def spread(found: Any, digits: int, unit: str) -> str:
        return "-" if found is None else f"{msgspec.convert(found, Spread).text(digits)} {unit}"

    rows = []
    for name, one in line["served"].items():
        gpu = None if one["gpu"] is None else one["gpu"]["span_us"]
        router = "-" if one["router"] is None else f"{one['router']['median_us']:.1f} us"
        rows.append((name, spread(one["clock_ms"], 2, "ms"), spread(gpu, 0, "us"), router))
    title = f"Prompts of {line['prompt_tokens']:,} tokens, one at a time: {_where(line)}"
    header = ("engine", "to the first token", "on the GPU", "router of one layer")
    return f"{title}; {run}.\n\n{table(header, rows)}"


PARTS = {"flips": flips, "determinism": determinism, "prefill": prefill}
"""Kind of a record -> how it is shown; the newest of each problem and size."""
SAME = ("gpu", "case", "problem", "moe_layers", "moe_intermediate", "experts", "backend")
"""Fields of which a newer line takes an older one's place if it has the same."""
