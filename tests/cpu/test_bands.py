"""``explain`` over all backends: every row count once, as the choice has it, with what a record counts of SGLang's kernels; and
as a picture.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_router_ext import launch
from sglang_router_ext.backends import BACKENDS
from sglang_router_ext.bench import draw
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.record import read_all
from sglang_router_ext.choose import choose
from sglang_router_ext.cli import app, bands, bands_picture
from sglang_router_ext.cli.bands import STOCK, Band, Lane
from sglang_router_ext.contract import gpu_by_name
from sglang_router_ext.designs import Rows

GLM = CASES["glm-5.3-flash"].problem
H200 = gpu_by_name("h200")
COUNTS = bands.host_kernels(read_all(), "glm-5.3-flash", H200)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["explain", *arguments])


def lanes(**how: Any) -> dict[tuple[str, str], list[Band]]:
    found = bands.lanes(GLM, H200, how.pop("gate", "auto"), {}, how.pop("counts", {}), **how)
    return {(lane.backend, lane.stage): lane.bands for lane in found}


@pytest.mark.parametrize("how", [{}, {"plan": False}, {"deterministic": True}, {"gate": "small_rows"}, {"counts": COUNTS}])
def test_a_lane_has_every_row_count_once_and_says_what_is_chosen(how: dict[str, Any]) -> None:
    gate = how.get("gate", "auto")
    asked = {name: value for name, value in how.items() if name not in ("gate", "counts")}
    for (backend, stage), found in lanes(**dict(how)).items():
        assert found[0].rows.first == 1 and found[-1].rows.last is None
        for one, following in itertools.pairwise(found):
            assert following.rows.first == (one.rows.last or 0) + 1
        for band in found if stage != "plan" else []:
            for rows in (band.rows.first, band.rows.last or band.rows.first + 1):
                choice = choose(GLM, rows, H200, backend=None if backend == STOCK else backend, gate=gate, **asked)
                assert band.design == (choice.gate if stage == "gate" else choice.selection)


def test_every_backend_has_its_stages_and_the_plan_only_where_experts_take_one() -> None:
    assert list(lanes()) == list(itertools.product((STOCK, *BACKENDS), ("gate", "selection", "plan")))
    assert {stage for _, stage in lanes(plan=False)} == {"gate", "selection"}
    assert [str(band) for band in lanes()["router_ext_pair", "plan"]] == ["1+: host"]
    assert [band.design for band in lanes()["router_ext", "plan"]] == ["single", "tensor_pair", "select_plan", "host"]


def test_a_stage_has_what_is_known_of_its_own_design() -> None:
    found = lanes()
    assert [band.known for band in found["router_ext_single", "gate"]] == ["on record", "on record", "on trial"]
    assert str(found["router_ext_single", "plan"][-1]) == "8193+: select_plan, named (not measured)"
    assert {band.known for band in lanes(gate="small_rows")[STOCK, "gate"] if band.design == "small_rows"} == {
        "named (not fastest on record)",
        "on record",
    }


def test_sglangs_own_is_cut_where_a_record_counts_other_kernels() -> None:
    host = Band(Rows(5), "host", "-")
    found = bands._counted(host, {1: 1, 8: 1, 16: 2, 32: 2, 64: 1})
    assert [str(band) for band in found] == [
        "5-8: host, 1 kernel",
        "9-32: host, 2 kernels",
        "33-64: host, 1 kernel",
        "65+: host",
    ]
    inside = bands._counted(Band(Rows(5, 20), "host", "-"), {8: 1, 16: 2, 32: 3})
    assert [str(band) for band in inside] == ["5-8: host, 1 kernel", "9-16: host, 2 kernels", "17-20: host, 3 kernels"]
    ours = Band(Rows(1, 20), "single", "on record")
    assert bands._counted(ours, {8: 1}) == [ours] and bands._counted(host, {}) == [host]


def test_kernels_are_counted_by_records_of_the_same_case_and_gpu() -> None:
    assert COUNTS["gate"][16] == 1 and COUNTS["gate"][17] == 2  # SGLang's GEMM for few rows ends at 16
    assert {COUNTS["plan"][8], COUNTS["plan"][96]} == {1, 2}
    assert not any(bands.host_kernels(read_all(), "glm-5.3-flash", gpu_by_name("b300")).values())
    assert all(
        band.kernels is None for (backend, _), found in lanes(counts=COUNTS).items() for band in found if backend != STOCK
    )


# ------------------------------------------------------------------------------------------------ the command


def test_all_backends_stand_beside_one_another() -> None:
    output = call("--model", "glm-5.3-flash", "--gpu", "h200", "--backends").output
    for text in ("stock", *BACKENDS, "1-16: host, 1 kernel", "129-1024: tensor_pair, on record"):
        assert text in output
    assert "why others do not" not in output
    found = json.loads(call("--model", "glm-5.3-flash", "--gpu", "h200", "--backends", "--json").output)["lanes"]
    assert [(lane["backend"], lane["stage"]) for lane in found] == list(lanes())


def test_a_deterministic_server_is_not_given_the_kernels_of_another() -> None:
    output = call("--model", "glm-5.3-flash", "--gpu", "h200", "--backends", "--deterministic").output
    assert "kernel," not in output and "1 kernel" not in output


def test_the_rows_of_requests_are_their_tokens_to_verify() -> None:
    words = ("--model", "glm-5.3-flash", "--gpu", "h200", "--requests", "1,30", "--draft-tokens", "6")
    found = json.loads(call(*words, "--json").output)["traffic"]
    assert [(one["requests"], one["rows"], one["found"]["choice"]["gate"]) for one in found] == [
        (1, 6, "single"),
        (30, 180, "tensor_pair"),
    ]
    assert "6 tokens of each to verify" in call(*words).output
    assert "traffic" not in json.loads(call(*words[:4], "--json").output)


def test_a_preset_says_what_is_asked() -> None:
    found = json.loads(call("--preset", "glm-5.3-flash-nvfp4-b300-low-latency", "--json").output)
    assert (found["gpu"]["name"], found["backend"], found["gate"]) == ("NVIDIA B300", "flashinfer_trtllm", "small_rows")
    assert [one["rows"] for one in found["traffic"]] == [6, 36, 96, 576]
    assert [one["found"]["choice"]["gate"] for one in found["traffic"]] == ["small_rows", "host", "host", "host"]
    words = ("--preset", "qwen3-30b-a3b-h200-deterministic", "--moe-runner-backend", "router_ext_pair", "--json")
    found = json.loads(call(*words).output)
    assert (found["deterministic"], found["backend"], found["traffic"][0]["rows"]) == (True, "router_ext_pair", 1)


@pytest.mark.parametrize("name", [name for name in launch.names() if launch.read(name).case])
def test_every_preset_with_a_case_can_be_explained(name: str) -> None:
    assert call("--preset", name).exit_code == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--preset", "x"), "error: preset: got x, allowed: deepseek-v3-h200 |"),
        (
            ("--preset", "glm-5.2-h200-low-latency"),
            "error: model: got nothing, and a preset without a case, allowed: a case of",
        ),
        (("--model", "kimi-k2", "--gpu", "h200", "--requests", "0"), "error: requests: got '0'"),
        (
            ("--model", "kimi-k2", "--gpu", "h200", "--requests", "1-2000"),
            "error: requests: got 2000 numbers, allowed: at most",
        ),
        (
            ("--model", "kimi-k2", "--gpu", "h200", "--plot", "picture.txt"),
            "error: plot: got picture.txt, allowed: a .png file",
        ),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(words: tuple[str, ...], text: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert text in result.output


# ------------------------------------------------------------------------------------------------ the picture


def drawn(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    kept: list[Any] = []
    monkeypatch.setattr(draw, "save", lambda figure, file: kept.append(figure))
    assert call(*words, "--plot", "unused.png").exit_code == 0
    (panel,) = kept[0].axes
    return panel


def test_the_picture_has_a_bar_a_band_and_marks_the_rows_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = drawn(monkeypatch, "--preset", "glm-5.3-flash-h200-low-latency")
    assert len(panel.patches) == sum(len(found) for found in lanes(counts=COUNTS).values())
    texts = {text.get_text().strip() for text in panel.texts}
    assert {STOCK, *BACKENDS, "single: on record", "SGLang's: 2 kernels", "1 x 6 = 6", "96 x 6 = 576"} <= texts
    assert set(draw.OPERATING_POINTS.values()) <= texts
    marks = [mark.get_xdata()[0] for mark in panel.lines if mark.get_marker() == "v"]
    assert marks == [6, 36, 96, 576]
    stages = [tick.get_text() for tick in panel.get_yticklabels()]
    assert stages == ["gate", "selection", "plan"] * 4 + ["traffic"]


def test_bars_show_what_they_rest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = drawn(monkeypatch, "--model", "glm-5.3-flash", "--gpu", "h200", "--no-plan")
    (legend,) = (text for text in [[text.get_text() for text in panel.get_legend().get_texts()]] if text)
    assert {"single", "cublas_gemm", "on record", "on trial", "asked for, not the fastest", "not measured"} <= set(legend)
    assert {bar.get_hatch() for bar in panel.patches} == {None, "//", "xx", ".."}


@pytest.mark.parametrize(
    ("known", "name"),
    [
        ("on record", "on record"),
        ("tuned here", "tuned here"),
        ("on trial", "on trial"),
        ("not measured", "not measured"),
        ("named (not fastest on record)", "asked for, not the fastest"),
        ("deterministic (not fastest here)", "asked for, not the fastest"),
        ("named (not measured)", "not measured"),
        ("-", ""),
    ],
)
def test_everything_that_is_known_of_a_bar_has_a_look(known: str, name: str) -> None:
    assert bands_picture.look(known) == name
    assert name in ("", *bands_picture.LOOKS)


def test_colours_of_designs_are_apart_and_no_greys() -> None:
    pytest.importorskip("matplotlib")
    found = [
        bands_picture.colour(name) for name in ("single", "tensor_pair", "pair", "select_plan", "tensor_core", "warp_select")
    ]
    assert len(set(found)) == len(found)
    assert all(max(colour[:3]) - min(colour[:3]) > 0.1 for colour in found)


def test_a_text_without_room_is_left_out_and_so_is_one_that_meets_the_next_point(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bands_picture.fits("single: on record", Band(Rows(1, 128), "single", "on record"))
    assert not bands_picture.fits("single", Band(Rows(100, 104), "single", "on record"))
    panel = drawn(monkeypatch, "--model", "kimi-k2", "--gpu", "h200", "--requests", "16,17,96,16385")
    texts = [text.get_text().strip() for text in panel.texts]
    assert "17" in texts and "16" not in texts
    assert [mark.get_xdata()[0] for mark in panel.lines if mark.get_marker() == "v"] == [16, 17, 96]


def test_bands_make_a_picture(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "picture.png"
    bands_picture.plot([Lane(STOCK, "gate", [Band(Rows(1), "host", "-")])], [], 1, "nothing of ours", file)
    assert file.read_bytes().startswith(b"\x89PNG")
