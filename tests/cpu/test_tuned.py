"""Tuned tables: their bands in the choice, the file and what makes it unfit, and what a server and ``doctor`` say of one."""

from __future__ import annotations

import inspect
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from sglang_router_ext import choose as choosing
from sglang_router_ext import doctor, settings, tuned
from sglang_router_ext.bench import machine
from sglang_router_ext.bench.races import Time
from sglang_router_ext.choose import Tuned, choose, reasons
from sglang_router_ext.contract import ContractError, Gpu, Problem, gpu_by_name
from sglang_router_ext.designs import DESIGNS, TABLE, Rows
from sglang_router_ext.plugin import preflight
from sglang_router_ext.plugin.layer import Kernels
from sglang_router_ext.plugin.preflight import Demand
from sglang_router_ext.route import Route

GLM = Problem(experts=288, hidden=4096, topk=8)
H200, B300 = gpu_by_name("h200"), gpu_by_name("b300")
BACKEND = Demand(("router_ext",))
THEIRS = (("sglang-gemm", "gate", 3.0), ("sglang-topk", "selection", 4.0), ("sglang-pair", "gate+selection", 6.0))
OVERLAY = Tuned(bands=(("pair", (Rows(1, 4),)),), bands_without_plan=(("single", (Rows(1, 2), Rows(9, 16))),), rows=Rows(1, 16))


def shape(problem: Problem = GLM, *, winner: str = "pair", name: str = "glm") -> tuned.Shape:
    times = [Time(rows, *one, False) for rows in (1, 8) for one in THEIRS]
    return tuned.measured(name, problem, [*times, Time(8, winner, "gate+selection", 5.0, True)], [1, 8])


def table(*shapes: tuned.Shape, gpu: Gpu = H200) -> tuned.Table:
    return tuned.merged(None, gpu, shapes or (shape(),))


def fields(**changes: Any) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(table()), **changes})


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty configuration, in which tables are looked for, and nothing read before."""

    def forget() -> None:
        preflight.tuned_table.cache_clear()
        preflight.tuned_bands.cache_clear()
        preflight._check_here.cache_clear()

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SGLANG_ROUTER_EXT_TABLE")
    monkeypatch.setattr(preflight, "detect_gpu", lambda index=None: H200)
    monkeypatch.setattr(preflight, "unavailable", dict)
    monkeypatch.setattr(machine, "gpu", lambda index=None: H200)
    forget()
    yield tmp_path
    forget()


def put(data: bytes | tuned.Table, path: pathlib.Path | None = None) -> pathlib.Path:
    path = tuned.default_path(H200.name) if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        tuned.write(data, path)
    return path


# --- in the choice


@pytest.mark.parametrize(
    ("rows", "plan", "expected"),
    [(4, True, "pair"), (5, True, "host"), (4, False, "host"), (2, False, "single"), (9, False, "single"), (16, True, "host")],
)
def test_tuned_bands_stand_in_place_of_the_tables(rows: int, plan: bool, expected: str) -> None:
    choice = choose(GLM, rows, H200, backend="router_ext", plan=plan, tuned=OVERLAY)
    assert (choice.gate, choice.selection) == (expected, expected)
    assert choice.losers.keys() == TABLE.keys() - {"host", expected}


@pytest.mark.parametrize("plan", [True, False])
def test_outside_of_what_was_measured_the_tables_bands_decide(plan: bool) -> None:
    few = Tuned(bands=(("pair", (Rows(6, 16),)),), bands_without_plan=(("pair", (Rows(6, 16),)),), rows=Rows(6, 16))
    asked: dict[str, Any] = {"backend": "router_ext", "plan": plan}
    for rows in (1, 5, 17, 64, 4096):
        choice = choose(GLM, rows, H200, **asked, tuned=few)
        assert choice == choose(GLM, rows, H200, **asked) and choice.selection != "host"
        assert not any("tuned" in text for texts in choice.losers.values() for text in texts)
    for rows in (6, 16):
        assert choose(GLM, rows, H200, **asked, tuned=few).fused == "pair"
    assert choose(GLM, 17, B300, **asked, tuned=few).selection == "host"  # for which the package has none


def test_tuned_bands_need_no_record_of_the_gpu() -> None:
    assert choose(GLM, 4, B300, backend="router_ext").selection == "host"
    assert choose(GLM, 4, B300, backend="router_ext", tuned=OVERLAY).selection == "pair"
    softmax = Problem(experts=128, hidden=2048, topk=8, score="softmax", bias=False, logits_dtype="bfloat16")
    selection = Tuned(
        bands=(("warp_select", (Rows(1, 8),)), ("small_rows", (Rows(1, 8),))), bands_without_plan=(), rows=Rows(1, 8)
    )
    choice = choose(softmax, 4, H200, backend="router_ext", tuned=selection)
    assert (choice.gate, choice.selection) == ("small_rows", "warp_select")


def test_the_reason_says_where_a_design_was_tuned_to_be_fastest() -> None:
    asked: dict[str, Any] = {"named": False, "tuned": OVERLAY}
    assert reasons(TABLE["pair"], GLM, 8, H200, **asked) == ["8 rows: tuned here and fastest at 1-4"]
    assert reasons(TABLE["single"], GLM, 4, H200, **asked) == ["4 rows: tuned here and fastest at none"]
    text = "4 rows: tuned here and fastest at 1-2, 9-16 without a plan"
    assert reasons(TABLE["single"], GLM, 4, H200, **asked, plan=False) == [text]
    assert reasons(TABLE["pair"], GLM, 8, H200, tuned=OVERLAY) == []  # whoever names it gets it


def test_what_is_on_trial_or_cannot_run_is_not_chosen_whatever_a_table_says() -> None:
    trial = next(design for design in DESIGNS if design.status == "trial")
    bands = Tuned(bands=((trial.name, (Rows(1, 64),)), ("pair", (Rows(1, 64),))), bands_without_plan=(), rows=Rows(1, 64))
    assert "on trial: runs only where it is named" in reasons(trial, GLM, 4, H200, named=False, tuned=bands)
    assert choose(GLM, 32, H200, backend="router_ext", tuned=bands).selection == "host"  # `pair` ends at 16


def test_the_order_of_the_choice_is_the_tables() -> None:
    assert set(choosing.ORDER) == TABLE.keys() - {"host"}
    lengths = [len(TABLE[name].stages) for name in choosing.ORDER]
    assert lengths == sorted(lengths, reverse=True)


def test_a_choice_depends_on_the_row_count_and_the_plan_alone() -> None:
    """Ranks ask by the global row count: given the same table they choose alike, in whatever order their batches come."""
    assert [name for name in inspect.signature(Route.choice).parameters if name != "self"] == ["rows", "plan"]
    again = msgspec.json.decode(msgspec.json.encode(OVERLAY), type=Tuned)
    one, other = (Route(GLM, H200, backend="router_ext", tuned=bands) for bands in (OVERLAY, again))
    counts = [1, 2, 3, 4, 5, 8, 9, 16, 17, 96, 5000]
    for plan in (True, False):
        first = {rows: one.choice(rows, plan=plan) for rows in counts}
        assert {rows: other.choice(rows, plan=plan) for rows in reversed(counts)} == first
        assert one.choice(4, plan=plan) is other.choice(4, plan=plan)  # asked once for all layers
    assert hash(OVERLAY) == hash(again)


# --- the file


def test_a_table_survives_its_file() -> None:
    path = put(table(shape(), shape(Problem(experts=8, hidden=64, topk=2), name="small")))
    found = tuned.find(H200)
    assert found is not None and found.table is not None and (found.against, found.named) == ((), False)
    assert [one.name for one in found.table.shapes] == ["glm", "small"]
    bands = found.tuned(GLM)
    assert bands == Tuned(bands=(("pair", (Rows(2, 8),)),), bands_without_plan=(("pair", (Rows(2, 8),)),), rows=Rows(1, 8))
    assert str(found) == f"tuned table of NVIDIA H200 is in force: 2 shapes, {path}, {found.digest}"
    assert list(path.parent.iterdir()) == [path]


def test_what_costs_no_time_is_not_asked_of_a_shape() -> None:
    found = table()
    for same in ({"shared": 1, "shared_weight": 0.4}, {"scale": 2.5}, {"renormalize": False}):
        assert found.shape(msgspec.structs.replace(GLM, **same)) is not None
    for other in ({"hidden": 5120}, {"weight_dtype": "float32"}, {"groups": 8, "groups_kept": 4}, {"score": "sqrtsoftplus"}):
        assert found.shape(msgspec.structs.replace(GLM, **other)) is None


def changed(**changes: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(shape()), **changes}


def banded(first: Any, last: Any, field: str = "bands") -> dict[str, Any]:
    return changed(designs={"pair": {"source_hash": TABLE["pair"].source_hash, field: [{"first": first, "last": last}]}})


ODD = [
    (changed(rows=[0, 8]), "Expected `int` >= 1 - at `$.shapes[0].rows[0]`"),
    (changed(rows=[]), "length >= 1 - at `$.shapes[0].rows`"),
    (changed(rows=[8, 1]), "rows: got [8, 1], allowed: each once, in ascending order - at `$.shapes[0]`"),
    (changed(races=[]), "races: got those of rows [], allowed: one for each of rows [1, 8]"),
    (changed(races_without_plan=[{"rows": -1, "host_us": 1.0}]), "races_without_plan: got those of rows [-1]"),
    (changed(problem={"experts": -8, "hidden": 8, "topk": 2}), "experts: got -8, allowed: an integer of at least 1"),
    (changed(problem={"experts": 8, "hidden": 8, "topk": 0}), "topk: got 0, allowed: an integer of at least 1"),
    (banded(8, 2), "bands of pair: got 8 to 2, allowed: first to last, within 1-8"),
    (banded(-2, 8), "bands of pair: got -2 to 8"),
    (banded(0, 0, "bands_without_plan"), "bands_without_plan of pair: got 0 to 0"),
    (banded(1, 9), "bands of pair: got 1 to 9"),
    (banded(1, None), "bands of pair: got 1 to None"),
]
"""Shapes as no measurement makes them."""


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "not a table of this version's"),
        (b"[" * 100000, "not a table of this version's"),
        (fields(schema=2), "Invalid enum value 2"),
        (fields(more=1), "unknown field `more`"),
        (fields(shapes=[{**msgspec.to_builtins(shape()), "problem": {"experts": 8, "hidden": 8, "topk": 9}}]), "topk: got 9"),
        (fields(processors=-1), "Expected `int` >= 1 - at `$.processors`"),
        *((fields(shapes=[part]), why) for part, why in ODD),
        (fields(gpu="NVIDIA B300"), "it is of NVIDIA B300, not of NVIDIA H200"),
        (fields(versions={"sglang": "0.1", "torch": tuned.versions()["torch"]}), "sglang was 0.1, is "),
    ],
)
def test_a_file_that_does_not_fit_is_not_used(data: bytes, why: str) -> None:
    put(data)
    found = tuned.find(H200)
    assert found is not None and any(why in text for text in found.against), found.against
    assert found.table is not None or all(str(tuned.default_path(H200.name)) in text for text in found.against)
    assert found.tuned(GLM) is None
    assert "run sglang-router-ext tune" in str(found)


def test_a_table_of_other_sources_is_stale() -> None:
    old = json.loads(fields())
    old["shapes"][0]["designs"]["pair"]["source_hash"] = "0" * 16
    old["shapes"][0]["designs"]["gone"] = {"source_hash": "0" * 16}
    path = put(json.dumps(old).encode())
    found = tuned.find(H200)
    assert found is not None and found.against == ("design pair changed", "there is no design gone any more")
    start = (
        "tuned table of NVIDIA H200 is stale: design pair changed; there is no design gone any more; run sglang-router-ext tune"
    )
    assert str(found) == f"{start} ({path})"


def test_a_part_of_a_gpu_is_another_gpu() -> None:
    put(table(gpu=Gpu("NVIDIA H200", 90, 132)))
    for processors, fits in ((132, True), (None, True), (16, False)):
        found = tuned.find(Gpu("NVIDIA H200", 90, processors))
        assert found is not None and (not found.against) == fits


def test_tuning_again_keeps_what_still_holds() -> None:
    small = Problem(experts=8, hidden=64, topk=2)
    older = table(shape(), shape(small, name="small"))
    again = tuned.merged(older, H200, [shape(winner="small_rows+warp_select", name="new")])
    assert [one.name for one in again.shapes] == ["small", "new"]
    for changed in ({"versions": {}}, {"processors": 132}):
        assert len(tuned.merged(msgspec.structs.replace(older, **changed), H200, [shape()]).shapes) == 1


def test_a_file_changes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(table())
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        tuned.write(table(shape(name="new")), path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_no_file_of_something_else_is_overwritten(tmp_path: pathlib.Path) -> None:
    other = put(b"{}", tmp_path / "mine.json")
    with pytest.raises(ContractError, match=r"output: got .*mine.json: not a table"):
        tuned.check_writable(other, "output", H200)
    with pytest.raises(ContractError, match=r"b300.json, which is of NVIDIA B300, allowed: a file of NVIDIA H200, or none"):
        tuned.check_writable(put(table(gpu=B300), tmp_path / "b300.json"), "output", H200)
    with pytest.raises(ContractError, match="a file in a folder that can be written"):
        tuned.check_writable(other / "x.json", "output", H200)
    assert tuned.check_writable(tmp_path / "new" / "x.json", "output", H200) is None
    assert tuned.check_writable(put(table()), "output", H200) == tuned.read(tuned.default_path(H200.name))[0]


def test_a_link_stays_one_and_what_it_names_is_written(tmp_path: pathlib.Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "new" / "t.json"
    link.symlink_to(target)
    tuned.write(table(), link)
    assert link.is_symlink() and tuned.read(target)[0] == tuned.check_writable(link, "output", H200)
    target.unlink()
    assert tuned.check_writable(link, "output", H200) is None


def test_the_way_out_that_is_told_is_one(tmp_path: pathlib.Path) -> None:
    old = put(fields(schema=2), tmp_path / "old.json")  # a table, but of another version
    with pytest.raises(ContractError, match=f"tune --remove --output {old} takes this one away"):
        tuned.check_writable(old, "output", H200)
    tuned.remove(old, "output")
    with pytest.raises(ContractError, match=r"a file that tune wrote, or none$"):
        tuned.check_writable(put(b"{}", tmp_path / "mine.json"), "output", H200)


def test_where_a_table_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    assert tuned.find(H200) is None
    assert tuned.default_path("NVIDIA H100 80GB HBM3") == tmp_path / "sglang-router-ext/tables/nvidia-h100-80gb-hbm3.json"
    put(table())
    assert tuned.find(B300) is tuned.find(None) is None
    assert len(tuned.find_all()) == 1
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", "off")
    assert tuned.find(H200) is None and tuned.find_all() == []
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", " ")
    assert tuned.find(H200) is not None
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", str(tmp_path / "none.json"))
    (found,) = tuned.find_all()
    assert found.named and "No such file" in str(found)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert settings.config_dir() == pathlib.Path.home() / ".config/sglang-router-ext"


def test_ages() -> None:
    assert tuned.age(tuned.now()) == "of today"
    assert tuned.age("2020-01-01T00:00:00Z").endswith(" days old")
    assert tuned.age("yesterday") == "of yesterday"


# --- in a server


def test_layers_choose_by_the_table_that_is_in_force(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    put(table())
    kernels, asked = Kernels(), {"backend": "router_ext", "gate": "auto", "unavailable": {}}
    route = _route(kernels, GLM, asked)
    assert [route.choice(rows).selection for rows in (1, 2, 8)] == ["host", "pair", "pair"]
    assert route.choice(9) == choose(GLM, 9, H200, backend="router_ext")  # past what was measured
    assert "bands by the tuned table at 1-8 rows, else by the package's records" in caplog.text
    other = msgspec.structs.replace(GLM, hidden=5120)  # not in the table: the package's bands
    assert _route(kernels, other, asked).choice(1) == choose(other, 1, H200, backend="router_ext")
    put(fields(schema=2))
    assert _route(kernels, GLM, asked).choice(8).selection == "pair"  # read once a process


def _route(kernels: Kernels, problem: Problem, asked: dict[str, Any]) -> Route:
    import torch

    return kernels.route(problem, torch.device("cuda", 0), **asked)


def test_a_named_table_that_does_not_fit_stops_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    path = put(table(gpu=B300), tmp_path / "t.json")
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", str(path))
    with pytest.raises(SystemExit, match=r"cannot run router_ext here(.|\n)*SGLANG_ROUTER_EXT_TABLE: .*of NVIDIA B300, not of"):
        preflight.require(BACKEND)
    assert not [one for one in preflight.check(H200, Demand(gate="small_rows")) if "TABLE" in one.subject]  # it reads no bands


def test_a_stale_table_at_the_default_place_is_said_and_stops_nothing() -> None:
    put(fields(versions={}))
    (finding,) = (one for one in preflight.check(H200, BACKEND) if one.subject == "bands")
    assert not finding.blocks and "is stale: sglang was None" in finding.text
    assert preflight.tuned_bands(GLM, H200) is None


def test_the_nodes_of_a_server_have_one_table_only_if_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(table())
    preflight.require_alike(BACKEND, 1)
    with pytest.raises(SystemExit, match=r"2 nodes must choose alike.*is in force.*name it there by SGLANG_ROUTER_EXT_TABLE"):
        preflight.require_alike(BACKEND, 2)
    preflight.require_alike(Demand(gate="small_rows"), 2)  # reads no bands
    for value in (str(path), "off"):
        monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", value)
        preflight.tuned_table.cache_clear()
        preflight.require_alike(BACKEND, 2)


# --- what doctor says


def test_doctor_shows_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def only() -> doctor.Finding:
        (finding,) = doctor._table()
        return finding

    assert (only().state, only().text[:5]) == ("ok", "none ")
    put(table())
    assert only().state == "ok" and only().text.endswith(", of today") and "is in force" in only().text
    put(fields(versions={}))
    assert only().state == "note" and "is stale" in only().text
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", str(tmp_path / "none.json"))
    assert only().state == "problem"
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", "off")
    assert (only().state, only().text) == ("note", "SGLANG_ROUTER_EXT_TABLE=off")
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", "relative.json")
    assert list(doctor._table()) == []  # a setting that is no value is a finding of its own


def test_a_report_does_not_tell_where_a_table_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", "/scratch/alice/t.json")
    (finding,) = doctor._table()
    assert "alice" not in doctor.report([finding])


def test_a_setting_that_may_be_a_path() -> None:
    assert settings.read({"SGLANG_ROUTER_EXT_TABLE": "/x/y.json"}).table == "/x/y.json"
    with pytest.raises(ContractError, match=r"got 'y.json', allowed: auto \| off \| an absolute path"):
        settings.read({"SGLANG_ROUTER_EXT_TABLE": "y.json"})
