"""The entry point that SGLang calls in every process, and what follows from it.

    register            when plugins load: makes the names known and places two light hooks, in every process
    check_arguments     before arguments are resolved: stops on a wrong name or an unfit machine, in the main process
    enter_role          when a process learns its role: a scheduler that was asked for ours gets the other hooks and the runner

A process that was asked for nothing of ours, or that runs no model, stays at the first step. A problem ends the process
(SystemExit): SGLang catches everything else that a plugin raises, and would run on without it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_router_ext import settings
from sglang_router_ext.backends import BACKENDS
from sglang_router_ext.contract import ContractError
from sglang_router_ext.plugin import counters, hooks, preflight
from sglang_router_ext.plugin.preflight import Demand

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

MODEL_ROLES = ("scheduler",)
"""Roles of SGLang processes that run MoE layers with plugins loaded."""


def register() -> None:
    """The function behind the entry point ``router_ext`` in ``sglang.srt.plugins``; called again it changes nothing.

    Raises :class:`~sglang_router_ext.plugin.hooks.HookError`, and leaves SGLang as it is, where a hook does not fit it and
    nothing of ours was asked for.
    """
    try:
        options = settings.read()
    except ContractError as error:
        raise SystemExit(f"sglang-router-ext: {error}") from error
    if not options.enabled:
        logger.info("sglang-router-ext: off (SGLANG_ROUTER_EXT=0); SGLang runs stock")
        return
    demand = Demand.of_command_line(options.gate)
    rows = hooks.needed(where=hooks.EVERY_PROCESS)
    misfits = [f"hook {target}: {text}" for target, text in hooks.problems(rows).items()]
    if misfits and demand:
        preflight.stop(demand, misfits)
    if misfits:  # SGLang logs it and runs stock, unless SGLANG_REQUIRE_PLUGINS asks a patched one to stop
        raise hooks.HookError(f"sglang-router-ext: off, because this SGLang differs from the known one: {'; '.join(misfits)}")
    if demand:
        preflight.require(demand)
    add_choices()
    hooks.register(rows)  # load_plugins applies them; enter_role proves that it did


def add_choices() -> None:
    """Let SGLang's parser accept our names for --moe-runner-backend and --speculative-moe-runner-backend."""
    from sglang.srt.arg_groups import choices

    known = choices.MOE_RUNNER_BACKEND_CHOICES
    choices.add_moe_runner_backend_choices([name for name in BACKENDS if name not in known])


def demand_of(server_args: Any) -> Demand:
    """What ``server_args`` (SGLang's ServerArgs) and our settings ask for. Raises ContractError for an unknown name of ours."""
    names = [server_args.moe_runner_backend, server_args.speculative_moe_runner_backend]
    # SGLang turns it on for that, but only while it resolves its arguments
    deterministic = server_args.enable_deterministic_inference or server_args.rl_on_policy_target is not None
    return Demand.of_options(names, settings.read().gate, deterministic=deterministic)


def check_arguments(original: Callable[..., None], server_args: Any) -> None:
    """AROUND ServerArgs.resolve_once, which every launcher calls before it starts a process.

    Raises ContractError for an unknown name of ours, UnsupportedExperts for experts that no family takes, and SystemExit with
    all reasons where the machine or this SGLang cannot do what is asked for.
    """
    if getattr(server_args, "_resolution_finished", False):
        return original(server_args)
    demand = demand_of(server_args)
    if demand.gate == "fp32" and not demand.backends:
        logger.warning("sglang-router-ext: SGLANG_ROUTER_EXT_GATE=fp32 changes nothing without a backend of ours")
    if demand:
        preflight.require(demand)
        preflight.require_alike(demand, server_args.nnodes)
        require_live(demand)
        if server_args.enable_pdmux and demand.backends:  # blocks of `single` wait for one another, on a part of the GPU
            preflight.stop(demand, ["--enable-pdmux divides the GPU's multiprocessors, which the designs count on"])
        if server_args.enable_torch_compile:
            logger.warning("sglang-router-ext: --enable-torch-compile: compiled layers run SGLang's own router, uncounted")
    original(server_args)
    if server_args.moe_runner_backend in BACKENDS:
        check_resolved(server_args)
    return None


def require_live(demand: Demand) -> None:
    """Every hook that plugins place while they load is in place; SystemExit if another plugin keeps one out."""
    dead = [hook.target for hook in hooks.needed(where=hooks.EVERY_PROCESS) if not hooks.live(hook)]
    if dead:
        preflight.stop(demand, [f"hook {target}: not live, changed before by another plugin?" for target in dead])


def check_resolved(server_args: Any) -> None:
    """SGLang kept the target's backend, and a family takes the model's experts. Reads the checkpoint's configuration."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolution_result

    asked, kept = server_args.moe_runner_backend, resolution_result(server_args, "moe_runner_backend")
    if kept != asked:
        raise ContractError(f"moe_runner_backend: SGLang replaces {asked} by {kept} for this model; ask for a stock backend")
    if str(server_args.model_path).lower() not in ("none", "dummy"):
        from sglang_router_ext.plugin import runner

        runner.family_of_model(model_config_of(server_args))


def enter_role(original: Callable[..., Any], server_args: Any, *, role: str, hf_config: Any = None, ranks: Any = None) -> Any:
    """AROUND runtime_context.publish, the first thing that a process does once plugins are loaded."""
    context = original(server_args, role=role, hf_config=hf_config, ranks=ranks)
    demand = demand_of(server_args)
    if demand:
        if role in MODEL_ROLES:
            activate(demand)
        _announce(demand, role, ranks)
    return context


def activate(demand: Demand) -> None:
    """Hook the model's modules and register the runner: what a process that runs MoE layers needs for ``demand``."""
    preflight.require(demand)
    if demand.backends:
        from sglang_router_ext.plugin import runner

        runner.register_cores()
    everywhere = hooks.needed(where=hooks.EVERY_PROCESS)
    rows = everywhere + hooks.needed(where=hooks.SCHEDULER, for_backend=bool(demand.backends))
    try:
        hooks.install(rows)
    except hooks.HookError as error:
        preflight.stop(demand, [str(error)])
    logger.info("sglang-router-ext: %s, %d hooks live", demand, len(rows))
    found = preflight.tuned_table(preflight.detect_gpu()) if demand.backends else None
    if found is not None and not found.against:
        logger.info("sglang-router-ext: %s", found)


def _announce(demand: Demand, role: str, ranks: Any) -> None:
    counters.announce(
        role=role,
        rank=None if ranks is None else ranks.world_rank,
        gpu=str(preflight.detect_gpu() or "none"),
        backends=list(demand.backends),
        gate=demand.gate,
        sglang=preflight.sglang_version(),
        hooks=hooks.live_targets(),
        runs_models=role in MODEL_ROLES,
    )
