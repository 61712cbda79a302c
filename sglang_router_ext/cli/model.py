"""The router that a checkpoint's ``config.json`` asks for, without loading the model."""

from __future__ import annotations

import ast
import importlib.util
import json
import pathlib
from typing import Any, NamedTuple

from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.choose import in_force
from sglang_router_ext.contract import DTYPES, ContractError, Problem, expect

FP32_GATES = ("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text")
"""Model types whose gate weight is fp32 whatever their ``config.json`` says."""
SOFTMAX_DEFAULT = ("deepseek_v2",)
"""Model types that route by softmax, without a bias, unless they say otherwise."""
UNGROUPED = ("deepseek_v4", "deepseek_v41", "deepseek_v41_text")
"""Model types that select by sqrt-softplus, and by no groups even where they name some; V4.1 ranks NaN first."""
LINKED = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", *UNGROUPED, *FP32_GATES),
    *("glm_moe_dsa", "glm5_next", "glm5_next_text", "kimi_k2", "kimi_k25", "hunyuan_v4"),
)
"""Model types with n_routed_experts that are known to be linked; SGLang has MoE modules of its own for many others."""
_QWEN, _MIXTRAL = ("num_experts", "num_experts_per_tok"), ("num_local_experts", "num_experts_per_tok")
LINEAR = {
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_next", "qwen3_5_moe_text", "olmoe", "sdar_moe", "mellum"), _QWEN
    ),
    **dict.fromkeys(("mixtral", "granitemoe", "granitemoehybrid", "minimax_m2"), _MIXTRAL),
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


class Found(NamedTuple):
    """What a model asks of its router."""

    problem: Problem
    note: str
    """Why a server may run something else; "" where it does not."""
    elsewhere: bool = False
    """Whether SGLang selects by a function that ours stand in for nowhere."""


def read(model: str) -> Found:
    """The problem of one layer of ``model``.

    ``model``: a case name, a checkpoint's folder, or its ``config.json``.
    Raises :class:`~sglang_router_ext.contract.ContractError` for a name that is none of these and for a model whose
    configuration is of no kind that is known here.
    """
    if model in CASES:
        return Found(CASES[model].problem, CASES[model].stands_for)
    config = _text(_read(model))
    problem = from_config(config)
    elsewhere = _selects_elsewhere(config, problem)
    text = "SGLang selects by another function for this model, so that its own selection runs"
    return Found(problem, "; ".join(filter(None, (_unlinked(config), text * elsewhere, _hash_layers(config)))), elsewhere)


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that speaks of the router."""
    return config.get("text_config") or config


def _selects_elsewhere(config: dict[str, Any], problem: Problem) -> bool:
    """As ``plugin/problem.py`` says of the layers that SGLang builds from ``config``, which ask for ``problem``."""
    kind = config.get("model_type")
    if kind in LINEAR:
        return problem.bias == (problem.score == "softmax")
    return kind not in UNGROUPED and not problem.bias


def _unlinked(config: dict[str, Any]) -> str:
    kind = config.get("model_type") or ""
    return (
        f"{kind} is not known to be linked (docs/models.md); if SGLang has MoE modules of its own for it, its own router runs"
        if kind and kind not in (*LINKED, *LINEAR)
        else ""
    )


def _hash_layers(config: dict[str, Any]) -> str:
    count = config.get("num_hash_layers") if config.get("model_type") in UNGROUPED else 0
    return f"in its first {count} layers a table of tokens names the experts, as in deepseek-v4-hash" if count else ""


def _read(model: str) -> dict[str, Any]:
    path = pathlib.Path(model)
    try:
        file = path / "config.json" if path.is_dir() else path
        found = model != "" and file.is_file()  # an empty name is not the current folder's
        expect(found, "model", model, f"a folder with a config.json, or a case: {' | '.join(CASES)}")
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
    config = _text(config)
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
    bias = not softmax if config.get("topk_method") is None else config["topk_method"] == "noaux_tc"
    own = config.get("scoring_func") or ("softmax" if softmax else "sqrtsoftplus" if ungrouped else "sigmoid")
    return Problem(
        experts=config["n_routed_experts"],
        hidden=config["hidden_size"],
        topk=config["num_experts_per_tok"],
        score="sigmoid" if bias and not ungrouped else own,  # a grouped selection with a bias knows no other
        bias=bias,
        groups=1 if ungrouped else config.get("n_group") or 1,
        groups_kept=1 if ungrouped else config.get("topk_group") or 1,
        renormalize=bool(config.get("norm_topk_prob", True)),
        nan_first=ungrouped and kind != "deepseek_v4",
        hidden_dtype=_dtype(config),
        weight_dtype="float32" if fp32 else _dtype(config),
    )


def _linear(config: dict[str, Any]) -> Problem:
    """Of a model in :data:`LINEAR`."""
    experts, topk = LINEAR[config["model_type"]]
    if config.get(experts) is None and config.get("num_local_experts") is not None:  # as newer transformers write it
        experts = "num_local_experts"
    if isinstance(config.get(topk), list) and len({str(each) for each in config[topk]}) == 1:  # of each layer, all alike
        config = {**config, topk: config[topk][0]}
    _expect_integers(config, experts, topk, "hidden_size")
    dtype = _dtype(config)
    shape = {"experts": config[experts], "hidden": config["hidden_size"], "topk": config[topk], "hidden_dtype": dtype}
    if config["model_type"] == "minimax_m2":
        bias = config.get("use_routing_bias") is True
        return Problem(**shape, score=config.get("scoring_func") or "sigmoid", bias=bias, weight_dtype="float32")
    field = "norm_expert_weight" if config["model_type"] == "step3_text" else "norm_topk_prob"
    renormalize = bool(config.get(field, True)) and config["model_type"] != "olmoe"
    return Problem(**shape, score="softmax", bias=False, renormalize=renormalize, weight_dtype=dtype, logits_dtype="bfloat16")


def _dtype(config: dict[str, Any]) -> str:
    """Of the weights that are not said to be another."""
    found = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    expect(found in DTYPES, "model: dtype", found, " | ".join(DTYPES))
    return found


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
