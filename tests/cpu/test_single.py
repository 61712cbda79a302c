"""``single`` where it needs no GPU: who does what, the words of a launch, and how large a plan can become."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_router_ext import agreement, reference
from sglang_router_ext.bench import check
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.checks import Check
from sglang_router_ext.contract import BLOCKS, ContractError, Gpu, PlanForm, Problem
from sglang_router_ext.designs import TABLE
from sglang_router_ext.fused import single, words
from sglang_router_ext.fused.single import Placing
from sglang_router_ext.gate.small_rows import config
from sglang_router_ext.selection.warp_select import groups

CPU = torch.device("cpu")
SHAPES = sorted(
    {(case.problem.experts, case.problem.hidden) for case in CASES.values()} | {(1024, 8), (1, 8), (896, 7168), (33, 40)}
)


@pytest.mark.parametrize(("experts", "hidden"), SHAPES)
def test_every_row_has_a_team_and_consumers_leave_room(experts: int, hidden: int) -> None:
    split, team = config(experts, hidden), groups(experts)
    for rows in range(1, 129):
        how = single.division(rows, experts, hidden, 132)
        each = -(-rows // how.consumers)
        assert each * how.consumers >= rows and each * team <= split.warps
        assert 1 <= how.planners <= how.consumers
        assert 1 <= how.tiles_of_rows <= math.ceil(rows / 16)
        columns = 8 * (split.tiles if rows <= 16 else single.many_tiles(split, experts))
        producers = -(-experts // columns) * single.slices(split, rows) * how.tiles_of_rows
        match how.placing:
            case Placing.FIRST:
                assert producers + how.consumers <= 132
            case Placing.BOTH:
                assert producers + how.consumers > 132 and how.consumers <= producers
            case Placing.LAST:
                assert how.consumers > producers or 2 * how.consumers >= 132


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 33, 64, 65, 66, 96, 127, 128])
def test_what_waits_leaves_room_whatever_the_shape(rows: int) -> None:
    """Consumers wait for producers: those of two launches must not fill the GPU, unless all producers come before them."""
    design = TABLE["single"]
    assert design.max_experts is not None
    for processors in (design.min_processors, 78, 114, 132, 148):
        for experts in (*range(1, design.max_experts, 7), design.max_experts):
            for hidden in (8, 40, 520, *range(512, 8192, 256), 65536):
                for wide in (False, True):
                    how = single.division(rows, experts, hidden, processors, wide)
                    assert how.placing is Placing.LAST or 2 * how.consumers < processors, (experts, hidden, wide, how)
                    assert 4 * how.planners <= processors


def test_launches_of_one_owner_share_words_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "RESERVE", 1024)
    pool = words.Pool()
    first = pool.take(CPU, ("stream", 1), 100)
    assert (first == words.EMPTY).all()
    assert pool.take(CPU, ("stream", 1), 60).data_ptr() == first.data_ptr()
    second = pool.take(CPU, ("graph", 1), 100)
    assert second.data_ptr() >= first.data_ptr() + 4 * 100
    assert pool.take(CPU, ("stream", 1), 300).data_ptr() > second.data_ptr()  # more than it had: others are not overrun
    assert pool.take(CPU, ("graph", 1), 100).data_ptr() == second.data_ptr()


def test_words_of_graphs_that_are_gone_serve_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "RESERVE", 1024)
    pool = words.Pool()
    stream = pool.take(CPU, ("stream", 1), 100)
    for graph in range(40):  # far more than there is room for at a time
        sizes = [150 + 10 * (graph % 7), 64, 200]
        taken = [pool.take(CPU, ("graph", 3 * graph + i), size) for i, size in enumerate(sizes)]
        spans = sorted((part.data_ptr(), part.data_ptr() + 4 * len(part)) for part in [stream, *taken])
        assert all(end <= start for (_start, end), (start, _end) in itertools.pairwise(spans))
        assert all((part == words.EMPTY).all() for part in taken)
        pool.take_back(pool.graphs())
    assert not pool.has(("graph", -1), 2048) and pool.has(("graph", -1), 192)
    assert pool.take(CPU, ("stream", 1), 100).data_ptr() == stream.data_ptr()


def test_only_graphs_captured_inside_give_words_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "RESERVE", 1024)
    pool = words.Pool()
    monkeypatch.setattr(words, "_pools", {CPU: pool})
    pool.take(CPU, ("stream", 1), 64)
    alive = pool.take(CPU, ("graph", 1), 100)
    for graph in range(2, 20):
        with words.passing_graphs():
            passing = [pool.take(CPU, ("graph", graph), count) for count in (64, 256)]  # larger than at first
            assert pool.take(CPU, ("graph", 1), 100).data_ptr() == alive.data_ptr()
            assert alive.data_ptr() not in {part.data_ptr() for part in passing}
    assert pool.graphs() == {("graph", 1)}


def test_a_check_gives_the_words_of_its_graphs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "RESERVE", 1024)
    monkeypatch.setattr(words, "_pools", {CPU: words.Pool()})
    words._pools[CPU].take(CPU, ("stream", 1), 64)
    graphs = itertools.count()

    def capture(*_: object) -> list[str]:
        words._pools[CPU].take(CPU, ("graph", next(graphs)), 300)
        return []

    monkeypatch.setattr(check, "examine", capture)
    problem = Problem(experts=9, hidden=8, topk=3)
    todo = [Check(case="small", problem=problem, rows=1)] * 20
    outcomes = list(check.run([TABLE["cublas_gemm"]], todo, Gpu("none", 90), CPU))
    assert len(outcomes) == 20 and not any(outcome.refused or outcome.failures for outcome in outcomes)


def test_a_launch_has_the_words_of_its_stream_or_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        cuda_stream = 7

    class Module:
        @staticmethod
        def capture_id(stream: int) -> int:
            return 10 * stream if stream == 7 else 0

    monkeypatch.setattr(words, "RESERVE", 512)
    monkeypatch.setattr(words, "_pools", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert words.owner_of(Module, CPU) == ("stream", 7)
    sums, told = words.take(Module, CPU, (2, 3, 8), (1, 2, 4))
    assert sums.shape == (2, 3, 8) and told.shape == (1, 2, 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert words.owner_of(Module, CPU) == ("graph", 70)
    assert words.room(Module, CPU, (2, 3, 8), (1, 2, 4))
    captured, _ = words.take(Module, CPU, (2, 3, 8), (1, 2, 4))
    assert captured.data_ptr() != sums.data_ptr()
    assert not words.room(Module, CPU, (2, 3, 64), (1, 2, 4))
    monkeypatch.setattr(Stream, "cuda_stream", 8)
    with pytest.raises(ContractError, match=r"^stream: got a capture without a graph"):
        words.owner_of(Module, CPU)


@given(st.integers(1, 128 * 24), st.integers(1, 1024), st.sampled_from(BLOCKS))
def test_an_aligned_plan_has_the_room_of_sglangs_own(slots: int, local: int, block: int) -> None:
    room = single.aligned_room(slots, local, block)
    assert room >= single.most_blocks(slots, local, block) * block
    assert room >= slots + min(slots, local + 1) * (block - 1)  # what its kernels of padded rows are sized by


def test_words_can_be_set_aside_before_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        cuda_stream = 7

    monkeypatch.setattr(words, "RESERVE", 256)
    monkeypatch.setattr(words, "_pools", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    words.reserve(CPU)
    words.reserve(CPU)
    pool = words._pools[CPU]
    assert (pool.take(CPU, ("graph", 1), 128) == words.EMPTY).all()  # in a capture, without a launch before it
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(words, "_pools", {})
    words.reserve(CPU)  # cannot, and leaves the error to the launch
    with pytest.raises(ContractError, match=r"^stream: got single in a CUDA graph's capture"):
        words._pools[CPU].take(CPU, ("graph", 1), 128)


def test_a_capture_takes_no_words_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "RESERVE", 256)
    pool = words.Pool()
    with pytest.raises(ContractError, match=r"^stream: got single in a CUDA graph's capture.*a launch before it, outside"):
        pool.take(CPU, ("graph", 1), 64)
    pool.take(CPU, ("stream", 1), 64)
    pool.take(CPU, ("graph", 1), 128)
    with pytest.raises(ContractError, match="at most 256 words in all"):
        pool.take(CPU, ("graph", 2), 128)
    pool.take(CPU, ("stream", 2), 128)  # outside of a capture there are always more


def test_a_plan_by_hand() -> None:
    problem = Problem(experts=5, hidden=8, topk=2)
    ids = torch.tensor([[2, 0], [0, 4], [-1, -1], [4, 2]], dtype=torch.int32)
    form = PlanForm(kind="aligned", block=8, locals=4, counts_elsewhere=True)
    plan = reference.plan(problem, form, ids)
    pad = 8
    assert plan["expert_ids"].tolist() == [-1, 0, 2]
    assert plan["sorted_token_ids"].tolist() == [3, 4, 5, 6, *[pad] * 4, 1, 2, *[pad] * 6, 0, 7, *[pad] * 6]
    assert plan["num_tokens_post_padded"].tolist() == [24, 1]
    tiles = reference.plan(problem, PlanForm(kind="tiles", block=8, first_local=1), ids)
    assert tiles["tile_experts"].tolist() == [1, 3]  # experts 2 and 4
    assert tiles["tile_ends"].tolist() == [2, 10]
    assert tiles["slot_to_place"].tolist() == [0, -1, -1, 8, -1, -1, 9, 1]
    assert tiles["place_to_row"].tolist() == [0, 3, *[-1] * 6, 1, 3, *[-1] * 6, -1]
    assert tiles["counts"].tolist() == [0, 0, 2, 0, 2]
    assert (tiles["tiles"].tolist(), tiles["places"].tolist()) == ([2], [16])


@given(
    st.integers(1, 128),
    st.integers(1, 40),
    st.integers(1, 8),
    st.sampled_from(BLOCKS),
    st.sampled_from(("aligned", "tiles")),
    st.integers(0, 2**31),
)
def test_a_plan_fits_the_tensors_made_for_it(rows: int, experts: int, topk: int, block: int, kind: str, seed: int) -> None:
    topk = min(topk, experts)
    problem = Problem(experts=experts, hidden=8, topk=topk)
    chosen = torch.rand(rows, experts, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :topk].int()
    chosen[rows // 2 :: 3] = -1
    local = max(1, experts // 2)
    for form in (PlanForm(kind=kind, block=block), PlanForm(kind=kind, block=block, locals=local)):
        room = single.empty_plan(problem, form, rows, CPU)
        want = reference.plan(problem, form, chosen)
        assert room.keys() == want.keys()
        for name, tensor in want.items():
            assert len(room[name]) >= len(tensor), name
            room[name][: len(tensor)] = tensor
        assert agreement.compare_plan(room, chosen, problem, form) == []
        room["expert_ids" if kind == "aligned" else "tiles"][0] += 1
        assert agreement.compare_plan(room, chosen, problem, form)
