"""Weights changed inside a running engine. SGLang's scheduler process calls these functions (``custom_weight_loader``).

A checkpoint of 42 MoE layers has 38 GB, too much to write for a demo, and SGLang's own dummy weights are no stand-in: they are
the same numbers in every layer, and the model repeats two tokens whatever its router does.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_router_ext.demo import checkpoint, quantise


def draw(model: Any, _named: list) -> None:
    """Fill all of an SGLang model with the tensors of :mod:`~.checkpoint`, drawn where the model is, layer by layer."""
    device = next(model.parameters()).device
    config = model.config.to_dict()
    kind = quantise.kind_of(config)
    for specs in checkpoint.shards(config):
        drawn = ((spec.name, checkpoint.make(spec, device)) for spec in specs)
        model.load_weights(quantise.stored(kind, drawn))


def narrow_routers(model: Any, _named: list) -> None:
    """Round the selection bias of every MoE layer to bf16, or its gate weight to FP8 where a model has no such bias."""
    named = list(model.named_parameters())
    biases = [(name, checkpoint.rounded(bias)) for name, bias in named if name.endswith("e_score_correction_bias")]
    gates = ((name, weight) for name, weight in named if name.endswith("mlp.gate.weight"))
    with torch.no_grad():
        model.load_weights(biases or [(name, weight.to(torch.float8_e4m3fn).to(weight.dtype)) for name, weight in gates])


DRAW, NARROW = (f"{__name__}.{function.__name__}" for function in (draw, narrow_routers))
