"""One MoE layer of SGLang: asks the table for its route, runs it where the gate runs, and hands the selection over.

    __init__ of a MoE block   -> link_moe       ties the gate to the TopKConfig that selects from its logits
    its gate's forward        -> gate_forward   runs the route; the logits returned carry the selection as a Plan

Gates that are linear layers come by ``linear.py``. The functions of SGLang that select take the Plan in ``handover.py``. What
the experts' count and sort would make comes with it where a design plans; see ``blocks.py``.

The plan travels on the logits tensor and not on the module: with two-batch overlap two batches are between gate and selection
at once.

Whatever is left to SGLang is counted with its reason; nothing else here decides about coverage (see ``choose.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_router_ext import settings
from sglang_router_ext.arguments import VECTOR_BYTES
from sglang_router_ext.backends import BACKENDS, GATE_MODES
from sglang_router_ext.choose import Choice
from sglang_router_ext.contract import DTYPES, PLAN_ROWS, PlanForm, Problem, Tokens
from sglang_router_ext.designs import DESIGNS, TABLE
from sglang_router_ext.fused import single, words
from sglang_router_ext.plugin import counters, overlap, preflight
from sglang_router_ext.plugin.blocks import Blocks, Forms
from sglang_router_ext.plugin.counters import HOST
from sglang_router_ext.plugin.handover import Plan, hand_over
from sglang_router_ext.plugin.problem import (
    ELSEWHERE,
    Hash,
    as_the_models_gate,
    name_of,
    problem_of,
    ranks_images,
    selects_elsewhere,
)
from sglang_router_ext.route import Route

if TYPE_CHECKING:
    from sglang.srt.layers.moe.topk import TopKConfig

LINK = "_router_ext_layer"
"""Attribute of a gate: its :class:`Layer`."""

NOT_LINKED = "gate of a model that the plugin does not link to a selection"
NO_WORDS = "no words are left for another CUDA graph"
NO_TOKENS = "the tokens of these rows are not known"
INFERENCE = "inference-mode tensors do not show whether they were changed"


class Kernels:
    """What runs the designs that the table chooses: the kernels of this package, on CUDA tensors."""

    prefix = ""
    """Stands before the design's name in the counters."""

    def refuses(self, hidden: torch.Tensor) -> str | None:
        """Why ``hidden`` cannot be routed here, or None."""
        return None if hidden.is_cuda else "not on a CUDA device"

    def prepare(self, device: torch.device) -> None:
        """Before the first call of a layer whose routes may plan."""
        words.reserve(device)

    def ready(
        self,
        choice: Choice,
        problem: Problem,
        rows: int,
        bias: torch.Tensor | None,
        device: torch.device,
        form: PlanForm | None,
    ) -> bool:
        """Whether the design of ``choice`` can run in a capture, if this is one."""
        return choice.fused not in _WORDS or single.ready(problem, rows, bias, device, form)

    def route(self, problem: Problem, device: torch.device, **options: Any) -> Route:
        """A bound route for one layer; ``options`` as :class:`Route` takes them."""
        gpu = preflight.detect_gpu(device.index)
        options["unavailable"] = {**preflight.unavailable(), **options["unavailable"]}
        return Route(problem, gpu, tuned=preflight.tuned_bands(problem, gpu), **options)


class Request(NamedTuple):
    """What is asked of a layer, read once when the layer is built: later the speculative context swaps the global backend."""

    backend: str | None
    """A backend of ours, or None under a stock one."""
    gate: str
    """``SGLANG_ROUTER_EXT_GATE``."""
    executor: Kernels = Kernels()
    deterministic: bool = False
    """Whether a row's result must not depend on its batch; :func:`link` reads it."""


def request_in_force() -> Request:
    """The request for a layer that is being built now, from SGLang's active backend and our settings."""
    from sglang.srt.layers.moe.utils import get_moe_runner_backend

    name = get_moe_runner_backend().value
    return Request(name if name in BACKENDS else None, settings.read().gate)


reader: Callable[[], Request] = request_in_force
"""How a new layer learns what is asked of it; ``reference_mode`` puts another one here for a while."""


class Noted(NamedTuple):
    """Tokens, and the hidden states that they belong to."""

    hidden: weakref.ref[torch.Tensor]
    tokens: Tokens


class Layer:
    """One linked layer. Holds no weight and no module: both come with each call, so that updates in place are seen."""

    def __init__(
        self,
        request: Request,
        config: TopKConfig | Hash | None,
        refusal: str | None,
        *,
        linear: bool = False,
        image_bias: bool = False,
    ) -> None:
        self.request = request
        self.config = config
        self.refusal = refusal
        self.linear = linear
        self.image_bias = image_bias
        self.noted: Noted | None = None
        """The tokens of the rows that come to the gate next, where they have a say; see ``tokens.py``."""
        self.before_cast: torch.Tensor | None = None
        """What this call's hidden states were before the block cast them, where it does; see ``linear.py``."""
        elsewhere = not isinstance(config, Hash) and selects_elsewhere(config)
        self._elsewhere = dict.fromkeys(_SELECTIONS, ELSEWHERE) if elsewhere else {}
        self.forms = Forms()
        self._bound: tuple[Any, ...] | None = None
        self._route: Route | None = None
        self._spares: dict[str, Route] = {}

    @property
    def reads_tokens(self) -> bool:
        """Whether the tokens of the rows have a say, so that they are to be noted."""
        return self.image_bias or isinstance(self.config, Hash)

    def logits(self, gate: Any, hidden: torch.Tensor, host: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Logits [rows, experts] of ``hidden`` [rows, hidden], by our gate or by ``host``; with a plan where we select."""
        noted, self.noted = self.noted, None
        refusal = self.refusal or self._refuses(gate, hidden)
        if refusal is not None:
            counters.count("gate", HOST, refusal)
            return hand_over(host(), refusal)
        weight: torch.Tensor = gate.weight.detach()  # kernels take no tensors that require gradients
        bias: torch.Tensor | None = getattr(self.config, "correction_bias", None)
        bias = None if bias is None else bias.detach()
        form = self.forms[len(hidden)]
        route = self._bind(weight, bias, hidden)
        tokens = noted.tokens if noted is not None and noted.hidden() is hidden else None
        if route.problem.reads_tokens and tokens is None:
            route = self._spare(route.problem, hidden.device, _SELECTIONS, NO_TOKENS)
        choice = route.choice(len(hidden), plan=form is not None)
        if not self.request.executor.ready(choice, route.problem, len(hidden), bias, hidden.device, form):
            route = self._spare(route.problem, hidden.device, _PLANNING_GATES, NO_WORDS)
            choice = route.choice(len(hidden), plan=form is not None)
        prefix = self.request.executor.prefix
        packs = TABLE[choice.selection].packs and getattr(self.config, "fused_gate_packed_ids", False)
        slots = (len(hidden), route.problem.slots)
        packed = torch.empty(slots, dtype=torch.int32, device=hidden.device) if packs else None
        more: dict[str, Any] = {"tokens": tokens, "packed": packed}
        logits, ids, weights, plan = route(hidden, weight, bias, form=form, **more)
        if logits is None:
            counters.count("gate", HOST, self._why(choice, "gate", len(hidden)))
            logits = host()
            ids, weights, plan = route.select(logits, bias, form=form, **more)
        else:
            counters.count("gate", prefix + choice.gate)
        if ids is None or weights is None or logits.is_inference():
            why = self._why(choice, "selection", len(hidden)) if ids is None else INFERENCE
            return hand_over(as_the_models_gate(route.problem, logits), why)
        overlap.mark(hidden)
        design = prefix + choice.selection
        blocks = (
            Blocks(self.forms, design, form, plan, ids._version, route.problem.experts + route.problem.shared)
            if route.plans(len(hidden))
            else None
        )
        partial = host if route.problem.hashed else None
        return hand_over(
            logits, Plan(ids, weights, design, route.problem, bias, logits._version, blocks, tokens, packed, partial)
        )

    def _refuses(self, gate: Any, hidden: torch.Tensor) -> str | None:
        """Why this call is SGLang's whatever the table says, or None."""
        if isinstance(self.config, Hash) and torch.is_inference_mode_enabled():
            return INFERENCE
        if len(hidden) == 0:
            return "no rows"
        if not isinstance(gate.weight, torch.nn.Parameter):
            return "the gate's weight is not a plain parameter"
        if name_of(gate.weight.dtype) not in DTYPES or name_of(hidden.dtype) not in DTYPES:
            return f"{name_of(hidden.dtype)} hidden states on a {name_of(gate.weight.dtype)} gate weight"
        if hidden.dim() != 2 or not hidden.is_contiguous():
            return "hidden states are not contiguous rows"
        if not gate.weight.is_contiguous():
            return "the gate's weight is not contiguous rows"
        if hidden.data_ptr() % VECTOR_BYTES or gate.weight.data_ptr() % VECTOR_BYTES:
            return f"hidden states or the gate's weight do not start on a {VECTOR_BYTES}-byte boundary"
        return self.request.executor.refuses(hidden)

    def _bind(self, weight: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor) -> Route:
        """The route, made at the first call: not before are the weights loaded in their final type and place."""
        key = (hidden.dtype, weight.dtype, tuple(weight.shape), None if bias is None else bias.dtype, hidden.device)
        if self._route is None or key != self._bound:
            logits = "bfloat16" if self.linear and weight.dtype != torch.float32 else "float32"
            config = None if self._elsewhere else self.config
            problem = problem_of(weight, config, hidden.dtype, logits_dtype=logits, image_bias=self.image_bias)
            self._route, self._spares = self._route_of(problem, hidden.device, {}), {}
            self._bound = key
            choices = (self._route.choice(rows, plan=plan) for rows in range(1, PLAN_ROWS + 1) for plan in (True, False))
            if any(choice.fused in _WORDS for choice in choices):
                self.request.executor.prepare(hidden.device)
        return self._route

    def _spare(self, problem: Problem, device: torch.device, without: tuple[str, ...], why: str) -> Route:
        """The route without some designs, made once for each reason."""
        if why not in self._spares:
            self._spares[why] = self._route_of(problem, device, dict.fromkeys(without, why))
        return self._spares[why]

    def _route_of(self, problem: Problem, device: torch.device, without: dict[str, str]) -> Route:
        request = self.request
        asked = {"backend": request.backend, "gate": request.gate, "deterministic": request.deterministic}
        return self.request.executor.route(problem, device, **asked, unavailable={**self._elsewhere, **without})

    def _why(self, choice: Choice, stage: str, rows: int) -> str:
        """Why ``stage`` stays with SGLang: the first reason of each design that could have done it, without the row count."""
        if stage == "gate" and self.request.gate == HOST:
            return "SGLANG_ROUTER_EXT_GATE=host"
        if stage == "selection" and self.request.backend is None:
            return "stock backend"
        if stage == "selection" and self._elsewhere:
            return ELSEWHERE
        losers = ((name, reasons) for name, reasons in choice.losers.items() if stage in TABLE[name].stages)
        return "; ".join(f"{name}: {reasons[0].removeprefix(f'{rows} ')}" for name, reasons in losers)


_WORDS = tuple(design.name for design in DESIGNS if "fused/words.py" in design.sources)
"""Designs whose blocks tell each other by words that are set aside."""
_PLANNING_GATES = tuple(design.name for design in DESIGNS if design.plans and "gate" in design.stages)
"""Without words none of these: ``pair`` is faster at few rows than the one for many that would come next."""
_SELECTIONS = tuple(design.name for design in DESIGNS if "selection" in design.stages and design.name != HOST)


def link(gate: torch.nn.Module, topk: torch.nn.Module, request: Request | None = None, *, linear: bool = False) -> Layer:
    """Tie ``gate`` to ``topk`` (TopK, HashTopK), which selects from its logits. Registers no submodule or parameter.

    ``request`` None: what is in force now (see :func:`request_in_force`). ``linear``: see ``linear.py``.
    """
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe.hash_topk import HashTopK
    from sglang.srt.layers.moe.topk import TopK, TopKConfig
    from sglang.srt.runtime_context import get_exec

    deterministic = get_exec().deterministic.enable_deterministic_inference
    request = (reader() if request is None else request)._replace(deterministic=deterministic)
    config: TopKConfig | Hash | None = topk.topk_config if isinstance(topk, TopK) else None
    if isinstance(topk, HashTopK):
        config = Hash.of(topk)
    image_bias = not isinstance(topk, HashTopK) and getattr(gate, "e_score_correction_bias_vl", None) is not None
    refusal = None
    if request.backend is None and request.gate in GATE_MODES:
        refusal = "stock backend, and SGLANG_ROUTER_EXT_GATE names no design"
    elif config is None:
        refusal = f"the selection is by {type(topk).__name__}"
    elif image_bias and not (isinstance(config, TopKConfig) and ranks_images(config)):
        refusal = "a selection bias for images with other scores than sqrt-softplus"
    elif isinstance(config, Hash) and config.score not in ("sigmoid", "sqrtsoftplus"):
        refusal = f"a hash layer with {config.score} scores"
    elif isinstance(config, Hash) and not envs.SGLANG_OPT_USE_FUSED_HASH_TOPK.get():
        refusal = "SGLANG_OPT_USE_FUSED_HASH_TOPK is off"
    layer = Layer(request, config, refusal, linear=linear, image_bias=image_bias)
    counters.link()
    object.__setattr__(gate, LINK, layer)  # not Module's, which would look for parameters to register
    return layer


def link_moe(result: None, moe: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER __init__ of a MoE block: DeepseekV2MoE, Glm4MoeSparseMoeBlock, Glm4MoeLiteSparseMoeBlock."""
    link(moe.gate, moe.topk)


def gate_forward(
    original: Callable[..., torch.Tensor], gate: torch.nn.Module, hidden_states: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    """AROUND a gate's forward: ``hidden_states`` [rows, hidden] -> logits [rows, experts]."""

    def host() -> torch.Tensor:
        return original(gate, hidden_states, *rest, **named)

    if torch.compiler.is_compiling():  # a compiler traces SGLang's own code
        return host()
    layer = gate.__dict__.get(LINK)
    if layer is None:
        counters.count("gate", HOST, NOT_LINKED)
        return host()
    return layer.logits(gate, hidden_states, host)
