"""From a selection to SGLang's expert kernels: the plan that came with the ids takes the place of count and sort.

    what selects               -> handover.py        the ids that it returns carry the plan
    select_experts             -> selected           what it then wrote into the ids makes their plan void; ids that it made
                                                     anew to put fused shared experts behind them are the same ones
    _map_topk_ids_to_local_experts  -> follow_map    with expert parallelism: what global ids carry goes on with local ones
    moe_align_block_size       -> take_blocks        takes the plan if it answers exactly what is asked, or calls the original
    moe_align_single_token     -> take_row_blocks    the same for one row

SGLang asks for a block size that depends on the row count, the experts and its tables of tuned kernels, and it does so after
the router has run. So a layer learns it: the first call at a row count is SGLang's and shows the block size, later ones have a
plan of that size. A server runs every captured batch size before it captures it.

Whatever PyTorch does to the ids in between makes them another tensor, or raises their version: the plan is not taken then.
Kernels of SGLang's own raise no version; those that write into ids are hooked, and void the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_router_ext.contract import BLOCKS, PLAN_ROWS, PlanForm
from sglang_router_ext.plugin import counters
from sglang_router_ext.plugin.counters import HOST
from sglang_router_ext.plugin.problem import as_the_models_gate, selects_elsewhere

CARRIED = "_router_ext_blocks"
"""Attribute of an ids tensor: its :class:`Blocks`, or why they are void (str)."""
HANDOVER = "_router_ext_handover"
"""Attribute of a logits tensor: its Plan (see handover.py), until that is taken, or the reason (str) why it has none."""
SPAN = "_router_ext_span"
"""Attribute of a map from global to local experts: its version, and what :func:`_span` read."""
NO_BLOCKS = "ids of no design that plans, or made anew since"
NOT_ASKED = "plan refused: SGLang selected by a function that is not hooked"
PADDED, SIMULATED = "padded rows were masked in place", "the routing is simulated"
NAMES = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")


class Forms:
    """The plans that a layer's experts ask for. Each row count that a graph is captured for has its own; prefills, which come
    in all of them, share what the next 128 rows ask for, until two of these ask for different ones.
    """

    def __init__(self) -> None:
        self._shared: dict[int, PlanForm] = {}
        self._mixed: dict[int, dict[int, PlanForm]] = {}  # the same, row count by row count

    def __getitem__(self, rows: int) -> PlanForm | None:
        key = self._key(rows)
        return self._mixed[key].get(rows) if key in self._mixed else self._shared.get(key)

    def __setitem__(self, rows: int, form: PlanForm) -> None:
        key = self._key(rows)
        if key in self._mixed or (rows > PLAN_ROWS and self._shared.get(key, form) != form):
            self._mixed.setdefault(key, {})[rows] = form
        else:
            self._shared[key] = form

    @staticmethod
    def _key(rows: int) -> int:
        return rows if rows <= PLAN_ROWS else -(-rows // PLAN_ROWS) * PLAN_ROWS


class Blocks(NamedTuple):
    """What ids carry: the plan, if its form was known when they were made, and where the form is to be noted."""

    forms: Forms
    design: str
    form: PlanForm | None
    plan: dict[str, torch.Tensor] | None  # None, {}: none yet
    version: int  # version counter of the ids when they were made
    experts: int  # that the router knows, shared ones included
    span: tuple[int, int] | None = None  # ids are those of this rank: its first expert, and how many it has


def carry(ids: torch.Tensor, blocks: Blocks) -> None:
    """Let ``ids`` carry their plan; where only its form is missing, its experts teach it."""
    if not ids.is_inference():
        setattr(ids, CARRIED, blocks)


def _valid(ids: torch.Tensor) -> Blocks | None:
    """What ``ids`` carry, if it is not void and they are as they were when it was made."""
    carried: Blocks | str | None = ids.__dict__.get(CARRIED)
    return carried if isinstance(carried, Blocks) and carried.version == ids._version else None


def void(ids: torch.Tensor, why: str) -> None:
    """A plan that ``ids`` carry is not theirs any more."""
    if ids.__dict__.get(CARRIED) is not None:
        setattr(ids, CARRIED, why)


def selected(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    topk_config: Any,
    *,
    num_token_non_padded: torch.Tensor | None = None,
    expert_location_dispatch_info: Any = None,
    **options: Any,
) -> Any:
    """AROUND select_experts."""
    options |= {"num_token_non_padded": num_token_non_padded, "expert_location_dispatch_info": expert_location_dispatch_info}
    if torch.compiler.is_compiling():
        return original(hidden_states, router_logits, topk_config, **options)
    handed: Any = getattr(router_logits, HANDOVER, None)
    made: torch.Tensor | None = getattr(handed, "ids", None)
    logits, rounds = router_logits, made is not None and handed.problem.logits_dtype == "bfloat16"
    if rounds and selects_elsewhere(topk_config):  # a model may select in a way of its own
        logits = as_the_models_gate(handed.problem, router_logits)
    output = original(hidden_states, logits, topk_config, **options)
    if made is not None and getattr(router_logits, HANDOVER) is handed:
        counters.count("selection", HOST, NOT_ASKED)
    ids = getattr(output, "topk_ids", None)
    if not isinstance(ids, torch.Tensor):
        return output
    from sglang.srt.layers.moe.topk import routing_simulation_enabled

    # It cuts the shared slots off, maps and masks the others, and puts the slots back, also where there is nothing to do.
    if made is not None and made is not ids and topk_config.num_shared_topk_slots > 0 and made.shape == ids.shape:
        carried = _valid(made)
        if carried is not None and expert_location_dispatch_info is None and not ids.is_inference():
            carry(ids, carried._replace(version=ids._version))
    if num_token_non_padded is not None:
        void(ids, PADDED)
    elif routing_simulation_enabled():
        void(ids, SIMULATED)
    return output


def rows_masked(topk_ids: torch.Tensor) -> None:
    """BEFORE mask_dp_pad_moe_topk_ids."""
    if not torch.compiler.is_compiling():
        void(topk_ids, PADDED)


def follow_map(
    original: Callable[..., torch.Tensor], topk_ids: torch.Tensor, local_expert_mapping: torch.Tensor
) -> torch.Tensor:
    """AROUND _map_topk_ids_to_local_experts: global ids -> local ones, -1 elsewhere; they carry on what those carried."""
    local = original(topk_ids, local_expert_mapping)
    if torch.compiler.is_compiling():
        return local
    why = topk_ids.__dict__.get(CARRIED)
    if isinstance(why, str):
        setattr(local, CARRIED, why)
    carried = _valid(topk_ids)
    if carried is not None and not local.is_inference():
        span = _span(local_expert_mapping)
        if span is not None:
            carry(local, carried._replace(version=local._version, span=span))
    return local


def _span(mapping: torch.Tensor) -> tuple[int, int] | None:
    """First expert and number of experts of a rank that has neighbouring ones in order; None for any other rank.

    Reads ``mapping`` [experts] once, which waits for the GPU, so not while a graph is captured.
    """
    if mapping.is_inference():
        return None
    read: tuple[int, tuple[int, int] | None] | None = mapping.__dict__.get(SPAN)
    if read is None or read[0] != mapping._version:
        if mapping.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        local = mapping.tolist()
        here = [expert for expert, number in enumerate(local) if number >= 0]
        found = [local[expert] for expert in here] == list(range(len(here)))
        together = bool(here) and here[-1] - here[0] + 1 == len(here)
        read = mapping._version, (here[0], len(here)) if found and together else None
        setattr(mapping, SPAN, read)
    return read[1]


def take_blocks(
    original: Callable[..., Any],
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    ignore_invalid_expert: bool = False,
    *,
    return_inactive_prefix_count: bool = False,
    pad_expert_ids: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """AROUND moe_align_block_size -> sorted_token_ids, expert_ids, num_tokens_post_padded, all int32."""

    def host() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        options = {"return_inactive_prefix_count": return_inactive_prefix_count, "pad_expert_ids": pad_expert_ids}
        return original(topk_ids, block_size, num_experts, ignore_invalid_expert, **options)

    otherwise = ignore_invalid_expert or pad_expert_ids
    return _take(topk_ids, block_size, num_experts, return_inactive_prefix_count, host, otherwise=otherwise)


def take_row_blocks(
    original: Callable[..., Any], topk_ids: torch.Tensor, block_size: int, *, return_inactive_prefix_count: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """AROUND moe_align_single_token, which knows of one row and of all experts."""

    def host() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return original(topk_ids, block_size, return_inactive_prefix_count=return_inactive_prefix_count)

    return _take(topk_ids, block_size, None, return_inactive_prefix_count, host)


def _take(
    ids: torch.Tensor,
    block: int,
    experts: int | None,
    counts_elsewhere: bool,
    host: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    otherwise: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The plan that ``ids`` carry, or what ``host`` makes of them. ``otherwise``: the contract is another one."""
    if torch.compiler.is_compiling():
        return host()
    carried: Blocks | str | None = ids.__dict__.get(CARRIED)
    refusal = _refusal(carried, ids, block, experts, counts_elsewhere, otherwise)
    if refusal is not None:
        counters.count("plan", HOST, refusal)
        return host()
    assert isinstance(carried, Blocks) and carried.plan is not None
    counters.count("plan", carried.design)
    sorted_token_ids, expert_ids, num_tokens_post_padded = (carried.plan[name] for name in NAMES)
    return sorted_token_ids, expert_ids, num_tokens_post_padded


def _refusal(
    carried: Blocks | str | None, ids: torch.Tensor, block: int, experts: int | None, counts_elsewhere: bool, otherwise: bool
) -> str | None:
    """Why the plan that ``ids`` carry is not taken, or None. Notes what was asked for."""
    if carried is None:
        return NO_BLOCKS
    if isinstance(carried, str):
        return carried
    if otherwise:
        return "another contract for experts elsewhere"
    if block not in BLOCKS:
        return f"blocks of {block}"
    if ids._version != carried.version:
        return "the ids were changed since"
    first, count = carried.span or (0, experts)
    if count != experts:
        return "another number of local experts than the map's"
    if first + (experts or 0) > carried.experts:
        return "experts that the router does not know"
    asked = PlanForm(kind="aligned", block=block, first_local=first, locals=experts, counts_elsewhere=counts_elsewhere)
    known = carried.form
    carried.forms[len(ids)] = asked
    if known is None:
        return "the first call at a row count shows the block size"
    if known != asked:
        return "another block size or other experts than before"
    return None
