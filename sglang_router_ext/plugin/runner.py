"""The backend names, as SGLang's expert side sees them: a name belongs to a family of stock expert kernels.

SGLang asks a backend value dozens of yes-or-no questions (``is_triton()``, ``is_marlin()``, ...): which quantization method,
which weight layout, which expert ids under expert parallelism. A plain registered value answers no to all, and no
quantization method works with it. So a name of ours resolves to a :class:`Family`, which answers as a stock backend does,
while ``MoeRunner`` still finds our core by the name.

==================  ==========  =========================================================================
experts             GPU         family
==================  ==========  =========================================================================
bf16, fp16          any         triton
fp8, modelopt_fp8   any         triton, also SGLang's own choice on Hopper
compressed-tensors  any         triton, also SGLang's own choice, where weights and activations are FP8
modelopt_fp4        sm_90       marlin, also SGLang's own choice there
anything else       -           refused by name: take a stock backend, with SGLANG_ROUTER_EXT_GATE if wanted
==================  ==========  =========================================================================

A patched SGLang does parts of this by itself (``patches/``): with ``runner_family`` it is told the family with the name, and
both hooks stay away; with ``fused_func_names`` it calls the family's fused function, and only LoRA is left to the core.

Where SGLang compares a backend's name as a string (FlashInfer autotune, DeepGEMM's memory budget for CUDA graphs), neither
triton nor marlin is in the comparison, so that a name of ours misses nothing. Its opt-in SGLANG_OPT_MOE_QUANT_ONCE wants a
fused function on the runner itself, and stays off under ours unless SGLang is patched so.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, FusedOpPool, MoeRunnerConfig, PermuteMethodPool
from sglang.srt.layers.moe.moe_runner.runner import _CUSTOM_RUNNER_CORE_FACTORIES, register_moe_runner_core
from sglang.srt.layers.moe.utils import (
    MoeRunnerBackend,
    RegisteredMoeRunnerBackend,
    _MoeRunnerBackendPredicates,
    get_moe_a2a_backend,
    get_moe_runner_backend,
)

from sglang_router_ext.backends import BACKENDS
from sglang_router_ext.contract import Gpu
from sglang_router_ext.plugin import preflight

TRITON_EXPERTS = (None, "fp8", "modelopt_fp8")
MARLIN_EXPERTS = ("modelopt_fp4",)
MARLIN_ARCHS = (90,)


class UnsupportedExperts(ValueError):
    """No family takes these experts. The text says which ones are taken, and what to do instead."""


@dataclass(frozen=True)
class Family(RegisteredMoeRunnerBackend):
    """A backend name of ours that answers every predicate of SGLang as the built-in backend ``family`` does. An SGLang that
    takes families has the same attributes in its own class, and this one is not used there."""

    family: MoeRunnerBackend = MoeRunnerBackend.TRITON

    @property
    def name(self) -> str:
        """SGLang logs a backend's ``name`` as well as its ``value``."""
        return self.value


def _answer_as_family(predicate: str) -> Callable[[Family], bool]:
    def answer(self: Family) -> bool:
        return getattr(self.family, predicate)()

    answer.__name__ = predicate
    return answer


# All of them, also those that a later SGLang adds: a family that answers some questions as itself is half a backend.
for _predicate in [name for name in vars(_MoeRunnerBackendPredicates) if name.startswith("is_")]:
    setattr(Family, _predicate, _answer_as_family(_predicate))


def family_of(quantization: str | None, gpu: Gpu | None, *, fp4_experts: bool = False) -> MoeRunnerBackend:
    """The family for experts of ``quantization`` (SGLang's name, None for bf16 or fp16) on ``gpu``.

    ``fp4_experts``: an fp8 model whose experts are FP4, as DeepSeek V4. Raises :class:`UnsupportedExperts`.
    """
    if quantization in TRITON_EXPERTS and not fp4_experts:
        return MoeRunnerBackend.TRITON
    if quantization in MARLIN_EXPERTS and gpu is not None and gpu.arch in MARLIN_ARCHS:
        return MoeRunnerBackend.MARLIN
    kind = "FP4 experts" if fp4_experts else f"experts quantized as {quantization}"
    raise UnsupportedExperts(
        f"{' | '.join(BACKENDS)} on {gpu or 'no GPU'}: {kind} are not supported; supported are bf16, fp16, fp8, modelopt_fp8,"
        " compressed-tensors of FP8 weights and activations and, on sm_90, modelopt_fp4. Take a stock --moe-runner-backend"
        " (SGLANG_ROUTER_EXT_GATE works under any of them)."
    )


def family_of_model(config: Any) -> MoeRunnerBackend:
    """The family for a model, from SGLang's ModelConfig. Raises :class:`UnsupportedExperts`."""
    fp8 = config.quantization == "compressed-tensors" and _all_fp8(config.hf_config)
    quantization = "fp8" if fp8 else config.quantization
    return family_of(quantization, preflight.detect_gpu(), fp4_experts=bool(config.is_fp4_experts))


def _all_fp8(config: Any) -> bool:
    """Whether every group of a compressed-tensors checkpoint has FP8 weights and activations."""
    found = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None) or {}
    groups = (found.get("config_groups") or {}).values()
    parts = [group.get(name) or {} for group in groups for name in ("weights", "input_activations")]
    return bool(parts) and all((part.get("type"), part.get("num_bits")) == ("float", 8) for part in parts)


def resolve_backend(original: Callable[..., Any], backend: Any) -> Any:
    """AROUND resolve_moe_runner_backend: our names become a :class:`Family`, from the quantization of the published model.

    The draft model's name takes the family of the target, as a stock name that is given for both would: layers that SGLang
    leaves unquantized in either model name their built-in runner themselves.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
        return original(backend)
    return Family(backend, published_family())


def published_family() -> MoeRunnerBackend:
    """The family for the model that this process runs."""
    from sglang.srt.runtime_context import process_model_config

    return family_of_model(process_model_config())


def takes_family() -> bool:
    """Whether this SGLang is told the family of a name when the name is registered."""
    return "family" in inspect.signature(register_moe_runner_core).parameters


def swap_builtin(runner: Any, runner_backend: Any, config: MoeRunnerConfig, lora_enabled: bool = False) -> Any:
    """BEFORE MoeRunner.__init__: where a quantization method names the built-in of the family in force, it gets ours.

    Not with LoRA: its layers take the backend of the runner they wrap, which is ours already, or one that they need.
    """
    chosen = get_moe_runner_backend()
    if isinstance(chosen, Family) and runner_backend is chosen.family and not lora_enabled:
        runner_backend = chosen
    return (runner, runner_backend, config), {"lora_enabled": lora_enabled}


class Core(DispatchMoeRunnerCore):
    """Runs the experts by the stock kernels of a family, from a dispatch whose routing is already made.

    Ids stay in SGLang's standard form, so that under expert parallelism its dispatcher maps them to local ones.
    """

    def __init__(self, config: MoeRunnerConfig, backend: Family) -> None:
        """Raises :class:`NotImplementedError` where the family has no kernel for the dispatcher in force, as for DeepEP."""
        super().__init__(config)
        self.backend = backend
        family = backend.family.value
        importlib.import_module(f"sglang.srt.layers.moe.moe_runner.{family}")  # registers the fused function
        dispatcher = get_moe_a2a_backend().value
        fused = FusedOpPool.get_fused_func(dispatcher, family)
        if fused is None:
            raise NotImplementedError(
                f"--moe-runner-backend {backend.value}: its expert kernels ({family}) do not take the output of"
                f" --moe-a2a-backend {dispatcher}; take --moe-a2a-backend none, or a stock --moe-runner-backend"
            )
        self._fused: Callable[..., Any] = fused
        _offer(dispatcher, backend.value, fused)

    @property
    def runner_backend(self) -> Family:
        return self.backend

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, runner_config: MoeRunnerConfig, hooks: Any = None
    ) -> Any:
        """``dispatch_output`` with hidden states [rows, hidden] and a standard top-k output -> SGLang's CombineInput."""
        if hooks is None:
            return self._fused(dispatch_output, quant_info, runner_config)
        return self._with_lora(dispatch_output, quant_info, runner_config, hooks)

    def _with_lora(self, dispatch_output: Any, quant_info: Any, runner_config: MoeRunnerConfig, hooks: Any) -> Any:
        """Fused functions have no place for LoRA's hooks; the steps that SGLang itself takes then have."""
        if self.backend.is_marlin():
            from sglang.srt.lora.lora_moe_runner_marlin import MarlinLoraRunnerCore

            return MarlinLoraRunnerCore(runner_config).run_from_dispatch(
                dispatch_output, quant_info, runner_config, hooks=hooks
            )
        from sglang.srt.layers.moe.moe_runner.triton import TritonRunnerCore

        state: dict[str, Any] = {}
        name, form = self.backend.family.value, dispatch_output.format.value
        runner_input = PermuteMethodPool.get_pre_permute(form, name)(dispatch_output, quant_info, runner_config, state)
        output = TritonRunnerCore(runner_config).run(runner_input, quant_info, state, hooks=hooks)
        return PermuteMethodPool.get_post_permute(name, form)(output, quant_info, runner_config, state)


def _offer(dispatcher: str, name: str, fused: Callable[..., Any]) -> None:
    """Give SGLang the fused function of a name of ours, which a stock one refuses: then the core runs it."""
    known = FusedOpPool.get_fused_func(dispatcher, name)
    if known is None:
        with contextlib.suppress(ValueError):
            FusedOpPool.register_fused_func(dispatcher, name, fused)
    elif known is not fused:
        raise RuntimeError(f"--moe-runner-backend {name}: experts of another family run under this name in this process")


def build_core(config: MoeRunnerConfig) -> Core:
    """Factory for ``register_moe_runner_core``; called while a layer is built, when its backend is the active one."""
    backend = get_moe_runner_backend()
    if getattr(backend, "family", None) is None:
        raise RuntimeError(f"a runner of ours is built while the active backend is {backend.value}")
    return Core(config, backend)


def register_cores() -> None:
    """Make our names known to SGLang's runner; again is harmless. Before the hooks are in place: SGLang resolves each name to
    learn whether it is taken, and ours would resolve by a model that need not be there yet."""
    options = {"family": published_family} if takes_family() else {}
    for name in BACKENDS:
        if name not in _CUSTOM_RUNNER_CORE_FACTORIES:
            register_moe_runner_core(name, build_core, **options)
