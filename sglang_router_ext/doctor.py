"""What ``doctor`` finds: the machine, what builds kernels, settings, records, and whether the plugin is found and alive.

Everything that imports SGLang happens in a process of its own, which loads plugins the way a server does: a broken
installation is then a finding, not a traceback, and the hooks are proven and not just looked up. Imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from sglang_router_ext import TESTED_SGLANG, patches, settings, tuned
from sglang_router_ext.backends import BACKENDS
from sglang_router_ext.bench import machine, record
from sglang_router_ext.contract import ContractError

ENTRY_POINTS = "sglang.srt.plugins"
ENTRY_POINT = "router_ext"
PROBE_TIMEOUT_S = 300
ROOM = 2**30
"""Bytes that the kernels of a few models take in SGLang's cache, and their builds meanwhile."""
PRIVATE = (
    *("CXX", "CUDA_HOME", "SGLANG_JIT_CACHE_DIR", "SGLANG_PLUGINS", "XDG_CONFIG_HOME"),
    *(setting.name for setting in settings.SETTINGS),
)
"""Variables whose values findings quote. A report has a path, and anything ``LONG`` that may be a secret, by name only."""
LONG = 20
PROBE_MARK = "SGLANG_ROUTER_EXT_PROBE "


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. ``state``: ``ok``, ``note`` (works, or concerns only some designs) or ``problem``."""

    section: str
    subject: str
    state: str
    text: str


def examine() -> Iterator[Finding]:
    """Every finding, quick ones first; the last sections wait for a process that imports SGLang."""
    yield from _machine()
    yield _toolchain()
    yield from _tools()
    yield _cache()
    yield from _environment()
    yield from _records()
    yield from _table()
    yield _entry_point()
    yield from _patches()
    yield from _plugin()
    yield from _live()


def _machine() -> Iterator[Finding]:
    for name, version in machine.versions().items():
        yield Finding("versions", name, "ok" if version else "note", version or "not found")
    yield Finding("versions", "Python", "ok", platform.python_version())
    yield Finding("versions", "system", "ok", machine.system())
    checkout = machine.checkout()
    if checkout is not None:
        head, changed = checkout
        yield Finding("versions", "commit", "note" if changed else "ok", f"{head}{', with changes' * changed}")
    elif (commit := machine.commit()) != "unknown":
        yield Finding("versions", "commit", "ok", commit)
    try:
        gpu = machine.gpu()
    except ImportError as error:
        yield Finding("GPU", "torch", "problem", str(error))
        return
    yield Finding("GPU", "device", "ok" if gpu else "problem", str(gpu) if gpu else "no CUDA GPU")


def _toolchain() -> Finding:
    from sglang_router_ext import build

    try:
        found = build.find_toolchain()
    except build.BuildError as error:
        return Finding("compiler", "nvcc", "problem", str(error))
    return Finding("compiler", "nvcc", "ok", f"{found.version} at {found.nvcc} (from {found.source})")


def _tools() -> Iterator[Finding]:
    """What SGLang's JIT loader runs beside nvcc."""
    for tool, subject, help_ in (
        ("ninja", "ninja", "pip install ninja"),
        (os.environ.get("CXX", "c++"), "C++ compiler", "a g++, or CXX=<compiler>"),
    ):
        found = shutil.which((shlex.split(tool) or [tool])[0])
        text = found or f"{tool} is not found, and SGLang's JIT builds with it: {help_}"
        yield Finding("compiler", subject, "ok" if found else "problem", text)


def _cache() -> Finding:
    """SGLang's cache of JIT modules: where it is, or would be made."""
    asked = os.environ.get("SGLANG_JIT_CACHE_DIR") or "~/.cache/sglang/jit"
    try:
        path = pathlib.Path(asked).expanduser()
        place = next(folder for folder in (path, *path.parents) if folder.exists())
    except (RuntimeError, OSError) as error:
        return Finding("compiler", "JIT cache", "problem", f"{asked}: {error}; set SGLANG_JIT_CACHE_DIR")
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return Finding("compiler", "JIT cache", "problem", f"{path}: {place} cannot be written; set SGLANG_JIT_CACHE_DIR")
    free = shutil.disk_usage(place).free
    short = f", too few for builds; allowed: {ROOM / 1e9:.1f} GB or more" if free < ROOM else ""
    return Finding("compiler", "JIT cache", "problem" if short else "ok", f"{path}, {free / 1e9:.1f} GB free{short}")


def _environment() -> Iterator[Finding]:
    try:
        asked = settings.read()
    except ContractError as error:
        yield Finding("environment", "settings", "problem", str(error))
    else:
        text = f"SGLANG_ROUTER_EXT_GATE={asked.gate}" if asked.enabled else "SGLANG_ROUTER_EXT=0: the plugin is off"
        yield Finding("environment", "settings", "ok" if asked.enabled else "note", text)
    listed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if listed and ENTRY_POINT not in listed:
        text = f"got {','.join(listed)}, so that SGLang leaves {ENTRY_POINT} out; allowed: unset, or a list with {ENTRY_POINT}"
        yield Finding("environment", "SGLANG_PLUGINS", "problem", text)


def _records() -> Iterator[Finding]:
    for path in sorted(record.DIRECTORY.glob("*.jsonl")):
        try:
            found = record.read(path)
        except record.RecordError as error:
            yield Finding("records", path.name, "problem", str(error))
            continue
        yield Finding("records", path.name, "ok", f"{len(found)} lines")
        for text in (*record.stale(found), *record.unproven(found)):
            yield Finding("records", path.name, "note", text)


def _table() -> Iterator[Finding]:
    """The tuned table for this GPU, whose bands stand in place of the package's."""
    try:
        gpu = machine.gpu()
        found = tuned.find(gpu)
        off = settings.read().table == "off"
    except (ImportError, ContractError):
        return  # said above
    if found is None:
        text = f"{settings.TABLE}=off" if off else f"none{f' for {gpu}' if gpu else ''}; sglang-router-ext tune makes one"
        yield Finding("bands", "tuned table", "note" if off else "ok", text)
    else:
        state = "ok" if not found.against else "problem" if found.named else "note"
        when = "" if found.table is None else f", {tuned.age(found.table.time)}"
        yield Finding("bands", "tuned table", state, f"{found}{when}")


def _entry_point() -> Finding:
    names = [point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    if ENTRY_POINT in names:
        return Finding("plugin", "entry point", "ok", f"{ENTRY_POINT} in {ENTRY_POINTS}")
    return Finding(
        "plugin", "entry point", "problem", f"SGLang does not find {ENTRY_POINT}: the package is not installed by pip"
    )


def _patches() -> Iterator[Finding]:
    try:
        tree = patches.find_tree()
        found = [patches.look(patch, tree) for patch in patches.series().patch]
    except (ContractError, OSError) as error:
        yield Finding("patches", "SGLang", "note", str(error))
        return
    for state in found:
        if state.state == patches.PARTLY:
            text = f"{state}; `sglang-router-ext patches apply {state.name}` finishes it, `revert` takes it back"
            yield Finding("patches", state.name, "problem", text)
        else:
            clean = state.state in (patches.APPLIED, patches.NOT_APPLIED)
            yield Finding("patches", state.name, "ok" if clean else "note", str(state))


def _plugin() -> Iterator[Finding]:
    """Preflight's findings and every hook, from a process that loads plugins as a server does."""
    command = [sys.executable, "-c", "from sglang_router_ext import doctor; doctor.probe()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield Finding("plugin", "probe", "problem", f"importing SGLang took more than {PROBE_TIMEOUT_S} s")
        return
    answers = [line for line in done.stdout.splitlines() if line.startswith(PROBE_MARK)]
    for line in answers:
        yield msgspec.json.decode(line.removeprefix(PROBE_MARK), type=Finding)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        yield Finding("plugin", "probe", "problem", last)


def probe() -> None:
    """The other process: prints each finding as a marked line. SGLang prints what it likes in between."""
    from sglang_router_ext.plugin import hooks, preflight

    def tell(section: str, subject: str, state: str, text: str) -> None:
        finding = json.dumps({"section": section, "subject": subject, "state": state, "text": text})
        print(f"\n{PROBE_MARK}{finding}", flush=True)

    version = preflight.sglang_version()
    tell("plugin", "SGLang", "ok" if version == TESTED_SGLANG else "note", f"{version}; tested: {TESTED_SGLANG}")
    findings = preflight.check(preflight.detect_gpu())
    for found in findings:
        tell("preflight", found.subject, "problem" if found.blocks else "note", found.text)
    if not findings:
        tell("preflight", "all", "ok", "nothing against running any backend")

    from sglang.srt.plugins import load_plugins

    load_plugins()
    if not settings.read().enabled:
        tell("hooks", "all", "note", "none is applied: SGLANG_ROUTER_EXT=0 turns the plugin off")
        return
    from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES

    missing = [name for name in BACKENDS if name not in MOE_RUNNER_BACKEND_CHOICES]
    text = f"SGLang does not take {', '.join(missing)}" if missing else "SGLang takes " + ", ".join(BACKENDS)
    tell("plugin", "backends", "problem" if missing else "ok", text)
    early = {hook.target for hook in hooks.HOOKS if hooks.live(hook)}
    for hook in hooks.needed(where=hooks.EVERY_PROCESS):
        alive = hook.target in early
        text = "live after load_plugins()" if alive else "not live after load_plugins()"
        tell("hooks", hook.target, "ok" if alive else "problem", text)
    rest = hooks.needed(where=hooks.SCHEDULER)
    try:
        hooks.install(rest)
    except hooks.HookError as error:
        tell("hooks", "install", "problem", str(error))
    for hook in rest:
        alive = hooks.live(hook)
        tell("hooks", hook.target, "ok" if alive else "problem", "live once installed" if alive else "not live once installed")


def _live() -> Iterator[Finding]:
    from sglang_router_ext.plugin import counters

    found = counters.read_live()
    if not found:
        yield Finding("servers", "live", "ok", "no process of this user runs the plugin")
    for status in found:
        yield Finding("servers", f"pid {status.identity.pid}", "ok", _status(status))


def _status(status: Any) -> str:
    who = status.identity
    ran = "; ".join(f"{c.stage}: {c.design} x {c.calls}{f' ({c.reason})' if c.reason else ''}" for c in status.counts)
    asked = f"backend {', '.join(who.backends) or 'stock'}, gate {who.gate}"
    placed = f"{len(status.hooks)} hooks live, {status.linked} layers linked"
    return f"{who.role}, {who.gpu}, {asked}, {placed}; {ran or 'no MoE layer ran'}"


def report(findings: list[Finding]) -> str:
    """``findings`` as text for a bug report, problems first, without what tells who or where the user is."""
    order = sorted(findings, key=lambda one: ("problem", "note", "ok").index(one.state))
    lines = [f"{one.state:7}  {one.section}: {one.subject}: {one.text}" for one in order]
    text = "\n".join(["```", *lines, "```"])
    hidden = {name: os.environ.get(name, "") for name in PRIVATE} | {"HOME": str(pathlib.Path.home())}
    for name, value in sorted(hidden.items(), key=lambda one: -len(one[1])):
        if "/" in value.rstrip("/") or len(value) >= LONG:
            text = re.sub(rf"(?<![\w./-]){re.escape(value.rstrip('/'))}(?![\w.-])", "~" if name == "HOME" else f"${name}", text)
    return text
