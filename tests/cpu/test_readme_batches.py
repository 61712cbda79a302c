"""The README's tables about batches, from fabricated records."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_router_ext import readme
from sglang_router_ext.bench.record import Record, decode

IDENTITY: dict[str, Any] = {
    "schema": 1,
    "run": "ab12",
    "time": "2026-12-01T00:00:00Z",
    "gpu": "NVIDIA H200",
    "commit": "0123456789",
    "versions": {"torch": "2.11.0"},
}
MODEL = {"problem": "288 x 4096", "moe_layers": 3, "moe_intermediate": 64, "experts": "bf16", "backend": "router_ext_single"}


def line(kind: str, **fields: Any) -> Record:
    return decode(msgspec.json.encode({**IDENTITY, "kind": kind, **fields}))


def test_flips_are_shown_with_the_margin_of_those_that_flipped() -> None:
    one = {
        "path": "sglang-pair",
        "first": 6,
        "batch": 96,
        "rows": 500000,
        "bits": 400,
        "order": 3,
        "experts": 21,
        "margin": 2e-7,
    }
    ours = {**one, "path": "tensor_pair", "bits": 0, "order": 0, "experts": 0, "margin": None}
    text = readme.results([line("flips", case="glm-5.3-flash", rows=500000, flips=[one, ours])])
    assert "The same 500,000 rows of glm-5.3-flash in batches of other sizes" in text
    assert "| `sglang-pair` | 96 against 6 | 500,000 | 400 | 3 | 21 | 2.0e-07 |" in text
    assert "| `tensor_pair` | 96 against 6 | 500,000 | 0 | 0 | 0 | - |" in text


def test_of_two_runs_of_the_same_the_newer_is_shown() -> None:
    found = {"size": 96, "tokens_apart": 0, "ids": 1000, "ids_apart": 0}
    older = line("determinism", **MODEL, sequences=96, compared={"stock": [found | {"ids_apart": 7}]})
    fields = {**IDENTITY, "kind": "determinism", "time": "2026-12-02T00:00:00Z", **MODEL, "sequences": 96}
    newer = decode(msgspec.json.encode({**fields, "compared": {"stock": [found | {"ids_apart": 9}]}}))
    text = readme.results([newer, older])
    assert "| stock | 96 | 0 | 1,000 | 9 |" in text
    assert "| 7 |" not in text


def test_a_prefill_without_a_profile_says_so() -> None:
    clock = {"median": 1.5, "p10": 1.25, "p90": 1.75, "count": 8}
    engine = {"clock_ms": clock, "gpu": None, "router": {"median_us": 87.9}}
    text = readme.results([line("prefill", **MODEL, prompt_tokens=8192, served={"stock": engine})])
    assert "Prompts of 8,192 tokens, one at a time: 3 MoE layers on NVIDIA H200" in text
    assert "| stock | 1.50 (1.25 to 1.75) ms | - | 87.9 us |" in text
