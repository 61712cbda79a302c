"""The application that commands register with, its consoles, and what all commands share. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperCommand, TyperGroup

from sglang_router_ext.bench.record import RecordError
from sglang_router_ext.contract import ContractError, Gpu, expect

DEFAULT_CASE = "glm-5.3-flash"
WIDTH = 200
"""Columns where the output is no terminal."""
TICK_S = 5.0
MAX_ROWS = 2**20
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""click's, by whatever name typer has it."""


class _Command(TyperCommand):
    """Refuses in our words what click refuses in its own, and a path that is empty: it would be the current folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _our_words(self, ctx, list(args)) as given:
            rest = super().parse_args(ctx, args)
        for param in self.params:
            empty = isinstance(ctx.params.get(param.name), pathlib.Path) and given().get(param.name) == ""
            expect(not empty, _option(param), "", "a path")
        return rest


class _Group(TyperGroup):
    """Turns a refused argument into one line and exit status 2."""

    def main(self, *args: Any, **more: Any) -> Any:
        try:
            return super().main(*args, **more)
        except (ContractError, RecordError) as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(2)
        except OSError as error:  # a full disk, a folder that went away
            typer.echo(f"error: {error}", err=True)
            sys.exit(1)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            return super().parse_args(ctx, args)  # which shows the help
        with _our_words(self, ctx, list(args)):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        expect(args[0] in self.commands, "command", args[0], " | ".join(self.commands))
        return super().resolve_command(ctx, args)


def _option(param: Any) -> str:
    """What ``param`` is called where it is written, without dashes."""
    return max(param.opts, key=len).lstrip("-")


@contextlib.contextmanager
def _our_words(command: Any, ctx: Any, args: list[str]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Gives what reads the values among ``args`` as they were written, and raises ContractError for click's usage errors."""

    def given() -> dict[str, Any]:
        return command.make_parser(ctx).parse_args(list(args))[0]

    options = {name: one for one in command.get_params(ctx) for name in one.opts if name.startswith("--")}
    try:
        yield given
    except USAGE_ERROR as error:
        text, param, option = str(error), getattr(error, "param", None), getattr(error, "option_name", "")
        if param is not None:
            wrong = given().get(param.name)
            allowed = (getattr(param, "help", None) or "one") if wrong is None else "an integer" if "integer" in text else text
            expect(False, _option(param), "nothing" if wrong is None else repr(wrong), allowed)
        if option in options:
            flag = options[option].is_flag
            expect(False, option.lstrip("-"), "a value" if flag else "no value", f"{option}{'' if flag else ' VALUE'}")
        if option:
            expect(False, "option", option, " | ".join(options))
        extra = text.partition(" (")[2].removesuffix(")")
        expect("extra argument" not in text, "arguments", extra, " | ".join(options))
        expect(False, command.name or "arguments", text, f"what {ctx.command_path} --help shows")


class _App(typer.Typer):
    def command(self, *args: Any, **more: Any) -> Any:
        return super().command(*args, cls=_Command, **more)


def _show_versions(asked: bool) -> None:
    """Of this package and of what its kernels and tables depend on. No import of either."""
    if asked:
        from sglang_router_ext import tuned

        for name, version in tuned.versions().items():
            if version is not None:
                typer.echo(f"{name} {version}")
        raise typer.Exit


app = _App(
    cls=_Group,
    name="sglang-router-ext",
    help="Faster MoE routers for SGLang (not sglang-router, the load balancer).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def every_command(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="of this package, SGLang and PyTorch")
    ] = False,
) -> None:
    """What stands before the name of a command."""


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


def check_plots(pictures: Mapping[str, pathlib.Path | None]) -> None:
    """Refuse files (option -> file) that could not be written, and one that two options name, before the work that they are to
    show.
    """
    taken: dict[pathlib.Path, str] = {}
    for option, file in pictures.items():
        if file is not None:
            fits = file.suffix == ".png" and _writable(file)
            expect(fits, option, file, "a .png file, in a folder that exists, that can be written")
            other = taken.setdefault(file.resolve(), option)
            expect(other == option, option, f"{file}, which --{other} writes", "a file of its own")


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
