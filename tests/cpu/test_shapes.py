"""What Python decides about a launch, over every shape that the contract allows: nothing falls between the instances."""

from __future__ import annotations

import statistics
from collections import defaultdict

import pytest
import torch

from sglang_router_ext.arguments import check_gate, vector_rows
from sglang_router_ext.bench import record
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.races import STABLE
from sglang_router_ext.bench.record import BenchRecord
from sglang_router_ext.choose import choose, groups_refused, reasons
from sglang_router_ext.contract import ContractError, Problem, gpu_by_name
from sglang_router_ext.designs import TABLE
from sglang_router_ext.gate.small_rows import CHUNK, MAX_SLICES, TUNED, config
from sglang_router_ext.selection.warp_select import groups, vectorised

SHAPES = 4
"""On record at a row count, so that their mean says something."""
HIDDEN = (*range(8, 1025, 8), 2688, 2880, 4096, 5120, 6144, 7168, 7176, 16384, TABLE["pair"].max_hidden or 0)


def test_a_warp_has_lanes_for_every_expert() -> None:
    for experts in range(1, (TABLE["warp_select"].max_experts or 0) + 1):
        assert experts <= 128 * groups(experts) <= 1024


@pytest.mark.parametrize("experts", [1, 7, 8, 60, 128, 255, 256, 257, 288, 384, 1024])
def test_every_gate_shape_has_a_division_that_covers_it(experts: int) -> None:
    for hidden in HIDDEN:
        found = config(experts, hidden)
        chunks = -(-hidden // CHUNK)
        assert 1 <= found.slices <= MAX_SLICES and found.slices <= chunks
        assert found.warps * 32 <= 1024
        if found.exact:  # one pass: no chunk is left and none is missing
            assert hidden % CHUNK == 0 and found.warps * found.depth * found.slices == chunks


def test_the_divisions_tuned_by_hand_are_exact() -> None:
    for (_, hidden), found in TUNED.items():
        assert found.exact and found.warps * found.depth * found.slices * CHUNK == hidden


def test_vector_access_is_told_by_address_and_stride() -> None:
    wide = torch.zeros(4, 40, dtype=torch.bfloat16)
    assert vector_rows(wide) and vector_rows(wide[:, 8:]) and vector_rows(wide[1:])
    assert not vector_rows(wide[:, 1:])
    odd = torch.zeros(4, 41, dtype=torch.bfloat16)
    assert not vector_rows(odd) and vector_rows(odd[:1])
    logits = torch.zeros(4, 44)
    assert vectorised(40, logits[:, :40]) and not vectorised(41, logits[:, :41]) and not vectorised(40, logits[:, 1:41])
    assert not vectorised(40, torch.zeros(4, 41)[:, :40]) and vectorised(40, torch.zeros(4, 41)[:1, :40])


def test_no_tensor_of_the_cpu_reaches_a_kernel() -> None:
    with pytest.raises(ContractError, match=r"^hidden: got .*allowed: a CUDA tensor"):
        check_gate("pair", torch.zeros(1, 64).bfloat16(), torch.zeros(8, 64).bfloat16())


def chosen(name: str, gpu: str, case: str, rows: int, *, plan: bool) -> bool:
    """Whether ``router_ext`` may take the design there."""
    return not reasons(TABLE[name], CASES[case].problem, rows, gpu_by_name(gpu), named=False, plan=plan)


def test_bands_are_where_the_records_show_no_loss_to_sglang() -> None:
    times = {
        (line.gpu, line.case, line.rows, line.design, line.stages): line.median_us
        for line in record.read_all()
        if isinstance(line, BenchRecord) and line.cache == "cold"
    }
    judged = 0
    for (gpu, case, rows, name, stages), median_us in times.items():
        if name in TABLE and chosen(name, gpu, case, rows, plan=stages == record.PLANNED or not TABLE[name].plans):
            peer = times.get((gpu, case, rows, record.HOST.get(stages), stages))
            judged += peer is not None
            assert peer is None or median_us < peer, f"{name} on {case} rows {rows}: {median_us}, {peer}"
    assert judged > 200


def test_groups_are_selected_from_only_where_every_warp_of_a_team_is_full() -> None:
    """The lanes of a warp share groups of 32; a team's warps have even shares of the experts."""
    for experts in range(128, 1025, 128):
        problem = Problem(experts=experts, hidden=4096, topk=8, groups=experts // 32, groups_kept=2)
        for design in (one for one in TABLE.values() if one.group_experts is not None):
            full = 128 * groups(experts) == experts
            assert (groups_refused(design, problem) is None) == full, f"{design.name}, {experts}"


@pytest.mark.parametrize("plan", [True, False])
def test_no_other_way_is_faster_over_the_shapes_on_record(plan: bool) -> None:
    """Bands know no shapes. So a design has one where the mean over those of bf16 weights, of its times by another's, is no
    loss; or one of less than races.STABLE to a way in which rows depend on their batch.
    """
    stages, times = record.PLANNED if plan else record.ROUTER, defaultdict[tuple[str, int], dict[str, dict[str, float]]](dict)
    for line in record.read_all():
        if isinstance(line, BenchRecord) and line.cache == "cold" and line.stages == stages and line.source_hash:
            times[line.gpu, line.rows].setdefault(line.case, {})[line.design] = line.median_us
    judged = 0
    for (gpu, rows), cases in times.items():
        ratios = defaultdict[str, list[float]](list)
        for case, found in cases.items():
            if CASES[case].problem.weight_dtype != "bfloat16":
                continue  # too few of them
            choice = choose(CASES[case].problem, rows, gpu_by_name(gpu), backend="router_ext", plan=plan)
            gate = choice.gate if choice.gate != "host" else "cublas_gemm"  # its twin
            mine = found.get(choice.fused or f"{gate}+{choice.selection}")
            for rival in found if mine is not None else ():
                ratios[rival].append(mine / found[rival])
        for rival, all_of in ratios.items():
            if len(all_of) >= SHAPES:
                stable = all(TABLE[name].row_stable for name in rival.split("+"))
                judged += 1
                assert statistics.geometric_mean(all_of) < (1.001 if stable else STABLE), f"{rival} at {rows} rows: {all_of}"
    assert judged > 30
