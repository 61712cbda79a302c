"""The oracle, held to rows that were worked by hand. Every other test leans on it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_router_ext import reference
from sglang_router_ext.contract import MIN_SCORE, NAN_KEY, ContractError, Problem

LOGITS = torch.tensor([[1.2, -0.5, 2.0, 0.3, -1.0, 1.9, 0.8, -0.2]])
BIAS = torch.tensor([8.13, 8.0, 8.0, 8.05, 8.1, 8.03, 8.02, 8.07])
"""Eight experts, of which 2 and 5 have the highest scores (0.881 and 0.870) and 0 and 5 the highest keys (8.899 and 8.900)."""
TOY = Problem(experts=8, hidden=4, topk=2)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_toy_layer_chooses_0_and_5_with_an_fp32_bias() -> None:
    truth = reference.select(TOY, LOGITS, BIAS)
    assert truth.ids.tolist() == [[5, 0]]
    assert truth.keys[0, [0, 2, 5]].tolist() == pytest.approx([8.899, 8.881, 8.900], abs=5e-4)
    assert truth.margin.item() == pytest.approx(8.899 - 8.881, abs=1e-3)
    weights = [sigmoid(1.9), sigmoid(1.2)]
    assert truth.weights[0].tolist() == pytest.approx([w / sum(weights) for w in weights], rel=1e-6)


def test_the_toy_layer_chooses_0_and_2_when_the_bias_is_rounded_to_bf16() -> None:
    truth = reference.select(TOY, LOGITS, BIAS.bfloat16().float())
    assert sorted(truth.ids[0].tolist()) == [0, 2]


def test_without_a_bias_the_highest_scores_win_and_weigh() -> None:
    truth = reference.select(TOY, LOGITS, torch.zeros(8))
    assert truth.ids.tolist() == [[2, 5]]
    assert truth.weights[0].tolist() == pytest.approx([0.503, 0.497], abs=5e-4)


def test_the_lower_id_wins_ties() -> None:
    truth = reference.select(Problem(experts=5, hidden=1, topk=3), torch.zeros(1, 5), torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]))
    assert truth.ids.tolist() == [[1, 3, 0]]
    assert truth.margin.item() == 0


def test_nan_ranks_below_every_real_key_and_above_minus_infinity_and_weighs_nothing() -> None:
    nan, inf = float("nan"), float("inf")
    problem = Problem(experts=4, hidden=1, topk=3)
    truth = reference.select(problem, torch.tensor([[0.0, nan, 0.0, -5.0]]), torch.tensor([-inf, 3.0, 1.0, 0.0]))
    assert truth.ids.tolist() == [[2, 3, 1]]
    scores = [0.5, sigmoid(-5.0), 0.0]
    assert truth.weights[0].tolist() == pytest.approx([s / sum(scores) for s in scores], rel=1e-6)


def test_a_row_of_nan_gives_the_lowest_ids_and_no_weight() -> None:
    truth = reference.select(Problem(experts=6, hidden=1, topk=3), torch.full((1, 6), float("nan")), torch.ones(6))
    assert truth.ids.tolist() == [[0, 1, 2]]
    assert truth.weights.tolist() == [[0.0, 0.0, 0.0]]


def test_scores_below_the_smallest_normal_float_count_as_zero() -> None:
    problem = Problem(experts=3, hidden=1, topk=2)
    truth = reference.select(problem, torch.tensor([[-100.0, -100.0, -100.0], [-87.0, -88.0, 0.0]]), torch.zeros(3))
    assert truth.ids.tolist() == [[0, 1], [2, 0]]
    assert truth.weights[0].tolist() == [0.0, 0.0]
    assert truth.weights[1].tolist() == pytest.approx([1.0, 2 * sigmoid(-87.0)])


def test_the_weight_comes_from_the_logit_and_not_from_the_key() -> None:
    """Scores of 1e-8 vanish beside a bias of 12, so that key - bias would be 0 / 0."""
    problem = Problem(experts=256, hidden=1, topk=8)
    logits = torch.linspace(-18.5, -17.5, 256)[None]
    bias = 12 + (torch.arange(256) % 196) * 1e-3
    truth = reference.select(problem, logits, bias)
    assert truth.ids[0].tolist() == list(range(195, 187, -1))
    scores = [sigmoid(logits[0, i].item()) for i in truth.ids[0].tolist()]
    assert truth.weights[0].tolist() == pytest.approx([s / sum(scores) for s in scores], rel=1e-9)


@pytest.mark.parametrize(("renormalize", "scale", "total"), [(True, 1.0, 1.0), (True, 2.5, 2.5), (False, 2.5, None)])
def test_the_scale_is_applied_once(renormalize: bool, scale: float, total: float | None) -> None:
    problem = Problem(experts=8, hidden=4, topk=2, renormalize=renormalize, scale=scale)
    weights = reference.select(problem, LOGITS, BIAS).weights[0]
    expected = (sigmoid(1.9) + sigmoid(1.2)) * scale if total is None else total
    assert weights.sum().item() == pytest.approx(expected, rel=1e-6)


def test_shared_slots_stand_behind_the_routed_ones() -> None:
    problem = Problem(experts=8, hidden=4, topk=2, shared=2, shared_weight=0.4)
    ids, weights = reference.outputs(problem, reference.select(problem, LOGITS.expand(2, -1), BIAS, num_token_non_padded=1))
    assert ids.tolist() == [[5, 0, 8, 9], [-1, -1, -1, -1]]
    assert weights[0, 2:].tolist() == pytest.approx([0.4, 0.4])
    assert weights[0, :2].sum().item() == pytest.approx(1.0)
    assert weights[1].tolist() == [0.0] * 4


@pytest.mark.parametrize(("count", "valid"), [(-1, 0), (0, 0), (2, 2), (9, 3)])
def test_padded_rows_have_no_ids_and_no_weights(count: int, valid: int) -> None:
    truth = reference.select(TOY, LOGITS.expand(3, -1), BIAS, num_token_non_padded=count)
    assert truth.valid == valid
    assert (truth.ids[valid:] == -1).all()
    assert (truth.weights[valid:] == 0).all()
    assert (truth.ids[:valid] >= 0).all()


def test_the_gate_is_a_product_in_fp64() -> None:
    hidden, weight = torch.tensor([[1.0, 2.0]]).bfloat16(), torch.tensor([[0.5, -0.25], [3.0, 1.0]]).bfloat16()
    logits, magnitude, _ = reference.gate(hidden, weight)
    assert logits.tolist() == [[0.0, 5.0]]
    assert magnitude.tolist() == [[1.0, 5.0]]
    assert logits.dtype == torch.float64


def test_what_the_oracle_does_not_know_it_refuses() -> None:
    with pytest.raises(ContractError, match="groups: got 4, allowed: 1 with softmax scores"):
        reference.select(Problem(experts=8, hidden=4, topk=2, score="softmax", groups=4, groups_kept=2), LOGITS, BIAS)
    with pytest.raises(ContractError, match="topk: got 3, allowed: at most the 2 experts of the groups kept"):
        Problem(experts=8, hidden=4, topk=3, groups=4)


GROUPED = Problem(experts=8, hidden=4, topk=3, groups=4, groups_kept=2)


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ([9, 0, 5, 5, 6, 1, 8, 0], [0, 2, 3]),  # sums 9, 10, 7, 8: 6 and 8 are not taken
        ([1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 2]),  # ties: the lower groups, and in them the lower experts
        ([0, 3, 3, 0, 4, 0, 0, 4], [4, 7, 5]),  # of groups 2 and 3 the rest, though others are better
    ],
)
def test_groups_are_ranked_by_their_two_best_keys(keys: list[float], ids: list[int]) -> None:
    logits = torch.zeros(1, 8)
    assert reference.select(GROUPED, logits, torch.tensor(keys)).ids.tolist() == [ids]


def test_an_expert_of_a_dropped_group_is_not_taken_even_for_minus_infinity() -> None:
    bias = torch.tensor([0.0, 0.0, float("-inf"), 9.0, 0.0, 0.0, 9.0, float("-inf")])
    kept = torch.tensor([[False, True, False, True]])
    truth = reference.select(GROUPED, torch.zeros(1, 8), bias, groups=kept)
    assert truth.ids.tolist() == [[3, 6, 2]]


VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 88.0, -88.0, -104.0, float("nan"), float("inf"), float("-inf")]),
    st.floats(-20, 20, width=32),
)


@settings(max_examples=300)
@given(st.data())
def test_any_row_is_ranked_as_a_plain_sort_ranks_it(data: st.DataObject) -> None:
    """The rules again, as a loop over Python floats; every row gives distinct ids and finite weights."""
    experts = data.draw(st.integers(1, 12))
    topk = data.draw(st.integers(1, experts))
    logits = data.draw(st.lists(VALUES, min_size=experts, max_size=experts))
    bias = data.draw(st.lists(VALUES, min_size=experts, max_size=experts))
    problem = Problem(experts=experts, hidden=1, topk=topk, scale=2.0)
    truth = reference.select(problem, torch.tensor([logits]), torch.tensor(bias))

    scores = [torch.sigmoid(torch.tensor(x, dtype=torch.float64)).item() for x in torch.tensor(logits).tolist()]
    scores = [0.0 if s < MIN_SCORE else s for s in scores]
    keys = [s + b for s, b in zip(scores, torch.tensor(bias).double().tolist(), strict=True)]
    keys = [NAN_KEY if math.isnan(k) else k for k in keys]
    ids = sorted(range(experts), key=lambda e: (-keys[e], e))[:topk]
    assert truth.ids[0].tolist() == ids

    chosen = [0.0 if math.isnan(scores[e]) else scores[e] for e in ids]
    total = sum(chosen) or 1.0
    assert truth.weights[0].tolist() == pytest.approx([2.0 * s / total for s in chosen], rel=1e-12)
    assert truth.weights.isfinite().all()
    assert len(set(ids)) == topk


def test_a_softmax_weighs_shares_of_all_experts_or_of_the_chosen() -> None:
    problem = Problem(experts=4, hidden=1, topk=2, score="softmax", bias=False, renormalize=False)
    logits = torch.tensor([[1.0, 2.0, 0.0, 2.0]])
    total = math.e + 2 * math.e**2 + 1
    truth = reference.select(problem, logits, None)
    assert truth.ids.tolist() == [[1, 3]]
    assert truth.weights[0].tolist() == pytest.approx([math.e**2 / total] * 2)
    shares = reference.select(Problem(experts=4, hidden=1, topk=3, score="softmax", bias=False), logits, None)
    assert shares.weights[0].tolist() == pytest.approx([math.e / (2 * math.e + 1)] * 2 + [1 / (2 * math.e + 1)])


def test_the_bias_is_inside_the_softmax_and_the_softcap_inside_the_bias() -> None:
    problem = Problem(experts=3, hidden=1, topk=2, score="softmax", softcap=2.0)
    truth = reference.select(problem, torch.tensor([[100.0, 0.0, -1.0]]), torch.tensor([0.0, 2.5, 0.0]))
    assert truth.ids.tolist() == [[1, 0]]
    assert truth.keys[0].tolist() == pytest.approx([2.0, 2.5, -2 * math.tanh(0.5)])
    share = 1 / (1 + math.exp(-0.5))
    assert truth.weights[0].tolist() == pytest.approx([share, 1 - share])


def test_a_softmax_of_infinities_and_nan_gives_finite_weights() -> None:
    nan, inf = float("nan"), float("inf")
    problem = Problem(experts=4, hidden=1, topk=3, score="softmax", bias=False)
    rows = torch.tensor([[inf, 1.0, inf, nan], [-inf] * 4, [nan] * 4, [nan, 2.0, nan, -inf]])
    truth = reference.select(problem, rows, None)
    assert truth.ids.tolist() == [[0, 2, 1], [0, 1, 2], [0, 1, 2], [1, 0, 2]]
    assert truth.weights.tolist() == [[0.5, 0.5, 0.0], pytest.approx([1 / 3] * 3), [0.0] * 3, [1.0, 0.0, 0.0]]


def test_logits_that_the_model_rounds_tie_where_bf16_does() -> None:
    logits = torch.tensor([[1.0, 1.001, 1.002, 0.5]])
    fields = {"experts": 4, "hidden": 1, "topk": 2, "score": "softmax", "bias": False}
    assert reference.select(Problem(**fields), logits, None).ids.tolist() == [[2, 1]]
    assert reference.select(Problem(**fields, logits_dtype="bfloat16"), logits, None).ids.tolist() == [[0, 1]]


def test_sqrt_softplus_keeps_its_digits_from_minus_104_to_200() -> None:
    problem = Problem(experts=5, hidden=1, topk=5, score="sqrtsoftplus", renormalize=False)
    logits = torch.tensor([[-104.0, -17.0, 0.0, 3.0, 200.0]])
    scores = reference.select(problem, logits, torch.zeros(5)).scores[0].tolist()
    want = [math.exp(-52), math.exp(-8.5), math.sqrt(math.log(2)), math.sqrt(math.log1p(math.exp(3))), math.sqrt(200)]
    assert scores == pytest.approx(want, rel=1e-7)


def test_nan_ranks_first_where_the_model_says_so_and_weighs_nothing() -> None:
    nan = float("nan")
    problem = Problem(experts=4, hidden=1, topk=2, score="sqrtsoftplus", nan_first=True)
    truth = reference.select(problem, torch.tensor([[5.0, nan, 6.0, nan], [5.0, 4.0, nan, 3.0]]), torch.zeros(4))
    assert truth.ids.tolist() == [[1, 3], [2, 0]]
    assert truth.weights.tolist() == [[0.0, 0.0], [0.0, 1.0]]
