"""Patches tried on a copy of SGLang: applied, their own tests run, taken back, every byte compared."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

import msgspec

from sglang_router_ext import patches as patching
from sglang_router_ext.patches import APPLIED, PARTLY, Patch, Tree, apply, look, revert

TEST_SECONDS = 300


class Checked(msgspec.Struct, frozen=True):
    """A patch that was tried on a copy."""

    name: str
    passed: bool
    """Its test, with the patch applied."""
    identical: bool
    """The copy after ``revert``, to the byte."""
    output: str


def check(patches: Sequence[Patch], tree: Tree, say: Callable[[str], None] = lambda text: None) -> list[Checked]:
    """Try each of ``patches`` on a copy of ``tree`` without any: apply it, run its test, revert it, compare every byte."""
    with tempfile.TemporaryDirectory() as folder:
        trials: list[tuple[Patch, Tree, dict[str, bytes], subprocess.Popen[str]]] = []
        try:
            for patch in patches:
                copy = copy_of(tree, pathlib.Path(folder).resolve() / patch.name / "sglang")
                before = _contents(copy)
                apply([patch], copy)
                trials.append((patch, copy, before, run_test(patch, copy)))
                say(f"{patch.name}: applied to a copy, its test runs")
            return [_judged(*trial) for trial in trials]
        finally:
            for *_, process in trials:
                process.kill()
                process.wait()


def run_test(patch: Patch, tree: Tree) -> subprocess.Popen[str]:
    """The test of ``patch`` in a process that imports SGLang from ``tree``."""
    path = os.pathsep.join([str(tree.root.parent), *sys.path[1:]])
    return subprocess.Popen(
        [
            sys.executable,
            "-B",
            str(patching.FOLDER / patch.test),
        ],  # -B: a linked folder is the original's, with what is compiled there
        cwd=tree.root.parent,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def copy_of(tree: Tree, root: pathlib.Path) -> Tree:
    """``tree`` without patches in the new folder ``root``: files that patches change are copied, all others are links."""
    files = {tree.root / target.path for patch in patching.series().patch for target in patch.target}
    _link(tree.root, root, files)
    copy = Tree(root, tree.version)
    revert([patch for patch in patching.series().patch if look(patch, copy).state in (APPLIED, PARTLY)], copy)
    return copy


def _judged(patch: Patch, copy: Tree, before: dict[str, bytes], process: subprocess.Popen[str]) -> Checked:
    try:
        output, _ = process.communicate(timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output = f"not done within {TEST_SECONDS} s"
        process.communicate()
    revert([patch], copy)
    return Checked(patch.name, process.returncode == 0, _contents(copy) == before, output)


def _link(source: pathlib.Path, folder: pathlib.Path, files: set[pathlib.Path]) -> None:
    folder.mkdir(parents=True)
    for entry in source.iterdir():
        if entry in files:
            shutil.copyfile(entry, folder / entry.name)
        elif entry.name == "__pycache__" or any(entry in file.parents for file in files):
            _link(entry, folder / entry.name, files)
        else:
            (folder / entry.name).symlink_to(entry)


def _contents(tree: Tree) -> dict[str, bytes]:
    """All that is no link, in and beside a copy of ``tree``."""
    found = (path for path in tree.root.parent.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path): path.read_bytes() for path in found}
