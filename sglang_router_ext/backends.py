"""Values of ``--moe-runner-backend`` and of ``SGLANG_ROUTER_EXT_GATE``, and what runs because of them. Imports no torch."""

from __future__ import annotations

import msgspec

from sglang_router_ext.designs import DESIGNS


class Backend(msgspec.Struct, frozen=True):
    """A value of ``--moe-runner-backend``. ``designs`` run because the user named the backend; empty: only measured bands."""

    name: str
    what: str
    designs: tuple[str, ...] = ()


_STAGES = ("small_rows", "tensor_core", "cublas_gemm", "split_gemm", "warp_select", "triton_select")
"""Designs of one stage that a backend takes where none for several covers a case."""

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("router_ext", "designs that are on and that records show to beat SGLang's on this GPU at this row count"),
        Backend(
            "router_ext_pair",
            "the fused pair: a gate GEMM and one selection kernel; past 16 rows another GEMM and that kernel",
            ("pair", "hash_rows", *_STAGES),
        ),
        Backend(
            "router_ext_single",
            "one launch for gate, selection and the experts' plan; past 128 rows a gate GEMM, and two launches for the rest",
            ("single", "tensor_pair", "pair", "hash_rows", "select_plan", *_STAGES),
        ),
    )
}

GATE_MODES = ("auto", "host", "fp32")
GATES = (*GATE_MODES, *(d.name for d in DESIGNS if d.stages == ("gate",)))
"""Values of ``SGLANG_ROUTER_EXT_GATE``: ``auto`` leaves the choice to the backend, ``host`` keeps SGLang's own GEMM, ``fp32``
is ``auto`` without the rounding to bf16 that some models do to their logits; a design's name is that gate, without it too."""
