"""The only reader of environment variables: at most six, each a row here, read once when a route is bound."""

from __future__ import annotations

import os

import msgspec

from sglang_router_ext.backends import GATES
from sglang_router_ext.contract import expect


class Setting(msgspec.Struct, frozen=True):
    name: str
    default: str
    allowed: tuple[str, ...]
    what: str


SETTINGS = (
    Setting("SGLANG_ROUTER_EXT", "1", ("0", "1"), "0 turns the whole plugin off: nothing is hooked, SGLang runs stock"),
    Setting(
        "SGLANG_ROUTER_EXT_GATE",
        "auto",
        GATES,
        "gate GEMM under any backend, stock ones included; host keeps SGLang's own; fp32, under a backend of ours: as auto, "
        "and a model that rounds its logits to bf16 keeps them in fp32 where a gate of ours runs, as with a named one",
    ),
)


class Settings(msgspec.Struct, frozen=True):
    """The values of :data:`SETTINGS` in this process."""

    enabled: bool
    gate: str


def read(environ: dict[str, str] | None = None) -> Settings:
    """Read every setting; raises :class:`ContractError` naming the variable, its value and what is allowed."""
    source = os.environ if environ is None else environ
    values = {}
    for setting in SETTINGS:
        value = source.get(setting.name, "").strip() or setting.default
        expect(value in setting.allowed, setting.name, repr(value), " | ".join(setting.allowed))
        values[setting.name] = value
    return Settings(enabled=values["SGLANG_ROUTER_EXT"] == "1", gate=values["SGLANG_ROUTER_EXT_GATE"])
