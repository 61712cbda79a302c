"""THE table of changes to SGLang. A function of SGLang that is not a row here is not touched.

A row names what it changes, why, when it can go, and the parameters that the target has in the tested SGLang: ``problems``
compares them before anything is changed, ``install`` applies rows through SGLang's own HookRegistry, and ``live`` proves that
the function in place really leads to ours (SGLang logs a hook that it could not apply, and runs on without it).

Rows hold text only, so that this module imports no torch: ``function`` is ``module:function`` in this folder.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

EVERY_PROCESS = "every process"
SCHEDULER = "scheduler"


class HookError(RuntimeError):
    """A hook is not in place. The text names its target and the cause."""


class Hook(msgspec.Struct, frozen=True, kw_only=True):
    """One change to SGLang."""

    target: str
    kind: str
    """``before`` | ``after`` | ``around``, with the calling conventions of SGLang's HookType."""
    where: str
    """:data:`EVERY_PROCESS`: light, applied when plugins load. :data:`SCHEDULER`: where models run, once ours is asked for."""
    for_backend: bool
    """Needed only for a backend of ours; the others also serve ``SGLANG_ROUTER_EXT_GATE`` under a stock backend."""
    function: str
    parameters: tuple[str, ...]
    """Parameter names of the target in the tested SGLang; any difference stops the start."""
    why: str
    remove_when: str
    unless: str = ""
    """``module:function`` in this folder that says whether this SGLang does it by itself: a patched one may."""


def _moe(module: str, block: str, gate: str, *, block_takes: tuple[str, ...], gate_takes: tuple[str, ...]) -> tuple[Hook, Hook]:
    """The two hooks of a model's MoE block: it has a ``gate``, and a ``topk`` that selects from the gate's logits."""
    return (
        Hook(
            target=f"sglang.srt.models.{module}.{block}.__init__",
            kind="after",
            where=SCHEDULER,
            for_backend=False,
            function="layer:link_moe",
            parameters=("self", "config", "layer_id", "quant_config", "prefix", "alt_stream", *block_takes),
            why="the gate must know the selection that follows it, and the backend in force while its layer is built",
            remove_when=f"{gate} receives the TopKConfig of its layer",
        ),
        Hook(
            target=f"sglang.srt.models.{module}.{gate}.forward",
            kind="around",
            where=SCHEDULER,
            for_backend=False,
            function="layer:gate_forward",
            parameters=("self", "hidden_states", *gate_takes),
            why="runs the route: the gate GEMM, and the selection where a design covers it",
            remove_when="the gate is a fused op with a slot for plugins",
        ),
    )


def _linear(module: str, block: str, *takes: str) -> Hook:
    """The hook of a MoE block whose ``gate`` is a ReplicatedLinear, which serves other layers too."""
    return Hook(
        target=f"sglang.srt.models.{module}.{block}.__init__",
        kind="after",
        where=SCHEDULER,
        for_backend=False,
        function="linear:link_moe",
        parameters=("self", *takes),
        why="links the gate to the selection that follows it, and replaces the forward of this one linear layer",
        remove_when="the gate is a fused op with a slot for plugins",
    )


def _cast(forward: str, *takes: str) -> Hook:
    """The hook of a forward of MiniMax-M2's block, which casts the hidden states in front of its gate."""
    return Hook(
        target=f"sglang.srt.models.minimax_m2.MiniMaxM2MoE.{forward}",
        kind="before",
        where=SCHEDULER,
        for_backend=False,
        function="linear:before_cast",
        parameters=("self", "hidden_states", *takes),
        why="the block casts its hidden states for the gate alone, whose kernels here read bf16",
        remove_when="the block gives its gate the hidden states as they are",
    )


def _selection(name: str, function: str, *parameters: str, module: str = "sglang.srt.layers.moe.topk") -> Hook:
    """The hook of a function that selects; its caller post-processes what it gives."""
    return Hook(
        target=f"{module}.{name}",
        kind="around",
        where=SCHEDULER,
        for_backend=True,
        function=f"handover:{function}",
        parameters=parameters,
        why="hands over the ids and weights made with the logits; all post-processing of its caller stays SGLang's",
        remove_when="its caller accepts a precomputed selection and still post-processes it",
    )


_LOGITS, _HASH = ("hidden_states", "gating_output"), ("router_logits", "input_ids", "tid2eid", "num_fused_shared_experts")
_PADDING, _SCALE = "num_token_non_padded", ("routed_scaling_factor", "apply_routed_scaling_factor_on_output")
_QWEN = ("layer_id", "config", "quant_config", "prefix")
_MIXTRAL = ("num_experts", "top_k", "hidden_size", "intermediate_size")

HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.server_args.ServerArgs.resolve_once",
        kind="around",
        where=EVERY_PROCESS,
        for_backend=False,
        function="entry:check_arguments",
        parameters=("self",),
        why="the first step that the command line and Engine(...) share: wrong names and unfit machines stop here",
        remove_when="SGLang validates Engine(...) arguments against the choices and lets a plugin refuse a start",
    ),
    Hook(
        target="sglang.srt.runtime_context.publish",
        kind="around",
        where=EVERY_PROCESS,
        for_backend=False,
        function="entry:enter_role",
        parameters=("server_args", "role", "hf_config", "ranks"),
        why="tells which process runs models, before it imports one; the others are spared the hooks below",
        remove_when="plugins are told the role of the process that loads them",
    ),
    *_moe(
        "deepseek_v2",
        "DeepseekV2MoE",
        "MoEGate",
        block_takes=("routed_quant_stream", "is_nextn", "is_deepseek_v4", "vl_correction_bias", "reduce_results"),
        gate_takes=("gemm_output_zero_allocator", "forward_batch"),
    ),
    *_moe("glm4_moe", "Glm4MoeSparseMoeBlock", "Glm4MoeGate", block_takes=(), gate_takes=()),
    *_moe("glm4_moe_lite", "Glm4MoeLiteSparseMoeBlock", "Glm4MoeLiteGate", block_takes=("is_nextn",), gate_takes=()),
    _linear("qwen3_moe", "Qwen3MoeSparseMoeBlock", *_QWEN),
    _linear(
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        *("layer_id", "config", "quant_config", "alt_stream", "prefix", "is_nextn"),
        *("support_shared_expert_fusion", "enable_cuda_shared_expert_fusion", "reduce_results"),
    ),
    _linear("sdar_moe", "SDARMoeSparseMoeBlock", *_QWEN),
    _linear("step3_vl", "Step3TextMoEMLP", *_QWEN),
    _linear("mixtral", "MixtralMoE", *_MIXTRAL, "layer_id", "params_dtype", "quant_config", "prefix"),
    _linear("granitemoe", "GraniteMoeMoE", *_MIXTRAL, "layer_id", "params_dtype", "quant_config", "prefix", "reduce_results"),
    _linear("olmoe", "OlmoeMoE", *_MIXTRAL, "params_dtype", "quant_config", "layer_id", "prefix"),
    _linear("hunyuan", "HunYuanSparseMoeBlock", "config", "quant_config", "layer_id"),
    _linear("minimax_m2", "MiniMaxM2MoE", "config", "layer_id", "quant_config", "prefix"),
    _cast("forward_normal"),
    _cast("forward_deepep", "forward_batch"),
    Hook(
        target="sglang.srt.models.deepseek_v2.DeepseekV2MoE._forward_shared_experts",
        kind="before",
        where=SCHEDULER,
        for_backend=True,
        function="overlap:shared_after_routing",
        parameters=("self", "hidden_states", "gemm_output_zero_allocator", "pre_quant_input"),
        why="shared experts on a second stream crowd the start of the routed ones; they wait for the selection",
        remove_when="SGLang orders the two streams so that no GEMM of the shared experts runs when the routed ones start",
    ),
    Hook(
        target="sglang.srt.models.deepseek_v2.DeepseekV2MoE.forward",
        kind="before",
        where=SCHEDULER,
        for_backend=True,
        function="tokens:note",
        parameters=(
            *("self", "hidden_states", "forward_batch", "gemm_output_zero_allocator", "input_ids", "input_ids_global"),
            *("skip_shared_experts", "return_moe_output", "leave_output_sum"),
        ),
        why="hash layers and image tokens: a token has a say in its experts, and the gate does not see it",
        remove_when="the gate is given the tokens of its rows",
    ),
    # The alias, not biased_grouped_topk_gpu: select_experts calls it by this name, and the registry leaves other names
    # inside the same module as they are.
    _selection(
        "biased_grouped_topk",
        "take_grouped",
        *_LOGITS,
        *("correction_bias", "topk", "renormalize", "num_expert_group", "topk_group", "num_fused_shared_experts", *_SCALE),
    ),
    _selection(
        "biased_topk_jit_kernel_impl",
        "take_biased",
        *_LOGITS,
        *("correction_bias", "topk", "renormalize", "scoring_func", "num_fused_shared_experts", "routed_scaling_factor"),
        *(_PADDING, "expert_location_dispatch_info", "apply_routed_scaling_factor_on_output", "packed_out"),
        *("sqrtsoftplus_log1p", "router_logits_partials", "num_shared_append"),
    ),
    _selection(
        "fused_topk",
        "take_softmax",
        *_LOGITS,
        *("topk", "renormalize", "correction_bias", "scoring_func", *_SCALE, "num_fused_shared_experts"),
        *("packed_out", _PADDING),
    ),
    _selection(  # below the three above too; by two biases vision_topk asks it itself
        "moe_fused_gate",
        "take_image",
        *("scores", "bias", "topk", "scoring_func", "num_fused_shared_experts", "renormalize", *_SCALE, "moe_softcapping"),
        *("num_expert_group", "topk_group", "bias_alt", "input_ids", "bias_alt_token_id", _PADDING),
        *("renormalize_epsilon", "packed_out", "sqrtsoftplus_log1p"),
        module="sglang.kernels.ops.moe.moe_fused_gate",
    ),
    _selection("hash_topk", "take_hash", *_HASH, _SCALE[0], "scoring_func", module="sglang.kernels.ops.moe.dsv4"),
    Hook(
        target="sglang.srt.layers.moe.topk.select_experts",
        kind="around",
        where=SCHEDULER,
        for_backend=True,
        function="blocks:selected",
        parameters=(
            "hidden_states",
            "router_logits",
            "topk_config",
            "layer_id",
            "num_token_non_padded",
            "expert_location_dispatch_info",
            "dynamic_expert_bias",
            "router_logits_partials",
        ),
        why="SGLang masks padded rows, or simulates a routing, by kernels that write into the ids; their plan is of before",
        remove_when="such a kernel raises the version of what it writes, or makes a new tensor",
    ),
    Hook(
        target="sglang.srt.layers.dp_attention.mask_dp_pad_moe_topk_ids",
        kind="before",
        where=SCHEDULER,
        for_backend=True,
        function="blocks:rows_masked",
        parameters=("topk_ids",),
        why="the same with data parallelism, behind the dispatcher",
        remove_when="such a kernel raises the version of what it writes, or makes a new tensor",
    ),
    Hook(
        target="sglang.srt.layers.moe.token_dispatcher.standard._map_topk_ids_to_local_experts",
        kind="around",
        where=SCHEDULER,
        for_backend=True,
        function="blocks:follow_map",
        parameters=("topk_ids", "local_expert_mapping"),
        why="with expert parallelism the ids are made anew in this rank's numbers; the plan stays with them",
        remove_when="expert kernels accept a precomputed plan beside the ids",
    ),
    Hook(
        target="sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size.moe_align_block_size",
        kind="around",
        where=SCHEDULER,
        for_backend=True,
        function="blocks:take_blocks",
        parameters=(
            "topk_ids",
            "block_size",
            "num_experts",
            "ignore_invalid_expert",
            "return_inactive_prefix_count",
            "pad_expert_ids",
        ),
        why="hands over the plan made with the ids, so that no count and sort runs before the experts",
        remove_when="expert kernels accept a precomputed plan beside the ids",
    ),
    Hook(
        target="sglang.kernels.ops.moe.moe_align_single_token.moe_align_single_token",
        kind="around",
        where=SCHEDULER,
        for_backend=True,
        function="blocks:take_row_blocks",
        parameters=("topk_ids", "block_size", "return_inactive_prefix_count"),
        why="the same for one row, which Marlin's experts sort by a kernel of its own",
        remove_when="expert kernels accept a precomputed plan beside the ids",
    ),
    Hook(
        target="sglang.srt.layers.moe.utils.resolve_moe_runner_backend",
        kind="around",
        where=SCHEDULER,
        for_backend=True,
        function="runner:resolve_backend",
        parameters=("backend",),
        why="a plain registered name answers no predicate, so that no quantization method accepts it",
        remove_when="register_moe_runner_core takes the family of expert kernels that a name belongs to",
        unless="runner:takes_family",
    ),
    Hook(
        target="sglang.srt.layers.moe.moe_runner.runner.MoeRunner.__init__",
        kind="before",
        where=SCHEDULER,
        for_backend=True,
        function="runner:swap_builtin",
        parameters=("self", "runner_backend", "config", "lora_enabled"),
        why="some quantization methods name a built-in runner whatever backend was chosen; bf16 experts always name triton",
        remove_when="create_moe_runner passes the chosen backend on",
        unless="runner:takes_family",
    ),
)


def table(hooks: tuple[Hook, ...] = HOOKS) -> dict[str, Hook]:
    """Target -> row. Raises :class:`ValueError` for a duplicate target or an unknown kind."""
    rows: dict[str, Hook] = {}
    for hook in hooks:
        if hook.target in rows:
            raise ValueError(f"hook {hook.target}: stands twice in the table")
        if hook.kind not in ("before", "after", "around"):
            raise ValueError(f"hook {hook.target}: kind: got {hook.kind}, allowed: before | after | around")
        rows[hook.target] = hook
    return rows


def needed(*, where: str, for_backend: bool = True) -> list[Hook]:
    """The rows of ``where`` that this SGLang needs; without ``for_backend`` only those that a gate alone needs."""
    rows = [hook for hook in HOOKS if hook.where == where and (for_backend or not hook.for_backend)]
    return [hook for hook in rows if not hook.unless or not _function(hook.unless)()]


def function_of(hook: Hook) -> Callable[..., Any]:
    """Our function behind a row; imports its module."""
    return _function(hook.function)


def _function(text: str) -> Callable[..., Any]:
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def problems(hooks: Iterable[Hook]) -> dict[str, str]:
    """Target -> why its row does not fit the installed SGLang; empty: all fit. Imports the targets' modules."""
    found = {}
    for hook in hooks:
        try:
            target = pkgutil.resolve_name(hook.target)
            parameters = tuple(inspect.signature(target).parameters)
        except Exception as error:  # a module of SGLang may fail to import in any way
            found[hook.target] = f"not there: {type(error).__name__}: {error}"
            continue
        if parameters != hook.parameters:
            found[hook.target] = f"takes ({', '.join(parameters)}), known is ({', '.join(hook.parameters)})"
    return found


def register(hooks: Iterable[Hook]) -> None:
    """Hand rows to SGLang's registry, which applies them when it is next asked to. A row is registered once."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource("router_ext", "sglang-router-ext")
    for hook in hooks:
        function = function_of(hook)
        if all(registered is not function for _, registered, _ in HookRegistry._hooks.get(hook.target, ())):
            HookRegistry.register(hook.target, function, HookType(hook.kind), source=source)


def install(hooks: Iterable[Hook]) -> None:
    """Register and apply rows now. Raises :class:`HookError` that lists every row that did not come alive."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = list(hooks)
    register(hooks)
    HookRegistry.apply_hooks()
    dead = [hook.target for hook in hooks if not live(hook)]
    if dead:
        causes = problems(hook for hook in hooks if hook.target in dead)
        lines = (f"{target}: {causes.get(target, 'changed before by another plugin, or replaced since')}" for target in dead)
        raise HookError("; ".join(lines))


def live(hook: Hook) -> bool:
    """Whether a call of the target reaches our function. The registry's own record is not enough: it counts a target that
    another plugin changed first as done, and leaves a hook that came later out."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if hook.target not in HookRegistry._patched:
        return False
    function, step = function_of(hook), pkgutil.resolve_name(hook.target)
    while step is not None:
        cells = getattr(step, "__closure__", None) or ()
        if any(cell.cell_contents is function for cell in cells):
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def live_targets() -> list[str]:
    """Targets of all rows that are live in this process."""
    return [hook.target for hook in HOOKS if live(hook)]
