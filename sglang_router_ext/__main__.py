"""``python -m sglang_router_ext``: the command line, for environments in which the console script is not installed."""

from __future__ import annotations

from sglang_router_ext.cli import main

main()
