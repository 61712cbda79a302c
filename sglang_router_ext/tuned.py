"""The table that ``sglang-router-ext tune`` writes: bands that were measured on a user's own GPU. Imports no torch.

One JSON file for each GPU, in the user's configuration, where it outlives every cache; ``SGLANG_ROUTER_EXT_TABLE`` names
another one. A file speaks for one GPU, and of each shape for the designs' sources, the SGLang and the PyTorch that it was
measured with. One that is of others, or that cannot be read, is never used, nor a part of it: at the default place it is left
out and said to be stale, and a server that was told its name does not start (``plugin/preflight.py``). What a file says of a
shape holds from the smallest to the largest row count that was measured; for others the package's bands do.

A shape is a problem without what costs no time: how weights are scaled, and the slots of fused shared experts, which no one can
tell from a checkpoint before SGLang has decided to fuse them.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from sglang_router_ext import __version__, settings
from sglang_router_ext.bench.races import Race, Time, race, races_alone
from sglang_router_ext.bench.record import now
from sglang_router_ext.choose import Tuned
from sglang_router_ext.contract import Gpu, Problem, expect
from sglang_router_ext.designs import TABLE, Design, Rows
from sglang_router_ext.files import read_regular, write_whole

SAME_SPEED = {"renormalize": True, "scale": 1.0, "nan_first": False, "shared": 0, "shared_weight": 1.0}
"""Fields of a problem that no kernel takes another time for, or a few nanoseconds."""
MATTERS = ("sglang", "torch")
"""Versions of which a table is: the one has SGLang's side of the race, the other cuBLAS."""
AGAIN = "run sglang-router-ext tune"
WRITABLE = "a file in a folder that can be written"


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
    rows: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1)], ...], msgspec.Meta(min_length=1)]
    """The row counts that were timed, or tried, in ascending order."""
    designs: dict[str, Bands]
    """Every design that raced, those without bands too."""
    races: tuple[Race, ...]
    races_without_plan: tuple[Race, ...]

    def __post_init__(self) -> None:
        expect(self.rows == tuple(sorted(set(self.rows))), "rows", list(self.rows), "each once, in ascending order")
        for field, races in (("races", self.races), ("races_without_plan", self.races_without_plan)):
            got = tuple(race.rows for race in races)
            expect(got == self.rows, field, f"those of rows {list(got)}", f"one for each of rows {list(self.rows)}")
        for name, one in self.designs.items():
            for field, bands in (("bands", one.bands), ("bands_without_plan", one.bands_without_plan)):
                for band in bands:
                    fits = band.last is not None and self.span.first <= band.first <= band.last <= (self.span.last or 0)
                    allowed = f"first to last, within {self.span}, which was measured"
                    expect(fits, f"{field} of {name}", f"{band.first} to {band.last}", allowed)

    @property
    def span(self) -> Rows:
        """The row counts that this speaks of."""
        return Rows(self.rows[0], self.rows[-1])

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
            rows=self.span,
        )


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file."""

    schema: Literal[1] = 1
    time: str
    """When it was last written, UTC, ISO 8601."""
    gpu: str
    """As the driver names it."""
    processors: Annotated[int, msgspec.Meta(ge=1)] | None
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


def folder() -> pathlib.Path:
    """Where the tables of all GPUs are, if nothing else is said."""
    return settings.config_dir() / "tables"


def default_path(gpu: str) -> pathlib.Path:
    """Where ``tune`` puts the table of the GPU that the driver calls ``gpu``, if it is told nothing else."""
    return folder() / (re.sub(r"\W+", "-", gpu.lower()).strip("-") + ".json")


def named_path() -> pathlib.Path | None:
    """The file that ``SGLANG_ROUTER_EXT_TABLE`` names, if it names one."""
    asked = settings.read().table
    return None if asked in ("auto", "off") else pathlib.Path(asked)


def place(gpu: str) -> pathlib.Path:
    """Where the plugin looks for the table of ``gpu``; with ``off``, where it would."""
    return named_path() or default_path(gpu)


def read(path: pathlib.Path) -> tuple[Table, str]:
    """The table in ``path`` and its digest. Raises :class:`TableError`."""
    try:
        data = read_regular(path)
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
    named = named_path()
    if named is not None:
        return look(named, gpu, named=True)
    if settings.read().table == "off" or gpu is None or not os.path.lexists(default_path(gpu.name)):
        return None
    return look(default_path(gpu.name), gpu, named=False)


def find_all() -> list[Found]:
    """Every table that some GPU here could get, without asking which GPU that is."""
    named = named_path()
    if named is not None:
        return [look(named, None, named=True)]
    off = settings.read().table == "off"
    return [] if off else [look(path, None, named=False) for path in sorted(folder().glob("*.json"))]


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


@contextlib.contextmanager
def refusing(argument: str, path: pathlib.Path) -> Iterator[None]:
    """What the system says against ``path``, as what is said against ``argument``, which named it."""
    try:
        yield
    except OSError as error:
        expect(False, argument, f"{path}: {error.strerror or error}", WRITABLE)


def check_folder(path: pathlib.Path, argument: str) -> None:
    """Raises ContractError, by ``argument``, unless files can be made in the folder ``path``, which is made too."""
    with refusing(argument, path):
        with contextlib.suppress(FileExistsError):  # a file: said better below
            path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


def check_writable(path: pathlib.Path, argument: str, gpu: Gpu | None = None) -> Table | None:
    """The table that stands in ``path`` already, stale or not. Raises ContractError, by ``argument``, where :func:`write` must
    not or could not put that of ``gpu`` (None: of any) there, so that no measurement ends with that.
    """
    target = pathlib.Path(os.path.realpath(path))  # what is written, if path is a link
    check_folder(target.parent, argument)
    older = None
    try:
        with refusing(argument, path), contextlib.suppress(FileNotFoundError):
            target.lstat()  # also fails for a name that is too long
            older, _ = read(target)
    except TableError as error:
        way = f": tune --remove --output {path} takes this one away" * (not not_removable(path))
        expect(False, argument, error, f"a file that tune wrote, or none{way}")
    if older is not None and gpu is not None:
        expect(older.gpu == gpu.name, argument, f"{path}, which is of {older.gpu}", f"a file of {gpu.name}, or none")
    return older


def not_removable(path: pathlib.Path) -> str:
    """Why :func:`remove` leaves ``path`` alone; "": it is a table, a link to nothing, or some file where tables are."""
    try:
        path.lstat()
        if os.path.isdir(path):
            return "a folder"
        if path.parent == folder() or not os.path.exists(path):
            return ""  # whatever an older version or another program left there
        start = read_regular(path, 4096)
    except OSError as error:
        return error.strerror or str(error)
    return "" if b'"schema"' in start and b'"processors"' in start else "something else"


def remove(path: pathlib.Path, argument: str) -> None:
    """Take ``path`` away; a link, without what it names. Raises ContractError, by ``argument``, for what is no table."""
    why = not_removable(path)
    expect(not why, argument, f"{path}: {why}", "a table that tune wrote")
    with refusing(argument, path):
        path.unlink()


def merged(older: Table | None, gpu: Gpu, shapes: Iterable[Shape]) -> Table:
    """``shapes`` on ``gpu``, and those of ``older`` that were measured with the same versions and sources and not again: a
    shape has the row counts of one measurement.
    """
    new = tuple(shapes)
    again = {shape.problem for shape in new}
    fits = older is not None and all(older.versions.get(name) == versions()[name] for name in MATTERS)
    fits = fits and older is not None and older.processors == gpu.processors
    kept = older.shapes if fits and older is not None else ()
    kept = tuple(shape for shape in kept if shape.problem not in again and not shape.stale())
    return Table(time=now(), gpu=gpu.name, processors=gpu.processors, versions=versions(), shapes=(*kept, *new))


def dropped(older: Table | None, table: Table) -> list[str]:
    """What of ``older`` is not in ``table``, which was :func:`merged` from it, in words."""
    found = []
    for old in () if older is None else older.shapes:
        new = table.shape(old.problem)
        if new is None:
            found.append(f"{old.name}: left out, measured with other sources or versions, or on another part of the GPU")
        elif new != old:
            whose = "" if new.name == old.name else f" of {new.name}"
            found.append(f"{old.name}: rows {old.span} of {old.time} replaced by {new.span}{whose}")
    return found


def write(table: Table, path: pathlib.Path) -> None:
    """Put ``table`` into ``path``, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
