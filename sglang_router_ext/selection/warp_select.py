"""``warp_select``: scores, top-k and weights of a row by its own warps; see warp_select.cuh for who owns what."""

from __future__ import annotations

import torch

from sglang_router_ext import build
from sglang_router_ext.arguments import VECTOR_BYTES, check_cuda, check_selection
from sglang_router_ext.contract import Problem, expect

HEADER = "selection/warp_select.cuh"
SCORES = {"sigmoid": "kSigmoid", "sqrtsoftplus": "kSqrtSoftplus", "softmax": "kSoftmax"}


def groups(experts: int) -> int:
    """Groups of 128 experts, four a lane. Two widths above 512 keep the number of builds small."""
    exact = -(-experts // 128)
    return exact if exact <= 4 else 7 if exact <= 7 else 8


def vectorised(experts: int, *tensors: torch.Tensor | None) -> bool:
    """Whether every row of the fp32 ``tensors`` that there are can be read in 16-byte pieces."""
    some = [t for t in tensors if t is not None]
    strides = [t.stride(0) for t in some if t.dim() > 1 and len(t) > 1]
    aligned = all(t.data_ptr() % VECTOR_BYTES == 0 for t in some)
    return experts % 4 == 0 and aligned and all(stride % 4 == 0 for stride in strides)


def template(problem: Problem, vector: bool) -> str:
    """What the kernels of a selection are built for; ``vector``: see :func:`vectorised`."""
    grouped = str(problem.groups > 1).lower()
    return f"{groups(problem.experts)}, {str(vector).lower()}, {grouped}, ::rx::Score::{SCORES[problem.score]}"


def instance(problem: Problem, vector: bool) -> str:
    """The C++ instance that serves ``problem``."""
    return f"WarpSelect<{template(problem, vector)}>"


def outputs(rows: int, slots: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Unwritten ids [rows, slots] int32 and weights [rows, slots] fp32."""
    ids = torch.empty((rows, slots), dtype=torch.int32, device=device)
    return ids, torch.empty((rows, slots), dtype=torch.float32, device=device)


def scalars(problem: Problem) -> tuple[int, int, float, float, bool, int, float, bool, bool]:
    """The numbers that the kernels take of a problem, in the order of their Rule."""
    weights = problem.scale, problem.shared_weight, problem.renormalize
    rounded = problem.logits_dtype == "bfloat16"
    return problem.experts, problem.topk, *weights, problem.groups_kept, problem.softcap, problem.nan_first, rounded


def warp_select(
    problem: Problem,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_token_non_padded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits`` [rows, experts] fp32, ``bias`` [experts] fp32 or None -> ids [rows, topk + shared] int32, weights fp32."""
    check_cuda("logits", logits)
    check_selection("warp_select", problem, logits, bias, num_token_non_padded, logits.device)
    expect(
        len(logits) * problem.slots < 2**31, "logits", f"{len(logits)} rows", f"fewer than 2^31 slots, {problem.slots} a row"
    )
    ids, weights = outputs(len(logits), problem.slots, logits.device)
    if len(logits) == 0:
        return ids, weights
    padding = ids[:0] if num_token_non_padded is None else num_token_non_padded
    module = build.load(HEADER, instance(problem, vectorised(problem.experts, logits, bias)))
    module.run(logits, ids[:0] if bias is None else bias, ids, weights, padding, *scalars(problem))
    return ids, weights
