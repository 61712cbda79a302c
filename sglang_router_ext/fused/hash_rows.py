"""``hash_rows``: logits, ids and weights of rows whose experts stand in a table by their tokens; see hash_rows.cuh."""

from __future__ import annotations

import torch

from sglang_router_ext import build
from sglang_router_ext.arguments import check_gate, check_per_row, check_selection
from sglang_router_ext.contract import Problem, Tokens
from sglang_router_ext.selection.warp_select import SCORES, outputs, per_row

HEADER = "fused/hash_rows.cuh"


def instance(problem: Problem) -> str:
    """The C++ instance that serves ``problem``."""
    return f"HashRows<{problem.topk}, ::rx::Score::{SCORES[problem.score]}>"


def hash_rows(
    problem: Problem,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    *,
    tokens: Tokens | None,
    num_token_non_padded: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``hidden`` [rows, hidden] bf16, ``weight`` [experts, hidden] bf16, ``tokens`` with their table -> logits [rows, experts]
    fp32, NaN but for a row's own experts, ids [rows, topk + shared] int32, weights [rows, topk + shared] fp32. ``bias``: there
    is none. ``packed`` [rows, topk + shared] int32, dense: written too.
    """
    check_gate("hash_rows", hidden, weight, problem)
    check_selection("hash_rows", problem, None, bias, num_token_non_padded, hidden.device)
    check_per_row(problem, len(hidden), tokens, packed, hidden.device)
    assert tokens is not None and tokens.table is not None
    logits = torch.empty((len(hidden), problem.experts), dtype=torch.float32, device=hidden.device)
    ids, weights = outputs(len(hidden), problem.slots, hidden.device)
    padding, packed, where, _ = per_row(ids[:0], num_token_non_padded, packed, tokens)
    rule = problem.scale, problem.shared_weight, problem.renormalize
    build.load(HEADER, instance(problem)).run(hidden, weight, tokens.table, where, logits, ids, weights, packed, padding, *rule)
    return logits, ids, weights
