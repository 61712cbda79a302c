"""Patches of SGLang itself, for whoever prefers a patched one to hooks: ``patches/series.toml`` and a diff each. No torch.

A patch is of one SGLang, to the byte: the hash of every file that it changes is known before and after. So the tree itself
says how far a patch is: where it was interrupted, some files have the one hash and some the other, ``look`` calls it partly
applied, and ``apply`` or ``revert`` finishes it. A file with neither hash is never touched.

Originals are kept in ``.sglang-router-ext`` beside SGLang's package until they stand in their place again. Every file changes
whole, by a new one that takes its name: installers that share files of a cache by hard links (uv) keep theirs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from sglang_router_ext.contract import expect
from sglang_router_ext.designs import PACKAGE
from sglang_router_ext.files import write_whole

FOLDER = PACKAGE / "patch_series"
BACKUP = ".sglang-router-ext"
PREFIX = "python/sglang/"
"""Where the package stands in SGLang's repository: the diffs have its paths, for ``git apply --unidiff-zero``."""

APPLIED, NOT_APPLIED, PARTLY = "applied", "not applied", "partly applied"
CHANGED, ANOTHER = "changed tree", "another SGLang version"


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of SGLang."""

    path: str
    """Inside the package."""
    before: str
    """SHA-256 in hex: in the wheel, and with the patch."""
    after: str


class Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="kebab"):
    """One patch; ``NAME.diff`` and ``NAME.md``, the text of its pull request, stand beside the series."""

    name: str
    target: tuple[Target, ...]
    why: str
    test: str
    """A file beside the series that passes with the patch and fails without it."""
    upstream: str
    """Its pull request, if there is one."""
    remove_when: str


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sglang: str
    """The version that the hashes are of."""
    patch: tuple[Patch, ...]


class Tree(NamedTuple):
    """SGLang's package on a disk."""

    root: pathlib.Path
    version: str


class State(msgspec.Struct, frozen=True):
    """How far a patch is in a tree. ``files``: those that speak for ``state``, where not all do."""

    name: str
    state: str
    files: list[str] = []

    def __str__(self) -> str:
        return f"{self.state}: {', '.join(self.files)}" if self.files else self.state


class Change(NamedTuple):
    """What a file becomes."""

    path: pathlib.Path
    old: bytes
    new: bytes


def parse(text: bytes, file: str) -> Series:
    """A series of ``text``; ``file`` names it in errors. Raises :class:`~sglang_router_ext.contract.ContractError`."""
    try:
        series = msgspec.toml.decode(text, type=Series)
    except msgspec.DecodeError as error:  # a ValidationError, of a key, or no TOML at all
        keys = [field.encode_name for kind in (Series, Patch, Target) for field in msgspec.structs.fields(kind)]
        expect(False, file, str(error).replace("\n", " "), ", ".join(keys))
        raise
    names = [patch.name for patch in series.patch]
    seen: dict[str, str] = {}
    for patch in series.patch:
        where = f"{file}: {patch.name}"
        expect(names.count(patch.name) == 1 and patch.name.isidentifier(), f"{file}: name", patch.name, "an identifier, once")
        expect(bool(patch.target), f"{where}: target", "none", "one file or more")
        for target in patch.target:
            for key, value in (("before", target.before), ("after", target.after)):
                expect(bool(re.fullmatch("[0-9a-f]{64}", value)), f"{where}: {key}", value, "64 hex digits")
            inside = ".." not in pathlib.PurePosixPath(target.path).parts and not target.path.startswith("/")
            expect(inside and target.path not in seen, f"{where}: path", target.path, "a file of the package, in one patch")
            seen[target.path] = patch.name
    return series


@functools.cache
def series() -> Series:
    """The series of this package."""
    file = FOLDER / "series.toml"
    return parse(file.read_bytes(), file.name)


def pick(names: Sequence[str] | None = None) -> list[Patch]:
    """The patches ``names``, or all, in the order of the series. Raises ContractError for an unknown name."""
    known = [patch.name for patch in series().patch]
    for name in names or ():
        expect(name in known, "patch", name, " | ".join(known))
    return [patch for patch in series().patch if not names or patch.name in names]


def find_tree(folder: pathlib.Path | None = None) -> Tree:
    """SGLang's package in ``folder``, which is it or has it, or the one that this Python would import; imports nothing."""
    allowed = "SGLang's package, or a folder with it"
    if folder is None:
        spec = importlib.util.find_spec("sglang")
        expect(spec is not None and bool(spec.submodule_search_locations), "target", "no SGLang in this environment", allowed)
        assert spec is not None and spec.submodule_search_locations is not None
        folder = pathlib.Path(next(iter(spec.submodule_search_locations)))
    root = next((place.resolve() for place in (folder, folder / "sglang") if (place / "srt").is_dir()), None)
    expect(root is not None, "target", folder, allowed)
    assert root is not None
    file = root / "_version.py"
    found = re.search(r"^__version__ = .*['\"]([^'\"]+)['\"]$", file.read_text() if file.is_file() else "", re.MULTILINE)
    return Tree(root, found[1] if found else "of an unknown version")


def look(patch: Patch, tree: Tree) -> State:
    """How far ``patch`` is in ``tree``; reads every file that it changes."""
    if tree.version != series().sglang:
        return State(patch.name, ANOTHER, [tree.version])
    found = {target: _digest(tree.root / target.path) for target in patch.target}
    strange = [target.path for target, digest in found.items() if digest not in (target.before, target.after)]
    if strange:
        return State(patch.name, CHANGED, strange)
    done = [target.path for target, digest in found.items() if digest == target.after]
    if done and len(done) < len(found):
        return State(patch.name, PARTLY, done)
    return State(patch.name, APPLIED if done else NOT_APPLIED)


def apply(patches: Iterable[Patch], tree: Tree, *, dry_run: bool = False) -> list[Change]:
    """Apply ``patches``, whatever of them is not applied yet, and return what that changed, or would change.

    Raises ContractError, with nothing changed, for a tree that is not the one that the patches are of or cannot be written.
    """
    changes = []
    for target, diff in _targets(patches, tree):
        path = tree.root / target.path
        old = path.read_bytes()
        if _sha(old) != target.after:
            changes.append(Change(path, old, _patched(old, diff, target.after)))
    _check_writable(changes, tree)
    if not dry_run:
        for change in changes:
            kept = _backup(change.path, tree)
            write_whole(kept, change.old)
            for made in (kept, *kept.parents):
                if made == tree.root.parent:
                    break
                _own(made, tree.root.parent.stat())
        _write(changes)
    return changes


def revert(patches: Iterable[Patch], tree: Tree, *, dry_run: bool = False) -> list[Change]:
    """The opposite of :func:`apply`: originals from their backup or, where that is gone, from the diff, verified either way."""
    changes = []
    for target, diff in _targets(patches, tree):
        path = tree.root / target.path
        old = path.read_bytes()
        if _sha(old) != target.before:
            kept = _backup(path, tree)
            whole = _digest(kept) == target.before
            changes.append(Change(path, old, kept.read_bytes() if whole else _patched(old, diff, target.before, back=True)))
    _check_writable(changes, tree)
    if not dry_run:
        _write(changes)
        _forget_backups(tree)
    return changes


def _targets(patches: Iterable[Patch], tree: Tree) -> list[tuple[Target, list[Hunk]]]:
    """The files of ``patches`` and what changes in them, once nothing speaks against any."""
    found = []
    for patch in patches:
        state = look(patch, tree)
        wanted = f"SGLang {series().sglang} as its wheel has it, or as `patches apply` left it"
        expect(state.state in (APPLIED, NOT_APPLIED, PARTLY), f"{tree.root}: {patch.name}", state, wanted)
        diff = parse_diff((FOLDER / f"{patch.name}.diff").read_bytes(), f"{patch.name}.diff")
        named = {target.path for target in patch.target}
        expect(diff.keys() == named, f"{patch.name}.diff", ", ".join(diff), f"the files of the series: {', '.join(named)}")
        found += [(target, diff[target.path]) for target in patch.target]
    return found


# ------------------------------------------------------------------------------------------------------------------- diffs


class Hunk(NamedTuple):
    """Lines that take the place of others: the number of the first of either (or of the line before, where there are none)."""

    start: int
    old: list[bytes]
    new_start: int
    new: list[bytes]


def parse_diff(text: bytes, file: str) -> dict[str, list[Hunk]]:
    """Path inside the package -> hunks, of a unified diff without context. Raises ContractError naming ``file`` and line."""
    found: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] = []
    for number, line in enumerate(text.decode().splitlines(), 1):
        where = f"{file}:{number}"
        head = re.fullmatch(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@", line)
        if line.startswith(f"+++ b/{PREFIX}"):
            hunks = found.setdefault(line.removeprefix(f"+++ b/{PREFIX}"), [])
        elif head:
            hunks.append(Hunk(int(head[1]), [], int(head[2]), []))
        elif not line.startswith(f"--- a/{PREFIX}"):
            fits = line[:1] in ("-", "+") and bool(hunks)
            expect(fits, where, repr(line), f"a diff of {PREFIX} without context: ---, +++, @@, and lines with - or +")
            (hunks[-1].old if line[0] == "-" else hunks[-1].new).append(line[1:].encode())
    return found


def _patched(data: bytes, hunks: list[Hunk], wanted: str, *, back: bool = False) -> bytes:
    """``data`` with ``hunks``, or without them again. Raises ContractError unless the hash of the result is ``wanted``."""
    if back:
        hunks = [Hunk(hunk.new_start, hunk.new, hunk.start, hunk.old) for hunk in hunks]
    lines = data.split(b"\n")
    for hunk in reversed(hunks):  # from the end, so that the numbers before it stay true
        first = hunk.start - 1 if hunk.old else hunk.start
        expect(lines[first : first + len(hunk.old)] == hunk.old, f"diff, line {hunk.start}", "other lines", "those of the file")
        lines[first : first + len(hunk.old)] = hunk.new
    result = b"\n".join(lines)
    expect(_sha(result) == wanted, "diff", f"a file of hash {_sha(result)[:12]}", f"{wanted[:12]}, as the series says")
    return result


# ------------------------------------------------------------------------------------------------------------------- files


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(path: pathlib.Path) -> str | None:
    try:
        return _sha(path.read_bytes()) if path.is_file() else None
    except OSError as error:
        expect(False, "target", f"{path}: {error.strerror}", "a file that can be read")
        raise


def _backup(path: pathlib.Path, tree: Tree) -> pathlib.Path:
    return tree.root.parent / BACKUP / path.relative_to(tree.root.parent)


def _check_writable(changes: list[Change], tree: Tree) -> None:
    """Refuse before anything is written what could not be written."""
    for path in (change.path for change in changes):
        expect(path.resolve() == path, "target", f"{path}, behind a symbolic link", "an installation that owns its files")
    kept = tree.root.parent / BACKUP
    real = not kept.is_symlink() and (kept.is_dir() or not kept.exists())
    expect(real or not changes, "target", f"{kept}, which is no folder", "one for the originals, or nothing there")
    folders = [change.path.parent for change in changes] + [tree.root.parent] * bool(changes)
    compiled = [folder / "__pycache__" for folder in folders]
    below = [pathlib.Path(where) for where, _, _ in os.walk(kept)] if changes else []
    for folder in dict.fromkeys([*folders, *(folder for folder in compiled if folder.exists()), *below]):
        allowed = "a folder that this user may write to (an environment of your own, or its owner)"
        expect(os.access(folder, os.W_OK), "target", f"{folder}, without the permission to write there", allowed)


def _write(changes: list[Change]) -> None:
    """All of ``changes``; the old files again where one cannot be written."""
    done: list[Change] = []
    try:
        for change in changes:
            done.append(change)
            _put(change.path, change.new)
    except BaseException:
        for change in done:
            _put(change.path, change.old)
        raise


def _put(path: pathlib.Path, data: bytes) -> None:
    """``data`` in ``path``, whose it was and as it was allowed, and nothing that Python compiled from it before."""
    was = path.stat()
    if path.read_bytes() != data:
        write_whole(path, data)
        path.chmod(stat.S_IMODE(was.st_mode))
        _own(path, was)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _own(path: pathlib.Path, like: os.stat_result) -> None:
    """Root leaves files to whom they were, who could not revert otherwise."""
    if os.geteuid() == 0:
        os.chown(path, like.st_uid, like.st_gid)


def _forget_backups(tree: Tree) -> None:
    """Remove the backups of files that are the originals again, and the folder once it is empty."""
    folder = tree.root.parent / BACKUP
    for target in (target for patch in series().patch for target in patch.target):
        kept = _backup(tree.root / target.path, tree)
        if _digest(tree.root / target.path) == target.before:
            kept.unlink(missing_ok=True)
    for below, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # not empty, or another process was first
            os.rmdir(below)
