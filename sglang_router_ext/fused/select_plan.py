"""``select_plan``: selection and plan of any number of rows in two launches, the second from what the first counted; see
select_plan.cuh.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_router_ext import build
from sglang_router_ext.arguments import check_cuda, check_per_row, check_selection
from sglang_router_ext.contract import PLAN_SLOTS, PlanForm, Problem, Tokens, expect
from sglang_router_ext.fused.single import FORMATS, NAMES, empty_plan
from sglang_router_ext.selection.warp_select import outputs, per_row, scalars, template, vectorised

HEADER = "fused/select_plan.cuh"
MOST_RANGES = 128
"""Ranges of rows that are selected and counted by a block each: every block of the plan reads all counts."""
BYTE_ROWS = 255
"""Up to here a range's counts are bytes, and else of 16 bits."""
MOST_PLANNERS, PLANNED_ROWS = 128, 32
"""Blocks of the plan at most, and the rows that one has at least."""


def range_rows(rows: int) -> int:
    """Rows that a block selects and counts."""
    return max(2, -(-rows // MOST_RANGES))


def block_rows(rows: int) -> int:
    """Rows that a block of the plan places: those of some ranges."""
    each = range_rows(rows)
    return -(-max(PLANNED_ROWS, -(-rows // MOST_PLANNERS)) // each) * each


def instance(problem: Problem, vector: bool, kind: str) -> str:
    """The C++ instance that serves ``problem`` and a format."""
    return f"SelectPlan<{template(problem, vector)}, ::rx::PlanFormat::{FORMATS[kind]}>"


class Room(NamedTuple):
    """Where the kernels write a plan, and what they are asked for."""

    plan: dict[str, torch.Tensor]  # by the names of reference.plan; {} of none
    counts: torch.Tensor  # [ranges, words] int32: slots of each range
    tensors: list[torch.Tensor]  # those of the plan, and others in place of those that a format has not
    asked: tuple[int, int, int, int, int]  # block, first_local, locals, rows of a range and of a block of the plan


def room(problem: Problem, rows: int, form: PlanForm | None, device: torch.device) -> Room:
    """Unwritten tensors for the plan of ``rows`` rows. Raises ContractError for a form that does not fit."""
    none = torch.empty(0, dtype=torch.int32, device=device)
    if form is None:
        return Room({}, none, [none] * len(NAMES["tiles"]), (1, 0, 0, 1, 1))
    expect(isinstance(form, PlanForm), "form", type(form).__name__, "a PlanForm")
    locals_ = form.local_experts(problem)
    last = form.first_local + locals_
    expect(problem.slots <= PLAN_SLOTS, "topk", f"{problem.slots} slots", f"at most {PLAN_SLOTS} of a row, with a plan")
    got = f"experts {form.first_local} to {last - 1}"
    expect(last <= problem.experts + problem.shared, "locals", got, f"those of {problem}")
    places = rows * problem.slots + (locals_ + 1) * form.block
    expect(places < 2**31, "rows", rows, f"fewer than 2^31 places, {problem.slots} slots a row")
    expect(range_rows(rows) < 2**16, "rows", rows, "at most 8,388,480 with a plan: a range's counts have 16 bits")
    plan, each = empty_plan(problem, form, rows, device), range_rows(rows)
    per = 4 if each <= BYTE_ROWS else 2
    words = -(-(locals_ + per) // (4 * per)) * 4  # the first is of slots elsewhere
    counts = torch.empty((-(-rows // each), words), dtype=torch.int32, device=device)
    tensors = [*plan.values(), *[none] * (len(NAMES["tiles"]) - len(plan))]
    return Room(plan, counts, tensors, (form.block, form.first_local, locals_, each, block_rows(rows)))


def select_plan(
    problem: Problem,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_token_non_padded: torch.Tensor | None = None,
    tokens: Tokens | None = None,
    packed: torch.Tensor | None = None,
    form: PlanForm,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """``logits`` [rows, experts] fp32, ``bias`` [experts] fp32 or None -> ids [rows, topk + shared] int32, weights fp32, and
    the plan of ``form`` by the names of :func:`~sglang_router_ext.reference.plan`. The rest: as ``warp_select`` takes it.
    """
    check_cuda("logits", logits)
    check_selection("select_plan", problem, logits, bias, num_token_non_padded, logits.device)
    check_per_row(problem, len(logits), tokens, packed, logits.device)
    rows, device = len(logits), logits.device
    expect(form is not None, "form", form, "a PlanForm")
    expect(rows > 0, "logits", f"{rows} rows", "one row or more")
    plan, counts, tensors, asked = room(problem, rows, form, device)
    ids, weights = outputs(rows, problem.slots, device)
    none = ids[:0]
    module = build.load(HEADER, instance(problem, vectorised(problem.experts, logits, bias), form.kind))
    more = per_row(none, num_token_non_padded, packed, tokens)
    add, numbers = none if bias is None else bias, scalars(problem, tokens)
    module.run(logits, add, ids, weights, *more, counts, *tensors, *numbers, *asked)
    return ids, weights, plan
