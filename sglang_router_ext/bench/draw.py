"""Times as pictures: over row counts, as ratios to SGLang's, step by step, and a replay's kernels over time."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang_router_ext.bench.record import FLOOR, HOST, PLANNED, ROUTER, is_raced
from sglang_router_ext.bench.report import GROUPS, fastest, find
from sglang_router_ext.bench.run import Line

OPERATING_POINTS = {1: "decode, 1 request", 6: "6: speculative verify", 96: "96 requests", 8192: "8,192: prefill chunk"}
"""Row counts at which servers spend their time."""
MOST_TICKS = 22
OURS = {ROUTER: "black", PLANNED: "tab:blue", "gate": "black", "selection": "black"}
"""Colours."""
Panel = tuple[str, str]
"""A case and a cache state."""


def new_figure(down: int, across: int, width: float, height: float, **more: Any) -> tuple[Any, Any]:
    """A figure and its panels, of which there is one at least. matplotlib is imported by those who draw alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width * across, height * max(1, down))
    return pyplot.subplots(max(1, down), across, figsize=size, squeeze=False, **more)


def save(figure: Any, file: pathlib.Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _panels(lines: Iterable[Line]) -> list[Panel]:
    return list(dict.fromkeys((line.case, line.cache) for line in lines))


def _of(lines: Iterable[Line], panel: Panel) -> list[Line]:
    return [line for line in lines if (line.case, line.cache) == panel]


def _curve(lines: Iterable[Line], design: str) -> list[Line]:
    """The times of a peer or floor, by rows."""
    return sorted((line for line in lines if line.design == design and not line.ours), key=lambda line: line.rows)


def _best(lines: Sequence[Line]) -> list[Line]:
    """The fastest of ours at each row count, by rows."""
    found = (fastest([x for x in lines if x.rows == rows], ours=True) for rows in sorted({x.rows for x in lines}))
    return [line for line in found if line is not None]


def _names(lines: Iterable[Line]) -> str:
    return " / ".join(dict.fromkeys(line.design for line in lines))


def _draw(axis: Any, curve: Sequence[Line], **style: Any) -> None:
    axis.plot([line.rows for line in curve], [line.median_us for line in curve], marker=".", **style)


def _apart(ticks: Sequence[int]) -> list[int]:
    """Those of ``ticks``, ascending, that can stand below a log axis: the ends and operating points before all others."""
    if not ticks:
        return []
    least = max(1.2, (ticks[-1] / ticks[0]) ** (1 / MOST_TICKS))
    kept: list[int] = []
    for tick in (ticks[0], ticks[-1], *(one for one in ticks if one in OPERATING_POINTS), *ticks):
        if all(max(tick, one) > least * min(tick, one) for one in kept):
            kept.append(tick)
    return sorted(kept)


def over_rows(axis: Any, rows: Iterable[int]) -> None:
    """A log axis of row counts, with the operating points among them marked, and named above the panel."""
    from matplotlib import ticker

    ticks = sorted(set(rows))
    apart = _apart(ticks)
    axis.set_xscale("log", base=2)
    axis.set_xticks(apart, [str(tick) for tick in apart], fontsize="small")
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlabel("rows (tokens in the batch)")
    axis.grid(visible=True, which="major", alpha=0.3)
    for place, text in OPERATING_POINTS.items():
        if ticks and ticks[0] <= place <= ticks[-1]:
            axis.axvline(place, color="slategray", linewidth=0.8, zorder=0)
            side = "right" if place == ticks[-1] > ticks[0] else "left"
            where = axis.get_xaxis_transform()
            axis.text(place, 1.01, text, transform=where, ha=side, va="bottom", fontsize="x-small", color="slategray")


def _microseconds(axis: Any) -> None:
    """A log axis of times."""
    from matplotlib import ticker

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    axis.set_ylabel("time (microseconds, median)")


def plot(lines: Sequence[Line], file: pathlib.Path) -> None:
    """Median microseconds over rows, one panel a case and cache state: routers of ours solid, peers dashed, floors dotted.

    Of our routers each row count shows the fastest only, so that the picture answers one question: ours or theirs. Beside it
    stands the fastest that makes the experts' plan too, as ``sglang-pair+align`` does.
    """
    shown = [line for line in lines if line.timing and line.stages in (ROUTER, PLANNED, "floor") and is_raced(line)]
    panels = _panels(shown)
    figure, axes = new_figure(len(panels), 1, 10, 6.5)
    for axis, panel in zip(axes[:, 0], panels, strict=False):
        here = _of(shown, panel)
        for place, design in enumerate(dict.fromkeys(line.design for line in here if not line.ours)):
            curve = _curve(here, design)
            floor = curve[0].stages == "floor"
            colour = str(0.3 + 0.25 * (design == FLOOR)) if floor else f"C{1 + place % 9}"
            _draw(axis, curve, label=design, linestyle=":" if floor else "--", color=colour, linewidth=1.2)
        for stages, what in ((ROUTER, "ours"), (PLANNED, "ours, with plan")):
            mine = _best([line for line in here if line.stages == stages])
            if mine:
                _draw(axis, mine, label=f"{what}: {_names(mine)}", color=OURS[stages], linewidth=2.4)
        over_rows(axis, (line.rows for line in here))
        _microseconds(axis)
        axis.set_title(f"Router of {panel[0]}, {panel[1]} L2 cache", pad=18)
        axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    save(figure, file)


def ratios(lines: Sequence[Line], file: pathlib.Path) -> None:
    """SGLang's time divided by that of our fastest over rows, one panel a case and cache state: the router, and with its plan.
    Where a curve is in the shade below 1, SGLang is faster.
    """
    shown = [line for line in lines if line.timing and line.stages in (ROUTER, PLANNED)]
    panels = _panels(shown)
    figure, axes = new_figure(len(panels), 1, 9.5, 4.5)
    for axis, panel in zip(axes[:, 0], panels, strict=False):
        rows: set[int] = set()
        values = [1.0]
        for stages in (ROUTER, PLANNED):
            group = [line for line in _of(shown, panel) if line.stages == stages]
            host = {line.rows: line.median_us for line in _curve(group, HOST[stages])}
            found = {line.rows: host[line.rows] / line.median_us for line in _best(group) if line.rows in host}
            rows |= found.keys()
            values += found.values()
            if found:
                style = {"color": OURS[stages], "marker": ".", "linewidth": 2.0}
                axis.plot(found.keys(), found.values(), label=f"{GROUPS[stages]}: {HOST[stages]} / ours", **style)
        spread = max(values) - min(values) or 1.0
        axis.set_ylim(min(values) - max(0.15, 0.12 * spread), max(values) + 0.08 * spread)
        axis.axhline(1.0, color="0.3", linewidth=1.0)
        axis.axhspan(0.0, 1.0, color="tab:orange", alpha=0.15, linewidth=0)
        where = axis.get_yaxis_transform()
        axis.text(0.01, 0.99, "SGLang is faster", transform=where, va="top", fontsize="small", color="0.3")
        over_rows(axis, rows)
        axis.set_ylabel("SGLang's time / ours")
        axis.set_title(f"Router of {panel[0]}, {panel[1]} L2 cache: how many times as fast as SGLang's", pad=18)
        if rows:
            axis.legend(fontsize="small", loc="best")
    save(figure, file)


def steps(lines: Sequence[Line], file: pathlib.Path) -> None:
    """Median microseconds over rows of each group of stages, ours and SGLang's: four panels a case and cache state."""
    timed = [line for line in lines if line.timing]
    shown = [line for line in timed if line.stages in GROUPS]
    panels = _panels(shown)
    down = len(GROUPS) // 2
    figure, axes = new_figure(down * len(panels), 2, 6.8, 4.4, sharey=True)
    for place, panel in enumerate(panels):
        floor = _curve(_of(timed, panel), FLOOR)
        four = axes[down * place : down * (place + 1)].flat
        for axis, (stages, title) in zip(four, GROUPS.items(), strict=True):
            group = [line for line in _of(shown, panel) if line.stages == stages]
            host, mine = _curve(group, HOST[stages]), _best(group)
            if host:
                _draw(axis, host, label=HOST[stages], linestyle="--", color="tab:orange", linewidth=1.6)
            if mine:
                _draw(axis, mine, label=f"ours: {_names(mine)}", color=OURS[stages], linewidth=2.2)
            if floor and stages != "selection":  # which does not read the weight
                _draw(axis, floor, label=FLOOR, linestyle=":", color="0.55", linewidth=1.2)
            over_rows(axis, (line.rows for line in (*host, *mine)))
            _microseconds(axis)
            axis.set_title(f"{panel[0]}, {panel[1]} L2 cache: {title}", fontsize="medium", pad=16)
            if host or mine:
                axis.legend(fontsize="x-small", loc="upper left")
    axes[0, 0].set_ylim(top=1.8 * axes[0, 0].get_ylim()[1])  # room for legends, in all panels
    save(figure, file)


PICTURES: dict[str, Callable[[Sequence[Line], pathlib.Path], None]] = {"plot": plot, "ratios": ratios, "steps": steps}
"""Option of ``bench`` -> picture of times, measured or recorded."""


def _bar_name(line: Line) -> str:
    mark = f" *{', with plan' if line.stages == PLANNED else ', without'}" if line.ours else ""
    return f"{line.design}{mark}\n{line.median_us:.2f} us"


def timeline(lines: Sequence[Line], file: pathlib.Path) -> None:
    """The kernels of a layer's router over time, one panel a case and row count: SGLang's above, ours below, cold cache.

    Of ours, the fastest with and the fastest without a plan. A bar is a kernel from start to end; with PDL, bars overlap.
    """
    from matplotlib import colormaps

    timed = [line for line in lines if line.kernels and line.cache == "cold" and line.stages in (ROUTER, PLANNED)]
    panels = list(dict.fromkeys((line.case, line.rows) for line in timed))
    figure, axes = new_figure(len(panels), 1, 11.5, 3)
    names = dict.fromkeys(name for line in timed for name, _, _ in line.kernels)
    colours = {name: colormaps["tab20"](place % 20) for place, name in enumerate(names)}
    for axis, (case, rows) in zip(axes[:, 0], panels, strict=False):
        here = [line for line in timed if (line.case, line.rows) == (case, rows)]
        shown: list[Line] = []
        for stages in (PLANNED, ROUTER):
            group = [line for line in here if line.stages == stages]
            both = (find(group, HOST[stages], ours=False), fastest(group, ours=True))
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
    save(figure, file)
