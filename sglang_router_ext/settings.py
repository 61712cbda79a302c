"""The only reader of environment variables: at most six, each a row here, read once when a route is bound."""

from __future__ import annotations

import os
import pathlib

import msgspec

from sglang_router_ext.backends import GATES
from sglang_router_ext.contract import expect


class Setting(msgspec.Struct, frozen=True):
    name: str
    default: str
    allowed: tuple[str, ...]
    what: str
    path: bool = False
    """Whether it may be an absolute path too: a server and those who ask about it have folders of their own."""

    @property
    def choices(self) -> tuple[str, ...]:
        """What it takes, in words."""
        return (*self.allowed, *["an absolute path"] * self.path)


TABLE = "SGLANG_ROUTER_EXT_TABLE"
"""Names the table of ``tune``; see ``tuned.py``."""

SETTINGS = (
    Setting("SGLANG_ROUTER_EXT", "1", ("0", "1"), "0 turns the whole plugin off: nothing is hooked, SGLang runs stock"),
    Setting(
        "SGLANG_ROUTER_EXT_GATE",
        "auto",
        GATES,
        "gate GEMM under any backend, stock ones included; host keeps SGLang's own; fp32, under a backend of ours: as auto, "
        "and a model that rounds its logits to bf16 keeps them in fp32 where a gate of ours runs, as with a named one",
    ),
    Setting(
        TABLE,
        "auto",
        ("auto", "off"),
        "table of `sglang-router-ext tune` for `router_ext`: auto, which is also what an empty value means, takes the one that "
        "stands in the user's configuration for this GPU, if it is of today's kernels; off takes none; a path takes that file, "
        "and a server does not start with one that is not of this GPU and of today's kernels",
        path=True,
    ),
)


class Settings(msgspec.Struct, frozen=True):
    """The values of :data:`SETTINGS` in this process."""

    enabled: bool
    gate: str
    table: str
    """``auto``, ``off`` or an absolute path."""


def read(environ: dict[str, str] | None = None) -> Settings:
    """Read every setting; raises :class:`ContractError` naming the variable, its value and what is allowed."""
    source = os.environ if environ is None else environ
    values = {}
    for setting in SETTINGS:
        value = source.get(setting.name, "").strip() or setting.default
        fits = value in setting.allowed or (setting.path and os.path.isabs(value))
        expect(fits, setting.name, repr(value), " | ".join(setting.choices))
        values[setting.name] = value
    return Settings(
        enabled=values["SGLANG_ROUTER_EXT"] == "1",
        gate=values["SGLANG_ROUTER_EXT_GATE"],
        table=values[TABLE],
    )


def user_folder(variable: str, below_home: str) -> pathlib.Path:
    """This package's folder in the one that ``variable`` of the XDG names, or in ``below_home`` of the user's. The XDG has
    relative names ignored: they would be another folder for every process.
    """
    root = os.environ.get(variable, "")
    root = root if os.path.isabs(root) else os.path.join(os.path.expanduser("~"), below_home)
    return pathlib.Path(root) / "sglang-router-ext"


def config_dir() -> pathlib.Path:
    """Where this package looks for what a user made with it: XDG_CONFIG_HOME or ~/.config, below ``sglang-router-ext``."""
    return user_folder("XDG_CONFIG_HOME", ".config")
