"""``list`` and ``explain``: the design table, and what it means for a model on a GPU. Neither needs torch or a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from sglang_router_ext import settings, tuned
from sglang_router_ext.backends import BACKENDS, GATES
from sglang_router_ext.choose import Choice, Tuned, choose, in_force, never_deterministic, reasons, unmeasured
from sglang_router_ext.cli import model as models
from sglang_router_ext.cli.app import app, console, parse_rows, print_json
from sglang_router_ext.contract import Gpu, Problem, expect, gpu_by_name
from sglang_router_ext.designs import DESIGNS, MOST_ROWS, TABLE, Design, Rows

WIDE = 150
"""Columns of a terminal that ``list`` fills."""
NARROW = ("design", "status", "rows", "what it is")
LISTED_ROWS = 1024
"""Row counts that ``explain`` lists one by one at most."""
SLOWER, SLOWER_HERE, UNMEASURED = "not fastest on record", "not fastest here", "not measured"
HOST_IS_BEST = {SLOWER_HERE: "tuned here", SLOWER: "on record", UNMEASURED: UNMEASURED}
"""What is known of a design that could run -> what that says of SGLang's path, which runs instead."""


def _fastest_at(design: Design) -> str:
    def text(bands: dict[str, tuple[Rows, ...]], what: str) -> list[str]:
        return [f"{gpu}: {', '.join(map(str, rows))}{what}" for gpu, rows in bands.items()]

    plan, without = (" with a plan", " without") if design.plans else ("", "")
    return "; ".join(text(design.bands, plan) + text(design.bands_without_plan, without)) or "-"


def _limits(design: Design) -> str:
    parts = [
        "" if design.max_experts is None else f"experts <= {design.max_experts}",
        "" if design.max_topk is None else f"top-k <= {design.max_topk}",
        "" if design.hidden_multiple == 1 else f"hidden in {design.hidden_multiple}s",
        "" if design.max_hidden is None else f"hidden <= {design.max_hidden}",
        "" if design.min_processors == 1 else f"{design.min_processors} multiprocessors",
    ]
    return ", ".join(part for part in parts if part) or "-"


LISTED: dict[str, Callable[[Design], str]] = {
    "design": lambda design: design.name,
    "stages": lambda design: "+".join(design.stages),
    "status": lambda design: design.status,
    "GPUs": lambda design: design.archs_text,
    "rows": lambda design: str(design.rows),
    "limits": _limits,
    "row-stable": lambda design: "yes" if design.row_stable else "no",
    "fastest at": _fastest_at,
    "what it is": lambda design: design.what,
}
"""Columns of ``list``."""


@app.command("list")
def list_designs(*, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print the table of designs, and the backends that choose among them."""
    if as_json:
        designs = [{**msgspec.to_builtins(design), "source_hash": design.source_hash} for design in DESIGNS]
        tables = [_told(found) for found in tuned.find_all()]
        print_json({"designs": designs, "backends": list(BACKENDS.values()), "gates": GATES, "tables": tables})
        return
    wide = console().width >= WIDE
    shown = LISTED if wide else {name: LISTED[name] for name in NARROW}
    table = Table(title="designs" if wide else f"designs; {WIDE} columns or --json show their limits", title_justify="left")
    for name in shown:
        table.add_column(name, overflow="fold")
    for design in DESIGNS:
        table.add_row(*(cell(design) for cell in shown.values()))
    console().print(table)
    backends = Table(title="--moe-runner-backend", title_justify="left")
    for name in ("backend", "what it is", "designs"):
        backends.add_column(name)
    for backend in BACKENDS.values():
        backends.add_row(backend.name, backend.what, ", ".join(backend.designs) or "any with a measured band")
    console().print(backends)
    console().print(f"SGLANG_ROUTER_EXT_GATE: {' | '.join(GATES)}")
    for found in tuned.find_all():
        console().print(str(found), markup=False, soft_wrap=True)


class Explanation(msgspec.Struct, frozen=True):
    """The choice for a range of row counts."""

    rows: Rows
    choice: Choice
    measured: str = ""
    """What the choice rests on; see :func:`evidence`."""


def _told(found: tuned.Found) -> dict[str, Any]:
    """A table for ``--json``, without its shapes."""
    about = {"gpu": found.table.gpu, "time": found.table.time, "versions": found.table.versions} if found.table else {}
    told = {"path": found.path, "named": found.named, "digest": found.digest, "in_force": not found.against}
    return {**told, "against": found.against, **about}


def _verdict(design: Design, problem: Problem, rows: int, gpu: Gpu, bands: Tuned | None, *, plan: bool) -> str:
    """What bands say of ``design``, which can run."""
    if design.status != "on":
        return "on trial"
    if bands is not None and rows not in bands.rows:
        bands = None
    if not reasons(design, problem, rows, gpu, named=False, plan=plan, tuned=bands):
        return "on record" if bands is None else "tuned here"
    if bands is not None:
        return SLOWER_HERE
    far = rows > MOST_ROWS.get(gpu.name, 0)
    return UNMEASURED if far or unmeasured(design, problem, gpu) else SLOWER


def evidence(
    problem: Problem,
    rows: int,
    gpu: Gpu | None,
    choice: Choice,
    bands: Tuned | None,
    *,
    plan: bool = True,
    deterministic: bool = False,
) -> str:
    """What says that ``choice`` is a good one at ``rows`` rows: bands that were ``tuned here``, or those of the package (``on
    record``). A design without such a band runs because it is ``named`` or ``deterministic``, and what is known of it follows;
    one that is ``on trial`` has none anywhere. Of SGLang's path alone: what kept the designs out that could have run, and ``-``
    where none could, or they were kept out by something else. ``problem`` has the logits that are asked for.
    """
    if gpu is None:
        return "-"
    stages = {"gate": choice.gate, "selection": choice.selection}
    found = {}
    for stage, name in stages.items():
        if name != "host":
            text = _verdict(TABLE[name], problem, rows, gpu, bands, plan=plan)
            why = "deterministic" if deterministic else "named"
            found[stage] = f"{why} ({text})" if text in (SLOWER, SLOWER_HERE, UNMEASURED) else text
    if len(set(found.values())) > 1:
        return ", ".join(f"{stage} {text}" for stage, text in found.items())
    if found:
        return next(iter(found.values()))
    beaten = set()
    for name, why_not in choice.losers.items():
        asked = functools.partial(reasons, TABLE[name], problem, rows, gpu, plan=plan)
        if TABLE[name].status == "on" and not asked() and why_not == asked(named=False, tuned=bands):
            beaten.add(_verdict(TABLE[name], problem, rows, gpu, bands, plan=plan))
    return next((text for verdict, text in HOST_IS_BEST.items() if verdict in beaten), "-")


def explain_rows(
    problem: Problem,
    gpu: Gpu | None,
    backend: str | None,
    gate: str,
    rows: list[int] | None,
    unavailable: dict[str, str],
    *,
    plan: bool = True,
    bands: Tuned | None = None,
    deterministic: bool = False,
) -> list[Explanation]:
    """The choice at each of ``rows``, or at every range of row counts in which it is the same. ``bands``: tuned ones."""
    asked: dict[str, Any] = {"backend": backend, "gate": gate, "unavailable": unavailable, "tuned": bands}
    how = {"plan": plan, "deterministic": deterministic}

    def at(first: int, last: int | None) -> Explanation:
        choice = choose(problem, first, gpu, **(asked | how))
        return Explanation(Rows(first, last), choice, evidence(in_force(problem, gate)[0], first, gpu, choice, bands, **how))

    if rows is not None:
        return [at(count, count) for count in rows]
    known = [band for design in DESIGNS for band in (*design.bands.values(), *design.bands_without_plan.values())]
    known += [] if bands is None else [band for _, band in (*bands.bands, *bands.bands_without_plan)]
    spans = [*(design.rows for design in DESIGNS), *(span for band in known for span in band)]
    spans += [] if bands is None else [bands.rows]
    edges = {1} | {span.first for span in spans} | {span.last + 1 for span in spans if span.last is not None}
    starts = sorted(edges)
    found: list[Explanation] = []
    for first, following in zip(starts, [*starts[1:], None], strict=True):
        new = at(first, None if following is None else following - 1)
        if found and (str(found[-1].choice), found[-1].measured) == (str(new.choice), new.measured):
            found[-1] = msgspec.structs.replace(found[-1], rows=Rows(found[-1].rows.first, new.rows.last))
        else:
            found.append(new)
    return found


def _this_gpu() -> tuple[Gpu, dict[str, str]]:
    from sglang_router_ext.bench import machine
    from sglang_router_ext.plugin import preflight

    gpu = machine.gpu()
    expect(gpu is not None, "gpu", "no CUDA GPU here", "a name: --gpu h200 | b300 | ...")
    assert gpu is not None
    return gpu, preflight.unavailable()


@app.command()
def explain(
    *,
    model: Annotated[str, typer.Option(help="a case of bench, a checkpoint's folder, or a config.json")],
    gpu: Annotated[str | None, typer.Option(help="h200, b300, ...; without it, the GPU of this machine")] = None,
    backend: Annotated[str, typer.Option("--moe-runner-backend", help="as for SGLang; stock ones too")] = "router_ext",
    gate: Annotated[str | None, typer.Option(help="SGLANG_ROUTER_EXT_GATE; without it, what the environment says")] = None,
    rows: Annotated[str | None, typer.Option(help="row counts, as in 1,6,16-18; without it, every range")] = None,
    plan: Annotated[bool, typer.Option(help="whether the experts take a plan that comes with the ids, as Triton's do")] = True,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="under --enable-deterministic-inference of SGLang's server")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say which designs run for a model at each row count, and why the others do not."""
    problem, note, elsewhere = models.read(model)
    where, unavailable = _this_gpu() if gpu is None else (gpu_by_name(gpu), {})
    if elsewhere:
        unavailable |= {design.name: "SGLang selects by another function" for design in DESIGNS if "selection" in design.stages}
    known = (*BACKENDS, *models.stock_backends())
    expect(backend in known, "moe-runner-backend", backend, " | ".join(known))
    ours = backend if backend in BACKENDS else None
    expect(gate is None or gate in GATES, "gate", gate, " | ".join(GATES))
    read = settings.read()
    asked = read.gate if gate is None else gate
    counts = None if rows is None else parse_rows(rows)
    listed = 0 if counts is None else len(counts)
    expect(listed <= LISTED_ROWS, "rows", f"{listed} row counts", f"at most {LISTED_ROWS}; without --rows, every range")
    table = tuned.find(where)
    bands = None if table is None or elsewhere else table.tuned(problem)
    how = {"plan": plan, "deterministic": deterministic}
    found = explain_rows(problem, where, ours, asked, counts, unavailable, bands=bands, **how)
    stops = never_deterministic(asked) if deterministic else ""
    logits, shown = models.logits_of(problem, asked), in_force(problem, asked)[0]
    if as_json:
        about = {
            "problem": shown,
            "gpu": where,
            "backend": backend,
            "gate": asked,
            "logits": logits,
            **how,
            "stops": stops,
            "note": note,
            "table": None if table is None else {**_told(table), "has_this_shape": bands is not None},
        }
        print_json({**about, "rows": found})
        return
    out = console()
    stock = "" if ours else " (not ours: its selection stays SGLang's)"
    planned = "taken by the experts" if plan else "not taken by the experts"
    text = f"model    {shown}\nGPU      {where}\nbackend  {backend}{stock}\ngate     {asked}\nplan     {planned}"
    out.print(text, markup=False)
    if logits:
        out.print(f"logits   {logits}", markup=False)
    if deterministic:
        out.print("mode     deterministic inference", markup=False)
    if stops:
        text = f"note     a server does not start: SGLANG_ROUTER_EXT_GATE: {stops}; below is what would run"
        out.print(text, markup=False, soft_wrap=True)
    if note:
        out.print(f"note     {note}; below is what this shape would get", markup=False)
    if table is not None:
        has = "; this shape is not in it: the package's records stand for it"
        if bands is not None:
            has = f"; it has this shape at {bands.rows} rows: the package's records stand for others"
        out.print(f"bands    {table}{'' if table.against else has}", markup=False, soft_wrap=True)
    if not read.enabled:
        out.print(
            "note     SGLANG_ROUTER_EXT=0 turns the plugin off: SGLang runs stock; below is what it would do", markup=False
        )
    shown_rows = Table(title="what runs", title_justify="left")
    for name in ("rows", "gate", "selection", "measured"):
        shown_rows.add_column(name)
    for entry in found:
        shown_rows.add_row(str(entry.rows), entry.choice.gate, entry.choice.selection, entry.measured)
    out.print(shown_rows)
    out.print("host: SGLang's own path")
    losers = Table(title="why others do not", title_justify="left")
    for name in ("design", "rows", "reasons"):
        losers.add_column(name)
    for design in DESIGNS:
        texts: dict[str, list[str]] = {}
        for entry in found:
            if design.name in ("host", entry.choice.gate, entry.choice.selection):
                continue
            why = entry.choice.losers.get(design.name) or [f"{backend} is no backend of ours"]
            texts.setdefault("; ".join(why), []).append(str(entry.rows))
        for text, where_rows in texts.items():
            losers.add_row(design.name, ", ".join(where_rows), text)
    if losers.row_count:
        out.print(losers)
