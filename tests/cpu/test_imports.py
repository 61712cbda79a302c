"""What may import what, and what stands in the sources at all."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "sglang_router_ext"
SOURCES = sorted(PACKAGE.rglob("*.py"))

LIGHT = (
    "sglang_router_ext",
    *(f"sglang_router_ext.{name}" for name in ("cli", "designs", "choose", "demo", "plugin.entry", "readme")),
)
"""SGLang imports the entry point in processes that never touch a GPU, and the command line answers without a wait."""

KNOWS_SGLANG = ("plugin/", "demo/", "build.py", "doctor.py", "bench/peers.py")
"""The only places that import SGLang: the plugin, its demonstration and diagnosis, SGLang's compiler, and the peers."""

READS_ENVIRONMENT = (
    *("settings.py", "build.py", "doctor.py"),
    *("gate/split_gemm.py", "selection/triton_select.py", "bench/machine.py"),
)
"""Our own variables are read in settings.py alone; the others ask where the compiler and the cache are, which plugins SGLang is
to load, how Triton runs, and of which commit a copy is."""

LONGEST = {".py": 400, ".cuh": 600}

MACHINE_PATHS = re.compile(r"(?<![\w.}~])/(home|root|work|Users|mnt|data|workspace)/\w")


def imported(file: pathlib.Path) -> set[str]:
    """Names of every module that ``file`` imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def place(file: pathlib.Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_neither_torch_nor_sglang(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'sglang', 'triton', 'matplotlib'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("file", SOURCES, ids=place)
def test_sglang_is_imported_where_it_is_known(file: pathlib.Path) -> None:
    knows = any(module == "sglang" or module.startswith("sglang.") for module in imported(file))
    assert not knows or place(file).startswith(KNOWS_SGLANG)


@pytest.mark.parametrize("name", ["reference.py", "agreement.py", "contract.py", "designs.py", "choose.py"])
def test_the_judges_import_no_kernel_and_no_dispatcher(name: str) -> None:
    judged = ("gate", "selection", "fused", "route", "build", "plugin", "bench")
    assert not {module for module in imported(PACKAGE / name) if module.removeprefix("sglang_router_ext.").startswith(judged)}


@pytest.mark.parametrize("file", SOURCES, ids=place)
def test_settings_are_read_in_one_place(file: pathlib.Path) -> None:
    names = re.findall(r"(?:environ\.get\(|environ\[|getenv\()\s*([^)\]]*)", file.read_text())
    assert not names or place(file) in READS_ENVIRONMENT
    assert place(file) == "settings.py" or not any("SGLANG_ROUTER_EXT" in name for name in names)


@pytest.mark.parametrize("file", sorted(file for file in PACKAGE.rglob("*.*") if file.suffix in LONGEST), ids=place)
def test_files_stay_short(file: pathlib.Path) -> None:
    assert len(file.read_text().splitlines()) <= LONGEST[file.suffix]


def texts() -> list[pathlib.Path]:
    """Every text file of the repository that people wrote."""
    folders = [PACKAGE, ROOT / "tests", ROOT / "launch_configs", ROOT / "patches", ROOT / ".ci"]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    files += [file for file in ROOT.iterdir() if file.is_file()]
    return sorted(file for file in files if file.suffix not in (".pyc", ".jsonl") and file != pathlib.Path(__file__))


@pytest.mark.parametrize("file", texts(), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_path_of_one_machine(file: pathlib.Path) -> None:
    assert not MACHINE_PATHS.search(file.read_text(errors="replace"))
