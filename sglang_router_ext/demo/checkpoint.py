"""Small checkpoints with real models' routers, written from seeds; first GLM-5.3-Flash's: 288 experts, hidden 4096, top-8.

``load_format="dummy"`` will not do: such a model repeats two tokens whatever its router does. Here every tensor is normal, with
a scale that keeps activations near 1 and makes the tokens vary. What the routed experts add is kept small: a single expert that
changes at a near-tie (which happens whenever a batch has another size) alters one token in some hundred, a wrong selection
bias alters one in five.

The selection biases are spread as in a trained checkpoint (fp32, within 0.42 around 11.75), which leaves a median gap at the
cut of 0.005. In bf16 they would collapse onto 7 values, so a router that narrows them picks other experts. Where a model has
none, its gate weights in FP8 are the mistake.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import torch

from sglang_router_ext.build import cache_dir
from sglang_router_ext.contract import Problem, expect
from sglang_router_ext.demo import quantise

MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "glm": ("model.json", {}),
    "glm-4": ("glm-4.json", {}),
    "qwen3": ("qwen3.json", {}),
    "deepseek-v3": ("model.json", {"hidden_size": 7168, "n_routed_experts": 256, "n_group": 8, "topk_group": 4}),
    "kimi-k2": ("model.json", {"hidden_size": 7168, "n_routed_experts": 384}),
}
"""Name -> configuration in this folder, and what changes in it: routers of GLM-5.3-Flash, GLM-4.6 (fp32 gate weight),
Qwen3-30B-A3B (softmax), DeepSeek-V3 (groups) and Kimi K2."""
BIAS_CENTRE, BIAS_SPREAD = 11.75, 0.42
RECIPE = 1
"""Raise when :func:`specs` or :func:`make` change, so that stored checkpoints are written anew."""


class Size(msgspec.Struct, frozen=True):
    """What may be chosen of a model; its router's shape may not. The first layer has no experts, but for Qwen3's."""

    layers: int = 4
    moe_intermediate: int = 64
    quantization: str = "none"
    """One of ``quantise.KINDS``."""
    model: str = "glm"
    """One of :data:`MODELS`."""

    @property
    def experts(self) -> str:
        """The type of the routed experts."""
        return "bf16" if self.quantization == "none" else self.quantization

    @property
    def moe_layers(self) -> range:
        return range(0 if self.model == "qwen3" else 1, self.layers)


def config(size: Size) -> dict:
    """The model's ``config.json``."""
    file, changes = MODELS[size.model]
    base = json.loads((pathlib.Path(__file__).parent / file).read_text()) | changes
    return (
        base
        | {"num_hidden_layers": size.layers, "moe_intermediate_size": size.moe_intermediate}
        | quantise.settings(size.quantization)
    )


def problem(model: dict) -> Problem:
    """The router of every MoE layer of a config."""
    from sglang_router_ext.cli.model import from_config

    return msgspec.structs.replace(from_config(model), scale=model.get("routed_scaling_factor", 1.0))


class Spec(NamedTuple):
    """One tensor: normal with deviation ``scale``; ``scale`` 0 is a norm weight (ones), None a selection bias."""

    name: str
    shape: tuple[int, ...]
    scale: float | None
    dtype: torch.dtype = torch.bfloat16
    """Of the two that multiply."""


def router_specs(model: dict, layer: int) -> list[Spec]:
    asked, gate = problem(model), f"model.layers.{layer}.mlp.gate"
    shape, dtype = (asked.experts, asked.hidden), getattr(torch, asked.weight_dtype)
    weight = Spec(f"{gate}.weight", shape, 0.6 * asked.hidden**-0.5, dtype)
    return [weight, Spec(f"{gate}.e_score_correction_bias", (asked.experts,), None)] if asked.bias else [weight]


def _attention_specs(model: dict, prefix: str) -> list[Spec]:
    if "kv_lora_rank" not in model:
        return _grouped_query_specs(model, prefix)
    hidden, heads, q_rank, kv_rank = (
        model[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = model["qk_nope_head_dim"], model["qk_rope_head_dim"], model["v_head_dim"]
    return [
        Spec(f"{prefix}.q_a_proj.weight", (q_rank, hidden), hidden**-0.5),
        Spec(f"{prefix}.q_a_layernorm.weight", (q_rank,), 0),
        Spec(f"{prefix}.q_b_proj.weight", (heads * (nope + rope), q_rank), 2 * q_rank**-0.5),
        Spec(f"{prefix}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), hidden**-0.5),
        Spec(f"{prefix}.kv_a_layernorm.weight", (kv_rank,), 0),
        Spec(f"{prefix}.kv_b_proj.weight", (heads * (nope + value), kv_rank), kv_rank**-0.5),
        Spec(f"{prefix}.o_proj.weight", (hidden, heads * value), (heads * value) ** -0.5),
    ]


def _grouped_query_specs(model: dict, prefix: str) -> list[Spec]:
    hidden, heads, key_heads, head = (
        model[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    return [
        Spec(f"{prefix}.q_proj.weight", (heads * head, hidden), hidden**-0.5),
        Spec(f"{prefix}.k_proj.weight", (key_heads * head, hidden), hidden**-0.5),
        Spec(f"{prefix}.v_proj.weight", (key_heads * head, hidden), hidden**-0.5),
        Spec(f"{prefix}.q_norm.weight", (head,), 0),
        Spec(f"{prefix}.k_norm.weight", (head,), 0),
        Spec(f"{prefix}.o_proj.weight", (hidden, heads * head), (heads * head) ** -0.5),
    ]


def _expert_specs(model: dict, prefix: str, hidden: int, width: int) -> list[Spec]:
    """DeepSeek's loader takes all experts of a layer at once, the others one after the other."""
    experts = problem(model).experts
    if model["model_type"] != "deepseek_v3":
        return [spec for i in range(experts) for spec in _mlp_specs(f"{prefix}.{i}", hidden, width, 0.25)]
    return [
        Spec(f"{prefix}.gate_up_proj", (experts, 2 * width, hidden), hidden**-0.5),
        Spec(f"{prefix}.down_proj", (experts, hidden, width), 0.25 * width**-0.5),
    ]


def _mlp_specs(prefix: str, hidden: int, width: int, size: float) -> list[Spec]:
    return [
        Spec(f"{prefix}.gate_proj.weight", (width, hidden), hidden**-0.5),
        Spec(f"{prefix}.up_proj.weight", (width, hidden), hidden**-0.5),
        Spec(f"{prefix}.down_proj.weight", (hidden, width), size * width**-0.5),
    ]


def layer_specs(model: dict, layer: int) -> list[Spec]:
    hidden, prefix = model["hidden_size"], f"model.layers.{layer}"
    found = [
        Spec(f"{prefix}.input_layernorm.weight", (hidden,), 0),
        Spec(f"{prefix}.post_attention_layernorm.weight", (hidden,), 0),
        *_attention_specs(model, f"{prefix}.self_attn"),
    ]
    if layer < model.get("first_k_dense_replace", 0):
        return found + _mlp_specs(f"{prefix}.mlp", hidden, model["intermediate_size"], 1.0)
    width = model["moe_intermediate_size"]
    shared = _mlp_specs(f"{prefix}.mlp.shared_experts", hidden, width, 1.0) if model.get("n_shared_experts") else []
    return [*found, *router_specs(model, layer), *shared, *_expert_specs(model, f"{prefix}.mlp.experts", hidden, width)]


def shards(model: dict) -> Iterator[list[Spec]]:
    """The tensors of each file, in the order of writing: one file a layer, then what is outside the layers."""
    for layer in range(model["num_hidden_layers"]):
        yield layer_specs(model, layer)
    hidden, vocab = model["hidden_size"], model["vocab_size"]
    yield [
        Spec("model.embed_tokens.weight", (vocab, hidden), 0.5),
        Spec("model.norm.weight", (hidden,), 0),
        Spec("lm_head.weight", (vocab, hidden), 2 * hidden**-0.5),
    ]


def make(spec: Spec, device: torch.device | str = "cpu") -> torch.Tensor:
    """The tensor of ``spec``; depends on its name, its shape and the kind of device, so one can be had without the others."""
    seed = int.from_bytes(hashlib.sha256(spec.name.encode()).digest()[:7], "little")
    generator = torch.Generator(device).manual_seed(seed)
    if spec.scale is None:
        mean = torch.rand(3, *spec.shape, dtype=torch.float32, device=device, generator=generator).mean(0)
        return BIAS_CENTRE + BIAS_SPREAD * (mean - 0.5)
    if spec.scale == 0:
        return torch.ones(spec.shape, dtype=torch.bfloat16, device=device)
    return torch.empty(spec.shape, dtype=spec.dtype, device=device).normal_(0, spec.scale, generator=generator)


def rounded(bias: torch.Tensor) -> torch.Tensor:
    """The mistake that the comparison has to notice: a selection bias narrowed to bf16."""
    return bias.bfloat16().float()


def mistake(model: dict) -> str:
    """That of a model whose router has no selection bias, too."""
    return "bf16 selection biases" if problem(model).bias else "FP8 gate weights"


def stock_backend(model: dict) -> str:
    """The expert kernels of SGLang that ours stand beside: what the plugin keeps of them on Hopper."""
    return "marlin" if quantise.kind_of(model) == "nvfp4" else "triton"


def folder(size: Size) -> pathlib.Path:
    """Where the checkpoint of ``size`` is kept, unless the user says otherwise."""
    return cache_dir() / f"demo-{_identity(size)[:12]}"


def _identity(size: Size) -> str:
    return hashlib.sha256(json.dumps([RECIPE, config(size)], sort_keys=True).encode()).hexdigest()


def bytes_of(model: dict) -> int:
    """Size of the weights; exact but for fp32 routers, biases and scales."""
    kind = quantise.kind_of(model)
    return int(sum(_bytes(kind, shard) for shard in shards(model)))


def _bytes(kind: str, specs: list[Spec]) -> float:
    return sum(quantise.bytes_each(kind, spec.name) * math.prod(spec.shape) for spec in specs)


def write(size: Size, path: pathlib.Path, say: Callable[[str], None] = print) -> pathlib.Path:
    """The checkpoint of ``size`` at ``path``, written unless it is there: whole or not at all.

    Raises :class:`~sglang_router_ext.contract.ContractError` for a folder or a disk that cannot take it.
    """
    identity, mark = _identity(size), path / "identity"
    if mark.exists() and mark.read_text() == identity:
        return path
    usable = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    expect(usable, "checkpoint folder", f"{path}, which holds something else", "a new or an empty folder")
    model = config(size)
    path.parent.mkdir(parents=True, exist_ok=True)
    need, free = 1.1 * bytes_of(model), shutil.disk_usage(path.parent).free
    expect(free >= need, "free disk space", f"{free / 1e9:.1f} GB at {path.parent}", f"at least {need / 1e9:.1f} GB")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write_into(draft, model, say)
        (draft / "identity").write_text(identity)
        draft.replace(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def _write_into(path: pathlib.Path, model: dict, say: Callable[[str], None]) -> None:
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    listed = list(shards(model))
    places: dict[str, str] = {}
    with ThreadPoolExecutor() as pool:
        for number, specs in enumerate(listed, 1):
            file = f"model-{number:05d}-of-{len(listed):05d}.safetensors"
            say(f"writing {file}, {_bytes(quantise.kind_of(model), specs) / 1e6:.0f} MB")
            made = zip([spec.name for spec in specs], pool.map(make, specs), strict=True)
            tensors = {name: tensor.contiguous() for name, tensor in quantise.stored(quantise.kind_of(model), made)}
            save_file(tensors, path / file, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": bytes_of(model)}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (path / "config.json").write_text(json.dumps(model, indent=2))
