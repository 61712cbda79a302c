"""``small_rows``: the gate GEMM for 1 to 16 rows on the tensor cores; see small_rows.cuh for who owns what."""

from __future__ import annotations

import functools

import msgspec
import torch

from sglang_router_ext import build
from sglang_router_ext.arguments import check_gate

HEADER = "gate/small_rows.cuh"
CHUNK = 32  # k that the lanes of a warp take with one load
MAX_SLICES = 8
MOST_BLOCKS = 128


class Config(msgspec.Struct, frozen=True):
    """How the work of one shape is divided; the terms are those of small_rows.cuh."""

    warps: int
    tiles: int
    depth: int
    slices: int
    exact: bool
    wide: bool = False  # the weight is fp32

    @property
    def halved(self) -> bool:
        """Whether half of a block's warps multiply where rows are many. It pays where registers allow six tiles then: not
        with more warps (256 x 7168, 28 warps: 8.8 us for 96 rows either way).
        """
        return self.exact and self.warps == 16 and self.depth <= 2 and not self.wide

    @property
    def template(self) -> str:
        return ", ".join(
            str(value).lower() for value in (self.warps, self.tiles, self.depth, self.exact, self.halved, self.wide)
        )


TUNED = {
    (288, 4096): Config(16, 2, 2, 4, True),
    (256, 7168): Config(28, 1, 2, 4, True),
    (384, 5120): Config(20, 2, 2, 4, True),
}
"""(experts, hidden) -> the division that was fastest on an H200, of about ten tried each."""


@functools.cache
def config(experts: int, hidden: int, wide: bool = False) -> Config:
    """The division of an ``experts`` x ``hidden`` gate. It follows from the weight alone, never from the rows: a row's sums are
    then the same in every batch.
    """
    if wide:
        return _wide_config(experts, hidden)
    if (experts, hidden) in TUNED:
        return TUNED[experts, hidden]
    chunks = -(-hidden // CHUNK)
    for slices, depth in ((4, 2), (8, 2), (4, 1), (8, 4)):
        warps, rest = divmod(chunks, slices * depth)
        if hidden % CHUNK == 0 and rest == 0 and 8 <= warps <= 28:
            return Config(warps, 2 if experts >= 256 else 1, depth, slices, True)
    slices = next(s for s in (4, 2, 1) if chunks >= 8 * s or s == 1)
    return Config(16, 1, 2 if chunks <= 32 * slices else 4, slices, False)


def _wide_config(experts: int, hidden: int) -> Config:
    """16 warps at most, which leaves registers for twice the bytes; as many blocks as there may be beside consumers."""
    chunks = -(-hidden // CHUNK)
    for slices, depth in ((4, 2), (5, 2), (6, 2), (7, 2), (8, 2), (4, 1), (8, 1)):
        warps, rest = divmod(chunks, slices * depth)
        if hidden % CHUNK == 0 and rest == 0 and 8 <= warps <= 16:
            tiles = 1 if -(-experts // 8) * slices <= MOST_BLOCKS else 2
            return Config(warps, tiles, depth, slices, exact=True, wide=True)
    slices = next(s for s in (4, 2, 1) if chunks >= 8 * s or s == 1)
    return Config(16, 1, 2, slices, exact=False, wide=True)


def instance(experts: int, hidden: int, wide: bool = False) -> str:
    """The C++ instance that serves a shape."""
    return f"SmallRows<{config(experts, hidden, wide).template}>"


def small_rows(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden`` [rows, hidden] bf16 x ``weight`` [experts, hidden] bf16 or fp32 -> logits [rows, experts] fp32."""
    check_gate("small_rows", hidden, weight)
    (experts, size), wide = weight.shape, weight.dtype == torch.float32
    logits = torch.empty((len(hidden), len(weight)), dtype=torch.float32, device=hidden.device)
    build.load(HEADER, instance(experts, size, wide)).run(hidden, weight, logits, config(experts, size, wide).slices)
    return logits
