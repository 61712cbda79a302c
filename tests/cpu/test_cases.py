"""Cases and batches: drawn from seeds, inside the contract, and telling right from wrong (Triton's selection, interpreted)."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from sglang_router_ext import agreement, reference
from sglang_router_ext.bench import peers
from sglang_router_ext.bench.cases import CASES, Case, case_by_name
from sglang_router_ext.bench.checks import Check, inputs_of, model_checks, odd_checks
from sglang_router_ext.bench.inputs import KINDS, Inputs
from sglang_router_ext.bench.launch import truth
from sglang_router_ext.choose import reasons
from sglang_router_ext.contract import ContractError, Problem, gpu_by_name
from sglang_router_ext.designs import DESIGNS, TABLE

SMALL = Problem(experts=33, hidden=40, topk=8)
ONE = Problem(experts=1, hidden=8, topk=1)
PLAIN = Check(case="small", problem=SMALL, rows=5)

INTERPRETED = """
import json, sys, torch
from sglang_router_ext.bench import check
from sglang_router_ext.bench.checks import Check, inputs_of
from sglang_router_ext.bench.inputs import KINDS
from sglang_router_ext.bench.launch import launch, truth
from sglang_router_ext.contract import Gpu, Problem
from sglang_router_ext.designs import TABLE

torch.set_num_threads(1)
design, gpu = TABLE[sys.argv[1]], Gpu("none", 90)
"""
INTERPRETED_CHECKS = """
dtype = {"weight_dtype": design.weight_dtypes[0]}
shapes = [(Problem(experts=9, hidden=8, topk=3, **dtype), 1), (Problem(experts=33, hidden=8, topk=8, scale=2.5, **dtype), 5)]
if "gate" in design.stages:
    shapes.append((Problem(experts=5, hidden=1100, topk=2, **dtype), 33))
todo = [Check(case="small", problem=problem, rows=rows, kind=kind) for kind in KINDS for problem, rows in shapes]
outcomes = [*check.run([design], todo, gpu, "cpu"), *check.run_bad_inputs([design], "bad", shapes[1][0], gpu, "cpu")]
print(json.dumps([(outcome.check, outcome.refused, outcome.failures) for outcome in outcomes]))
"""
INTERPRETED_WEIGHTS = """
problem = Problem(experts=9, hidden=40, topk=3, weight_dtype="float32")
plain = inputs_of(Check(case="small", problem=problem, rows=5, kind="one-hot"))
weight = plain.weight.sign() * (1 + plain.weight.abs())
long = torch.tensor(0x7E80FFFF, dtype=torch.int32).view(torch.float32)  # its rests are as large as they get
found = []

def judge(name, inputs):
    logits, fp32 = launch(design, problem, inputs).logits, inputs.hidden.float() @ inputs.weight.t()
    failures = check.examine(design, problem, inputs, truth(("gate",), problem, inputs))
    infinite = ~fp32.isfinite()
    same = torch.equal(logits[infinite].nan_to_num(7.0), fp32[infinite].nan_to_num(7.0)) and logits[~infinite].isfinite().all()
    found.append((name, [*failures, *([] if same else ["an infinity or NaN is not that of fp32"])]))

judge("largest", plain._replace(weight=weight.sign() * torch.finfo(torch.float32).max))
judge("products below the largest", plain._replace(hidden=plain.hidden * 6, weight=torch.full_like(weight, long)))
judge("about the smallest", plain._replace(weight=weight * 2.0**-122))
for value in (float("inf"), float("-inf"), float("nan"), torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)):
    for kind in ("random", "one-hot", "inf"):
        inputs = inputs_of(Check(case="small", problem=problem, rows=5, kind=kind))
        inputs.weight[2, 0], inputs.weight[4, 37] = value, value
        judge(f"{value} in the weight, {kind}", inputs)
judge("infinity in hidden, bf16 weight", inputs_of(Check(case="small", problem=problem, rows=5, kind="inf"))._replace(
    weight=plain.weight.bfloat16().float()))
subnormal = plain._replace(hidden=plain.hidden * 2, weight=torch.randn_like(weight) * 2.0**-135)
error = launch(design, problem, subnormal).logits.double() - subnormal.hidden.double() @ subnormal.weight.double().t()
found.append(("subnormal", [] if error.abs().max() <= 2.0**-149 else [f"off by {error.abs().max()}"]))
print(json.dumps(found))
"""
INTERPRETED_PARTS = """
from sglang_router_ext.gate import split_gemm

kernel, judged = split_gemm.add_parts_kernel, []
problem = Problem(experts=9, hidden=40, topk=3, weight_dtype="float32")
inputs = inputs_of(Check(case="small", problem=problem, rows=5, kind="one-hot"))

class Without:
    def __init__(self, part):
        self.part = part

    def __getitem__(self, grid):
        def run(sums, *rest, **options):
            if self.part is not None:
                sums.unflatten(1, (3, -1))[:, self.part] = 0
            kernel[grid](sums, *rest, **options)
        return run

for part in (None, 0, 1, 2):
    split_gemm.add_parts_kernel = Without(part)
    judged.append((part, check.examine(design, problem, inputs, truth(("gate",), problem, inputs)) == []))
print(json.dumps(judged))
"""


def _bits(inputs: Inputs) -> list[torch.Tensor | None]:
    return [None if field is None else field.contiguous().view(torch.uint8).clone() for field in inputs]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_depends_on_its_seed_alone(kind: str) -> None:
    check = Check(case="small", problem=SMALL, rows=5, kind=kind)
    for one, again in zip(_bits(inputs_of(check, seed=3)), _bits(inputs_of(check, seed=3)), strict=True):
        assert (one is None and again is None) or torch.equal(one, again)
    assert not torch.equal(
        inputs_of(Check(case="small", problem=SMALL, rows=5), seed=4).weight, inputs_of(check, seed=3).weight
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("problem", "rows"), [(SMALL, 1), (SMALL, 5), (ONE, 1)])
def test_every_kind_keeps_shapes_and_changes_what_it_says(kind: str, problem: Problem, rows: int) -> None:
    plain = inputs_of(Check(case="small", problem=problem, rows=rows))
    batch = inputs_of(Check(case="small", problem=problem, rows=rows, kind=kind))
    for name, before, after in zip(Inputs._fields, plain, batch, strict=True):
        if name == "padding":
            assert (after is None) == (name not in KINDS[kind].touches)
            continue
        if name == "tokens":
            assert before is None is after
            continue
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert after.stride(-1) == 1 or after.shape[-1] == 1
        if name not in KINDS[kind].touches:
            assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_rows_of_strided_batches_lie_as_they_say() -> None:
    strided = inputs_of(Check(case="small", problem=SMALL, rows=5, kind="strided"))
    for tensor in strided[:4]:
        if tensor.dim() == 2:
            assert not tensor.is_contiguous()
            assert tensor.stride(0) * tensor.element_size() % 16 == 0
            assert tensor.data_ptr() % 16 == 0
    for experts in (8, 33):
        odd = inputs_of(
            Check(case="small", problem=Problem(experts=experts, hidden=8, topk=1), rows=5, kind="odd-strides")
        ).logits
        assert odd.stride(0) % 2 == 1
        assert odd.data_ptr() % 16 == 4


def test_random_logits_and_biases_are_realistic() -> None:
    batch = inputs_of(Check(case="glm", problem=CASES["glm-5.3-flash"].problem, rows=16))
    assert 1.0 < batch.logits.std() < 1.5
    assert batch.bias.min() >= 11.54
    assert batch.bias.max() <= 11.96
    assert batch.bias.dtype == torch.float32
    assert batch.bias.bfloat16().unique().numel() <= 8  # the spread that a bf16 cast destroys


def test_enough_checks_for_every_design() -> None:
    gpu = gpu_by_name("h200")
    for design in DESIGNS:
        if not design.target:
            continue
        models, odd = (
            [c for c in checks if KINDS[c.kind].concerns(design.stages) and not reasons(design, c.problem, c.rows, gpu)]
            for checks in (model_checks(), odd_checks())
        )
        enough, problems = (120, 4) if design.hashed else (200, 6)  # one model has hash layers, and they rank nothing
        assert len([c for c in models if c.rows <= 64]) >= enough, design.name
        assert len({c.problem for c in (*models, *odd)}) >= problems, design.name
    sizes = [check.problem for check in odd_checks()]
    assert {problem.experts for problem in sizes} >= {*range(1, 10), 33, 60, 257, 258, 320, 768, 896, 1024}
    assert {problem.hidden for problem in sizes} >= {8, 40, 2688, 2880, 7176}
    assert {problem.topk for problem in sizes} >= {1, 2, 6, 8, 16, 22, 32}
    assert any(problem.topk == problem.experts > 1 for problem in sizes)


def test_groups_of_32_are_taken_and_others_are_not() -> None:
    problem, h200 = CASES["deepseek-v3"].problem, gpu_by_name("h200")
    for name in ("pair", "single", "warp_select"):
        assert reasons(TABLE[name], problem, 1, h200) == reasons(TABLE[name], problem, 1, h200, named=False) == []
    old = Problem(experts=160, hidden=5120, topk=6, groups=8, groups_kept=3)
    assert reasons(TABLE["pair"], old, 1, h200) == ["8 expert groups of 20: takes groups of 32"]


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.served_by], ids=lambda case: case.name)
def test_a_model_is_served_by_a_class_that_sglang_has(case: Case) -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    models = pathlib.Path(next(iter(spec.submodule_search_locations)), "srt/models")
    assert any(f"class {case.served_by}(" in file.read_text() for file in models.glob("*.py"))
    assert case.layers


def test_unknown_case_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match=r"^case: got glm, allowed: glm-5\.3-flash"):
        case_by_name("glm")


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_agrees_with_itself_and_not_with_another(kind: str) -> None:
    """A right answer passes on every kind of batch, and swapping two experts across the cut of a plain one does not."""
    check = Check(case="small", problem=SMALL, rows=5, kind=kind)
    want = truth(("selection",), SMALL, inputs_of(check))
    result = agreement.Result(None, want.ids.int(), want.weights.float())
    assert agreement.compare(result, want, SMALL, TABLE["warp_select"]) == []
    if kind == "random":
        wrong = want.ids.clone()
        wrong[2, 0] = next(expert for expert in range(33) if expert not in want.ids[2])
        result = agreement.Result(None, wrong.int(), reference.weigh(SMALL, want.scores, wrong).float())
        assert "taken instead of" in agreement.compare(result, want, SMALL, TABLE["warp_select"])[0]


def test_the_judge_of_an_aligned_plan() -> None:
    """Blocks of one expert each, slots in any order inside them, padding by a number past the last slot."""
    want = truth(("gate", "selection"), SMALL, inputs_of(PLAIN))
    slots, owners = [], []
    for expert in range(SMALL.experts):
        mine = (want.ids.flatten() == expert).nonzero().flatten().tolist()
        padded = mine + [want.ids.numel()] * (-len(mine) % peers.ALIGN_BLOCK)
        slots += padded
        owners += [expert] * (len(padded) // peers.ALIGN_BLOCK)
    plan = [torch.tensor(values, dtype=torch.int32) for values in (slots, owners, [len(slots)])]
    aligned = peers.Aligned(want.ids.int(), want.weights.float(), *plan)
    judge = peers.PEERS["sglang-pair+align"].judge
    assert judge(aligned, want, SMALL) == []
    assert judge(aligned._replace(expert_ids=plan[1].flip(0)), want, SMALL) == [
        "expert_ids: a slot stands in the block of another expert"
    ]
    assert judge(aligned._replace(sorted_token_ids=plan[0].clamp(min=1)), want, SMALL) == [
        "sorted_token_ids: not every slot stands there exactly once"
    ]
    assert judge(aligned._replace(num_tokens_post_padded=plan[2] + 16), want, SMALL)[0].startswith(
        "num_tokens_post_padded: got"
    )


def test_the_judge_of_bf16_logits_allows_their_rounding_alone() -> None:
    want = truth(("gate",), SMALL, inputs_of(PLAIN))
    judge = peers.PEERS["flashinfer-gemm"].judge
    assert judge(want.logits.bfloat16(), want, SMALL) == []
    assert judge((want.logits * 1.01).bfloat16(), want, SMALL) != []
    assert judge(want.logits.bfloat16() * float("nan"), want, SMALL) != []


def interpreted(design: str, code: str) -> list[list]:
    """What ``code``, after the lines of INTERPRETED, printed last, with Triton's kernels interpreted on the CPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", INTERPRETED + code, design]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("design", ["triton_select", "split_gemm"])
def test_triton_interpreted_on_every_kind_and_on_bad_arguments(design: str) -> None:
    outcomes = interpreted(design, INTERPRETED_CHECKS)
    assert len(outcomes) > 40
    assert [outcome for outcome in outcomes if outcome[1] or outcome[2]] == []


def test_split_gemm_on_weights_at_the_ends_of_fp32() -> None:
    outcomes = interpreted("split_gemm", INTERPRETED_WEIGHTS)
    assert len(outcomes) == 17
    assert [outcome for outcome in outcomes if outcome[1]] == []


def test_one_hot_rows_need_every_part_of_a_split_weight() -> None:
    judged = interpreted("split_gemm", INTERPRETED_PARTS)
    assert judged == [[None, True], [0, False], [1, False], [2, False]]
