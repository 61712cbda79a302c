"""``triton_select``: the selection in Triton, one program a row, for machines without a CUDA compiler and other CUDA GPUs.

It runs the contract's rules in the same order as warp_select.cuh: ordered integer keys, one maximum a round, the lower id on
ties. Under ``TRITON_INTERPRET=1`` it runs on CPU tensors, which is how machines without a GPU test it.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from sglang_router_ext.arguments import check_cuda, check_selection
from sglang_router_ext.contract import MIN_SCORE, NAN_KEY, Problem
from sglang_router_ext.selection.warp_select import outputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def sigmoid(logit):
    """1 / (1 + exp(-logit)) within 4 * 2^-23. exp goes through 2^n * exp(r), |r| <= ln(2) / 2: the rounding of logit * log2(e)
    alone would grow to 2^-20 of the score at logit -18.
    """
    x = tl.minimum(tl.maximum(-logit, -88.0), 88.0)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - n * 0.693359375) + n * 2.12194440e-4  # ln(2) in two parts; the first product is exact
    power = tl.exp(rest) * tl.exp2(n)
    score = tl.where(logit < -87.33654, 0.0, 1.0 / (1.0 + power))
    return tl.where(logit == logit, score, logit)


@triton.jit
def triton_select_kernel(
    logits_ptr,  # [rows, experts] fp32
    bias_ptr,  # [experts] fp32
    ids_ptr,  # [rows, topk + shared] int32
    weights_ptr,  # [rows, topk + shared] fp32
    num_token_non_padded_ptr,  # [1] int32, read if HAS_PADDING
    row_stride,
    scale,
    shared_weight,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    SLOTS_POW2: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    NAN_RANKS_AS: tl.constexpr,
    SMALLEST_SCORE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_POW2)
    inside = expert < EXPERTS
    logit = tl.load(logits_ptr + row * row_stride + expert, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + expert, mask=inside, other=0.0)

    score = sigmoid(logit)
    score = tl.where(score < SMALLEST_SCORE, 0.0, score)
    key = score + bias
    key = tl.where(key == key, key + 0.0, NAN_RANKS_AS)  # + 0.0: -0 and +0 are one key
    score = tl.where(score == score, score, 0.0)

    # Order-preserving integers, above 0: 0 marks an expert that is taken or does not exist.
    bits = key.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, ~bits.to(tl.int64) & 0xFFFFFFFF, (bits.to(tl.int64) & 0xFFFFFFFF) + 0x80000000)
    order = tl.where(inside, order, 0)

    slot = tl.arange(0, SLOTS_POW2)
    ids = EXPERTS + slot - TOPK  # of the shared experts, behind the routed ones
    weights = tl.zeros([SLOTS_POW2], tl.float32)
    for k in tl.static_range(TOPK):
        top = tl.max(order, 0)
        winner = tl.min(tl.where(order == top, expert, EXPERTS_POW2), 0)
        ids = tl.where(slot == k, winner, ids)
        weights = tl.where(slot == k, tl.sum(tl.where(expert == winner, score, 0.0), 0), weights)
        order = tl.where(expert == winner, 0, order)

    if RENORMALIZE:
        total = tl.sum(weights, 0)
        weights = weights / tl.where(total > 0.0, total, 1.0)
    weights = tl.where(slot < TOPK, weights * scale, shared_weight)
    if HAS_PADDING:
        live = row < tl.load(num_token_non_padded_ptr)
        ids = tl.where(live, ids, -1)
        weights = tl.where(live, weights, 0.0)
    tl.store(ids_ptr + row * SLOTS + slot, ids, mask=slot < SLOTS)
    tl.store(weights_ptr + row * SLOTS + slot, weights, mask=slot < SLOTS)


def triton_select(
    problem: Problem,
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    num_token_non_padded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits`` [rows, experts] fp32, ``bias`` [experts] fp32 -> ids and weights [rows, topk + shared], int32 and fp32."""
    if not INTERPRETED:
        check_cuda("logits", logits)
    check_selection("triton_select", problem, logits, bias, num_token_non_padded, logits.device)
    ids, weights = outputs(len(logits), problem.slots, logits.device)
    if len(logits) == 0:
        return ids, weights
    triton_select_kernel[(len(logits),)](
        logits,
        bias,
        ids,
        weights,
        ids if num_token_non_padded is None else num_token_non_padded,
        logits.stride(0),
        problem.scale,
        problem.shared_weight,
        EXPERTS=problem.experts,
        TOPK=problem.topk,
        SLOTS=problem.slots,
        EXPERTS_POW2=triton.next_power_of_2(problem.experts),
        SLOTS_POW2=triton.next_power_of_2(problem.slots),
        RENORMALIZE=problem.renormalize,
        HAS_PADDING=num_token_non_padded is not None,
        NAN_RANKS_AS=NAN_KEY,
        SMALLEST_SCORE=MIN_SCORE,
        num_warps=1 if problem.experts <= 512 else 4,
    )
    return ids, weights
