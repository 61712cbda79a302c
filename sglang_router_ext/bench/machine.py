"""What a result must say about the machine it came from: GPU, clocks, driver, library versions, commit."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from sglang_router_ext import __version__
from sglang_router_ext.contract import Gpu
from sglang_router_ext.designs import PACKAGE

LIBRARIES = {
    "sglang": "sglang",
    "torch": "torch",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "sgl_kernel": "sglang-kernel",
}
"""Import name -> distribution name."""


def gpu(index: int | None = None) -> Gpu | None:
    """The CUDA GPU ``index`` (None: the current one), or None where there is none. AMD's do not count. Imports torch."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(index)
    return Gpu(found.name, 10 * found.major + found.minor, found.multi_processor_count)


def system() -> str:
    """The operating system: its distribution, where it says so, kernel and C library. Not the machine's name."""
    distribution = ""
    with contextlib.suppress(OSError):
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"] + ", "
    return distribution + platform.platform()


def gpus() -> int:
    """How many CUDA GPUs this process sees. Imports torch."""
    import torch

    return torch.cuda.device_count() if gpu() is not None else 0


@contextlib.contextmanager
def tf32(*, allowed: bool) -> Iterator[None]:
    """Inside, PyTorch's GEMMs of fp32 on a GPU round their operands to TF32, or do not."""
    import torch

    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def versions() -> dict[str, str | None]:
    """Version of this package, of each of :data:`LIBRARIES`, of PyTorch's CUDA and of the driver; None: not installed."""
    found: dict[str, str | None] = {"sglang-router-ext": __version__}
    for name, distribution in LIBRARIES.items():
        found[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    found["cuda"] = _torch_cuda()
    found["driver"] = _query("driver_version")
    return found


def _torch_cuda() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def clocks() -> dict[str, int | None]:
    """Clocks at this moment: ``sm_mhz`` and ``memory_mhz``; None where neither NVML nor nvidia-smi tells."""
    names = ("sm_mhz", "memory_mhz")
    found = _nvml_clocks()
    if found is None:
        text = _query("clocks.sm,clocks.mem")
        parts = text.split(",") if text else []
        found = [int(part.split()[0]) for part in parts] if len(parts) == 2 else None
    return dict(zip(names, found, strict=True)) if found else dict.fromkeys(names)


def _nvml_clocks() -> list[int] | None:
    try:
        import torch

        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        handle = _nvml_handle(pynvml, torch.cuda.current_device())
        return [pynvml.nvmlDeviceGetClockInfo(handle, kind) for kind in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)]
    except Exception:  # no NVML, no driver, or a driver that hides its clocks: the caller has another way to ask
        return None


def _nvml_handle(pynvml: Any, index: int) -> Any:
    """NVML counts all GPUs, PyTorch those of CUDA_VISIBLE_DEVICES, so the device is found by its UUID."""
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def _query(fields: str) -> str | None:
    """First line of nvidia-smi's answer, or None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def commit() -> str:
    """Hash of the checkout that this package runs from.

    Where there is none without changes (other than records), it is that of ``GIT_COMMIT``, else ``dirty`` or ``unknown``.
    """
    found = checkout()
    if found is None:
        return os.environ.get("GIT_COMMIT", "unknown")
    head, changed = found
    return os.environ.get("GIT_COMMIT", "dirty") if changed else head


def checkout() -> tuple[str, bool] | None:
    """Hash of the checkout that this package runs from, and whether it has changes (other than records); None: it is none."""
    root = PACKAGE.parent
    if shutil.which("git") is None or not (root / ".git").exists():
        return None

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)

    changes = git("status", "--porcelain", "--", ".", f":!{PACKAGE.name}/records")
    head = git("rev-parse", "HEAD")
    if changes.returncode or head.returncode:
        return None
    return head.stdout.strip(), bool(changes.stdout.strip())
