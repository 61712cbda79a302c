"""The chooser: pure, so that every question can be asked without a GPU."""

from __future__ import annotations

import msgspec
import pytest

from sglang_router_ext.backends import BACKENDS, GATES
from sglang_router_ext.choose import ROUNDED, choose, in_force, reasons
from sglang_router_ext.contract import KNOWN_GPUS, ContractError, Gpu, Problem
from sglang_router_ext.designs import TABLE, Rows

GLM = Problem(experts=288, hidden=4096, topk=8)
H200, B300, A100, H100 = (KNOWN_GPUS[name] for name in ("h200", "b300", "a100", "h100"))


def names(problem: Problem, rows: int, gpu=H200, **asked) -> tuple[str, str]:
    choice = choose(problem, rows, gpu, **{"backend": "router_ext_pair", **asked})
    return choice.gate, choice.selection


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (0, ("host", "host")),
        (1, ("pair", "pair")),
        (16, ("pair", "pair")),
        (17, ("tensor_core", "warp_select")),
        (128, ("tensor_core", "warp_select")),
        (129, ("cublas_gemm", "warp_select")),
        (100_000, ("cublas_gemm", "warp_select")),
    ],
)
def test_the_named_pair_over_the_row_axis(rows: int, expected: tuple[str, str]) -> None:
    assert names(GLM, rows) == expected


def test_a_wide_weight_is_split_where_no_design_for_few_rows_takes_it() -> None:
    glm46 = Problem(experts=160, hidden=5120, topk=8, weight_dtype="float32")
    assert names(glm46, 16) == ("pair", "pair")
    assert names(glm46, 1024) == ("split_gemm", "warp_select")
    assert names(glm46, 129, backend="router_ext_single") == ("split_gemm", "select_plan")
    assert names(glm46, 1024, backend="router_ext") == ("host", "select_plan")
    assert names(glm46, 8193, backend="router_ext") == ("host", "host")
    assert names(glm46, 1024, backend="router_ext", plan=False) == ("host", "warp_select")
    assert reasons(TABLE["split_gemm"], GLM, 1024, H200) == ["bfloat16 gate weight: takes float32"]


def test_longest_stage_cover_comes_first() -> None:
    choice = choose(GLM, 4, H200, backend="router_ext_pair")
    assert choice.fused == "pair"
    assert str(choice) == "pair"
    assert choose(GLM, 40, H200, backend="router_ext_pair").fused is None


def test_without_a_backend_of_ours_nothing_is_selected_and_only_a_named_gate_runs() -> None:
    assert names(GLM, 4, backend=None) == ("host", "host")
    assert names(GLM, 4, backend=None, gate="small_rows") == ("small_rows", "host")
    assert names(GLM, 17, backend=None, gate="small_rows") == ("host", "host")
    assert names(GLM, 17, backend=None, gate="naive") == ("naive", "host")


def test_a_named_gate_overrides_that_of_the_backend() -> None:
    assert names(GLM, 4, gate="cublas_gemm") == ("cublas_gemm", "warp_select")
    assert names(GLM, 4, gate="host") == ("host", "warp_select")


def test_a_gate_that_cannot_run_leaves_its_stage_to_the_host_and_says_why() -> None:
    choice = choose(GLM, 17, H200, backend="router_ext_pair", gate="small_rows")
    assert (choice.gate, choice.selection) == ("host", "warp_select")
    assert choice.losers["small_rows"] == ["17 rows: takes 1-16"]


def test_other_gpus() -> None:
    assert names(GLM, 4, B300) == ("pair", "pair")
    assert names(GLM, 4, A100) == ("cublas_gemm", "triton_select")
    assert names(GLM, 4, None) == ("host", "host")


def test_what_cannot_be_built_is_passed_over() -> None:
    missing = dict.fromkeys(("pair", "small_rows", "warp_select"), "no CUDA compiler")
    choice = choose(GLM, 4, H200, backend="router_ext_pair", unavailable=missing)
    assert (choice.gate, choice.selection) == ("cublas_gemm", "triton_select")
    assert choice.losers["pair"] == ["no CUDA compiler"]


def test_the_fastest_backend_takes_only_measured_bands() -> None:
    for rows in (1, 6, 16, 17, 96, 8192):
        choice = choose(GLM, rows, H200, backend="router_ext")
        for name in {choice.gate, choice.selection} - {"host"}:
            assert TABLE[name].status == "on"
            assert any(rows in band for band in TABLE[name].bands[H200.name])
    for gpu in (B300, H100):
        choice = choose(GLM, 4, gpu, backend="router_ext")
        assert (choice.gate, choice.selection) == ("host", "host")
        assert f"not measured on {gpu.name}" in choice.losers["pair"]


def test_a_band_is_a_set_of_ranges() -> None:
    """Crossovers need not be monotonic."""
    design = msgspec.structs.replace(TABLE["pair"], status="on", bands={H200.name: (Rows(1, 4), Rows(8, 16))})
    assert reasons(design, GLM, 4, H200, named=False) == []
    assert reasons(design, GLM, 6, H200, named=False) == ["6 rows: measured fastest at 1-4, 8-16"]
    trial = msgspec.structs.replace(design, status="trial", bands={})
    assert reasons(trial, GLM, 4, H200, named=False) == ["on trial: runs only where it is named"]


def test_a_design_that_plans_has_bands_of_its_own_where_no_plan_is_asked() -> None:
    design = msgspec.structs.replace(
        TABLE["single"],
        status="on",
        bands={H200.name: (Rows(1, 128),)},
        bands_without_plan={H200.name: (Rows(17, 96),)},
    )
    assert reasons(design, GLM, 4, H200, named=False) == []
    assert reasons(design, GLM, 4, H200, named=False, plan=False) == ["4 rows: measured fastest at 17-96 without a plan"]
    assert reasons(design, GLM, 32, H200, named=False, plan=False) == []
    nowhere = msgspec.structs.replace(design, bands_without_plan={})
    assert reasons(nowhere, GLM, 32, H200, named=False, plan=False) == ["32 rows: measured fastest at none without a plan"]
    assert reasons(nowhere, GLM, 4, H200, plan=False) == []  # whoever names it gets it
    assert reasons(design, GLM, 4, B300, named=False, plan=False) == [f"not measured on {B300.name}"]


def test_all_reasons_are_given_at_once() -> None:
    problem = Problem(
        experts=2048,
        hidden=4100,
        topk=40,
        score="softmax",
        bias=True,
        bias_dtype="bfloat16",
        groups=8,
        groups_kept=4,
        weight_dtype="float16",
        hidden_dtype="float16",
    )
    found = reasons(TABLE["pair"], problem, 64, A100)
    words = (
        "sm_80",
        "64 rows",
        "2048 experts",
        "hidden 4100",
        "float16 hidden",
        "float16 gate",
        "40 slots",
        "bfloat16 bias",
        "8 expert groups with softmax scores",
    )
    assert all(any(word in reason for reason in found) for word in words), found


def test_shared_slots_count_among_the_slots() -> None:
    assert names(msgspec.structs.replace(GLM, shared=1), 4) == ("pair", "pair")
    assert names(msgspec.structs.replace(GLM, topk=32, shared=1), 4) == ("host", "host")


def test_a_gate_before_sglangs_selection_runs_where_it_is_measured_to_win() -> None:
    grouped = msgspec.structs.replace(GLM, groups=8, groups_kept=4)
    for backend in BACKENDS:
        assert [names(grouped, rows, backend=backend) for rows in (1, 5, 6, 8, 9, 96)] == [
            *[("host", "host")] * 2,
            *[("small_rows", "host")] * 2,
            *[("host", "host"), ("tensor_core", "host")],
        ]
    why = choose(grouped, 1, H200, backend="router_ext_pair").losers
    assert why["small_rows"] == ["1 rows: measured fastest at 6-8"]
    assert why["cublas_gemm"] == ["on trial: runs only where it is named"]
    assert names(grouped, 1, gate="cublas_gemm") == ("cublas_gemm", "host")


@pytest.mark.parametrize("rows", [1, 6, 17, 9000])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gate", GATES)
def test_whatever_does_not_run_has_a_reason(rows: int, backend: str, gate: str) -> None:
    choice = choose(GLM, rows, H200, backend=backend, gate=gate)
    assert choice.losers.keys() == TABLE.keys() - {"host", choice.gate, choice.selection}
    assert all(choice.losers.values())


def test_what_is_not_known_is_an_error() -> None:
    with pytest.raises(ContractError, match=r"backend: got router_ext_foo, allowed: router_ext \| router_ext_pair"):
        choose(GLM, 1, H200, backend="router_ext_foo")
    with pytest.raises(ContractError, match=r"SGLANG_ROUTER_EXT_GATE: got foo, allowed: auto \|"):
        choose(GLM, 1, H200, backend=None, gate="foo")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("experts", 0),
        ("topk", 9),
        ("topk", 0),
        ("score", "relu"),
        ("groups", 3),
        ("groups_kept", 2),
        ("shared", -1),
        ("weight_dtype", "fp8"),
    ],
)
def test_a_problem_that_makes_no_sense_is_an_error_that_names_the_field(field: str, value: object) -> None:
    with pytest.raises(ContractError, match=f"^{field}: got {value}, allowed: "):
        Problem(**{"experts": 8, "hidden": 8, "topk": 2, field: value})


def test_a_part_of_a_gpu_may_be_too_small() -> None:
    """Blocks of ``single`` wait for others: those of two launches at a time must leave multiprocessors free."""
    part = Gpu("NVIDIA H200 MIG 1g.18gb", 90, 16)
    assert "16 multiprocessors: takes 32 or more" in reasons(TABLE["single"], GLM, 4, part)
    assert not any("multiprocessors" in reason for reason in reasons(TABLE["single"], GLM, 4, Gpu("NVIDIA H200", 90, 132)))
    assert not any("multiprocessors" in reason for reason in reasons(TABLE["pair"], GLM, 4, part))


QWEN = Problem(experts=128, hidden=2048, topk=8, score="softmax", bias=False, logits_dtype="bfloat16")


@pytest.mark.parametrize(
    ("gate", "dtype", "chosen"),
    [
        ("auto", "bfloat16", "auto"),
        ("host", "bfloat16", "host"),
        ("fp32", "float32", "auto"),
        ("small_rows", "float32", "small_rows"),
    ],
)
def test_what_the_gate_setting_makes_of_rounded_logits(gate: str, dtype: str, chosen: str) -> None:
    problem, choice = in_force(QWEN, gate)
    assert (problem.logits_dtype, choice) == (dtype, chosen)
    assert in_force(GLM, gate)[0] == GLM


def test_selections_alone_do_not_follow_a_gate_that_rounds() -> None:
    for gate, rows in (("host", 4), ("small_rows", 17)):
        choice = choose(QWEN, rows, H200, backend="router_ext_pair", gate=gate)
        assert (choice.gate, choice.selection) == ("host", "host")
        assert choice.losers["warp_select"] == [ROUNDED]
    assert names(QWEN, 4, gate="fp32") == names(QWEN, 4) == ("pair", "pair")
    assert names(QWEN, 17) == ("cublas_gemm", "warp_select")
    assert names(QWEN, 17, gate="fp32") == ("tensor_core", "warp_select")  # whose bands speak of logits that are not rounded
    assert names(QWEN, 4, gate="small_rows") == ("small_rows", "warp_select")


def test_no_gate_alone_is_measured_with_rounded_logits() -> None:
    assert names(GLM, 7, backend="router_ext", unavailable={"pair": "x", "single": "x", "warp_select": "x"})[0] == "small_rows"
    choice = choose(QWEN, 7, H200, backend="router_ext", unavailable={"pair": "x", "single": "x", "warp_select": "x"})
    assert (choice.gate, choice.selection) == ("host", "host")
    assert choice.losers["small_rows"] == ["bfloat16 logits: not measured on NVIDIA H200"]
    assert names(QWEN, 7, backend="router_ext") == ("single", "single")


def test_bands_speak_of_what_was_measured_only() -> None:
    narrow = {
        "measured_dtypes": ("bfloat16",),
        "measured_scores": ("sigmoid",),
        "measured_groups": False,
        "measured_experts": 128,
    }
    old = msgspec.structs.replace(TABLE["pair"], **narrow)
    base = Problem(experts=256, hidden=4096, topk=8)
    for change, words in (
        ({"weight_dtype": "float32"}, "float32 gate weight"),
        ({"score": "sqrtsoftplus"}, "sqrtsoftplus scores"),
        ({"groups": 8, "groups_kept": 4}, "8 expert groups"),
        ({"experts": 127}, "127 experts"),
    ):
        problem = msgspec.structs.replace(base, **change)
        assert reasons(old, problem, 4, H200, named=False) == [f"{words}: not measured on NVIDIA H200"]
        assert reasons(old, problem, 4, H200) == reasons(TABLE["pair"], problem, 4, H200, named=False) == []
