"""``flips``: how many rows the batch size sends to other experts, with SGLang's router and with ours."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.cli.app import DEFAULT_CASE, Ticker, app, console, parse_rows, pick, print_json, this_gpu
from sglang_router_ext.contract import expect

if TYPE_CHECKING:
    from sglang_router_ext.bench.flips import Flips

MOST_BATCHES = 16
MOST_ROWS = 10**9


@app.command()
def flips(
    *,
    case: Annotated[str, typer.Option(help="the model's shape")] = DEFAULT_CASE,
    rows: Annotated[int, typer.Option(help="random rows, in all")] = 500_000,
    batches: Annotated[str, typer.Option(help="batch sizes, as in 6,96,1024; all are held against the smallest")] = "6,96,1024",
    seed: Annotated[int, typer.Option(help="of the inputs")] = 0,
    record: Annotated[bool, typer.Option("--record", help="write the result to the records of this GPU")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Route the same rows in batches of several sizes, and count those that get other experts, another order, or other bits.

    The exit status is 1 if a design that promises the same bits in every batch does not give them.
    """
    problem = CASES[pick("case", [case], list(CASES))[0]].problem
    counts = parse_rows(batches, "batches")
    expect(2 <= len(counts) <= MOST_BATCHES, "batches", batches, f"2 to {MOST_BATCHES} different sizes")
    expect(counts[-1] <= rows <= MOST_ROWS, "rows", rows, f"{counts[-1]}, the largest batch, to {MOST_ROWS}")
    expect(0 <= seed < 2**31, "seed", seed, "0 to 2^31 - 1")
    from sglang_router_ext.bench import flips as counting

    size = counting.chunk_rows(counts)
    gpu = this_gpu("flips")
    from sglang_router_ext.bench.launch import run_at_once
    from sglang_router_ext.bench.record import check_writable, flips_record, new_run, write

    if record:
        check_writable(gpu.name)
    identity = new_run(gpu.name)
    ways, against = counting.paths(problem, counting.sizes(rows, counts), gpu)
    few = next(counting.chunks(problem, counts[0], counts, seed=seed, device="cuda"))
    with Ticker("flips", len(ways) * -(-rows // size)) as ticker:
        ticker.say(f"{gpu}, run {identity.run}, commit {identity.commit}")
        run_at_once([functools.partial(way.route, few) for way in ways], ticker.say)
        drawn = counting.chunks(problem, rows, counts, seed=seed, device="cuda")
        found, missing = counting.count(ways, problem, drawn, counts, ticker.step)
    failed = not found or any(one.broken for one in found) or any(way.row_stable and way.name in missing for way in ways)
    if record and found:
        write([flips_record(identity, case, rows, seed, counts, found)])
    if as_json:
        print_json({"identity": identity, "flips": found, "missing": missing, "left_out": against})
    else:
        console().print(_table(f"{case}, rows that another batch size changes", found))
        notes = [f"{way.name}: {way.what}" for way in ways]
        _print_notes([*notes, *_left_out(against), *(f"{name}: no count: {text}" for name, text in missing.items())], found)
    if not found:
        typer.echo("error: nothing was counted: no path runs here", err=True)
    raise typer.Exit(1 if failed else 0)


def _left_out(against: Mapping[str, Sequence[str]]) -> list[str]:
    from sglang_router_ext.bench.flips import DETERMINISTIC

    def why_not(name: str) -> str:
        return "not counted" if name == DETERMINISTIC else "row-stable, but not run at all of these row counts"

    return [f"{name}: {why_not(name)}: {'; '.join(why)}" for name, why in against.items()]


def _table(title: str, found: Sequence[Flips]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("path (* promises none)")
    for name in ("batches", "rows", "other bits", "other order", "other experts", "largest margin of a flipped row"):
        table.add_column(name, justify="right")
    for one in found:
        changed = (_share(part, one.rows) for part in (one.bits, one.order, one.experts))
        margin = "-" if one.margin is None else f"{one.margin:.2g}"
        name = f"{one.path}{'*' if one.row_stable else ''}"
        table.add_row(name, f"{one.first}, {one.batch}", f"{one.rows:,}", *changed, margin)
    return table


def _share(part: int, rows: int) -> str:
    return f"{part:,} ({100 * part / rows:.3g} %)" if part else "0"


def _print_notes(notes: Sequence[str], found: Sequence[Flips]) -> None:
    broken = [f"FAILED   {one.path}: {one.bits:,} rows differ in batches of {one.batch}" for one in found if one.broken]
    for text in (*notes, *broken):
        console().print(text, markup=False, soft_wrap=True)
