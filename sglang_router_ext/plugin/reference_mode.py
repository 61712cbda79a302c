"""Reference mode: SGLang's own MoE modules with our hooks in place and the oracle instead of the kernels, on any device.

For demonstrations and tests on machines without a GPU. Which design runs at which row count is chosen as on ``gpu``; what
runs is ``reference.py`` in fp64. Counters show such calls as ``reference:<design>``. A server cannot be put in this mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_router_ext import reference
from sglang_router_ext.backends import BACKENDS, GATES
from sglang_router_ext.contract import PlanForm, Tokens, expect, gpu_by_name
from sglang_router_ext.designs import TABLE
from sglang_router_ext.plugin import hooks, layer, runner
from sglang_router_ext.plugin.layer import Kernels, Request
from sglang_router_ext.reference import Truth
from sglang_router_ext.route import Route, Routed


class OracleRoute(Route):
    """The stages that the table gives to designs of ours, done by the oracle; the others stay with the host."""

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
        """As :meth:`Route.__call__`, on any device."""
        choice = self.choice(len(hidden), plan=form is not None)
        if choice.gate == "host":
            return Routed(None, None, None)
        logits = reference.gate(hidden, weight).logits
        if choice.selection == "host":
            return Routed(logits.float(), None, None)
        # From the fp64 logits: a gap at the cut must not depend on their rounding.
        truth = self._truth(logits, bias, num_token_non_padded, tokens)
        ids, weights = self._outputs(truth, packed)
        plan = None
        if self.plans(len(hidden), plan=form is not None):
            plan = {} if form is None else reference.plan(self.problem, form, ids)
        return Routed((truth.read if choice.fused else logits).float(), ids, weights, plan)

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
        """As :meth:`Route.select`, on any device and for logits of any float type."""
        selection = self.choice(len(logits), plan=form is not None).selection
        if "gate" in TABLE[selection].stages:
            return None, None, None
        ids, weights = self._outputs(self._truth(logits, bias, num_token_non_padded, tokens), packed)
        plan = None if form is None or not TABLE[selection].plans else reference.plan(self.problem, form, ids)
        return ids, weights, plan

    def _truth(
        self, logits: torch.Tensor, bias: torch.Tensor | None, padding: torch.Tensor | None, tokens: Tokens | None
    ) -> Truth:
        bias, named = reference.by_token(self.problem, bias, tokens)
        rows = None if padding is None else int(padding)
        return reference.select(self.problem, logits, bias, num_token_non_padded=rows, named=named)

    def _outputs(self, truth: Truth, packed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = reference.outputs(self.problem, truth)
        if packed is not None:
            packed.copy_(reference.pack(ids, weights))
        return ids, weights


class Oracle(Kernels):
    """Runs :class:`OracleRoute` as if on ``gpu`` (short name), with every design built."""

    prefix = "reference:"

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu_by_name(gpu)

    def refuses(self, hidden: torch.Tensor) -> str | None:
        return None

    def prepare(self, device: torch.device) -> None:
        """The oracle has no words."""

    def ready(self, *_: Any) -> bool:
        return True

    def route(self, problem: Any, device: torch.device, **options: Any) -> Route:
        return OracleRoute(problem, self.gpu, **options)


def request(backend: str | None = "router_ext_pair", *, gate: str = "auto", gpu: str = "h200") -> Request:
    """What a layer in reference mode is asked for; for ``layer.link``. Raises ContractError for an unknown name."""
    expect(backend is None or backend in BACKENDS, "backend", backend, " | ".join(BACKENDS))
    expect(gate in GATES, "gate", gate, " | ".join(GATES))
    return Request(backend, gate, Oracle(gpu))


@contextmanager
def reference_mode(backend: str | None = "router_ext_pair", *, gate: str = "auto", gpu: str = "h200") -> Iterator[None]:
    """MoE layers that SGLang builds inside run in reference mode, also after it. The hooks stay, and are idle elsewhere.

    The experts stay with the backend that is active in SGLang; ``runner.Family`` of one of our names puts them on our core.

    Raises :class:`~sglang_router_ext.plugin.hooks.HookError` if one of them does not fit the installed SGLang.
    """
    asked = request(backend, gate=gate, gpu=gpu)
    runner.register_cores()
    hooks.install(hooks.needed(where=hooks.SCHEDULER))
    before, layer.reader = layer.reader, lambda: asked
    try:
        yield
    finally:
        layer.reader = before
