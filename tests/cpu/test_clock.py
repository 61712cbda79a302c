"""The clock's arithmetic, on lists of activity as a profiler would deliver them. The GPU side is tested by using it."""

from __future__ import annotations

import pytest
import torch

from sglang_router_ext.bench.clock import (
    POISON_INT,
    Activity,
    ClockError,
    percentile,
    poison,
    replays_of,
    spans,
    summarise,
    typical,
)
from sglang_router_ext.bench.flush import FLUSH_NAME


def test_a_span_runs_from_the_first_start_to_the_last_end_after_a_flush() -> None:
    activities = [
        Activity(0, 500, "left over from before"),
        Activity(1000, 2000, FLUSH_NAME),
        Activity(2100, 5100, "gate"),
        Activity(5200, 6100, "selection"),
        Activity(7000, 8000, FLUSH_NAME),
        Activity(8500, 9000, "gate"),
    ]
    assert spans(activities) == [(4.0, 2), (0.5, 1)]


def test_overlapping_kernels_and_one_that_starts_before_the_flush_ends() -> None:
    activities = [
        Activity(0, 1000, FLUSH_NAME),
        Activity(990, 4000, "gate, started early"),
        Activity(2000, 3000, "inside it"),
    ]
    assert spans(activities) == [(3.01, 2)]


def test_order_of_delivery_does_not_matter() -> None:
    activities = [Activity(t, t + 10, name) for t, name in ((0, FLUSH_NAME), (20, "a"), (40, FLUSH_NAME), (60, "b"), (80, "c"))]
    assert spans(reversed(activities)) == spans(activities) == [(0.01, 1), (0.03, 2)]


def test_a_flush_without_kernels_gives_no_time() -> None:
    assert spans([Activity(0, 10, FLUSH_NAME)]) == [(0.0, 0)]
    with pytest.raises(ClockError, match=r"^nothing: replays show \[0\] kernels"):
        summarise("nothing", [(0.0, 0)])


def test_replays_that_differ_in_kernels_give_no_time() -> None:
    with pytest.raises(ClockError, match=r"pair: replays show \[1, 2\] kernels"):
        summarise("pair", [(4.0, 2), (3.0, 1)])


def test_summary_of_known_times() -> None:
    timing = summarise("pair", [(float(us), 2) for us in range(1, 102)])
    assert (timing.median_us, timing.p10_us, timing.p90_us, timing.kernels, timing.replays) == (51.0, 11.0, 91.0, 2, 101)
    assert percentile([3.0, 1.0], 0.5) == 2.0
    assert percentile([7.0], 0.9) == 7.0


def test_poison_reaches_every_tensor() -> None:
    floats, ids = torch.zeros(3), torch.zeros(2, dtype=torch.int32)
    poison((floats, None, [ids]))
    assert floats.isnan().all()
    assert ids.tolist() == [POISON_INT, POISON_INT]


def test_the_typical_replay_is_that_of_the_median_span() -> None:
    activities = [Activity(0, 10, FLUSH_NAME)]
    for number, length in enumerate((9, 3, 5)):
        begin = 100 * (number + 1)
        activities += [
            Activity(begin, begin + 1, "a"),
            Activity(begin + 2, begin + length, "b"),
            Activity(begin + 50, begin + 60, FLUSH_NAME),
        ]
    assert typical(replays_of(activities)[:3]) == (Activity(0, 1, "a"), Activity(2, 5, "b"))
    assert typical([[]]) == ()
