"""Times as tables: which design is fastest at each row count, by how much, and how far above the floor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.record import FLOOR, HOST, PLANNED, ROUTER, is_raced, microseconds
from sglang_router_ext.bench.run import Line

GROUPS = {PLANNED: "router and plan", "gate+selection": "router", "gate": "gate alone", "selection": "selection alone"}


def fastest(lines: Iterable[Line], *, ours: bool) -> Line | None:
    """Of those that are raced, ours or the peers'."""
    racing = [line for line in lines if line.ours == ours and is_raced(line)]
    return min(racing, key=lambda line: line.median_us, default=None)


def find(lines: Iterable[Line], design: str, *, ours: bool) -> Line | None:
    """The first line of a design or a peer."""
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
    mine, peer = fastest(routers, ours=True), fastest(routers, ours=False)
    parts = [f"{line.design} {_us(line)} us" for line in (mine, peer, find(here, FLOOR, ours=False)) if line]
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
    peers = any(fastest(at, ours=False) != find(at, HOST[stages], ours=False) for at in raced)
    for name in ("rows", FLOOR, *names, "best of ours", *["best peer / ours"] * peers, f"{HOST[stages]} / ours"):
        table.add_column(name.replace("+", " +"), justify="right", overflow="fold", min_width=6)
    for at in raced:
        mine = fastest(at, ours=True)
        table.add_row(
            str(at[0].rows),
            _us(find([line for line in here if line.rows == at[0].rows], FLOOR, ours=False)),
            *(_us(find(at, design, ours=ours)) for design, ours in designs),
            f"{mine.design.replace('+', ' +')} {_us(mine)}" if mine else "-",
            *[_ratio(fastest(at, ours=False), mine)] * peers,
            _ratio(find(at, HOST[stages], ours=False), mine),
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
        mine, host = fastest(at, ours=True), find(at, HOST[stages], ours=False)
        layers = CASES[case].layers
        if mine and host and layers:
            saved = (host.median_us - mine.median_us) * layers / 1000
            found.append(f"{case}, rows {rows}, {layers} layers: {saved:+.3f} ms saved against {host.design} ({mine.design})")
    return found
