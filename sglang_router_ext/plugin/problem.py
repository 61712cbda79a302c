"""What one MoE layer of SGLang asks of its router: a :class:`Problem` from its gate's weight and its TopKConfig.

Three functions of SGLang select by a TopKConfig, and their hooks hand our selections over (see ``handover.py``):

    biased_grouped_topk          sigmoid + bias, by groups or not
    biased_topk_jit_kernel_impl  sigmoid or sqrt-softplus + bias, ungrouped
    fused_topk                   softmax, no bias; select_experts scales what it gives

Image tokens with a bias of their own are selected by moe_fused_gate; a hash layer has a table and no TopKConfig.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from sglang_router_ext.contract import Problem

if TYPE_CHECKING:
    from sglang.srt.layers.moe.hash_topk import HashTopK
    from sglang.srt.layers.moe.topk import TopKConfig

ELSEWHERE = "this layer selects by another function of SGLang"


def selects_elsewhere(config: TopKConfig | None) -> bool:
    """Whether none of these functions selects by ``config``, or in a way that the contract does not know."""
    from sglang.srt.layers.moe.topk import TopKOutputFormat

    if config is None or config.output_format not in (None, TopKOutputFormat.STANDARD):
        return True
    if config.use_grouped_topk:
        return config.correction_bias is None
    if config.custom_routing_function is not None:
        return True
    if config.scoring_func == "softmax":  # neither a bias nor shared slots: fused_topk takes no notice of them
        return config.correction_bias is not None or config.num_shared_topk_slots > 0
    return config.scoring_func not in ("sigmoid", "sqrtsoftplus") or config.correction_bias is None


def ranks_images(config: TopKConfig) -> bool:
    """Whether SGLang selects by ``config`` where image tokens have a bias of their own."""
    return not config.use_grouped_topk and config.scoring_func == "sqrtsoftplus"


class Hash(NamedTuple):
    """What a HashTopK asks: read when the layer is built, since the layer holds no module."""

    topk: int
    shared: int
    score: str
    factor: float

    @classmethod
    def of(cls, topk: HashTopK) -> Hash:
        shared = topk.num_shared_topk_slots
        return cls(topk.topk - shared, shared, topk.score_func, topk.routed_scaling_factor)


def problem_of(
    weight: torch.Tensor,
    config: TopKConfig | Hash | None,
    hidden: torch.dtype,
    *,
    logits_dtype: str = "float32",
    image_bias: bool = False,
) -> Problem:
    """The problem of a gate ``weight`` [experts, hidden] and the selection of ``config``; None: one that is not handed over.

    ``logits_dtype``: what SGLang's own gate gives. The score of a grouped selection is sigmoid whatever
    ``config.scoring_func`` says: biased_grouped_topk knows no other.
    """
    gate = Problem(
        experts=weight.shape[0],
        hidden=weight.shape[1],
        topk=1,
        bias=False,
        logits_dtype=logits_dtype,
        hidden_dtype=name_of(hidden),
        weight_dtype=name_of(weight.dtype),
    )
    if config is None:
        return gate
    if isinstance(config, Hash):
        given = {"topk": config.topk, "shared": config.shared, "score": config.score, "hashed": True}
        return msgspec.structs.replace(gate, **given, shared_weight=shared_weight_of(config.factor, False))
    asked = {"topk": config.top_k - config.num_shared_topk_slots, "renormalize": bool(config.renormalize)}
    if config.correction_bias is None:
        return msgspec.structs.replace(gate, **asked, score="softmax")
    grouped = config.use_grouped_topk
    factor, on_output = config.routed_scaling_factor, config.apply_routed_scaling_factor_on_output
    return msgspec.structs.replace(
        gate,
        **asked,
        bias=True,
        score="sigmoid" if grouped else config.scoring_func,
        nan_first=not grouped and config.sqrtsoftplus_log1p,
        image_bias=image_bias,
        groups=config.num_expert_group or 1 if grouped else 1,
        groups_kept=config.topk_group or 1 if grouped else 1,
        scale=scale_of(factor, on_output),
        shared=_shared_slots(config),
        shared_weight=shared_weight_of(factor, on_output),
        bias_dtype=name_of(config.correction_bias.dtype),
    )


def as_the_models_gate(problem: Problem, logits: torch.Tensor) -> torch.Tensor:
    """``logits`` of a gate of ours for SGLang's own selection, which must see what the model's gate gives."""
    rounds = problem.logits_dtype == "bfloat16" and logits.dtype == torch.float32
    return logits.bfloat16() if rounds else logits


def _shared_slots(config: TopKConfig) -> int:
    """Slots that the selection itself appends; per-rank slots are appended after it."""
    from sglang.srt.layers.moe.utils import has_per_rank_fused_shared_slots

    slots = config.num_shared_topk_slots
    return 0 if has_per_rank_fused_shared_slots(slots) else slots


def scale_of(factor: float | None, on_output: bool | None) -> float:
    """The routed scaling factor belongs to the weights only if SGLang says so; else the expert kernel applies it."""
    return float(factor) if on_output and factor is not None else 1.0


def shared_weight_of(factor: float | None, on_output: bool | None) -> float:
    """What a shared slot weighs, so that the factor which the expert kernel applies to the whole output cancels."""
    return 1.0 if on_output or not factor else 1.0 / factor


def name_of(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``, as the contract writes it."""
    return str(dtype).removeprefix("torch.")
