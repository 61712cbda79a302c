"""Weights changed inside a running engine. SGLang's scheduler process calls these functions (``custom_weight_loader``).

A checkpoint of 42 MoE layers has 38 GB, too much to write for a demo, and SGLang's own dummy weights are no stand-in: they are
the same numbers in every layer, so a near-tie of the router comes 42 times, and the experts' times follow it.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_router_ext.demo import checkpoint


def draw(model: Any, _named: list) -> None:
    """Fill all of an SGLang model with the tensors of :mod:`~.checkpoint`, drawn where the model is, layer by layer."""
    device = next(model.parameters()).device
    for specs in checkpoint.shards(model.config.to_dict()):
        model.load_weights((spec.name, checkpoint.make(spec, device)) for spec in specs)


def narrow_biases(model: Any, _named: list) -> None:
    """Round the selection bias of every MoE layer to bf16."""
    with torch.no_grad():
        biases = [(name, weight) for name, weight in model.named_parameters() if name.endswith("e_score_correction_bias")]
        model.load_weights([(name, checkpoint.rounded(bias)) for name, bias in biases])


DRAW, NARROW = (f"{__name__}.{function.__name__}" for function in (draw, narrow_biases))
