"""The demo's weights as quantised checkpoints name and store them: FP8 as DeepSeek-V3 has it, and NVFP4 as ModelOpt writes it.

=======  ==================================================  =========================================================
kind     what                                                how
=======  ==================================================  =========================================================
fp8      linear layers and experts                           e4m3, an fp32 scale for every 128 x 128 weights
nvfp4    routed experts                                      e2m1, an e4m3 scale for every 16 weights of a row, one of all
=======  ==================================================  =========================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

KINDS = ("none", "fp8", "nvfp4")
FP8_BLOCK, FP4_BLOCK = 128, 16
BLOCKS = {"fp8": FP8_BLOCK, "nvfp4": 128}
"""An expert's size is a multiple of it; Marlin's tiles for nvfp4."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_SCALE = 2.0**-10
"""Of all weights: gate and up of an expert must share it, and the blocks' scales keep their digits."""

Tensors = Iterator[tuple[str, torch.Tensor]]


def settings(kind: str) -> dict[str, Any]:
    """What ``config.json`` says about it."""
    if kind == "fp8":
        blocks = [FP8_BLOCK, FP8_BLOCK]
        scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        return {"quantization_config": {**scheme, "weight_block_size": blocks}}
    if kind == "nvfp4":
        kept = ["*self_attn*", "*shared_experts*", "*mlp.gate", "*mlp.gate_proj", "*mlp.up_proj", "*mlp.gate_up_proj"]
        ignore = [*kept, "*mlp.down_proj", "lm_head"]
        algorithm = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": FP4_BLOCK}
        return {"quantization_config": {**algorithm, "ignore": ignore}}
    return {}


def kind_of(model: dict) -> str:
    """Of a ``config.json``."""
    found = model.get("quantization_config")
    return "none" if found is None else "nvfp4" if found.get("quant_algo") == "NVFP4" else "fp8"


def multiplies(name: str) -> bool:
    """Whether the tensor is the weight of a linear layer or of experts."""
    return name.removesuffix(".weight").endswith(("_proj", "_with_mqa"))


def quantises(kind: str, name: str) -> bool:
    """Whether the tensor ``name`` is in the narrow type."""
    return multiplies(name) and (kind == "fp8" or (kind == "nvfp4" and ".experts." in name))


def bytes_each(kind: str, name: str) -> float:
    """Of a weight, its share of a scale included."""
    return {"fp8": 1 + 4 / FP8_BLOCK**2, "nvfp4": 0.5 + 1 / FP4_BLOCK}[kind] if quantises(kind, name) else 2.0


def stored(kind: str, tensors: Tensors) -> Tensors:
    """``tensors`` of a bf16 model as a checkpoint of ``kind`` has them."""
    if kind == "none":
        yield from tensors
        return
    for name, weight in _one_by_one(tensors):
        if not quantises(kind, name):
            yield name, weight
        elif kind == "fp8":
            values, scale = in_fp8(weight)
            yield name, values
            yield f"{name}_scale_inv", scale
        else:
            values, scale = in_nvfp4(weight)
            yield name, values
            yield f"{name}_scale", scale
            yield f"{name}_scale_2", torch.tensor(FP4_SCALE)
            yield f"{name.removesuffix('weight')}input_scale", torch.tensor(1.0)


def _one_by_one(tensors: Tensors) -> Tensors:
    """Each expert by itself, as quantised checkpoints name them."""
    for name, tensor in tensors:
        if tensor.dim() < 3:
            yield name, tensor
            continue
        matrices = {"down_proj": tensor}
        if name.endswith("gate_up_proj"):
            matrices = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True))
        prefix = name.rpartition(".")[0]
        for part, some in matrices.items():
            yield from ((f"{prefix}.{i}.{part}.weight", one) for i, one in enumerate(some))


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [.., out, in] bf16 as FP8 of the same shape, and its scales [.., out / 128, in / 128] fp32, rounded up."""
    rows, columns = weight.shape[-2:]
    high, wide = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = torch.nn.functional.pad(weight.float(), (0, wide * FP8_BLOCK - columns, 0, high * FP8_BLOCK - rows))
    blocks = padded.unflatten(-2, (high, FP8_BLOCK)).unflatten(-1, (wide, FP8_BLOCK))
    scale = blocks.abs().amax((-3, -1)).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    values = (blocks / scale[..., :, None, :, None]).flatten(-2).flatten(-3, -2)[..., :rows, :columns]
    return values.to(torch.float8_e4m3fn), scale


def in_nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [out, in] bf16 as uint8 [out, in / 2], two e2m1 a byte, the first one low, and scales [out, in / 16] e4m3."""
    blocks = weight.float().unflatten(-1, (-1, FP4_BLOCK))
    scale = (blocks.abs().amax(-1) / (FP4_VALUES[-1] * FP4_SCALE)).to(torch.float8_e4m3fn)
    each = (scale.float() * FP4_SCALE)[..., None]
    values = torch.where(each > 0, blocks / each, 0.0).flatten(-2)
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(FP4_VALUES)], device=weight.device)
    codes = torch.bucketize(values.abs(), middles) + 8 * (values < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), scale
