"""``naive``: the gate as the model's reference code writes it, everything in fp32. Slow; kept to compare with."""

from __future__ import annotations

import torch

from sglang_router_ext.arguments import check_cuda, check_tensor


def naive(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden`` [rows, hidden] bf16 x ``weight`` [experts, hidden] bf16 or fp32 -> logits [rows, experts] fp32."""
    check_cuda("hidden", hidden)
    check_tensor("hidden", hidden, torch.bfloat16, (None, None), hidden.device)
    kind = torch.float32 if weight.dtype == torch.float32 else torch.bfloat16
    check_tensor("weight", weight, kind, (None, hidden.shape[1]), hidden.device)
    return torch.mm(hidden.float(), weight.float().t())
