"""From logits to SGLang's selection: a Plan travels on the logits, and answers exactly one question.

    topk.biased_grouped_topk          -> take_grouped
    topk.biased_topk_jit_kernel_impl  -> take_biased
    topk.fused_topk                   -> take_softmax

Each takes the Plan if it answers what is asked, or counts why not and calls the original. They stand below select_experts, so
that what SGLang does after a selection (remapping for EPLB, capture and recording of routed experts, padding, shared slots,
simulation, waterfill) happens as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_router_ext.contract import Problem
from sglang_router_ext.plugin import counters
from sglang_router_ext.plugin.blocks import HANDOVER, Blocks, carry
from sglang_router_ext.plugin.counters import HOST
from sglang_router_ext.plugin.problem import as_the_models_gate, scale_of, shared_weight_of

NO_PLAN = "logits of no linked gate, or changed since"
TAKEN = "plan refused: taken before"

Selection = tuple[torch.Tensor, torch.Tensor]
"""weights [rows, topk + shared] fp32, ids [rows, topk + shared] int32, in SGLang's order."""
Question = Callable[..., "dict[str, Any] | str"]
"""A function's own parameters -> fields of the Problem that it asks for, or why no plan answers. Unknown ones raise."""


class Plan(NamedTuple):
    """A selection, and the question that it answers."""

    ids: torch.Tensor  # [rows, topk + shared] int32
    weights: torch.Tensor  # [rows, topk + shared] float32
    design: str
    problem: Problem
    bias: torch.Tensor | None  # [experts] float32, the tensor that the selection read
    version: int  # version counter of the logits when they were made
    blocks: Blocks | None = None


def hand_over(logits: torch.Tensor, handed: Plan | str) -> torch.Tensor:
    """``logits``, carrying the plan or the reason why there is none; any tensor made from them carries nothing."""
    setattr(logits, HANDOVER, handed)
    return logits


def take_grouped(original: Callable[..., Any], *args: Any, **call: Any) -> Selection:
    """AROUND topk.biased_grouped_topk, which SGLang calls by keywords, as the others."""
    return _take(original, args, call, _grouped)


def take_biased(original: Callable[..., Any], *args: Any, **call: Any) -> Selection:
    """AROUND topk.biased_topk_jit_kernel_impl."""
    return _take(original, args, call, _biased)


def take_softmax(original: Callable[..., Any], *args: Any, **call: Any) -> Selection:
    """AROUND topk.fused_topk."""
    return _take(original, args, call, _softmax)


def _take(original: Callable[..., Any], args: tuple[Any, ...], call: dict[str, Any], question: Question) -> Selection:
    if args or torch.compiler.is_compiling():
        return original(*args, **call)
    logits = call["gating_output"]
    handed: Any = getattr(logits, HANDOVER, NO_PLAN)
    refusal = difference(handed, question, **call) if isinstance(handed, Plan) else handed
    if refusal is not None:
        counters.count("selection", HOST, refusal)
        if isinstance(handed, Plan):
            hand_over(logits, refusal)
            call["gating_output"] = as_the_models_gate(handed.problem, logits)
        return original(**call)
    # Once only: SGLang masks and remaps the tensors that it gets in place.
    hand_over(logits, TAKEN)
    counters.count("selection", handed.design)
    if handed.blocks is not None:
        carry(handed.ids, handed.blocks)
    if handed.problem.score == "sqrtsoftplus":
        _mask(handed, call.get("num_token_non_padded"))
    return handed.weights, handed.ids


def _mask(plan: Plan, num_token_non_padded: torch.Tensor | None) -> None:
    """As SGLang's own sqrt-softplus kernel does, after which select_experts does not."""
    from sglang.srt.layers.moe import topk

    if num_token_non_padded is not None:
        topk._mask_topk_ids_padded_region(plan.ids, num_token_non_padded)
        topk._zero_topk_weights_padded_region(plan.weights, num_token_non_padded)


def difference(
    plan: Plan,
    question: Question,
    *,
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor | None = None,
    **call: Any,
) -> str | None:
    """Why ``plan`` does not answer this call, or None. A parameter that is not known here raises."""
    asked = question(**call)
    if isinstance(asked, str):
        return f"plan refused: {asked}"
    for name, value in asked.items():
        planned = getattr(plan.problem, name)
        if value != planned:
            return f"plan refused: {name}: asked {value}, planned {planned}"
    if _identity(correction_bias) != _identity(plan.bias):
        return "plan refused: another selection bias"
    if gating_output._version != plan.version:
        return "plan refused: the logits were changed since"
    if len(hidden_states) != len(plan.ids):
        return "plan refused: another number of rows"
    return None


def _identity(bias: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if bias is None else (bias.data_ptr(), bias.dtype, bias.shape)


def _grouped(*, num_expert_group: int | None = None, topk_group: int | None = None, **common: Any) -> dict[str, Any]:
    return {**_common(**common), "score": "sigmoid", "groups": num_expert_group or 1, "groups_kept": topk_group or 1}


def _biased(
    *,
    scoring_func: str = "sigmoid",
    sqrtsoftplus_log1p: bool = False,
    packed_out: torch.Tensor | None = None,
    router_logits_partials: torch.Tensor | None = None,
    num_shared_append: int = 0,
    num_token_non_padded: torch.Tensor | None = None,
    expert_location_dispatch_info: Any = None,
    **common: Any,
) -> dict[str, Any] | str:
    if packed_out is not None:
        return "packed ids are asked for"
    if router_logits_partials is not None or num_shared_append:
        return "the logits are partial sums"
    ungrouped = {"groups": 1, "groups_kept": 1}
    return {**_common(**common), **ungrouped, "score": scoring_func, "nan_first": sqrtsoftplus_log1p}


def _softmax(
    *,
    scoring_func: str = "softmax",
    packed_out: torch.Tensor | None = None,
    num_token_non_padded: torch.Tensor | None = None,
    **common: Any,
) -> dict[str, Any] | str:
    if packed_out is not None:
        return "packed ids are asked for"
    asked = {**_common(**common), "score": scoring_func, "groups": 1, "groups_kept": 1}
    return {**asked, "scale": 1.0, "shared_weight": 1.0} if scoring_func == "softmax" else asked


def _common(
    *,
    topk: int,
    renormalize: bool,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
) -> dict[str, Any]:
    """What all three ask."""
    return {
        "topk": topk - num_fused_shared_experts,
        "shared": num_fused_shared_experts,
        "renormalize": renormalize,
        "scale": scale_of(routed_scaling_factor, apply_routed_scaling_factor_on_output),
        "shared_weight": shared_weight_of(routed_scaling_factor, apply_routed_scaling_factor_on_output),
    }
