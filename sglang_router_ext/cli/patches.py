"""``patches``: SGLang itself, patched and as it was."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from sglang_router_ext import patch_trial
from sglang_router_ext import patches as patching
from sglang_router_ext.cli.app import Ticker, app, console, print_json

patches = typer.Typer(name="patches", help="Patches of SGLang, for whoever prefers them to hooks.", no_args_is_help=True)
app.add_typer(patches)

Names = Annotated[list[str] | None, typer.Argument(help="of patches, as status shows them; all where none is given")]
Folder = Annotated[pathlib.Path | None, typer.Option("--target", help="SGLang's package; else the one that Python finds")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="verify everything and change nothing")]
AsJson = Annotated[bool, typer.Option("--json")]


@patches.command()
def status(*, target: Folder = None, as_json: AsJson = False) -> None:
    """Show how far each patch is: applied, not, partly (interrupted), or no tree that it is of, and which file says so."""
    tree = patching.find_tree(target)
    found = [(patch, patching.look(patch, tree)) for patch in patching.pick()]
    if as_json:
        states = [{"name": p.name, "state": s.state, "files": s.files, "upstream": p.upstream} for p, s in found]
        print_json({"target": str(tree.root), "sglang": tree.version, "patches": states})
        return
    table = Table(title=f"SGLang {tree.version} in {tree.root}", title_justify="left")
    for column in ("patch", "state", "files", "why", "remove when"):
        table.add_column(column, overflow="fold")
    for patch, state in found:
        files = state.files or [one.path for one in patch.target]
        table.add_row(patch.name, state.state, "\n".join(files), patch.why, patch.remove_when)
    console().print(table)


@patches.command()
def apply(names: Names = None, *, target: Folder = None, dry_run: DryRun = False) -> None:
    """Apply patches to SGLang; servers that start from then on run it. Originals are kept beside the package."""
    tree = patching.find_tree(target)
    _show(patching.apply(patching.pick(names), tree, dry_run=dry_run), tree, "applied", dry_run=dry_run)


@patches.command()
def revert(names: Names = None, *, target: Folder = None, dry_run: DryRun = False) -> None:
    """Take patches back: SGLang's files are those of its wheel again, to the byte."""
    tree = patching.find_tree(target)
    _show(patching.revert(patching.pick(names), tree, dry_run=dry_run), tree, "reverted", dry_run=dry_run)


@patches.command()
def check(names: Names = None, *, target: Folder = None, as_json: AsJson = False) -> None:
    """Apply each patch to a copy of SGLang, run its test there, revert it and compare every byte. Changes nothing."""
    tree = patching.find_tree(target)
    with Ticker("check") as ticker:
        found = patch_trial.check(patching.pick(names), tree, ticker.say)
    for one in found:
        if not one.passed:
            typer.echo(f"{one.name}:\n{one.output}", err=True)
    if as_json:
        print_json(found)
    else:
        table = Table("patch", "its test, applied", "the tree, reverted", title_justify="left")
        for one in found:
            table.add_row(one.name, "passed" if one.passed else "FAILED", "identical" if one.identical else "DIFFERS")
        console().print(table)
    raise typer.Exit(0 if all(one.passed and one.identical for one in found) else 1)


def _show(changes: Sequence[patching.Change], tree: patching.Tree, done: str, *, dry_run: bool) -> None:
    out = console()
    for change in changes:
        out.print(f"{'would change' if dry_run else 'changed'} {change.path}", markup=False, soft_wrap=True)
    if not changes:
        out.print(f"nothing to do: {done} already in {tree.root}", markup=False, soft_wrap=True)
    elif done == "applied" and not dry_run:
        out.print(f"originals are kept in {tree.root.parent / patching.BACKUP}", markup=False, soft_wrap=True)
