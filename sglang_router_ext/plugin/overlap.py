"""When the shared experts of a layer start: with the routed ones, and not beside the router.

While a CUDA graph is captured, SGLang puts the shared experts on a second stream, beside gate, selection, alignment and routed
experts. Their GEMMs fill the shared memory of half the GPU for a few microseconds each. If the routed experts' kernel starts in
such a moment, all of its blocks are placed on the other half and stay there: at 12 to 16 rows it takes 76 us instead of 47
(GLM-5.3-Flash's router, bf16 experts of 128, H200). Whether it does is chance: a faster router meets it at other batch sizes
than a slower one. If the shared experts wait for the selection, they are out of the way whenever the routed ones start, and the
router has the GPU to itself. One layer, us, cold weights, same run:

    rows                        1      4      8     12     16     32     64     96
    stock                    51.5   67.0   82.4  106.9  106.4  142.1  164.6  161.5
    pair, as SGLang orders   49.5   62.7   79.1  126.0  132.2  140.4  162.4  160.3
    pair, shared waits       49.3   62.6   78.3   90.6  100.3  138.3  161.3  162.6

What lost: waiting for the alignment too (+2 us from 4 rows on), waiting for the experts' first GEMM (+4 us at 1 row), routed
experts that wait for the shared ones (+4 us at 1 row), one stream for all (+9 us).
"""

from __future__ import annotations

from typing import Any

import torch

MAX_ROWS = 64
"""With more the router is a small part, and the shared experts end too late: 96 rows lose 1.5 %."""
ROUTED = "_router_ext_routed"
"""Attribute of hidden states, one object for gate and shared experts: the stream of the router, and an event after it."""


def mark(hidden: torch.Tensor) -> None:
    """Note that ``hidden`` [rows, hidden] is routed once the work that its stream has by now is done."""
    hidden.__dict__.pop(ROUTED, None)
    if hidden.is_cuda and len(hidden) <= MAX_ROWS and torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(hidden.device)
        setattr(hidden, ROUTED, (stream, stream.record_event()))


def shared_after_routing(
    moe: Any, hidden_states: torch.Tensor, gemm_output_zero_allocator: Any = None, pre_quant_input: Any = None
) -> None:
    """BEFORE DeepseekV2MoE._forward_shared_experts: a stream that is not the router's waits for the selection."""
    if torch.compiler.is_compiling():  # what a compiler traces has no mark, and it must not see a tensor's __dict__
        return
    routed = hidden_states.__dict__.pop(ROUTED, None)
    if routed is None:
        return
    stream, event = routed
    here = torch.cuda.current_stream(hidden_states.device)
    if here != stream:
        here.wait_event(event)
