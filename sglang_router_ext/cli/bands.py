"""Which design runs each stage over the row axis, one backend beside the other, and the rows that a server's traffic has."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.table import Table

from sglang_router_ext.backends import BACKENDS
from sglang_router_ext.bench.record import HOST, PLANNED, ROUTER, BenchRecord, Record
from sglang_router_ext.choose import Tuned, in_force
from sglang_router_ext.cli.evidence import Explanation, explain_rows, stage_evidence
from sglang_router_ext.contract import STAGES, Gpu, Problem
from sglang_router_ext.designs import PLAN_STAGE, TABLE, Rows

STOCK = "stock"
"""The lanes of SGLang's own backends; a gate of ours may be named under them."""


class Band(msgspec.Struct, frozen=True):
    """One design over a range of row counts."""

    rows: Rows
    design: str
    known: str
    """What that rests on, as :func:`~sglang_router_ext.cli.evidence.evidence` says it; of SGLang's own beside ours ``-``."""
    kernels: int | None = None
    """Of SGLang's own, where a record counts them."""

    def __str__(self) -> str:
        if self.kernels is not None:
            return f"{self.rows}: {self.design}, {self.kernels} kernel{'s' * (self.kernels != 1)}"
        return f"{self.rows}: {self.design}" + (f", {self.known}" if self.known != "-" else "")


class Lane(msgspec.Struct, frozen=True):
    """One stage under one backend, over all row counts."""

    backend: str
    stage: str
    bands: list[Band]


class Traffic(msgspec.Struct, frozen=True):
    """What so many requests ask of the router in one step, and what runs then."""

    requests: int
    rows: int
    found: Explanation


def lanes(
    problem: Problem, gpu: Gpu, gate: str, unavailable: dict[str, str], counts: dict[str, dict[int, int]], **how: Any
) -> list[Lane]:
    """Every stage under a stock backend, and under each of ours. ``counts``: of :func:`host_kernels`, shown under the stock
    one; ``how``: as :func:`~sglang_router_ext.cli.evidence.explain_rows` takes it.
    """
    asked = in_force(problem, gate)[0]
    found = []
    for backend in (None, *BACKENDS):
        entries = explain_rows(problem, gpu, backend, gate, None, unavailable, **how)
        for stage in (*STAGES, *([PLAN_STAGE] if how.get("plan", True) else [])):
            bands = _joined(_band(entry, stage, asked, gpu, **how) for entry in entries)
            if backend is None:
                bands = [part for band in bands for part in _counted(band, counts.get(stage, {}))]
            found.append(Lane(backend or STOCK, stage, bands))
    return found


def _band(
    entry: Explanation,
    stage: str,
    problem: Problem,
    gpu: Gpu,
    *,
    plan: bool = True,
    bands: Tuned | None = None,
    deterministic: bool = False,
) -> Band:
    choice = entry.choice
    known = stage_evidence(problem, entry.rows.first, gpu, choice, bands, plan=plan, deterministic=deterministic)
    if stage == PLAN_STAGE:
        name = choice.selection if TABLE[choice.selection].plans else "host"
        known[stage] = known["selection"] if name != "host" else "-"
    else:
        name = choice.gate if stage == "gate" else choice.selection
    alone = choice.gate == choice.selection == "host"
    return Band(entry.rows, name, known.get(stage, entry.measured if alone else "-"))


def _joined(bands: Iterable[Band]) -> list[Band]:
    """Neighbours that say the same become one."""
    found = []
    for _, same in itertools.groupby(bands, key=lambda band: (band.design, band.known)):
        parts = list(same)
        found.append(msgspec.structs.replace(parts[0], rows=Rows(parts[0].rows.first, parts[-1].rows.last)))
    return found


def _counted(band: Band, counts: dict[int, int]) -> list[Band]:
    """``band`` cut where SGLang's own changes its number of kernels. A row count between two that were measured goes with the
    larger one; of those past the largest no record speaks.
    """
    if band.design != "host" or not counts:
        return [band]
    ends = sorted(end for end in counts if end >= band.rows.first)
    starts = [band.rows.first, *(end + 1 for end in ends)]
    pieces = [(start, counts[end]) for start, end in zip(starts, ends, strict=False)] + [(starts[-1], None)]
    pieces = [piece for piece in pieces if piece[0] in band.rows]
    found = []
    for kernels, same in itertools.groupby(pieces, key=lambda piece: piece[1]):
        found.append(Band(Rows(next(same)[0], band.rows.last), "host", band.known, kernels))
    for place, following in enumerate(found[1:]):
        found[place] = msgspec.structs.replace(found[place], rows=Rows(found[place].rows.first, following.rows.first - 1))
    return found


def host_kernels(records: Iterable[Record], case: str, gpu: Gpu) -> dict[str, dict[int, int]]:
    """Stage -> row count -> kernels of SGLang's own, where a record of ``case`` on ``gpu`` counts them."""

    def of(stages: str) -> dict[int, int]:
        named = (record for record in found if (record.design, record.stages) == (HOST[stages], stages))
        return {record.rows: record.kernels for record in named}

    benched = (record for record in records if isinstance(record, BenchRecord))
    found = [one for one in benched if (one.case, one.gpu, one.cache) == (case, gpu.name, "cold")]
    both, pair = of(PLANNED), of(ROUTER)
    plan = {rows: both[rows] - pair[rows] for rows in both.keys() & pair.keys()}
    return {**{stage: of(stage) for stage in STAGES}, PLAN_STAGE: plan}


def by_backend(found: Sequence[Lane]) -> Table:
    """One row a backend, one column a stage."""
    table = Table(title="backends", title_justify="left", show_lines=True)
    stages = list(dict.fromkeys(lane.stage for lane in found))
    for name in ("backend", *stages):
        table.add_column(name, overflow="fold")
    for backend in dict.fromkeys(lane.backend for lane in found):
        cells = ["\n".join(map(str, lane.bands)) for lane in found if lane.backend == backend]
        table.add_row(backend, *cells)
    return table


def by_requests(found: Sequence[Traffic], tokens: int, *, plan: bool) -> Table:
    """One row a number of requests that are served at once."""
    what = f"{tokens} tokens of each to verify" if tokens > 1 else "a token of each"
    table = Table(title=f"traffic: a step has {what}", title_justify="left")
    for name in ("requests", "rows", "gate", "selection", *(["plan"] if plan else []), "measured"):
        table.add_column(name)
    for one in found:
        choice = one.found.choice
        planner = [choice.selection if TABLE[choice.selection].plans else "host"] if plan else []
        table.add_row(str(one.requests), str(one.rows), choice.gate, choice.selection, *planner, one.found.measured)
    return table
