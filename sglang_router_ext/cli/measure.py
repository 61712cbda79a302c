"""``check`` and ``bench``: whether the designs are right on this GPU, and how fast they are beside their peers."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.choose import reasons
from sglang_router_ext.cli.app import DEFAULT_CASE, Ticker, app, check_plots, console, parse_rows, pick, print_json, this_gpu
from sglang_router_ext.contract import Gpu, expect, gpu_by_name
from sglang_router_ext.designs import DESIGNS, TABLE, Design

if TYPE_CHECKING:
    from sglang_router_ext.bench.check import Outcome
    from sglang_router_ext.bench.checks import Check
    from sglang_router_ext.bench.run import Line

OURS = [design.name for design in DESIGNS if design.target]
MAX_REPLAYS = 10**9
SHOWN_FAILURES = 20
"""Failing lines per design that are printed as they happen; the others are only counted, and stand in ``--json``."""


@app.command()
def check(
    *,
    design: Annotated[list[str] | None, typer.Option(help="only this one; may be repeated")] = None,
    case: Annotated[list[str] | None, typer.Option(help="only this model's shape; may be repeated")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="models only: odd sizes are builds of their own")] = False,
    seed: Annotated[int, typer.Option(help="of the inputs")] = 0,
    record: Annotated[bool, typer.Option("--record", help="write the result to the records of this GPU")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Hold every design against the oracle on this GPU: values, repeats, rows alone, CUDA graphs, and bad arguments."""
    names = pick("design", design, OURS)
    cases = pick("case", case, list(CASES)) if case else None
    expect(not (record and cases), "record", "a check of some cases only", "a check of all cases, or of all models (--quick)")
    gpu = this_gpu("check")
    from sglang_router_ext.bench import check as checks
    from sglang_router_ext.bench.checks import model_checks, odd_checks
    from sglang_router_ext.bench.record import check_writable, new_run, write

    if record:
        check_writable(gpu.name)
    everything = [*model_checks(), *(() if quick else odd_checks())]
    todo = [entry for entry in everything if cases is None or entry.case in cases]
    identity = new_run(gpu.name)
    with Ticker("builds") as ticker:
        checks.build_ahead([TABLE[name] for name in names], todo, gpu, "cuda", ticker.say)
    outcomes: list[Outcome] = []
    for name in names:
        mine = _check_one(TABLE[name], todo, gpu, seed)
        outcomes += mine
        if record:
            write([checks.summary(TABLE[name], mine, identity)])
    judged = sum(not outcome.refused for outcome in outcomes)
    failed = any(outcome.failures for outcome in outcomes)
    if as_json:
        print_json([outcome._asdict() for outcome in outcomes])
    else:
        console().print(_check_table(outcomes, names))
        _print_reasons(outcomes)
    if not judged:
        typer.echo("error: nothing was judged: every design refuses every check", err=True)
    raise typer.Exit(1 if failed or not judged else 0)


def _check_one(design: Design, todo: Sequence[Check], gpu: Gpu, seed: int) -> list[Outcome]:
    """Everything about one design, with progress. A lost GPU ends the command."""
    from sglang_router_ext.bench import check as checks

    todo = checks.concerning(design, todo)
    model = CASES[DEFAULT_CASE].problem
    found: list[Outcome] = []
    failed = 0
    with Ticker(design.name, len(todo)) as ticker:

        def note(outcome: Outcome) -> None:
            nonlocal failed
            found.append(outcome)
            failed += bool(outcome.failures)
            if outcome.failures and failed <= SHOWN_FAILURES:
                ticker.say(f"FAIL {outcome.design}: {outcome.check}: {outcome.failures[0]}")

        try:
            for outcome in checks.run([design], todo, gpu, "cuda", seed=seed):
                note(outcome)
                ticker.step(f"checks, {failed} failed")
            for outcome in checks.run_bad_inputs([design], "bad inputs", model, gpu, "cuda"):
                note(outcome)
        except checks.GpuLost as error:
            typer.echo(f"error: the GPU is lost and nothing after this can run: {error}", err=True)
            raise typer.Exit(1) from error
        ticker.say(f"{design.name}: {sum(not o.refused for o in found)} judged, {failed} failed")
    return found


def _check_table(outcomes: Sequence[Outcome], names: Sequence[str]) -> Table:
    """Cases down, designs across: judged / failed, or refused."""
    table = Table(title="checks judged", title_justify="left")
    table.add_column("case")
    for name in names:
        table.add_column(name, justify="right")
    for case in dict.fromkeys(outcome.case for outcome in outcomes):
        cells = []
        for name in names:
            mine = [outcome for outcome in outcomes if (outcome.case, outcome.design) == (case, name)]
            judged = [outcome for outcome in mine if not outcome.refused]
            failed = sum(bool(outcome.failures) for outcome in judged)
            cells.append(f"[red]{len(judged)} ({failed} FAILED)[/]" if failed else str(len(judged)) if judged else "refused")
        table.add_row(case, *cells)
    return table


def _print_reasons(outcomes: Sequence[Outcome]) -> None:
    """Every distinct reason for a refusal, with how often it applied, and every failure."""
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        for reason in outcome.refused:
            text = f"{outcome.design} on {outcome.case}: {reason}"
            reasons[text] = reasons.get(text, 0) + 1
    out = console()
    for text, count in reasons.items():
        out.print(f"refused  {text} ({count} checks)", markup=False, soft_wrap=True)
    for outcome in outcomes:
        for text in outcome.failures:
            out.print(f"FAILED   {outcome.design}: {outcome.check}: {text}", markup=False, soft_wrap=True)


@app.command()
def soak(
    *,
    design: Annotated[str, typer.Option(help="whose launches")] = "single",
    case: Annotated[str, typer.Option(help="the model's shape")] = DEFAULT_CASE,
    rows: Annotated[str, typer.Option(help="row counts, as in 1,6,16-18; the replays are shared out")] = "1,6,16,96",
    replays: Annotated[int, typer.Option(help="of CUDA graphs, in all")] = 1_000_000,
    between: Annotated[int, typer.Option(help="replays between two judgements by the oracle")] = 10_000,
    record: Annotated[bool, typer.Option("--record", help="write the result to the records of this GPU")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Replay a design's CUDA graph very often with changing inputs: nothing may hang, and every judged result must be right."""
    row = TABLE[pick("design", [design], OURS)[0]]
    problem = CASES[pick("case", [case], list(CASES))[0]].problem
    counts = parse_rows(rows)
    expect(1 <= replays <= MAX_REPLAYS, "replays", replays, f"1 to {MAX_REPLAYS}")
    expect(1 <= between <= replays, "between", between, f"1 to {replays}, the replays")
    gpu = this_gpu("soak")
    for count in counts:
        refused = reasons(row, problem, count, gpu)
        expect(not refused, "rows", count, f"rows that {design} takes ({'; '.join(refused)})")
    from sglang_router_ext.bench import record as records
    from sglang_router_ext.bench import soak as soaking

    if record:
        records.check_writable(gpu.name)
    identity = records.new_run(gpu.name)
    found: list[soaking.Soaked] = []
    share = -(-replays // len(counts))
    with Ticker("soak") as ticker:
        for count in counts:

            def say(done: int, failed: int, count: int = count) -> None:
                ticker.step(f"{design}, {count} rows: {done} of {share} replays, {failed} differences")

            try:
                found.append(soaking.soak(row, problem, count, "cuda", replays=share, between=between, say=say))
            except soaking.Stuck as error:
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(1) from error
    failures = [text for one in found for text in one.failures]
    if record:
        records.write([records.soak_record(identity, design, case, found, row.source_hash)])
    if as_json:
        print_json([one._asdict() for one in found])
    else:
        table = Table("rows", "replays", "judged", "seconds", "differences", title=f"{design} on {case}", title_justify="left")
        for one in found:
            table.add_row(*map(str, (one.rows, one.replays, one.judged, round(one.seconds, 1), len(one.failures))))
        console().print(table)
        for text in failures[:SHOWN_FAILURES]:
            console().print(f"FAILED   {text}", markup=False, soft_wrap=True)
    raise typer.Exit(1 if failures else 0)


@app.command()
def bench(
    *,
    case: Annotated[list[str] | None, typer.Option(help=f"may be repeated; without it {DEFAULT_CASE}")] = None,
    rows: Annotated[str | None, typer.Option(help="row counts, as in 1,6,16-18")] = None,
    warm: Annotated[bool, typer.Option("--warm", help="only with the data in the L2 cache")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="only with the L2 cache flushed; without either, both")] = False,
    record: Annotated[bool, typer.Option("--record", help="write each row count's times to this GPU's records")] = False,
    recorded: Annotated[str | None, typer.Option(help="measure nothing: show what is on record for a GPU, as in h200")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    plot: Annotated[pathlib.Path | None, typer.Option(help="write a plot to this PNG file")] = None,
    ratios: Annotated[pathlib.Path | None, typer.Option(help="write SGLang's time / ours to this PNG file")] = None,
    steps: Annotated[pathlib.Path | None, typer.Option(help="write a plot of every stage alone to this PNG file")] = None,
    timeline: Annotated[pathlib.Path | None, typer.Option(help="write the kernels over time to this PNG file")] = None,
) -> None:
    """Time designs and peers in one process: median microseconds over row counts, the floor, and ratios."""
    cases = [CASES[name] for name in pick("case", case or [DEFAULT_CASE], list(CASES))]
    counts = None if rows is None else parse_rows(rows)
    pictures = {"plot": plot, "ratios": ratios, "steps": steps}
    check_plots(pictures | {"timeline": timeline})
    asked = [name for name, wanted in (("cold", cold), ("warm", warm)) if wanted]
    if recorded is not None:
        expect(not record, "record", "what is on record already", "one of --record and --recorded")
        expect(timeline is None, "timeline", "what is on record, which holds no kernels", "one of --timeline and --recorded")
        _show_recorded(recorded, [one.name for one in cases], counts, asked, pictures, as_json=as_json)
        return
    gpu = this_gpu("bench")
    from sglang_router_ext.bench import clock, report, run
    from sglang_router_ext.bench.record import check_writable, new_run, write

    if record:
        check_writable(gpu.name)
    counts = counts or list(run.DEFAULT_ROWS)
    caches = asked or list(run.CACHES)
    identity = new_run(gpu.name)
    lines: list[Line] = []
    lost: list[str] = []
    with Ticker("bench", len(cases) * len(counts)) as ticker:
        ticker.say(f"{gpu}, run {identity.run}, commit {identity.commit}")
        the_clock = clock.Clock()
        ticker.say("clock ready")
        for one in cases:
            run.build_ahead(one, gpu, the_clock.device, ticker.say)
            for count in counts:
                try:
                    new = run.measure(the_clock, one, count, gpu, caches=caches)
                except clock.ClockError as error:
                    lost.append(f"{one.name} rows {count}: {error}")
                    ticker.step(f"{one.name} rows {count}: {error}", always=True)
                    continue
                lines += new
                if record:
                    write(run.records(new, identity, one.problem))
                ticker.step(report.headline(new), always=True)
    wrong = [*report.failures(lines), *lost]
    if as_json:
        print_json({"identity": identity, "lines": lines, "failures": wrong})
    else:
        _print_bench(lines, wrong)
    _draw(lines, pictures)
    if timeline is not None:
        from sglang_router_ext.bench import draw

        draw.timeline(lines, timeline)
    raise typer.Exit(1 if wrong else 0)


def _show_recorded(
    name: str,
    cases: Sequence[str],
    counts: Sequence[int] | None,
    caches: Sequence[str],
    pictures: Mapping[str, pathlib.Path | None],
    *,
    as_json: bool,
) -> None:
    from sglang_router_ext.bench import run
    from sglang_router_ext.bench.record import BenchRecord, identity_of, read_all, short_name

    records = read_all()
    known = sorted({short_name(identity_of(record).gpu) for record in records})
    expect(name.lower() in known, "recorded", name, " | ".join(known) or "nothing is recorded yet")
    gpu = gpu_by_name(name)
    times = [record for record in records if isinstance(record, BenchRecord) and record.gpu == gpu.name]
    lines = [
        line
        for line in run.recorded(times)
        if line.case in cases and (counts is None or line.rows in counts) and (not caches or line.cache in caches)
    ]
    absent = [one for one in cases if all(line.case != one for line in lines)]
    absent += [f"{count} rows" for count in counts or () if all(line.rows != count for line in lines)]
    on_record = f"{' | '.join(sorted({record.case for record in times}))}, rows {_numbers(record.rows for record in times)}"
    expect(bool(lines), "recorded", f"{name}, {', '.join(absent)}", on_record)
    if absent:
        typer.echo(f"not on record for {name}: {', '.join(absent)}", err=True)
    if as_json:
        print_json({"gpu": gpu, "lines": lines})
    else:
        _print_bench(lines, [], "on the machine that this was recorded on: ")
    _draw(lines, pictures)


def _draw(lines: Sequence[Line], pictures: Mapping[str, pathlib.Path | None]) -> None:
    """The pictures that a file is given for."""
    from sglang_router_ext.bench import draw

    for option, file in pictures.items():
        if file is not None:
            draw.PICTURES[option](lines, file)


def _numbers(found: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(found))))


def _print_bench(lines: Sequence[Line], wrong: Sequence[str], where: str = "") -> None:
    """``where`` stands before remarks about the machine that measured."""
    from sglang_router_ext.bench import report

    out = console()
    for table in report.tables(lines, console().width):
        out.print(table)
    remarks = (f"{where}{text}" for text in report.remarks(lines))
    cases = (CASES[name] for name in dict.fromkeys(line.case for line in lines) if name in CASES)
    stand_ins = (f"{one.name}: {one.what}; {one.stands_for}" for one in cases if one.stands_for)
    for text in (*stand_ins, *report.per_pass(lines), *remarks, *(f"FAILED {text}" for text in wrong)):
        out.print(text, markup=False, soft_wrap=True)
