"""What ``explain`` says of a choice: what it rests on at each row count, and what deterministic inference leaves."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from sglang_router_ext.backends import GATES
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.choose import HASH_LAYER, NO_HASH_LAYER, Tuned, choose
from sglang_router_ext.cli import app
from sglang_router_ext.cli.evidence import Explanation, explain_rows
from sglang_router_ext.contract import Problem, gpu_by_name
from sglang_router_ext.designs import TABLE, Rows

GLM = CASES["glm-5.3-flash"].problem
QWEN = CASES["qwen3-30b-a3b"].problem
H200 = gpu_by_name("h200")


def explained(rows: int, problem: Problem = GLM, backend: str | None = "router_ext", gate: str = "auto", **more: Any) -> str:
    found = explain_rows(problem, H200, backend, gate, [rows], more.pop("unavailable", {}), **more)
    return f"{found[0].choice}: {found[0].measured}"


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["explain", "--model", "glm-5.3-flash", "--gpu", "h200", *arguments])


@pytest.mark.parametrize(
    ("rows", "backend", "plan", "text"),
    [
        (96, "router_ext_single", True, "single: on record"),
        (97, "router_ext_single", False, "single: named (not fastest on record)"),
        (4, "router_ext_single", False, "single: named (not fastest on record)"),
        (32, "router_ext_single", False, "single: on record"),
        (16, "router_ext_pair", True, "pair: on record"),
        (9000, "router_ext_pair", True, "cublas_gemm + warp_select: gate on trial, selection named (not measured)"),
        (200, "router_ext_single", True, "tensor_pair: on record"),
        (200, "router_ext_pair", True, "cublas_gemm + warp_select: gate on trial, selection on record"),
        (2000, "router_ext", True, "host + select_plan: on record"),
    ],
)
def test_a_design_without_a_band_is_not_on_record(rows: int, backend: str, plan: bool, text: str) -> None:
    assert explained(rows, backend=backend, plan=plan) == text


def test_bands_that_were_tuned_are_said_to_be_where_they_are() -> None:
    bands = Tuned(bands=(("pair", (Rows(1, 8),)),), bands_without_plan=(), rows=Rows(1, 64))
    assert explained(8, bands=bands) == "pair: tuned here"
    assert explained(9, bands=bands) == "host: tuned here"  # a race that SGLang's path has won
    assert explained(65, bands=bands) == "single: on record"  # where it has no say, the package's bands have
    assert explained(16, backend="router_ext_pair", bands=bands) == "pair: named (not fastest here)"
    assert explained(65, backend="router_ext_single", plan=False, bands=bands) == "single: on record"


def test_a_named_gate_has_what_is_known_of_it_under_any_backend() -> None:
    texts = [explained(rows, backend=None, gate="small_rows") for rows in (5, 6, 17)]
    assert texts == ["small_rows + host: named (not fastest on record)", "small_rows + host: on record", "host: -"]
    assert explained(4, backend=None, gate="naive") == "naive + host: on trial"


def test_sglangs_path_is_on_record_only_where_a_race_put_it_there() -> None:
    assert explained(4, QWEN, "router_ext_pair", gate="host") == "host: -"  # because its rounding is kept, whatever is fastest
    lost = dict.fromkeys((name for name in TABLE if name != "host"), "cannot be built")
    assert explained(4, unavailable=lost) == "host: -"
    assert explained(9000) == "host: not measured"
    grouped = msgspec.structs.replace(GLM, groups=8, groups_kept=4)  # of 36, which SGLang selects from
    assert explained(1, grouped) == "host: on record"
    assert explained(6, grouped) == "small_rows + host: on record"


def test_nothing_is_measured_beyond_the_most_rows_on_record() -> None:
    assert explained(8192, backend="router_ext_single") == "cublas_gemm + select_plan: gate on trial, selection on record"
    assert explained(8193, backend="router_ext_single").endswith("gate on trial, selection named (not measured)")


@pytest.mark.parametrize("backend", ["router_ext", "router_ext_pair", "router_ext_single"])
@pytest.mark.parametrize("problem", [GLM, QWEN, CASES["glm-4.6"].problem], ids=str)
def test_whatever_is_on_record_has_a_band_there(problem: Problem, backend: str) -> None:
    for plan in (True, False):
        found = explain_rows(problem, H200, backend, "auto", None, {}, plan=plan)
        for entry in (one for one in found if one.measured == "on record"):
            for name in {entry.choice.gate, entry.choice.selection} - {"host"}:
                design = TABLE[name]
                bands = (design.bands_without_plan if design.plans and not plan else design.bands)[H200.name]
                assert any(entry.rows.first in band and entry.rows.last in band for band in bands), entry


def test_hash_layers_and_others_are_told_apart_at_every_row_count() -> None:
    for rows in (4, 97, 9000):
        assert choose(GLM, rows, H200, backend="router_ext").losers["hash_rows"] == [NO_HASH_LAYER]
        losers = choose(CASES["deepseek-v4-hash"].problem, rows, H200, backend="router_ext_single").losers
        assert {losers[name][0] for name in ("single", "pair", "warp_select", "select_plan")} == {HASH_LAYER}
        assert {len(losers[name]) for name in ("single", "pair", "warp_select", "select_plan")} == {1}
    assert f"hash_rows     │ 1-128, 129-1024, 1025-8192, 8193+ │ {NO_HASH_LAYER}" in call().output


def test_deterministic_inference_is_explained() -> None:
    found = json.loads(call("--deterministic", "--json").output)
    assert found["deterministic"] and found["stops"] == ""
    rows = [msgspec.convert(one, Explanation) for one in found["rows"]]
    assert [str(one.rows) for one in rows] == ["1-128", "129-1024", "1025-8192", "8193+"]
    for one in rows:
        assert one.choice == choose(GLM, one.rows.first, H200, backend="router_ext", deterministic=True)
    assert "deterministic inference" in call("--deterministic").output
    assert "deterministic" not in call().output
    without = {"unavailable": dict.fromkeys(("select_plan", "tensor_pair", "tensor_core"), "x")}
    assert explained(9000, deterministic=True, **without) == "host + warp_select: deterministic (not measured)"


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_that_deterministic_inference_rules_out_is_said_in_words(gate: str) -> None:
    ruled_out = gate in ("small_rows", "cublas_gemm", "split_gemm", "naive")
    assert ("a server does not start" in call("--deterministic", "--gate", gate).output) == ruled_out
    assert "a server does not start" not in call("--gate", gate).output
