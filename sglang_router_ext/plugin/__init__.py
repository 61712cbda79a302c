"""Everything that knows SGLang. ``entry.py`` is the entry point, ``hooks.py`` the one table of changes to SGLang."""

from __future__ import annotations
