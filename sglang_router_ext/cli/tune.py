"""``tune``: times the designs on this machine's GPU, and writes the bands that ``router_ext`` then chooses by."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sglang_router_ext import settings, tuned
from sglang_router_ext.bench import races
from sglang_router_ext.bench.cases import CASES, Case
from sglang_router_ext.cli import model as models
from sglang_router_ext.cli.app import DEFAULT_CASE, Ticker, app, console, parse_rows, pick, print_json, this_gpu
from sglang_router_ext.contract import Gpu, expect, gpu_by_name

if TYPE_CHECKING:
    from sglang_router_ext.bench.run import Line

DEFAULT_ROWS = (1, 2, 4, 6, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
BUDGET_S = 270.0
"""Of five minutes, without the builds of a first time, and with some left for the start."""
MOST_REPLAYS, FEWEST_REPLAYS = 60, 20


@app.command()
def tune(
    *,
    case: Annotated[list[str] | None, typer.Option(help=f"may be repeated; without any shape {DEFAULT_CASE}")] = None,
    model: Annotated[list[str] | None, typer.Option(help="a checkpoint's folder or config.json; may be repeated")] = None,
    rows: Annotated[str | None, typer.Option(help="row counts, as in 1,6,16-18; without it 1 to 8192 in 21 steps")] = None,
    output: Annotated[pathlib.Path | None, typer.Option(help="write here; without it, where the plugin looks")] = None,
    gpu: Annotated[str | None, typer.Option(help="with --show or --remove: whose; without it, this machine's")] = None,
    show: Annotated[bool, typer.Option("--show", help="print the table that is in force and measure nothing")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="take the table away: the package's own bands are in force")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure this GPU for some models in under five minutes, and write the table of bands that router_ext chooses by."""
    expect(not (show and remove), "show", "--show and --remove", "one of them")
    expect(not (remove and as_json), "json", "--json", "none with --remove, which has nothing to show")
    measures = not show and not remove
    for option, value in (("case", case), ("model", model), ("rows", rows)):
        expect(measures or value in (None, []), option, value, "none with --show or --remove, which measure nothing")
    expect(gpu is None or not measures, "gpu", gpu, "the one of this machine, which is measured")
    if show:
        expect(output is None, "output", output, f"none with --show; {settings.TABLE} names a file")
        _show(gpu, as_json=as_json)
        return
    if remove:
        _remove(gpu, output)
        return
    cases = _cases(case, model)
    counts = list(DEFAULT_ROWS) if rows is None else parse_rows(rows)
    argument, named = _asked(output)
    if named is None:
        tuned.check_folder(tuned.folder(), argument)
    else:
        tuned.check_writable(named, argument)
    here = this_gpu("tune")
    path = named or tuned.default_path(here.name)
    older = tuned.check_writable(path, argument, here)
    shapes = _measure(cases, counts, here)
    table = tuned.merged(older, here, shapes)
    with tuned.refusing(argument, path):
        tuned.write(table, path)
    found = tuned.look(path, here, named=path != tuned.default_path(here.name))
    if as_json:
        print_json({"path": str(path), "digest": found.digest, "table": table})
    else:
        for shape in shapes:
            _print_shape(shape)
    note = console(stderr=as_json)
    used = tuned.place(here.name) == path and settings.read().table != "off"
    elsewhere = f"servers use it where {settings.TABLE}={path}, which here is {settings.read().table}"
    who = "servers that start from now on use it" if used else elsewhere
    note.print(f"written to {path} ({found.digest}); {who}", markup=False, soft_wrap=True)
    for text in tuned.dropped(older, table):
        note.print(text, markup=False, soft_wrap=True)


def _asked(output: pathlib.Path | None) -> tuple[str, pathlib.Path | None]:
    """What names the file, ``output`` or else the environment, and the file; None: neither does, and it goes by the GPU."""
    named = tuned.named_path()  # with --output too, so that a bad value is told
    if output is not None:
        with tuned.refusing("output", output):  # there may be no folder that a relative name starts from
            return "output", output.absolute()
    return "output" if named is None else settings.TABLE, named


def _cases(names: Sequence[str] | None, asked: Sequence[str] | None) -> list[Case]:
    """The shapes to measure, each once."""
    if not names and not asked:
        names = [DEFAULT_CASE]
    found = [CASES[name] for name in pick("case", names, list(CASES))] if names else []
    for one in asked or ():
        read = models.read(one)
        allowed = "a model whose selection SGLang leaves to functions that ours stand in for"
        expect(not read.elsewhere, "model", f"{one}: {read.note}", allowed)
        found.append(CASES.get(one) or Case(name=_name(one), problem=read.problem))
    return list({tuned.shape_of(one.problem): one for one in found}.values())


def _name(model: str) -> str:
    path = pathlib.Path(model).absolute()
    name = path.name if path.is_dir() else path.parent.name
    return name.encode(errors="replace").decode()  # a folder may be called by bytes that are no text


def _measure(cases: Sequence[Case], counts: Sequence[int], gpu: Gpu) -> list[tuned.Shape]:
    """The bands of every case. Ends the command, with nothing written, where a design is wrong here."""
    from sglang_router_ext.bench import clock, report, run

    def wanted(line: Line) -> bool:
        return races.is_wanted(line.design, ours=line.ours)

    shapes, wrong = [], []
    with Ticker("tune", len(cases) * len(counts)) as ticker:
        ticker.say(f"{gpu}")
        the_clock = clock.Clock()
        for one in cases:
            run.build_ahead(one, gpu, the_clock.device, ticker.say)
        pace = Pace(len(cases) * len(counts))
        for one in cases:
            lines: list[Line] = []
            for count in counts:
                try:
                    new = run.measure(the_clock, one, count, gpu, caches=("cold",), replays=pace.replays, wanted=wanted)
                except clock.ClockError as error:
                    ticker.step(f"{one.name} rows {count}: not timed, so it stays SGLang's: {error}", always=True)
                else:
                    lines += new
                    ticker.step(report.headline(new))
                pace.step()
            wrong += report.failures(lines)
            shapes.append(tuned.measured(one.name, one.problem, times_of(lines), counts))
    for text in wrong:
        typer.echo(f"FAILED   {text}", err=True)
    if wrong:
        typer.echo("error: nothing is written, because a design does not work on this GPU", err=True)
        raise typer.Exit(1)
    return shapes


def times_of(lines: Sequence[Line]) -> list[races.Time]:
    """The times among ``lines``, as a race takes them."""
    return [races.Time(one.rows, one.design, one.stages, one.median_us, one.ours) for one in lines if one.timing is not None]


class Pace:
    """How many replays a row count gets, so that ``total`` of them end in time."""

    def __init__(self, total: int, budget_s: float = BUDGET_S) -> None:
        self._left, self._end = total, time.monotonic() + budget_s
        self._begun = time.monotonic()
        self.replays = MOST_REPLAYS

    def step(self) -> None:
        """One more is done, with ``replays``. Slower than the budget allows, the others get fewer."""
        self._left -= 1
        took, now = time.monotonic() - self._begun, time.monotonic()
        self._begun = now
        if took * self._left > self._end - now:
            self.replays = max(FEWEST_REPLAYS, self.replays // 2)


def _named(gpu: str | None) -> Gpu | None:
    """The GPU of ``--gpu``, or of this machine; None where it has none, or no PyTorch to see it by."""
    if gpu is not None:
        return gpu_by_name(gpu)
    try:
        from sglang_router_ext.bench import machine

        return machine.gpu()
    except ImportError:
        return None


def _show(gpu: str | None, *, as_json: bool) -> None:
    where = _named(gpu)
    one = None if where is None else tuned.find(where)
    found = tuned.find_all() if where is None else [one] * (one is not None)
    if as_json:
        print_json(found)
        return
    for entry in found:
        if entry is not None:
            when = "" if entry.table is None else f", {tuned.age(entry.table.time)}"
            console().print(f"{entry}{when}", markup=False, soft_wrap=True)
            for shape in () if entry.table is None or entry.against else entry.table.shapes:
                _print_shape(shape)
    if not found:
        off = f"{settings.TABLE}=off: " * (settings.read().table == "off")
        whose = "any GPU" if where is None else str(where)
        console().print(f"{off}no tuned table for {whose}; the package's bands are in force", markup=False, soft_wrap=True)


def _remove(gpu: str | None, output: pathlib.Path | None) -> None:
    argument, path = _asked(output)
    if path is None:
        where = _named(gpu)
        expect(where is not None, "remove", "no CUDA GPU here", "--gpu NAME, or --output FILE")
        assert where is not None
        argument, path = "remove", tuned.default_path(where.name)
    else:
        expect(gpu is None, "gpu", gpu, f"none with --remove where a file is named: {path}")
    link = f"the link {path} to {os.readlink(path)}" if os.path.islink(path) else str(path)
    tuned.remove(path, argument)
    console().print(f"removed {link}; {_after(path)}", markup=False, soft_wrap=True)


def _after(removed: pathlib.Path) -> str:
    """By which bands servers choose that start once ``removed`` is gone."""
    named = tuned.named_path()
    if named is None:
        elsewhere = settings.read().table == "auto" and removed.parent != tuned.folder()
        return f"servers go on by the tables in {tuned.folder()}" if elsewhere else "the package's bands are in force"
    if os.path.exists(named):
        return f"{settings.TABLE} names {named}, which stays"
    until = "no server with a backend of ours starts until it is unset or names a file that is there"
    return f"{settings.TABLE} still names {named}, and {until}"


def _print_shape(shape: tuned.Shape) -> None:
    """The races at each row count, and the bands that came of them."""
    head = f"{shape.name}: {shape.problem}; {shape.time}"
    table = Table(
        title=f"{head}\nmedian us, cold cache (~ estimated: a stage of ours with SGLang's other)", title_justify="left"
    )
    table.add_column("rows", justify="right")
    for what in ("no plan", "with plan"):
        for name in (f"ours, {what}", "us", "SGLang", "SGLang / ours"):
            table.add_column(name, justify="left" if name.startswith("ours") else "right")
    for alone, planned in zip(shape.races_without_plan, shape.races, strict=True):
        table.add_row(str(alone.rows), *_cells(alone), *_cells(planned))
    out = console(markup=False)
    out.print(table)
    bands = Table("design", "chosen with a plan", "without", title="bands", title_justify="left")
    for name, one in shape.designs.items():
        bands.add_row(name, *(", ".join(map(str, found)) or "-" for found in (one.bands, one.bands_without_plan)))
    out.print(bands)


def _cells(race: races.Race) -> tuple[str, str, str, str]:
    host = "-" if race.host_us is None else f"{race.host_us:.2f}"
    if race.ours_us is None:
        return "-", "-", host, "-"
    ratio = "-" if race.host_us is None or race.ours_us <= 0 else f"{race.host_us / race.ours_us:.2f}x"
    return race.ours, f"{'~' * race.estimated}{race.ours_us:.2f}", host, ratio
