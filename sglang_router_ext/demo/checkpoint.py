"""A small DeepSeek-V3-shaped checkpoint with GLM-5.3-Flash's router, written from seeds: 288 experts, hidden 4096, top-8.

``load_format="dummy"`` will not do: such a model repeats two tokens whatever its router does. Here every tensor is normal, with
a scale that keeps activations near 1 and makes the tokens vary. What the routed experts add is kept small: a single expert that
changes at a near-tie (which happens whenever a batch has another size) alters one token in some hundred, a wrong selection
bias alters one in five.

The selection biases are spread as in a trained checkpoint (fp32, within 0.42 around 11.75), which leaves a median gap at the
cut of 0.005. In bf16 they would collapse onto 7 values, so a router that narrows them picks other experts.
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

MODEL = pathlib.Path(__file__).parent / "model.json"
BIAS_CENTRE, BIAS_SPREAD = 11.75, 0.42
FP8_BLOCK = 128
RECIPE = 1
"""Raise when :func:`specs` or :func:`make` change, so that stored checkpoints are written anew."""


class Size(msgspec.Struct, frozen=True):
    """What may be chosen of the model; the router's shape may not. One layer, the first, has no experts."""

    layers: int = 4
    moe_intermediate: int = 64
    fp8: bool = False
    """Linear layers and experts in FP8, a scale for every 128 x 128 weights, as DeepSeek-V3 has them."""

    @property
    def moe_layers(self) -> range:
        return range(1, self.layers)


def config(size: Size) -> dict:
    """The model's ``config.json``."""
    base = json.loads(MODEL.read_text())
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    return (
        base
        | {"num_hidden_layers": size.layers, "moe_intermediate_size": size.moe_intermediate}
        | ({"quantization_config": fp8} if size.fp8 else {})
    )


def problem(model: dict) -> Problem:
    """The router of every MoE layer of a config."""
    return Problem(
        experts=model["n_routed_experts"],
        hidden=model["hidden_size"],
        topk=model["num_experts_per_tok"],
        scale=model["routed_scaling_factor"],
    )


class Spec(NamedTuple):
    """One tensor: normal with deviation ``scale``; ``scale`` 0 is a norm weight (ones), None a selection bias."""

    name: str
    shape: tuple[int, ...]
    scale: float | None


def router_specs(model: dict, layer: int) -> list[Spec]:
    experts, hidden = model["n_routed_experts"], model["hidden_size"]
    gate = f"model.layers.{layer}.mlp.gate"
    return [
        Spec(f"{gate}.weight", (experts, hidden), 0.6 * hidden**-0.5),
        Spec(f"{gate}.e_score_correction_bias", (experts,), None),
    ]


def _attention_specs(model: dict, prefix: str) -> list[Spec]:
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
    if layer < model["first_k_dense_replace"]:
        return found + _mlp_specs(f"{prefix}.mlp", hidden, model["intermediate_size"], 1.0)
    experts, width = model["n_routed_experts"], model["moe_intermediate_size"]
    return [
        *found,
        *router_specs(model, layer),
        *_mlp_specs(f"{prefix}.mlp.shared_experts", hidden, width, 1.0),
        Spec(f"{prefix}.mlp.experts.gate_up_proj", (experts, 2 * width, hidden), hidden**-0.5),
        Spec(f"{prefix}.mlp.experts.down_proj", (experts, hidden, width), 0.25 * width**-0.5),
    ]


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
    return torch.empty(spec.shape, dtype=torch.bfloat16, device=device).normal_(0, spec.scale, generator=generator)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [.., out, in] bf16 as FP8 of the same shape, and its scales [.., out / 128, in / 128] fp32, rounded up."""
    rows, columns = weight.shape[-2:]
    high, wide = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = torch.nn.functional.pad(weight.float(), (0, wide * FP8_BLOCK - columns, 0, high * FP8_BLOCK - rows))
    blocks = padded.unflatten(-2, (high, FP8_BLOCK)).unflatten(-1, (wide, FP8_BLOCK))
    scale = blocks.abs().amax((-3, -1)).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    values = (blocks / scale[..., :, None, :, None]).flatten(-2).flatten(-3, -2)[..., :rows, :columns]
    return values.to(torch.float8_e4m3fn), scale


def rounded(bias: torch.Tensor) -> torch.Tensor:
    """The mistake that the comparison has to notice: a selection bias narrowed to bf16."""
    return bias.bfloat16().float()


def folder(size: Size) -> pathlib.Path:
    """Where the checkpoint of ``size`` is kept, unless the user says otherwise."""
    return cache_dir() / f"demo-{_identity(size)[:12]}"


def _identity(size: Size) -> str:
    return hashlib.sha256(json.dumps([RECIPE, config(size)], sort_keys=True).encode()).hexdigest()


def bytes_of(model: dict) -> int:
    """Size of the weights; exact but for biases and scales."""
    fp8 = "quantization_config" in model
    specs = (spec for shard in shards(model) for spec in shard)
    return sum((1 if fp8 and multiplies(spec.name) else 2) * math.prod(spec.shape) for spec in specs)


def multiplies(name: str) -> bool:
    """Whether the tensor is the weight of a linear layer or of experts, and so in FP8 where a model is."""
    return name.removesuffix(".weight").endswith(("_proj", "_with_mqa"))


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
            say(f"writing {file}, {sum(2 * math.prod(spec.shape) for spec in specs) / 1e6:.0f} MB")
            tensors = dict(zip([spec.name for spec in specs], pool.map(make, specs), strict=True))
            save_file(tensors, path / file, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": bytes_of(model)}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (path / "config.json").write_text(json.dumps(model, indent=2))
