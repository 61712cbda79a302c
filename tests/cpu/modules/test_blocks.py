"""From SGLang's selection to the count and sort of its experts: which plans are taken, and what is learnt."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.shared_experts import SharedExpertsConfig
from sglang.srt.layers.moe.fused_moe_triton import moe_align_block_size as align_of_marlin
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.runtime_context import get_model
from sglang_layer import EXPERTS, build, paths, reasons, rows_of

from sglang_router_ext import reference
from sglang_router_ext.contract import BLOCKS, PlanForm, Problem
from sglang_router_ext.plugin import blocks

PROBLEM = Problem(experts=EXPERTS, hidden=256, topk=6)


@pytest.fixture
def host():
    """SGLang's own count and sort, which needs a GPU, by the oracle."""
    asked = []

    def align(topk_ids, block_size, num_experts, ignore_invalid_expert=False, **options):
        asked.append((len(topk_ids), block_size))
        if block_size not in BLOCKS:
            return None
        counts = options["return_inactive_prefix_count"]
        form = PlanForm(kind="aligned", block=block_size, locals=num_experts, counts_elsewhere=counts)
        return tuple(reference.plan(PROBLEM, form, topk_ids).values())

    return asked, align


def ask(host, ids, block=16, experts=EXPERTS, **options):
    return blocks.take_blocks(host[1], ids, block, experts, **options)


def select(rows, layer):
    module, topk = layer
    hidden = rows_of(rows)
    return topk(hidden, module(hidden)).topk_ids


def test_the_first_call_teaches_and_the_second_takes(host):
    layer = build("router_ext_single")
    first = ask(host, select(5, layer))
    ids = select(5, layer)
    second = ask(host, ids)
    assert host[0] == [(5, 16)]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert paths().count(("plan", "reference:single")) == 1
    assert reasons("plan") == ["the first call at a row count shows the block size"]
    ask(host, select(7, layer))
    assert host[0] == [(5, 16), (7, 16)]


def test_marlins_form_is_another(host):
    layer = build("router_ext_single")
    for _ in range(2):
        found = ask(host, select(3, layer), 8, return_inactive_prefix_count=True)
    assert host[0] == [(3, 8)]
    assert len(found[2]) == 2


def test_one_row_of_marlin_is_sorted_by_another_function():
    asked = []

    def single_token(topk_ids, block_size, *, return_inactive_prefix_count=False):
        asked.append(block_size)
        form = PlanForm(kind="aligned", block=block_size, counts_elsewhere=return_inactive_prefix_count)
        return tuple(reference.plan(PROBLEM, form, topk_ids).values())

    layer = build("router_ext_single")
    first, second = (
        blocks.take_row_blocks(single_token, select(1, layer), 8, return_inactive_prefix_count=True) for _ in range(2)
    )
    assert asked == [8]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert paths().count(("plan", "reference:single")) == 1


def mapped(ids, first, count, order=1):
    """As SGLang's dispatcher maps them."""
    mapping = torch.full((EXPERTS,), -1, dtype=torch.int32)
    local = torch.arange(count, dtype=torch.int32)
    mapping[first : first + count] = local if order > 0 else local.flip(0)
    return blocks.follow_map(lambda i, m: torch.where(i < 0, -1, m[i.clamp_min(0)]), ids, mapping)


def test_the_ids_of_one_rank_keep_the_plan(host):
    layer, half = build("router_ext_single"), EXPERTS // 2
    first = ask(host, mapped(select(5, layer), half, half), experts=half)
    second = ask(host, mapped(select(5, layer), half, half), experts=half)
    assert host[0] == [(5, 16)]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert -1 in first[1].tolist() and paths().count(("plan", "reference:single")) == 1
    ask(host, mapped(select(5, layer), 0, half), experts=half)
    assert reasons("plan")[-1] == "another block size or other experts than before"
    ask(host, mapped(select(5, layer), 0, half), experts=half + 1)
    assert reasons("plan")[-1] == "another number of local experts than the map's"


def test_rows_that_sglang_masks_in_place_void_the_plan(host):
    """Its CUDA kernel raises no version, which the CPU's branch does; so the hook must be what speaks."""
    module, topk = build("router_ext_single")
    hidden = rows_of(5)
    for _ in range(2):
        ids = topk(hidden, module(hidden), num_token_non_padded=torch.tensor([3])).topk_ids
        ask(host, ids)
    assert ids[3:].eq(-1).all()
    assert reasons("plan") == [blocks.PADDED]
    assert paths().count(("plan", "reference:single")) == 0


def test_a_simulated_routing_voids_the_plan(host, monkeypatch):
    from sglang.srt.layers.moe import topk as sglang_topk

    layer = build("router_ext_single")
    ask(host, select(5, layer))
    ids = select(5, layer)
    monkeypatch.setattr(sglang_topk, "routing_simulation_enabled", lambda: True)
    output = sglang_topk.StandardTopKOutput(torch.ones(5, 6), ids, torch.ones(5, EXPERTS))
    assert blocks.selected(lambda *_args, **_options: output, ids, ids, layer[1].topk_config) is output
    ask(host, ids)
    assert reasons("plan")[-1] == blocks.SIMULATED


def test_ids_keep_their_plan_where_fused_shared_experts_are_put_behind_them(host):
    """SGLang cuts the shared slots off and puts them back, which makes new ids of the same ones."""
    problem = Problem(experts=EXPERTS, hidden=256, topk=6, shared=1)

    def align(topk_ids, block_size, num_experts, *_args, return_inactive_prefix_count=False, **_options):
        host[0].append(len(topk_ids))
        form = PlanForm(kind="aligned", block=block_size, locals=num_experts, counts_elsewhere=return_inactive_prefix_count)
        return tuple(reference.plan(problem, form, topk_ids).values())

    with get_model().override(shared_experts=SharedExpertsConfig(num_fused_shared_experts=1)):
        layer = build("router_ext_single")
        for rows, moved in ((5, False), (7, True)):
            for _ in range(2):
                hidden, before = rows_of(rows), len(host[0])
                logits = layer[0](hidden)
                ids = layer[1](hidden, logits).topk_ids
                assert ids.shape == (rows, 7) and ids[:, 6].eq(EXPERTS).all()
                if moved:
                    ids = ids + 0  # whoever makes them anew later speaks for nobody
                found = blocks.take_blocks(align, ids, 16, EXPERTS + 1)
                for a, b in zip(found, align(ids, 16, EXPERTS + 1), strict=True):
                    assert torch.equal(a, b)
            assert len(host[0]) - before == (2 if moved else 1)
    assert paths().count(("plan", "reference:single")) == 1


@pytest.mark.parametrize("shared", [0, 1])
def test_a_compiler_traces_sglangs_own_selection(shared):
    """In a thread of its own, where no select_experts has run before: what this thread keeps is not the compiler's business."""
    found = []

    def compiled():
        with (
            torch.no_grad(),
            torch.compiler.set_stance("default"),
            get_model().override(shared_experts=SharedExpertsConfig(num_fused_shared_experts=shared)),
        ):
            module, topk = build("router_ext_single")
            run = torch.compile(lambda hidden: topk(hidden, module(hidden)).topk_ids, backend="eager")
            hidden = rows_of(5)
            found.extend(run(hidden) for _ in range(3))

    thread = threading.Thread(target=compiled)
    thread.start()
    thread.join()
    assert len(found) == 3
    for ids in found:
        assert ids.shape == (5, 6 + shared)
        assert blocks.CARRIED not in ids.__dict__


def test_mapped_ids_of_fused_shared_experts_have_no_plan(host, monkeypatch):
    from sglang.srt.layers.moe import topk as sglang_topk

    with get_model().override(shared_experts=SharedExpertsConfig(num_fused_shared_experts=1)):
        module, topk = build("router_ext_single")
        hidden = rows_of(5)
        monkeypatch.setattr(sglang_topk, "topk_ids_logical_to_physical", lambda ids, _info, *_: ids.flip(1))
        ids = topk(
            hidden, module(hidden), expert_location_dispatch_info=SimpleNamespace(ep_dispatch_algorithm="static")
        ).topk_ids
    assert blocks.CARRIED not in ids.__dict__


def test_rows_masked_behind_the_dispatcher_void_the_plan(host):
    layer, half = build("router_ext_single"), EXPERTS // 2
    ask(host, mapped(select(5, layer), 0, half), experts=half)
    ids = mapped(select(5, layer), 0, half)
    blocks.rows_masked(ids)
    ask(host, ids, experts=half)
    assert reasons("plan")[-1] == blocks.PADDED
    void = select(5, layer)
    blocks.rows_masked(void)
    ask(host, mapped(void, 0, half), experts=half)  # and what is made of them
    assert paths().count(("plan", "reference:single")) == 0


def test_a_map_of_inference_mode_has_no_version(host):
    with torch.inference_mode():
        mapping = torch.arange(EXPERTS, dtype=torch.int32)
    ids = select(5, build("router_ext_single"))
    local = blocks.follow_map(lambda i, m: torch.where(i < 0, -1, m[i.clamp_min(0)]), ids, mapping)
    assert blocks.CARRIED not in local.__dict__


def test_a_capture_without_words_is_given_to_another_design(host, monkeypatch):
    from sglang_router_ext.plugin import layer as layers
    from sglang_router_ext.plugin.reference_mode import Oracle

    layer = build("router_ext_single")
    ask(host, select(5, layer))
    monkeypatch.setattr(Oracle, "ready", lambda _self, choice, *_: choice.fused != "single")
    ask(host, select(5, layer))
    assert reasons("plan")[-1] == blocks.NO_BLOCKS
    assert paths().count(("selection", "reference:pair")) == 1
    assert layer[0].__dict__[layers.LINK]._spares[layers.NO_WORDS].choice(5).losers["single"] == [layers.NO_WORDS]


def test_only_a_design_that_uses_words_waits_for_some(monkeypatch):
    from sglang_router_ext.bench.cases import CASES
    from sglang_router_ext.choose import Choice
    from sglang_router_ext.fused import single
    from sglang_router_ext.plugin.layer import Kernels

    monkeypatch.setattr(single, "ready", lambda *_: False)
    problem, device = CASES["glm-5.3-flash"].problem, torch.device("cpu")
    found = {
        gate: Kernels().ready(Choice(gate, selection), problem, 64, None, device, None)
        for gate, selection in (("single", "single"), ("tensor_pair", "tensor_pair"), ("cublas_gemm", "select_plan"))
    }
    assert found == {"single": False, "tensor_pair": True, "cublas_gemm": True}


def test_ranks_without_neighbouring_experts_are_not_planned_for(host):
    layer, half = build("router_ext_single"), EXPERTS // 2
    ask(host, mapped(select(5, layer), 0, half, order=-1), experts=half)
    changed = select(5, layer)
    changed.add_(0)
    ask(host, mapped(changed, 0, half), experts=half)
    assert reasons("plan") == [blocks.NO_BLOCKS] * len(reasons("plan"))


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (lambda ids: ids, {"block": 32}, "another block size or other experts than before"),
        (lambda ids: ids, {"experts": EXPERTS - 1}, "another block size or other experts than before"),
        (lambda ids: ids, {"experts": EXPERTS + 1}, "experts that the router does not know"),
        (lambda ids: ids, {"ignore_invalid_expert": True}, "another contract for experts elsewhere"),
        (lambda ids: ids, {"pad_expert_ids": True}, "another contract for experts elsewhere"),
        (lambda ids: ids, {"block": 24}, "blocks of 24"),
        (lambda ids: ids.clone(), {}, blocks.NO_BLOCKS),
        (lambda ids: ids.add_(0), {}, "the ids were changed since"),
    ],
)
def test_a_plan_for_another_question_is_refused(host, change, options, reason):
    layer = build("router_ext_single")
    ask(host, select(4, layer))
    ids = change(select(4, layer))
    before = len(host[0])
    ask(host, ids, **options)
    assert len(host[0]) == before + 1
    assert reasons("plan")[-1] == reason


def test_other_designs_plan_nothing(host):
    ask(host, select(4, build("router_ext_pair")))
    assert reasons("plan") == [blocks.NO_BLOCKS]
    ask(host, select(200, build("router_ext_pair")))
    assert reasons("plan") == [blocks.NO_BLOCKS]


def test_many_rows_are_planned_for_and_those_of_like_size_share_what_was_learned(host):
    layer = build("router_ext_single")
    first = ask(host, select(200, layer))
    for a, b in zip(first, ask(host, select(200, layer)), strict=True):
        assert torch.equal(a[: len(b)], b)
    ask(host, select(193, layer))
    assert host[0] == [(200, 16)]
    assert paths().count(("plan", "reference:tensor_pair")) == 1
    ask(host, select(300, layer))  # of another size
    assert reasons("plan") == ["the first call at a row count shows the block size"]
    ask(host, select(256, layer), block=64)  # SGLang asks something else: what it asks now is learned
    ask(host, select(256, layer), block=64)
    assert reasons("plan")[-1] == "another block size or other experts than before"
    assert host[0] == [(200, 16), (300, 16), (256, 64)]


def test_every_importer_asks_us(host):
    for function in (fused_moe.moe_align_block_size, align_of_marlin):
        step, cells = function, []
        while step is not None:
            cells += [cell.cell_contents for cell in getattr(step, "__closure__", None) or ()]
            step = getattr(step, "__wrapped__", None)
        assert any(getattr(cell, "__name__", "") == "take_blocks" for cell in cells)
