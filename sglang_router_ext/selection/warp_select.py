"""``warp_select``: sigmoid + bias, top-k and weights of a row by its own warps; see warp_select.cuh for who owns what."""

from __future__ import annotations

import torch

from sglang_router_ext import build
from sglang_router_ext.arguments import VECTOR_BYTES, check_cuda, check_selection
from sglang_router_ext.contract import Problem, expect

HEADER = "selection/warp_select.cuh"


def groups(experts: int) -> int:
    """Groups of 128 experts, four a lane. Two widths above 512 keep the number of builds small."""
    exact = -(-experts // 128)
    return exact if exact <= 4 else 7 if exact <= 7 else 8


def vectorised(experts: int, *tensors: torch.Tensor) -> bool:
    """Whether every row of the fp32 ``tensors`` can be read in 16-byte pieces."""
    strides = [t.stride(0) for t in tensors if t.dim() > 1 and len(t) > 1]
    aligned = all(t.data_ptr() % VECTOR_BYTES == 0 for t in tensors)
    return experts % 4 == 0 and aligned and all(stride % 4 == 0 for stride in strides)


def template(experts: int, vector: bool, grouped: bool = False) -> str:
    return f"{groups(experts)}, {str(vector).lower()}, {str(grouped).lower()}"


def instance(experts: int, vector: bool, grouped: bool = False) -> str:
    """The C++ instance that serves ``experts``; ``vector``: see :func:`vectorised`; ``grouped``: in groups of 32."""
    return f"WarpSelect<{template(experts, vector, grouped)}>"


def outputs(rows: int, slots: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Unwritten ids [rows, slots] int32 and weights [rows, slots] fp32."""
    ids = torch.empty((rows, slots), dtype=torch.int32, device=device)
    return ids, torch.empty((rows, slots), dtype=torch.float32, device=device)


def scalars(problem: Problem) -> tuple[int, float, float, bool, int]:
    """The numbers that the kernel takes of a problem, in its order."""
    return problem.topk, problem.scale, problem.shared_weight, problem.renormalize, problem.groups_kept


def warp_select(
    problem: Problem,
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    num_token_non_padded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits`` [rows, experts] fp32, ``bias`` [experts] fp32 -> ids and weights [rows, topk + shared], int32 and fp32."""
    check_cuda("logits", logits)
    check_selection("warp_select", problem, logits, bias, num_token_non_padded, logits.device)
    expect(
        len(logits) * problem.slots < 2**31, "logits", f"{len(logits)} rows", f"fewer than 2^31 slots, {problem.slots} a row"
    )
    ids, weights = outputs(len(logits), problem.slots, logits.device)
    if len(logits) == 0:
        return ids, weights
    padding = ids[:0] if num_token_non_padded is None else num_token_non_padded
    module = build.load(HEADER, instance(problem.experts, vectorised(problem.experts, logits, bias), problem.groups > 1))
    module.run(logits, bias, ids, weights, padding, *scalars(problem))
    return ids, weights
