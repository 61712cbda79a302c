"""compare(): whether a design's result is what the oracle says, as a list of differences in words. The only judge there is.

Bounds, all derived; none is a share of elements that may be wrong. With u = 2^-23 (twice the unit roundoff of fp32, because
tensor cores truncate where an FPU rounds):

* logit: products of two bf16 are exact in fp32, so the error is that of the additions alone, at most
  (length of the longest chain of additions) x u x sum|hidden x weight|. The chain is ``hidden / design.chain + 64``, but no
  longer than there are products, since adding 0 is exact. An fp32 weight is the sum of three bf16 in our tensor-core designs,
  whose products are exact too: three times the additions.
* key: the sigmoid's slope is at most 1/4, its own evaluation errs by at most 4 u of a score <= 1, and adding the bias rounds
  to u x |key|:  logit bound / 4 + 4 u + u |key|. The slope of sqrt(softplus) is below 1/2 and its error 4 u of a score that may
  be more than 1. A softmax ranks by its logit, whose tanh errs by 4 u of the softcap.
* weight: d(score) / score <= d(logit) + 4 u for a sigmoid, and half of it for sqrt(softplus); for a softmax the errors of both
  keys, its own and the largest, take the logit's place, and one rounding of their difference. Renormalising adds the same again
  for the sum, plus topk + 4 roundings: 2 x (logit bound + 4 u) + (topk + 4) u, relative. A sum over all experts is one of 16
  additions in a chain.
* logits that the model rounds to bf16 may be 2^-8 of them further off where they come rounded. A selection from unrounded ones
  is judged by what their rounding gives.

A selection is judged by the logits that came with it, if any did, and then the logit bound in its keys and weights is 0: what
the gate may add wrongly is the gate's, and no cover for the selection. An id may differ from the oracle's only where both keys
involved lie within the sum of their bounds of each other; our own designs also owe the descending order of the keys, within the
same bounds. Where two keys tie whatever the rounding (see ``_tied``), the lower id must win and stand first.

With groups, a row may have kept others than the oracle only if every group left has a score within the bounds of every group
taken; a group's bound is that of its two best keys, and one rounding of their sum. The row is then judged by its own groups.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from sglang_router_ext import reference
from sglang_router_ext.contract import MIN_SCORE, NAN_KEY, PAD_ID, PlanForm, Problem
from sglang_router_ext.designs import Design, Numerics
from sglang_router_ext.reference import Truth

U = 2.0**-23
BF16_ROUNDING = 2.0**-8
SHOWN = 3


class Planned(NamedTuple):
    """A plan and the format that was asked for."""

    form: PlanForm
    tensors: dict[str, torch.Tensor]  # names as in reference.plan


class Result(NamedTuple):
    """What a design returned; a stage that it does not cover is None."""

    logits: torch.Tensor | None = None  # [rows, experts] fp32
    ids: torch.Tensor | None = None  # [rows, topk] int32
    weights: torch.Tensor | None = None  # [rows, topk] fp32
    plan: Planned | None = None  # None also where no plan was asked for


def logit_bound(problem: Problem, truth: Truth, design: Design) -> torch.Tensor:
    """[rows, experts] fp64: the largest error that the design's additions allow; 0 where logits were given to it."""
    if truth.magnitude is None or design.numerics is Numerics.EXACT_IDS:
        return torch.zeros_like(truth.logits)
    parts = 3 if problem.wide and design.chain > 1 else 1
    chain = torch.full_like(truth.magnitude[:, :1], parts * problem.hidden / design.chain + 64)
    if truth.terms is not None:
        chain = torch.minimum(chain, parts * truth.terms)
    return chain * U * truth.magnitude.nan_to_num(0.0, 0.0, 0.0)


def compare(result: Result, truth: Truth, problem: Problem, design: Design) -> list[str]:
    """Every difference between ``result`` and the oracle that the design's numerics do not allow; empty means right.

    ``result`` must hold what the design's stages return: logits of a gate, ids and weights of a selection.
    """
    found = _check_shapes(result, truth, problem, design)
    if found:
        return found
    bound = logit_bound(problem, truth, design)
    if problem.hashed and "selection" in design.stages:
        return _compare_hashed(result, truth, problem, design, bound)
    if result.logits is not None:
        found += _compare_logits(result.logits, truth, bound, problem)
    if result.ids is not None:
        if result.logits is not None:
            truth = reference.select(problem, result.logits, truth.bias, num_token_non_padded=truth.valid)
            bound = torch.zeros_like(bound)
        elif problem.logits_dtype == "bfloat16" and truth.magnitude is not None and design.numerics is not Numerics.EXACT_IDS:
            bound = bound + 2 * BF16_ROUNDING * truth.logits.abs().nan_to_num(0.0, 0.0, 0.0)
        found += _compare_selection(result, truth, problem, bound, ordered=bool(design.target))
        if result.plan is not None:
            found += compare_plan(result.plan.tensors, result.ids, problem, result.plan.form)
    return found


def _compare_hashed(result: Result, truth: Truth, problem: Problem, design: Design, bound: torch.Tensor) -> list[str]:
    """Of a hash layer, where the ids are given: they must be those, and our own designs make no other logits."""
    assert result.ids is not None and result.weights is not None
    want, shares = reference.outputs(problem, truth)
    found = _first(result.ids != want, lambda r, k: f"ids[{r}, {k}]: {result.ids[r, k]}, wanted {want[r, k]}")
    weights, routed = result.weights.double(), truth.ids
    found += _first(~weights.isfinite(), lambda r, k: f"weights[{r}, {k}]: {weights[r, k]} is not finite")
    wrong = result.weights[:, problem.topk :] != shares[:, problem.topk :]
    found += _first(wrong, lambda r, k: f"shared weights[{r}, {k}]: {result.weights[r, problem.topk + k]}")
    if result.logits is not None:
        named = torch.where(routed < 0, problem.experts, routed)
        mine = torch.zeros_like(truth.logits[:, :1]).bool().repeat(1, problem.experts + 1).scatter_(1, named, True)[:, :-1]
        if design.target:
            extra, got = ~mine & ~result.logits.isnan(), result.logits
            found += _first(extra, lambda r, e: f"logits[{r}, {e}]: {got[r, e]:.9g}, wanted NaN: it is no expert of the row")
        found += _compare_logits(torch.where(mine, result.logits.double(), truth.logits), truth, bound, problem)
        truth = truth._replace(scores=reference.score(problem, result.logits.double(), None)[0])
        bound = torch.zeros_like(bound)
    return found or _compare_weights(routed, weights[:, : problem.topk], truth, problem, bound)


def compare_plan(got: dict[str, torch.Tensor], ids: torch.Tensor, problem: Problem, form: PlanForm) -> list[str]:
    """Every difference between a plan and the oracle's of the same ``ids``, exactly. What lies past the last block is free."""
    found = []
    for name, want in reference.plan(problem, form, ids).items():
        if name not in got:
            found.append(f"{name}: nothing, wanted {tuple(want.shape)}")
        elif got[name].dtype != torch.int32 or got[name].dim() != 1 or len(got[name]) < len(want):
            found.append(f"{name}: {got[name].dtype} {tuple(got[name].shape)}, wanted torch.int32 [{len(want)} or more]")
        else:
            wrong, have = got[name][: len(want)] != want, got[name]
            found += _first(wrong, lambda i, name=name, have=have, want=want: f"{name}[{i}]: {have[i]}, wanted {want[i]}")
    return found


def _first(mask: torch.Tensor, describe) -> list[str]:
    """Describe the first few places where ``mask`` holds, and count the rest."""
    places = mask.nonzero().tolist()
    lines = [describe(*place) for place in places[:SHOWN]]
    if len(places) > SHOWN:
        lines[-1] += f" (and {len(places) - SHOWN} more)"
    return lines


def _compare_logits(logits: torch.Tensor, truth: Truth, bound: torch.Tensor, problem: Problem) -> list[str]:
    got, want = logits.double(), truth.logits
    if problem.logits_dtype == "bfloat16":
        rounded = (logits.bfloat16().float() == logits) | logits.isnan()
        if rounded.all():  # a gate alone leaves them as they are
            bound = bound * (1 + BF16_ROUNDING) + BF16_ROUNDING * want.abs().nan_to_num(0.0, 0.0, 0.0)
    finite = want.isfinite() if truth.magnitude is None else want.isfinite() & (truth.magnitude < 3e38)
    # An input that holds NaN or infinity must not come out as a number.
    bad = torch.where(finite, ~((got - want).abs() <= bound), got.isfinite())
    return _first(bad, lambda r, e: f"logits[{r}, {e}]: {got[r, e]:.9g}, wanted {want[r, e]:.9g} +- {bound[r, e]:.2g}")


def _check_shapes(result: Result, truth: Truth, problem: Problem, design: Design) -> list[str]:
    """Fields that a stage of the design owes, or that came all the same, and are not of the contract's type and shape."""
    slots, owed = (len(truth.logits), problem.slots), "selection" in design.stages or result.ids is not None
    found = []
    for name, tensor, dtype, shape, due in (
        ("logits", result.logits, torch.float32, tuple(truth.logits.shape), "gate" in design.stages),
        ("ids", result.ids, torch.int32, slots, owed),
        ("weights", result.weights, torch.float32, slots, owed),
    ):
        if tensor is None and due:
            found.append(f"{name}: nothing, wanted {dtype} {shape}")
        elif tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) != shape):
            found.append(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, wanted {dtype} {shape}")
    return found


def _compare_selection(result: Result, truth: Truth, problem: Problem, bound: torch.Tensor, *, ordered: bool) -> list[str]:
    assert result.ids is not None and result.weights is not None
    ids, weights, valid = result.ids.long(), result.weights.double(), truth.valid
    found = _first(ids[valid:] != PAD_ID, lambda r, k: f"ids[{valid + r}, {k}]: {ids[valid + r, k]} in a padded row, wanted -1")
    found += _first(
        weights[valid:] != 0, lambda r, k: f"weights[{valid + r}, {k}]: {weights[valid + r, k]} in a padded row, wanted 0"
    )
    ids, weights = ids[:valid], weights[:valid]
    found += _compare_shared(ids[:, problem.topk :], weights[:, problem.topk :], problem)
    ids, weights = ids[:, : problem.topk], weights[:, : problem.topk]
    outside = (ids < 0) | (ids >= problem.experts)
    if outside.any():
        return found + _first(outside, lambda r, k: f"ids[{r}, {k}]: {ids[r, k]} is outside [0, {problem.experts})")
    ascending = ids.sort(1).values
    twice = (ascending[:, 1:] == ascending[:, :-1]).any(1)
    found += _first(twice, lambda r: f"ids[{r}]: an expert stands twice in {ids[r].tolist()}")
    found += _first(~weights.isfinite(), lambda r, k: f"weights[{r}, {k}]: {weights[r, k]} is not finite")
    if not found and problem.groups > 1:
        truth = _with_groups_of(ids, truth, problem, bound)
    if not found:
        slack = _slack(problem, truth, bound)
        found += _compare_ids(ids, truth, problem, slack) + _compare_weights(ids, weights, truth, problem, bound[:valid])
        found += _compare_order(ids, truth, problem, slack) if ordered else []
    return found


def _compare_shared(ids: torch.Tensor, weights: torch.Tensor, problem: Problem) -> list[str]:
    """The shared slots behind the routed ones: ids from ``experts`` on, one weight, exactly."""
    want = torch.arange(problem.experts, problem.experts + problem.shared, device=ids.device).expand_as(ids)
    share = torch.tensor(problem.shared_weight, dtype=torch.float32).item()
    found = _first(ids != want, lambda r, k: f"shared ids[{r}, {k}]: {ids[r, k]}, wanted {want[r, k]}")
    return found + _first(weights != share, lambda r, k: f"shared weights[{r}, {k}]: {weights[r, k]}, wanted {share}")


def _softmax_rounding(problem: Problem, truth: Truth) -> torch.Tensor:
    """[rows, experts] fp64: what a softmax key adds to its logit's bound; nothing without bias and softcap."""
    added = truth.bias is not None or problem.softcap > 0
    keys = torch.where(truth.keys.isfinite() & (truth.keys != NAN_KEY), truth.keys.abs(), 0.0)
    return 4 * U * problem.softcap + U * keys * added


def _slack(problem: Problem, truth: Truth, bound: torch.Tensor) -> torch.Tensor:
    """[rows, experts] fp64: the bound of each key."""
    if problem.score == "softmax":
        return bound + _softmax_rounding(problem, truth)
    rounding = U * torch.where(truth.keys.isfinite(), truth.keys.abs(), 0.0)
    if problem.score == "sqrtsoftplus":
        return bound / 2 + 4 * U * truth.scores.clamp(min=1.0).nan_to_num(1.0, 1.0) + rounding
    return bound / 4 + 4 * U + rounding


def _tied(problem: Problem, truth: Truth, row: torch.Tensor | int, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether the keys of experts ``one`` and ``other`` of ``row`` (index tensors that broadcast) tie in any precision.

    They do where the fp64 keys are equal and either both keys are infinite or NaN, or the biases are equal and the scores too:
    of equal logits, or of logits so far out that the fp32 sigmoid is 1 (from 18) or 0 (to -104).
    """
    equal = truth.keys[row, one] == truth.keys[row, other]
    key, a, b = truth.keys[row, one], truth.read[row, one], truth.read[row, other]
    score = a == b
    if problem.score == "sigmoid":
        score = score | ((a >= 18) & (b >= 18)) | ((a <= -104) & (b <= -104))
    bias: torch.Tensor | bool = True
    if truth.bias is not None:
        each = truth.bias.expand_as(truth.keys)
        bias = each[row, one] == each[row, other]
    return equal & (key.isinf() | (key == NAN_KEY) | (score & bias))


MOST_OPEN = 12


def _with_groups_of(ids: torch.Tensor, truth: Truth, problem: Problem, bound: torch.Tensor) -> Truth:
    """``truth``, but in rows that kept other groups than the oracle's, which is within the bounds, by the groups of ``ids``."""
    free = reference.ungrouped(problem, truth.logits, truth.bias)
    scores, pairs = reference.group_scores(problem, free.keys)
    slack = _slack(problem, free, bound).gather(1, pairs.flatten(1)).unflatten(1, (problem.groups, -1)).sum(2)
    slack += U * torch.where(scores.isfinite(), scores.abs(), 0.0)
    kept = reference.best_groups(problem, free.keys)
    again = kept.clone()
    mine, best = ids.sort(1).values, truth.ids[: len(ids)].sort(1).values
    for row in (mine != best).any(1).nonzero().flatten().tolist():
        sets = _allowed_groups(problem, free, row, scores[row], slack[row], pairs[row], kept[row])
        trial = kept[row].repeat(len(sets), 1)
        for place, some in enumerate(sets):
            trial[place] = False
            trial[place, some] = True
        rows = truth.logits[row].expand(len(sets), -1)
        found = reference.select(problem, rows, truth.bias, groups=trial).ids.sort(1).values
        fitting = (found == mine[row]).all(1).nonzero().flatten()
        if len(fitting):
            again[row] = trial[fitting[0]]
    if torch.equal(again, kept):
        return truth
    given = {"magnitude": truth.magnitude, "terms": truth.terms}
    return reference.select(problem, truth.logits, truth.bias, num_token_non_padded=truth.valid, groups=again, **given)


def _allowed_groups(
    problem: Problem, free: Truth, row: int, scores: torch.Tensor, slack: torch.Tensor, pairs: torch.Tensor, kept: torch.Tensor
) -> list[list[int]]:
    """The sets of groups that a row may have kept. ``scores``, ``slack`` [groups]; ``pairs`` [groups, 2]: two best experts."""
    if kept.all():
        return []
    reach = 2 * slack.max()
    near = kept & ~(scores > scores[~kept].max() + reach) | ~kept & ~(scores < scores[kept].min() - reach)
    sure, open_ = (kept & ~near).nonzero().flatten().tolist(), near.nonzero().flatten().tolist()
    if len(open_) > MOST_OPEN:
        return []
    allowed = []
    for some in itertools.combinations(open_, int(kept.sum()) - len(sure)):
        taken = torch.tensor(some, dtype=torch.long, device=scores.device)[None, :]
        left = torch.tensor([g for g in open_ if g not in some], dtype=torch.long, device=scores.device)[:, None]
        gap = (scores[left] - scores[taken]).nan_to_num(0.0, torch.inf, -torch.inf)
        ties = [_tied(problem, free, row, pairs[left, i], pairs[taken, i]) for i in range(pairs.shape[1])]
        wrong = (gap > slack[left] + slack[taken]) | (torch.stack(ties).all(0) & (left < taken))
        if not wrong.any():
            allowed.append([*sure, *some])
    return allowed


def _compare_ids(ids: torch.Tensor, truth: Truth, problem: Problem, slack: torch.Tensor) -> list[str]:
    """An expert taken or left against the oracle is allowed only within the bounds of the keys at the cut."""
    keys = truth.keys[: len(ids)]
    got = torch.zeros_like(keys, dtype=torch.bool).scatter_(1, ids, True)
    want = torch.zeros_like(got).scatter_(1, truth.ids[: len(ids)], True)
    found = []
    for row in (got != want).any(1).nonzero().flatten():
        taken = (got[row] & ~want[row]).nonzero().flatten()[None, :]
        left = (want[row] & ~got[row]).nonzero().flatten()[:, None]
        gap = (keys[row, left] - keys[row, taken]).nan_to_num(0.0, torch.inf, -torch.inf)  # both infinite: a tie
        allowed = slack[row, left] + slack[row, taken]
        wrong = (gap > allowed) | (_tied(problem, truth, row, left, taken) & (left < taken))
        if wrong.any():
            a, b = wrong.nonzero()[0].tolist()
            found.append(
                f"ids[{row}]: expert {taken[0, b]} taken instead of {left[a, 0]}, whose key is higher by {gap[a, b]:.3g}"
                f" (allowed {allowed[a, b]:.3g}; margin {truth.margin[row]:.3g})"
            )
    return found[:SHOWN]


def _compare_order(ids: torch.Tensor, truth: Truth, problem: Problem, slack: torch.Tensor) -> list[str]:
    """Every earlier slot against every later one of its row: descending keys, and ascending ids where they tie."""
    row = torch.arange(len(ids), device=ids.device)[:, None]
    first, second = torch.triu_indices(ids.shape[1], ids.shape[1], 1, device=ids.device)
    earlier, later = ids[:, first], ids[:, second]
    gap = (truth.keys[row, later] - truth.keys[row, earlier]).nan_to_num(0.0, torch.inf, -torch.inf)
    wrong = gap > slack[row, later] + slack[row, earlier]
    wrong |= _tied(problem, truth, row, earlier, later) & (earlier > later)
    return _first(
        wrong,
        lambda r, p: f"ids[{r}]: expert {earlier[r, p]} stands before {later[r, p]}, whose key is higher by {gap[r, p]:.3g}",
    )


def _compare_weights(
    ids: torch.Tensor, weights: torch.Tensor, truth: Truth, problem: Problem, bound: torch.Tensor
) -> list[str]:
    """Weights are judged for the ids that the design chose, so that a near-tie counts once; -1 of no expert weighs 0."""
    there = ids.clamp(min=0)
    want = reference.weigh(problem, truth.scores[: len(ids)], ids)
    additions = problem.topk
    if problem.score == "softmax":
        keys, first = truth.keys[: len(ids)], truth.keys[: len(ids)].max(1, keepdim=True).values
        rounding = _softmax_rounding(problem, truth)[: len(ids)]
        apart = (first - keys).nan_to_num(0.0, 0.0).clamp(max=100.0)
        bound = bound + rounding + (bound + rounding).max(1, keepdim=True).values + U * apart
        additions = problem.topk if problem.renormalize else 16
    relative = 2 * (bound.gather(1, there).max(1, keepdim=True).values + 4 * U) + (additions + 4) * U
    total = truth.scores[: len(ids)].gather(1, there).masked_fill(ids < 0, 0.0).nan_to_num(0.0).sum(1, keepdim=True)
    # Scores about the smallest normal float may each count as 0 or not, so a row of nothing else has no one right sum: its
    # weights are shares of the scale, whichever.
    settled = total > (16 * problem.topk * MIN_SCORE if problem.renormalize else 0.0)
    bad = settled & ((weights - want).abs() > relative * want + 2 * MIN_SCORE)
    bad |= (total == 0) & (weights != 0)
    share = problem.renormalize or problem.score != "sqrtsoftplus"
    bad |= (weights < 0) | (share & (weights > problem.scale * (1 + relative)))
    return _first(bad, lambda r, k: f"weights[{r}, {k}]: {weights[r, k]:.9g}, wanted {want[r, k]:.9g}")
