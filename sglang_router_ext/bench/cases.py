"""Named problems: the routers of the models that this package is checked and timed on. Imports no torch."""

from __future__ import annotations

import msgspec

from sglang_router_ext.contract import Problem, expect


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A model's router by name. ``layers``: MoE layers that one forward pass runs; None where the model is not published.
    ``served_by``: the class of SGLang that serves it; "" where the problem is no model's own.
    """

    name: str
    problem: Problem
    layers: int | None = None
    served_by: str = ""
    what: str = ""
    stands_for: str = ""
    """Of a problem that is not the model's own: what the model has instead."""


CASES = {
    case.name: case
    for case in (
        Case(
            name="glm-5.3-flash",
            problem=Problem(experts=288, hidden=4096, topk=8),
            layers=42,
            served_by="Glm5NextForConditionalGeneration",
        ),
        Case(
            name="glm-5.3-flash-shared",
            problem=Problem(experts=288, hidden=4096, topk=8, shared=1, shared_weight=0.4),
            layers=42,
            served_by="Glm5NextForConditionalGeneration",
            what="with its shared expert fused as slot 9, as SGLang serves it by default",
        ),
        Case(
            name="deepseek-v3-ungrouped",
            problem=Problem(experts=256, hidden=7168, topk=8),
            layers=58,
            what="DeepSeek-V3's shape with one group",
            stands_for="DeepSeek-V3 has 8 groups",
        ),
        Case(
            name="deepseek-v3",
            problem=Problem(experts=256, hidden=7168, topk=8, groups=8, groups_kept=4),
            layers=58,
            served_by="DeepseekV3ForCausalLM",
        ),
        Case(
            name="deepseek-v4.1-flash",
            problem=Problem(experts=384, hidden=5120, topk=6, score="sqrtsoftplus", nan_first=True),
            what="sqrt-softplus scores",
        ),
        Case(
            name="deepseek-v4.1-images",
            problem=Problem(experts=384, hidden=5120, topk=6, score="sqrtsoftplus", nan_first=True, image_bias=True),
            what="sqrt-softplus scores; image tokens have a bias of their own",
        ),
        Case(
            name="deepseek-v4",
            problem=Problem(experts=384, hidden=7168, topk=6, score="sqrtsoftplus"),
            what="sqrt-softplus scores",
        ),
        Case(
            name="deepseek-v4-hash",
            problem=Problem(experts=384, hidden=7168, topk=6, score="sqrtsoftplus", bias=False, hashed=True),
            what="its first layers: experts by a table of tokens",
        ),
        Case(
            name="kimi-k2",
            problem=Problem(experts=384, hidden=7168, topk=8),
            layers=60,
            served_by="DeepseekV3ForCausalLM",
        ),
        Case(
            name="glm-4.6",
            problem=Problem(experts=160, hidden=5120, topk=8, weight_dtype="float32"),
            layers=89,
            served_by="Glm4MoeForCausalLM",
            what="fp32 gate weight (SGLang's without TF32)",
        ),
        Case(
            name="glm-4.6-bf16",
            problem=Problem(experts=160, hidden=5120, topk=8),
            layers=89,
            what="GLM-4.6's shape with a bf16 gate weight",
            stands_for="GLM-4.6 has an fp32 gate weight",
        ),
        Case(
            name="glm-4.5-air",
            problem=Problem(experts=128, hidden=4096, topk=8, weight_dtype="float32"),
            layers=45,
            served_by="Glm4MoeForCausalLM",
            what="fp32 gate weight (SGLang's without TF32)",
        ),
        Case(
            name="minimax-m2",
            problem=Problem(experts=256, hidden=3072, topk=8, weight_dtype="float32"),
            layers=62,
            served_by="MiniMaxM2ForCausalLM",
            what="fp32 gate weight (SGLang's without TF32)",
        ),
        Case(
            name="glm-4.5-air-bf16",
            problem=Problem(experts=128, hidden=4096, topk=8),
            layers=45,
            what="GLM-4.5-Air's shape with a bf16 gate weight",
            stands_for="GLM-4.5-Air has an fp32 gate weight",
        ),
        Case(
            name="qwen3-30b-a3b",
            problem=Problem(experts=128, hidden=2048, topk=8, score="softmax", bias=False, logits_dtype="bfloat16"),
            layers=48,
            served_by="Qwen3MoeForCausalLM",
            what="softmax scores of bf16 logits",
        ),
        Case(
            name="qwen3-235b-a22b",
            problem=Problem(experts=128, hidden=4096, topk=8, score="softmax", bias=False, logits_dtype="bfloat16"),
            layers=94,
            served_by="Qwen3MoeForCausalLM",
            what="softmax scores of bf16 logits",
        ),
        Case(
            name="mixtral-8x7b",
            problem=Problem(experts=8, hidden=4096, topk=2, score="softmax", bias=False, logits_dtype="bfloat16"),
            layers=32,
            served_by="MixtralForCausalLM",
            what="softmax scores of bf16 logits",
        ),
    )
}


def case_by_name(name: str) -> Case:
    """The case ``name``; raises :class:`~sglang_router_ext.contract.ContractError` listing the names there are."""
    expect(name in CASES, "case", name, " | ".join(CASES))
    return CASES[name]
