"""The command line where it needs no GPU: list, explain, refused arguments, and how bench reports what it measured."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sglang_router_ext import __version__, doctor, tuned
from sglang_router_ext.backends import BACKENDS
from sglang_router_ext.bench import check, draw, record, report
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.check import Outcome
from sglang_router_ext.bench.clock import Timing
from sglang_router_ext.bench.run import Line
from sglang_router_ext.cli import app, measure
from sglang_router_ext.cli.app import parse_rows
from sglang_router_ext.cli.evidence import explain_rows
from sglang_router_ext.cli.model import from_config
from sglang_router_ext.contract import ContractError, Gpu, Problem, gpu_by_name
from sglang_router_ext.designs import DESIGNS

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 256,
    "hidden_size": 7168,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from sglang_router_ext.cli import app
app(sys.argv[1:])
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def call_json(*arguments: str) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_list_names_every_design_and_backend() -> None:
    shown = call("list").output
    for name in (*(design.name for design in DESIGNS), *BACKENDS):
        assert name in shown
    found = call_json("list")
    assert [design["name"] for design in found["designs"]] == [design.name for design in DESIGNS]
    assert [design["source_hash"] for design in found["designs"]] == [design.source_hash for design in DESIGNS]


def test_explain_gives_ranges_and_reasons() -> None:
    arguments = ("explain", "--model", "glm-5.3-flash", "--gpu", "h200", "--moe-runner-backend", "router_ext_pair")
    first, *rest = call_json(*arguments)["rows"]
    assert (first["rows"], first["choice"]["selection"]) == ({"first": 1, "last": 16}, "pair")
    assert rest[-1]["rows"]["last"] is None
    assert rest[0]["choice"]["losers"]["pair"] == ["17 rows: takes 1-16"]
    shown = call(*arguments).output
    assert "1-16" in shown
    assert "17 rows: takes 1-16" in shown


def test_explain_covers_every_row_count_once() -> None:
    gpu = gpu_by_name("h200")
    problem = Problem(experts=288, hidden=4096, topk=8)
    found = explain_rows(problem, gpu, "router_ext_pair", "auto", None, {})
    for rows in (1, 2, 16, 17, 100, 10**6):
        assert sum(rows in entry.rows for entry in found) == 1
    lost = explain_rows(problem, gpu, "router_ext_pair", "auto", [1], {"pair": "no compiler"})
    assert lost[0].choice.losers["pair"] == ["no compiler"]


def test_explain_at_given_rows_with_a_named_gate_and_a_stock_backend() -> None:
    arguments = (
        "explain",
        "--model",
        "deepseek-v3",
        "--gpu",
        "b300",
        "--moe-runner-backend",
        "triton",
        "--gate",
        "cublas_gemm",
    )
    found = call_json(*arguments, "--rows", "1,17")
    assert [(entry["choice"]["gate"], entry["choice"]["selection"]) for entry in found["rows"]] == [("cublas_gemm", "host")] * 2


def test_explain_reads_a_checkpoint(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    for model in (tmp_path, tmp_path / "config.json"):
        found = call_json("explain", "--model", str(model), "--gpu", "h200")
        assert (found["problem"]["groups"], found["problem"]["groups_kept"]) == (8, 4)


def test_configurations_of_other_kinds() -> None:
    glm = {"model_type": "glm4_moe", "n_routed_experts": 160, "hidden_size": 5120, "num_experts_per_tok": 8, "n_group": 1}
    assert from_config(glm) == Problem(experts=160, hidden=5120, topk=8, weight_dtype="float32")
    old = {**DEEPSEEK, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "scoring_func": "softmax"}
    assert (from_config(old).score, from_config(old).bias) == ("softmax", False)
    assert from_config({"text_config": DEEPSEEK}).experts == 256
    with pytest.raises(ContractError, match=r"^model: got model_type gpt_oss, allowed: a router of the DeepSeek-V3 kind"):
        from_config({"model_type": "gpt_oss", "num_experts": 128, "hidden_size": 2048, "num_experts_per_tok": 8})
    with pytest.raises(ContractError, match=r"^model: n_routed_experts: got None"):
        from_config({"topk_method": "noaux_tc", "hidden_size": 2048, "num_experts_per_tok": 8})


QWEN = {"model_type": "qwen3_moe", "num_experts": 128, "hidden_size": 2048, "num_experts_per_tok": 8, "norm_topk_prob": True}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "hidden_size": 4096, "num_experts_per_tok": 2}
MINIMAX = {**MIXTRAL, "model_type": "minimax_m2", "scoring_func": "sigmoid", "use_routing_bias": True}
V4 = {**DEEPSEEK, "model_type": "deepseek_v4", "scoring_func": "sqrtsoftplus", "n_group": 8, "topk_group": 8}


def test_configurations_with_a_linear_gate() -> None:
    assert from_config(QWEN) == CASES["qwen3-30b-a3b"].problem
    assert from_config({"text_config": {**QWEN, "model_type": "qwen3_vl_moe_text"}}) == from_config(QWEN)
    assert from_config({**QWEN, "num_experts": None, "num_local_experts": 128}) == from_config(QWEN)
    assert from_config(MIXTRAL) == CASES["mixtral-8x7b"].problem
    assert not from_config({**QWEN, "norm_topk_prob": False}).renormalize
    assert not from_config({**QWEN, "model_type": "olmoe"}).renormalize
    assert from_config(MINIMAX) == Problem(experts=8, hidden=4096, topk=2, weight_dtype="float32")
    with pytest.raises(ContractError, match=r"^model: num_experts: got None"):
        from_config({**QWEN, "num_experts": None})


def test_configurations_are_read_as_sglang_reads_them() -> None:
    assert (
        from_config({**QWEN, "norm_topk_prob": None}).renormalize
        is from_config({**QWEN, "norm_topk_prob": 0}).renormalize
        is False
    )
    assert from_config({**QWEN, "torch_dtype": "float16"}).weight_dtype == "float16"
    assert from_config({**DEEPSEEK, "dtype": "float16", "router_fp32": True}).hidden_dtype == "float16"
    vision = {**DEEPSEEK, "model_type": "glm4v_moe_text"}
    assert from_config({"model_type": "glm4v_moe", "text_config": vision}).weight_dtype == "float32"
    hunyuan = {"model_type": "hunyuan_v1_moe", "num_experts": 64, "hidden_size": 4096, "moe_topk": [8, 8]}
    assert from_config(hunyuan).topk == 8
    with pytest.raises(ContractError, match=r"^model: moe_topk: got \[8, 4\], allowed: an integer"):
        from_config({**hunyuan, "moe_topk": [8, 4]})
    with pytest.raises(ContractError, match=r"^model: dtype: got fp8, allowed: bfloat16 | float16"):
        from_config({**QWEN, "dtype": "fp8"})
    assert from_config({**DEEPSEEK, "scoring_func": "softmax"}).score == "sigmoid"  # as biased_grouped_topk has it


LITE = {
    **DEEPSEEK,
    "model_type": "deepseek_v2",
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
}


@pytest.mark.parametrize(
    ("config", "note", "selection"),
    [
        (DEEPSEEK, "", "single"),
        (LITE, "SGLang selects by another function for this model", "host"),
        ({**MINIMAX, "scoring_func": "softmax"}, "SGLang selects by another function for this model", "host"),
        ({**MINIMAX, "use_routing_bias": False}, "SGLang selects by another function for this model", "host"),
        (MINIMAX, "", "single"),
        ({**DEEPSEEK, "model_type": "mimo_v2_flash"}, "mimo_v2_flash is not known to be linked (docs/models.md)", "single"),
        ({**QWEN, "torch_dtype": "float16"}, "", "host"),
        ({**V4, "num_hash_layers": 3}, "in its first 3 layers a table of tokens names the experts", "single"),
        ({**V4, "num_hash_layers": 0}, "", "single"),
    ],
)
def test_explain_says_where_sglangs_own_router_runs(tmp_path: pathlib.Path, config: dict, note: str, selection: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = call_json("explain", "--model", str(tmp_path), "--gpu", "h200", "--rows", "4")
    assert found["note"].startswith(note) and bool(found["note"]) == bool(note)
    assert found["rows"][0]["choice"]["selection"] == selection


def test_deepseek_v4_has_no_groups() -> None:
    problem = from_config(V4)
    assert (problem.score, problem.groups, problem.groups_kept, problem.nan_first) == ("sqrtsoftplus", 1, 1, False)
    assert from_config({**V4, "model_type": "deepseek_v41"}).nan_first


def test_explain_says_which_logits_a_model_that_rounds_has(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    arguments = ("explain", "--model", str(tmp_path), "--gpu", "h200")
    shown = call_json(*arguments, "--rows", "4")
    assert shown["problem"]["logits_dtype"] == "bfloat16"
    assert shown["logits"] == "bf16, as the model's own gate rounds them; SGLANG_ROUTER_EXT_GATE=fp32 keeps fp32"
    (row,) = shown["rows"]
    assert row["choice"]["losers"]["small_rows"] == ["single covers its stage"]
    assert "logits   bf16" in call(*arguments).output
    kept = call_json(*arguments, "--gate", "fp32", "--rows", "4,40", "--moe-runner-backend", "router_ext_single")
    assert kept["problem"]["logits_dtype"] == "float32"
    assert kept["logits"].startswith("fp32, by SGLANG_ROUTER_EXT_GATE=fp32")
    assert [entry["choice"]["selection"] for entry in kept["rows"]] == ["single", "single"]
    assert "logits  " not in call("explain", "--model", "kimi-k2", "--gpu", "h200").output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("explain", "--model", "nothing", "--gpu", "h200"), "error: model: got nothing, allowed: a folder with a config.json"),
        (("explain", "--model", "kimi-k2", "--gpu", "x1"), "error: gpu: got x1, allowed: "),
        (("explain", "--model", "kimi-k2", "--gpu", "h200", "--rows", "0"), "error: rows: got '0'"),
        (("explain", "--model", "kimi-k2", "--gpu", "h200", "--gate", "x"), "error: gate: got x, allowed: auto | host"),
        (
            ("explain", "--model", "kimi-k2", "--gpu", "h200", "--rows", "1-2000"),
            "error: rows: got 2000 row counts, allowed: at most",
        ),
        (("explain", "--model", "a" * 5000, "--gpu", "h200"), f"error: model: got {'a' * 200}: "),
        (
            ("explain", "--model", "kimi-k2", "--gpu", "h200", "--moe-runner-backend", "router_ext_x"),
            "error: moe-runner-backend: got router_ext_x, allowed: router_ext | router_ext_pair",
        ),
        (("check", "--design", "x"), "error: design: got x, allowed: single | tensor_pair | pair | "),
        (("check", "--record", "--case", "kimi-k2"), "error: record: got a check of some cases only"),
        (("bench", "--case", "x"), "error: case: got x, allowed: glm-5.3-flash | "),
        (
            ("explain", "--model", "kimi-k2", "--gpu", "h200", "--moe-runner-backend", "tritonn"),
            "error: moe-runner-backend: got tritonn, allowed: router_ext | router_ext_pair | router_ext_single | auto | ",
        ),
        (("bench", "--rows", "1,,2"), "error: rows: got '1,,2'"),
        (("bench", "--rows", "8-1"), "error: rows: got '8-1'"),
        (("bench", "--rows", "1-99999999999"), "error: rows: got '1-99999999999'"),
        (("bench", "--recorded", "h200", "--plot", "no-such-folder/x.png"), "error: plot: got no-such-folder/x.png"),
        (("bench", "--recorded", "h200", "--plot", "x.txt"), "error: plot: got x.txt, allowed: a .png file"),
        (("bench", "--recorded", "h200", "--plot", "/proc/x.png"), "error: plot: got /proc/x.png"),
        (
            ("bench", "--recorded", "h200", "--timeline", "x.png"),
            "error: timeline: got what is on record, which holds no kernels",
        ),
        (("bench", "--recorded", "h200", "--ratios", "x.txt"), "error: ratios: got x.txt, allowed: a .png file"),
        (("bench", "--recorded", "h200", "--steps", "x.txt"), "error: steps: got x.txt, allowed: a .png file"),
        (("bench", "--timeline", "/proc/x.png"), "error: timeline: got /proc/x.png"),
        (("bench", "--recorded", ""), "error: recorded: got '', allowed: h200"),
        (("bench", "--recorded", "h200", "--rows", ""), "error: rows: got ''"),
        (("explain", "--model", "kimi-k2", "--gpu", ""), "error: gpu: got '', allowed: a100 | "),
        (("explain", "--model", "kimi-k2", "--gpu", "h200", "--gate", ""), "error: gate: got '', allowed: auto | host"),
        (("demo", "--model", "x"), "error: model: got x, allowed: glm | glm-4 | qwen3"),
        (("demo", "--model", "qwen3"), "error: model: got qwen3, no CUDA GPU, allowed: a machine with one, or glm"),
        (("demo", "--layers", "3000000000"), "error: layers: got 3000000000, allowed: 2 to 256"),
        (
            ("demo", "--moe-runner-backend", "triton"),
            "error: moe-runner-backend: got triton, allowed: router_ext | router_ext_pair",
        ),
        (("demo", "--quantization", "int4"), "error: quantization: got int4, allowed: none | fp8 | nvfp4"),
        (("demo", "--quantization", "fp8"), "error: moe-intermediate: got 64, allowed: multiples of 128 in fp8"),
        (
            ("demo", "--quantization", "nvfp4", "--moe-intermediate", "128", "--in-memory"),
            "error: in-memory: got nvfp4 experts, allowed: a checkpoint on disk for these",
        ),
        (("demo", "--moe-intermediate", "17"), "error: moe-intermediate: got 17, allowed: multiples of 16"),
        (("bench", "--recorded", "h200", "--record"), "error: record: got what is on record already"),
        (("bench", "--recorded", "b300"), "error: recorded: got b300, allowed: h200"),
        (
            ("bench", "--recorded", "h200", "--case", "glm-4.5-air-bf16"),
            "error: recorded: got h200, glm-4.5-air-bf16, allowed: deepseek-v3 |",
        ),
        (("bench", "--rows", "\u0663"), "error: rows: got"),
        *(
            (("bench", f"--{option}", ""), f"error: {option}: got '', allowed: a path")
            for option in (*draw.PICTURES, "timeline")
        ),
        *(((command, "--keep", ""), "error: keep: got '', allowed: a path") for command in ("demo", "serve-bench")),
        (("tune", "--output="), "error: output: got '', allowed: a path"),
        (("tune", "--model", ""), "error: model: got '', allowed: a folder with a config.json"),
        (("explain", "--model", "", "--gpu", "h200"), "error: model: got '', allowed: a folder with a config.json"),
        (("bench", "--case", ""), "error: case: got '', allowed: glm-5.3-flash | "),
        (("check", "--design", ""), "error: design: got '', allowed: single | "),
        (("demo", "--model", ""), "error: model: got '', allowed: glm | "),
        (("serve-bench", "--moe-runner-backend", ""), "error: moe-runner-backend: got '', allowed: router_ext"),
        (("demo", "--layers", ""), "error: layers: got '', allowed: an integer"),
        (("demo", "--layers", "two"), "error: layers: got 'two', allowed: an integer"),
        (("explain", "--gpu", "h200"), "error: model: got nothing, allowed: a case of bench, a checkpoint's folder"),
        (("bench", "--case"), "error: case: got no value, allowed: --case VALUE"),
        (("bench", "--cold=1"), "error: cold: got a value, allowed: --cold"),
        (("bench", "--rows", "e", "a", "b (c)"), "error: arguments: got a b (c), allowed: --case | --rows | "),
        (("bench", "--row", "1"), "error: option: got --row, allowed: --case | --rows | "),
        (("bench", "-r"), "error: option: got -r, allowed: --case | --rows | "),
        (("--row",), "error: option: got --row, allowed: --version | --help"),
        (("banch",), "error: command: got banch, allowed: demo | "),
        (("launch", "--way"), "error: way: got no value, allowed: --way VALUE"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments: tuple[str, ...], text: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith(text)
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize("other", ["ratios", "steps", "timeline"])
def test_no_two_pictures_go_into_one_file(tmp_path: pathlib.Path, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", str(tmp_path / "a.png"), "link.png"):
        result = call("bench", "--plot", "a.png", f"--{other}", name)
        text = f"error: {other}: got {name}, which --plot writes, allowed: a file of its own\n"
        assert (result.exit_code, result.output) == (2, text)


def test_an_empty_model_is_not_the_current_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    monkeypatch.chdir(tmp_path)
    assert call("explain", "--model", ".", "--gpu", "h200").exit_code == 0
    assert call("explain", "--model", "", "--gpu", "h200").exit_code == 2


def test_versions_are_told_and_help_is_shown_beside_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    version, *others = call("--version").output.splitlines()
    assert version == f"sglang-router-ext {__version__}"
    assert [line.split()[0] for line in others] == ["sglang", "torch"]
    monkeypatch.setattr(tuned, "versions", lambda: {"sglang-router-ext": "1", "torch": None})
    assert (call("--version").output, call("--version").exit_code) == ("sglang-router-ext 1\n", 0)
    for words in ((), ("bench", "x", "--help")):
        assert "Usage: " in call(*words).output


@pytest.mark.parametrize("there", [True, False])
def test_a_plot_goes_where_a_link_points(tmp_path: pathlib.Path, there: bool) -> None:
    link, target = tmp_path / "link.png", tmp_path / "target.png"
    link.symlink_to(target)
    if there:
        target.write_text("old")
    assert call("bench", "--recorded", "h200", "--rows", "999", "--plot", str(link)).exit_code == 2
    assert link.is_symlink()
    assert target.exists() == there
    assert call("bench", "--recorded", "h200", "--rows", "1", "--plot", str(link)).exit_code == 0
    assert link.is_symlink()
    assert target.read_bytes()[:4] == b"\x89PNG"


def test_a_fifo_is_no_plot(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    assert "error: plot" in call("bench", "--recorded", "h200", "--plot", str(tmp_path / "fifo.png")).output


@pytest.mark.parametrize("option", ["--record", "--in-memory", "--keep=x", "--quantization=fp8"])
def test_options_of_a_served_demo_want_a_gpu(option: str) -> None:
    result = call("demo", option, "--moe-intermediate=128")
    assert result.exit_code == 2
    assert f"error: {option.strip('-').partition('=')[0]}: got no CUDA GPU" in result.output


def test_nothing_of_ours_runs_under_a_stock_backend_and_all_of_it_has_a_reason() -> None:
    shown = call("explain", "--model", "glm-5.3-flash", "--gpu", "h200", "--moe-runner-backend", "triton").output
    assert shown.count("triton is no backend of ours") >= len(DESIGNS) - 1


@pytest.mark.parametrize("field", ["router_fp32", "topk_method", "model_type"])
def test_a_field_that_is_null_is_absent(field: str) -> None:
    without = {name: value for name, value in DEEPSEEK.items() if name != field}
    assert from_config({**DEEPSEEK, field: None}) == from_config(without)


def test_a_case_that_stands_for_a_model_says_what_that_has() -> None:
    assert "8 groups" in call_json("explain", "--model", "deepseek-v3-ungrouped", "--gpu", "h200")["note"]
    assert "8 groups" in call("bench", "--recorded", "h200", "--case", "deepseek-v3-ungrouped").output


def test_a_broken_record_is_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "h200.jsonl").write_text("{\n")
    monkeypatch.setattr(record, "read_all", functools.partial(record.read_all, tmp_path))
    result = call("bench", "--recorded", "h200")
    assert result.exit_code == 2
    assert result.output.startswith("error: h200.jsonl")
    assert len(result.output.strip().splitlines()) == 1


def test_a_check_that_judged_nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Outcome("a case", "a check", "pair", ["too large"], [])
    monkeypatch.setattr(measure, "this_gpu", lambda command: gpu_by_name("h200"))
    monkeypatch.setattr(measure, "_check_one", lambda *arguments: [refused])
    monkeypatch.setattr(check, "build_ahead", lambda *arguments: None)
    result = call("check", "--design", "pair")
    assert result.exit_code == 1
    assert "nothing was judged" in result.output


def test_a_model_that_is_not_linked_is_said_to_be(tmp_path: pathlib.Path) -> None:
    for kind, said in (("kimi_linear", True), ("glm4_moe", False), ("deepseek_v3", False)):
        (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK, "model_type": kind}))
        shown = call("explain", "--model", str(tmp_path), "--gpu", "h200").output
        assert (f"{kind} is not known to be linked" in shown) == said


@pytest.mark.parametrize("config", [[], "text", {"text_config": 5}])
def test_a_configuration_of_the_wrong_form_is_refused(tmp_path: pathlib.Path, config: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = call("explain", "--model", str(tmp_path), "--gpu", "h200")
    assert result.exit_code == 2
    assert result.output.startswith("error: model: ")


def test_recorded_times_of_one_cache_alone() -> None:
    found = call_json("bench", "--recorded", "h200", "--rows", "1", "--warm")["lines"]
    assert {line["cache"] for line in found} == {"warm"}


def test_rows_as_text() -> None:
    assert parse_rows("16, 1,3-5") == [1, 3, 4, 5, 16]
    for text in ("", "0", "a", "-3", "1-", "2-x", "8-1"):
        with pytest.raises(ContractError, match=r"^rows: "):
            parse_rows(text)


@pytest.mark.parametrize(
    "arguments", [("list",), ("explain", "--model", "kimi-k2", "--gpu", "b300"), ("--help",), ("--version",)]
)
def test_no_torch_is_needed(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def line(design: str, median_us: float | None = None, *, rows: int = 1, stages: str = "gate+selection", **more: Any) -> Line:
    timing = None
    if median_us is not None:
        timing = Timing(median_us=median_us, p10_us=median_us, p90_us=median_us, kernels=1, replays=60)
    return Line(case="glm-5.3-flash", rows=rows, cache="cold", design=design, stages=stages, timing=timing, **more)


LINES = [
    line("floor-read", 2.8, stages="floor", ours=False),
    line("sglang-pair", 6.0, ours=False),
    line("naive", 28.0, ours=False),
    line("sglang-pair+align", 1.0, ours=False),
    line("flashinfer-gemm", stages="gate", ours=False, missing="flashinfer.gemm.tinygemm_bf16: ModuleNotFoundError"),
    line("pair", 4.0, ours=True),
    line("cublas_gemm+warp_select", 8.0, ours=True),
    line("triton_select", stages="selection", ours=True, wrong=["ids[0]: expert 3 taken instead of 2"]),
]


def test_a_report_ranks_and_relates() -> None:
    (table,) = report.tables(LINES)
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["rows"] == ["1"]
    assert cells["floor-read"] == ["2.80"]
    assert cells["pair*"] == ["4.00"]
    assert cells["best of ours"] == ["pair 4.00"]
    assert cells["sglang-pair / ours"] == ["1.50x"]  # the aligned pair does more and is not raced
    assert "best peer / ours" not in cells
    (table,) = report.tables([*LINES, line("flashinfer-pair", 5.0, ours=False)])
    assert {str(column.header): list(column.cells) for column in table.columns}["best peer / ours"] == ["1.25x"]
    assert report.headline(LINES) == "glm-5.3-flash rows 1 cold: pair 4.00 us, sglang-pair 6.00 us, floor-read 2.80 us"
    assert report.per_pass(LINES) == ["glm-5.3-flash, rows 1, 42 layers: +0.084 ms saved against sglang-pair (pair)"]


def test_a_narrow_terminal_shows_the_fastest() -> None:
    (table,) = report.tables(LINES, 80)
    assert [str(column.header) for column in table.columns] == [
        *("rows", "floor-read", "sglang-pair", "best of ours", "sglang-pair / ours")
    ]
    assert "--json show all" in str(table.title)


def test_replays_that_are_far_apart_are_shown() -> None:
    assert record.microseconds(4.704, 4.6, 4.8) == "4.70"
    assert record.microseconds(17.247, 12.605, 17.987) == "17.25 (12.6 to 18.0)"


def test_what_is_not_on_record_is_said() -> None:
    result = call(
        "bench", "--recorded", "h200", "--case", "glm-5.3-flash", "--case", "glm-4.5-air-bf16", "--rows", "1,77", "--json"
    )
    assert result.exit_code == 0
    assert "not on record for h200: glm-4.5-air-bf16, 77 rows" in result.stderr


def test_explain_knows_that_the_plugin_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ROUTER_EXT", "0")
    assert "turns the plugin off" in call("explain", "--model", "kimi-k2", "--gpu", "h200").output


@pytest.mark.parametrize("change", [{"n_group": "eight"}, {"n_routed_experts": True}, {"topk_group": 1.5}])
def test_fields_of_a_configuration_are_integers(change: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=f"^model: {next(iter(change))}: got "):
        from_config(DEEPSEEK | change)


def test_a_configuration_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100000)
    result = call("explain", "--model", str(tmp_path), "--gpu", "h200")
    assert (result.exit_code, len(result.output.strip().splitlines())) == (2, 1)


def test_what_has_no_time_is_said() -> None:
    assert report.failures(LINES) == [
        "glm-5.3-flash rows 1 cold: triton_select (selection): ids[0]: expert 3 taken instead of 2"
    ]
    (remark,) = report.remarks(LINES)
    assert remark.startswith("glm-5.3-flash: flashinfer-gemm (gate): no time: flashinfer.gemm.tinygemm_bf16")


PLAN = "gate+selection+plan"
OVER_ROWS = [
    *LINES,
    line("pair", 5.0, rows=16, ours=True),
    line("sglang-pair", 9.0, rows=16, ours=False),
    line("single", 4.9, stages=PLAN, ours=True),
    line("sglang-pair+align", 8.0, stages=PLAN, ours=False),
    line("small_rows", 3.1, rows=16, stages="gate", ours=True),
    line("sglang-topk", 3.9, stages="selection", ours=False),
]


def test_row_counts_below_an_axis_stand_apart_and_where_servers_operate() -> None:
    assert draw._apart([]) == [] and draw._apart([6]) == [6] and draw._apart([1, 2, 4, 6, 96]) == [1, 2, 4, 6, 96]
    many = draw._apart([*range(1, 129), 8191, 8192])
    assert len(many) <= draw.MOST_TICKS + 1 and set(draw.OPERATING_POINTS) <= set(many)


@pytest.mark.parametrize("option", draw.PICTURES)
@pytest.mark.parametrize("lines", [OVER_ROWS, LINES[:2], []], ids=["all", "only theirs", "nothing"])
def test_times_make_a_picture(tmp_path: pathlib.Path, option: str, lines: list[Line]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "picture.png"
    draw.PICTURES[option](lines, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def drawn(monkeypatch: pytest.MonkeyPatch, option: str, lines: list[Line]) -> Any:
    """The panels of a picture."""
    kept: list[Any] = []
    monkeypatch.setattr(draw, "save", lambda figure, file: kept.append(figure))
    draw.PICTURES[option](lines, pathlib.Path("unused.png"))
    return kept[0].axes


def test_operating_points_are_marked_inside_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    (panel,) = drawn(monkeypatch, "plot", OVER_ROWS)
    marks = {text.get_text(): text.get_position()[0] for text in panel.texts}
    assert marks == {"decode, 1 request": 1, "6: speculative verify": 6}
    far = [line("sglang-pair", 50.0, rows=8192, ours=False), line("sglang-pair", 10.0, rows=64, ours=False)]
    (panel,) = drawn(monkeypatch, "plot", far)
    assert [text.get_text() for text in panel.texts] == ["96 requests", "8,192: prefill chunk"]


def test_ratios_are_sglangs_time_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    (panel,) = drawn(monkeypatch, "ratios", OVER_ROWS)
    curves = {curve.get_label(): list(map(float, curve.get_ydata())) for curve in panel.lines}
    assert curves["router: sglang-pair / ours"] == [1.5, 1.8]
    assert curves["router and plan: sglang-pair+align / ours"] == [pytest.approx(8.0 / 4.9)]
    assert panel.get_ylim()[0] < 1.0
    assert "SGLang is faster" in {text.get_text() for text in panel.texts}


def test_steps_have_a_panel_a_group_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    panels = drawn(monkeypatch, "steps", OVER_ROWS)
    assert [panel.get_title().rpartition(": ")[2] for panel in panels] == list(report.GROUPS.values())
    assert [curve.get_label() for curve in panels[3].lines if not curve.get_label().startswith("_")] == ["sglang-topk"]


def test_a_timeline_is_a_picture(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    stock = [("tiny_n_gemm_kernel", 0.0, 3.1), ("_router_triton_kernel", 3.3, 6.2), ("moe_align_small_numel", 6.4, 8.0)]
    ours = [("small_rows_kernel", 0.0, 2.5), ("warp_select_kernel", 1.9, 4.4)]
    lines = [
        line("sglang-pair+align", 8.0, stages=PLAN, ours=False, kernels=stock),
        line("single", 4.9, stages=PLAN, ours=True, kernels=[("single_kernel", 0.0, 4.9)]),
        line("sglang-pair", 6.2, ours=False, kernels=stock[:2]),
        line("pair", 4.4, ours=True, kernels=ours),
        line("pair", 4.4, rows=16, ours=True, kernels=ours),
    ]
    file = tmp_path / "timeline.png"
    draw.timeline(lines, file)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("note", 0), ("problem", 1)])
def test_doctor_fails_on_problems_alone(monkeypatch: pytest.MonkeyPatch, state: str, status: int) -> None:
    finding = doctor.Finding("hooks", "a target", state, "as found")
    monkeypatch.setattr(doctor, "examine", lambda: iter([finding]))
    result = call("doctor", "--json")
    assert result.exit_code == status
    assert '"a target"' in result.output


def test_doctor_hears_what_its_other_process_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = """
import json
line = json.dumps({"section": "hooks", "subject": "x", "state": "ok", "text": "live"})
print("noise of SGLang"); print("SGLANG_ROUTER_EXT_PROBE " + line); raise SystemExit("broken after that")
"""
    real = subprocess.run
    monkeypatch.setattr(doctor.subprocess, "run", lambda command, **more: real([sys.executable, "-c", probe], **more))
    found = list(doctor._plugin())
    assert found == [
        doctor.Finding("hooks", "x", "ok", "live"),
        doctor.Finding("plugin", "probe", "problem", "broken after that"),
    ]


def test_gpu_names() -> None:
    assert gpu_by_name("NVIDIA H200") == Gpu("NVIDIA H200", 90)
