"""``list`` and ``explain``: the design table, and what it means for a model on a GPU. Neither needs torch or a GPU."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from sglang_router_ext import launch as presets
from sglang_router_ext import settings, tuned
from sglang_router_ext.backends import BACKENDS, GATES
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.record import read_all
from sglang_router_ext.choose import in_force, never_deterministic
from sglang_router_ext.cli import bands as over_rows
from sglang_router_ext.cli import model as models
from sglang_router_ext.cli.app import app, check_plots, console, parse_rows, print_json
from sglang_router_ext.cli.bands import Traffic
from sglang_router_ext.cli.evidence import explain_rows
from sglang_router_ext.contract import Gpu, expect, gpu_by_name
from sglang_router_ext.designs import DESIGNS, Design, Rows

WIDE = 150
"""Columns of a terminal that ``list`` fills."""
NARROW = ("design", "status", "rows", "what it is")
LISTED_ROWS = 1024
"""Row counts that ``explain`` lists one by one at most."""
REQUESTS = "1,6,16,96"
"""That ``explain --preset`` speaks of, as the demo does."""


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


def _told(found: tuned.Found) -> dict[str, Any]:
    """A table for ``--json``, without its shapes."""
    about = {"gpu": found.table.gpu, "time": found.table.time, "versions": found.table.versions} if found.table else {}
    told = {"path": found.path, "named": found.named, "digest": found.digest, "in_force": not found.against}
    return {**told, "against": found.against, **about}


def _this_gpu() -> tuple[Gpu, dict[str, str]]:
    from sglang_router_ext.bench import machine
    from sglang_router_ext.plugin import preflight

    gpu = machine.gpu()
    expect(gpu is not None, "gpu", "no CUDA GPU here", "a name: --gpu h200 | b300 | ...")
    assert gpu is not None
    return gpu, preflight.unavailable()


MODELS = "a case of bench, a checkpoint's folder, or a config.json"


@app.command()
def explain(
    *,
    model: Annotated[str | None, typer.Option(help=f"{MODELS}; may be left out with a preset that has a case")] = None,
    gpu: Annotated[str | None, typer.Option(help="h200, b300, ...; without it, the GPU of this machine")] = None,
    backend: Annotated[
        str | None, typer.Option("--moe-runner-backend", help="as for SGLang; stock ones too; else router_ext")
    ] = None,
    gate: Annotated[str | None, typer.Option(help="SGLANG_ROUTER_EXT_GATE; without it, what the environment says")] = None,
    rows: Annotated[str | None, typer.Option(help="row counts, as in 1,6,16-18; without it, every range")] = None,
    plan: Annotated[bool, typer.Option(help="whether the experts take a plan that comes with the ids, as Triton's do")] = True,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="under --enable-deterministic-inference of SGLang's server")
    ] = False,
    named: Annotated[
        str | None, typer.Option("--preset", help="whose GPU, backend, gate and requests; see launch --list")
    ] = None,
    requests: Annotated[
        str | None, typer.Option(help=f"served at once, whose rows are shown; with a preset {REQUESTS}")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--draft-tokens", min=1, help="of a request that a step verifies; the preset's, else 1")
    ] = None,
    backends: Annotated[bool, typer.Option("--backends", help="stock and every backend of ours, one beside the other")] = False,
    plot: Annotated[
        pathlib.Path | None, typer.Option(help="the same as a picture: bands over the row axis, to this .png")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say which designs run for a model at each row count, and why the others do not."""
    check_plots({"plot": plot})
    preset = None if named is None else presets.read(named)
    if preset is not None:  # which options win over
        model = model or preset.case or None
        gpu = preset.gpu.name if gpu is None else gpu
        backend = str(preset.flags.get("moe-runner-backend", "auto")) if backend is None else backend
        gate = preset.environment.get(presets.GATE) if gate is None else gate
        deterministic = deterministic or preset.goal == presets.DETERMINISTIC
        requests, tokens = requests or REQUESTS, tokens or preset.tokens
    expect(model is not None, "model", "nothing" + ", and a preset without a case" * (preset is not None), MODELS)
    assert model is not None
    backend, tokens = "router_ext" if backend is None else backend, tokens or 1
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
    at_once = [] if requests is None else parse_rows(requests, "requests")
    expect(len(at_once) <= LISTED_ROWS, "requests", f"{len(at_once)} numbers", f"at most {LISTED_ROWS}")
    hit = explain_rows(problem, where, ours, asked, [n * tokens for n in at_once], unavailable, bands=bands, **how)
    traffic = [Traffic(n, n * tokens, one) for n, one in zip(at_once, hit, strict=True)]
    beside = backends or plot is not None
    recorded = beside and model in CASES and not deterministic  # where SGLang's own kernels are others
    kernels = over_rows.host_kernels(read_all(), model, where) if recorded else {}
    lanes = over_rows.lanes(problem, where, asked, unavailable, kernels, bands=bands, **how) if beside else []
    if plot is not None:
        from sglang_router_ext.cli import bands_picture

        title = f"What runs for {model if preset is None else preset.name} on {where}"
        bands_picture.plot(lanes, traffic, tokens, title + ", deterministic" * deterministic, plot)
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
        more = {"traffic": traffic} if traffic else {}
        print_json({**about, "rows": found, **more, **({"lanes": lanes} if lanes else {})})
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
    if traffic:
        out.print(over_rows.by_requests(traffic, tokens, plan=plan))
    if backends:
        out.print(over_rows.by_backend(lanes))
        return
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
