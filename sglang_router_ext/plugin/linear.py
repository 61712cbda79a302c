"""Gates that are linear layers of SGLang: Qwen's, Mixtral's and their like have a ReplicatedLinear in front of the TopK.

The class serves every replicated linear of every model, so that the *instance's* ``forward`` is replaced and nothing else. It
still leads to the class's own: where a compiler traces it, and where the gate is not a plain product. An adapter (LoRA) calls
neither, but the linear's quantisation method: its logits carry no plan, and the selection is counted as SGLang's.

Such a gate gives logits of its weight's type; see ``choose.in_force`` for what becomes of bf16 ones.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from sglang_router_ext.plugin import counters
from sglang_router_ext.plugin.counters import HOST
from sglang_router_ext.plugin.handover import hand_over
from sglang_router_ext.plugin.layer import LINK, Layer, link


def link_moe(result: None, moe: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER __init__ of a MoE block whose ``gate`` is a ReplicatedLinear; see ``hooks.py`` for the blocks."""
    link(moe.gate, moe.topk, linear=True)
    moe.gate.forward = functools.partial(forward, moe.gate)  # a copy of the module copies it with itself


def before_cast(moe: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """BEFORE the forwards of MiniMaxM2MoE, which cast their hidden states to fp32 for the gate alone: ours reads them as they
    were.
    """
    layer = moe.gate.__dict__.get(LINK)
    if layer is not None and not torch.compiler.is_compiling():
        layer.before_cast = hidden_states if len(hidden_states) > 0 else None  # for no rows the gate is not asked


def forward(gate: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of one gate: ``x`` [rows, hidden] -> logits [rows, experts], and the bias that is left to add."""
    own = type(gate).forward
    if torch.compiler.is_compiling():  # a compiler traces SGLang's own code
        return own(gate, x)
    layer: Layer = gate.__dict__[LINK]
    uncast, layer.before_cast = layer.before_cast, None
    refusal = _refuses(gate)
    if refusal is not None:
        counters.count("gate", HOST, refusal)
        logits, bias = own(gate, x)
        return hand_over(logits, refusal), bias
    hidden = uncast if uncast is not None and x.dtype == torch.float32 and uncast.shape == x.shape else x
    return layer.logits(gate, hidden, lambda: own(gate, x)[0]), None


def _refuses(gate: Any) -> str | None:
    """Why this gate is more than the product with its weight, or None."""
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    if type(gate) is not ReplicatedLinear:
        return "the gate is no ReplicatedLinear"
    if type(gate.quant_method) is not UnquantizedLinearMethod:
        return "the gate is quantized"
    return "the gate has a bias of its own" if gate.bias is not None else None
