"""What really ran: calls by (stage, design, reason), counted in the process that runs the model and shown in three places.

* one line in the log, after the first forwards and captures; an error in the log if no layer is linked at all;
* the Prometheus counter ``sglang_router_ext_calls_total{stage,design,reason}``, where prometheus_client is installed;
* one status file a process, which ``read_live`` reads for ``sglang-router-ext doctor``.

A call is one that Python sees: under CUDA graphs the hooks run while a graph is captured and not when it is replayed, so the
counts tell which paths were compiled into the graphs, not how often they were replayed.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import pathlib
import stat
import tempfile
import threading
import time
from typing import Any, NamedTuple

import msgspec

logger = logging.getLogger(__name__)

HOST = "host"
"""The design name of SGLang's own path; only its calls carry a reason."""
PERIOD_S = 2.0
QUIET_S = 6.0
LATEST_S = 120.0
UNLINKED = (
    "no MoE layer is linked: this model's router is SGLang's own (linked are models built on DeepseekV2MoE: DeepSeek V2 to V4,"
    " GLM-5.x, Kimi K2 and K2.5, Hunyuan V4; GLM-4.5 to 4.7; Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, Mixtral, OLMoE,"
    " GraniteMoE, SDAR, Step3, Hunyuan V1 and MiniMax-M2)"
)


class Path(NamedTuple):
    """A way in which a stage of one layer was done: a design of the table, or ``host`` and why."""

    stage: str
    design: str
    reason: str = ""


class Count(msgspec.Struct, frozen=True):
    """How often a path was taken; the same fields as :class:`Path`."""

    stage: str
    design: str
    reason: str
    calls: int


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while a process lives."""

    pid: int
    started: int
    """Start of the process in clock ticks since boot: tells a live pid from one that was given out again."""
    role: str
    rank: int | None
    """World rank of a scheduler."""
    gpu: str
    backends: list[str]
    """Backends of ours that were asked for: the target model's, then the draft model's."""
    gate: str
    sglang: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One live process, as ``read_live`` finds it."""

    identity: Identity
    hooks: list[str]
    """Targets whose hook was proven live."""
    linked: int
    """MoE layers whose gate and selection are linked."""
    counts: list[Count]
    updated: float
    """Seconds since the epoch."""


_lock = threading.Lock()
_calls: dict[Path, int] = {}
_linked = 0
_announced: Status | None = None
_reporter: threading.Thread | None = None


def count(stage: str, design: str, reason: str = "") -> None:
    """Note one call. ``reason`` must come from a small set of texts: it is a Prometheus label.

    Costs one dictionary update; everything else is the reporter's.
    """
    path = Path(stage, design, reason)
    with _lock:
        _calls[path] = _calls.get(path, 0) + 1


def link() -> None:
    """Note one MoE layer whose gate and selection are linked."""
    global _linked
    with _lock:
        _linked += 1


def counts() -> list[Count]:
    """Every path taken so far, in the order of first use."""
    return [Count(*path, calls) for path, calls in _snapshot().items()]


def _snapshot() -> dict[Path, int]:
    with _lock:
        return dict(_calls)


def reset() -> None:
    """Forget all counts; for tests and demonstrations."""
    global _linked
    with _lock:
        _calls.clear()
        _linked = 0


def summary() -> str:
    """One line: ``gate: pair x 42; selection: pair x 40, host x 2 (plan refused: topk 9, planned 8)``."""
    stages: dict[str, list[str]] = {}
    for entry in counts():
        reason = f" ({entry.reason})" if entry.reason else ""
        stages.setdefault(entry.stage, []).append(f"{entry.design} x {entry.calls}{reason}")
    return "; ".join(f"{stage}: {', '.join(paths)}" for stage, paths in stages.items()) or "no MoE layer ran"


@functools.cache
def _prometheus() -> Any:
    """The counter, or None where prometheus_client is not installed or not usable.

    Made after the first count and not earlier: prometheus_client decides between one process and many when it is imported,
    and SGLang sets that up after plugins are loaded.
    """
    try:
        from prometheus_client import Counter

        return Counter(
            "sglang_router_ext_calls",
            "Router calls seen by Python, by stage, design and, for SGLang's own path, the reason",
            Path._fields,
        )
    except ImportError:
        return None
    except (OSError, ValueError) as error:  # a multiprocess directory that is not there, a name that is taken
        logger.warning("sglang-router-ext: no Prometheus counter: %s", error)
        return None


def directory() -> pathlib.Path:
    """Where status files are: the same for every process of one user, whatever session it was started from."""
    return pathlib.Path(tempfile.gettempdir()) / f"sglang-router-ext-{os.getuid()}"


def announce(
    *, role: str, rank: int | None, gpu: str, backends: list[str], gate: str, sglang: str, hooks: list[str], runs_models: bool
) -> None:
    """Make this process visible to ``read_live`` until it ends; a second call replaces the first. ``runs_models``: keep
    reporting what its MoE layers do."""
    global _announced, _reporter
    pid = os.getpid()
    identity = Identity(
        pid=pid,
        started=_started(pid),
        role=role,
        rank=rank,
        gpu=gpu,
        backends=backends,
        gate=gate,
        sglang=sglang,
    )
    if _announced is None:
        atexit.register(_withdraw, pid)
    _announced = Status(identity=identity, hooks=hooks, linked=0, counts=[], updated=time.time())
    _write(_announced)
    if runs_models and _reporter is None:
        _reporter = threading.Thread(target=_report, name="router-ext-report", daemon=True)
        _reporter.start()


def read_live() -> list[Status]:
    """Status of every live process of this user, by pid. Files of processes that have ended, or whose pid belongs to another
    process by now, are left out, and so are files that cannot be read."""
    if not _is_private(directory()):
        return []
    found = []
    for file in directory().glob("*.json"):
        try:
            status = msgspec.json.decode(file.read_bytes(), type=Status)
        except (OSError, msgspec.MsgspecError):
            continue
        if _is_alive(status.identity):
            found.append(status)
    return sorted(found, key=lambda status: status.identity.pid)


def _started(pid: int) -> int:
    """Start time from /proc/<pid>/stat (field 22); the name before it, in brackets, may hold anything. OSError: no such pid."""
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _is_alive(identity: Identity) -> bool:
    try:
        return _started(identity.pid) == identity.started
    except OSError:
        return False


def _is_private(folder: pathlib.Path) -> bool:
    """A directory that is ours alone: the temporary folder is shared, so that anyone could have made it before us."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def _write(announced: Status) -> None:
    """Write the status file: whole or not at all. A server does not fail because its temporary folder does."""
    status = msgspec.structs.replace(announced, linked=_linked, counts=counts(), updated=time.time())
    folder = directory()
    file = folder / f"{status.identity.pid}.json"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(folder):
            raise PermissionError(f"{folder} is not a directory of this user with mode 0700")
        draft = file.with_suffix(".tmp")
        draft.write_bytes(msgspec.json.encode(status))
        draft.replace(file)
    except OSError as error:
        _warn_once(f"no status for doctor: {error}")


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("sglang-router-ext: %s", text)


def _withdraw(pid: int) -> None:
    if os.getpid() == pid:  # not in a fork
        (directory() / f"{pid}.json").unlink(missing_ok=True)


def _report() -> None:
    """Keep Prometheus and the status file up to date, and log the summary once calls have become quiet, or that the model has
    no layer for us. A thread of its own, so that no forward waits for a file."""
    began = first = changed = time.monotonic()
    exported: dict[Path, int] = {}
    logged = warned = False
    while (announced := _announced) is not None:
        now, current = time.monotonic(), _snapshot()
        if current != exported:
            _export(current, exported)
            _write(announced)
            first = now if not exported else first
            exported, changed = current, now
        if current and not logged and (now - changed >= QUIET_S or now - first >= LATEST_S):
            logger.info("sglang-router-ext: %s", summary())
            logged = True
        if not warned and not _linked and now - began >= LATEST_S:
            logger.error("sglang-router-ext: %s", UNLINKED)
            warned = True
        time.sleep(PERIOD_S)


def _export(current: dict[Path, int], exported: dict[Path, int]) -> None:
    metric = _prometheus()
    if metric is not None:
        for path, calls in current.items():
            metric.labels(*path).inc(max(0, calls - exported.get(path, 0)))
