"""Broken environments, made up, and what ``doctor`` says about each."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import stat
import subprocess
import sys

import pytest

from sglang_router_ext import build, doctor
from sglang_router_ext.bench import machine, record
from sglang_router_ext.contract import Gpu
from sglang_router_ext.doctor import Finding

BROKEN_SGLANG = "raise ImportError('libcudart.so.12: cannot open shared object file')"
OLD_SGLANG = "raise SystemExit('sglang.srt.plugins: no such module')"


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """An environment in which nothing but what a test breaks is wrong. The compilers are asked anew."""
    for name in ("SGLANG_ROUTER_EXT", "SGLANG_ROUTER_EXT_GATE", "SGLANG_PLUGINS", "CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SGLANG_JIT_CACHE_DIR", str(tmp_path / "jit"))
    monkeypatch.setattr(machine, "gpu", lambda _index=0: Gpu("NVIDIA H200", 90))
    build.find_toolchain.cache_clear()
    yield
    build.find_toolchain.cache_clear()


def quick() -> list[Finding]:
    """All that needs no import of SGLang."""
    steps = (doctor._machine(), [doctor._toolchain()], doctor._tools(), [doctor._cache()], doctor._environment())
    return [finding for step in steps for finding in step] + [doctor._entry_point()]


def problems(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.text for finding in findings if finding.state == "problem"}


def program(folder: pathlib.Path, name: str, text: str = "exit 1") -> pathlib.Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_a_healthy_environment_has_no_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    program(tmp_path, "bin/ninja")
    program(tmp_path, "bin/c++")
    program(tmp_path, "cuda/bin/nvcc", "echo Cuda compilation tools, release 13.0, V13.0.1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert problems(quick()) == {}


@pytest.mark.parametrize(
    ("checkout", "told", "said"),
    [
        (("4f38c7e", False), "unknown", ("ok", "4f38c7e")),
        (("4f38c7e", True), "dirty", ("note", "4f38c7e, with changes")),
        (None, "5a1b2c3", ("ok", "5a1b2c3")),
        (None, "unknown", None),
    ],
)
def test_what_a_bug_report_needs_of_the_system(
    checkout: tuple[str, bool] | None, told: str, said: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "checkout", lambda: checkout)
    monkeypatch.setattr(machine, "commit", lambda: told)
    found = {finding.subject: (finding.state, finding.text) for finding in quick()}
    assert found.get("commit") == said
    assert found["Python"] == ("ok", platform.python_version())
    assert platform.release() in found["system"][1]
    assert f"ok       versions: Python: {platform.python_version()}" in doctor.report(quick()).splitlines()


def test_a_system_that_does_not_say_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unnamed() -> dict[str, str]:
        raise OSError("no os-release")

    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"PRETTY_NAME": "A Linux 12"})
    assert machine.system() == f"A Linux 12, {platform.platform()}"
    monkeypatch.setattr(platform, "freedesktop_os_release", unnamed)
    assert machine.system() == platform.platform()


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda _index=0: None)
    assert problems(quick())["device"] == "no CUDA GPU"


def test_a_torch_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_index: int = 0) -> None:
        raise ImportError("libtorch_cuda.so: undefined symbol")

    monkeypatch.setattr(machine, "gpu", broken)
    assert problems(quick())["torch"] == "libtorch_cuda.so: undefined symbol"


def test_a_cuda_home_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = problems(quick())["nvcc"]
    assert found.startswith(f"no CUDA compiler: CUDA_HOME: {tmp_path}/bin/nvcc does not run")
    assert "allowed: a CUDA toolkit, or pip install nvidia-cuda-nvcc" in found


def test_no_ninja_and_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = problems(quick())
    assert found["ninja"] == "ninja is not found, and SGLang's JIT builds with it: pip install ninja"
    assert found["C++ compiler"] == "c++ is not found, and SGLang's JIT builds with it: a g++, or CXX=<compiler>"


def test_a_compiler_that_is_named_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    assert problems(quick())["C++ compiler"].startswith("g++-99 is not found")


def test_a_cache_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SGLANG_JIT_CACHE_DIR", str(tmp_path / "file" / "jit"))
    assert problems(quick())["JIT cache"].endswith("file cannot be written; set SGLANG_JIT_CACHE_DIR")


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    real = os.access  # root may write anywhere
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != tmp_path and real(path, mode))
    assert problems(quick())["JIT cache"].startswith(f"{tmp_path}/jit: {tmp_path} cannot be written")


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ROOM", 2**60)
    assert "GB free, too few for builds; allowed: " in problems(quick())["JIT cache"]


def test_a_setting_that_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ROUTER_EXT_GATE", "fastest")
    assert problems(quick())["settings"].startswith("SGLANG_ROUTER_EXT_GATE: got 'fastest', allowed: auto | host | fp32")


def test_a_plugin_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ROUTER_EXT", "0")
    assert Finding("environment", "settings", "note", "SGLANG_ROUTER_EXT=0: the plugin is off") in quick()


def test_a_plugin_that_sglang_is_told_to_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another, one")
    assert problems(quick())["SGLANG_PLUGINS"] == (
        "got another,one, so that SGLang leaves router_ext out; allowed: unset, or a list with router_ext"
    )
    monkeypatch.setenv("SGLANG_PLUGINS", "another,router_ext")
    assert "SGLANG_PLUGINS" not in problems(quick())


def test_a_package_that_pip_did_not_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
    assert problems(quick())["entry point"].startswith("SGLang does not find router_ext")


@pytest.mark.parametrize(("text", "said"), [(BROKEN_SGLANG, "ImportError: libcudart.so.12"), (OLD_SGLANG, "no such module")])
def test_an_sglang_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, text: str, said: str) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = list(doctor._plugin())
    assert said in problems(found)["probe"]


def test_an_sglang_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.2)
    real = subprocess.run
    hang = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(doctor.subprocess, "run", lambda _command, **more: real(hang, **more))
    assert problems(list(doctor._plugin()))["probe"] == "importing SGLang took more than 0.2 s"


def test_records_that_are_damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "h200.jsonl").write_text("{half a line")
    monkeypatch.setattr(record, "DIRECTORY", tmp_path)
    assert "h200.jsonl" in problems(list(doctor._records()))["h200.jsonl"]


def test_a_cache_of_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_JIT_CACHE_DIR", "~nosuchuser/jit")
    assert "~nosuchuser/jit: " in problems(quick())["JIT cache"]


def test_a_compiler_behind_a_cache_of_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    program(tmp_path, "bin/ccache")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", "ccache g++")
    assert "C++ compiler" not in problems(quick())


@pytest.mark.parametrize(("home", "said"), [("/srv", "~/jit"), ("/", "/srv/jit")])
def test_a_report_has_no_home_of_one_part(home: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathlib.Path, "home", lambda: pathlib.Path(home))
    assert f"cache: {said}\n" in doctor.report([Finding("compiler", "cache", "ok", "/srv/jit")])


def test_a_report_does_not_tell_who_the_user_is(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(pathlib.Path, "home", lambda: tmp_path)
    monkeypatch.setenv("SGLANG_JIT_CACHE_DIR", "/scratch/alice/jit")
    monkeypatch.setenv("CXX", f"{tmp_path}/bin/g++")
    monkeypatch.setenv("SGLANG_ROUTER_EXT_GATE", "hf_0123456789abcdefghij")
    findings = [
        Finding("versions", "torch", "ok", "2.11"),
        Finding("compiler", "JIT cache", "problem", f"{tmp_path}/.cache/sglang/jit cannot be written"),
        Finding("compiler", "C++ compiler", "problem", f"{tmp_path}/bin/g++ is not found"),
        Finding("compiler", "JIT cache", "ok", "/scratch/alice/jit, 3.0 GB free"),
        Finding("environment", "settings", "problem", "SGLANG_ROUTER_EXT_GATE: got hf_0123456789abcdefghij, allowed: auto"),
        Finding("servers", "live", "ok", f"{tmp_path}ly/other and /scratch/alice/jitter stay"),
    ]
    assert doctor.report(findings).splitlines() == [
        "```",
        "problem  compiler: JIT cache: ~/.cache/sglang/jit cannot be written",
        "problem  compiler: C++ compiler: $CXX is not found",
        "problem  environment: settings: SGLANG_ROUTER_EXT_GATE: got $SGLANG_ROUTER_EXT_GATE, allowed: auto",
        "ok       versions: torch: 2.11",
        "ok       compiler: JIT cache: $SGLANG_JIT_CACHE_DIR, 3.0 GB free",
        f"ok       servers: live: {tmp_path}ly/other and /scratch/alice/jitter stay",
        "```",
    ]
