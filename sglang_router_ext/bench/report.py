"""Times as tables and plots: which design is fastest at each row count, by how much, and how far above the floor."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.record import FLOOR, HOST, PLANNED, ROUTER, is_raced, microseconds
from sglang_router_ext.bench.run import Line

GROUPS = {PLANNED: "router and plan", "gate+selection": "router", "gate": "gate alone", "selection": "selection alone"}


def _fastest(lines: Iterable[Line], *, ours: bool) -> Line | None:
    racing = [line for line in lines if line.ours == ours and is_raced(line)]
    return min(racing, key=lambda line: line.median_us, default=None)


def _find(lines: Iterable[Line], design: str, *, ours: bool) -> Line | None:
    return next((line for line in lines if line.design == design and line.ours == ours), None)


def _us(line: Line | None) -> str:
    if line is None or line.timing is None:
        return "-"
    return microseconds(line.timing.median_us, line.timing.p10_us, line.timing.p90_us)


def _ratio(theirs: Line | None, ours: Line | None) -> str:
    return "-" if theirs is None or ours is None else f"{theirs.median_us / ours.median_us:.2f}x"


def headline(lines: Sequence[Line]) -> str:
    """One row count in a line: the fastest router of ours, the fastest peer, and the floor, cold if that was timed."""
    cache = min(line.cache for line in lines)  # "cold" sorts before "warm"
    here = [line for line in lines if line.timing and line.cache == cache]
    routers = [line for line in here if line.stages == ROUTER]
    mine, peer = _fastest(routers, ours=True), _fastest(routers, ours=False)
    parts = [f"{line.design} {_us(line)} us" for line in (mine, peer, _find(here, FLOOR, ours=False)) if line]
    return f"{lines[0].case} rows {lines[0].rows} {cache}: {', '.join(parts)}"


def tables(lines: Sequence[Line], width: int | None = None) -> list[Table]:
    """One table per case, cache state and group of stages: rows down, designs across, microseconds. In ``width`` columns of a
    terminal that do not take all designs (None: they do), only the fastest of ours and SGLang's.
    """
    found = []
    timed = [line for line in lines if line.timing]
    for case, cache in dict.fromkeys((line.case, line.cache) for line in timed):
        here = [line for line in timed if (line.case, line.cache) == (case, cache)]
        for stages, title in GROUPS.items():
            if any(line.stages == stages for line in here):
                found.append(_table(f"{case}, {cache} cache, {title}: median us (* ours)", here, stages, width))
    return found


def _table(title: str, here: Sequence[Line], stages: str, width: int | None) -> Table:
    group = [line for line in here if line.stages == stages]
    designs = list(dict.fromkeys((line.design, line.ours) for line in sorted(group, key=lambda line: not line.ours)))
    wide = sum(4 + max(len(part) for part in design.split("+")) for design, _ours in designs) + 60
    if width is not None and wide > width:
        title += f"; {wide} columns or --json show all"
        designs = [(design, ours) for design, ours in designs if (design, ours) == (HOST[stages], False)]
    table = Table(title=title, title_justify="left")
    names = [f"{design}*" if ours else design for design, ours in designs]
    raced = [[line for line in group if line.rows == rows] for rows in sorted({line.rows for line in group})]
    # SGLang's ratio alone, where no other peer is faster anywhere.
    peers = any(_fastest(at, ours=False) != _find(at, HOST[stages], ours=False) for at in raced)
    for name in ("rows", FLOOR, *names, "best of ours", *["best peer / ours"] * peers, f"{HOST[stages]} / ours"):
        table.add_column(name.replace("+", " +"), justify="right", overflow="fold", min_width=6)
    for at in raced:
        mine = _fastest(at, ours=True)
        table.add_row(
            str(at[0].rows),
            _us(_find([line for line in here if line.rows == at[0].rows], FLOOR, ours=False)),
            *(_us(_find(at, design, ours=ours)) for design, ours in designs),
            f"{mine.design.replace('+', ' +')} {_us(mine)}" if mine else "-",
            *[_ratio(_fastest(at, ours=False), mine)] * peers,
            _ratio(_find(at, HOST[stages], ours=False), mine),
        )
    return table


def remarks(lines: Sequence[Line]) -> list[str]:
    """Everything that a table of times does not show: what is missing and why, and what a time needs to be read right."""
    found: dict[str, set[int]] = {}
    for line in lines:
        for text in (f"no time: {line.missing}" if line.missing else "", line.note):
            if text:
                found.setdefault(f"{line.case}: {line.design} ({line.stages}): {text}", set()).add(line.rows)
    return [f"{text} [at {', '.join(map(str, sorted(rows)))} rows]" for text, rows in found.items()]


def failures(lines: Sequence[Line]) -> list[str]:
    """What ran and gave a wrong result, in words."""
    return [
        f"{line.case} rows {line.rows} {line.cache}: {line.design} ({line.stages}): {text}"
        for line in lines
        for text in line.wrong
    ]


def per_pass(lines: Sequence[Line]) -> list[str]:
    """What the fastest router of ours saves against SGLang's in one forward pass, without and with the experts' plan, as far as
    kernel times carry over.
    """
    found = []
    routers = [line for line in lines if line.timing and line.cache == "cold" and line.stages in (ROUTER, PLANNED)]
    for case, rows, stages in dict.fromkeys((line.case, line.rows, line.stages) for line in routers):
        at = [line for line in routers if (line.case, line.rows, line.stages) == (case, rows, stages)]
        mine, host = _fastest(at, ours=True), _find(at, HOST[stages], ours=False)
        layers = CASES[case].layers
        if mine and host and layers:
            saved = (host.median_us - mine.median_us) * layers / 1000
            found.append(f"{case}, rows {rows}, {layers} layers: {saved:+.3f} ms saved against {host.design} ({mine.design})")
    return found


def plot(lines: Sequence[Line], file: pathlib.Path) -> None:
    """Median microseconds over rows, one panel a case and cache state: routers of ours solid, peers dashed, floors dotted.

    Of our routers each row count shows the fastest only, so that the picture answers one question: ours or theirs. Beside it
    stands the fastest that makes the experts' plan too, as ``sglang-pair+align`` does.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    shown = [line for line in lines if line.timing and line.stages in (ROUTER, PLANNED, "floor") and is_raced(line)]
    panels = list(dict.fromkeys((line.case, line.cache) for line in shown))
    figure, axes = pyplot.subplots(max(1, len(panels)), 1, figsize=(11.5, 5 * max(1, len(panels))), squeeze=False)
    for axis, (case, cache) in zip(axes[:, 0], panels, strict=False):
        here = [line for line in shown if (line.case, line.cache) == (case, cache)]
        peers = dict.fromkeys(line.design for line in here if not line.ours)
        for place, design in enumerate(peers):
            curve = sorted((line for line in here if line.design == design and not line.ours), key=lambda line: line.rows)
            floor = curve[0].stages == "floor"
            colour = str(0.3 + 0.25 * (design == FLOOR)) if floor else f"C{1 + place % 9}"
            _draw(axis, curve, label=design, linestyle=":" if floor else "--", color=colour, linewidth=1.2)
        for stages, what, colour in ((ROUTER, "ours", "black"), (PLANNED, "ours, with plan", "tab:blue")):
            group = [line for line in here if line.stages == stages]
            found = (_fastest([x for x in group if x.rows == rows], ours=True) for rows in sorted({x.rows for x in group}))
            mine = [line for line in found if line is not None]
            names = " / ".join(dict.fromkeys(line.design for line in mine))
            if mine:
                _draw(axis, mine, label=f"{what}: {names}", color=colour, linewidth=2.4)
        ticks = sorted({line.rows for line in here})
        apart = ticks[:1]
        for tick in ticks:
            if tick > 1.2 * apart[-1]:
                apart.append(tick)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(apart, [str(tick) for tick in apart], fontsize="small")
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlabel("rows (tokens in the batch)")
        axis.set_ylabel("time (microseconds, median)")
        axis.set_title(f"Router of {case}, {cache} L2 cache")
        axis.grid(visible=True, which="major", alpha=0.3)
        axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _draw(axis: Any, curve: Sequence[Line], **style: Any) -> None:
    axis.plot([line.rows for line in curve], [line.median_us for line in curve], marker=".", **style)


def _bar_name(line: Line) -> str:
    mark = f" *{', with plan' if line.stages == PLANNED else ', without'}" if line.ours else ""
    return f"{line.design}{mark}\n{line.median_us:.2f} us"


def timeline(lines: Sequence[Line], file: pathlib.Path) -> None:
    """The kernels of a layer's router over time, one panel a case and row count: SGLang's above, ours below, cold cache.

    Of ours, the fastest with and the fastest without a plan. A bar is a kernel from start to end; with PDL, bars overlap.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [line for line in lines if line.kernels and line.cache == "cold" and line.stages in (ROUTER, PLANNED)]
    panels = list(dict.fromkeys((line.case, line.rows) for line in timed))
    figure, axes = pyplot.subplots(max(1, len(panels)), 1, figsize=(11.5, 3 * max(1, len(panels))), squeeze=False)
    names = dict.fromkeys(name for line in timed for name, _, _ in line.kernels)
    colours = {name: pyplot.get_cmap("tab20")(place % 20) for place, name in enumerate(names)}
    for axis, (case, rows) in zip(axes[:, 0], panels, strict=False):
        here = [line for line in timed if (line.case, line.rows) == (case, rows)]
        shown: list[Line] = []
        for stages in (PLANNED, ROUTER):
            group = [line for line in here if line.stages == stages]
            both = (_find(group, HOST[stages], ours=False), _fastest(group, ours=True))
            shown += [line for line in both if line is not None]
        for place, line in enumerate(shown):
            for depth, (name, start, end) in enumerate(line.kernels):
                lane = place + 0.3 * (depth % 2) - 0.15  # kernels that overlap stay apart
                axis.barh(lane, end - start, left=start, height=0.28, color=colours[name], alpha=0.7)
                axis.text(start, lane, f" {name}", va="center", fontsize="x-small", clip_on=True)
        axis.set_yticks(range(len(shown)), [_bar_name(line) for line in shown])
        last = max((end for line in shown for _, _, end in line.kernels), default=1.0)
        axis.set_xlim(0, 1.15 * last)  # the last kernels' names have room
        axis.invert_yaxis()
        axis.set_xlabel("microseconds from the start of the first kernel")
        axis.set_title(f"{case}, {rows} row{'s' if rows > 1 else ''}, cold L2 cache (* ours)")
        axis.grid(visible=True, axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
