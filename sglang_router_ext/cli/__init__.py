"""The command ``sglang-router-ext``. One file a group of commands; ``app.py`` is what they share."""

from __future__ import annotations

from sglang_router_ext.cli import demo, flips, launch, machine, measure, patches, precision, profile, table, tune
from sglang_router_ext.cli.app import app

__all__ = ["app", "demo", "flips", "launch", "machine", "main", "measure", "patches", "precision", "profile", "table", "tune"]


def main() -> None:
    """The console script."""
    app()
