"""What rounding does to a selection: the same rows with logits and bias in fp32 and in bf16, held against fp64.

Layer by layer, on the hidden states that arrived there: it tells how often a layer would choose otherwise, and not what that
would do to the layers behind it. Everything runs on the device that the tensors are on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import torch

from sglang_router_ext import reference
from sglang_router_ext.bench import machine
from sglang_router_ext.bench.layers import Layer
from sglang_router_ext.contract import Problem

CHUNK = 4096
"""Rows at a time: those of 4,096 numbers take 128 MB in fp64."""
ARITHMETICS = {"fp32": (False, False), "bf16 logits": (True, False), "bf16 bias": (False, True), "both": (True, True)}
"""Name -> whether logits, and whether the bias, are rounded to bf16. Everything else is fp32."""
LOWEST, HIGHEST, BINS = -9.0, 1.0, 100
"""Of the histogram of gaps, as powers of ten."""


class Spread(msgspec.Struct, frozen=True):
    """Of many numbers."""

    p10: float
    median: float
    p90: float

    @classmethod
    def of(cls, values: torch.Tensor) -> Spread:
        ordered = values.flatten().sort().values
        return cls(*(float(ordered[round(share * (len(ordered) - 1))]) for share in (0.1, 0.5, 0.9)))


class Bias(msgspec.Struct, frozen=True):
    """The selection bias of a layer, as it is and cast to bf16."""

    lowest: float
    highest: float
    distinct: int
    distinct_bf16: int
    largest_error: float
    """Of the cast."""


class Effect(msgspec.Struct, frozen=True):
    """What one arithmetic does."""

    arithmetic: str
    key_error: float
    """Median over rows and experts of the distance to the fp64 rank key."""
    rows_changed: float
    """Share of rows whose experts are not those of fp64."""
    weight_moved: float
    """Share of the weight, over rows, that goes to experts that fp64 has not selected."""


class Phase(msgspec.Struct, frozen=True):
    """The rows of one phase in one layer."""

    phase: str
    rows: int
    gap: Spread
    """At the cut: the last selected rank key less the first rejected one."""
    histogram: list[int]
    """Of gaps, over powers of ten from LOWEST to HIGHEST; what is outside stands at the ends."""
    effects: list[Effect]


class LayerReport(msgspec.Struct, frozen=True):
    number: int
    bias: Bias | None
    phases: list[Phase]


class Average(msgspec.Struct, frozen=True):
    """One arithmetic in an average layer: medians of medians, means of shares."""

    phase: str
    arithmetic: str
    layers: int
    rows: int
    """In all layers."""
    gap: float
    key_error: float
    rows_changed: float
    weight_moved: float


def look(problem: Problem, layer: Layer) -> LayerReport:
    """Everything about one layer."""
    phases = []
    for phase, hidden in layer.rows.items():
        assert layer.weight is not None
        phases.append(_phase(problem, phase, hidden, layer.weight, layer.bias))
    return LayerReport(layer.number, None if layer.bias is None else bias_of(layer.bias), phases)


def bias_of(bias: torch.Tensor) -> Bias:
    """``bias`` [experts] fp32."""
    rounded = bias.bfloat16().float()
    error = float((rounded.double() - bias.double()).abs().max())
    return Bias(float(bias.min()), float(bias.max()), len(bias.unique()), len(rounded.unique()), error)


class Rounded(msgspec.Struct, frozen=True):
    """A selection in some arithmetic."""

    keys: torch.Tensor  # [rows, experts] fp32
    ids: torch.Tensor  # [rows, topk] int64
    weights: torch.Tensor  # [rows, topk] fp64


def rounded(problem: Problem, logits: torch.Tensor, bias: torch.Tensor | None, arithmetic: str) -> Rounded:
    """Select from fp32 ``logits`` [rows, experts] and ``bias`` [experts] in ``arithmetic``."""
    of_logits, of_bias = ARITHMETICS[arithmetic]
    value = logits.bfloat16().float() if of_logits else logits
    add = 0.0 if bias is None else bias.bfloat16().float() if of_bias else bias
    if problem.score == "softmax":
        keys = (problem.softcap * torch.tanh(value / problem.softcap) if problem.softcap else value) + add
        scores = torch.softmax(keys, 1)
    else:
        scores = torch.sigmoid(value)
        if problem.score == "sqrtsoftplus":
            scores = torch.sqrt(torch.nn.functional.softplus(value, threshold=80.0))
        keys = scores + add
    ranked = torch.where(keys.isnan(), math.inf if problem.nan_first else reference.NAN_KEY, keys)
    if problem.groups > 1:
        kept = reference.best_groups(problem, ranked).repeat_interleave(problem.experts // problem.groups, 1)
        ranked = torch.where(kept, ranked, -math.inf)
    ids = torch.sort(ranked, dim=1, descending=True, stable=True).indices[:, : problem.topk]
    return Rounded(keys, ids, reference.weigh(problem, scores.double(), ids))


def moved(ids: torch.Tensor, wanted: torch.Tensor, experts: int) -> torch.Tensor:
    """[rows, topk] bool: which of ``ids`` are not among ``wanted`` [rows, topk]."""
    inside = torch.zeros((len(ids), experts), dtype=torch.bool, device=ids.device).scatter_(1, wanted, True)
    return ~inside.gather(1, ids)


def arithmetics(problem: Problem) -> list[str]:
    """Those that differ: without a bias none of it can be rounded."""
    return [name for name, (_, of_bias) in ARITHMETICS.items() if problem.bias or not of_bias]


def _phase(problem: Problem, phase: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Phase:
    exact = msgspec.structs.replace(problem, logits_dtype="float32")  # what a model rounds is what is asked about
    names = arithmetics(problem)
    gaps: list[torch.Tensor] = []
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    changed, weights_moved = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
    wide = weight.double().t()
    for first in range(0, len(hidden), CHUNK):
        rows = hidden[first : first + CHUNK]
        truth = reference.select(exact, rows.double() @ wide, bias)
        gaps.append(truth.margin)
        with machine.tf32(allowed=False):
            logits = rows.float() @ weight.float().t()
        for name in names:
            found = rounded(exact, logits, bias, name)
            errors[name].append((found.keys.double() - truth.keys).abs().float())
            others = moved(found.ids, truth.ids, problem.experts)
            changed[name] += int(others.any(1).sum())
            total = found.weights.sum(1)
            weights_moved[name] += float(((found.weights * others).sum(1) / torch.where(total > 0, total, 1.0)).sum())
    gap = torch.cat(gaps)
    effects = [
        Effect(name, float(_median(errors[name])), changed[name] / len(hidden), weights_moved[name] / len(hidden))
        for name in names
    ]
    return Phase(phase, len(hidden), Spread.of(gap), _histogram(gap), effects)


def _median(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts]).nanmedian()


def _histogram(gaps: torch.Tensor) -> list[int]:
    place = gaps.clamp(10**LOWEST, 10**HIGHEST).log10().float().cpu()
    return [int(count) for count in torch.histc(place, BINS, LOWEST, HIGHEST)]


def averages(layers: Iterable[LayerReport]) -> list[Average]:
    """Each arithmetic in each phase, over layers."""
    found: dict[tuple[str, str], list[tuple[Phase, Effect]]] = {}
    for layer in layers:
        for phase in layer.phases:
            for effect in phase.effects:
                found.setdefault((phase.phase, effect.arithmetic), []).append((phase, effect))
    return [
        Average(
            phase,
            arithmetic,
            len(some),
            sum(one.rows for one, _ in some),
            middle(one.gap.median for one, _ in some),
            middle(effect.key_error for _, effect in some),
            sum(effect.rows_changed for _, effect in some) / len(some),
            sum(effect.weight_moved for _, effect in some) / len(some),
        )
        for (phase, arithmetic), some in found.items()
    ]


def middle(values: Iterable[float]) -> float:
    """The median; of an even number the lower of the two in the middle."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
