"""``doctor`` and ``build``: what this machine has, and getting its kernels ready."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sglang_router_ext.cli.app import Ticker, app, console, print_json
from sglang_router_ext.contract import expect

STATES = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]PROBLEM[/]"}


@app.command()
def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    as_report: Annotated[bool, typer.Option("--report", help="as text for a bug report, problems first")] = False,
) -> None:
    """Look at versions, GPU, compiler, records, the plugin's hooks (proven live in a process of their own) and live servers."""
    from sglang_router_ext import doctor as findings

    with console(stderr=True).status("looking (importing SGLang takes a while)"):
        found = list(findings.examine())
    if as_json:
        print_json(found)
    elif as_report:
        typer.echo(findings.report(found))
    else:
        table = Table(title="doctor", title_justify="left")
        for name in ("section", "subject", "state", "finding"):
            table.add_column(name, overflow="fold")
        for one in found:
            table.add_row(one.section, Text(one.subject), STATES[one.state], Text(one.text))
        console().print(table)
    raise typer.Exit(1 if any(one.state == "problem" for one in found) else 0)


@app.command()
def build(*, arch: Annotated[int, typer.Option(help="90, 100 or 103; without it, that of this machine's GPU")] = 0) -> None:
    """Build the kernels of all known shapes ahead, so that no server waits for a compiler."""
    from sglang_router_ext import build as builder
    from sglang_router_ext.bench import machine

    known = ", ".join(map(str, builder.ARCH_TARGETS))
    gpu = None if arch else machine.gpu()
    expect(bool(arch) or gpu is not None, "arch", "no CUDA GPU here", f"--arch with one of {known}")
    target = arch or (gpu.arch if gpu else 0)
    expect(target in builder.ARCH_TARGETS, "arch", target, known)
    with Ticker(f"build for sm_{target}") as ticker:
        try:
            for built in builder.prebuild(target):
                ticker.step(str(built), always=True)
        except builder.BuildError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
