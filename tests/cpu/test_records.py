"""Records: the schema of every committed line, replacement, and that no design is on without records of today's sources."""

from __future__ import annotations

import os
import pathlib
import shutil

import msgspec
import pytest

from sglang_router_ext import designs
from sglang_router_ext.bench import machine, record
from sglang_router_ext.bench.record import BenchRecord, CheckRecord, Identity, OtherRecord
from sglang_router_ext.designs import DESIGNS, TABLE, Design, Rows

H200 = "NVIDIA H200"
ORIGIN = Identity(
    schema=1, run="a1", time="2026-11-30T00:00:00Z", gpu=H200, commit="dirty", versions={"torch": "2.11", "x": None}
)


def bench(
    design: str = "pair", *, rows: int = 6, source_hash: str = "", median_us: float = 5.1, gpu: str = H200
) -> BenchRecord:
    fields = {**msgspec.structs.asdict(ORIGIN), "gpu": gpu}
    return BenchRecord(
        **fields,
        case="glm-5.3-flash",
        experts=288,
        hidden=4096,
        topk=8,
        rows=rows,
        design=design,
        stages="gate+selection",
        cache="cold",
        median_us=median_us,
        p10_us=5.0,
        p90_us=5.3,
        kernels=2,
        replays=60,
        correct=True,
        source_hash=source_hash,
        clocks={"sm_mhz": 1980, "memory_mhz": None},
    )


def check(design: str = "pair", *, source_hash: str = "", failures: int = 0) -> CheckRecord:
    fields = msgspec.structs.asdict(ORIGIN)
    return CheckRecord(
        **fields, kind="check", design=design, stages="gate+selection", cases=300, failures=failures, source_hash=source_hash
    )


def test_every_committed_line_fits_the_schema() -> None:
    assert record.read_all()


def test_no_design_is_on_without_records_of_its_sources() -> None:
    assert record.unproven(record.read_all()) == []


@pytest.mark.parametrize("gpu", designs.MOST_ROWS)
def test_bands_end_where_records_do(gpu: str) -> None:
    most = max(line.rows for line in record.read_all() if isinstance(line, BenchRecord) and line.gpu == gpu)
    assert most == designs.MOST_ROWS[gpu]
    bands = [band for design in DESIGNS for band in (*design.bands.get(gpu, ()), *design.bands_without_plan.get(gpu, ()))]
    assert all(band.last is not None and band.last <= most for band in bands)


def test_lines_survive_the_file(tmp_path: pathlib.Path) -> None:
    other = msgspec.json.encode({**msgspec.structs.asdict(ORIGIN), "kind": "soak", "model": "m", "hours": 1.5})
    written = [bench(), check(), record.decode(other)]
    assert isinstance(written[2], OtherRecord)
    (path,) = record.write(written, tmp_path)
    assert path.name == "h200.jsonl"
    assert sorted(map(str, record.read(path))) == sorted(map(str, written))
    record.write([bench(rows=1)], tmp_path)
    assert len(record.read(path)) == 4
    assert other in path.read_bytes().splitlines()
    record.write([record.decode(other.replace(b"1.5", b"2.5")), record.decode(other.replace(b'"m"', b'"n"'))], tmp_path)
    assert len(record.read(path)) == 5
    assert other not in path.read_bytes().splitlines()


def test_a_newer_line_takes_the_place_of_the_older_one(tmp_path: pathlib.Path) -> None:
    record.write([bench(rows=rows) for rows in (8192, 6, 16)], tmp_path)
    (path,) = record.write([bench(rows=6, median_us=4.9), check()], tmp_path)
    lines = record.read(path)
    assert [line.rows for line in lines if isinstance(line, BenchRecord)] == [6, 16, 8192]
    assert [line.median_us for line in lines if isinstance(line, BenchRecord)] == [4.9, 5.1, 5.1]
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"median": 3}, "unknown field `median`"),
        ({"schema": 2}, r"schema"),
        ({"correct": False}, "correct"),
        ({"cache": "hot"}, "cache"),
        ({"rows": "six"}, "rows"),
        ({"gpu": "NVIDIA B300"}, "whose file is b300.jsonl"),
        ({"kind": "check"}, "unknown field|missing required"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: pathlib.Path, change: dict[str, object], text: str) -> None:
    good = record.encode(bench())
    bad = msgspec.json.encode({**msgspec.json.decode(good), **change})
    path = tmp_path / "h200.jsonl"
    path.write_bytes(good + b"\n" + bad + b"\n")
    with pytest.raises(record.RecordError, match=rf"^h200.jsonl:2: .*({text})"):
        record.read(path)


def test_a_missing_field_is_named(tmp_path: pathlib.Path) -> None:
    fields = msgspec.json.decode(record.encode(bench()))
    del fields["p90_us"]
    path = tmp_path / "h200.jsonl"
    path.write_bytes(msgspec.json.encode(fields))
    with pytest.raises(record.RecordError, match="p90_us"):
        record.read(path)


@pytest.fixture
def switched_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Design:
    """``pair``, switched on for the H200, with its sources in a folder of its own."""
    for source in TABLE["pair"].sources:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(designs.PACKAGE / source, tmp_path / source)
    monkeypatch.setattr(designs, "PACKAGE", tmp_path)
    return msgspec.structs.replace(TABLE["pair"], status="on", bands={H200: (Rows(1, 16),)})


def test_a_changed_source_makes_records_stale(switched_on: Design) -> None:
    now = switched_on.source_hash
    proof = [bench(source_hash=now), check(source_hash=now), bench("sglang-pair")]
    assert record.unproven(proof, [switched_on]) == []
    assert record.stale(proof, [switched_on]) == []

    source = designs.PACKAGE / "fused/pair.cuh"
    source.write_text(source.read_text() + "\n// changed\n")
    assert switched_on.source_hash != now
    assert len(record.unproven(proof, [switched_on])) == 2
    first, second = record.stale(proof, [switched_on])
    assert first.startswith("pair on NVIDIA H200: bench of 2026-11-30 is stale")
    assert second.startswith("pair on NVIDIA H200: check")


@pytest.mark.parametrize("missing", ["bench", "check", "clean check", "other GPU"])
def test_what_a_design_that_is_on_lacks(switched_on: Design, missing: str) -> None:
    now = switched_on.source_hash
    proof = {
        "bench": [check(source_hash=now)],
        "check": [bench(source_hash=now)],
        "clean check": [bench(source_hash=now), check(source_hash=now, failures=1)],
        "other GPU": [bench(source_hash=now, gpu="NVIDIA B300"), check(source_hash=now)],
    }[missing]
    found = record.unproven(proof, [switched_on])
    assert len(found) == 1
    assert ("check record" if "check" in missing else "bench record") in found[0]


def test_a_chain_is_as_old_as_any_of_its_parts() -> None:
    assert record.current_hash("cublas_gemm+warp_select") not in (None, "", TABLE["warp_select"].source_hash)
    assert record.current_hash("pair") == TABLE["pair"].source_hash
    assert record.current_hash("pair+nothing") is None


def test_a_copy_without_git_is_told_its_commit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGE", tmp_path / "package")
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert machine.commit() == "unknown"
    monkeypatch.setenv("GIT_COMMIT", "4f38c7e")
    assert machine.commit() == "4f38c7e"


def test_records_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "h200.jsonl").mkdir()
    with pytest.raises(record.RecordError, match="not a file"):
        record.read_all(tmp_path)


def test_a_checkout_with_changes_is_told_its_commit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        returncode, stdout = 0, " M file"

    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(machine, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: Answer)
    monkeypatch.setattr(machine.shutil, "which", lambda _: "git")
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert machine.commit() == "dirty"
    monkeypatch.setenv("GIT_COMMIT", "4f38c7e")
    assert machine.commit() == "4f38c7e"


def test_no_record_of_a_design_that_is_on_is_stale() -> None:
    names = {design.name for design in DESIGNS if design.status == "on"}
    mine = [r for r in record.read_all() if not isinstance(r, OtherRecord) and set(r.design.split("+")) <= names]
    assert len(mine) > 100
    assert record.stale(mine) == []


def test_a_fifo_is_no_file_of_records(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "h200.jsonl")
    with pytest.raises(record.RecordError, match="not a file"):
        record.read_all(tmp_path)


def test_records_that_cannot_be_written_are_refused_before_the_work(tmp_path: pathlib.Path) -> None:
    record.check_writable(H200, tmp_path / "new")
    (tmp_path / "file").touch()
    with pytest.raises(record.RecordError, match=r"^record: got .*, allowed: a folder that can be written"):
        record.check_writable(H200, tmp_path / "file")
    (tmp_path / "h200.jsonl").write_text("nonsense")
    with pytest.raises(record.RecordError, match=r"h200\.jsonl:1"):
        record.check_writable(H200, tmp_path)


def test_a_write_that_fails_leaves_no_draft(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        record.write([bench()], tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_link_to_records_stays_one(tmp_path: pathlib.Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "h200.jsonl"
    link.symlink_to(tmp_path / "there/h200.jsonl")
    record.write([bench()], tmp_path)
    assert link.is_symlink()
    assert len(record.read(link)) == 1
