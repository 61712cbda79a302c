"""The bands of ``explain`` as a picture: a bar a design over the row axis, a lane a stage, a group of lanes a backend."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from sglang_router_ext.bench import draw
from sglang_router_ext.cli.bands import Band, Lane, Traffic
from sglang_router_ext.designs import DESIGNS

MOST = 16384
"""The largest row count that is shown; bars without an end reach it."""
WIDTH = 13.0
"""Of the picture, in inches; its bars have the part :data:`BARS` of it."""
BARS = 0.82
OCTAVE = WIDTH * BARS / math.log2(2 * MOST)
"""Inches from a row count to twice as many."""
CHARACTER = 0.075
"""Of a bar's text, in inches."""
HOST_GREYS = {None: "0.93", 1: "0.87", 2: "0.78", 3: "0.7"}
"""SGLang's own by the number of its kernels, darker the more there are."""
COLOURS = (*(number for number in range(0, 20, 2) if number != 14), *(number for number in range(1, 20, 2) if number != 15))
"""Of the designs, in the order of their table: places in a colour map, without its greys, which are SGLang's."""
LOOKS: dict[str, dict[str, Any]] = {
    "on record": {},
    "tuned here": {"hatch": "||"},
    "asked for, not the fastest": {"hatch": "//"},
    "on trial": {"hatch": ".."},
    "not measured": {"hatch": "xx", "alpha": 0.4},
}
"""What a choice rests on -> how its bar looks."""


def look(known: str) -> str:
    """Which of :data:`LOOKS` the bar has of which ``known`` is said; "" of SGLang's own, where nothing is."""
    if known in LOOKS or known == "-":
        return known.removeprefix("-")
    return "not measured" if "not measured" in known else "asked for, not the fastest"


def colour(design: str) -> Any:
    from matplotlib import colormaps

    return colormaps["tab20"](COLOURS[[one.name for one in DESIGNS].index(design) % len(COLOURS)])


def fits(text: str, band: Band) -> bool:
    """Whether ``text`` has room in the bar of ``band``."""
    octaves = math.log2((_end(band) + 0.5) / (band.rows.first - 0.5))
    return len(text) * CHARACTER < octaves * OCTAVE


def _end(band: Band) -> int:
    return MOST if band.rows.last is None else min(band.rows.last, MOST)


def _texts(band: Band) -> list[str]:
    """What may stand in a bar, the longest first."""
    name = "SGLang's" if band.design == "host" else band.design
    if band.kernels is None:
        return [*([f"{name}: {band.known}"] if band.known != "-" else []), name, ""]
    count = f"{band.kernels} kernel{'s' * (band.kernels != 1)}"
    return [f"{name}: {count}", count, str(band.kernels), ""]


def _bar(axis: Any, height: float, band: Band) -> None:
    from matplotlib import pyplot

    left, right = band.rows.first - 0.5, _end(band) + 0.5
    filled = HOST_GREYS.get(band.kernels, "0.62") if band.design == "host" else colour(band.design)
    style = {"color": filled, "height": 0.8, "edgecolor": "white", "linewidth": 1.0, **LOOKS.get(look(band.known), {})}
    with pyplot.rc_context({"hatch.color": "white", "hatch.linewidth": 0.8}):
        axis.barh(height, right - left, left=left, **style)
    text = next(text for text in _texts(band) if fits(text, band))
    if text:
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8, "linewidth": 0}
        axis.text((left * right) ** 0.5, height, text, ha="center", va="center", fontsize="x-small", bbox=box, zorder=4)


def _mark(axis: Any, height: float, traffic: Sequence[Traffic], tokens: int) -> None:
    """The rows of ``traffic``: points, and lines through all bars; a text that would meet the next point is left out."""
    marks = sorted(traffic, key=lambda one: one.rows)
    for one, following in zip(marks, [*marks[1:], None], strict=True):
        axis.axvline(one.rows, color="crimson", linewidth=1.2, linestyle="--")
        axis.plot([one.rows], [height], marker="v", color="crimson")
        text = f"   {one.requests} x {tokens} = {one.rows}" if tokens > 1 else f"   {one.rows}"
        end = one.rows * 2 ** (len(text) * CHARACTER / OCTAVE)
        if following is None or end < following.rows:
            axis.text(one.rows, height, text, va="center", fontsize="x-small", color="crimson")


def _legend(axis: Any, shown: Sequence[Band]) -> None:
    """One patch a design, and one for each thing that they rest on."""
    from matplotlib.patches import Patch

    ours = dict.fromkeys(band.design for band in shown if band.design != "host")
    patches = [Patch(facecolor=colour(name), label=name) for name in sorted(ours)]
    if any(band.design == "host" for band in shown):
        patches.append(Patch(facecolor=HOST_GREYS[1], label="SGLang's own (darker: more kernels, as recorded)"))
    used = {look(band.known) for band in shown}
    for name in (name for name in LOOKS if name in used):
        patches.append(Patch(facecolor="0.5", edgecolor="white", label=name, **LOOKS[name]))
    axis.legend(handles=patches, fontsize="small", loc="upper center", bbox_to_anchor=(0.45, -0.13), ncols=6, frameon=False)


def _ticks(shown: Sequence[Band]) -> list[int]:
    """Row counts to stand below the bars: where bands of ours end before operating points, and these before SGLang's."""
    ends = [(band.design == "host", band.rows.last) for band in shown if band.rows.last is not None]
    ours, hosts = ([end for host, end in ends if host == which and end <= MOST] for which in (False, True))
    kept: list[int] = []
    for tick in (1, MOST, *ours, *draw.OPERATING_POINTS, *hosts):
        if all(max(tick, one) > 1.3 * min(tick, one) for one in kept):
            kept.append(tick)
    return sorted(kept)


def plot(lanes: Sequence[Lane], traffic: Sequence[Traffic], tokens: int, title: str, file: pathlib.Path) -> None:
    """Draw ``lanes``, one below the other, and where ``traffic`` is among their rows. ``tokens``: of a request in a step."""
    backends = list(dict.fromkeys(lane.backend for lane in lanes))
    down = len(lanes) + 0.6 * len(backends) + bool(traffic)
    figure, axes = draw.new_figure(1, 1, WIDTH, 0.36 * down + 1.9)
    axis = axes[0, 0]
    ticks: dict[float, str] = {}
    height, where = 0.0, axis.get_yaxis_transform()
    for backend in backends:
        group = [lane for lane in lanes if lane.backend == backend]
        box = {"facecolor": "white", "linewidth": 0, "pad": 1.0}
        named = {"fontsize": "small", "weight": "bold", "zorder": 4, "bbox": box}
        axis.text(0.005, height - 0.72, backend, transform=where, va="center", **named)
        for lane in group:
            ticks[height] = lane.stage
            for band in lane.bands:
                if band.rows.first <= MOST:
                    _bar(axis, height, band)
            height += 1
        height += 0.6
    traffic = [one for one in traffic if one.rows <= MOST]
    if traffic:
        ticks[height - 0.2] = "traffic"
        _mark(axis, height - 0.2, traffic, tokens)
        height += 1
    axis.set_yticks(list(ticks), list(ticks.values()), fontsize="small")
    axis.set_ylim(height - 0.6, -1.2)
    shown = [band for lane in lanes for band in lane.bands]
    draw.over_rows(axis, (1, MOST))
    ticks_below = _ticks(shown)
    axis.set_xticks(ticks_below, [f"{tick:,}" for tick in ticks_below], fontsize="small")
    axis.set_xlim(0.5, MOST)
    axis.grid(visible=False, axis="y")
    axis.set_title(title, pad=18)
    _legend(axis, shown)
    draw.save(figure, file)
