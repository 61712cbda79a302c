"""Whether this machine can run what is asked for: all reasons at once, before a server starts.

SGLang logs an exception of a plugin and starts without it, so a blocking finding ends the process (see ``entry.py``): a server
never starts half-hooked. A design that cannot be built here does not block as long as another one of the backend can run; it
is taken out of the choice by name and reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import sys

import msgspec

from sglang_router_ext import TESTED_SGLANG, settings, tuned
from sglang_router_ext.backends import BACKENDS, GATE_MODES
from sglang_router_ext.bench import machine
from sglang_router_ext.choose import Tuned, never_deterministic
from sglang_router_ext.contract import Gpu, Problem, expect
from sglang_router_ext.designs import TABLE, Design
from sglang_router_ext.plugin import hooks

logger = logging.getLogger(__name__)

CHOICES = "sglang.srt.arg_groups.choices:add_moe_runner_backend_choices"
API = (
    CHOICES,
    "sglang.srt.plugins.hook_registry:HookRegistry.apply_hooks",
    "sglang.srt.plugins.hook_registry:HookRegistry._patched",
    "sglang.srt.layers.moe.moe_runner.runner:register_moe_runner_core",
    "sglang.srt.layers.moe.moe_runner.base:DispatchMoeRunnerCore.run_from_dispatch",
    "sglang.srt.layers.moe.moe_runner.base:FusedOpPool.get_fused_func",
    "sglang.srt.layers.moe.utils:RegisteredMoeRunnerBackend",
    "sglang.srt.environ:envs.SGLANG_OPT_USE_FUSED_HASH_TOPK",
    "sglang.srt.layers.moe.hash_topk:HashTopK.num_shared_topk_slots",
    "sglang.srt.layers.moe.topk:routing_simulation_enabled",
    "sglang.srt.layers.moe.topk:_mask_topk_ids_padded_region",
    "sglang.srt.layers.moe.topk:_zero_topk_weights_padded_region",
)
"""What the plugin calls in SGLang, besides what it hooks."""


DETERMINISTIC = "--enable-deterministic-inference"


class Finding(msgspec.Struct, frozen=True):
    """One reason why something does not run here. ``blocks``: nothing of ours, or not what was asked for, can run."""

    subject: str
    text: str
    blocks: bool

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


class Demand(msgspec.Struct, frozen=True):
    """What a server asks of the plugin; false if nothing."""

    backends: tuple[str, ...] = ()
    """Backends of ours: the target model's, then the draft model's."""
    gate: str = "auto"
    """``SGLANG_ROUTER_EXT_GATE``; a name asks for that gate design under any backend."""
    deterministic: bool = False
    """Whether SGLang's deterministic inference is asked for."""

    def __bool__(self) -> bool:
        return bool(self.backends) or self.named_gate is not None

    def __str__(self) -> str:
        gate = [] if self.named_gate is None else [f"SGLANG_ROUTER_EXT_GATE={self.gate}"]
        return " and ".join([*self.backends, *gate]) or "nothing"

    @property
    def named_gate(self) -> str | None:
        return None if self.gate in GATE_MODES else self.gate

    @classmethod
    def of_options(cls, names: list[str | None], gate: str, *, deterministic: bool = False) -> Demand:
        """From the values of SGLang's two backend options, and of --enable-deterministic-inference.

        Raises :class:`~sglang_router_ext.contract.ContractError` for a name that looks like one of ours and is none.
        """
        for name in names:
            known = name is None or not name.startswith("router_ext") or name in BACKENDS
            expect(known, "moe_runner_backend", repr(name), " | ".join(BACKENDS))
        return cls(tuple(dict.fromkeys(name for name in names if name in BACKENDS)), gate, deterministic)

    @classmethod
    def of_command_line(cls, gate: str) -> Demand:
        """From this process's command line, which spawned processes see too. Engine(...) and config files do not show here."""
        words = [word.rpartition("=")[2] for word in sys.argv]
        return cls(tuple(name for name in BACKENDS if name in words), gate, DETERMINISTIC in words)


@functools.cache
def detect_gpu(index: int | None = None) -> Gpu | None:
    """The CUDA GPU ``index`` (None: the first) as the table sees it, looked up once; None where there is none."""
    return machine.gpu(index or 0)


@functools.cache
def unavailable() -> dict[str, str]:
    """Design -> why its kernel cannot be built on this machine. Designs without CUDA C++ sources need no compiler."""
    from sglang_router_ext import build

    try:
        build.find_toolchain()
    except build.BuildError as error:
        return {d.name: f"cannot be built: {error}" for d in TABLE.values() if d.compiled}
    return {}


@functools.cache
def tuned_table(gpu: Gpu | None) -> tuned.Found | None:
    """The table of ``tune`` for ``gpu``, good or not: read once, so that all layers of a process have the same bands."""
    return tuned.find(gpu)


@functools.cache
def tuned_bands(problem: Problem, gpu: Gpu | None) -> Tuned | None:
    """The bands of ``problem`` in the table that is in force; None: those of the package."""
    found = tuned_table(gpu)
    bands = None if found is None else found.tuned(problem)
    if found is not None and not found.against:
        said = f"by the tuned table at {bands.rows} rows, else" if bands else "not in the tuned table, so"
        logger.info("sglang-router-ext: %s: bands %s by the package's records (%s)", problem, said, found.digest)
    return bands


def check(gpu: Gpu | None, demand: Demand | None = None) -> list[Finding]:
    """Every reason against running on ``gpu``; without ``demand``, against any backend. Imports the modules that are hooked."""
    demand = demand or Demand()
    everything = bool(demand.backends) or not demand
    rows = [hook for hook in hooks.HOOKS if everything or not hook.for_backend]
    misfits = [Finding(f"hook {target}", text, True) for target, text in hooks.problems(rows).items()]
    misfits += _missing_api()
    findings = _version(fits=not misfits) + misfits
    if gpu is None:
        findings.append(Finding("GPU", "no CUDA GPU", True))
    lost = {name: reason for name, design in TABLE.items() if (reason := _lost(design, gpu))}
    findings += [Finding(f"design {name}", reason, False) for name, reason in lost.items()]
    for backend in demand.backends:
        designs = BACKENDS[backend].designs or [name for name in TABLE if name != "host"]
        if all(name in lost for name in designs):
            findings.append(Finding(backend, "none of its designs can run here", True))
    found = tuned_table(gpu) if demand.backends else None
    if found is not None and found.against:
        findings.append(Finding(settings.TABLE if found.named else "bands", str(found), found.named))
    if demand.named_gate in lost:
        findings.append(Finding("SGLANG_ROUTER_EXT_GATE", f"{demand.gate}: {lost[demand.gate]}", True))
    if demand.deterministic and (never := never_deterministic(demand.gate)):
        findings.append(Finding("SGLANG_ROUTER_EXT_GATE", never, True))
    return findings


def require(demand: Demand) -> None:
    """End the process, with all reasons in one message and exit status 1, unless ``demand`` can be met here."""
    findings = _check_here(demand)
    if any(finding.blocks for finding in findings):
        stop(demand, [finding for finding in findings if finding.blocks])


def require_alike(demand: Demand, nodes: int) -> None:
    """End the process where the ``nodes`` of one server could choose differently: near-ties would part the ranks of a layer.

    The choice depends on the GPU's name, which nodes of one server share, and on what can be built, which they may not, and on
    a tuned table, of which a node knows its own only: SGLang's ranks talk to each other too late to compare them. Whoever names
    the file vouches that it is the same on every node; the log of each has its digest.
    """
    found = tuned_table(detect_gpu()) if nodes > 1 and demand.backends else None
    if found is not None and not found.named and not found.against:
        ways = f"copy it to every node and name it there by {settings.TABLE}, or take none by {settings.TABLE}=off"
        stop(demand, [f"{nodes} nodes must choose alike, and what the others have is not known here: {found}; {ways}"])
    lost = unavailable() if nodes > 1 else {}
    if lost:
        stop(demand, [f"{nodes} nodes: every node must be able to build the kernels", *dict.fromkeys(lost.values())])


@functools.cache
def _check_here(demand: Demand) -> list[Finding]:
    findings = check(detect_gpu(), demand)
    for finding in findings:
        if not finding.blocks:
            logger.warning("sglang-router-ext: %s", finding)
    return findings


def stop(demand: Demand, reasons: list[Finding] | list[str]) -> None:
    """SystemExit and nothing weaker: SGLang catches every Exception of a plugin and starts without it."""
    lines = "".join(f"\n  {reason}" for reason in reasons)
    raise SystemExit(f"sglang-router-ext cannot run {demand} here; leave it out to run stock:{lines}")


def sglang_version() -> str:
    """The installed SGLang's version."""
    return importlib.metadata.version("sglang")


def _version(*, fits: bool) -> list[Finding]:
    """The tested version passes; any other one only if every hook and call fits, and it is listed even then."""
    version = sglang_version()
    if version == TESTED_SGLANG:
        return []
    verdict = "every hooked signature is the same" if fits else "it differs as listed"
    return [Finding("SGLang", f"{version} is not tested ({TESTED_SGLANG} is); {verdict}", not fits)]


def _missing_api() -> list[Finding]:
    found = []
    for name in API:
        module, _, path = name.partition(":")
        try:
            functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (AttributeError, ImportError) as error:
            found.append(Finding(f"call {name}", f"not there: {error}", True))
    return found


def _lost(design: Design, gpu: Gpu | None) -> str | None:
    """Why ``design`` cannot run on ``gpu`` on this machine, whatever the layer, or None."""
    if design.archs is not None and gpu is not None and gpu.arch not in design.archs:
        return f"sm_{gpu.arch}: built for {design.archs_text}"
    return unavailable().get(design.name)
