"""From logits to SGLang's selection: a Plan travels on the logits, and answers exactly one question.

    topk.biased_grouped_topk          -> take_grouped
    topk.biased_topk_jit_kernel_impl  -> take_biased
    topk.fused_topk                   -> take_softmax
    moe_fused_gate, with two biases   -> take_image     of layers that rank image tokens by a bias of their own
    dsv4.hash_topk                    -> take_hash      of layers whose experts a table names

Each takes the Plan if it answers what is asked, or counts why not and calls the original. They stand below select_experts,
vision_topk and HashTopK, so that what SGLang does after a selection (remapping for EPLB, capture and recording of routed
experts, padding, shared slots, simulation, waterfill) happens as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_router_ext.contract import Problem, Tokens
from sglang_router_ext.plugin import counters
from sglang_router_ext.plugin.blocks import HANDOVER, PADDED, SIMULATED, Blocks, carry, void
from sglang_router_ext.plugin.counters import HOST
from sglang_router_ext.plugin.problem import as_the_models_gate, scale_of, shared_weight_of

NO_PLAN = "logits of no linked gate, or changed since"
TAKEN = "plan refused: taken before"
PACKED_PADDING = -1 << 16
"""A packed id of a padded row: -1, and a weight of 0."""
SMALL_EPSILON = 1e-12
"""Beside a sum of scores; ours are divided by the sum alone."""

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
    tokens: Tokens | None = None  # where they had a say
    packed: torch.Tensor | None = None  # [rows, topk + shared] int32: packed ids, where they may be asked for
    host: Callable[[], torch.Tensor] | None = None  # SGLang's logits, of a hash layer, where ours are its own experts' only


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


def take_image(original: Callable[..., Any], *args: Any, **call: Any) -> Selection:
    """AROUND moe_fused_gate, which is below the others too: with two biases vision_topk asks it itself."""
    if call.get("bias_alt") is None or len(args) != 2:
        return original(*args, **call)

    def own(*, hidden_states: Any, gating_output: Any, correction_bias: Any, **rest: Any) -> Selection:
        return original(gating_output, correction_bias, **rest)

    logits, bias = args
    asked = {"hidden_states": logits, "gating_output": logits, "correction_bias": bias}
    return _take(own, (), {**asked, **call}, _image)


def take_hash(original: Callable[..., Any], *args: Any, **call: Any) -> Selection:
    """AROUND dsv4.hash_topk, which HashTopK calls by keywords."""
    if args:
        return original(*args, **call)

    def own(*, hidden_states: Any, gating_output: Any, **rest: Any) -> Selection:
        return original(router_logits=gating_output, **rest)

    logits = call.pop("router_logits")
    return _take(own, (), {"hidden_states": logits, "gating_output": logits, **call}, _hash)


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
            asked = as_the_models_gate(handed.problem, logits) if handed.host is None else handed.host()
            call["gating_output"] = asked
        return original(**call)
    # Once only: SGLang masks and remaps the tensors that it gets in place.
    hand_over(logits, TAKEN)
    counters.count("selection", handed.design)
    if handed.blocks is not None:
        carry(handed.ids, handed.blocks)
    if handed.problem.score == "sqrtsoftplus":
        _mask(handed, call.get("num_token_non_padded"))
    if handed.problem.image_bias:
        _void_where_simulated(handed)
    if call.get("packed_out") is not None and handed.packed is not None:
        call["packed_out"].set_(handed.packed)  # the caller's tensor is ours from here on, without a copy
    return handed.weights, handed.ids


def _void_where_simulated(plan: Plan) -> None:
    """vision_topk simulates behind this; select_experts, which is hooked, does not select then."""
    from sglang.srt.layers.moe import topk

    if topk.routing_simulation_enabled():
        void(plan.ids, SIMULATED)


def _mask(plan: Plan, num_token_non_padded: torch.Tensor | None) -> None:
    """As SGLang's own sqrt-softplus kernel does, after which select_experts does not."""
    from sglang.srt.layers.moe import topk

    if num_token_non_padded is not None:
        topk._mask_topk_ids_padded_region(plan.ids, num_token_non_padded)
        void(plan.ids, PADDED)  # where select_experts does not select, its hook does not see it
        topk._zero_topk_weights_padded_region(plan.weights, num_token_non_padded)
        if plan.packed is not None:
            topk._mask_topk_ids_padded_region(plan.packed, num_token_non_padded, fill_value=PACKED_PADDING)


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
    if (why := _packs(plan, **call)) is not None:
        return f"plan refused: {why}"
    asked = question(**call)
    if isinstance(asked, str):
        return f"plan refused: {asked}"
    if _identities(asked.pop("tokens", None)) != _identities(plan.tokens):
        return "plan refused: other tokens"
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


def _packs(
    plan: Plan, *, packed_out: torch.Tensor | None = None, num_token_non_padded: torch.Tensor | None = None, **_: Any
) -> str | None:
    """Why the packed ids of ``plan`` cannot take the place of ``packed_out``, or None."""
    if packed_out is None:
        return None
    if plan.packed is None:
        return "packed ids are asked for"
    if num_token_non_padded is not None and plan.problem.score != "sqrtsoftplus":
        return "packed ids with padded rows"
    whole = packed_out.untyped_storage().nbytes() == plan.packed.untyped_storage().nbytes()
    alike = packed_out.dtype == plan.packed.dtype and packed_out.shape == plan.packed.shape
    return None if alike and whole else "packed ids of another form are asked for"


def _identity(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _identities(tokens: Tokens | None) -> tuple[Any, ...] | None:
    return tokens and (_identity(tokens.ids), tokens.image, _identity(tokens.image_bias), _identity(tokens.table))


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
    if router_logits_partials is not None or num_shared_append:
        return "the logits are partial sums"
    ungrouped = {"groups": 1, "groups_kept": 1}
    return {**_common(**common), **ungrouped, "score": scoring_func, "nan_first": sqrtsoftplus_log1p}


def _image(
    *,
    bias_alt: torch.Tensor,
    input_ids: torch.Tensor | None = None,
    bias_alt_token_id: int | None = None,
    renormalize: bool = True,
    renormalize_epsilon: float = 0.0,
    moe_softcapping: float = 0.0,
    num_expert_group: int = 1,
    topk_group: int = 1,
    **common: Any,
) -> dict[str, Any] | str:
    renormalized = renormalize_epsilon <= SMALL_EPSILON
    if input_ids is None or bias_alt_token_id is None or moe_softcapping or num_expert_group > 1 or not renormalized:
        return "two biases in another way"
    asked = _biased(renormalize=renormalize, **common)
    tokens = Tokens(input_ids, bias_alt_token_id, bias_alt)
    return asked if isinstance(asked, str) else {**asked, "image_bias": True, "tokens": tokens}


def _hash(
    *,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    scoring_func: str = "sqrtsoftplus",
) -> dict[str, Any]:
    slots = tid2eid.shape[1] + num_fused_shared_experts
    asked = _common(
        topk=slots,
        renormalize=True,
        num_fused_shared_experts=num_fused_shared_experts,
        routed_scaling_factor=routed_scaling_factor,
    )
    return {**asked, "hashed": True, "score": scoring_func, "tokens": Tokens(input_ids, table=tid2eid)}


def _softmax(
    *,
    scoring_func: str = "softmax",
    packed_out: torch.Tensor | None = None,
    num_token_non_padded: torch.Tensor | None = None,
    **common: Any,
) -> dict[str, Any] | str:
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
    """What all ask."""
    return {
        "topk": topk - num_fused_shared_experts,
        "shared": num_fused_shared_experts,
        "renormalize": renormalize,
        "scale": scale_of(routed_scaling_factor, apply_routed_scaling_factor_on_output),
        "shared_weight": shared_weight_of(routed_scaling_factor, apply_routed_scaling_factor_on_output),
    }
