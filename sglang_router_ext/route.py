"""The whole path on one page: bind a layer's problem once, then hidden states go in and logits, ids and weights come out.

    plugin/layer.py -> Route -> one file of gate/, selection/ or fused/ -> its .cuh

A stage whose choice is ``host`` is left to the caller: the field of :class:`Routed` is None.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_router_ext.choose import Choice, Tuned, choose, in_force
from sglang_router_ext.contract import Gpu, PlanForm, Problem, Tokens, expect
from sglang_router_ext.designs import TABLE

if TYPE_CHECKING:
    import torch


class Routed(NamedTuple):
    """What the router hands over; a stage that stays with the host is None. Shapes and dtypes as in ``contract.py``."""

    logits: torch.Tensor | None  # [rows, experts] fp32
    ids: torch.Tensor | None  # [rows, topk + shared] int32, -1 in padded rows
    weights: torch.Tensor | None  # [rows, topk + shared] fp32, 0 in padded rows
    plan: dict[str, torch.Tensor] | None = None  # of the form that was asked for ({}: none); None where no design plans


@functools.cache
def launcher(name: str) -> Callable[..., Any]:
    """The function behind a row of the table. Imports its module (and torch) on first use."""
    module, _, function = TABLE[name].target.partition(":")
    return getattr(importlib.import_module(f"sglang_router_ext.{module}"), function)


@functools.lru_cache(maxsize=4096)
def _choose(
    problem: Problem,
    gpu: Gpu | None,
    backend: str | None,
    gate: str,
    unavailable: tuple[tuple[str, str], ...],
    tuned: Tuned | None,
    deterministic: bool,
    rows: int,
    plan: bool,
) -> Choice:
    """Shared by the layers of a model, whose questions are the same; bounded, because prefills come in all row counts."""
    asked: dict[str, Any] = {"unavailable": dict(unavailable), "plan": plan, "tuned": tuned, "deterministic": deterministic}
    return choose(problem, rows, gpu, backend=backend, gate=gate, **asked)


class Route:
    """One layer's router on one GPU. The choice depends on nothing but the row count and whether its experts take a plan, so
    ranks and graph captures agree. ``problem`` has the logits of the model's own gate; what ``gate`` makes of them is in force.
    ``tuned``: bands of the problem that stand in place of the table's, at the rows that they are of.
    """

    def __init__(
        self,
        problem: Problem,
        gpu: Gpu | None,
        *,
        backend: str | None,
        gate: str = "auto",
        unavailable: dict[str, str] | None = None,
        tuned: Tuned | None = None,
        deterministic: bool = False,
    ) -> None:
        self.problem, _ = in_force(problem, gate)
        lost = tuple(sorted((unavailable or {}).items()))
        self._choose = functools.partial(_choose, problem, gpu, backend, gate, lost, tuned, deterministic)

    def choice(self, rows: int, *, plan: bool = True) -> Choice:
        """The designs at ``rows`` rows, which must be the global row count where ranks hold parts of a batch. ``plan``: the
        experts take the plan of a design that makes one.
        """
        return self._choose(rows, plan)

    def plans(self, rows: int, *, plan: bool = True) -> bool:
        """Whether the design at ``rows`` rows can make a plan."""
        return TABLE[self.choice(rows, plan=plan).selection].plans

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        num_token_non_padded: torch.Tensor | None = None,
        tokens: Tokens | None = None,
        packed: torch.Tensor | None = None,
        form: PlanForm | None = None,
    ) -> Routed:
        """Route ``hidden`` [rows, hidden]; ``num_token_non_padded`` is int32 [1] on the device, or None for no padding.

        ``tokens``: of the rows, where the problem asks for them. ``packed`` [rows, topk + shared] int32: written too, by a
        design that packs. ``form``: of the plan, for designs that make one.

        Raises :class:`~sglang_router_ext.contract.ContractError` for arguments outside the contract, before any launch.
        """
        choice = self.choice(len(hidden), plan=form is not None)
        more: dict[str, Any] = {"num_token_non_padded": num_token_non_padded, "tokens": tokens, "packed": packed}
        if choice.fused:
            planned = {"form": form} if TABLE[choice.fused].plans else {}
            return Routed(*launcher(choice.fused)(self.problem, hidden, weight, bias, **more, **planned))
        if choice.gate == "host":
            return Routed(None, None, None)
        logits = launcher(choice.gate)(hidden, weight)
        if choice.selection == "host":
            return Routed(logits, None, None)
        return Routed(logits, *self.select(logits, bias, form=form, **more))

    def select(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        num_token_non_padded: torch.Tensor | None = None,
        tokens: Tokens | None = None,
        packed: torch.Tensor | None = None,
        form: PlanForm | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, torch.Tensor] | None]:
        """The selection alone, for logits [rows, experts] fp32 that the host made: ids, weights and the plan, if the design
        makes one; or nothing of it.
        """
        selection = self.choice(len(logits), plan=form is not None).selection
        if "gate" in TABLE[selection].stages:  # host, or a fused design that wants the hidden states
            return None, None, None
        expect(packed is None or TABLE[selection].packs, "packed", "a tensor", f"None for {selection}, which does not pack")
        by_row: dict[str, Any] = {name: value for name, value in (("tokens", tokens), ("packed", packed)) if value is not None}
        by_row |= {"form": form} if TABLE[selection].plans else {}
        ids, weights, *plan = launcher(selection)(
            self.problem, logits, bias, num_token_non_padded=num_token_non_padded, **by_row
        )
        return ids, weights, plan[0] if plan else None
