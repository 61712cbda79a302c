"""More rows than 32 bits count elements of, and more than a prefill has. Needs a CUDA GPU with some 40 GB."""

from __future__ import annotations

import pytest
import torch

from sglang_router_ext import reference
from sglang_router_ext.agreement import Result, compare, compare_plan
from sglang_router_ext.bench import machine
from sglang_router_ext.choose import reasons
from sglang_router_ext.contract import PlanForm, Problem
from sglang_router_ext.designs import TABLE
from sglang_router_ext.fused.select_plan import BYTE_ROWS, MOST_RANGES, select_plan
from sglang_router_ext.gate.tensor_core import tensor_core

ROWS = 65536
WIDE = Problem(experts=896, hidden=8, topk=16)
WIDE_ROWS = 2_400_000
SOME = 1000


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(shape[0])
    return torch.empty(shape, device="cuda").normal_(0.0, scale, generator=generator)


@pytest.mark.parametrize("experts", [288, 160, 60])
def test_a_gate_of_65536_rows_and_every_row_as_in_a_small_batch(experts: int) -> None:
    problem, design = Problem(experts=experts, hidden=4096, topk=8), TABLE["tensor_core"]
    refused = reasons(design, problem, ROWS, machine.gpu())
    if refused:
        pytest.skip("; ".join(refused))
    weight, hidden = drawn(experts, 4096, scale=0.01).bfloat16(), drawn(ROWS, 4096).bfloat16()
    logits = tensor_core(hidden, weight)
    for first in range(0, ROWS, 8192):
        rows = slice(first, first + 8192)
        truth = reference.route(problem, hidden[rows], weight, torch.zeros(experts, device="cuda"))
        assert compare(Result(logits[rows]), truth, problem, design) == []
    for first, count in ((0, 1), (1, 6), (77, 96), (4000, 1000), (65535, 1)):
        rows = slice(first, first + count)
        assert torch.equal(tensor_core(hidden[rows], weight).view(torch.int32), logits[rows].view(torch.int32))


@pytest.mark.parametrize("rows", [300, MOST_RANGES * BYTE_ROWS, MOST_RANGES * BYTE_ROWS + 1, 100_000])
@pytest.mark.parametrize(
    "form",
    [
        PlanForm(kind="aligned", block=128),
        PlanForm(kind="aligned", block=8, first_local=100, locals=500, counts_elsewhere=True),
        PlanForm(kind="tiles", block=16, first_local=895, locals=1),
    ],
)
def test_a_plan_from_counts_of_one_byte_and_of_two(rows: int, form: PlanForm) -> None:
    refused = reasons(TABLE["select_plan"], WIDE, rows, machine.gpu())
    if refused:
        pytest.skip("; ".join(refused))
    logits, bias = drawn(rows, WIDE.experts), drawn(WIDE.experts)
    logits[:, 895] += 3.0  # one expert has nearly every row
    padding = torch.tensor([rows - 7], dtype=torch.int32, device="cuda")
    ids, _weights, plan = select_plan(WIDE, logits, bias, num_token_non_padded=padding, form=form)
    assert compare_plan(plan, ids, WIDE, form) == []


def test_a_selection_and_its_plan_past_32_bits_of_elements() -> None:
    refused = reasons(TABLE["select_plan"], WIDE, WIDE_ROWS, machine.gpu())
    if refused:
        pytest.skip("; ".join(refused))
    logits, bias = drawn(WIDE_ROWS, WIDE.experts), drawn(WIDE.experts)
    assert logits.numel() > 2**31
    form = PlanForm(kind="aligned", block=64, counts_elsewhere=True)
    ids, weights, plan = select_plan(WIDE, logits, bias, form=form)
    for first in (0, WIDE_ROWS // 2, WIDE_ROWS - SOME):  # rows at both ends, as in a batch of their own
        rows = slice(first, first + SOME)
        few = select_plan(WIDE, logits[rows], bias, form=form)
        assert torch.equal(few[0], ids[rows]) and torch.equal(few[1], weights[rows])
    flat = ids.flatten()
    counts = torch.bincount(flat, minlength=WIDE.experts)
    blocks = (counts + form.block - 1) // form.block
    padded, elsewhere = plan["num_tokens_post_padded"].tolist()
    assert (padded, elsewhere) == (int(blocks.sum()) * form.block, 0)
    owners = torch.arange(WIDE.experts, device="cuda").repeat_interleave(blocks)
    assert torch.equal(plan["expert_ids"][: len(owners)].long(), owners)
    begins = (blocks.cumsum(0) - blocks) * form.block
    order = torch.sort(flat, stable=True)
    rank = torch.arange(len(flat), device="cuda") - (counts.cumsum(0) - counts)[order.values]
    want = torch.full((padded,), len(flat), dtype=torch.int32, device="cuda")
    want[begins[order.values] + rank] = order.indices.int()
    assert torch.equal(plan["sorted_token_ids"][:padded], want)
