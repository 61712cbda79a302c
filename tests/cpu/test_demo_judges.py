"""What the demo with a GPU judges by: tokens, profiles and times. Pure, so on any machine."""

from __future__ import annotations

import gzip
import json
import pathlib

import pytest

from sglang_router_ext.demo import compare, pace, trace
from sglang_router_ext.demo.compare import Comparison, Difference, Run, Yardstick
from sglang_router_ext.demo.pace import Spread
from sglang_router_ext.demo.trace import Kernel, RouterTime, StepTime

# --- compare


def runs_of(*sequences: list[int], best: float = -0.5, second: float = -1.5) -> Run:
    tops = [[{token: best, token + 1: second} for token in sequence] for sequence in sequences]
    return Run([list(sequence) for sequence in sequences], tops)


def test_equal_runs_have_no_difference() -> None:
    found = compare.compare(runs_of([1, 2, 3], [4, 5, 6]), runs_of([1, 2, 3]))
    assert (found.equal, found.sequences, found.differences, found.largest) == (1, 1, [], 0.0)


def test_what_follows_a_difference_does_not_count() -> None:
    one, other = runs_of([1, 2, 3]), runs_of([1, 3, 9])
    found = compare.compare(one, other)
    (difference,) = found.differences
    assert (difference.step, difference.tokens) == (1, (2, 3))
    assert difference.lead == pytest.approx(1.0)
    # {2: -0.5, 3: -1.5} against {3: -0.5, 4: -1.5}: token 3 moved by 1, token 2 from -0.5 to at most -1.5.
    assert difference.shift == pytest.approx(1.0)
    assert found.largest == pytest.approx(1.0)


def test_a_shift_without_another_token_raises_the_yardstick() -> None:
    found = compare.compare(runs_of([1, 2]), runs_of([1, 2], best=-0.6))
    assert found.equal == 1
    assert found.largest == pytest.approx(0.1)
    assert compare.yardstick([found, Comparison(4, [], 0.02)]) == Yardstick(0.0, pytest.approx(0.1))


def test_a_log_probability_that_is_nan_counts_as_infinitely_far() -> None:
    found = compare.compare(runs_of([1, 2]), runs_of([1, 2], second=float("nan")))
    assert found.largest == float("inf")


def differing(count: int, shift: float) -> Comparison:
    return Comparison(96, [Difference(i, 3, (1, 2), shift, 0.01) for i in range(count)], shift)


STOCK = Yardstick(differing=0.15, shift=0.3)


@pytest.mark.parametrize(("count", "shift"), [(0, 0.0), (14, 0.3), (20, 0.44)])
def test_near_ties_as_often_as_between_stock_runs_pass(count: int, shift: float) -> None:
    assert compare.verdict(differing(count, shift), STOCK) == []


@pytest.mark.parametrize(
    ("count", "shift", "words"), [(96, 0.1, "96 of 96 sequences differ"), (1, 0.5, "a log-probability differs by 0.500")]
)
def test_too_many_or_too_far_does_not_pass(count: int, shift: float, words: str) -> None:
    assert words in compare.verdict(differing(count, shift), STOCK)[0]


def test_equal_stock_runs_still_allow_a_difference_by_chance() -> None:
    exact = Yardstick(differing=0.0, shift=0.0)
    assert 1 <= exact.allowed(96) <= 4
    assert compare.verdict(differing(96, 0.0), exact)


def test_a_change_is_told_from_a_plugin_that_moves_fewer_sequences() -> None:
    changed, plugin = differing(96, 0.5), differing(17, 0.3)
    assert compare.more_than(changed, plugin) == ["100% of the sequences differ, and 18% with the plugin"]
    assert compare.more_than(changed, changed) == []
    assert compare.more_than(differing(20, 0.5), plugin) == []


# --- trace

STOCK_LAYER = [
    Kernel(0, 2, "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)", 7),
    Kernel(2, 9, "void (anonymous namespace)::shared_gate_up<(int)3>(float*)", 13),
    Kernel(2.5, 5, "void tiny_n_gemm_kernel<288, 4096, true>(Params)", 7),
    Kernel(5, 7, "_router_triton_kernel", 7),
    Kernel(7, 9, "void sgl::moe_align<(bool)1>(int)", 7),
]
OUR_LAYER = [
    Kernel(0, 2, "FusedAddRMSNormKernel", 7),
    Kernel(1, 4, "void rx::small_rows_kernel<4, 1, 2, false, false>(rx::SmallRowsParams)", 7),
    Kernel(1.5, 4.5, "void rx::warp_select_kernel<3, 8, 1, true, true>(rx::WarpSelectParams)", 7),
]
SINGLE_LAYER = [
    Kernel(0, 2, "FusedAddRMSNormKernel", 7),
    Kernel(1, 7, "void rx::single_kernel<16, 2, 2, true, true, (rx::RowCount)0, 4, 3, 8>(rx::SingleParams)", 7),
    Kernel(7, 20, "fused_moe_kernel", 7),
]
PREFILL_LAYER = [
    Kernel(0, 2, "norm", 7),
    Kernel(2, 9, "nvjet_tst_128x64", 7),
    Kernel(9, 10, "void cublasLt::splitKreduce_kernel<32>(int)", 7),
    Kernel(10, 14, "_router_triton_kernel", 7),
]


def repeated(layer: list[Kernel], times: int, offset: float = 0.0) -> list[Kernel]:
    return [
        k._replace(start_us=k.start_us + offset + 100 * i, end_us=k.end_us + offset + 100 * i)
        for i in range(times)
        for k in layer
    ]


def test_the_router_of_a_decode_step_is_found_by_place() -> None:
    kernels = sorted(repeated(STOCK_LAYER, 6) + repeated(PREFILL_LAYER, 3, offset=1000))
    assert trace.router_time([kernels]) == RouterTime(
        ["tiny_n_gemm_kernel", "_router_triton_kernel"], 4.5, 6, {"moe_align": 0.67}
    )
    split = trace.router_time([repeated(PREFILL_LAYER, 1), repeated(PREFILL_LAYER, 2)])
    assert split == RouterTime(["nvjet_tst_128x64", "splitKreduce_kernel", "_router_triton_kernel"], 12.0, 3)


def test_a_kernel_may_be_the_whole_router() -> None:
    """The prefill before the steps has another one, which is not theirs."""
    assert trace.router_time([served_trace(SINGLE_LAYER, 5)]) == RouterTime(["single_kernel"], 6.0, 10)
    named = [k._replace(name="moe_align_single_kernel_of_others") for k in SINGLE_LAYER]
    assert trace.router_time([repeated(named, 2)]) is None


def test_overlapping_kernels_count_once() -> None:
    assert trace.router_time([repeated(OUR_LAYER, 2)]) == RouterTime(["small_rows_kernel", "warp_select_kernel"], 3.5, 2)


def test_a_trace_without_a_known_selection_gives_none() -> None:
    assert trace.router_time([[Kernel(0, 1, "something_else", 7)]]) is None


def served_trace(layer: list[Kernel], steps: int, *, apart: float = 1000.0, outside: int = 3) -> list[Kernel]:
    """A prefill launched kernel by kernel, then ``steps`` replays of two layers, each followed by kernels ``outside``."""
    alone = iter(range(1, 1000))
    kernels = [k._replace(launch=next(alone)) for k in repeated(PREFILL_LAYER, 2)]
    for step in range(steps):
        start = 1000 + apart * step
        kernels += [k._replace(launch=5000 + step) for k in repeated(layer, 2, start)]
        kernels += [Kernel(start + 120 + 4 * i, start + 121 + 4 * i, "argmax", 7, next(alone)) for i in range(outside)]
    return sorted(kernels)


def test_a_decode_step_is_one_replay() -> None:
    steps = trace.replays(served_trace(STOCK_LAYER, 5))
    assert [len(step) for step in steps] == [2 * len(STOCK_LAYER)] * 5
    assert not any(kernel.name == "argmax" for step in steps for kernel in step)


def test_steps_are_found_where_they_follow_without_a_gap() -> None:
    tight = served_trace(STOCK_LAYER, 5, apart=109.0, outside=0)
    assert trace.step_time([tight], 5) == trace.step_time([served_trace(STOCK_LAYER, 5)], 5)


def test_kernels_on_two_streams_and_in_each_others_tails_count_once_in_busy() -> None:
    # Per layer: 9 us with two streams (2 + 7 busy, 2 + 7 + 2.5 + 2 + 2 summed); the second layer starts at 100.
    stock = {"FusedAddRMSNormKernel": 4.0, "_router_triton_kernel": 4.0, "moe_align": 4.0, "shared_gate_up": 14.0}
    stock["tiny_n_gemm_kernel"] = 5.0
    assert trace.step_time([served_trace(STOCK_LAYER, 5)], 5) == StepTime(
        Spread(109.0, 109.0, 109.0, 5), 18.0, 31.0, 10, [109.0], stock
    )
    # Dependent launches: [0, 2], [1, 4] and [1.5, 4.5].
    ours = {"FusedAddRMSNormKernel": 4.0, "small_rows_kernel": 6.0, "warp_select_kernel": 6.0}
    assert trace.step_time([served_trace(OUR_LAYER, 4)] * 2, 4) == StepTime(
        Spread(104.5, 104.5, 104.5, 8), 9.0, 16.0, 6, [104.5, 104.5], ours
    )


def test_a_kernel_within_another_adds_nothing_to_busy() -> None:
    nested = [Kernel(0, 10, "long", 7, 1), Kernel(2, 5, "short", 13, 1), Kernel(12, 13, "last", 7, 1)]
    found = trace.step_time([nested], 1)
    assert found is not None
    assert (found.span_us, found.busy_us, found.sum_us) == (Spread(13, 13, 13, 1), 11.0, 14.0)


def test_the_span_is_the_median_of_the_steps() -> None:
    late = [k._replace(end_us=k.end_us + 50) if k.launch == 5001 else k for k in served_trace(OUR_LAYER, 5)]
    found = trace.step_time([late], 5)
    assert found is not None
    assert found.span_us.median == 104.5
    assert found.span_us.p90 > 110


def test_the_graph_that_was_replayed_most_is_the_decode_step() -> None:
    once = [Kernel(9000 + i, 9001 + i, "other", 7, 8000) for i in range(90)]
    assert len(trace.replays(served_trace(STOCK_LAYER, 5) + once)) == 5


def test_of_two_graphs_in_each_step_the_larger_one_is_it() -> None:
    sampling = [
        Kernel(1200 + 1000 * step + i, 1201 + 1000 * step + i, "sample", 7, 8000 + step) for step in range(5) for i in (0, 1)
    ]
    steps = trace.replays(sorted(served_trace(OUR_LAYER, 5) + sampling))
    assert [len(step) for step in steps] == [2 * len(OUR_LAYER)] * 5


def test_too_few_steps_are_none() -> None:
    assert trace.step_time([served_trace(STOCK_LAYER, 7)], 15) is None
    assert trace.step_time([served_trace(STOCK_LAYER, 8)], 15) is not None
    assert trace.step_time([[k._replace(launch=0) for k in served_trace(STOCK_LAYER, 15)]], 15) is None
    assert trace.step_time([[]], 15) is None


@pytest.mark.parametrize("compress", [False, True])
def test_traces_are_read(tmp_path: pathlib.Path, compress: bool) -> None:
    file = tmp_path / "x.trace.json.gz"
    kernels = served_trace(STOCK_LAYER, 1)
    write_trace(file, kernels, compress=compress)
    assert trace.kernels(file) == kernels


def write_trace(file: pathlib.Path, kernels: list[Kernel], *, compress: bool = True) -> None:
    events = [
        {
            "cat": "kernel",
            "name": k.name,
            "ts": k.start_us,
            "dur": k.end_us - k.start_us,
            "args": {"stream": k.stream, "correlation": k.launch},
        }
        for k in kernels
    ]
    body = json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}).encode()
    file.write_bytes(gzip.compress(body) if compress else body)


# --- pace


def test_rounds_go_there_and_back() -> None:
    assert "".join(pace.in_turn("AB", 4)) == "ABBAABBA"
    assert list(pace.in_turn(["A"], 2)) == ["A", "A"]


def test_a_spread_leaves_out_the_outermost() -> None:
    found = pace.spread([float(i) for i in range(11)])
    assert found == Spread(5.0, 1.0, 9.0, 11)
    assert pace.spread([2.0]) == Spread(2.0, 2.0, 2.0, 1)


STEADY = Spread(10.0, 9.9, 10.1, 8)


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        (Spread(12.0, 10.05, 13.0, 8), "within the spread"),
        (Spread(12.0, 10.2, 13.0, 8), "slower"),
        (Spread(8.0, 7.0, 9.8, 8), "faster"),
    ],
)
def test_the_clock_tells_apart_what_lies_apart(ours: Spread, word: str) -> None:
    assert pace.by_clock(STEADY, ours) == word


@pytest.mark.parametrize(
    ("median", "word", "fails"),
    [
        (10.09, "within 1%", False),
        (10.2, "slower", False),
        (10.31, "slower", True),
        (9.8, "faster", False),
        (9.0, "faster", False),
    ],
)
def test_on_the_gpu_a_percent_counts(median: float, word: str, fails: bool) -> None:
    ours = Spread(median, 0.0, 100.0, 30)
    assert (pace.by_gpu(STEADY, ours), pace.too_slow(STEADY, ours)) == (word, fails)
