"""``split_gemm``: an fp32 gate weight on the bf16 tensor cores, for any number of rows.

Three bf16 make up the weight exactly: ``weight = high + middle / 2^7 + low / 2^15``, each the first 8 significant bits of what
those before it left. Their products with a bf16 are exact in fp32, so nothing is lost but what additions round. One GEMM
multiplies all three, stacked, and a kernel adds its columns. The weight is split again at every call: that costs a read of it,
and no copy goes stale when it is updated in place.

Under ``TRITON_INTERPRET=1`` it runs on CPU tensors, which is how machines without a GPU test it.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from sglang_router_ext.arguments import check_gate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SPLIT = 1024  # elements of the weight that a program splits
ADD_ROWS, ADD_EXPERTS = 32, 32  # logits that a program adds


@triton.jit
def first_bits(value):
    """The bf16 next to fp32 ``value`` toward zero, which no finite value leaves for infinity, as the low half of an int32."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value == value, bits, 0x7FC00000)  # a NaN must not lose the bits that make it one
    return (bits >> 16) & 0xFFFF


@triton.jit
def widened(bits):
    """fp32 of a bf16 as ``first_bits`` gives it."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def split_weight_kernel(
    weight_ptr,  # [experts, hidden] fp32
    parts_ptr,  # [3 * experts, hidden] bf16 as int16: high, middle, low
    hidden,
    weight_stride,
    BLOCK: tl.constexpr,
):
    row, experts = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    value = tl.load(weight_ptr + row * weight_stride + column, mask=inside, other=0.0)
    # The rests are scaled up as far as they stay below the weight: so they do not vanish where it is about the smallest normal
    # float, and sums of their products overflow only where those of the weight do.
    high = first_bits(value)
    value = (value - widened(high)) * 128.0
    middle = first_bits(value)
    low = first_bits((value - widened(middle)) * 256.0)
    parts_ptr += row * hidden + column
    part = experts.to(tl.int64) * hidden
    tl.store(parts_ptr, high.to(tl.int16), mask=inside)
    tl.store(parts_ptr + part, middle.to(tl.int16), mask=inside)
    tl.store(parts_ptr + 2 * part, low.to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["rows"])  # prefills come in all row counts
def add_parts_kernel(
    sums_ptr,  # [rows, 3 * experts] fp32: high, middle, low
    logits_ptr,  # [rows, experts] fp32
    rows,
    experts,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    expert = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)[None, :]
    inside = (row < rows) & (expert < experts)
    row = row.to(tl.int64)
    sums_ptr += row * 3 * experts + expert
    high = tl.load(sums_ptr, mask=inside, other=0.0)
    middle = tl.load(sums_ptr + experts, mask=inside, other=0.0)
    low = tl.load(sums_ptr + 2 * experts, mask=inside, other=0.0)
    logit = (low * 0.00390625 + middle) * 0.0078125 + high
    # An infinity in hidden or weight shows in `high` as in fp32; in the others it meets zeros and rests of either sign.
    logit = tl.where(tl.abs(high) < float("inf"), logit, high)
    tl.store(logits_ptr + row * experts + expert, logit, mask=inside)


def split_gemm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden`` [rows, hidden] bf16 x ``weight`` [experts, hidden] fp32 -> logits [rows, experts] fp32."""
    check_gate("split_gemm", hidden, weight, interpreted=INTERPRETED)
    (rows, size), experts = hidden.shape, len(weight)
    parts = torch.empty((3 * experts, size), dtype=torch.bfloat16, device=hidden.device)
    grid = (experts, triton.cdiv(size, SPLIT))
    split_weight_kernel[grid](weight, parts.view(torch.int16), size, weight.stride(0), BLOCK=SPLIT, num_warps=4)
    sums = hidden.float() @ parts.float().t() if INTERPRETED else torch.mm(hidden, parts.t(), out_dtype=torch.float32)
    logits = torch.empty((rows, experts), dtype=torch.float32, device=hidden.device)
    grid = (triton.cdiv(rows, ADD_ROWS), triton.cdiv(experts, ADD_EXPERTS))
    add_parts_kernel[grid](sums, logits, rows, experts, BLOCK_ROWS=ADD_ROWS, BLOCK_EXPERTS=ADD_EXPERTS, num_warps=4)
    return logits
