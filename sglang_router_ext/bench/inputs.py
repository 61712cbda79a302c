"""Batches of input, drawn from a seed: random ones and the special kinds. A :class:`Kind` says what is special about one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_router_ext.contract import Problem, Tokens

SPREAD = 1.2
"""Standard deviation of a random logit."""
BIAS = (11.54, 11.96)
"""Range of the selection bias of GLM-5.3-Flash's layer 24: an offset far larger than its spread."""
SMALL_BIAS = (-0.76, 0.15)
"""Range of Kimi K3's."""
VOCABULARY, IMAGE_TOKEN = 4096, 3


class Inputs(NamedTuple):
    """Arguments of every design for one batch; a design reads those of its stages."""

    hidden: torch.Tensor  # [rows, hidden] bf16
    weight: torch.Tensor  # [experts, hidden] bf16 or fp32
    bias: torch.Tensor  # [experts] fp32
    logits: torch.Tensor  # [rows, experts] fp32: hidden @ weight.T, or whatever a selection-only kind puts there
    padding: torch.Tensor | None  # int32 [1]: num_token_non_padded
    tokens: Tokens | None = None  # where the problem asks for them


def bias_of(problem: Problem, inputs: Inputs) -> torch.Tensor | None:
    """What a router of ``problem`` is given as its bias."""
    return inputs.bias if problem.bias else None


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden.float() @ weight.float().t()


def random_inputs(problem: Problem, rows: int, *, seed: int = 0, device: torch.device | str = "cpu") -> Inputs:
    """Hidden states ~ N(0, 1), logits ~ N(0, ``SPREAD``), bias as in GLM-5.3-Flash. The weight does not depend on ``rows``."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, problem.weight_dtype)
    scale = SPREAD / math.sqrt(problem.hidden)
    weight = torch.randn((problem.experts, problem.hidden), generator=generator, device=device).mul_(scale).to(dtype)
    bias = _uniform((problem.experts,), *BIAS, generator)
    hidden = torch.randn((rows, problem.hidden), generator=generator, device=device).bfloat16()
    inputs = Inputs(hidden, weight, bias, _logits(hidden, weight), None)
    return inputs._replace(tokens=_tokens(problem, rows, generator)) if problem.reads_tokens else inputs


def _tokens(problem: Problem, rows: int, generator: torch.Generator) -> Tokens:
    """Every second token an image's, that of a row alone too; or tokens with experts of their own."""
    ids = torch.randint(IMAGE_TOKEN + 1, VOCABULARY, (rows,), generator=generator, device=generator.device)
    if problem.hashed:
        order = torch.rand((VOCABULARY, problem.experts), generator=generator, device=generator.device).argsort(1)
        return Tokens(ids, table=order[:, : problem.topk].int().contiguous())
    ids[::2] = IMAGE_TOKEN
    return Tokens(ids, IMAGE_TOKEN, _uniform((problem.experts,), *BIAS, generator))


class Kind(NamedTuple):
    """What is special about a batch."""

    name: str
    touches: frozenset[str]
    """Names of :class:`Inputs`' fields that differ from random ones; empty: it is the random batch itself."""
    apply: Callable[[Inputs], Inputs]

    def concerns(self, stages: tuple[str, ...]) -> bool:
        """Whether a design of ``stages`` reads anything that this kind touches."""
        reads = {"hidden", "weight"} if "gate" in stages else {"logits"}
        if "selection" in stages:
            reads |= {"bias", "padding", "tokens"}
        return not self.touches or bool(self.touches & reads)


KINDS: dict[str, Kind] = {}


def _kind(*touches: str) -> Callable[[Callable[[Inputs], Inputs]], Callable[[Inputs], Inputs]]:
    """Enter a function into :data:`KINDS`, under its own name with dashes."""

    def register(apply: Callable[[Inputs], Inputs]) -> Callable[[Inputs], Inputs]:
        name = apply.__name__.replace("_", "-")
        KINDS[name] = Kind(name, frozenset(touches), apply)
        return apply

    return register


def _gate(inputs: Inputs, hidden: torch.Tensor | None = None, weight: torch.Tensor | None = None) -> Inputs:
    """``inputs`` with another hidden state or weight, and the logits that follow."""
    hidden = inputs.hidden if hidden is None else hidden
    weight = inputs.weight if weight is None else weight
    return inputs._replace(hidden=hidden, weight=weight, logits=_logits(hidden, weight))


def _level(inputs: Inputs, values: torch.Tensor) -> Inputs:
    """Every row's logit of expert e is nearly ``values[e]``: hidden states of ones, and a constant weight row an expert."""
    column = (values / inputs.hidden.shape[1]).to(inputs.weight.dtype)
    return _gate(inputs, torch.ones_like(inputs.hidden), column[:, None].expand_as(inputs.weight).contiguous())


def _edit(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """A copy of ``tensor`` that ``change`` wrote to."""
    copy = tensor.clone()
    change(copy)
    return copy


@_kind()
def random(inputs: Inputs) -> Inputs:
    return inputs


@_kind("weight", "logits", "bias")
def ties(inputs: Inputs) -> Inputs:
    """Four copies of every gate row, a quarter of the experts apart, and one bias for all."""
    experts = len(inputs.weight)
    copies = torch.arange(experts, device=inputs.weight.device) % max(1, -(-experts // 4))
    return _gate(inputs, weight=inputs.weight[copies].contiguous())._replace(bias=torch.full_like(inputs.bias, 12.0))


@_kind("weight", "logits", "bias")
def neighbour_ties(inputs: Inputs) -> Inputs:
    """Pairs of neighbouring experts tie, bias included."""
    pairs = torch.arange(len(inputs.weight), device=inputs.weight.device) // 2 * 2
    return _gate(inputs, weight=inputs.weight[pairs].contiguous())._replace(bias=inputs.bias[pairs].contiguous())


@_kind("hidden", "logits")
def zero_rows(inputs: Inputs) -> Inputs:
    return _gate(inputs, torch.zeros_like(inputs.hidden))


@_kind("hidden", "logits")
def one_hot(inputs: Inputs) -> Inputs:
    """One product a logit, which leaves no room for a part of the weight that is missing."""
    rows, size = inputs.hidden.shape
    columns = torch.arange(rows, device=inputs.hidden.device) * 37 % size
    hidden = torch.zeros_like(inputs.hidden)
    hidden[torch.arange(rows, device=hidden.device), columns] = 0.5
    return _gate(inputs, hidden)


@_kind("hidden", "logits")
def equal_rows(inputs: Inputs) -> Inputs:
    return _gate(inputs, inputs.hidden[:1].expand_as(inputs.hidden).contiguous())


@_kind("hidden", "logits")
def nan_row(inputs: Inputs) -> Inputs:
    return _gate(inputs, _edit(inputs.hidden, lambda hidden: hidden[0].fill_(float("nan"))))


@_kind("hidden", "logits")
def one_nan(inputs: Inputs) -> Inputs:
    return _gate(inputs, _edit(inputs.hidden, lambda hidden: hidden[-1, -1].fill_(float("nan"))))


@_kind("hidden", "logits")
def inf(inputs: Inputs) -> Inputs:
    """+inf in the first row, -inf in the last: logits of both signs."""

    def change(hidden: torch.Tensor) -> None:
        hidden[0, 0] = float("inf")
        hidden[-1, -1] = float("-inf")

    return _gate(inputs, _edit(inputs.hidden, change))


@_kind("hidden", "logits")
def saturating(inputs: Inputs) -> Inputs:
    """Logits of about +-100: scores of 0 and 1, many of them equal in fp32."""
    return _gate(inputs, inputs.hidden * 64)


@_kind("hidden", "weight", "logits")
def negative(inputs: Inputs) -> Inputs:
    """Logits around -18, whose scores of 1e-8 vanish beside the bias but still set the weights."""
    return _level(inputs, torch.linspace(-18.5, -17.5, len(inputs.weight), device=inputs.weight.device))


@_kind("hidden", "weight", "logits")
def minus_100(inputs: Inputs) -> Inputs:
    """Scores below the smallest normal float: all weights 0."""
    return _level(inputs, torch.full((len(inputs.weight),), -100.0, device=inputs.weight.device))


def _moved(bias: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """``bias``, drawn from ``BIAS``, moved into [low, high]."""
    return (bias - BIAS[0]) * ((high - low) / (BIAS[1] - BIAS[0])) + low


@_kind("bias")
def small_bias(inputs: Inputs) -> Inputs:
    """Keys of both signs."""
    return inputs._replace(bias=_moved(inputs.bias, *SMALL_BIAS))


@_kind("bias")
def negative_bias(inputs: Inputs) -> Inputs:
    return inputs._replace(bias=_moved(inputs.bias, -3.0, -2.0))


@_kind("bias")
def nan_bias(inputs: Inputs) -> Inputs:
    return inputs._replace(bias=_edit(inputs.bias, lambda bias: bias[::3].fill_(float("nan"))))


@_kind("bias")
def inf_bias(inputs: Inputs) -> Inputs:
    """One expert that always wins, and so few others that some with a key of minus infinity must be taken."""
    bias = torch.full_like(inputs.bias, float("-inf"))
    bias[0], bias[-1] = 1.0, float("inf")
    return inputs._replace(bias=bias)


@_kind("logits")
def nan_logits(inputs: Inputs) -> Inputs:
    """A row of NaN, and a single NaN in the last row."""

    def change(logits: torch.Tensor) -> None:
        logits[-1, -1] = logits[0] = float("nan")

    return inputs._replace(logits=_edit(inputs.logits, change))


@_kind("logits")
def all_but_one_nan(inputs: Inputs) -> Inputs:
    return inputs._replace(logits=_edit(inputs.logits, lambda logits: logits[:, :-1].fill_(float("nan"))))


@_kind("logits")
def inf_logits(inputs: Inputs) -> Inputs:
    """Every second logit infinite, of either sign; the last row is minus infinity alone."""

    def change(logits: torch.Tensor) -> None:
        logits[:, ::4], logits[:, 2::4] = float("inf"), float("-inf")
        logits[-1] = float("-inf")

    return inputs._replace(logits=_edit(inputs.logits, change))


@_kind("logits")
def far_logits(inputs: Inputs) -> Inputs:
    """From where exp loses its last bit to where softplus is its argument."""
    spread = torch.linspace(-104.0, 200.0, inputs.logits.shape[1], device=inputs.logits.device)
    return inputs._replace(logits=spread.expand_as(inputs.logits).contiguous() + inputs.logits)


@_kind("logits")
def largest_logits(inputs: Inputs) -> Inputs:
    return inputs._replace(logits=inputs.logits.sign() * torch.finfo(torch.float32).max)


@_kind("logits", "bias")
def equal_logits(inputs: Inputs) -> Inputs:
    """Every expert ties with every other."""
    return inputs._replace(logits=torch.full_like(inputs.logits, 0.25), bias=torch.full_like(inputs.bias, 11.75))


@_kind("logits", "bias")
def few_values(inputs: Inputs) -> Inputs:
    """Logits rounded to halves and one bias: many exact ties at the cut."""
    return inputs._replace(logits=(inputs.logits * 2).round() / 2, bias=torch.full_like(inputs.bias, 12.0))


def _widened(tensor: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """``tensor`` as a view into rows that hold ``before`` and ``after`` more elements."""
    width = tensor.shape[1]
    wide = torch.full((len(tensor), before + width + after), 7.0, dtype=tensor.dtype, device=tensor.device)
    wide[:, before : before + width] = tensor
    return wide[:, before : before + width]


@_kind("hidden", "weight", "logits")
def strided(inputs: Inputs) -> Inputs:
    """Rows of wider buffers, every row on a 16-byte boundary."""
    return inputs._replace(
        hidden=_widened(inputs.hidden, 8, 16),
        weight=_widened(inputs.weight, 16, 8),
        logits=_widened(inputs.logits, 4, 4 - inputs.logits.shape[1] % 4),
    )


@_kind("logits")
def odd_strides(inputs: Inputs) -> Inputs:
    """Logits whose rows start on 4-byte boundaries only."""
    return inputs._replace(logits=_widened(inputs.logits, 1, 2 - inputs.logits.shape[1] % 2))


def _padded(valid: int, inputs: Inputs) -> Inputs:
    return inputs._replace(padding=torch.tensor([valid], dtype=torch.int32, device=inputs.hidden.device))


@_kind("padding")
def padded_all(inputs: Inputs) -> Inputs:
    return _padded(0, inputs)


@_kind("padding")
def padded_but_one(inputs: Inputs) -> Inputs:
    return _padded(1, inputs)


@_kind("padding")
def padded_last(inputs: Inputs) -> Inputs:
    return _padded(len(inputs.hidden) - 1, inputs)


@_kind("padding")
def padded_none(inputs: Inputs) -> Inputs:
    return _padded(len(inputs.hidden), inputs)


@_kind("padding")
def padded_beyond(inputs: Inputs) -> Inputs:
    """A count of more rows than there are."""
    return _padded(len(inputs.hidden) + 5, inputs)


def _with_tokens(inputs: Inputs, **fields: Any) -> Inputs:
    assert inputs.tokens is not None
    return inputs._replace(tokens=inputs.tokens._replace(**fields))


@_kind("tokens")
def short_tokens(inputs: Inputs) -> Inputs:
    """Tokens as int32, and the first one no image's."""
    if inputs.tokens is None:
        return inputs
    return _with_tokens(inputs, ids=_edit(inputs.tokens.ids.int(), lambda ids: ids[0].fill_(VOCABULARY - 1)))


@_kind("tokens")
def unknown_tokens(inputs: Inputs) -> Inputs:
    """A token before and one behind the table; the first expert of every other token does not exist, and a token has none."""
    tokens = inputs.tokens
    if tokens is None or tokens.table is None:
        return inputs

    def change(table: torch.Tensor) -> None:
        table[:, 0] = torch.where(torch.arange(len(table), device=table.device) % 2 == 0, -1, len(inputs.weight))
        table[VOCABULARY - 1] = -1

    def move(ids: torch.Tensor) -> None:
        ids[0], ids[-1] = -1, VOCABULARY
        ids[len(ids) // 2] = VOCABULARY - 1

    return _with_tokens(inputs, ids=_edit(tokens.ids, move), table=_edit(tokens.table, change))
