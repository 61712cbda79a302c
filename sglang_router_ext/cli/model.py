"""The router that a checkpoint's ``config.json`` asks for, without loading the model."""

from __future__ import annotations

import ast
import importlib.util
import json
import pathlib
from typing import Any

from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.contract import ContractError, Problem, expect

FP32_GATES = ("glm4_moe", "glm4_moe_lite")
"""Model types whose gate weight is fp32 whatever their ``config.json`` says."""
SOFTMAX_DEFAULT = ("deepseek_v2",)
"""Model types that route by softmax, without a bias, unless they say otherwise."""
UNLINKED = ("kimi_k3", "kimi_linear")
"""Model types of the DeepSeek-V3 kind whose MoE modules the plugin does not link."""
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
    configuration is not of the DeepSeek-V3 kind.
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
    expect(
        any(field in config for field in ("n_routed_experts", "topk_method", "scoring_func")),
        "model",
        f"model_type {str(config.get('model_type'))[:40]}",
        "a router of the DeepSeek-V3 kind (n_routed_experts); any other model runs SGLang's own router",
    )
    for field in (*REQUIRED, *(field for field in GROUPS if config.get(field) is not None)):
        expect(type(config.get(field)) is int, f"model: {field}", config.get(field), "an integer, as DeepSeek-V3's has")
    for field, type_, allowed in (
        ("model_type", str, "a name"),
        ("topk_method", str, "a name"),
        ("router_fp32", bool, "a bool"),
    ):
        expect(config.get(field) is None or type(config[field]) is type_, f"model: {field}", config.get(field), allowed)
    kind = config.get("model_type") or ""
    softmax = kind in SOFTMAX_DEFAULT
    fp32 = kind in FP32_GATES or config.get("router_fp32") is True
    return Problem(
        experts=config["n_routed_experts"],
        hidden=config["hidden_size"],
        topk=config["num_experts_per_tok"],
        score=config.get("scoring_func") or ("softmax" if softmax else "sigmoid"),
        bias=not softmax if config.get("topk_method") is None else config["topk_method"] == "noaux_tc",
        groups=config.get("n_group") or 1,
        groups_kept=config.get("topk_group") or 1,
        renormalize=bool(config.get("norm_topk_prob", True)),
        weight_dtype="float32" if fp32 else "bfloat16",
    )
