"""``tune``, with a GPU and times that are made up; and what ``explain`` and ``list`` say of the table that it writes."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
from made_up_gpu import H200, KIMI, Gpus, call, call_json

from sglang_router_ext import tuned
from sglang_router_ext.bench import machine
from sglang_router_ext.bench.clock import ClockError
from sglang_router_ext.bench.run import Line
from sglang_router_ext.cli import tune as command
from sglang_router_ext.designs import TABLE

ROWS = ("--rows", "1,8,16,64,512")


def test_tune_measures_writes_and_shows(gpus: Gpus) -> None:
    result = call("tune", *ROWS)
    assert result.exit_code == 0, result.output
    path = tuned.default_path(H200.name)
    assert f"written to {path}" in result.stdout and "servers that start from now on use it" in result.stdout
    assert "tune 5 of 5" in result.stderr
    assert [one["rows"] for one in gpus.calls] == [1, 8, 16, 64, 512]
    assert all((one["case"], one["caches"]) == ("glm-5.3-flash", ("cold",)) for one in gpus.calls)
    ((shape,), digest) = tuned.read(path)[0].shapes, tuned.read(path)[1]
    bands = {name: (list(map(str, one.bands)), list(map(str, one.bands_without_plan))) for name, one in shape.designs.items()}
    assert bands == {"single": (["1-16"], []), "pair": (["1-16"], ["1-16"]), "warp_select": (["65-512"], ["65-512"])}
    shown = call("tune", "--show").output
    for text in (digest, "of today", "1.50x", "~4.00", "host+warp_select", "65-512"):
        assert text in shown, text
    assert call_json("tune", "--show")[0]["digest"] == digest


def test_models_and_cases_are_tuned_into_one_table(gpus: Gpus, tmp_path: pathlib.Path) -> None:
    (tmp_path / "kimi").mkdir()
    (tmp_path / "kimi" / "config.json").write_text(json.dumps(KIMI))
    told = call_json("tune", "--model", str(tmp_path / "kimi"), "--case", "glm-4.6", "--case", "kimi-k2", "--rows", "1")
    assert [one["name"] for one in told["table"]["shapes"]] == ["glm-4.6", "kimi"]  # kimi-k2 has the shape of the checkpoint
    assert len(gpus.calls) == 2
    told = call_json("tune", "--rows", "1")
    assert [one["name"] for one in told["table"]["shapes"]] == ["glm-4.6", "kimi", "glm-5.3-flash"]


def test_a_table_elsewhere_is_used_where_it_is_named(
    gpus: Gpus, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "t.json"
    said = call("tune", "--rows", "1", "--output", str(path)).stdout
    assert f"servers use it where SGLANG_ROUTER_EXT_TABLE={path}, which here is auto" in said
    assert tuned.find(H200) is None
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", str(path))
    assert "servers that start from now on use it" in call("tune", "--rows", "1").stdout
    assert f"SGLANG_ROUTER_EXT_TABLE={path}" in call("tune", "--show").output


def test_what_is_left_out_of_an_older_table_is_said(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    call("tune", "--case", "kimi-k2", "--rows", "1")
    monkeypatch.setattr(tuned, "versions", lambda: {"sglang": "9", "torch": "9"})
    said = call("tune", "--rows", "1")
    assert said.exit_code == 0 and "kimi-k2: left out, measured with other sources or versions" in said.stdout


def test_a_shape_that_is_measured_again_is_replaced_and_said(gpus: Gpus, tmp_path: pathlib.Path) -> None:
    assert "replaced" not in call("tune", "--rows", "1,8,64").stdout
    (old,) = tuned.read(tuned.default_path(H200.name))[0].shapes
    said = call("tune", "--rows", "6-16").stdout
    assert f"glm-5.3-flash: rows 1-64 of {old.time} replaced by 6-16\n" in said
    (shape,) = tuned.read(tuned.default_path(H200.name))[0].shapes
    assert (shape.rows, str(shape.span), list(map(str, shape.designs["pair"].bands))) == (tuple(range(6, 17)), "6-16", ["6-16"])
    (tmp_path / "kimi").mkdir()
    (tmp_path / "kimi" / "config.json").write_text(json.dumps(KIMI))
    call("tune", "--case", "kimi-k2", "--rows", "1")
    assert re.search(
        r"kimi-k2: rows 1 of \S+ replaced by 2 of kimi\n", call("tune", "--model", str(tmp_path / "kimi"), "--rows", "2").stdout
    )


def test_a_wrong_result_writes_nothing(gpus: Gpus) -> None:
    gpus.spoil = lambda lines: [
        Line(case=one.case, rows=one.rows, cache="cold", design=one.design, stages=one.stages, ours=True, wrong=["ids[0]: 3"])
        if one.design == "pair"
        else one
        for one in lines
    ]
    result = call("tune", "--rows", "1")
    assert result.exit_code == 1 and "nothing is written" in result.stderr and "ids[0]: 3" in result.stderr
    assert tuned.find(H200) is None


def test_a_row_count_that_cannot_be_timed_is_sglangs(gpus: Gpus) -> None:
    def lose(lines: list[Line]) -> list[Line]:
        if lines[0].rows == 8:
            raise ClockError("no activity")
        return lines

    gpus.spoil = lose
    result = call("tune", "--rows", "1,8,16")
    assert result.exit_code == 0 and "glm-5.3-flash rows 8: not timed, so it stays SGLang's" in result.stderr
    (shape,) = tuned.read(tuned.default_path(H200.name))[0].shapes
    assert list(map(str, shape.designs["pair"].bands_without_plan)) == ["1", "9-16"]


def test_a_slow_machine_gets_fewer_replays(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10**6, 40))
    monkeypatch.setattr(command.time, "monotonic", lambda: float(next(now)))
    pace = command.Pace(10)
    found = []
    for _ in range(4):
        found.append(pace.replays)
        pace.step()
    assert found == [60, 30, 20, 20]
    monkeypatch.setattr(command.time, "monotonic", lambda: 0.0)
    pace = command.Pace(1000)
    pace.step()
    assert pace.replays == 60


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--show", "--remove"), "error: show: got --show and --remove"),
        (("--show", "--rows", "1"), "error: rows: got 1, allowed: none with --show"),
        (("--remove", "--case", "kimi-k2"), "error: case: got ['kimi-k2'], allowed: none with --show"),
        (("--remove", "--rows", ""), "error: rows: got '', allowed: none with --show"),
        (("--remove", "--model", "x"), "error: model: got ['x'], allowed: none with --show"),
        (("--remove", "--json"), "error: json: got --json, allowed: none with --remove"),
        (
            ("--remove", "--gpu", "h200", "--output", "x"),
            "error: gpu: got h200, allowed: none with --remove where a file is named",
        ),
        (("--show", "--output", "x"), "error: output: got x, allowed: none with --show"),
        (("--gpu", "h200"), "error: gpu: got h200, allowed: the one of this machine"),
        (("--case", "x"), "error: case: got x, allowed: glm-5.3-flash | "),
        (("--model", "x"), "error: model: got x, allowed: a folder"),
        (("--rows", "0"), "error: rows: got '0'"),
        (("--show", "--gpu", "x1"), "error: gpu: got x1, allowed: "),
        ((), "error: tune: got no CUDA GPU here, allowed: a machine with one"),
        (("--remove",), "error: remove: got no CUDA GPU here, allowed: --gpu NAME, or --output FILE"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda index=None: None)
    result = call("tune", *arguments)
    assert (result.exit_code, result.output[: len(text)]) == (2, text)


def test_show_needs_no_gpu(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    call("tune", "--rows", "1")
    monkeypatch.setattr(machine, "gpu", lambda index=None: None)
    assert "tuned table of NVIDIA H200 is in force" in call("tune", "--show").output
    assert "tuned table of NVIDIA H200 is in force" in call("tune", "--show", "--gpu", "h200").output
    assert "no tuned table for NVIDIA B300" in call("tune", "--show", "--gpu", "b300").output
    assert f"removed {tuned.default_path(H200.name)}" in call("tune", "--remove", "--gpu", "h200").output
    assert "no tuned table for any GPU" in call("tune", "--show").output
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", "off")
    assert call("tune", "--show").output.startswith("SGLANG_ROUTER_EXT_TABLE=off: no tuned table")


def test_the_default_rows_hold_what_a_server_runs() -> None:
    assert list(command.DEFAULT_ROWS) == sorted(set(command.DEFAULT_ROWS))
    edges = {one.rows.last for one in TABLE.values() if one.rows.last} & set(range(1, 129))
    assert edges <= set(command.DEFAULT_ROWS)


# --- what explain and list say


def ranges(found: Any) -> list[tuple[Any, ...]]:
    shown = ((one["rows"], one["choice"], one["measured"]) for one in found["rows"])
    return [(rows["first"], rows.get("last"), choice["gate"], choice["selection"], text) for rows, choice, text in shown]


def test_explain_shows_bands_and_what_measured_them(gpus: Gpus) -> None:
    asked = ("explain", "--model", "glm-5.3-flash", "--gpu")
    assert {one[-1] for one in ranges(call_json(*asked, "b300"))} == {"not measured"}
    before = ranges(call_json(*asked, "h200"))
    assert (before[0][-1], before[-1][-1]) == ("on record", "not measured")
    assert [first for first, *_ in before[1:]] == [last + 1 for _, last, *_ in before[:-1]]
    call("tune", *ROWS)
    found = call_json(*asked, "h200")
    assert ranges(found) == [
        (1, 16, "single", "single", "tuned here"),
        (17, 64, "host", "host", "tuned here"),
        (65, 512, "host", "warp_select", "tuned here"),
        *((max(first, 513), *more) for first, *more in before if more[0] is None or more[0] > 512),  # as without a table
    ]
    assert (found["table"]["in_force"], found["table"]["has_this_shape"]) == (True, True)
    assert ranges(call_json(*asked, "h200", "--no-plan"))[0][2] == "pair"
    shown = call(*asked, "h200").output
    assert "bands    tuned table of NVIDIA H200 is in force" in shown and "tuned here" in shown
    assert "; it has this shape at 1-512 rows: the package's records stand for others" in shown
    call("tune", "--rows", "6-16")
    found = ranges(call_json(*asked, "h200"))
    outside = [one for one in found if one[-1] != "tuned here"]
    assert [one for one in found if one not in outside] == [(6, 16, "single", "single", "tuned here")]
    assert [one for one in outside if one[0] > 96] == [one for one in before if one[0] > 96] and outside[0][0] == 1
    other = call("explain", "--model", "kimi-k2", "--gpu", "h200").output
    assert "this shape is not in it: the package's records stand for it" in other and "on record" in other
    assert call_json(*asked, "b300")["table"] is None


def test_explain_says_that_a_table_is_stale(gpus: Gpus) -> None:
    call("tune", *ROWS)
    path = tuned.default_path(H200.name)
    path.write_text(path.read_text().replace(TABLE["pair"].source_hash, "0" * 16))
    shown = call("explain", "--model", "glm-5.3-flash", "--gpu", "h200").output
    assert "tuned table of NVIDIA H200 is stale: design pair changed; run sglang-router-ext tune" in shown
    assert "tuned here" not in shown
    assert "is stale" in call("list").output and call_json("list")["tables"][0]["in_force"] is False


def test_explain_names_what_is_on_trial() -> None:
    found = call_json("explain", "--model", "glm-5.3-flash", "--gpu", "h200", "--moe-runner-backend", "router_ext_pair")
    for one in ranges(found):
        trial = [stage for stage, name in (("gate", one[2]), ("selection", one[3])) if TABLE[name].status == "trial"]
        assert all(f"{stage} on trial" in one[-1] for stage in trial) and bool(trial) == ("on trial" in one[-1])
    stock = call_json("explain", "--model", "glm-5.3-flash", "--gpu", "h200", "--moe-runner-backend", "triton")
    assert {one[-1] for one in ranges(stock)} == {"-"}


def test_list_says_that_a_table_is_in_force(gpus: Gpus) -> None:
    assert "tuned table" not in call("list").output and call_json("list")["tables"] == []
    call("tune", "--rows", "1")
    assert "tuned table of NVIDIA H200 is in force: 1 shape, " in call("list").output
    (told,) = call_json("list")["tables"]
    assert (told["gpu"], told["in_force"], told["named"]) == ("NVIDIA H200", True, False)
