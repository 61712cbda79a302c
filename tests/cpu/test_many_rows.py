"""Rows without end: how launches are divided, what deterministic inference takes, and when a plan is known ahead."""

from __future__ import annotations

import pytest

from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.choose import BATCHED, Choice, choose
from sglang_router_ext.contract import ContractError, PlanForm, gpu_by_name
from sglang_router_ext.designs import DESIGNS, TABLE
from sglang_router_ext.fused.select_plan import MOST_PLANNERS, MOST_RANGES, PLANNED_ROWS, block_rows, range_rows
from sglang_router_ext.fused.tensor_pair import Tile, tile, wide
from sglang_router_ext.gate.tensor_core import SPLIT, TILE_ROWS, WIDTHS, Way, way, widths
from sglang_router_ext.plugin.blocks import Forms
from sglang_router_ext.route import Route

H200 = gpu_by_name("h200")
PROCESSORS = 132
COUNTS = (*range(1, 1025), 1536, 2048, 2049, 4096, 4097, 8192, 65536, 2_400_000)
GLM, WIDE, HASHED = (CASES[name].problem for name in ("glm-5.3-flash", "glm-4.6", "deepseek-v4-hash"))


@pytest.mark.parametrize("experts", [1, 8, 60, 64, 72, 128, 160, 256, 257, 288, 384, 512, 896, 1024])
def test_blocks_have_all_experts_and_few_that_are_not_there(experts: int) -> None:
    for width in widths(experts):
        assert width % 8 == 0 and 64 <= width <= 160
        assert -(-experts // width) * width - experts < width
    narrow, middle = widths(experts)
    assert narrow <= middle


@pytest.mark.parametrize("experts", [8, 128, 160, 256, 288, 384, 896])
def test_a_launch_starts_at_once_as_long_as_there_is_a_way(experts: int) -> None:
    narrow, middle = (-(-experts // width) for width in widths(experts))
    ways = [way(rows, experts, PROCESSORS) for rows in COUNTS]
    assert ways == sorted(ways)  # never back to a way of more blocks
    for rows, how in zip(COUNTS, ways, strict=True):
        tiles = -(-rows // TILE_ROWS)
        blocks = {
            Way.NARROW: tiles * narrow * SPLIT,
            Way.MIDDLE: tiles * middle * SPLIT / 2,  # two on a multiprocessor
            Way.HALVES: tiles * middle * 2,
            Way.ALONE: tiles * middle,
        }.get(how, 0)
        assert blocks <= PROCESSORS


@pytest.mark.parametrize("experts", [1, 64, 160, 256, 288, 384, 896, 1024])
def test_a_pair_of_few_rows_starts_at_once(experts: int) -> None:
    tiles = [tile(rows, experts, PROCESSORS) for rows in range(1, 1025)]
    assert tiles == sorted(tiles) and tiles[0] == Tile.NARROW
    for rows, which in enumerate(tiles, 1):
        if which != Tile.TALL:
            width = widths(experts)[which]
            assert -(-rows // TILE_ROWS) * -(-experts // width) * SPLIT <= 2 * PROCESSORS
    assert wide(experts) in WIDTHS and -(-experts // wide(experts)) <= -(-experts // widths(experts)[1])


def test_every_row_is_in_a_range_and_counts_fit_into_sixteen_bits() -> None:
    for rows in COUNTS:
        each, planned = range_rows(rows), block_rows(rows)
        ranges = -(-rows // each)
        assert (ranges - 1) * each < rows <= ranges * each
        assert ranges <= MOST_RANGES and each < 2**16
        assert planned % each == 0 and planned >= PLANNED_ROWS and -(-rows // planned) <= MOST_PLANNERS


def bits(choice: Choice) -> tuple[str, ...]:
    """The designs whose bits a choice gives."""
    chosen = dict.fromkeys((choice.gate, choice.selection))
    return tuple(name for design in chosen for name in (TABLE[design].twins or (design,)))


@pytest.mark.parametrize("backend", ["router_ext", "router_ext_pair", "router_ext_single"])
@pytest.mark.parametrize("plan", [True, False])
def test_deterministic_inference_has_the_same_bits_at_all_row_counts(backend: str, plan: bool) -> None:
    for rows in (1, 6, 16, 17, 96, 97, 1000, 1024, 1025, 8192, 65536):
        choice = choose(GLM, rows, H200, backend=backend, plan=plan, deterministic=True)
        assert bits(choice) == ("tensor_core", "warp_select")
        assert BATCHED in choice.losers["single" if backend != "router_ext_pair" else "pair"]
        assert choice.fused == ("tensor_pair" if rows <= 1024 and backend != "router_ext_pair" else None)
        plans = TABLE[choice.selection].plans
        assert plans == (choice.fused is not None or (plan and backend != "router_ext_pair"))


def test_what_deterministic_inference_cannot_take_is_sglangs() -> None:
    wide = choose(WIDE, 6, H200, backend="router_ext", deterministic=True)
    assert wide.gate == "host" and TABLE[wide.selection].any_batch
    hashed = choose(HASHED, 6, H200, backend="router_ext", deterministic=True)
    assert (hashed.gate, hashed.selection) == ("tensor_core", "host")  # SGLang's selection, of logits that are row-stable
    named = choose(GLM, 6, H200, backend=None, gate="cublas_gemm", deterministic=True)
    assert named.gate == "host" and BATCHED in named.losers["cublas_gemm"]
    assert choose(GLM, 6, H200, backend=None, gate="tensor_core", deterministic=True).gate == "tensor_core"


def test_designs_for_any_batch_give_bits_that_all_row_counts_have() -> None:
    found = {design.name for design in DESIGNS if design.any_batch}
    assert found == {"tensor_core", "warp_select", "select_plan", "tensor_pair", "triton_select"}
    for name in found:
        assert all(TABLE[one].rows.last is None and TABLE[one].row_stable for one in TABLE[name].twins or (name,))


def test_a_selection_plans_only_where_experts_take_a_plan() -> None:
    route = Route(GLM, H200, backend="router_ext_single")
    assert route.plans(4096) and not route.plans(4096, plan=False)
    assert route.choice(4096).selection == "select_plan"
    assert route.choice(4096, plan=False).selection == "warp_select"


def test_deterministic_inference_takes_nothing_that_is_on_trial_and_nothing_without_its_twins() -> None:
    for name in ("a100", "h200"):
        lost = dict.fromkeys((one.name for one in DESIGNS if one.compiled), "no compiler")
        choice = choose(GLM, 6, gpu_by_name(name), backend="router_ext", deterministic=True, unavailable=lost)
        assert (choice.gate, choice.selection) == ("host", "host")
    for twin in ("tensor_core", "warp_select"):
        choice = choose(GLM, 1000, H200, backend="router_ext", deterministic=True, unavailable={twin: "lost"})
        assert "lost" in choice.losers["tensor_pair"] and choice.selection != "tensor_pair"


def test_prefills_of_like_size_share_what_was_learned_of_their_plan() -> None:
    forms, small, large = Forms(), PlanForm(kind="aligned", block=64), PlanForm(kind="aligned", block=128)
    for rows in (127, 128, 200, 8000):
        forms[rows] = small
    assert [forms[rows] for rows in (126, 127, 128)] == [None, small, small]
    assert [forms[rows] for rows in (129, 256, 257, 7936, 7937, 8064, 8065)] == [small, small, None, None, small, small, None]
    forms[128] = large  # a row count by itself may change its mind
    assert forms[128] == large


def test_prefills_of_like_size_that_ask_for_different_plans_settle() -> None:
    forms, small, large = Forms(), PlanForm(kind="aligned", block=64), PlanForm(kind="aligned", block=128)
    asked = {200: small, 250: large, 256: large, 257: small}
    seen = []
    for _ in range(4):
        for rows, form in asked.items():
            seen.append(forms[rows] == form)
            forms[rows] = form
    assert all(seen[len(asked) * 2 :])  # the first turn teaches, in the second they are known to be mixed


def test_a_selection_that_plans_names_a_wrong_form() -> None:
    with pytest.raises(ContractError, match="block: got 24"):
        PlanForm(kind="aligned", block=24)
