"""``profile``: which routers a profile of a server shows, their time in a layer, and their share of a step."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer
from rich.table import Table

from sglang_router_ext import profile as profiles
from sglang_router_ext.backends import BACKENDS
from sglang_router_ext.choose import Choice, choose
from sglang_router_ext.cli import model as models
from sglang_router_ext.cli.app import app, console, pick, print_json
from sglang_router_ext.contract import expect, gpu_by_name


@app.command()
def profile(
    files: Annotated[list[pathlib.Path], typer.Argument(help="traces, or folders of some")],
    *,
    model: Annotated[str | None, typer.Option(help="a case, a checkpoint's folder or config.json: what is expected")] = None,
    rows: Annotated[int | None, typer.Option(help="of a decode step, beside --model")] = None,
    moe_runner_backend: Annotated[str | None, typer.Option(help="of ours, beside --model; without it SGLang's")] = None,
    gpu: Annotated[str, typer.Option(help="that was profiled, beside --model")] = "h200",
    no_plan: Annotated[bool, typer.Option("--no-plan", help="beside --model: the experts take no plan")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Read torch profiler traces and Nsight Systems exports: the routers, microseconds a layer, and their share of a step.

    With --model and --rows, decode steps are held against what `explain` says of them; the exit status is 1 where they differ.
    """
    asked = {"rows": rows, "moe-runner-backend": moe_runner_backend}
    for name, value in asked.items():
        expect(value is None or model is not None, name, value, "none without --model")
    expect(model is None or rows is not None, "model", model, "--rows beside it")
    choice = None if model is None or rows is None else _expected(model, rows, moe_runner_backend, gpu, plan=not no_plan)
    found = [(str(file), profiles.look(profiles.read(file))) for file in profiles.files_of(files)]
    wrong = {
        file: [text for steps in some if steps.what.startswith("decode") for text in profiles.mismatches(steps, choice)]
        for file, some in found
        if choice is not None
    }
    if as_json:
        told = [{"file": file, "steps": some, "mismatches": wrong.get(file, [])} for file, some in found]
        print_json({"expected": choice, "files": told})
    else:
        for file, some in found:
            _show(file, some, choice, wrong.get(file, []))
    raise typer.Exit(1 if any(wrong.values()) else 0)


def _expected(model: str, rows: int, backend: str | None, gpu: str, *, plan: bool) -> Choice:
    expect(rows >= 1, "rows", rows, "1 or more")
    if backend is not None:
        pick("moe-runner-backend", [backend], list(BACKENDS))
    return choose(models.read(model).problem, rows, gpu_by_name(gpu), backend=backend, plan=plan)


def _show(file: str, some: list[profiles.Steps], choice: Choice | None, wrong: list[str]) -> None:
    out = console()
    if not some:
        out.print(f"{file}: no router known by its kernels", markup=False, soft_wrap=True)
    for steps in some:
        title = f"{file}: {steps.steps} {steps.what}, {steps.step_us:,.0f} us"
        table = Table(title=title, title_justify="left")
        for name in ("router", "kernels"):
            table.add_column(name)
        for name in ("in a step", "us"):
            table.add_column(name, justify="right")
        for path in steps.paths:
            table.add_row(path.what, ", ".join(path.kernels), f"{path.a_step:g}", f"{path.median_us:.2f}")
        for name, calls in steps.sorting.items():
            table.add_row("sorting by expert", name, f"{calls:g}", "")
        share = f"{steps.router_us:,.1f} and {steps.sorting_us:,.1f} us, {100 * steps.share:.3g} % of a step"
        out.print(table)
        out.print(f"routers and sorting, all layers: {share}", markup=False, soft_wrap=True)
    for text in wrong:
        out.print(f"warning: expected {choice}: {text}", markup=False, soft_wrap=True)
    if choice is not None and not wrong:
        out.print(f"as expected: {choice}", markup=False, soft_wrap=True)
