"""The application that commands register with, its consoles, and what all commands share. Imports no torch."""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from sglang_router_ext.bench.record import RecordError
from sglang_router_ext.contract import ContractError, Gpu, expect

DEFAULT_CASE = "glm-5.3-flash"
WIDTH = 200
"""Columns where the output is no terminal."""
TICK_S = 5.0
MAX_ROWS = 2**20


class _Group(TyperGroup):
    """Turns a refused argument into one line and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ContractError, RecordError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
        except OSError as error:  # a full disk, a folder that went away
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Group,
    name="sglang-router-ext",
    help="Faster MoE routers for SGLang (not sglang-router, the load balancer).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def console(*, stderr: bool = False, markup: bool = True) -> Console:
    """Where tables go; with ``stderr``, where progress goes, so that ``--json`` leaves stdout to itself. Without ``markup``
    every text is shown as it is: what a file or a folder's name says may look like some.
    """
    asked: dict[str, Any] = {"stderr": stderr, "markup": markup, "highlight": False, "emoji": False}
    found = Console(**asked)
    return found if found.is_terminal else Console(**asked, width=WIDTH)


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def this_gpu(command: str) -> Gpu:
    """The GPU that ``command`` is to run on. Raises :class:`ContractError` where there is none."""
    from sglang_router_ext.bench import machine

    gpu = machine.gpu()
    expect(gpu is not None, command, "no CUDA GPU here", "a machine with one")
    assert gpu is not None
    return gpu


def parse_rows(text: str, option: str = "rows") -> list[int]:
    """``1,2,8-16`` -> row counts in ascending order. Raises :class:`ContractError`, by ``option``, for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numeric = part.isascii() and first.isdecimal() and (last.isdecimal() or not dash)
        fits = numeric and 1 <= int(first) <= int(last or first) <= MAX_ROWS
        expect(fits, option, repr(text), f"row counts from 1 to {MAX_ROWS} as in 1,2,8-16")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)


def check_plot(plot: pathlib.Path | None, option: str = "plot") -> None:
    """Refuse a file that could not be written, before the work that it is to show."""
    if plot is not None:
        fits = plot.suffix == ".png" and _writable(plot)
        expect(fits, option, plot, "a .png file, in a folder that exists, that can be written")


def _writable(file: pathlib.Path) -> bool:
    """Whether ``file``, or what it links to, can be written or made. Leaves nothing behind."""
    try:
        file = file.resolve()
        if file.exists():
            return file.is_file() and os.access(file, os.W_OK)
        file.open("xb").close()
        file.unlink()
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        return False
    return True


def pick(what: str, names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """``names``, or all that are known where none is given. Raises :class:`ContractError` for an unknown one."""
    for name in names or ():
        expect(name in known, what, name, " | ".join(known))
    return list(names or known)


class Ticker:
    """Progress of long work on stderr: a bar on a terminal, otherwise a line with the elapsed seconds every few seconds."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total, self._done = what, total, 0
        self._console = console(stderr=True)
        self._start = self._last = time.monotonic()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Ticker:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, text: str = "", *, always: bool = False) -> None:
        """One more done. ``text`` goes beside the count; ``always`` prints a line whatever the time."""
        self._done += 1
        self._bar.update(self._task, completed=self._done, description=f"{self._what} {text}".strip())
        now = time.monotonic()
        if always or (not self._console.is_terminal and (now - self._last >= TICK_S or self._done == self._total)):
            self._last = now
            count = "" if self._total is None else f" {self._done} of {self._total}"
            self.say(f"{self._what}{count} {text}".strip())

    def say(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._start:7.1f} s] {text}", markup=False, soft_wrap=True)
