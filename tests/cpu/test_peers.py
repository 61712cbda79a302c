"""Peers: what SGLang and PyTorch run for each score rule, with SGLang's functions replaced, and what they refuse."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from sglang_router_ext import reference
from sglang_router_ext.bench import peers
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.checks import Check, inputs_of
from sglang_router_ext.bench.inputs import Inputs
from sglang_router_ext.bench.launch import truth
from sglang_router_ext.contract import Problem

SIGMOID = Problem(experts=33, hidden=40, topk=8, scale=2.5)
SOFTPLUS = Problem(experts=33, hidden=40, topk=6, score="sqrtsoftplus", nan_first=True, scale=1.5)
SOFTMAX = Problem(experts=33, hidden=40, topk=8, score="softmax", bias=False, logits_dtype="bfloat16")
SCALED = msgspec.structs.replace(SOFTMAX, renormalize=False, scale=2.5)
BOTH = ("gate", "selection")


def small(problem: Problem) -> Inputs:
    return inputs_of(Check(case="small", problem=problem, rows=5))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What moe_fused_gate is asked for; the oracle answers."""
    calls: list[dict[str, Any]] = []

    def moe_fused_gate(logits: torch.Tensor, bias: torch.Tensor | None, topk: int, **options: Any) -> tuple[torch.Tensor, ...]:
        calls.append({"dtype": logits.dtype, "bias": bias is not None, **options})
        applied = options.get("apply_routed_scaling_factor_on_output", False)
        problem = Problem(
            experts=logits.shape[1],
            hidden=1,
            topk=topk,
            score=options["scoring_func"],
            bias=bias is not None,
            renormalize=options["renormalize"],
            scale=options["routed_scaling_factor"] if applied else 1.0,
        )
        want = reference.select(problem, logits, bias)
        return want.weights.float(), want.ids.int()

    monkeypatch.setattr(peers, "_import", lambda module, name: {"moe_fused_gate": moe_fused_gate}[name])
    return calls


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (
            SIGMOID,
            {
                "scoring_func": "sigmoid",
                "routed_scaling_factor": 2.5,
                "apply_routed_scaling_factor_on_output": True,
                "num_expert_group": 1,
                "topk_group": 1,
            },
        ),
        (
            SOFTPLUS,
            {
                "scoring_func": "sqrtsoftplus",
                "routed_scaling_factor": 1.5,
                "apply_routed_scaling_factor_on_output": True,
                "sqrtsoftplus_log1p": True,
            },
        ),
        (SOFTMAX, {"scoring_func": "softmax"}),
        (SCALED, {"scoring_func": "softmax"}),
    ],
    ids=["sigmoid", "sqrtsoftplus", "softmax", "softmax scaled"],
)
def test_sglangs_selection_of_each_rule(problem: Problem, expected: dict[str, Any], asked: list[dict[str, Any]]) -> None:
    peer, inputs = peers.PEERS["sglang-topk"], small(problem)
    result = peer.prepare(problem, inputs)()
    assert peer.judge(result, truth(("selection",), problem, inputs), problem) == []
    given = {"dtype": getattr(torch, problem.logits_dtype), "bias": problem.bias, "renormalize": problem.renormalize}
    assert asked == [{**given, **expected}]


def test_sglangs_bf16_logits_are_judged_as_they_are(asked: list[dict[str, Any]]) -> None:
    peer, inputs = peers.PEERS["sglang-pair"], small(SOFTMAX)
    want = truth(BOTH, SOFTMAX, inputs)
    result = peer.prepare(SOFTMAX, inputs)()
    assert result.logits.dtype == asked[0]["dtype"] == torch.bfloat16
    assert peer.judge(result, want, SOFTMAX) == []
    assert "taken instead of" in peer.judge(result._replace(ids=32 - result.ids), want, SOFTMAX)[0]
    gate = peers.PEERS["sglang-gemm"]
    logits = gate.prepare(SOFTMAX, inputs)()
    assert gate.judge(logits, truth(("gate",), SOFTMAX, inputs), SOFTMAX) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shared": 1}, "1 shared slots"),
        ({"bias": True}, "softmax selection reads none"),
        ({"softcap": 30.0}, "softcap 30"),
        ({"score": "sqrtsoftplus"}, "wants one"),
        ({"score": "sigmoid"}, "no selection bias"),
        ({"score": "sqrtsoftplus", "bias": True, "groups": 3, "groups_kept": 2}, "3 expert groups"),
        ({"weight_dtype": "float32"}, "bf16 gate weights only"),
    ],
)
def test_what_sglang_has_no_path_for_is_missing(change: dict[str, Any], reason: str, asked: list[dict[str, Any]]) -> None:
    problem = msgspec.structs.replace(SOFTMAX, **change)
    with pytest.raises(peers.Missing, match=reason):
        peers.PEERS["sglang-pair"].prepare(problem, small(problem))


def test_flashinfers_selection_is_for_sigmoid_scores() -> None:
    problem = CASES["deepseek-v3"].problem
    assert peers._flashinfer_topk_takes(problem)
    assert not peers._flashinfer_topk_takes(msgspec.structs.replace(problem, score="sqrtsoftplus"))


FEW = msgspec.structs.replace(SCALED, logits_dtype="float32")
ALL = msgspec.structs.replace(SOFTMAX, topk=33)
"""bf16 logits tie, and torch.topk on a CPU leaves open which is taken."""


@pytest.mark.parametrize("problem", [SIGMOID, SOFTPLUS, FEW, ALL], ids=str)
def test_five_lines_of_pytorch_follow_each_rule(problem: Problem) -> None:
    peer, inputs = peers.PEERS["naive"], small(problem)
    assert peer.judge(peer.prepare(problem, inputs)(), truth(BOTH, problem, inputs), problem) == []


@pytest.mark.parametrize("change", [{"shared": 1}, {"bias": True}, {"softcap": 30.0}], ids=str)
def test_five_lines_of_pytorch_refuse_the_rest(change: dict[str, Any]) -> None:
    problem = msgspec.structs.replace(SOFTMAX, **change)
    for name in ("naive", "torch-bf16"):
        with pytest.raises(peers.Missing, match="the five lines of PyTorch know none"):
            peers.PEERS[name].prepare(problem, small(problem))


def test_sglangs_fp32_gate_is_in_tf32_as_its_servers_of_such_models_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Problem(experts=16, hidden=32, topk=4, weight_dtype="float32")
    inputs, seen, linear = small(wide), [], torch.nn.functional.linear

    def look(*arguments: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return linear(*arguments)

    monkeypatch.setattr(torch.nn.functional, "linear", look)
    call = peers.PEERS["sglang-gemm"].prepare(wide, inputs)
    for _ in range(2):
        assert peers.PEERS["sglang-gemm"].judge(call(), truth(("gate",), wide, inputs), wide) == []
    assert seen == [True, True] and not torch.backends.cuda.matmul.allow_tf32
    assert peers.note("sglang-gemm", wide, 3) == "TF32" and peers.note("sglang-topk", wide, 3) == ""
