"""The only caller of a compiler: kernel sources -> loaded module, through SGLang's JIT loader and its cache.

Inside SGLang, ``load_jit`` keys its cache on sources, headers, flags and toolchain, publishes atomically and lets ranks that
start together compile once. Without SGLang the same entry points are built by ``tvm_ffi.cpp.load_inline``.

The compiler is that of CUDA_HOME, of PATH, or else the one that SGLang's own installation brings (``nvidia-cuda-nvcc``), so a
machine with nothing but a driver works. A build that fails is an error with the compiler's words; nothing falls back.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from sglang_router_ext.contract import PLAN_SLOTS, Problem
from sglang_router_ext.designs import PACKAGE, TABLE
from sglang_router_ext.settings import user_folder

ARCH_TARGETS = {90: "90a", 100: "100a", 103: "103a"}
"""Architectures that the kernels are built for, and the compiler's name of each."""

ARCH_FLAGS = dict.fromkeys((100, 103), ("-Xptxas=--minnctapersm=1",))
"""Flags of one architecture. There ptxas would keep room for two blocks an SM where one is launched, and spill for it."""

DEBUG_FLAGS: tuple[str, ...] = ()
"""Flags of this process alone: what tests add for compute-sanitizer (see plan/one_block.cuh)."""

USUAL_HOME = pathlib.Path("/usr/local/cuda")

EXTRA = {"fused/single.cuh": ("capture_id",)}
"""Header -> functions that its modules have besides ``run``."""
WITHOUT_SGLANG_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr")


class BuildError(RuntimeError):
    """A kernel cannot be built here; the text says what is missing or what the compiler said."""


class Toolchain(msgspec.Struct, frozen=True):
    """The CUDA compiler that builds use. ``source``: CUDA_HOME, PATH, /usr/local/cuda or pip."""

    home: pathlib.Path
    version: str
    source: str

    @property
    def nvcc(self) -> pathlib.Path:
        return self.home / "bin" / "nvcc"


@functools.cache
def find_toolchain() -> Toolchain:
    """The compiler of CUDA_HOME, of PATH, of /usr/local/cuda, or of pip. Raises :class:`BuildError` if there is none."""
    tried = []
    for source, home in _candidates():
        if home is None:
            tried.append(f"{source}: not set or not found")
            continue
        try:
            output = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            tried.append(f"{source}: {home}/bin/nvcc does not run ({error})")
            if source in ("CUDA_HOME", "CUDA_PATH"):  # what the user set is not overruled
                break
            continue
        if source == "PATH" and not any((home / lib / "libcudart.so").exists() for lib in ("lib64", "lib")):
            tried.append(f"PATH: {home}/bin/nvcc lies outside a toolkit (no libcudart.so beside it)")
            continue
        match = re.search(r"release (\d+\.\d+)", output)
        return Toolchain(home, match.group(1) if match else "unknown", source)
    raise BuildError("no CUDA compiler: " + "; ".join(tried) + "; allowed: a CUDA toolkit, or pip install nvidia-cuda-nvcc")


def _candidates() -> Iterator[tuple[str, pathlib.Path | None]]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        yield name, pathlib.Path(os.environ[name]) if os.environ.get(name) else None
    nvcc = shutil.which("nvcc")
    yield "PATH", pathlib.Path(nvcc).resolve().parent.parent if nvcc else None
    yield str(USUAL_HOME), USUAL_HOME if (USUAL_HOME / "bin" / "nvcc").exists() else None
    yield "pip", _pip_toolkit()


def cache_dir() -> pathlib.Path:
    """Where this package keeps what it makes: XDG_CACHE_HOME or ~/.cache, below ``sglang-router-ext``."""
    return user_folder("XDG_CACHE_HOME", ".cache")


def _pip_toolkit() -> pathlib.Path | None:
    """pip's compiler as a toolkit: links to its folders, and the unversioned libcudart.so that linking asks for."""
    spec = importlib.util.find_spec("nvidia")
    for base in map(pathlib.Path, spec.submodule_search_locations or () if spec else ()):
        for home in sorted(base.glob("cu[0-9]*"), reverse=True):
            runtime = next(iter(sorted((home / "lib").glob("libcudart.so.*"))), None)
            if (home / "bin" / "nvcc").exists() and runtime is not None:
                return _link_toolkit(home, runtime)
    return None


def _link_toolkit(home: pathlib.Path, runtime: pathlib.Path) -> pathlib.Path:
    name = "toolkit-" + hashlib.sha256(str(home).encode()).hexdigest()[:12]
    final = cache_dir() / name
    if (final / "lib64" / "libcudart.so").exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = pathlib.Path(tempfile.mkdtemp(prefix=name, dir=final.parent))
    for entry in home.iterdir():
        if entry.name not in ("lib", "lib64"):
            (staging / entry.name).symlink_to(entry)
    for folder in ("lib", "lib64"):
        (staging / folder).mkdir()
        for library in (home / "lib").iterdir():
            (staging / folder / library.name).symlink_to(library)
        if not (staging / folder / "libcudart.so").exists():
            (staging / folder / "libcudart.so").symlink_to(runtime)
    try:
        staging.rename(final)
    except OSError:  # another process was first, or an incomplete one is in the way
        if not (final / "lib64" / "libcudart.so").exists():
            shutil.rmtree(final, ignore_errors=True)
            staging.rename(final)
        else:
            shutil.rmtree(staging)
    return final


def use_toolchain() -> Toolchain:
    """Make the compiler found the one that SGLang's loader takes, by CUDA_HOME where nothing else names one."""
    toolchain = find_toolchain()
    if toolchain.source not in ("CUDA_HOME", "CUDA_PATH"):
        os.environ["CUDA_HOME"] = str(toolchain.home)
    return toolchain


@functools.cache
def load(header: str, instance: str) -> Any:
    """The built and loaded module of one instance, e.g. ``load("gate/small_rows.cuh", "SmallRows<8, 1, 4>")``.

    Its function ``run`` is ``rx::<instance>::run``; :data:`EXTRA` lists others. Builds on first use (seconds), then comes from
    the cache. Raises :class:`BuildError`.
    """
    use_toolchain()
    marker = "router_ext_" + re.sub(r"\W+", "_", instance).strip("_")
    names = ("run", *EXTRA.get(header, ()))
    wrapper = [(name, f"::rx::{instance}::{name}") for name in names]
    source = str(PACKAGE / header)
    try:
        if importlib.util.find_spec("sglang") is not None:
            from sglang.kernels.jit.utils import get_jit_cuda_arch, load_jit

            found = get_jit_cuda_arch()
            flags = [*ARCH_FLAGS.get(10 * found.major + found.minor, ()), *DEBUG_FLAGS]
            return load_jit(marker, cuda_files=[source], cuda_wrappers=wrapper, extra_cuda_cflags=flags)
        return _load_without_sglang(marker, source, wrapper)
    except BuildError:
        raise
    except Exception as error:
        raise BuildError(f"{header} {instance}: {error}") from error


def _load_without_sglang(marker: str, source: str, wrapper: list[tuple[str, str]]) -> Any:
    import torch
    import tvm_ffi.cpp

    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    if arch not in ARCH_TARGETS:
        raise BuildError(f"sm_{arch}: the kernels are built for {', '.join(f'sm_{a}' for a in ARCH_TARGETS.values())}")
    lines = [f'#include "{source}"', *(f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, ({function}));" for name, function in wrapper)]
    export = "\n".join(lines) + "\n"
    return tvm_ffi.cpp.load_inline(
        marker, cuda_sources=export, extra_cuda_cflags=[*WITHOUT_SGLANG_FLAGS, *_target(arch), *DEBUG_FLAGS]
    )


def _target(arch: int) -> list[str]:
    name = ARCH_TARGETS[arch]
    return [f"-gencode=arch=compute_{name},code=sm_{name}", *ARCH_FLAGS.get(arch, ())]


class Usage(msgspec.Struct, frozen=True):
    """What the assembler says of one kernel: registers a thread, shared memory, stack frame and spills in bytes."""

    kernel: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def cross_compile(header: str, instances: Sequence[str], arch: int) -> list[Usage]:
    """Compile instances for ``arch`` (90, 100, 103) without a GPU and without loading; raises :class:`BuildError`."""
    import tvm_ffi.libinfo

    toolchain = find_toolchain()
    lines = ["#include <tvm/ffi/container/tensor.h>", "#include <tvm/ffi/function.h>", f'#include "{PACKAGE / header}"']
    lines += [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC(run{i}, (::rx::{instance}::run));" for i, instance in enumerate(instances)]
    includes = [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
    with tempfile.TemporaryDirectory() as folder:
        unit = pathlib.Path(folder, "unit.cu")
        unit.write_text("\n".join(lines) + "\n")
        command = [str(toolchain.nvcc), *WITHOUT_SGLANG_FLAGS, *_target(arch), *(f"-I{path}" for path in includes)]
        command += ["-Xptxas=-v", "-cubin", "-o", str(pathlib.Path(folder, "unit.cubin")), str(unit)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{header} for sm_{arch}: " + "\n".join(errors[:10]))
    return _parse_usage(done.stderr)


def _parse_usage(text: str) -> list[Usage]:
    """Read ptxas's report: one block of lines per kernel."""
    found = []
    for block in text.split("Compiling entry function")[1:]:

        def number(pattern: str, block: str = block) -> int:
            return sum(map(int, re.findall(pattern, block)))

        name = re.search(r"'([^']+)'", block)
        found.append(
            Usage(
                name.group(1) if name else "?",
                number(r"Used (\d+) registers"),
                number(r"(\d+) bytes smem"),
                number(r"(\d+) bytes stack frame"),
                number(r"(\d+) bytes spill"),
            )
        )
    return found


def instances(problem: Problem, arch: int) -> dict[str, set[str]]:
    """Header -> instances that serve ``problem`` on ``arch`` with 16-byte aligned tensors, as the wrappers ask for them."""
    from sglang_router_ext.fused import hash_rows, pair, select_plan, single, tensor_pair
    from sglang_router_ext.gate import small_rows, tensor_core
    from sglang_router_ext.selection import warp_select

    vector, wide = problem.experts % 4 == 0, problem.wide
    if problem.hashed:
        return {hash_rows.HEADER: {hash_rows.instance(problem)}}
    kinds = single.FORMATS if problem.slots <= PLAN_SLOTS else ()
    takes = not wide and arch in (TABLE["tensor_core"].archs or ())
    warpgroups = {
        tensor_core.HEADER: {tensor_core.instance(problem.experts)},
        tensor_pair.HEADER: {tensor_pair.instance(problem, vector, kind) for kind in kinds},
    }
    planned = {select_plan.instance(problem, vector, kind) for kind in kinds if kind is not None}
    return (warpgroups if takes else {}) | {
        select_plan.HEADER: planned,
        single.HEADER: {single.instance(problem, vector, kind) for kind in kinds},
        pair.HEADER: {pair.instance(problem, vector)},
        small_rows.HEADER: {small_rows.instance(problem.experts, problem.hidden, wide)},
        warp_select.HEADER: {warp_select.instance(problem, vector)},
    }


def prebuild(arch: int) -> Iterator[str]:
    """Build every catalogue problem's kernels for ``arch``; yields a line for each that is ready.

    Raises :class:`BuildError`. One architecture a process, as SGLang's loader remembers its target.
    """
    from sglang_router_ext.bench.cases import CASES

    wanted: dict[str, set[str]] = {}
    for case in CASES.values():
        for header, some in instances(case.problem, arch).items():
            wanted.setdefault(header, set()).update(some)
    todo = [(header, instance) for header, some in wanted.items() for instance in sorted(some)]
    with target(arch):
        for number, (header, instance) in enumerate(todo, 1):
            load(header, instance)
            yield f"{number} of {len(todo)}: {header} {instance}"


@contextmanager
def target(arch: int) -> Iterator[None]:
    """Let :func:`load` build for ``arch`` instead of the GPU found; one architecture a process, as the loader memoises it."""
    from sglang.kernels.jit.utils import override_jit_cuda_arch

    major, minor = divmod(arch, 10)
    with override_jit_cuda_arch(major, minor):
        yield
