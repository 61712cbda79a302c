"""``precision``: what bf16 logits, or a bf16 bias, do to the selection of a model's routers."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.cli import model as models
from sglang_router_ext.cli.app import DEFAULT_CASE, Ticker, app, check_plots, console, pick, print_json
from sglang_router_ext.contract import Problem, expect

if TYPE_CHECKING:
    from sglang_router_ext.bench.layers import Source
    from sglang_router_ext.bench.precision import Average, LayerReport

DRAWN_LAYERS, DRAWN_ROWS = 4, 4096
MOST_LAYERS, MOST_ROWS = 1000, 10**6
DEVICES = ("auto", "cpu", "cuda")


@app.command()
def precision(
    *,
    case: Annotated[str | None, typer.Option(help=f"a model's shape; without --file random rows, else {DEFAULT_CASE}")] = None,
    model: Annotated[str | None, typer.Option(help="a checkpoint's folder: its selection biases")] = None,
    file: Annotated[pathlib.Path | None, typer.Option(help="a safetensors file of weights, biases, hidden states")] = None,
    layers: Annotated[int | None, typer.Option(help=f"random layers; without it {DRAWN_LAYERS}")] = None,
    rows: Annotated[int | None, typer.Option(help=f"random rows of each; without it {DRAWN_ROWS}")] = None,
    seed: Annotated[int, typer.Option(help="of random layers")] = 0,
    device: Annotated[str, typer.Option(help="where to compute: auto, cpu or cuda")] = "auto",
    each: Annotated[bool, typer.Option("--each", help="show every layer")] = False,
    plot: Annotated[pathlib.Path | None, typer.Option(help="write a picture to this PNG file")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Recompute selections with logits and bias in fp32 and in bf16, and count what changes against fp64, layer by layer."""
    expect(device in DEVICES, "device", device, " | ".join(DEVICES))
    expect(0 <= seed < 2**31, "seed", seed, "0 to 2^31 - 1")
    named = {"model": model, "file": file}
    for name, value in {"layers": layers, "rows": rows}.items():
        given = next((option for option, what in named.items() if what is not None), None)
        expect(value is None or given is None, name, value, f"none with --{given}")
    count, each_rows = layers or DRAWN_LAYERS, rows or DRAWN_ROWS
    expect(layers is None or 1 <= layers <= MOST_LAYERS, "layers", layers, f"1 to {MOST_LAYERS}")
    expect(rows is None or 1 <= rows <= MOST_ROWS, "rows", rows, f"1 to {MOST_ROWS}")
    expect(case is None or model is None, "case", case, "none with --model, which has a shape of its own")
    if plot is not None:
        check_plots({"plot": plot})
    problem = _problem(case, model, file)
    expect(problem is None or not problem.hashed, "case", case or model, "a router that ranks its experts; a table names these")
    from sglang_router_ext.bench import precision as lab

    source = _source(problem, case or DEFAULT_CASE, model, file, device, (count, each_rows, seed))
    found, middle_bias = [], None
    with Ticker("precision", source.total) as ticker:
        for place, layer in enumerate(source.layers):
            found.append(lab.look(source.problem, layer))
            if place == source.total // 2 and layer.bias is not None:
                middle_bias = layer.bias.cpu()
            ticker.step(f"layer {layer.number}")
    over = lab.averages(found)
    if plot is not None:
        from sglang_router_ext.bench.precision_plot import plot as draw

        draw(f"{source.what}: {source.problem}", found, middle_bias, plot)
    if as_json:
        print_json(
            {"what": source.what, "problem": source.problem, "average": over, "layers": found, "missing": source.missing}
        )
        return
    out = console()
    out.print(f"{source.what}: {source.problem}, {len(found)} layers", markup=False, soft_wrap=True)
    for table in (_averages(over), _biases(found, each=each), _layers(found) if each else None):
        if table is not None:
            out.print(table)
    if source.missing:
        out.print(source.missing, markup=False, soft_wrap=True)


def _problem(case: str | None, model: str | None, file: pathlib.Path | None) -> Problem | None:
    if model is not None:
        expect(model not in CASES, "model", model, "a checkpoint's folder; a shape is --case")
        return models.read(model).problem
    if case is None and file is not None:
        return None
    return CASES[pick("case", [DEFAULT_CASE if case is None else case], list(CASES))[0]].problem


def _source(
    problem: Problem | None,
    name: str,
    model: str | None,
    file: pathlib.Path | None,
    device: str,
    drawn: tuple[int, int, int],
) -> Source:
    import torch

    from sglang_router_ext.bench import layers as sources

    there = torch.cuda.is_available()
    expect(device != "cuda" or there, "device", device, "cpu: there is no CUDA GPU here")
    where = torch.device("cuda" if there and device != "cpu" else "cpu")
    if file is not None:
        return sources.from_file(file, problem, where)
    assert problem is not None
    if model is None:
        return sources.drawn(name, problem, *drawn, where)
    folder = pathlib.Path(model)
    return sources.from_checkpoint(folder if folder.is_dir() else folder.parent, problem, where)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _averages(over: Sequence[Average]) -> Table | None:
    if not over:
        return None
    table = Table(title="an average layer, against fp64", title_justify="left")
    for name in ("rows", "arithmetic"):
        table.add_column(name)
    for name in (
        "median gap at the cut",
        "median error of a rank key",
        "rows with other experts",
        "weight that goes elsewhere",
    ):
        table.add_column(name, justify="right")
    for one in over:
        shares = (_percent(one.rows_changed), _percent(one.weight_moved))
        rows = f"{one.rows:,} {one.phase} in {one.layers} layer{'s' * (one.layers > 1)}"
        table.add_row(rows, one.arithmetic, f"{one.gap:.2g}", f"{one.key_error:.2g}", *shares)
    return table


def _biases(found: Sequence[LayerReport], *, each: bool) -> Table | None:
    from sglang_router_ext.bench.precision import middle

    some = [(layer.number, layer.bias) for layer in found if layer.bias is not None]
    if not some:
        return None
    table = Table(title="selection bias", title_justify="left")
    table.add_column("layer")
    for name in ("lowest", "highest", "distinct values", "distinct in bf16", "largest error of the cast"):
        table.add_column(name, justify="right")
    for number, bias in some if each else ():
        numbers = (f"{bias.lowest:.4g}", f"{bias.highest:.4g}", str(bias.distinct), str(bias.distinct_bf16))
        table.add_row(str(number), *numbers, f"{bias.largest_error:.2g}")
    lows, highs = [bias.lowest for _, bias in some], [bias.highest for _, bias in some]
    counts = ([bias.distinct for _, bias in some], [bias.distinct_bf16 for _, bias in some])
    middles = (f"{middle(one):.0f} (median)" for one in counts)
    largest = max(bias.largest_error for _, bias in some)
    table.add_row(f"all {len(some)}", f"{min(lows):.4g}", f"{max(highs):.4g}", *middles, f"{largest:.2g}")
    return table


def _layers(found: Sequence[LayerReport]) -> Table | None:
    table = Table(title="rows with other experts than in fp64", title_justify="left")
    some = [(layer.number, phase) for layer in found for phase in layer.phases]
    if not some:
        return None
    table.add_column("layer")
    table.add_column("rows")
    table.add_column("gap at the cut (p10 to p90)", justify="right")
    for effect in some[0][1].effects:
        table.add_column(effect.arithmetic, justify="right")
    for number, phase in some:
        gap = f"{phase.gap.median:.2g} ({phase.gap.p10:.2g} to {phase.gap.p90:.2g})"
        shares = (_percent(effect.rows_changed) for effect in phase.effects)
        table.add_row(str(number), f"{phase.rows:,} {phase.phase}", gap, *shares)
    return table
