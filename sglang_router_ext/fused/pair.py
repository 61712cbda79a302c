"""``pair``: gate and selection for 1 to 16 rows in two launches chained by PDL; see pair.cuh."""

from __future__ import annotations

import torch

from sglang_router_ext import build
from sglang_router_ext.arguments import check_gate, check_per_row, check_selection
from sglang_router_ext.contract import Problem, Tokens
from sglang_router_ext.gate.small_rows import config
from sglang_router_ext.selection.warp_select import groups, outputs, per_row, scalars, template, vectorised

HEADER = "fused/pair.cuh"


def instance(problem: Problem, vector: bool) -> str:
    """The C++ instance that serves ``problem``."""
    split = config(problem.experts, problem.hidden, problem.wide)
    return f"Pair<{split.template}, {split.slices}, {template(problem, vector)}>"


def pair(
    problem: Problem,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_token_non_padded: torch.Tensor | None = None,
    tokens: Tokens | None = None,
    packed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``hidden`` [rows, hidden] bf16, ``weight`` [experts, hidden] bf16 or fp32, ``bias`` [experts] fp32 or None ->
    logits [rows, experts] fp32, ids [rows, topk + shared] int32, weights [rows, topk + shared] fp32.
    ``tokens`` and ``packed``: as ``warp_select`` takes them.
    """
    check_gate("pair", hidden, weight, problem)
    check_selection("pair", problem, None, bias, num_token_non_padded, hidden.device)
    check_per_row(problem, len(hidden), tokens, packed, hidden.device)
    rows, experts, device = len(hidden), problem.experts, hidden.device
    slices = config(experts, problem.hidden, problem.wide).slices
    sums = torch.empty((rows, slices, 128 * groups(experts)), dtype=torch.float32, device=device)
    logits = torch.empty((rows, experts), dtype=torch.float32, device=device)
    ids, weights = outputs(rows, problem.slots, device)
    none = ids[:0]
    more = per_row(none, num_token_non_padded, packed, tokens)
    module = build.load(HEADER, instance(problem, vectorised(experts, bias)))
    add = none if bias is None else bias
    module.run(hidden, weight, add, sums, logits, ids, weights, *more, *scalars(problem, tokens))
    return logits, ids, weights
