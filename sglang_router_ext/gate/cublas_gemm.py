"""``cublas_gemm``: the library's GEMM with bf16 operands and fp32 output; covers every shape."""

from __future__ import annotations

import torch

from sglang_router_ext.arguments import check_gate


def cublas_gemm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden`` [rows, hidden] bf16 x ``weight`` [experts, hidden] bf16 -> logits [rows, experts] fp32."""
    check_gate("cublas_gemm", hidden, weight)
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
