"""Designs under compute-sanitizer: no access out of bounds, no race in shared memory. Needs a GPU and a CUDA toolkit."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from sglang_router_ext import build

LAUNCHES = """
import sys, torch
from sglang_router_ext import build
build.DEBUG_FLAGS = tuple(sys.argv[1:])
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.inputs import random_inputs
from sglang_router_ext.bench.launch import launch
from sglang_router_ext.contract import PlanForm
from sglang_router_ext.designs import TABLE
problem = CASES["glm-5.3-flash"].problem
half = problem.experts // 2
forms = (
    None,
    PlanForm(kind="aligned", block=16),
    PlanForm(kind="aligned", block=8, first_local=half, locals=half),
    PlanForm(kind="tiles", block=8),
)
hashed = CASES["deepseek-v4-hash"].problem
for rows in (1, 3, 8, 16, 40, 96, 700, 1100, 3000):
    inputs = random_inputs(problem, rows, device="cuda")
    for name in ("single", "tensor_pair", "select_plan"):
        for form in forms if rows in TABLE[name].rows else ():
            if form is not None or name != "select_plan":
                launch(TABLE[name], problem, inputs, form)
    launch(TABLE["tensor_core"], problem, inputs)
    if rows <= 16:
        launch(TABLE["pair"], problem, inputs)
        launch(TABLE["hash_rows"], hashed, random_inputs(hashed, rows, device="cuda"))
    torch.cuda.synchronize()
print("launched")
"""


@pytest.mark.parametrize(("tool", "flags"), [("memcheck", ()), ("racecheck", ("-DRX_RACECHECK",))])
def test_no_fault_is_found(tool: str, flags: tuple[str, ...]) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(build.find_toolchain().home / "bin" / "compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer: a CUDA toolkit has it, pip's compiler does not")
    build_first = [sys.executable, "-c", LAUNCHES, *flags]
    subprocess.run(build_first, check=True, capture_output=True, timeout=600)  # the compiler runs without the tool
    command = [sanitizer, "--tool", tool, "--error-exitcode", "7", *build_first]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "launched" in done.stdout
