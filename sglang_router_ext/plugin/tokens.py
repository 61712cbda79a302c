"""Tokens for the gates that ask for them: DeepSeek V4's hash layers name experts by them, V4.1 has a second bias for images.

A gate is called with hidden states alone, so the block's forward notes the tokens on the gate's layer before, with the hidden
states that they belong to: where a batch comes to the gate by another way, its tokens are not known and the selection stays
with SGLang.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sglang_router_ext.arguments import vector_rows
from sglang_router_ext.contract import Tokens
from sglang_router_ext.plugin.layer import LINK, Layer, Noted


def note(
    moe: Any,
    hidden_states: torch.Tensor,
    forward_batch: Any = None,
    gemm_output_zero_allocator: Any = None,
    input_ids: torch.Tensor | None = None,
    input_ids_global: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """BEFORE DeepseekV2MoE.forward: ``input_ids_global`` are the tokens of the rows of ``hidden_states``."""
    if torch.compiler.is_compiling():
        return
    layer: Layer | None = moe.gate.__dict__.get(LINK)
    if layer is None or layer.refusal is not None or not layer.reads_tokens:
        return
    layer.noted = None
    ids = input_ids_global
    fits = ids is not None and ids.shape == hidden_states.shape[:1] and ids.device == hidden_states.device
    if ids is None or not fits or not ids.is_contiguous() or ids.dtype not in (torch.int32, torch.int64):
        return
    if layer.image_bias:
        rule, dtype = moe.gate.e_score_correction_bias_vl.detach(), torch.float32
        tokens = Tokens(ids, moe.config.image_token_id, rule)
    else:
        rule, dtype = moe.topk.tid2eid.detach(), torch.int32
        tokens = Tokens(ids, table=rule)
    if rule.dtype != dtype or not rule.is_contiguous() or not vector_rows(rule[None]):
        return
    layer.noted = Noted(weakref.ref(hidden_states), tokens)
