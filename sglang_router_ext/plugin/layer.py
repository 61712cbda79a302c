"""One MoE layer of SGLang: asks the table for its route, runs it where the gate runs, and hands the selection over.

    __init__ of a MoE block   -> link_moe       ties the gate to the TopKConfig that selects from its logits
    its gate's forward        -> gate_forward   runs the route; the logits returned carry the selection as a Plan
    topk.biased_grouped_topk  -> take_plan      takes the Plan if it answers exactly the question asked, or calls the original

What the experts' count and sort would make comes with it where a design plans; see ``blocks.py``.

The plan travels on the logits tensor and not on the module: with two-batch overlap two batches are between gate and selection
at once. The selection enters SGLang below select_experts, so that what SGLang does after a selection (remapping for EPLB,
capture and recording of routed experts, padding, shared slots, simulation, waterfill) happens as ever.

Whatever is left to SGLang is counted with its reason; nothing else here decides about coverage (see ``choose.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from sglang_router_ext import settings
from sglang_router_ext.arguments import VECTOR_BYTES
from sglang_router_ext.choose import Choice
from sglang_router_ext.contract import DTYPES, PLAN_ROWS, PlanForm, Problem
from sglang_router_ext.designs import BACKENDS, DESIGNS, TABLE
from sglang_router_ext.fused import single, words
from sglang_router_ext.plugin import counters, overlap, preflight
from sglang_router_ext.plugin.blocks import HANDOVER, Blocks, Forms, carry
from sglang_router_ext.plugin.counters import HOST
from sglang_router_ext.route import Route

if TYPE_CHECKING:
    from sglang.srt.layers.moe.topk import TopKConfig

LINK = "_router_ext_layer"
"""Attribute of a gate: its :class:`Layer`."""

NOT_LINKED = "gate of a model that the plugin does not link to a selection"
NO_WORDS = "no words are left for another CUDA graph"
NO_PLAN = "logits of no linked gate, or changed since"


class Plan(NamedTuple):
    """A selection, and the question that it answers."""

    ids: torch.Tensor  # [rows, topk + shared] int32
    weights: torch.Tensor  # [rows, topk + shared] float32
    design: str
    problem: Problem
    bias: torch.Tensor  # [experts] float32, the tensor that the selection read
    version: int  # version counter of the logits when they were made
    blocks: Blocks | None = None


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
        return choice.fused is None or not TABLE[choice.fused].plans or single.ready(problem, rows, bias, device, form)

    def route(self, problem: Problem, device: torch.device, **options: Any) -> Route:
        """A bound route for one layer; ``options`` as :class:`Route` takes them."""
        gpu = preflight.detect_gpu(device.index)
        return Route(problem, gpu, **{**options, "unavailable": {**preflight.unavailable(), **options["unavailable"]}})


class Request(NamedTuple):
    """What is asked of a layer, read once when the layer is built: later the speculative context swaps the global backend."""

    backend: str | None
    """A backend of ours, or None under a stock one."""
    gate: str
    """``SGLANG_ROUTER_EXT_GATE``."""
    executor: Kernels = Kernels()


def request_in_force() -> Request:
    """The request for a layer that is being built now, from SGLang's active backend and our settings."""
    from sglang.srt.layers.moe.utils import get_moe_runner_backend

    name = get_moe_runner_backend().value
    return Request(name if name in BACKENDS else None, settings.read().gate)


reader: Callable[[], Request] = request_in_force
"""How a new layer learns what is asked of it; ``reference_mode`` puts another one here for a while."""


class Layer:
    """One linked layer. Holds no weight and no module: both come with each call, so that updates in place are seen."""

    def __init__(self, request: Request, config: TopKConfig | None, refusal: str | None, selects: bool) -> None:
        self.request = request
        self.config = config
        self.refusal = refusal
        self._elsewhere = {} if selects else dict.fromkeys(_SELECTIONS, "this layer selects by another function of SGLang")
        self.forms: Forms = {}
        self._bound: tuple[Any, ...] | None = None
        self._route: Route | None = None
        self._spare: Route | None = None

    def logits(self, gate: Any, hidden: torch.Tensor, host: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Logits [rows, experts] of ``hidden`` [rows, hidden], by our gate or by ``host``; with a plan where we select."""
        refusal = self.refusal or self._refuses(gate, hidden)
        if refusal is not None:
            counters.count("gate", HOST, refusal)
            return hand_over(host(), refusal)
        weight: torch.Tensor = gate.weight.detach()  # kernels take no tensors that require gradients
        bias: torch.Tensor | None = None if self.config is None else self.config.correction_bias
        bias = None if bias is None else bias.detach()
        form = self.forms.get(len(hidden))
        route = self._bind(weight, bias, hidden)
        choice = route.choice(len(hidden), plan=form is not None)
        if not self.request.executor.ready(choice, route.problem, len(hidden), bias, hidden.device, form):
            route = self._spare = self._spare or self._route_of(route.problem, hidden.device, dict.fromkeys(_PLAN, NO_WORDS))
            choice = route.choice(len(hidden), plan=form is not None)
        prefix = self.request.executor.prefix
        logits, ids, weights, plan = route(hidden, weight, bias, form=form)
        if logits is None:
            counters.count("gate", HOST, self._why(choice, "gate", len(hidden)))
            logits = host()
            ids, weights = route.select(logits, bias)
        else:
            counters.count("gate", prefix + choice.gate)
        if ids is None or weights is None:
            return hand_over(logits, self._why(choice, "selection", len(hidden)))
        if logits.is_inference():
            return hand_over(logits, "inference-mode tensors do not show whether they were changed")
        assert bias is not None  # a design selects with a bias only
        overlap.mark(hidden)
        design = prefix + choice.selection
        blocks = (
            Blocks(self.forms, design, form, plan, ids._version, route.problem.experts + route.problem.shared)
            if route.plans(len(hidden))
            else None
        )
        return hand_over(logits, Plan(ids, weights, design, route.problem, bias, logits._version, blocks))

    def _refuses(self, gate: Any, hidden: torch.Tensor) -> str | None:
        """Why this call is SGLang's whatever the table says, or None."""
        if len(hidden) == 0:
            return "no rows"
        if not isinstance(gate.weight, torch.nn.Parameter):
            return "the gate's weight is not a plain parameter"
        if _name(gate.weight.dtype) not in DTYPES or _name(hidden.dtype) not in DTYPES:
            return f"{_name(hidden.dtype)} hidden states on a {_name(gate.weight.dtype)} gate weight"
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
            problem = problem_of(weight, bias, self.config, hidden.dtype)
            self._route, self._spare = self._route_of(problem, hidden.device, {}), None
            self._bound = key
            if any(self._route.plans(rows) for rows in (1, PLAN_ROWS)):
                self.request.executor.prepare(hidden.device)
        return self._route

    def _route_of(self, problem: Problem, device: torch.device, without: dict[str, str]) -> Route:
        asked = {"backend": self.request.backend, "gate": self.request.gate}
        return self.request.executor.route(problem, device, **asked, unavailable={**self._elsewhere, **without})

    def _why(self, choice: Choice, stage: str, rows: int) -> str:
        """Why ``stage`` stays with SGLang: the first reason of each design that could have done it, without the row count."""
        if stage == "gate" and self.request.gate == HOST:
            return "SGLANG_ROUTER_EXT_GATE=host"
        if stage == "selection" and self.request.backend is None:
            return "stock backend"
        losers = ((name, reasons) for name, reasons in choice.losers.items() if stage in TABLE[name].stages)
        return "; ".join(f"{name}: {reasons[0].removeprefix(f'{rows} ')}" for name, reasons in losers)


_PLAN = tuple(design.name for design in DESIGNS if design.plans)
_SELECTIONS = tuple(design.name for design in DESIGNS if "selection" in design.stages and design.name != HOST)


def problem_of(weight: torch.Tensor, bias: torch.Tensor | None, config: TopKConfig | None, hidden: torch.dtype) -> Problem:
    """The problem of a gate ``weight`` [experts, hidden] and, where one follows, the selection of ``config``.

    The score is sigmoid whatever ``config.scoring_func`` says: biased_grouped_topk knows no other. Without a selection of that
    kind the fields about it mean nothing, and no design selects.
    """
    gate = Problem(
        experts=weight.shape[0],
        hidden=weight.shape[1],
        topk=1,
        bias=False,
        hidden_dtype=_name(hidden),
        weight_dtype=_name(weight.dtype),
    )
    if config is None or bias is None:
        return gate
    return msgspec.structs.replace(
        gate,
        topk=config.top_k - config.num_shared_topk_slots,
        bias=True,
        groups=config.num_expert_group or 1,
        groups_kept=config.topk_group or 1,
        renormalize=config.renormalize,
        scale=_scale(config.routed_scaling_factor, config.apply_routed_scaling_factor_on_output),
        shared=_shared_slots(config),
        shared_weight=_shared_weight(config.routed_scaling_factor, config.apply_routed_scaling_factor_on_output),
        bias_dtype=_name(bias.dtype),
    )


def _shared_slots(config: TopKConfig) -> int:
    """Slots that the selection itself appends; per-rank slots are appended after it."""
    from sglang.srt.layers.moe.utils import has_per_rank_fused_shared_slots

    slots = config.num_shared_topk_slots
    return 0 if has_per_rank_fused_shared_slots(slots) else slots


def _scale(factor: float | None, on_output: bool | None) -> float:
    """The routed scaling factor belongs to the weights only if SGLang says so; else the expert kernel applies it."""
    return float(factor) if on_output and factor is not None else 1.0


def _shared_weight(factor: float | None, on_output: bool | None) -> float:
    """What a shared slot weighs, so that the factor which the expert kernel applies to the whole output cancels."""
    return 1.0 if on_output or not factor else 1.0 / factor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def hand_over(logits: torch.Tensor, handed: Plan | str) -> torch.Tensor:
    """``logits``, carrying the plan or the reason why there is none; any tensor made from them carries nothing."""
    setattr(logits, HANDOVER, handed)
    return logits


def link(gate: torch.nn.Module, topk: torch.nn.Module, request: Request | None = None) -> Layer:
    """Tie ``gate`` to ``topk`` (TopK, HashTopK), which selects from its logits. Registers no submodule or parameter.

    ``request`` None: what is in force now (see :func:`request_in_force`).
    """
    from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat
    from sglang.srt.runtime_context import get_exec

    request = reader() if request is None else request
    config: TopKConfig | None = topk.topk_config if isinstance(topk, TopK) else None
    refusal = None
    if request.backend is None and request.gate in ("auto", HOST):
        refusal = "stock backend, and SGLANG_ROUTER_EXT_GATE names no design"
    elif get_exec().deterministic.enable_deterministic_inference:
        refusal = "deterministic inference"
    elif config is None:
        refusal = "hash layer"
    elif getattr(gate, "e_score_correction_bias_vl", None) is not None:
        refusal = "two selection biases, for text and for images"
    standard = (None, TopKOutputFormat.STANDARD)
    selects = (
        config is not None
        and config.use_grouped_topk
        and config.correction_bias is not None
        and config.output_format in standard
    )
    layer = Layer(request, config, refusal, selects)
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


def take_plan(original: Callable[..., Any], *args: Any, **call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """AROUND topk.biased_grouped_topk, which SGLang calls by keywords -> weights [rows, topk] fp32, ids [rows, topk] int32."""
    if args or torch.compiler.is_compiling():
        return original(*args, **call)
    logits = call["gating_output"]
    handed: Any = getattr(logits, HANDOVER, NO_PLAN)
    refusal = difference(handed, **call) if isinstance(handed, Plan) else handed
    if refusal is not None:
        counters.count("selection", HOST, refusal)
        return original(**call)
    # Once only: SGLang masks and remaps the tensors that it gets in place.
    hand_over(logits, "plan refused: taken before")
    counters.count("selection", handed.design)
    if handed.blocks is not None:
        carry(handed.ids, handed.blocks)
    return handed.weights, handed.ids


def difference(
    plan: Plan,
    *,
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
) -> str | None:
    """Why ``plan`` does not answer this call of biased_grouped_topk, or None. A parameter that is not known here raises."""
    asked = {
        "topk": topk - num_fused_shared_experts,
        "shared": num_fused_shared_experts,
        "renormalize": renormalize,
        "groups": num_expert_group or 1,
        "groups_kept": topk_group or 1,
        "scale": _scale(routed_scaling_factor, apply_routed_scaling_factor_on_output),
        "shared_weight": _shared_weight(routed_scaling_factor, apply_routed_scaling_factor_on_output),
    }
    for name, value in asked.items():
        planned = getattr(plan.problem, name)
        if value != planned:
            return f"plan refused: {name}: asked {value}, planned {planned}"
    bias = plan.bias
    if (correction_bias.data_ptr(), correction_bias.dtype, correction_bias.shape) != (bias.data_ptr(), bias.dtype, bias.shape):
        return "plan refused: another selection bias"
    if gating_output._version != plan.version:
        return "plan refused: the logits were changed since"
    if len(hidden_states) != len(plan.ids):
        return "plan refused: another number of rows"
    return None
