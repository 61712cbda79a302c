"""Triton kernels that the clock launches itself: the cache flush, and the two floors that no router can beat."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FLUSH_NAME = "_rx_flush_kernel"
FLUSH_BLOCK = 4096
THREAD_BYTES = 16
READ_THREADS = 512
READ_BLOCKS_PER_SM = 4
NEVER = 0x7FBADBAD
"""Two bf16 (or one fp32) whose bits no finite gate weight holds."""


@triton.jit
def _rx_flush_kernel(buffer, BLOCK: tl.constexpr):
    """Read and write every element, so that afterwards the L2 holds nothing but ``buffer``."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(buffer + offsets, tl.load(buffer + offsets) + 1)


@triton.jit
def _rx_empty_kernel(anything):
    pass


@triton.jit
def _rx_read_kernel(words, scratch, size, never, BLOCK: tl.constexpr):
    """Read ``words`` once. The store keeps the loads alive and never happens; there is no reduction to pay for."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    value = tl.load(words + offsets, mask=inside, other=0)
    tl.store(scratch + offsets % 64, value, mask=inside & (value == never))


def flush(buffer: torch.Tensor) -> None:
    """Touch ``buffer`` [n] int32, n a multiple of ``FLUSH_BLOCK``."""
    _rx_flush_kernel[(buffer.numel() // FLUSH_BLOCK,)](buffer, BLOCK=FLUSH_BLOCK, num_warps=8)


def empty(anything: torch.Tensor) -> None:
    """Launch a kernel of one block that does nothing."""
    _rx_empty_kernel[(1,)](anything, num_warps=1)


def read(weight: torch.Tensor, scratch: torch.Tensor) -> None:
    """Read ``weight`` [experts, hidden], contiguous, once, 16 bytes a load; ``scratch`` [64] int32 stays as it is.

    One wave of blocks: a thread makes as many loads as that takes, all in flight together.
    """
    words = weight.view(torch.int32)
    per_load = READ_THREADS * THREAD_BYTES // 4
    sms = torch.cuda.get_device_properties(weight.device).multi_processor_count
    loads = triton.next_power_of_2(triton.cdiv(words.numel(), per_load * sms * READ_BLOCKS_PER_SM))
    block = per_load * loads
    grid = (triton.cdiv(words.numel(), block),)
    _rx_read_kernel[grid](words, scratch, words.numel(), NEVER, BLOCK=block, num_warps=READ_THREADS // 32)
