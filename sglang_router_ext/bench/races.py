"""From times to bands: which way through the router is fastest at each row count, SGLang's own among them. Pure, no torch.

Two races, since experts that take a plan are spared SGLang's count-and-sort behind the router: with a plan and without one.
In them are designs that may be chosen by themselves (status ``on``) and their chains, and SGLang's gate or selection with one
stage of ours. The last are not timed. They count as SGLang's pair, with the time of the stage that is ours in place of that of
SGLang's same stage. That is good enough against SGLang's pair itself, of which it differs by one stage; against a way that was
timed it has to be ``ESTIMATE`` times as fast. In the race with a plan, what makes none has SGLang's count-and-sort behind it,
which takes what it takes behind SGLang's pair; or behind its two stages, where these are faster one by one, as they are where
a GEMM of two kernels leaves a hole in front of the selection.

A way that gives a row the same bits in all batches that it takes wins where the fastest, of another kind, is less than
``STABLE`` times as fast. The winner gives a band to each of its designs: a chain ``a+b`` to both, a single stage before or
behind SGLang's to its one design. Where it is one design for both stages, those that ``choose`` asks after it race on for the
second place: their bands change nothing where the first can run, and are what to run where it cannot (not built here, no
words left in a graph). Whatever is not faster than SGLang's gets nothing, and so does everything at a row count where
SGLang's was not timed.

A row count between two that were measured is decided by the larger one: under CUDA graphs SGLang pads a batch up to the next
size that it captured, and a design that ends at 16 rows must not be chosen at 17 because of what it did at 16. So a winner at
n has the rows from behind the measured count before n up to n, and the smallest count has its own only. Of rows below the
smallest count or past the largest a race says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sglang_router_ext.bench.record import HOST, PLANNED, ROUTER
from sglang_router_ext.choose import ORDER
from sglang_router_ext.designs import PLAN_STAGE, TABLE, Rows

STABLE = 1.05
ESTIMATE = 1.1
"""Stages overlap, or do not, in other ways than in SGLang's pair: some 0.5 us of 6."""


class Time(NamedTuple):
    """A median in microseconds of one design, chain (``a+b``) or peer at one row count."""

    rows: int
    design: str
    stages: str
    us: float
    ours: bool


class Way(NamedTuple):
    """A way through the router: one design for both stages, or one each, of which one may be ``host``."""

    gate: str
    selection: str
    us: float
    estimated: bool = False

    @property
    def designs(self) -> tuple[str, ...]:
        """Those of ours."""
        return tuple(dict.fromkeys(name for name in (self.gate, self.selection) if name != "host"))

    @property
    def place(self) -> int:
        """Of the design that ``choose`` asks first."""
        return min(ORDER.index(name) for name in self.designs)

    @property
    def row_stable(self) -> bool:
        return "host" not in (self.gate, self.selection) and all(TABLE[name].row_stable for name in self.designs)

    @property
    def rank(self) -> tuple[float, int]:
        """Smaller is better."""
        return self.us * (ESTIMATE if self.estimated else 1.0), self.place

    def __str__(self) -> str:
        return self.gate if self.gate == self.selection else f"{self.gate}+{self.selection}"


class Race(msgspec.Struct, frozen=True, kw_only=True):
    """One row count of a race, for people."""

    rows: int
    host_us: float | None
    """SGLang's; None where it was not timed."""
    ours: str = ""
    """The best way that is not SGLang's alone, whether or not it is faster; "" where there is none."""
    ours_us: float | None = None
    estimated: bool = False


class Found(NamedTuple):
    """What came of one race: its row counts, and the bands of the designs that have any."""

    races: tuple[Race, ...]
    bands: dict[str, tuple[Rows, ...]]


def races_alone(design: str) -> bool:
    """Whether a line of ``design``, or a chain of several, is in the race: each may be chosen without being named."""
    return all(name in ORDER and TABLE[name].status == "on" for name in design.split("+"))


def is_wanted(design: str, *, ours: bool) -> bool:
    """Whether a race reads the times of ``design``."""
    return races_alone(design) if ours else design in HOST.values()


def ways(times: Iterable[Time], *, plan: bool, rounded: bool = False) -> tuple[float | None, list[Way]]:
    """SGLang's time at one row count (None: not timed) and every way of ours, from all ``times`` there.

    ``rounded``: the model rounds its logits, so that no single stage goes with SGLang's other one.
    """
    times = list(times)
    theirs = {time.stages: time.us for time in times if not time.ours and HOST.get(time.stages) == time.design}
    pair, planned = theirs.get(ROUTER), theirs.get(PLANNED)
    alone = theirs["gate"] + theirs["selection"] if {"gate", "selection"} <= set(theirs) else None
    router = min((us for us in (pair, alone) if us is not None), default=None)
    align = None if router is None or planned is None else planned - router
    found = []
    for time in times:
        if not time.ours or not races_alone(time.design):
            continue
        names, stages = time.design.split("+"), time.stages.split("+")
        plans = PLAN_STAGE in stages
        if plans and not plan:
            continue  # says nothing of itself without one
        if plan and not plans and any(TABLE[name].plans for name in names):
            continue  # it would make one
        if plans and planned is None:
            continue  # nothing to be faster than
        steps = [stage for stage in stages if stage != PLAN_STAGE]
        if len(steps) == 2:
            way = Way(names[0], names[-1], time.us)
        elif rounded or pair is None or steps[0] not in theirs:
            continue
        else:
            place = (names[0], "host") if steps == ["gate"] else ("host", names[0])
            way = Way(*place, pair - theirs[steps[0]] + time.us, estimated=True)
        if plan and not plans and planned is not None:
            if align is None or align <= 0:
                continue  # what is behind it is not known
            way = way._replace(us=way.us + align)
        found.append(way._replace(us=round(way.us, 3)))
    return planned if plan and planned is not None else pair, found


def best(found: Sequence[Way]) -> Way:
    """The winner among these, one or more."""
    fastest = min(found, key=lambda way: way.rank)
    stable = (way for way in found if way.row_stable and way.us < STABLE * fastest.us)
    return min(stable, key=lambda way: way.rank, default=fastest)


def places(host_us: float | None, found: Sequence[Way]) -> list[Way]:
    """The winner and, behind one design for both stages, whoever is next: see the top of this file. Empty: SGLang's."""
    left = [way for way in found if host_us is not None and way.us < host_us]
    taken: list[Way] = []
    while left:
        first = best(left)
        taken.append(first)
        left = [way for way in left if way.place > first.place] if first.gate == first.selection else []
    return taken


def bands(winners: Mapping[int, Iterable[str]]) -> dict[str, tuple[Rows, ...]]:
    """Measured row count -> designs that win there, as bands: rows between two belong to the larger. Neighbours merge."""
    found: dict[str, list[Rows]] = {}
    before = min(winners, default=1) - 1
    for rows in sorted(winners):
        for name in winners[rows]:
            mine = found.setdefault(name, [])
            if mine and mine[-1].last == before:
                mine[-1] = Rows(mine[-1].first, rows)
            else:
                mine.append(Rows(before + 1, rows))
        before = rows
    return {name: tuple(found[name]) for name in sorted(found, key=ORDER.index)}


def race(times: Sequence[Time], rows: Iterable[int], *, plan: bool, rounded: bool = False) -> Found:
    """The race at ``rows``, with a plan or without: counts at which nothing was timed are SGLang's."""
    shown, winners = [], {}
    for count in sorted(set(rows)):
        host_us, found = ways((time for time in times if time.rows == count), plan=plan, rounded=rounded)
        winners[count] = [name for way in places(host_us, found) for name in way.designs]
        run = Race(rows=count, host_us=host_us)
        if found:
            way = best([way for way in found if host_us is not None and way.us < host_us] or found)
            run = Race(rows=count, host_us=host_us, ours=str(way), ours_us=way.us, estimated=way.estimated)
        shown.append(run)
    return Found(tuple(shown), bands(winners))
