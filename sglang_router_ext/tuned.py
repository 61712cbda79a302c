"""The table that ``sglang-router-ext tune`` writes: bands that were measured on a user's own GPU. Imports no torch.

One JSON file for each GPU, in the user's configuration, where it outlives every cache; ``SGLANG_ROUTER_EXT_TABLE`` names
another one. A file speaks for one GPU, and of each shape for the designs' sources, the SGLang and the PyTorch that it was
measured with. One that is of others, or that cannot be read, is never used, nor a part of it: at the default place it is left
out and said to be stale, and a server that was told its name does not start (``plugin/preflight.py``).

A shape is a problem without what costs no time: how weights are scaled, and the slots of fused shared experts, which no one can
tell from a checkpoint before SGLang has decided to fuse them.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from sglang_router_ext import __version__, settings
from sglang_router_ext.bench.races import Race, Time, race, races_alone
from sglang_router_ext.bench.record import now
from sglang_router_ext.choose import Tuned
from sglang_router_ext.contract import Gpu, Problem, expect
from sglang_router_ext.designs import TABLE, Design, Rows
from sglang_router_ext.files import write_whole

SAME_SPEED = {"renormalize": True, "scale": 1.0, "nan_first": False, "shared": 0, "shared_weight": 1.0}
"""Fields of a problem that no kernel takes another time for, or a few nanoseconds."""
MATTERS = ("sglang", "torch")
"""Versions of which a table is: the one has SGLang's side of the race, the other cuBLAS."""
AGAIN = "run sglang-router-ext tune"


class TableError(ValueError):
    """A file is no table; the text names it and says why."""


class Bands(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One design of a shape: its sources when it was timed, and where it was fastest."""

    source_hash: str
    bands: tuple[Rows, ...] = ()
    """Where the experts take a plan."""
    bands_without_plan: tuple[Rows, ...] = ()


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured for one shape."""

    name: str
    """Of the case or model that was asked for."""
    time: str
    """UTC, ISO 8601."""
    problem: Problem
    rows: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    """The row counts that were timed, or tried."""
    designs: dict[str, Bands]
    """Every design that raced, those without bands too."""
    races: tuple[Race, ...]
    races_without_plan: tuple[Race, ...]

    def stale(self, designs: Mapping[str, Design] = TABLE) -> list[str]:
        """Why this is not of today's kernels; empty: it is."""
        found = []
        for name, one in self.designs.items():
            if name not in designs:
                found.append(f"there is no design {name} any more")
            elif designs[name].source_hash != one.source_hash:
                found.append(f"design {name} changed")
        return found

    @property
    def tuned(self) -> Tuned:
        """As ``choose`` takes it."""
        return Tuned(
            bands=tuple((name, one.bands) for name, one in self.designs.items() if one.bands),
            bands_without_plan=tuple((n, one.bands_without_plan) for n, one in self.designs.items() if one.bands_without_plan),
            last=max(self.rows),
        )


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file."""

    schema: Literal[1] = 1
    time: str
    """When it was last written, UTC, ISO 8601."""
    gpu: str
    """As the driver names it."""
    processors: int | None
    """Its multiprocessors: a part of a GPU is another GPU."""
    versions: dict[str, str | None]
    shapes: tuple[Shape, ...]

    def against(self, gpu: Gpu | None) -> list[str]:
        """Every reason not to use this on ``gpu`` (None: whatever it is) today; empty: it may be."""
        found = []
        if gpu is not None and gpu.name != self.gpu:
            found.append(f"it is of {self.gpu}, not of {gpu.name}")
        elif gpu is not None and None not in (gpu.processors, self.processors) and gpu.processors != self.processors:
            found.append(f"it is of {self.processors} multiprocessors, not of {gpu.processors}")
        now = versions()
        changed = [f"{name} was {self.versions.get(name)}, is {now[name]}" for name in MATTERS]
        found += [text for name, text in zip(MATTERS, changed, strict=True) if self.versions.get(name) != now[name]]
        return found + list(dict.fromkeys(text for shape in self.shapes for text in shape.stale()))

    def shape(self, problem: Problem) -> Shape | None:
        """The one that speaks of ``problem``, which has the logits of the model's own gate."""
        wanted = shape_of(problem)
        return next((shape for shape in self.shapes if shape.problem == wanted), None)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A file where the plugin looks, and whether it may be used."""

    path: str
    named: bool
    """By ``SGLANG_ROUTER_EXT_TABLE``."""
    digest: str = ""
    """Of the file's bytes, so that several machines' can be compared."""
    table: Table | None = None
    against: tuple[str, ...] = ()
    """Why it is not used; empty: it is in force."""

    def __str__(self) -> str:
        gpu = "?" if self.table is None else self.table.gpu
        if self.table is not None and not self.against:
            count = len(self.table.shapes)
            return f"tuned table of {gpu} is in force: {count} shape{'s' * (count != 1)}, {self.where}, {self.digest}"
        what = f"tuned table of {gpu} is stale" if self.table is not None else "tuned table is not used"
        return f"{what}: {'; '.join(self.against)}; {AGAIN} ({self.where})"

    @property
    def where(self) -> str:
        return f"{settings.TABLE}={self.path}" if self.named else self.path

    def tuned(self, problem: Problem) -> Tuned | None:
        """The bands of ``problem``, if this is in force and speaks of it; None: those of the package."""
        shape = self.table.shape(problem) if self.table is not None and not self.against else None
        return None if shape is None else shape.tuned


def versions() -> dict[str, str | None]:
    """Of this package and of what :data:`MATTERS`; None: not installed."""
    found: dict[str, str | None] = {"sglang-router-ext": __version__}
    for name in MATTERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def shape_of(problem: Problem) -> Problem:
    """``problem`` as tables know it."""
    return msgspec.structs.replace(problem, **SAME_SPEED)


def default_path(gpu: str) -> pathlib.Path:
    """Where ``tune`` puts the table of the GPU that the driver calls ``gpu``, if it is told nothing else."""
    return settings.config_dir() / "tables" / (re.sub(r"\W+", "-", gpu.lower()).strip("-") + ".json")


def place(gpu: str) -> pathlib.Path:
    """Where the plugin looks for the table of ``gpu``; with ``off``, where it would."""
    asked = settings.read().table
    return default_path(gpu) if asked in ("auto", "off") else pathlib.Path(asked)


def read(path: pathlib.Path) -> tuple[Table, str]:
    """The table in ``path`` and its digest. Raises :class:`TableError`."""
    try:
        data = path.read_bytes()
        return msgspec.json.decode(data, type=Table), hashlib.sha256(data).hexdigest()[:12]
    except OSError as error:
        raise TableError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # MsgspecError and ContractError are ValueErrors
        raise TableError(f"{path}: not a table of this version's: {error}") from error


def look(path: pathlib.Path, gpu: Gpu | None, *, named: bool) -> Found:
    """What stands in ``path``, judged for ``gpu``."""
    try:
        table, digest = read(path)
    except TableError as error:
        return Found(path=str(path), named=named, against=(str(error),))
    return Found(path=str(path), named=named, digest=digest, table=table, against=tuple(table.against(gpu)))


def find(gpu: Gpu | None) -> Found | None:
    """The table for ``gpu``, good or not; None where there is none, or none is wanted. A named file is always judged."""
    asked = settings.read().table
    if asked not in ("auto", "off"):
        return look(pathlib.Path(asked), gpu, named=True)
    if asked == "off" or gpu is None or not os.path.lexists(default_path(gpu.name)):
        return None
    return look(default_path(gpu.name), gpu, named=False)


def find_all() -> list[Found]:
    """Every table that some GPU here could get, without asking which GPU that is."""
    asked = settings.read().table
    if asked == "off":
        return []
    if asked != "auto":
        return [look(pathlib.Path(asked), None, named=True)]
    return [look(path, None, named=False) for path in sorted((settings.config_dir() / "tables").glob("*.json"))]


def measured(name: str, problem: Problem, times: Sequence[Time], rows: Iterable[int]) -> Shape:
    """The bands that ``times`` at ``rows`` show for ``problem``, which is called ``name``."""
    rows, rounded = tuple(sorted(set(rows))), problem.logits_dtype == "bfloat16"
    planned, alone = (race(times, rows, plan=plan, rounded=rounded) for plan in (True, False))
    raced = {part for time in times if time.ours and races_alone(time.design) for part in time.design.split("+")}
    return Shape(
        name=name,
        time=now(),
        problem=shape_of(problem),
        rows=rows,
        designs={
            design.name: Bands(
                source_hash=design.source_hash,
                bands=planned.bands.get(design.name, ()),
                bands_without_plan=alone.bands.get(design.name, ()),
            )
            for design in TABLE.values()
            if design.name in raced
        },
        races=planned.races,
        races_without_plan=alone.races,
    )


def age(time: str) -> str:
    """Since ``time``, in words."""
    try:
        days = (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(time)).days
    except (ValueError, TypeError):  # no time, or one without a zone
        return f"of {time}"
    return "of today" if days <= 0 else f"{days} day{'s' * (days != 1)} old"


def check_writable(path: pathlib.Path, gpu: Gpu) -> Table | None:
    """The table that stands in ``path`` already, stale or not. Raises ContractError where :func:`write` must not or could not
    put one there, so that no measurement ends with that.
    """
    older = None
    if os.path.lexists(path):
        try:
            older, _ = read(path)
        except TableError as error:
            expect(False, "output", str(error), "a file that tune wrote, or none: tune --remove takes this one away")
        allowed = f"a file of {gpu.name}, or none"
        expect(older is not None and older.gpu == gpu.name, "output", f"{path}, which is of another GPU", allowed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        expect(False, "output", f"{path}: {error.strerror}", "a file in a folder that can be written")
    return older


def merged(older: Table | None, gpu: Gpu, shapes: Iterable[Shape]) -> Table:
    """``shapes`` on ``gpu``, and those of ``older`` that were measured with the same versions and sources and not again."""
    new = tuple(shapes)
    again = {shape.problem for shape in new}
    fits = older is not None and all(older.versions.get(name) == versions()[name] for name in MATTERS)
    fits = fits and older is not None and older.processors == gpu.processors
    kept = older.shapes if fits and older is not None else ()
    kept = tuple(shape for shape in kept if shape.problem not in again and not shape.stale())
    return Table(time=now(), gpu=gpu.name, processors=gpu.processors, versions=versions(), shapes=(*kept, *new))


def write(table: Table, path: pathlib.Path) -> None:
    """Put ``table`` into ``path``, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
