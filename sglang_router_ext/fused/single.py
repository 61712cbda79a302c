"""``single``: gate, selection and plan for 1 to 128 rows in one launch; see single.cuh."""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import torch

from sglang_router_ext import build
from sglang_router_ext.arguments import check_gate, check_per_row, check_selection
from sglang_router_ext.contract import PLAN_ROWS, PLAN_SLOTS, PlanForm, Problem, Tokens, expect
from sglang_router_ext.fused import words
from sglang_router_ext.gate.small_rows import Config, config
from sglang_router_ext.selection.warp_select import groups, outputs, per_row, scalars, template, vectorised

HEADER = "fused/single.cuh"
FORMATS = {None: "kNone", "aligned": "kAligned", "tiles": "kTiles"}
NAMES = {
    "aligned": ("sorted_token_ids", "expert_ids", "num_tokens_post_padded"),
    "tiles": ("slot_to_place", "place_to_row", "tile_experts", "tile_ends", "tiles", "places", "counts"),
}
"""Tensors of a plan, in the kernel's order."""
PLANNERS = 8
"""At most: a warp tells so many at once."""
MOST_CONSUMERS = 32
"""Where a consumer may have so many rows: a launch's consumers wait, and other launches need multiprocessors too."""


Shape = tuple[int, ...]


class Placing(enum.IntEnum):
    """Which blocks consume: those behind the producers, those before them, or the last of them, after they produced."""

    LAST, FIRST, BOTH = range(3)


class Division(NamedTuple):
    """How many blocks do what; the terms are those of single.cuh. It changes no bit of the result."""

    consumers: int
    planners: int
    tiles_of_rows: int
    placing: Placing


def many_tiles(split: Config, experts: int) -> int:
    """``tiles`` of a launch with more than 16 rows: of two operands of equal size the fewest bytes are read, and what a
    multiprocessor reads from the L2 is what such a launch takes its time for. Registers set the limit.
    """
    if split.halved:
        return max((6, 5, 4), key=lambda tiles: (-(-experts % (8 * tiles)), tiles))
    if not split.exact or split.depth > 2:
        return split.tiles
    if split.wide:
        return 2
    return min(split.warps // 4, 4 if split.warps <= 16 else 3 if split.warps <= 20 else 2)


def slices(split: Config, rows: int) -> int:
    """Of K, in a launch of ``rows`` rows."""
    return split.slices * (2 if split.halved and rows > 16 else 1)


@functools.cache
def division(rows: int, experts: int, hidden: int, processors: int, wide: bool = False) -> Division:
    """Measured on an H200. What a consumer has, its plan need not be told, so few rows share one while it has warps to spare.
    More are selected faster where they do not share a multiprocessor. The last producers consume where there is no room beside
    them. One planner is best while it has four threads for every slot of a top-8.

    Consumers wait for producers. Where those of two launches could fill the GPU they come behind all producers: what waits then
    waits for blocks that have a place already, and all but the planners leave by themselves.
    """
    split, tiles, team = config(experts, hidden, wide), -(-rows // 16), groups(experts)
    producers = -(-experts // (8 * (split.tiles if tiles == 1 else many_tiles(split, experts)))) * slices(split, rows)
    at_once = -(-tiles // max(1, processors // producers))
    shares = -(-tiles // at_once)
    room = processors - producers * shares
    most = split.warps // team
    if rows <= 8:
        choices = [rows if 4 * rows * team <= 3 * split.warps else 2]
    elif rows <= 16:
        choices = [1, 2]
    else:
        least = max(2, -(-rows // MOST_CONSUMERS))
        choices = [max(least, 4), least] if rows > 64 else [least]
    each = min(most, next((each for each in choices if -(-rows // each) <= room), choices[-1]))
    consumers = -(-rows // each)
    few = rows <= 8 or rows <= min(16, split.warps - each * team)
    planners = 1 if few else rows // 4 if rows <= 16 else 4 if rows <= 48 else PLANNERS
    placing = Placing.FIRST if consumers <= room else Placing.BOTH if consumers <= producers * shares else Placing.LAST
    if 2 * consumers >= processors:
        placing = Placing.LAST
    return Division(consumers, min(planners, consumers), shares, placing)


def instance(problem: Problem, vector: bool, kind: str | None) -> str:
    """The C++ instance that serves ``problem`` and a format."""
    split = config(problem.experts, problem.hidden, problem.wide)
    shape = f"{split.template}, {split.slices}, {many_tiles(split, problem.experts)}, {template(problem, vector)}"
    return f"Single<{shape}, ::rx::PlanFormat::{FORMATS[kind]}>"


def most_blocks(slots: int, local: int, block: int) -> int:
    """The most blocks of a plan: of every expert that has a slot, and of those elsewhere, one is not full."""
    return (slots + min(slots, local + 1) * (block - 1)) // block


def aligned_room(slots: int, local: int, block: int) -> int:
    """Places that SGLang's own moe_align_block_size makes, which its other kernels count on."""
    padded = slots * block if slots < local + 1 else slots + (local + 1) * (block - 1)
    return -(-padded // 4) * 4


def empty_plan(problem: Problem, form: PlanForm, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Unwritten tensors for the plan of ``rows`` rows, as large as it may become."""
    slots = rows * problem.slots
    local = form.local_experts(problem)
    blocks, room = most_blocks(slots, local, form.block), aligned_room(slots, local, form.block)
    sizes = {
        "aligned": (room, -(-room // form.block), 1 + form.counts_elsewhere),
        "tiles": (slots, blocks * form.block + 1, blocks, blocks, 1, 1, problem.experts),
    }[form.kind]
    return {
        name: torch.empty(size, dtype=torch.int32, device=device) for name, size in zip(NAMES[form.kind], sizes, strict=True)
    }


def _launch(
    problem: Problem, rows: int, bias: torch.Tensor | None, device: torch.device, form: PlanForm | None
) -> tuple[Any, Division, Shape, Shape]:
    """The module of a launch, who does what in it, and the shapes of its words."""
    experts = problem.experts
    wide, kind = problem.wide, None if form is None else form.kind
    split = config(experts, problem.hidden, wide)
    how = division(rows, experts, problem.hidden, _processors(device), wide)
    module = build.load(HEADER, instance(problem, vectorised(experts, bias), kind))
    told = how.planners if form is not None else 0, rows, 4 if problem.topk <= 8 else 16
    return module, how, (rows, slices(split, rows), 128 * groups(experts)), told


def ready(problem: Problem, rows: int, bias: torch.Tensor | None, device: torch.device, form: PlanForm | None) -> bool:
    """Whether a launch that is captured now would find words; outside of a capture there always are."""
    if not torch.cuda.is_current_stream_capturing():
        return True
    module, _how, sums, told = _launch(problem, rows, bias, device, form)
    return words.room(module, device, sums, told)


def single(
    problem: Problem,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_token_non_padded: torch.Tensor | None = None,
    tokens: Tokens | None = None,
    packed: torch.Tensor | None = None,
    form: PlanForm | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """``hidden`` [rows, hidden] bf16, ``weight`` [experts, hidden] bf16 or fp32, ``bias`` [experts] fp32 or None ->
    logits [rows, experts] fp32, ids [rows, topk + shared] int32, weights [rows, topk + shared] fp32, and the plan of ``form``
    by the names of :func:`~sglang_router_ext.reference.plan` ({} without one). ``tokens`` and ``packed``: as ``warp_select``
    takes them.
    """
    check_gate("single", hidden, weight, problem)
    check_selection("single", problem, None, bias, num_token_non_padded, hidden.device)
    check_per_row(problem, len(hidden), tokens, packed, hidden.device)
    rows, experts, device = len(hidden), problem.experts, hidden.device
    if form is not None:
        local = form.local_experts(problem)
        last = form.first_local + local
        expect(problem.slots <= PLAN_SLOTS, "topk", f"{problem.slots} slots", f"at most {PLAN_SLOTS} of a row, with a plan")
        expect(last <= experts + problem.shared, "locals", f"experts {form.first_local} to {last - 1}", f"experts of {problem}")
    plan = {} if form is None else empty_plan(problem, form, rows, device)
    module, how, sums_shape, told_shape = _launch(problem, rows, bias, device, form)
    sums, told = words.take(module, device, sums_shape, told_shape)
    logits = torch.empty((rows, experts), dtype=torch.float32, device=device)
    ids, weights = outputs(rows, problem.slots, device)
    none = ids[:0]
    more = per_row(none, num_token_non_padded, packed, tokens)
    tensors = [*plan.values(), *[none] * (len(NAMES["tiles"]) - len(plan))]
    where = (0, 0, 0) if form is None else (form.block, form.first_local, form.local_experts(problem))
    add, numbers = none if bias is None else bias, scalars(problem, tokens)
    module.run(hidden, weight, add, sums, logits, ids, weights, *more, told, *tensors, *numbers, *where, *how)
    return logits, ids, weights, plan


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


assert PLAN_ROWS == 128, "single.cuh has a bit for each"
