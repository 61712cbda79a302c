"""THE clock. No other file measures time, and it gives none for a result that is wrong.

A variant is captured into a CUDA graph behind a cache flush: [flush][kernels of the variant]. The graphs of all variants are
replayed in turn inside one profiler session. A time is the span from the start of the first kernel after a flush to the end
of the last one before the next flush, from CUPTI's records. ``cold``: the flush reads and writes more than any L2 holds.
``warm``: it touches one block.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from sglang_router_ext.bench.flush import FLUSH_BLOCK, FLUSH_NAME, flush
from sglang_router_ext.fused import words

FLUSH_BYTES = 160 * 2**20
REPLAYS = 60
WARM_UP_CALLS = 2
WARM_UP_ROUNDS = 5
WARM_UP_S = 0.2
"""A GPU that was idle, as while kernels were built, is slower at first: p90 up to 1.5 times the median without this."""
SESSIONS = 3
MARGIN_S = 0.005
POISON_INT = 0x7F7F7F7F
RAISED = "raised"
"""First word about a variant that did not get as far as a result."""

T = TypeVar("T")
Graph = torch.cuda.CUDAGraph


class ClockError(RuntimeError):
    """The profiler did not deliver what was launched; no time can be given."""


class Activity(NamedTuple):
    """One thing that ran on the GPU."""

    start_ns: int
    end_ns: int
    name: str


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one variant, microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    kernels: int
    replays: int


class Variant(NamedTuple):
    """Something to time: ``call`` launches it and returns its outputs, ``judge`` lists what is wrong with them."""

    name: str
    call: Callable[[], Any]
    judge: Callable[[Any], list[str]]


class Timed(NamedTuple):
    """A time or words why there is none."""

    timing: Timing | None
    wrong: list[str]
    kernels: tuple[Activity, ...] = ()
    """Of the replay whose span is the median; times from the start of its first kernel."""


def spans(activities: Iterable[Activity], flush_name: str = FLUSH_NAME) -> list[tuple[float, int]]:
    """Per flush, in order of time: microseconds from the first start to the last end after it, and how many kernels that were.

    Kernels belong to the last flush that started before them; with PDL they may overlap each other and start before the
    flush has ended. What runs before the first flush belongs to nobody.
    """
    return [(span(kernels), len(kernels)) for kernels in replays_of(activities, flush_name)]


def span(kernels: Sequence[Activity]) -> float:
    """Microseconds from the first start to the last end; 0 without kernels."""
    return (max(end for _, end, _ in kernels) - kernels[0].start_ns) / 1000 if kernels else 0.0


def replays_of(activities: Iterable[Activity], flush_name: str = FLUSH_NAME) -> list[list[Activity]]:
    """The kernels behind each flush, by start."""
    found: list[list[Activity]] = []
    for activity in sorted(activities):
        if flush_name in activity.name:
            found.append([])
        elif found:
            found[-1].append(activity)
    return found


def typical(replays: Sequence[Sequence[Activity]]) -> tuple[Activity, ...]:
    """The replay whose span is the median, from its own start."""
    chosen = sorted(replays, key=span)[len(replays) // 2]
    begin = chosen[0].start_ns if chosen else 0
    return tuple(Activity(start - begin, end - begin, name) for start, end, name in chosen)


def percentile(values: Sequence[float], share: float) -> float:
    """The ``share`` quantile (0 to 1) of ``values``, linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(name: str, measured: Sequence[tuple[float, int]]) -> Timing:
    """Median and spread of one variant's spans. Raises :class:`ClockError` where replays differ in their number of kernels."""
    counts = {kernels for _, kernels in measured}
    if len(counts) != 1 or 0 in counts:
        raise ClockError(f"{name}: replays show {sorted(counts)} kernels, wanted one number above 0")
    times = [us for us, _ in measured]
    return Timing(
        median_us=round(percentile(times, 0.5), 3),
        p10_us=round(percentile(times, 0.1), 3),
        p90_us=round(percentile(times, 0.9), 3),
        kernels=counts.pop(),
        replays=len(times),
    )


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in a nest of tuples and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, tuple | list) else []


def poison(value: Any) -> None:
    """Fill every tensor of an output with what no right answer holds: NaN or 0x7f7f7f7f."""
    for tensor in tensors(value):
        tensor.fill_(float("nan") if tensor.is_floating_point() else POISON_INT)


def capture(call: Callable[[], T], stream: torch.cuda.Stream, first: Callable[[], None] = lambda: None) -> tuple[Graph, T]:
    """``first`` and ``call`` as one graph, after calls that build and allocate; and the outputs that a replay writes.

    Not ``torch.cuda.graph``: that collects garbage and empties the allocator's cache at every capture.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            call()
        torch.cuda.synchronize(stream.device)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            first()
            outputs = call()
        except Exception:
            with contextlib.suppress(Exception):  # the capture is lost; the error that lost it is the one to show
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, outputs


class Clock:
    """The clock of one GPU. It owns the stream on which variants warm up, are captured and are replayed."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device)
        self._large = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        self._small = torch.zeros(FLUSH_BLOCK, dtype=torch.int32, device=self.device)
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            for _ in range(1000):  # compiles the flush and brings the GPU to its clocks
                flush(self._large)
            flush(self._small)
        torch.cuda.synchronize(self.device)
        self._profile(lambda: flush(self._small))  # CUPTI's start-up stays out of the first session

    @words.passing_graphs()
    def time(self, variants: Sequence[Variant], *, cold: bool, replays: int = REPLAYS) -> dict[str, Timed]:
        """Time all ``variants``, interleaved. One that raises or gives a wrong result gets words instead of a time.

        Raises :class:`ClockError` where the profiler loses activity in every one of ``SESSIONS`` attempts.
        """
        buffer = self._large if cold else self._small
        done: dict[str, Timed] = {}
        graphs: dict[str, tuple[Graph, Any]] = {}
        for variant in variants:
            try:
                graphs[variant.name] = capture(variant.call, self.stream, first=lambda: flush(buffer))
            except Exception as error:
                torch.cuda.synchronize(self.device)  # raises where the GPU itself is lost
                done[variant.name] = Timed(None, [f"{RAISED} {type(error).__name__}: {error}"])
        timed = self._time(graphs, replays) if graphs else {}
        for variant in variants:
            if variant.name in graphs:
                wrong = variant.judge(graphs[variant.name][1])
                done[variant.name] = Timed(None, wrong) if wrong else timed[variant.name]
        graphs.clear()
        torch.cuda.empty_cache()  # graphs keep pools of their own
        return {variant.name: done[variant.name] for variant in variants}

    def _time(self, graphs: dict[str, tuple[Graph, Any]], replays: int) -> dict[str, Timed]:
        def rounds(count: int) -> None:
            for _ in range(count):
                for graph, _outputs in graphs.values():
                    graph.replay()

        with torch.cuda.stream(self.stream):
            for _graph, outputs in graphs.values():
                poison(outputs)
            begun = time.monotonic()
            while time.monotonic() - begun < WARM_UP_S:
                rounds(WARM_UP_ROUNDS)
                torch.cuda.synchronize(self.device)
            for attempt in range(1, SESSIONS + 1):
                measured = replays_of(self._profile(lambda: rounds(replays)))
                try:
                    if len(measured) != replays * len(graphs):
                        raise ClockError(f"{len(measured)} flushes recorded, launched {replays * len(graphs)}")
                    found = {}
                    for i, name in enumerate(graphs):
                        mine = measured[i :: len(graphs)]
                        found[name] = Timed(summarise(name, [(span(one), len(one)) for one in mine]), [], typical(mine))
                    return found
                except ClockError as error:
                    if attempt == SESSIONS:
                        raise
                    print(f"profiler session {attempt} of {SESSIONS} is not usable: {error}", file=sys.stderr, flush=True)
        raise AssertionError("unreachable")

    def _profile(self, launch: Callable[[], None]) -> list[Activity]:
        """Everything that runs on the GPU while ``launch`` and its kernels do."""
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        with torch.cuda.stream(self.stream), torch.profiler.profile(activities=kinds) as profile:
            time.sleep(MARGIN_S)  # activity at the very edge of a session is dropped: the two clocks differ by microseconds
            launch()
            torch.cuda.synchronize(self.device)
            time.sleep(MARGIN_S)
        results = profile.profiler.kineto_results
        return [
            Activity(event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
            for event in results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
        ]
