"""Every kernel compiles for every architecture, without spills and without a stack frame, and the compiler is found."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from sglang_router_ext import build
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.contract import Problem
from sglang_router_ext.gate.small_rows import config

ODD = (Problem(experts=257, hidden=7176, topk=32), Problem(experts=1024, hidden=2880, topk=8))
"""Shapes that take the general path: bounds on K, scalar loads, the widest selection."""


@functools.cache
def instances() -> dict[tuple[str, int], list[str]]:
    found: dict[tuple[str, int], set[str]] = {}
    for problem in (*(case.problem for case in CASES.values()), *ODD):
        for arch in build.ARCH_TARGETS:
            for header, some in build.instances(problem, arch).items():
                found.setdefault((header, arch), set()).update(some)
    return {key: sorted(some) for key, some in found.items()}


@functools.cache
def compiled() -> dict[tuple[str, int], Future[list[build.Usage]]]:
    """Every header for every architecture, as many compilers at a time as there are processors; the longest come first."""
    pool, found = ThreadPoolExecutor(os.cpu_count()), instances()
    todo = sorted(found, key=lambda one: -len(found[one]))
    return {(header, arch): pool.submit(build.cross_compile, header, found[header, arch], arch) for header, arch in todo}


@pytest.mark.parametrize(("header", "arch"), sorted(instances()))
def test_no_spills_and_no_stack(header: str, arch: int) -> None:
    usage = compiled()[header, arch].result()
    assert usage
    for kernel in usage:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.stack_bytes == 0, kernel
        assert kernel.registers <= 255, kernel


def test_the_report_is_read() -> None:
    text = """ptxas info    : Compiling entry function 'one' for 'sm_90a'
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem"""
    assert build._parse_usage(text) == [build.Usage("one", 40, 2048, 16, 12)]


def test_a_kernel_that_does_not_compile_is_an_error_in_the_compilers_words() -> None:
    with pytest.raises(build.BuildError, match=r"gate/small_rows.cuh for sm_90: .*error"):
        build.cross_compile("gate/small_rows.cuh", ["NoSuchThing<1>"], 90)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A machine whose environment names no compiler; what the test puts into the folder is all there is."""
    build.find_toolchain.cache_clear()
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "USUAL_HOME", tmp_path / "nowhere")
    yield tmp_path
    build.find_toolchain.cache_clear()


def test_without_a_compiler_the_one_that_pip_brought_is_used(no_compiler: pathlib.Path) -> None:
    toolchain = build.find_toolchain()
    assert toolchain.source == "pip"
    assert toolchain.home.is_relative_to(no_compiler)
    assert (toolchain.home / "lib64" / "libcudart.so").exists()  # what SGLang's loader links against
    assert build.find_toolchain.__wrapped__() == toolchain  # found again, not made again


def test_pips_compiler_compiles_all_architectures(no_compiler: pathlib.Path) -> None:
    source = no_compiler / "one.cu"
    source.write_text("__global__ void nothing() {}\n")
    nvcc = build.find_toolchain().nvcc
    for target in build.ARCH_TARGETS.values():
        command = [nvcc, "-cubin", f"-gencode=arch=compute_{target},code=sm_{target}", "-o", no_compiler / "one.cubin", source]
        subprocess.run(command, check=True, env={"PATH": "/usr/bin:/bin"})


def test_no_compiler_at_all_is_one_clear_error(no_compiler: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_pip_toolkit", lambda: None)
    with pytest.raises(
        build.BuildError, match=r"no CUDA compiler: CUDA_HOME: not set.*PATH: .*pip: .*; allowed: a CUDA toolkit"
    ):
        build.find_toolchain()


def test_what_cuda_home_names_is_not_overruled(no_compiler: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(no_compiler / "broken"))
    with pytest.raises(build.BuildError, match=r"CUDA_HOME: .*broken/bin/nvcc does not run"):
        build.find_toolchain()


def test_the_division_of_a_gate_is_whole_where_it_says_so() -> None:
    for experts in (8, 128, 160, 256, 288, 384, 896):
        for hidden in range(8, 16385, 8):
            for split in (config(experts, hidden), config(experts, hidden, wide=True)):
                whole = 32 * split.warps * split.depth * split.slices
                assert not split.exact or whole == hidden
                assert 1 <= split.slices <= 8
                assert 8 * split.tiles * 16 <= 32 * split.warps  # one thread adds up one logit
                assert split.warps * 32 <= 1024


LOAD_WITH_PIPS_COMPILER = """
import pathlib
from sglang_router_ext import build
build.USUAL_HOME = pathlib.Path("/nowhere")
assert build.find_toolchain().source == "pip"
with build.target(90):
    assert build.load("selection/warp_select.cuh", "WarpSelect<1, true, false, ::rx::Score::kSigmoid>").run
"""


def test_sglangs_loader_builds_links_and_loads_with_pips_compiler(tmp_path: pathlib.Path) -> None:
    """What a machine with nothing but a driver does; in a process of its own, as the loader remembers its compiler."""
    for tool in ("c++", "g++", "ninja", "sh"):
        found = shutil.which(tool)
        assert found is not None, f"{tool} is needed to build a kernel"
        (tmp_path / tool).symlink_to(found)
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/bin", "SGLANG_JIT_CACHE_DIR": str(tmp_path / "jit")}
    done = subprocess.run([sys.executable, "-c", LOAD_WITH_PIPS_COMPILER], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
