"""``launch``: from a preset's name to a running server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.table import Table

from sglang_router_ext import launch as presets
from sglang_router_ext import settings
from sglang_router_ext.bench.record import read_all
from sglang_router_ext.cli.app import app, console, print_json
from sglang_router_ext.contract import expect


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="of a preset, as --list shows them")] = "",
    *,
    listed: Annotated[bool, typer.Option("--list", help="show the presets and start nothing")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the command and what speaks against it here")] = False,
    way: Annotated[str, typer.Option(help=f"how SGLang starts it: {' | '.join(presets.WAYS)}")] = "launch_server",
    as_json: Annotated[bool, typer.Option("--json", help="with --list")] = False,
) -> None:
    """Start the server of a preset, or show its command. All other options go to SGLang's server and win over the preset's."""
    if listed:
        expect(not name, "name", name, "none with --list")
        _list(as_json=as_json)
        return
    expect(not as_json, "json", "--json", "with --list")
    preset = presets.read(name)
    words = presets.command(preset, way=way, more=context.args)
    console().print(presets.shown(words, preset.environment), soft_wrap=True, markup=False)
    for text in presets.contradictions(preset, context.args):
        console(stderr=True).print(f"note: {text}", soft_wrap=True, markup=False)
    against = _against(presets.flags_of(preset, context.args), preset.environment)
    for reason in against:
        console(stderr=True).print(f"not here: {reason}", soft_wrap=True, markup=False)
    if dry_run:
        return
    if against:
        raise typer.Exit(1)
    os.execvpe(words[0], words, os.environ | preset.environment)


def _against(flags: Mapping[str, presets.Flag], environment: Mapping[str, str]) -> list[str]:
    """What stops the server with these options on this machine, all of it."""
    from sglang_router_ext.bench import machine
    from sglang_router_ext.plugin import preflight

    names = [str(flags.get(name, "auto")) for name in ("moe-runner-backend", "speculative-moe-runner-backend")]
    gate = settings.read({**os.environ, **environment}).gate
    deterministic = preflight.DETERMINISTIC.removeprefix("--") in flags
    demand = preflight.Demand.of_options([*names], gate, deterministic=deterministic)
    gpu = preflight.detect_gpu()
    found = [str(finding) for finding in preflight.check(gpu, demand) if finding.blocks] if demand else []
    found += presets.not_written(flags)
    return found + (presets.too_few(flags, machine.gpus()) if gpu is not None else [])


def _list(*, as_json: bool) -> None:
    found = [presets.read(name) for name in presets.names()]
    if as_json:
        print_json(found)
        return
    records = read_all()
    table = Table(title="presets", title_justify="left")
    for column in ("preset", "model", "GPUs", "goal", "ours", "measured", "why"):
        table.add_column(column, overflow="fold", no_wrap=column == "preset")
    for one in found:
        table.add_row(one.name, one.model, one.gpus, one.goal, one.ours, presets.evidence(one, records), one.why)
    console().print(table)
