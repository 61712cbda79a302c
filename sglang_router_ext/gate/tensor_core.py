"""``tensor_core``: the gate GEMM for any number of rows by Hopper's warpgroups, a row's logits the same in every batch; see
tensor_core.cuh for who owns what.
"""

from __future__ import annotations

import enum
import functools

import torch

from sglang_router_ext import build
from sglang_router_ext.arguments import check_gate

HEADER = "gate/tensor_core.cuh"
TILE_ROWS = 64
SPLIT = 8
WIDTHS = (64, 80, 96, 128, 144, 160, 192)
"""Experts that an instruction multiplies, of those that hopper.cuh has."""


class Way(enum.IntEnum):
    """How a launch divides its work; the terms are those of tensor_core.cuh. It changes no bit of the result."""

    NARROW, MIDDLE, HALVES, ALONE, TALL = range(5)


@functools.cache
def widths(experts: int) -> tuple[int, int]:
    """Experts of a block, for few rows and for many: an instruction's, so that few of its columns are nobody's."""
    narrow = next((width for width in (64, 80, 96) if experts % width == 0), 64)
    if experts <= narrow:
        return narrow, narrow
    return narrow, next((width for width in (160, 144) if experts % width == 0), 128)


def way(rows: int, experts: int, most: int) -> Way:
    """The first, of ever fewer blocks, that starts at once: in a second wave a block costs as much as in the first. Clusters of
    eight leave some multiprocessors alone (of 132 an H200 fills 112 with them).
    """
    narrow, middle = (-(-experts // width) for width in widths(experts))
    tiles, clustered = -(-rows // TILE_ROWS), most * 28 // 33
    if tiles * narrow * SPLIT <= clustered:
        return Way.NARROW
    if tiles * middle * SPLIT <= 2 * clustered:
        return Way.MIDDLE
    if tiles * middle * 2 <= most:
        return Way.HALVES
    return Way.ALONE if tiles * middle <= most else Way.TALL


def instance(experts: int) -> str:
    """The C++ instance that serves a number of experts."""
    narrow, middle = widths(experts)
    return f"TensorCore<{narrow}, {middle}>"


def tensor_core(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden`` [rows, hidden] bf16 x ``weight`` [experts, hidden] bf16 -> logits [rows, experts] fp32."""
    check_gate("tensor_core", hidden, weight)
    rows, experts = len(hidden), len(weight)
    logits = torch.empty((rows, experts), dtype=torch.float32, device=hidden.device)
    how = way(rows, experts, processors(hidden.device))
    build.load(HEADER, instance(experts)).run(hidden, weight, logits, int(how))
    return logits


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of ``device``."""
    return torch.cuda.get_device_properties(device).multi_processor_count
