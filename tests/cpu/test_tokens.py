"""Where a row's token has a say: the contract, the oracle and the judge of image biases, hash layers and packed ids."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_router_ext import reference
from sglang_router_ext.agreement import Result, compare
from sglang_router_ext.arguments import check_per_row, check_selection
from sglang_router_ext.bench.checks import Check, inputs_of
from sglang_router_ext.bench.launch import truth
from sglang_router_ext.choose import HASH_LAYER, NO_HASH_LAYER, choose, reasons
from sglang_router_ext.contract import STAGES, ContractError, Problem, Tokens, gpu_by_name
from sglang_router_ext.designs import TABLE

HASHED = Problem(experts=8, hidden=16, topk=2, score="sqrtsoftplus", bias=False, hashed=True, shared=1, shared_weight=0.5)
WIDER = Problem(experts=8, hidden=16, topk=3, score="sqrtsoftplus", bias=False, hashed=True, shared=1, shared_weight=0.5)
IMAGES = Problem(experts=8, hidden=16, topk=2, score="sqrtsoftplus", image_bias=True)
H200 = gpu_by_name("h200")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"image_bias": True}, "image_bias: got True, allowed: False with sigmoid scores"),
        ({"image_bias": True, "score": "sqrtsoftplus", "bias": False}, "image_bias: got True, allowed: False without a bias"),
        ({"image_bias": True, "score": "sqrtsoftplus", "groups": 2}, "image_bias: got True, allowed: False with groups"),
        ({"hashed": True}, "hashed: got True, allowed: False with a bias or groups, which rank"),
        ({"hashed": True, "bias": False, "groups": 2}, "hashed: got True, allowed: False with a bias or groups, which rank"),
        ({"hashed": True, "bias": False, "score": "softmax"}, "hashed: got True, allowed: False with softmax scores"),
        ({"hashed": True, "bias": False, "logits_dtype": "bfloat16"}, "logits_dtype: got bfloat16, allowed: float32 where"),
        ({"experts": "8"}, "experts: got '8', allowed: an integer of at least 1"),
        ({"topk": 2.0}, "topk: got 2.0, allowed: an integer of at least 1"),
        ({"topk": True}, "topk: got True, allowed: an integer of at least 1"),
        ({"shared": None}, "shared: got None, allowed: an integer of at least 0"),
        ({"shared": -1}, "shared: got -1, allowed: an integer of at least 0"),
        ({"scale": math.nan}, "scale: got nan, allowed: a finite fp32 number"),
        ({"scale": 1e39}, r"scale: got 1e\+39, allowed: a finite fp32 number"),
        ({"scale": "2"}, "scale: got '2', allowed: a finite fp32 number"),
        ({"shared_weight": math.inf}, "shared_weight: got inf, allowed: a finite fp32 number"),
    ],
)
def test_problems_that_make_no_sense(fields: dict, text: str) -> None:
    with pytest.raises(ContractError, match="^" + text):
        Problem(**{"experts": 8, "hidden": 16, "topk": 2, **fields})


def test_problems_say_what_their_tokens_do() -> None:
    assert "by a table of tokens" in str(HASHED)
    assert "float32 bias + image bias" in str(IMAGES)


def test_a_table_worked_by_hand() -> None:
    """sqrt(log(1 + e^x)) of 0 and of log(e - 1) is 0.8326 and 1."""
    logits = torch.zeros(4, 8)
    logits[:, 3] = math.log(math.e - 1)
    table = torch.tensor([[3, 0], [5, 3], [8, -1], [2, 9]], dtype=torch.int32)
    tokens = Tokens(torch.tensor([1, 0, 2, 4]), table=table)
    bias, named = reference.by_token(HASHED, None, tokens)
    found = reference.select(HASHED, logits, bias, named=named)
    assert found.ids.tolist() == [[5, 3], [3, 0], [-1, -1], [-1, -1]]
    half = math.sqrt(math.log(2))
    want = [[half / (1 + half), 1 / (1 + half)], [1 / (1 + half), half / (1 + half)], [0, 0], [0, 0]]
    torch.testing.assert_close(found.weights, torch.tensor(want, dtype=torch.float64))
    ids, weights = reference.outputs(HASHED, found)
    assert ids[:, 2].tolist() == [8, 8, -1, -1]
    assert weights[:, 2].tolist() == [0.5, 0.5, 0.0, 0.0]
    tokens = Tokens(torch.tensor([3]), table=table)
    _, named = reference.by_token(HASHED, None, tokens)
    assert reference.select(HASHED, logits[:1], None, named=named).weights.tolist() == [[1.0, 0.0]]


def test_the_oracle_wants_the_experts_of_a_hash_layer() -> None:
    with pytest.raises(ContractError, match=r"^named: got None, allowed: those of 8 x 16"):
        reference.select(HASHED, torch.zeros(1, 8), None)


def test_image_tokens_rank_by_the_other_bias() -> None:
    text, image = torch.arange(8.0), -torch.arange(8.0)
    bias, named = reference.by_token(IMAGES, text, Tokens(torch.tensor([7, 1, 7]), 7, image))
    assert named is None
    found = reference.select(IMAGES, torch.zeros(3, 8), bias)
    assert found.ids.tolist() == [[0, 1], [7, 6], [0, 1]]


def test_packed_ids_worked_by_hand() -> None:
    packed = reference.pack(torch.tensor([[3, -1]], dtype=torch.int32), torch.tensor([[1.0, 0.0]]))
    assert packed.tolist() == [[3 << 16 | 0x3F80, -1 << 16]]


def right(kind: str = "random", rows: int = 5) -> tuple[Result, reference.Truth]:
    inputs = inputs_of(Check(case="x", problem=WIDER, rows=rows, kind=kind))
    want = truth(STAGES, WIDER, inputs)
    named = torch.where(want.ids < 0, 8, want.ids)
    mine = torch.zeros(rows, 9, dtype=torch.bool).scatter_(1, named, True)[:, :-1]
    return Result(want.logits.float().where(mine, torch.nan), *reference.outputs(WIDER, want)), want


@pytest.mark.parametrize("kind", ["random", "unknown-tokens", "padded-last", "nan-row", "minus-100"])
def test_the_judge_takes_what_the_contract_says_of_a_hash_layer(kind: str) -> None:
    result, want = right(kind)
    assert compare(result, want, WIDER, TABLE["hash_rows"]) == []


def changed(field: str, place: tuple[int, int], value: float) -> Result:
    result, _want = right("unknown-tokens")
    tensor = getattr(result, field).clone()
    tensor[place] = value
    return result._replace(**{field: tensor})


@pytest.mark.parametrize(
    ("field", "place", "value", "said"),
    [
        ("ids", (1, 1), 0, "ids[1, 1]: 0, wanted"),
        ("ids", (0, 0), 1, "ids[0, 0]: 1, wanted -1"),
        ("ids", (1, 3), 9, "ids[1, 3]: 9, wanted 8"),
        ("weights", (1, 1), 0.125, "weights[1, 1]: 0.125, wanted"),
        ("weights", (0, 0), 1e-6, "weights[0, 0]"),
        ("weights", (1, 1), math.nan, "weights[1, 1]: nan is not finite"),
        ("weights", (0, 3), 0.5, "shared weights[0, 0]: 0.5"),
        ("logits", (0, 0), 0.0, "it is no expert of the row"),
    ],
)
def test_the_judge_sees_a_wrong_hash_layer(field: str, place: tuple[int, int], value: float, said: str) -> None:
    _result, want = right("unknown-tokens")
    found = compare(changed(field, place, value), want, WIDER, TABLE["hash_rows"])
    assert found
    assert said in found[0]


def test_the_judge_sees_a_logit_that_is_off_or_missing() -> None:
    result, want = right()
    assert result.logits is not None
    row, expert = 1, int(want.ids[1, 0])
    for value in (float(want.logits[row, expert]) + 1e-3, math.nan):
        logits = result.logits.clone()
        logits[row, expert] = value
        found = compare(result._replace(logits=logits), want, WIDER, TABLE["hash_rows"])
        assert found[0].startswith(f"logits[{row}, {expert}]")


def test_who_runs_what() -> None:
    assert choose(HASHED, 4, H200, backend="router_ext_pair").fused == "hash_rows"
    assert reasons(TABLE["pair"], HASHED, 4, H200) == [HASH_LAYER]
    plain = Problem(experts=8, hidden=16, topk=2)
    assert reasons(TABLE["hash_rows"], plain, 4, H200) == [NO_HASH_LAYER]
    assert reasons(TABLE["triton_select"], IMAGES, 4, H200)[-1] == "a bias for image tokens: takes one for all"
    for name in ("single", "pair", "warp_select"):
        assert reasons(TABLE[name], IMAGES, 4, H200) == []


def tokens_of(**fields: object) -> Tokens:
    found = {"ids": torch.zeros(4, dtype=torch.int64), "image": 3, "image_bias": torch.zeros(8), **fields}
    return Tokens(**found)  # type: ignore[arg-type]


def tabled(table: torch.Tensor | None) -> Tokens:
    return Tokens(torch.zeros(4, dtype=torch.int64), table=table)


@pytest.mark.parametrize(
    ("problem", "tokens", "text"),
    [
        (IMAGES, None, "tokens: got None, allowed: Tokens, those of the rows, for 8 x 16"),
        (IMAGES, torch.zeros(4), "tokens: got Tensor, allowed: Tokens, those of the rows, for 8 x 16"),
        (Problem(experts=8, hidden=16, topk=2), tokens_of(), "tokens: got Tokens, allowed: None for 8 x 16"),
        (IMAGES, tokens_of(ids=None), r"tokens.ids: got NoneType, allowed: int32 \[4\]"),
        (IMAGES, tokens_of(ids=[0] * 4), r"tokens.ids: got list, allowed: int32 \[4\]"),
        (IMAGES, tokens_of(table=torch.zeros(9, 2)), r"tokens.table: got float32 \[9, 2\] .*, allowed: None for 8 x 16"),
        (HASHED, tokens_of(table=torch.zeros(9, 2)), r"tokens.image_bias: got float32 \[8\] .*, allowed: None for 8 x 16"),
        (IMAGES, tokens_of(image="3"), r"tokens.image: got '3', allowed: an integer from 0 to 2\^31 - 1"),
        (IMAGES, tokens_of(image=True), "tokens.image: got True, allowed: an integer"),
        (IMAGES, tokens_of(ids=torch.zeros(3).long()), r"tokens.ids: got int64 \[3\] .*, allowed: int64 \[4\]"),
        (IMAGES, tokens_of(ids=torch.zeros(4).short()), r"tokens.ids: got int16 \[4\] .*, allowed: int32 \[4\]"),
        (IMAGES, tokens_of(image=-1), r"tokens.image: got -1, allowed: an integer from 0 to 2\^31 - 1"),
        (IMAGES, tokens_of(image_bias=None), r"tokens.image_bias: got NoneType, allowed: float32 \[8\]"),
        (IMAGES, tokens_of(image_bias=torch.zeros(9)[1:]), r"tokens.image_bias: got .*at address 4 modulo 16"),
        (HASHED, tabled(None), r"tokens.table: got NoneType, allowed: int32 \[any, 2\]"),
        (HASHED, tabled(torch.zeros(9, 3, dtype=torch.int32)), r"tokens.table: got int32 \[9, 3\]"),
        (HASHED, tabled(torch.zeros(0, 2, dtype=torch.int32)), r"tokens.table: got int32 \[0, 2\]"),
        (HASHED, tabled(torch.zeros(9, 2)), r"tokens.table: got float32 \[9, 2\]"),
    ],
)
def test_tokens_that_do_not_fit(problem: Problem, tokens: Tokens | None, text: str) -> None:
    with pytest.raises(ContractError, match="^" + text):
        check_per_row(problem, 4, tokens, None, CPU)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_that_fit(dtype: torch.dtype) -> None:
    ids = torch.zeros(4, dtype=dtype)
    check_per_row(IMAGES, 4, tokens_of(ids=ids), torch.zeros(4, 2, dtype=torch.int32), CPU)
    check_per_row(HASHED, 4, Tokens(ids, table=torch.zeros(9, 2, dtype=torch.int32)), None, CPU)


@pytest.mark.parametrize(
    ("packed", "text"),
    [
        (torch.zeros(4, 2), r"packed: got float32 \[4, 2\]"),
        (torch.zeros(4, 3, dtype=torch.int32), r"packed: got int32 \[4, 3\]"),
        (torch.zeros(4, 3, dtype=torch.int32)[:, :2], "packed: got int32 .*allowed: dense rows"),
    ],
)
def test_room_for_packed_ids_that_does_not_fit(packed: torch.Tensor, text: str) -> None:
    with pytest.raises(ContractError, match="^" + text):
        check_per_row(IMAGES, 4, tokens_of(), packed, CPU)


def test_a_design_refuses_the_other_kind_of_router() -> None:
    with pytest.raises(ContractError, match=r"^hashed: got True, allowed: False for pair"):
        check_selection("pair", HASHED, None, None, None, CPU)
    with pytest.raises(ContractError, match=r"^hashed: got False, allowed: True for hash_rows"):
        check_selection("hash_rows", Problem(experts=8, hidden=16, topk=2), None, torch.zeros(8), None, CPU)
