"""``tensor_pair``: gate and selection for some hundred rows in two launches, the plan in a third; see tensor_pair.cuh."""

from __future__ import annotations

import enum

import torch

from sglang_router_ext import build
from sglang_router_ext.arguments import check_gate, check_per_row, check_selection
from sglang_router_ext.contract import PlanForm, Problem, Tokens
from sglang_router_ext.fused import select_plan
from sglang_router_ext.fused.single import FORMATS
from sglang_router_ext.gate.tensor_core import SPLIT, TILE_ROWS, WIDTHS, processors, widths
from sglang_router_ext.selection.warp_select import groups, outputs, per_row, scalars, template, vectorised

HEADER = "fused/tensor_pair.cuh"


class Tile(enum.IntEnum):
    """What a block of the gate has; the terms are those of tensor_pair.cuh. It changes no bit of the result.

    What lost: two slices a block, so that half as many sums are written and read (1,024 rows: 14.3 us where it is 14.5), since
    the selection has another instance for them.
    """

    NARROW, MIDDLE, TALL = range(3)


def tile(rows: int, experts: int, most: int) -> Tile:
    """The first, of ever fewer blocks, that starts at once, two a multiprocessor; or the last."""
    tiles, (narrow, middle) = -(-rows // TILE_ROWS), widths(experts)
    for which, width in ((Tile.NARROW, narrow), (Tile.MIDDLE, middle)):
        if tiles * -(-experts // width) * SPLIT <= 2 * most:
            return which
    return Tile.TALL


def wide(experts: int) -> int:
    """Experts of a block of 128 rows: an instruction's, so that there are few blocks, and few of its columns are nobody's."""
    each = -(-experts // -(-experts // WIDTHS[-1]))
    return next(width for width in WIDTHS if width >= each)


def instance(problem: Problem, vector: bool, kind: str | None) -> str:
    """The C++ instance that serves ``problem`` and a format."""
    narrow, middle = widths(problem.experts)
    of_gate = f"{narrow}, {middle}, {wide(problem.experts)}"
    return f"TensorPair<{of_gate}, {template(problem, vector)}, ::rx::PlanFormat::{FORMATS[kind]}>"


def tensor_pair(
    problem: Problem,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_token_non_padded: torch.Tensor | None = None,
    tokens: Tokens | None = None,
    packed: torch.Tensor | None = None,
    form: PlanForm | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """``hidden`` [rows, hidden] bf16, ``weight`` [experts, hidden] bf16, ``bias`` [experts] fp32 or None ->
    logits [rows, experts] fp32, ids [rows, topk + shared] int32, weights [rows, topk + shared] fp32, and the plan of ``form``
    by the names of :func:`~sglang_router_ext.reference.plan` ({} without one). ``tokens`` and ``packed``: as ``warp_select``
    takes them.
    """
    check_gate("tensor_pair", hidden, weight, problem)
    check_selection("tensor_pair", problem, None, bias, num_token_non_padded, hidden.device)
    check_per_row(problem, len(hidden), tokens, packed, hidden.device)
    rows, experts, device = len(hidden), problem.experts, hidden.device
    plan, counts, tensors, asked = select_plan.room(problem, rows, form, device)
    sums = torch.empty((rows, SPLIT, 128 * groups(experts)), dtype=torch.float32, device=device)
    logits = torch.empty((rows, experts), dtype=torch.float32, device=device)
    ids, weights = outputs(rows, problem.slots, device)
    none = ids[:0]
    more = per_row(none, num_token_non_padded, packed, tokens)
    module = build.load(HEADER, instance(problem, vectorised(experts, bias), None if form is None else form.kind))
    add, numbers = none if bias is None else bias, scalars(problem, tokens)
    which = int(tile(rows, experts, processors(device)))
    module.run(hidden, weight, add, sums, logits, ids, weights, *more, counts, *tensors, *numbers, *asked, which)
    return logits, ids, weights, plan
