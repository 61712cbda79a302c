"""compare() passes what is right and names what is not: each test breaks a right result in one way."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from sglang_router_ext import reference
from sglang_router_ext.agreement import Result, compare
from sglang_router_ext.bench.inputs import random_inputs
from sglang_router_ext.contract import Problem
from sglang_router_ext.designs import TABLE

PROBLEM = Problem(experts=64, hidden=256, topk=4, shared=1, shared_weight=0.4)
ROWS = 5


def right() -> tuple[Result, reference.Truth]:
    inputs = random_inputs(PROBLEM, ROWS)
    truth = reference.route(PROBLEM, inputs.hidden, inputs.weight, inputs.bias, num_token_non_padded=ROWS - 1)
    return Result(truth.logits.float(), *reference.outputs(PROBLEM, truth)), truth


def spoilt(change: Callable[[Result], object]) -> list[str]:
    result, truth = right()
    copy = Result(*(None if field is None else field.clone() for field in result))
    changed = change(copy)
    return compare(changed if isinstance(changed, Result) else copy, truth, PROBLEM, TABLE["pair"])


def test_a_right_result_has_no_differences() -> None:
    result, truth = right()
    assert compare(result, truth, PROBLEM, TABLE["pair"]) == []


def set_item(field: str, place: tuple[int, int], value: float) -> Callable[[Result], None]:
    def change(result: Result) -> None:
        getattr(result, field)[place] = value

    return change


BREAKS: dict[str, tuple[Callable[[Result], object], str]] = {
    "logit rounded to bf16": (lambda r: r._replace(logits=r.logits.bfloat16().float()), r"logits\["),
    "logit not a number": (set_item("logits", (0, 0), float("nan")), r"logits\[0, 0\]"),
    "logits of another type": (lambda r: r._replace(logits=r.logits.double()), "logits: torch.float64"),
    "ids of another type": (lambda r: r._replace(ids=r.ids.long()), "ids: torch.int64"),
    "weights missing": (lambda r: r._replace(weights=None), "weights: nothing"),
    "id past the experts": (set_item("ids", (1, 0), 64), r"ids\[1, 0\]: 64 is outside"),
    "id of padding in a valid row": (set_item("ids", (1, 0), -1), r"ids\[1, 0\]: -1 is outside"),
    "an expert twice": (lambda r: r.ids[2].__setitem__(1, r.ids[2, 0]), "stands twice"),
    "padded row with an id": (set_item("ids", (ROWS - 1, 0), 3), "in a padded row, wanted -1"),
    "padded row with a weight": (set_item("weights", (ROWS - 1, 0), 0.1), "in a padded row, wanted 0"),
    "weights off by 1e-4": (lambda r: r.weights[0, :4].mul_(1 + 1e-4), r"(?m)^weights\[0, 0\]"),
    "weights just over their bound": (lambda r: r.weights[0, :4].mul_(1 + 18 * 2.0**-23), r"(?m)^weights\[0, 0\]"),
    "weight above the scale": (set_item("weights", (0, 0), 1.1), r"(?m)^weights\[0, 0\]"),
    "logits missing": (lambda r: r._replace(logits=None), "^logits: nothing"),
    "ids missing": (lambda r: r._replace(ids=None), "^ids: nothing"),
    "selection missing": (lambda r: r._replace(ids=None, weights=None), "^ids: nothing"),
    "nothing at all": (lambda r: Result(), "^logits: nothing"),
    "ids in another order": (lambda r: r.ids[0, :4].copy_(r.ids[0, :4].flip(0)), r"stands before"),
    "weight not finite": (set_item("weights", (0, 1), float("inf")), "not finite"),
    "shared slot with another id": (set_item("ids", (0, 4), 65), r"shared ids\[0, 0\]: 65"),
    "shared slot with another weight": (set_item("weights", (0, 4), 0.5), r"shared weights\[0, 0\]"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_every_kind_of_fault_is_named(name: str) -> None:
    change, words = BREAKS[name]
    found = "\n".join(spoilt(change))
    assert found
    assert re.search(words, found), found


def test_an_expert_with_a_lower_key_is_wrong_unless_it_is_a_near_tie() -> None:
    problem = Problem(experts=4, hidden=64, topk=1)
    design = TABLE["warp_select"]
    logits, bias = torch.tensor([[1.0, 0.5, 0.0, 0.0]]), torch.zeros(4)
    truth = reference.select(problem, logits, bias)
    worse = Result(None, torch.tensor([[1]], dtype=torch.int32), torch.ones(1, 1))
    assert "expert 1 taken instead of 0" in compare(worse, truth, problem, design)[0]
    near = reference.select(problem, torch.tensor([[1.0, 1.0 - 1e-7, 0.0, 0.0]]), bias)
    assert compare(worse, near, problem, design) == []


@pytest.mark.parametrize(("gap", "wanted"), [(0.9, 0), (1.1, 1)])
def test_a_key_may_be_missed_by_the_bounds_of_both_and_no_more(gap: float, wanted: int) -> None:
    """Equal logits; the biases alone are apart, by a multiple of what both keys' bounds allow."""
    problem = Problem(experts=3, hidden=64, topk=1)
    allowed = 2 * (4 + 0.5) * 2.0**-23
    truth = reference.select(problem, torch.zeros(1, 3), torch.tensor([gap * allowed, 0.0, -1.0]))
    second = Result(None, torch.tensor([[1]], dtype=torch.int32), torch.ones(1, 1))
    assert len(compare(second, truth, problem, TABLE["warp_select"])) == wanted


INF, NAN = float("inf"), float("nan")
TIES = {
    "equal": ([0.5, 0.5], [1.0, 1.0]),
    "NaN logits": ([NAN, NAN], [1.0, 2.0]),
    "NaN biases": ([0.5, 0.7], [NAN, NAN]),
    "infinite biases": ([0.5, 0.7], [INF, INF]),
    "minus infinite biases": ([0.5, 0.7], [-INF, -INF]),
    "scores of 1": ([40.0, 90.0], [1.0, 1.0]),
    "scores of 0": ([-104.0, -INF], [1.0, 1.0]),
}


@pytest.mark.parametrize("name", TIES)
def test_an_exact_tie_must_go_to_the_lower_id(name: str) -> None:
    logits, bias = TIES[name]
    for topk, higher_first in ((1, [1]), (2, [1, 0])):
        problem = Problem(experts=2, hidden=64, topk=topk)
        truth = reference.select(problem, torch.tensor([logits]), torch.tensor(bias))
        weights = reference.weigh(problem, truth.scores, torch.tensor([higher_first])).float()
        wrong = Result(None, torch.tensor([higher_first], dtype=torch.int32), weights)
        found = compare(wrong, truth, problem, TABLE["warp_select"])
        assert len(found) == 1
        assert ("expert 1 taken instead of 0" if topk == 1 else "expert 1 stands before 0") in found[0]
        right = Result(None, *reference.outputs(problem, truth))
        assert compare(right, truth, problem, TABLE["warp_select"]) == []


def test_sglang_s_own_selection_owes_no_order() -> None:
    result, truth = right()
    turned = result._replace(ids=result.ids.flip(1).roll(-1, 1), weights=result.weights.flip(1).roll(-1, 1))
    assert compare(turned, truth, PROBLEM, TABLE["host"]) == []


def test_a_selection_gets_no_cover_from_the_gate() -> None:
    """A near-tie within the logit bound, and weights within it, are wrong where the logits that came say otherwise."""
    problem = Problem(experts=3, hidden=4096, topk=1)
    truth = reference.route(problem, torch.ones(1, 4096).bfloat16(), torch.zeros(3, 4096).bfloat16(), torch.zeros(3))
    truth = truth._replace(magnitude=torch.full_like(truth.logits, 4096.0))
    result = Result(torch.tensor([[0.0, 1e-3, 0.0]]), torch.tensor([[0]], dtype=torch.int32), torch.ones(1, 1))
    assert "expert 0 taken instead of 1" in compare(result, truth, problem, TABLE["pair"])[0]


@pytest.mark.parametrize("weight", [0.25, 1.5, -0.5])
def test_a_row_whose_scores_all_vanish_weighs_nothing(weight: float) -> None:
    problem = Problem(experts=2, hidden=64, topk=2)
    ids, weights = torch.tensor([[0, 1]], dtype=torch.int32), torch.full((1, 2), weight)
    gone = reference.select(problem, torch.full((1, 2), -100.0), torch.zeros(2))
    assert "weights[0, 0]" in compare(Result(None, ids, weights), gone, problem, TABLE["warp_select"])[0]
    # About the smallest normal float either is right, but only as a share of the scale.
    edge = reference.select(problem, torch.full((1, 2), -87.33), torch.zeros(2))
    found = compare(Result(None, ids, weights), edge, problem, TABLE["warp_select"])
    assert bool(found) == (weight != 0.25)


def test_a_gate_is_allowed_its_additions_and_no_more() -> None:
    """The bound grows with the magnitude of the products, and a selection from given logits gets none of it."""
    problem = Problem(experts=2, hidden=4096, topk=1)
    hidden, weight = torch.ones(1, 4096).bfloat16(), torch.ones(2, 4096).bfloat16()
    truth = reference.route(problem, hidden, weight, torch.zeros(2))
    chain = 4096 / TABLE["small_rows"].chain + 64
    limit = chain * 2.0**-23 * 4096
    for error, wanted in ((0.9 * limit, 0), (1.1 * limit, 1)):
        logits = (truth.logits + torch.tensor([[error, 0.0]])).float()
        assert len(compare(Result(logits), truth, problem, TABLE["small_rows"])) == wanted


def test_infinite_logits_must_not_become_numbers() -> None:
    problem = Problem(experts=2, hidden=8, topk=1)
    hidden = torch.full((1, 8), float("inf")).bfloat16()
    truth = reference.route(problem, hidden, torch.ones(2, 8).bfloat16(), torch.zeros(2))
    assert compare(Result(torch.full((1, 2), float("inf"))), truth, problem, TABLE["small_rows"]) == []
    assert "logits[0, 0]: 7" in compare(Result(torch.full((1, 2), 7.0)), truth, problem, TABLE["small_rows"])[0]


# --- groups

GROUPED = Problem(experts=256, hidden=64, topk=8, groups=8, groups_kept=4)


def judged_with_another_group(apart: float) -> list[str]:
    """Two experts stand out in each group. The result kept group 4 instead of 3, whose score is higher by ``apart``."""
    bias = torch.linspace(1, 0, 256)
    for group, high in enumerate((9.0, 8.0, 7.0, 5.0, 5.0 - apart / 2, 3.0, 2.0, 1.5)):
        bias[32 * group : 32 * group + 2] = high
    logits, kept = torch.zeros(1, 256), torch.tensor([[True, True, True, False, True, False, False, False]])
    truth, other = reference.select(GROUPED, logits, bias), reference.select(GROUPED, logits, bias, groups=kept)
    assert truth.ids[0, 6] == 96 and other.ids[0, 6] == 128
    return compare(Result(None, *reference.outputs(GROUPED, other)), truth, GROUPED, TABLE["warp_select"])


def test_another_group_is_allowed_within_the_bounds_of_the_scores() -> None:
    assert judged_with_another_group(1e-6) == []
    assert judged_with_another_group(1e-3)[0].startswith("ids[0]: expert 128 taken instead of 96")


def test_of_groups_that_tie_the_lower_one_is_owed() -> None:
    assert judged_with_another_group(0.0) != []


# --- score rules

RULES = {
    name: Problem(experts=64, hidden=64, topk=4, **fields)
    for name, fields in {
        "sigmoid": {},
        "sqrtsoftplus": {"score": "sqrtsoftplus"},
        "NaN first": {"score": "sqrtsoftplus", "nan_first": True},
        "softmax": {"score": "softmax", "bias": False},
        "all experts": {"score": "softmax", "bias": False, "renormalize": False},
        "softcap": {"score": "softmax", "bias": False, "softcap": 5.0},
        "bf16 logits": {"score": "softmax", "bias": False, "logits_dtype": "bfloat16"},
    }.items()
}


def selected(problem: Problem) -> reference.Truth:
    """Logits in steps below bf16's, so that those tie which it rounds to one value, and a NaN in the last row."""
    logits = 4.0 + torch.arange(2 * 64).reshape(2, 64) * 37 % 64 * 2.0**-8
    logits[1, 5] = float("nan")
    return reference.select(problem, logits, torch.zeros(64) if problem.bias else None)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("other", RULES)
def test_a_result_by_another_rule_is_wrong(rule: str, other: str) -> None:
    problem, truth = RULES[rule], selected(RULES[rule])
    result = Result(None, *reference.outputs(problem, selected(RULES[other])))
    assert bool(compare(result, truth, problem, TABLE["warp_select"])) == (rule != other)


def test_logits_that_are_rounded_for_the_model_may_be_off_by_its_rounding_and_no_more() -> None:
    problem = RULES["bf16 logits"]
    hidden, weight = torch.ones(1, 64).bfloat16(), torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    truth = reference.route(problem, hidden, weight, None)
    for logits, wanted in (
        (truth.logits.float(), True),
        (truth.logits.bfloat16().float(), True),
        ((truth.logits * 1.02).bfloat16().float(), False),
        ((truth.logits * 1.0001).float(), False),
    ):
        selection = reference.outputs(problem, reference.select(problem, logits, None))
        assert (compare(Result(logits, *selection), truth, problem, TABLE["pair"]) == []) == wanted
