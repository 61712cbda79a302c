"""From a selection to SGLang's expert kernels: the plan that came with the ids takes the place of count and sort.

    topk.biased_grouped_topk   -> layer.take_plan   the ids that it returns carry the plan
    moe_align_block_size       -> take_blocks       takes the plan if it answers exactly what is asked, or calls the original

SGLang asks for a block size that depends on the row count, the experts and its tables of tuned kernels, and it does so after
the router has run. So a layer learns it: the first call at a row count is SGLang's and shows the block size, later ones have a
plan of that size. A server runs every captured batch size before it captures it.

Whatever is done to the ids in between makes them another tensor, or raises their version: the plan is not taken then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_router_ext.contract import BLOCKS, PLAN_ROWS, PlanForm
from sglang_router_ext.plugin import counters
from sglang_router_ext.plugin.counters import HOST

CARRIED = "_router_ext_blocks"
"""Attribute of an ids tensor: its :class:`Blocks`."""
NO_BLOCKS = "ids of no design that plans, or made anew since"
NAMES = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")

Forms = dict[int, PlanForm]
"""Row count -> the plan that a layer's experts ask for."""


class Blocks(NamedTuple):
    """What ids carry: the plan, if its form was known when they were made, and where the form is to be noted."""

    forms: Forms
    design: str
    form: PlanForm | None
    plan: dict[str, torch.Tensor] | None  # None, {}: none yet
    version: int  # version counter of the ids when they were made


def carry(ids: torch.Tensor, blocks: Blocks) -> None:
    """Let ``ids`` carry their plan; where only its form is missing, its experts teach it."""
    if not ids.is_inference():
        setattr(ids, CARRIED, blocks)


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

    if torch.compiler.is_compiling():
        return host()
    carried: Blocks | None = topk_ids.__dict__.get(CARRIED)
    refusal = _refusal(
        carried, topk_ids, block_size, num_experts, return_inactive_prefix_count, ignore_invalid_expert or pad_expert_ids
    )
    if refusal is not None:
        counters.count("plan", HOST, refusal)
        return host()
    assert carried is not None and carried.plan is not None
    counters.count("plan", carried.design)
    sorted_token_ids, expert_ids, num_tokens_post_padded = (carried.plan[name] for name in NAMES)
    return sorted_token_ids, expert_ids, num_tokens_post_padded


def _refusal(
    carried: Blocks | None, ids: torch.Tensor, block: int, experts: int, counts_elsewhere: bool, otherwise: bool
) -> str | None:
    """Why the plan that ``ids`` carry is not taken, or None. Notes what was asked for."""
    if carried is None:
        return NO_BLOCKS
    if otherwise:
        return "another contract for experts elsewhere"
    if len(ids) > PLAN_ROWS or block not in BLOCKS:
        return f"more than {PLAN_ROWS} rows, or blocks of {block}"
    asked = PlanForm(kind="aligned", block=block, locals=experts, counts_elsewhere=counts_elsewhere)
    known = carried.form
    carried.forms[len(ids)] = asked
    if known is None:
        return "the first call at a row count shows the block size"
    if known != asked:
        return "another block size than before"
    if ids._version != carried.version:
        return "the ids were changed since"
    return None
