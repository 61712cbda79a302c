"""``warp_select``: scores, top-k and weights of a row by its own warps; see warp_select.cuh for who owns what."""

from __future__ import annotations

import torch

from sglang_router_ext import build
from sglang_router_ext.arguments import VECTOR_BYTES, check_cuda, check_per_row, check_selection
from sglang_router_ext.contract import Problem, Tokens, expect

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


def scalars(problem: Problem, tokens: Tokens | None) -> tuple[int, int, float, float, bool, int, float, bool, bool, int]:
    """The numbers that the kernels take of a problem, in the order of their Rule."""
    weights = problem.scale, problem.shared_weight, problem.renormalize
    rounded, image = problem.logits_dtype == "bfloat16", 0 if tokens is None else tokens.image
    return problem.experts, problem.topk, *weights, problem.groups_kept, problem.softcap, problem.nan_first, rounded, image


def per_row(
    none: torch.Tensor, padding: torch.Tensor | None, packed: torch.Tensor | None, tokens: Tokens | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the kernels take besides, ``none`` where there is nothing: padding, packed ids, tokens and the bias of images."""
    ids, bias = (None, None) if tokens is None else (tokens.ids, tokens.image_bias)
    padding, packed, ids, bias = (none if tensor is None else tensor for tensor in (padding, packed, ids, bias))
    return padding, packed, ids, bias


def warp_select(
    problem: Problem,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_token_non_padded: torch.Tensor | None = None,
    tokens: Tokens | None = None,
    packed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits`` [rows, experts] fp32, ``bias`` [experts] fp32 or None -> ids [rows, topk + shared] int32, weights fp32.

    ``tokens``: of the rows, where the problem asks for them. ``packed`` [rows, topk + shared] int32, dense: written too.
    """
    check_cuda("logits", logits)
    check_selection("warp_select", problem, logits, bias, num_token_non_padded, logits.device)
    check_per_row(problem, len(logits), tokens, packed, logits.device)
    expect(
        len(logits) * problem.slots < 2**31, "logits", f"{len(logits)} rows", f"fewer than 2^31 slots, {problem.slots} a row"
    )
    ids, weights = outputs(len(logits), problem.slots, logits.device)
    if len(logits) == 0:
        return ids, weights
    none = ids[:0]
    more = per_row(none, num_token_non_padded, packed, tokens)
    module = build.load(HEADER, instance(problem, vectorised(problem.experts, logits, bias)))
    module.run(logits, none if bias is None else bias, ids, weights, *more, *scalars(problem, tokens))
    return ids, weights
