"""The files of ``tune``: which can be written, read and removed, what is said where one cannot, and odd contents."""

from __future__ import annotations

import importlib
import io
import json
import os
import pathlib
import re

import msgspec
import pytest
from made_up_gpu import H200, KIMI, Gpus, call
from rich.console import Console

from sglang_router_ext import build, doctor, files, settings, tuned
from sglang_router_ext.bench import machine


def test_remove(gpus: Gpus, tmp_path: pathlib.Path) -> None:
    call("tune", "--rows", "1")
    path = tuned.default_path(H200.name)
    path.write_text("{")  # whatever it is
    assert call("tune", "--rows", "1").output.startswith("error: output: got ")
    assert f"removed {path}" in call("tune", "--remove").output and not path.exists()
    assert call("tune", "--remove").output.startswith(f"error: remove: got {path}: No such file")
    other = tmp_path / "notes.json"
    other.write_text("{}")
    text = f"error: output: got {other}: something else, allowed: a table that tune wrote\n"
    assert call("tune", "--remove", "--output", str(other)).output == text and other.exists()


def test_remove_says_what_servers_then_have(gpus: Gpus, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    for path in (one, other, tmp_path / "third.json"):
        call("tune", "--rows", "1", "--output", str(path))
    third = call("tune", "--remove", "--output", str(tmp_path / "third.json")).output
    assert third == f"removed {tmp_path / 'third.json'}; servers go on by the tables in {tuned.folder()}\n"
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", str(one))
    assert call("tune", "--remove", "--gpu", "h200").output.startswith(
        "error: gpu: got h200, allowed: none with --remove where"
    )
    assert call("tune", "--remove", "--output", str(other)).output == (
        f"removed {other}; SGLANG_ROUTER_EXT_TABLE names {one}, which stays\n"
    )
    assert not other.exists()
    monkeypatch.setattr(machine, "gpu", lambda index=None: None)  # a file that is named needs none
    said = call("tune", "--remove").output
    assert said.startswith(
        f"removed {one}; SGLANG_ROUTER_EXT_TABLE still names {one}, and no server with a backend of ours starts until"
    )
    assert not one.exists() and "package" not in said
    assert call("tune", "--remove").output.startswith(f"error: SGLANG_ROUTER_EXT_TABLE: got {one}: No such file")
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", "one.json")
    assert call("tune", "--remove", "--output", str(other)).output.startswith("error: SGLANG_ROUTER_EXT_TABLE: got 'one.json'")


def test_remove_takes_a_link_and_no_folder(gpus: Gpus, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, link = tmp_path / "t.json", tmp_path / "link.json"
    call("tune", "--rows", "1", "--output", str(table))
    for target in (table, tmp_path / "gone.json"):
        link.symlink_to(target)
        said = call("tune", "--remove", "--output", str(link)).output
        assert said.startswith(f"removed the link {link} to {target}; ") and not os.path.lexists(link)
    assert table.exists()
    allowed = "allowed: a table that tune wrote\n"
    assert call("tune", "--remove", "--output", str(tmp_path)).output == f"error: output: got {tmp_path}: a folder, {allowed}"
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", str(tmp_path))
    assert call("tune", "--remove").output == f"error: SGLANG_ROUTER_EXT_TABLE: got {tmp_path}: a folder, {allowed}"
    monkeypatch.delenv("SGLANG_ROUTER_EXT_TABLE")
    tuned.default_path(H200.name).mkdir(parents=True)
    assert call("tune", "--remove").output == f"error: remove: got {tuned.default_path(H200.name)}: a folder, {allowed}"
    long = tmp_path / ("x" * 300)
    assert call("tune", "--remove", "--output", str(long)).output == f"error: output: got {long}: File name too long, {allowed}"


UNWRITABLE = {
    "long": ("x" * 300, "File name too long"),
    "long folder": ("x" * 300 + "/t.json", "File name too long"),
    "below a file": ("file/t.json", "Not a directory"),
    "far below a file": ("file/more/t.json", "Not a directory"),
    "folder": ("", "Not a regular file"),
    "FIFO": ("fifo", "Not a regular file"),
    "link": ("link", "No such file or directory"),
    "circle": ("circle", "Too many levels of symbolic links"),
    "other": ("file", "not a table of this version's"),
}


@pytest.mark.parametrize("name", ["output", "SGLANG_ROUTER_EXT_TABLE"])
@pytest.mark.parametrize("case", UNWRITABLE)
def test_a_file_that_cannot_be_written_is_refused_before_a_gpu_is_looked_for(
    name: str, case: str, gpus: Gpus, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/proc/t.json")  # here files can be made, there they cannot
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.setattr(machine, "gpu", lambda index=None: pytest.fail("a GPU was looked for"))
    part, why = UNWRITABLE[case]
    path = tmp_path / part
    if name == "output":
        result = call("tune", "--rows", "1", "--output", str(path))
    else:
        monkeypatch.setenv(name, str(path))
        result = call("tune", "--rows", "1")
    assert result.exit_code == 2 and re.match(f"error: {name}: got /.*{why}.*, allowed: a file .*\n$", result.output), (
        result.output
    )


def test_the_default_place_and_the_setting_are_read_before_a_gpu_is_looked_for(
    gpus: Gpus, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = machine.gpu
    monkeypatch.setattr(machine, "gpu", lambda index=None: pytest.fail("a GPU was looked for"))
    for arguments in ((), ("--output", str(tmp_path / "t.json"))):
        monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", "t.json")
        assert call("tune", *arguments).output.startswith("error: SGLANG_ROUTER_EXT_TABLE: got 't.json', allowed: auto")
    monkeypatch.delenv("SGLANG_ROUTER_EXT_TABLE")
    (tmp_path / "sglang-router-ext").touch()
    text = f"error: output: got {tuned.folder()}: Not a directory, allowed: a file in a folder that can be written\n"
    assert call("tune").output == text
    (tmp_path / "sglang-router-ext").unlink()
    tuned.default_path(H200.name).mkdir(parents=True)
    monkeypatch.setattr(machine, "gpu", found)
    result = call("tune")
    assert result.output.startswith(f"error: output: got {tuned.default_path(H200.name)}: Not a regular file")
    assert "--remove" not in result.output and gpus.calls == []  # which takes no folder away


def test_a_relative_name_in_a_folder_that_is_gone(gpus: Gpus, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for arguments in (("--rows", "1"), ("--remove",)):
        said = call("tune", *arguments, "--output", "t.json").output
        assert said.startswith("error: output: got t.json: No such file or directory, allowed: ")


def test_a_disk_that_is_full_at_the_end_is_one_line(
    gpus: Gpus, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    path = tmp_path / "t.json"
    result = call("tune", "--rows", "1", "--output", str(path))
    assert (result.exit_code, result.output.splitlines()[-1][: len(f"error: output: got {path}: No space")]) == (
        2,
        f"error: output: got {path}: No space",
    )
    assert list(tmp_path.iterdir()) == []


def test_names_are_shown_as_they_are(gpus: Gpus, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / os.fsdecode(b"[red]x[bold] :smile: \xff")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(KIMI))
    result = call("tune", "--model", str(folder), "--rows", "1")
    assert result.exit_code == 0 and "[red]x[bold] :smile: ?: 384 x 7168" in result.stdout
    path = tuned.default_path(H200.name)
    path.write_text(path.read_text().replace('"warp_select"', '"[/red]"'))
    path.write_text(path.read_text().replace(H200.name, "NVIDIA [/red]"))
    for arguments in (("tune", "--show"), ("list",)):
        assert "tuned table of NVIDIA [/red] is stale" in call(*arguments).output


def test_what_doctor_and_a_progress_bar_show_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.Finding("bands", "a [/red] subject", "note", "a [/red] text")
    monkeypatch.setattr(doctor, "examine", lambda: iter([finding]))
    assert "a [/red] subject" in call("doctor").output and "a [/red] text" in call("doctor").output
    screen, application = io.StringIO(), importlib.import_module("sglang_router_ext.cli.app")
    monkeypatch.setattr(application, "console", lambda **_: Console(file=screen, force_terminal=True, width=80))
    with application.Ticker("tune", 2) as ticker:
        ticker.step("[/red]x")
    assert "tune [/red]x" in screen.getvalue()


def test_show_takes_odd_files(gpus: Gpus) -> None:
    call("tune", "--rows", "1")
    path = tuned.default_path(H200.name)
    table = json.loads(path.read_bytes())
    table["shapes"][0]["races"][0] |= {"ours": "[/red]", "ours_us": 0.0}
    path.write_bytes(msgspec.json.encode(table))
    result = call("tune", "--show")
    assert result.exit_code == 0 and "[/red]" in result.output
    table["shapes"][0]["races"] = []
    path.write_bytes(msgspec.json.encode(table))
    result = call("tune", "--show")
    assert result.exit_code == 0 and "races: got those of rows [], allowed: one for each of rows [1]" in result.output
    path.unlink()
    os.mkfifo(path)
    assert f"tuned table is not used: {path}: Not a regular file" in call("tune", "--show").output


@pytest.mark.parametrize("named", [True, False])
def test_only_a_file_is_read(named: bool, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """A FIFO would wait for whoever writes, a device has no end."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, pathlib.Path("/dev/zero"), tmp_path):
        if named:
            monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", str(path))
        else:
            link = tuned.default_path(H200.name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(path)
        found = tuned.find(H200)
        assert found is not None and found.table is None and "Not a regular file" in str(found)


@pytest.mark.parametrize("value", ["", "config", "./config", "~/config"])
def test_a_relative_folder_of_the_user_is_ignored(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", value)
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert settings.config_dir() == pathlib.Path.home() / ".config/sglang-router-ext"
    assert build.cache_dir() == pathlib.Path.home() / ".cache/sglang-router-ext"
