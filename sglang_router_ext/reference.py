"""THE oracle: the contract in fp64, on whatever device the inputs are on. It imports no kernel and no dispatcher.

Every other part of the package is judged by this file through ``agreement.compare``; it is itself judged by rows worked by
hand (tests/cpu/test_reference.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_router_ext.contract import MIN_SCORE, NAN_KEY, PAD_ID, Problem, expect


class Truth(NamedTuple):
    """What the contract says for one batch; everything fp64 but the ids."""

    logits: torch.Tensor  # [rows, experts] fp64
    scores: torch.Tensor  # [rows, experts] fp64, NaN where the logit is NaN
    keys: torch.Tensor  # [rows, experts] fp64, NaN replaced by NAN_KEY
    ids: torch.Tensor  # [rows, topk] int64, descending key, the lower id on ties; -1 in padded rows; routed experts only
    weights: torch.Tensor  # [rows, topk] fp64; 0 in padded rows
    margin: torch.Tensor  # [rows] fp64, gap at the cut: last selected key - first rejected key; +inf if none is rejected
    magnitude: torch.Tensor | None  # [rows, experts] fp64, sum of |hidden x weight|; None where logits were given
    bias: torch.Tensor | None  # [experts] as it was given
    valid: int  # rows before the padding


def gate(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 logits [rows, experts] and the magnitude sum(|hidden x weight|) that error bounds are relative to."""
    wide, matrix = hidden.double(), weight.double().t()
    return wide @ matrix, wide.abs() @ matrix.abs()


def weigh(problem: Problem, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights [rows, topk] of given ids by given fp64 scores [rows, experts]; rows of padding (id -1) give 0."""
    chosen = scores.gather(1, ids.clamp(min=0))
    chosen = torch.where(chosen.isnan() | (ids < 0), 0.0, chosen)
    if problem.renormalize:
        total = chosen.sum(1, keepdim=True)
        chosen = chosen / torch.where(total > 0, total, 1.0)
    return chosen * problem.scale


def select(
    problem: Problem,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_token_non_padded: int | None = None,
    magnitude: torch.Tensor | None = None,
) -> Truth:
    """Scores, keys, ids, weights and margins of ``logits`` [rows, experts], any float dtype, by the contract."""
    expect(problem.score == "sigmoid", "score", problem.score, "sigmoid")
    expect(problem.groups == 1, "groups", problem.groups, "1")
    expect(logits.shape[1] == problem.experts, "logits", tuple(logits.shape), f"[rows, {problem.experts}]")
    wide = logits.double()
    scores = torch.sigmoid(wide)
    scores = torch.where(scores < MIN_SCORE, 0.0, scores)
    keys = scores if bias is None else scores + bias.double()
    keys = torch.where(keys.isnan(), NAN_KEY, keys)
    order = torch.sort(keys, dim=1, descending=True, stable=True)
    ids = order.indices[:, : problem.topk].clone()
    margin = torch.full(keys.shape[:1], float("inf"), dtype=torch.float64, device=keys.device)
    if problem.topk < problem.experts:
        margin = order.values[:, problem.topk - 1] - order.values[:, problem.topk]
        margin = torch.where(margin.isnan(), 0.0, margin)  # inf - inf: a tie
    valid = len(logits) if num_token_non_padded is None else max(0, min(num_token_non_padded, len(logits)))
    ids[valid:] = PAD_ID
    return Truth(wide, scores, keys, ids, weigh(problem, scores, ids), margin, magnitude, bias, valid)


def outputs(problem: Problem, truth: Truth) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and weights [rows, topk + shared], int32 and fp32, as a design returns them: shared slots behind the routed ones."""
    rows = len(truth.ids)
    shared = torch.arange(problem.experts, problem.experts + problem.shared, device=truth.ids.device).expand(rows, -1).clone()
    weight = torch.full((rows, problem.shared), problem.shared_weight, dtype=torch.float64, device=truth.ids.device)
    shared[truth.valid :], weight[truth.valid :] = PAD_ID, 0.0
    return torch.cat([truth.ids, shared], 1).int(), torch.cat([truth.weights, weight], 1).float()


def route(
    problem: Problem,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_token_non_padded: int | None = None,
) -> Truth:
    """The whole router in fp64: ``gate``, then ``select``."""
    logits, magnitude = gate(hidden, weight)
    return select(problem, logits, bias, num_token_non_padded=num_token_non_padded, magnitude=magnitude)
