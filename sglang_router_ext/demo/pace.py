"""How long a decode step takes in each engine, and whether one is slower than the other. Pure; no torch.

There are two measures. The clock shows what a client sees, and with it everything that the CPU does: a small model's step is
bound by that, and varies with it. So the engines take turns, and a difference counts where their spreads are apart. The span
of a step's kernels on the GPU has no CPU in it, so a percent counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

NOTICED, ALLOWED = 0.01, 0.03
"""By how much a span on the GPU may be longer before it is called slower, and before the demo fails."""
FASTER, SLOWER, WITHIN_SPREAD, WITHIN_NOTICED = "faster", "slower", "within the spread", f"within {NOTICED:.0%}"

T = TypeVar("T")


class Spread(msgspec.Struct, frozen=True):
    """The middle of several measurements, and between which values 80 % of them lie."""

    median: float
    p10: float
    p90: float
    count: int

    def text(self, digits: int, unit: str = "") -> str:
        return f"{self.median:.{digits}f}{unit and f' {unit}'} ({self.p10:.{digits}f} to {self.p90:.{digits}f})"

    def apart(self, other: Spread) -> bool:
        return self.p10 > other.p90 or other.p10 > self.p90


def spread(values: Sequence[float]) -> Spread:
    deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [*values] * 2
    median, p10, p90 = (round(value, 4) for value in (statistics.median(values), deciles[0], deciles[-1]))
    return Spread(median, p10, p90, len(values))


def in_turn(items: Sequence[T], rounds: int) -> Iterator[T]:
    """Every item ``rounds`` times, there and back (A B B A ...), so that a drift hits all of them alike."""
    for number in range(rounds):
        yield from reversed(items) if number % 2 else items


def change(stock: Spread, ours: Spread) -> float:
    """By which share of stock's median ours is longer; negative where it is shorter."""
    return ours.median / stock.median - 1


def by_clock(stock: Spread, ours: Spread) -> str:
    """Ours against stock, in words."""
    return _word(change(stock, ours)) if ours.apart(stock) else WITHIN_SPREAD


def by_gpu(stock: Spread, ours: Spread) -> str:
    """Ours against stock, in words."""
    longer = change(stock, ours)
    return _word(longer) if abs(longer) > NOTICED else WITHIN_NOTICED


def too_slow(stock: Spread, ours: Spread) -> bool:
    """Whether ours' span on the GPU is longer by more than is allowed."""
    return change(stock, ours) > ALLOWED


def _word(longer: float) -> str:
    return SLOWER if longer > 0 else FASTER
