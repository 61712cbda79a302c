"""The list of checks that ``check`` and the GPU tests walk: a :class:`Check` is one problem, row count and kind of input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.inputs import KINDS, Inputs, random_inputs
from sglang_router_ext.contract import Problem


def inputs_of(check: Check, *, seed: int = 0, device: torch.device | str = "cpu") -> Inputs:
    """The batch of ``check``; the same bits for the same seed and kind of device."""
    return KINDS[check.kind].apply(random_inputs(check.problem, check.rows, seed=seed, device=device))


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One batch to run designs on; ``case`` is what tables group it under."""

    case: str
    problem: Problem
    rows: int
    kind: str = "random"

    @property
    def name(self) -> str:
        shape = f"{self.problem.experts} x {self.problem.hidden} top-{self.problem.topk}"
        return f"{self.case} ({shape}) rows {self.rows} {self.kind}"


FULL_CASES = (
    "glm-5.3-flash",
    "deepseek-v3-ungrouped",
    "deepseek-v4.1-flash",
    "deepseek-v4-hash",
    "kimi-k2",
    "glm-4.6-bf16",
    "glm-4.6",
    "glm-4.5-air",
    "minimax-m2",
    "qwen3-30b-a3b",
)
"""Cases that every row count and kind is checked on."""
SHORT_CASES = (
    "glm-5.3-flash-shared",
    "glm-4.5-air-bf16",
    "deepseek-v3",
    "deepseek-v4",
    "deepseek-v4.1-images",
    "qwen3-235b-a22b",
    "mixtral-8x7b",
)
"""Cases in a shape that stands above already, or that only some designs take."""
MODEL_ROWS = (*range(1, 19), 24, 31, 32, 33, 48, 63, 64)
KIND_ROWS = (1, 7, 16, 33, 130)
TOKEN_KINDS = tuple(name for name, kind in KINDS.items() if kind.touches == {"tokens"})
LARGE_CASES = ("glm-5.3-flash", "deepseek-v3-ungrouped", "kimi-k2", "glm-4.6")
LARGE_ROWS = (257, 700, 1024, 8192)
ODD = "odd sizes"
ODD_ROWS = (1, 7, 16, 17, 131)
ODD_LARGE_EXPERTS, ODD_LARGE_ROWS = 257, 999
"""From so many experts on, also this row count: there is another division of work for each width of a block."""
ODD_KIND_ROWS = (5, 131)
ODD_KINDS = ("ties", "nan-logits", "odd-strides")
ODD_HIDDEN = (8, 40, 2688, 2880, 7176)
ODD_EXPERTS = (*range(1, 10), 33, 60, 257, 258, 320, 768, 896, 1024)
ODD_TOPK = (1, 2, 6, 8, 16, 22, 32)


def model_checks() -> Iterator[Check]:
    """Models over row counts, then over kinds."""
    for name in FULL_CASES:
        problem = CASES[name].problem
        yield from (Check(case=name, problem=problem, rows=rows) for rows in MODEL_ROWS)
        special = (kind for kind in KINDS if kind != "random" and (kind not in TOKEN_KINDS or problem.reads_tokens))
        yield from (Check(case=name, problem=problem, rows=rows, kind=kind) for kind in special for rows in KIND_ROWS)
    for names, counts in ((LARGE_CASES, LARGE_ROWS), (SHORT_CASES, KIND_ROWS)):
        yield from (Check(case=name, problem=CASES[name].problem, rows=rows) for name in names for rows in counts)
    images = "deepseek-v4.1-images"
    for kind in ("short-tokens", "ties", "padded-last"):
        yield from (Check(case=images, problem=CASES[images].problem, rows=rows, kind=kind) for rows in KIND_ROWS)


def odd_checks() -> Iterator[Check]:
    """Sizes that no model has. Not a full cross product, because most of them are a build of their own: hidden sizes go with
    two expert counts; expert counts go with two small hidden sizes and take turns over top-k, up to all experts selected.
    """
    problems = [Problem(experts=experts, hidden=hidden, topk=6) for hidden in ODD_HIDDEN for experts in (60, 257)]
    for place, experts in enumerate(ODD_EXPERTS):
        fitting = [topk for topk in ODD_TOPK if topk <= experts]
        chosen = {fitting[place % len(fitting)], fitting[-1], *([experts] if experts <= 33 else [])}
        hidden = (8, 40)[place % 2]
        problems += [Problem(experts=experts, hidden=hidden, topk=topk, scale=2.5) for topk in sorted(chosen)]
    problems.append(Problem(experts=288, hidden=40, topk=8, renormalize=False, scale=2.5))
    problems.append(Problem(experts=60, hidden=40, topk=8, scale=1000.0))
    problems += [
        Problem(experts=60, hidden=40, topk=topk, shared=shared, scale=2.5) for topk, shared in ((6, 2), (8, 1), (31, 1))
    ]
    problems += [
        Problem(experts=experts, hidden=hidden, topk=2, weight_dtype="float32")
        for experts, hidden in ((5, 8), (33, 1100), (60, 2880), (257, 7176))
    ]
    softmax: dict[str, Any] = {"score": "softmax", "scale": 2.5}
    problems += [
        Problem(experts=60, hidden=40, topk=6, renormalize=False, **softmax),
        Problem(experts=257, hidden=40, topk=8, renormalize=False, bias=False, shared=1, **softmax),
        Problem(experts=33, hidden=8, topk=32, softcap=0.5, logits_dtype="bfloat16", **softmax),
        Problem(experts=896, hidden=8, topk=16, softcap=30.0, bias=False, **softmax),
        Problem(experts=5, hidden=40, topk=5, score="sqrtsoftplus", nan_first=True, scale=1.5),
        Problem(experts=257, hidden=40, topk=22, score="sqrtsoftplus", renormalize=False),
        Problem(experts=256, hidden=40, topk=8, score="sqrtsoftplus", groups=8, groups_kept=3),
        Problem(experts=384, hidden=40, topk=16, groups=12, groups_kept=1),
        Problem(experts=512, hidden=40, topk=8, groups=16, groups_kept=7),
        Problem(experts=257, hidden=40, topk=22, score="sqrtsoftplus", image_bias=True, renormalize=False, shared=1),
    ]
    hashed: dict[str, Any] = {"score": "sqrtsoftplus", "bias": False, "hashed": True}
    problems += [
        Problem(experts=5, hidden=8, topk=1, **hashed),
        Problem(experts=257, hidden=7176, topk=14, shared=2, scale=2.5, shared_weight=0.4, **{**hashed, "score": "sigmoid"}),
        Problem(experts=60, hidden=10240, topk=9, renormalize=False, scale=1.5, **hashed),
    ]
    for problem in problems:
        counts = (*ODD_ROWS, ODD_LARGE_ROWS) if problem.experts >= ODD_LARGE_EXPERTS else ODD_ROWS
        yield from (Check(case=ODD, problem=problem, rows=rows) for rows in counts)
        kinds = ("unknown-tokens", "strided") if problem.hashed else ODD_KINDS
        yield from (Check(case=ODD, problem=problem, rows=rows, kind=kind) for kind in kinds for rows in ODD_KIND_ROWS)
