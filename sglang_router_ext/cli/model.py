"""The router that a checkpoint's ``config.json`` asks for, without loading the model."""

from __future__ import annotations

import ast
import importlib.util
import json
import pathlib
from typing import Any

from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.choose import in_force
from sglang_router_ext.contract import ContractError, Problem, expect

FP32_GATES = ("glm4_moe", "glm4_moe_lite")
"""Model types whose gate weight is fp32 whatever their ``config.json`` says."""
SOFTMAX_DEFAULT = ("deepseek_v2",)
"""Model types that route by softmax, without a bias, unless they say otherwise."""
UNGROUPED = ("deepseek_v4", "deepseek_v41", "deepseek_v41_text")
"""Model types that select by sqrt-softplus, and by no groups even where they name some; V4.1 ranks NaN first."""
UNLINKED = ("kimi_k3", "kimi_linear")
"""Model types of the DeepSeek-V3 kind whose MoE modules the plugin does not link."""
_QWEN, _MIXTRAL = ("num_experts", "num_experts_per_tok"), ("num_local_experts", "num_experts_per_tok")
LINEAR = {
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_next", "qwen3_5_moe_text", "olmoe", "sdar_moe"), _QWEN
    ),
    **dict.fromkeys(("mixtral", "granitemoe", "minimax_m2"), _MIXTRAL),
    "hunyuan_v1_moe": ("num_experts", "moe_topk"),
    "step3_text": ("moe_num_experts", "moe_top_k"),
}
"""Model types whose gate is a linear layer -> fields of their experts and of the top-k. They route by softmax, without a bias,
but for MiniMax-M2."""
REQUIRED = ("n_routed_experts", "hidden_size", "num_experts_per_tok")
GROUPS = ("n_group", "topk_group")


def stock_backends() -> list[str]:
    """SGLang's own values of ``--moe-runner-backend``, read from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    source = pathlib.Path(next(iter(spec.submodule_search_locations)), "srt/arg_groups/choices.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MOE_RUNNER_BACKEND_CHOICES":
            return ast.literal_eval(node.value)
    raise RuntimeError("sglang: arg_groups/choices.py defines no MOE_RUNNER_BACKEND_CHOICES")


def read(model: str) -> tuple[Problem, str]:
    """The problem of one layer of ``model``, and why that is not what a server runs ("" where it is).

    ``model``: a case name, a checkpoint's folder, or its ``config.json``.
    Raises :class:`~sglang_router_ext.contract.ContractError` for a name that is none of these and for a model whose
    configuration is of no kind that is known here.
    """
    if model in CASES:
        return CASES[model].problem, CASES[model].stands_for
    config = _read(model)
    return from_config(config), _unlinked(config)


def _unlinked(config: dict[str, Any]) -> str:
    kind = (config.get("text_config") or config).get("model_type", "")
    return (
        f"{kind} has MoE modules of its own in SGLang, which the plugin does not link: SGLang's own router runs"
        if kind in UNLINKED
        else ""
    )


def _read(model: str) -> dict[str, Any]:
    path = pathlib.Path(model)
    try:
        file = path / "config.json" if path.is_dir() else path
        expect(file.is_file(), "model", model, f"a folder with a config.json, or a case: {' | '.join(CASES)}")
        config = json.loads(file.read_text())
    except OSError as error:
        expect(False, "model", f"{model[:200]}: {error.strerror}", "a folder or file that can be read")
    except ContractError:
        raise
    except (ValueError, RecursionError) as error:
        expect(False, "model", f"{file}: {error}", "JSON")
    inner = config.get("text_config") or {} if isinstance(config, dict) else None
    expect(isinstance(inner, dict), "model", f"{file}: {str(config)[:40]}", "a JSON object, and so its text_config")
    return config


def from_config(config: dict[str, Any]) -> Problem:
    """The problem of one layer from the fields of a Hugging Face configuration."""
    config = config.get("text_config") or config
    if str(config.get("model_type")) in LINEAR:
        return _linear(config)
    expect(
        any(field in config for field in ("n_routed_experts", "topk_method", "scoring_func")),
        "model",
        f"model_type {str(config.get('model_type'))[:40]}",
        f"a router of the DeepSeek-V3 kind (n_routed_experts), {' | '.join(LINEAR)}; any other model runs SGLang's own router",
    )
    _expect_integers(config, *REQUIRED, *(field for field in GROUPS if config.get(field) is not None))
    for field, type_, allowed in (
        ("model_type", str, "a name"),
        ("topk_method", str, "a name"),
        ("router_fp32", bool, "a bool"),
    ):
        expect(config.get(field) is None or type(config[field]) is type_, f"model: {field}", config.get(field), allowed)
    kind = config.get("model_type") or ""
    softmax, ungrouped = kind in SOFTMAX_DEFAULT, kind in UNGROUPED
    fp32 = kind in FP32_GATES or config.get("router_fp32") is True
    return Problem(
        experts=config["n_routed_experts"],
        hidden=config["hidden_size"],
        topk=config["num_experts_per_tok"],
        score=config.get("scoring_func") or ("softmax" if softmax else "sqrtsoftplus" if ungrouped else "sigmoid"),
        bias=not softmax if config.get("topk_method") is None else config["topk_method"] == "noaux_tc",
        groups=1 if ungrouped else config.get("n_group") or 1,
        groups_kept=1 if ungrouped else config.get("topk_group") or 1,
        renormalize=bool(config.get("norm_topk_prob", True)),
        nan_first=ungrouped and kind != "deepseek_v4",
        weight_dtype="float32" if fp32 else "bfloat16",
    )


def _linear(config: dict[str, Any]) -> Problem:
    """Of a model in :data:`LINEAR`."""
    experts, topk = LINEAR[config["model_type"]]
    if config.get(experts) is None and config.get("num_local_experts") is not None:  # as newer transformers write it
        experts = "num_local_experts"
    _expect_integers(config, experts, topk, "hidden_size")
    shape = {"experts": config[experts], "hidden": config["hidden_size"], "topk": config[topk]}
    if config["model_type"] == "minimax_m2":
        bias = config.get("use_routing_bias") is True
        return Problem(**shape, score=config.get("scoring_func") or "sigmoid", bias=bias, weight_dtype="float32")
    renormalize = config.get("norm_topk_prob") is not False and config["model_type"] != "olmoe"
    return Problem(**shape, score="softmax", bias=False, renormalize=renormalize, logits_dtype="bfloat16")


def _expect_integers(config: dict[str, Any], *fields: str) -> None:
    for field in fields:
        expect(type(config.get(field)) is int, f"model: {field}", config.get(field), "an integer")


def logits_of(problem: Problem, gate: str) -> str:
    """What becomes of the logits of a model that rounds its own, with ``SGLANG_ROUTER_EXT_GATE`` = ``gate``; "" for others."""
    if problem.logits_dtype == "float32":
        return ""
    if in_force(problem, gate)[0].logits_dtype == "float32":
        return f"fp32, by SGLANG_ROUTER_EXT_GATE={gate}, where a gate of ours runs; the model's own gate rounds them to bf16"
    return "bf16, as the model's own gate rounds them; SGLANG_ROUTER_EXT_GATE=fp32 keeps fp32"
