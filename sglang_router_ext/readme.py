"""The generated parts of README.md and docs/measured.md: ``python -m sglang_router_ext.readme FILE..`` rewrites them, a test
compares them.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``. Imports no torch.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from sglang_router_ext import readme_batches
from sglang_router_ext.backends import BACKENDS
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.record import (
    FLOOR,
    HOST,
    PLANNED,
    ROUTER,
    BenchRecord,
    CheckRecord,
    OtherRecord,
    Record,
    RecordError,
    current_hash,
    is_raced,
    microseconds,
    read_all,
)
from sglang_router_ext.demo.pace import Spread, change, spread
from sglang_router_ext.designs import DESIGNS, TABLE
from sglang_router_ext.settings import SETTINGS, Setting

SERVED, LAUNCHES = "served", "launches"
"""Kinds of records that ``demo --record`` and ``serve-bench --record`` write."""
SUMMARY_ROWS = (1, 6, 16, 96, 1024)
MARK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; ``|`` in a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def designs() -> str:
    return table(
        ("design", "stages", "status", "GPUs", "rows", "what it is"),
        (
            (
                f"`{design.name}`",
                " + ".join(design.stages),
                design.status,
                design.archs_text,
                str(design.rows),
                design.what,
            )
            for design in DESIGNS
        ),
    )


def backends() -> str:
    return table(
        ("`--moe-runner-backend`", "what it is", "designs"),
        (
            (
                f"`{backend.name}`",
                backend.what,
                ", ".join(f"`{name}`" for name in backend.designs) or "any with a measured band",
            )
            for backend in BACKENDS.values()
        ),
    )


def settings() -> str:
    return table(
        ("variable", "default", "values", "meaning"),
        ((f"`{setting.name}`", f"`{setting.default}`", _values(setting), setting.what) for setting in SETTINGS),
    )


def _values(setting: Setting) -> str:
    return " | ".join(f"`{value}`" if value in setting.allowed else value for value in setting.choices)


def _cold(records: Sequence[Record]) -> dict[tuple[str, str], list[BenchRecord]]:
    """(GPU, case) -> cold times of whole routers, alone and with the plan, and of floors; in the order of the catalogue."""
    shown = (ROUTER, PLANNED, "floor")
    times = [r for r in records if isinstance(r, BenchRecord) and r.cache == "cold" and r.stages in shown]
    order = [*CASES, *sorted({record.case for record in times} - CASES.keys())]
    keys = sorted({(record.gpu, record.case) for record in times}, key=lambda key: (key[0], order.index(key[1])))
    return {key: [record for record in times if (record.gpu, record.case) == key] for key in keys}


def cases(records: Sequence[Record] | None = None) -> str:
    """Cold times at every row count, a table for each GPU and case. ``records`` None: those of the package."""
    parts = [
        _results_of(times, stages)
        for times in _cold(read_all() if records is None else records).values()
        for stages in (ROUTER, PLANNED)
        if any(record.stages == stages for record in times)
    ]
    return "\n".join(parts) or "Nothing is recorded yet.\n"


def _summary(times: dict[tuple[str, str], list[BenchRecord]], gpu: str, stages: str) -> str:
    """A line for each case: SGLang's time and the fastest of ours."""
    lines = []
    for (_, case), mine in (item for item in times.items() if item[0][0] == gpu):
        cells = []
        for rows in SUMMARY_ROWS:
            here = [record for record in mine if record.rows == rows and record.stages == stages]
            ours = _fastest(record for record in here if is_ours(record))
            host = _fastest(record for record in here if record.design == HOST[stages])
            stale = " *" if ours and is_stale(ours) else ""
            gain = f" ({host.median_us / ours.median_us:.2f}x){stale}" if host and ours else ""
            cells.append(f"{host.median_us:.1f} > {ours.median_us:.1f}{gain}" if host and ours else "-")
        if any(cell != "-" for cell in cells):
            lines.append((f"{case}: {_shape(mine[0])}", *cells))
    what = "with the plan of the experts" if stages == PLANNED else "alone"
    title = f"Routers {what} on {gpu}: microseconds with a cold cache, SGLang's > the fastest of ours"
    older = "\n* measured with older sources of the design.\n" if any("*" in cell for line in lines for cell in line) else ""
    return f"{title}.\n\n{table(('rows', *map(str, SUMMARY_ROWS)), lines)}{older}"


def results(records: Sequence[Record] | None = None) -> str:
    """The cold times of all cases at a few row counts, served runs, and checks. ``records`` None: those of the package."""
    listed = read_all() if records is None else records
    times = _cold(listed)
    parts = [
        _summary(times, gpu, stages)
        for gpu in dict.fromkeys(gpu for gpu, _ in times)
        for stages in (ROUTER, PLANNED)
        if any(record.stages == stages for (here, _), mine in times.items() if here == gpu for record in mine)
    ]
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in _of_kind(SERVED, listed):
        model = line["gpu"], line["problem"], line["moe_layers"]
        served = line.get("experts", "bf16"), line.get("backend", "router_ext_pair")
        if "experts" in line:
            newest.pop((*model, None, *served), None)  # records of before say nothing of the experts' size
        newest[*model, line.get("moe_intermediate"), *served] = line
    parts += [_served(line) for line in newest.values()]
    same = ("gpu", "problem", "moe_layers", "moe_intermediate", "experts", "backends")
    parts += [_launches(line) for line in {tuple(line[n] for n in same): line for line in _of_kind(LAUNCHES, listed)}.values()]
    for kind, show in readme_batches.PARTS.items():
        lines = {tuple(line.get(name) for name in readme_batches.SAME): line for line in _of_kind(kind, listed)}
        parts += [show(line, table, _run(line)) for line in lines.values()]
    checks = [record for record in listed if isinstance(record, CheckRecord)]
    return "\n".join([*parts, _checks(checks)] if checks else parts) or "Nothing is recorded yet.\n"


def _results_of(times: Sequence[BenchRecord], stages: str) -> str:
    first, lines, notes, planned = times[0], [], [], stages == PLANNED
    times = [record for record in times if record.stages in (stages, "floor")]
    for rows in sorted({record.rows for record in times if record.stages == stages}):
        here = [record for record in times if record.rows == rows]
        ours = _fastest(record for record in here if is_ours(record))
        peer = _fastest(record for record in here if not is_ours(record) and record.stages == stages)
        host = _fastest(record for record in here if record.design == HOST[stages])
        floor = _fastest(record for record in here if record.design == FLOOR)
        gain = f"{host.median_us / ours.median_us:.2f}x" if host and ours else "-"
        kernels = [f", {one.kernels} kernel{'s' * (one.kernels > 1)}" if planned and one else "" for one in (host, peer, ours)]
        texts = (_time(host), _named(peer), _named(ours))
        lines.append((str(rows), _time(floor), *map("".join, zip(texts, kernels, strict=True)), gain))
    if any(is_ours(record) and is_stale(record) for record in times):
        notes.append("* measured with older sources of the design.")
    runs = ", ".join(f"{run} ({time[:10]})" for run, time in dict.fromkeys((record.run, record.time) for record in times))
    title = f"**{first.case}** on {first.gpu}{', with the plan of the experts' * planned}: {_shape(first)}; median"
    header = ("rows", "reading the weight", "SGLang", "fastest peer", "fastest of ours", "SGLang / ours")
    versions = "; ".join(dict.fromkeys(_versions(record) for record in times))
    text = f"{title} microseconds with a cold cache; {versions}; runs {runs}.\n\n{table(header, lines)}"
    return text + "".join(f"\n{note}\n" for note in notes)


def _shape(record: BenchRecord) -> str:
    what = CASES[record.case].what if record.case in CASES else ""
    return f"{record.experts} experts, hidden {record.hidden}, top-{record.topk}{what and f', {what}'}"


def _versions(record: BenchRecord) -> str:
    """What it was measured with; without FlashInfer, the peers are SGLang's and PyTorch's alone."""
    return ", ".join(
        f"{name} {record.versions.get(name) or 'not installed'}" for name in ("sglang", "torch", "triton", "flashinfer")
    )


def _of_kind(kind: str, records: Sequence[Record]) -> list[dict[str, Any]]:
    """The lines of that kind, the newest last."""
    lines = (msgspec.json.decode(r.line) for r in records if isinstance(r, OtherRecord) and r.kind == kind)
    return sorted(lines, key=lambda line: line["time"])


def _run(line: dict[str, Any]) -> str:
    return f"run {line['run']} ({line['time'][:10]}, commit {line['commit'][:7]})"


def _served(line: dict[str, Any]) -> str:
    """One ``demo --record``: the router of one layer in a profile of decode steps, and the steps themselves.

    Records of before rounds were interleaved hold no spread, and their steps are left out: they differ by what the CPU did.
    """
    engines: dict[str, Any] = line["served"]
    shown = {"router, us a layer": _router}
    if all("clock_ms" in engine for engine in engines.values()):
        shown |= {"step on the GPU, us": _gpu_step, "step by the clock, ms": _clock_step}
    size = f", {line['experts']} experts of {line['moe_intermediate']}" if "experts" in line else ""
    where = f"{line['moe_layers']} MoE layers on {line['gpu']} ({line['problem']}{size}, {line['weights']} weights)"
    title = f"The router in decode steps with {where}"
    header = ("requests", *(f"{name}, {what}" for what in shown for name in engines))
    rows = [
        (size, *(show(engine, size) for show in shown.values() for engine in engines.values()))
        for size in next(iter(engines.values()))["router"]
    ]
    tokens = f"\n{_tokens(line['tokens'])}\n" if "tokens" in line else ""
    return f"{title}; {_run(line)}.\n\n{table(header, rows)}{tokens}"


def _launches(line: dict[str, Any]) -> str:
    """A comparison of launches: a decode step by the clock, over launches, of each its median."""
    launches: list[dict[str, Any]] = line["launches"]
    stock, *ours = variants = list(dict.fromkeys(launch["variant"] for launch in launches))
    rows = []
    for size in launches[0]["step_ms"]:
        steps = {
            name: spread([launch["step_ms"][size]["median"] for launch in launches if launch["variant"] == name])
            for name in variants
        }
        cells = (f"{steps[name].text(3)} ({change(steps[stock], steps[name]):+.1%})" for name in ours)
        rows.append((size, steps[stock].text(3), *cells))
    count = len(launches) // len(variants)
    where = f"{line['moe_layers']} MoE layers on {line['gpu']} ({line['problem']}, {line['experts']} experts of"
    judged = line["tokens"]
    equal = f"{sum(one['equal'] for one in judged)} of {sum(one['sequences'] for one in judged)} sequences are equal throughout"
    verdict = (
        "NOT stock's"
        if any(one["against"] for one in judged)
        else "stock's but for near-ties, each of which changes what follows it"
    )
    return (
        f"A decode step of {where} {line['moe_intermediate']}) by the clock, in ms: the median of {count} launches each, in"
        f" mixed order (p10 to p90); {_run(line)}.\n\n"
        f"{table(('requests', *variants), rows)}\nGreedy tokens are {verdict}; {equal}.\n"
    )


def _tokens(judged: Sequence[dict[str, Any]]) -> str:
    """What a served record says of its greedy tokens. The last but one comparison is the one that must differ."""
    *same, noticed, followed = judged
    texts = (f"{one['what']}: {one['equal']} of {one['sequences']} sequences equal" for one in (*same, followed))
    everything = (*same, followed)
    equal = all(one["equal"] == one["sequences"] for one in everything)
    verdict = "NOT equal" if any(one["against"] for one in everything) else "equal" if equal else "differences are near-ties"
    return f"Greedy tokens, {verdict}: {'; '.join(texts)}. For comparison, {noticed['what']}: {noticed['equal']}."


def _router(engine: dict[str, Any], size: str) -> str:
    router = engine["router"][size]
    return "-" if router is None else f"{router['median_us']:.2f}"


def _gpu_step(engine: dict[str, Any], size: str) -> str:
    step = engine["gpu"][size]
    return "-" if step is None else msgspec.convert(step["span_us"], Spread).text(0)


def _clock_step(engine: dict[str, Any], size: str) -> str:
    return msgspec.convert(engine["clock_ms"][size], Spread).text(3)


def _fastest(records: Iterable[BenchRecord]) -> BenchRecord | None:
    racing = (record for record in records if is_raced(record))
    return min(racing, key=lambda record: record.median_us, default=None)


def is_ours(record: BenchRecord) -> bool:
    """A design of the table, or two of them chained; ``naive`` is shown as the peer that it is for."""
    names = record.design.split("+")
    return all(name in TABLE and TABLE[name].target and name != "naive" for name in names)


def is_stale(record: BenchRecord | CheckRecord) -> bool:
    return record.source_hash != current_hash(record.design)


def _time(record: BenchRecord | None) -> str:
    return "-" if record is None else microseconds(record.median_us, record.p10_us, record.p90_us)


def _named(record: BenchRecord | None) -> str:
    if record is None:
        return "-"
    return f"{_time(record)} `{record.design}`" + (" *" if is_ours(record) and is_stale(record) else "")


def _checks(checks: Sequence[CheckRecord]) -> str:
    parts = (
        f"`{c.design}` on {c.gpu}, {c.cases - c.failures} of {c.cases} checks passed"
        f" ({c.time[:10]}{', older sources' * is_stale(c)})"
        for c in checks
    )
    return f"Checks against the oracle: {'; '.join(parts)}.\n"


PARTS = {"designs": designs, "backends": backends, "settings": settings, "results": results, "cases": cases}


def rendered(text: str) -> str:
    """``text`` with every generated part as it should be. Raises KeyError for a part that there is no function for."""
    return MARK.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}", text)


def main(*files: str) -> None:
    try:
        for path in map(pathlib.Path, files):
            path.write_text(rendered(path.read_text()))
    except RecordError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
