"""THE oracle: the contract in fp64, on whatever device the inputs are on. It imports no kernel and no dispatcher.

Every other part of the package is judged by this file through ``agreement.compare``; it is itself judged by rows worked by
hand (tests/cpu/test_reference.py).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch

from sglang_router_ext.contract import (
    DROPPED_KEY,
    MIN_SCORE,
    MOST_SQRT_SOFTPLUS,
    NAN_KEY,
    PAD_ID,
    PlanForm,
    Problem,
    Tokens,
    expect,
)


class Truth(NamedTuple):
    """What the contract says for one batch; everything fp64 but the ids."""

    logits: torch.Tensor  # [rows, experts] fp64, never rounded
    read: torch.Tensor  # [rows, experts] fp64, logits as the scores read them: rounded where the problem says so
    scores: torch.Tensor  # [rows, experts] fp64, NaN where the logit is NaN
    keys: torch.Tensor  # [rows, experts] fp64, NaN replaced by NAN_KEY or, with nan_first, by infinity; a hash layer has no use
    ids: torch.Tensor  # [rows, topk] int64, descending key, the lower id on ties; -1 in padded rows; routed experts only
    weights: torch.Tensor  # [rows, topk] fp64; 0 in padded rows
    margin: torch.Tensor  # [rows] fp64, gap at the cut: last selected key - first rejected key; +inf if none is rejected
    magnitude: torch.Tensor | None  # [rows, experts] fp64, sum of |hidden x weight|; None where logits were given
    bias: torch.Tensor | None  # [experts] or [rows, experts] as it was given
    valid: int  # rows before the padding
    terms: torch.Tensor | None = None  # [rows, 1] fp64, hidden values that are not 0; None where logits were given


class Gated(NamedTuple):
    """fp64 logits [rows, experts], and what error bounds depend on: see :class:`Truth`."""

    logits: torch.Tensor
    magnitude: torch.Tensor
    terms: torch.Tensor


def gate(hidden: torch.Tensor, weight: torch.Tensor) -> Gated:
    """``hidden`` [rows, hidden] x ``weight`` [experts, hidden], any float dtypes, in fp64."""
    wide, matrix = hidden.double(), weight.double().t()
    return Gated(wide @ matrix, wide.abs() @ matrix.abs(), (wide != 0).sum(1, keepdim=True).double())


def weigh(problem: Problem, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights [rows, topk] of given ids by given fp64 scores [rows, experts]; rows of padding (id -1) give 0."""
    chosen = scores.gather(1, ids.clamp(min=0))
    chosen = torch.where(chosen.isnan() | (ids < 0), 0.0, chosen)
    if problem.renormalize:
        total = chosen.sum(1, keepdim=True)
        chosen = chosen / torch.where(total > 0, total, 1.0)
    return chosen * problem.scale


def score(problem: Problem, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and keys [rows, experts] of fp64 ``logits``, by the rule of ``problem``; NaN where a logit is NaN."""
    add = 0.0 if bias is None else bias.double()
    if problem.score == "softmax":
        keys = (problem.softcap * torch.tanh(logits / problem.softcap) if problem.softcap else logits) + add
        largest = torch.where(keys.isnan(), NAN_KEY, keys).max(1, keepdim=True).values
        powers = torch.where(keys == largest, 1.0, torch.exp(keys - largest)).masked_fill(keys == NAN_KEY, 0.0)
        powers = torch.where(powers < MIN_SCORE, 0.0, powers)
        total = powers.nan_to_num(0.0).sum(1, keepdim=True)
        return powers / torch.where(total > 0, total, 1.0), keys
    scores = torch.sigmoid(logits)
    if problem.score == "sqrtsoftplus":
        scores = torch.sqrt(logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs())))
        # exp overflows nowhere, and its square root is exact where log1p is its argument
        scores = torch.where(logits < -40, torch.exp(logits / 2), scores).clamp(max=MOST_SQRT_SOFTPLUS)
    scores = torch.where(scores < MIN_SCORE, 0.0, scores)
    return scores, scores + add


def ungrouped(problem: Problem, logits: torch.Tensor, bias: torch.Tensor | None) -> Truth:
    """As :func:`select`, as if there were no groups."""
    return select(msgspec.structs.replace(problem, groups=1, groups_kept=1), logits, bias)


def group_scores(problem: Problem, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [rows, groups], sums of a group's two best ``keys`` [rows, experts], and these two's experts [rows, groups, 2]."""
    members = keys.unflatten(1, (problem.groups, -1))
    order = torch.sort(members, dim=2, descending=True, stable=True)
    first = torch.arange(problem.groups, device=keys.device)[:, None] * members.shape[2]
    return order.values[..., :2].sum(2), order.indices[..., :2] + first


def best_groups(problem: Problem, keys: torch.Tensor) -> torch.Tensor:
    """[rows, groups] bool: the ``groups_kept`` of the highest scores, the lower group on ties."""
    scores, _ = group_scores(problem, keys)
    order = torch.sort(torch.where(scores.isnan(), NAN_KEY, scores), dim=1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order.indices[:, : problem.groups_kept], True)


def select(
    problem: Problem,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_token_non_padded: int | None = None,
    magnitude: torch.Tensor | None = None,
    terms: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    named: torch.Tensor | None = None,
) -> Truth:
    """Scores, keys, ids, weights and margins of ``logits`` [rows, experts], any float dtype, by the contract.

    ``bias``: [experts], or [rows, experts] where rows have biases of their own. ``groups`` [rows, groups] bool: those that are
    kept, instead of the best. ``named`` [rows, topk]: the experts of a hash layer, -1 of none.
    """
    expect((named is not None) == problem.hashed, "named", "ids" if named is not None else None, f"those of {problem}")
    expect(problem.groups == 1 or problem.score != "softmax", "groups", problem.groups, "1 with softmax scores")
    expect(logits.shape[1] == problem.experts, "logits", tuple(logits.shape), f"[rows, {problem.experts}]")
    wide = logits.double()
    read = logits.bfloat16().double() if problem.logits_dtype == "bfloat16" else wide
    scores, keys = score(problem, read, bias)
    keys = torch.where(keys.isnan(), torch.inf if problem.nan_first else NAN_KEY, keys)
    open_ = torch.ones_like(keys, dtype=torch.bool)
    if problem.groups > 1:
        kept = best_groups(problem, keys) if groups is None else groups
        open_ = kept.repeat_interleave(problem.experts // problem.groups, 1)
        keys = keys.where(open_, DROPPED_KEY)
    order = torch.sort(keys, dim=1, descending=True, stable=True)
    last = torch.sort(~open_.gather(1, order.indices), dim=1, stable=True).indices  # dropped ones, also behind minus infinity
    ranked, best = order.indices.gather(1, last), order.values.gather(1, last)
    ids = ranked[:, : problem.topk].clone() if named is None else named.clone()
    margin = torch.full(keys.shape[:1], float("inf"), dtype=torch.float64, device=keys.device)
    if problem.topk < problem.experts:
        margin = best[:, problem.topk - 1] - best[:, problem.topk]
        margin = torch.where(margin.isnan(), 0.0, margin)  # inf - inf: a tie
    valid = len(logits) if num_token_non_padded is None else max(0, min(num_token_non_padded, len(logits)))
    ids[valid:] = PAD_ID
    return Truth(wide, read, scores, keys, ids, weigh(problem, scores, ids), margin, magnitude, bias, valid, terms)


def outputs(problem: Problem, truth: Truth) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and weights [rows, topk + shared], int32 and fp32, as a design returns them: shared slots behind the routed ones."""
    rows = len(truth.ids)
    shared = torch.arange(problem.experts, problem.experts + problem.shared, device=truth.ids.device).expand(rows, -1).clone()
    weight = torch.full((rows, problem.shared), problem.shared_weight, dtype=torch.float64, device=truth.ids.device)
    padded = (truth.ids < 0).all(1)
    shared[padded], weight[padded] = PAD_ID, 0.0
    return torch.cat([truth.ids, shared], 1).int(), torch.cat([truth.weights, weight], 1).float()


def route(
    problem: Problem,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_token_non_padded: int | None = None,
    named: torch.Tensor | None = None,
) -> Truth:
    """The whole router in fp64: ``gate``, then ``select``."""
    logits, magnitude, terms = gate(hidden, weight)
    given = {"magnitude": magnitude, "terms": terms, "named": named}
    return select(problem, logits, bias, num_token_non_padded=num_token_non_padded, **given)


def by_token(
    problem: Problem, bias: torch.Tensor | None, tokens: Tokens | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What :func:`select` is given where a row's token has a say: the bias, of each row if need be, and the experts of a hash
    layer.
    """
    if tokens is None:
        return bias, None
    if problem.image_bias:
        assert bias is not None and tokens.image_bias is not None
        bias = torch.where((tokens.ids == tokens.image)[:, None], tokens.image_bias, bias)
    return bias, named_experts(problem, tokens) if problem.hashed else None


def named_experts(problem: Problem, tokens: Tokens) -> torch.Tensor:
    """[rows, topk] int64: the experts that the table has for the tokens; -1 where there is none."""
    assert tokens.table is not None
    known = (tokens.ids >= 0) & (tokens.ids < len(tokens.table))
    ids = tokens.table[torch.where(known, tokens.ids, 0).long()].long()
    return ids.masked_fill(~known[:, None] | (ids < 0) | (ids >= problem.experts), PAD_ID)


def pack(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Packed ids [rows, topk + shared] int32 of ``ids`` and ``weights``, int32 and fp32."""
    return ids << 16 | weights.bfloat16().view(torch.int16).int() & 0xFFFF


def plan(problem: Problem, form: PlanForm, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plan of ``ids`` [rows, topk + shared] (-1 in padded rows): name -> int32 tensor, up to the end of the last block.

    ``aligned``: sorted_token_ids, expert_ids, num_tokens_post_padded. ``tiles``: slot_to_place [rows x slots], place_to_row
    [places + 1], tile_experts [tiles], tile_ends [tiles], tiles [1], places [1], counts [experts].
    """
    slots, device = ids.numel(), ids.device
    flat = ids.flatten().long()
    local = flat - form.first_local
    local[(flat < 0) | (local < 0) | (local >= form.local_experts(problem))] = -1
    experts, slot_of = torch.sort(local, stable=True)
    aligned = form.kind == "aligned"
    if not aligned:
        experts, slot_of = experts[experts >= 0], slot_of[experts >= 0]
    owners, counts = experts.unique_consecutive(return_counts=True)
    blocks = (counts + form.block - 1) // form.block
    first = (blocks.cumsum(0) - blocks) * form.block  # place of each expert
    rank = torch.arange(len(experts), device=device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    where = first.repeat_interleave(counts) + rank
    places = torch.full((int(blocks.sum()) * form.block,), slots, dtype=torch.long, device=device)  # a slot; `slots` of none
    places[where] = slot_of
    block_experts = owners.repeat_interleave(blocks)
    begins = torch.arange(len(block_experts), device=device) * form.block
    sizes = [len(places), int((block_experts < 0).sum())]
    if aligned:
        found: dict[str, torch.Tensor | list[int]] = {
            "sorted_token_ids": places,
            "expert_ids": block_experts,
            "num_tokens_post_padded": sizes if form.counts_elsewhere else sizes[:1],
        }
    else:
        slot_to_place = torch.full((slots,), -1, device=device)
        slot_to_place[slot_of] = where
        rows = torch.where(places < slots, places // ids.shape[1], -1)
        ends = torch.minimum(begins + form.block, (first + counts).repeat_interleave(blocks))
        found = {
            "slot_to_place": slot_to_place,
            "place_to_row": torch.cat([rows, rows.new_full((1,), -1)]),
            "tile_experts": block_experts,
            "tile_ends": ends,
            "tiles": [len(block_experts)],
            "places": sizes[:1],
            "counts": torch.bincount(local[local >= 0] + form.first_local, minlength=problem.experts)[: problem.experts],
        }
    return {name: torch.as_tensor(values, device=device).int() for name, values in found.items()}
