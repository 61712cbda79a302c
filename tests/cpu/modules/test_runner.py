"""The backend names as SGLang's expert side sees them: families, the swap of built-ins, and the core that runs the experts."""

from __future__ import annotations

import dataclasses
import inspect
import re
from types import SimpleNamespace

import pytest
from sglang.srt.layers.moe import moe_runner, utils
from sglang.srt.layers.moe.moe_runner.base import FusedOpPool, MoeRunnerConfig
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.runtime_context import get_exec, get_flags

from sglang_router_ext.backends import BACKENDS
from sglang_router_ext.contract import KNOWN_GPUS, Gpu
from sglang_router_ext.plugin import preflight, runner


@pytest.mark.parametrize(
    ("quantization", "gpu", "family"),
    [
        (None, "h200", MoeRunnerBackend.TRITON),
        (None, "b200", MoeRunnerBackend.TRITON),
        ("fp8", "h100", MoeRunnerBackend.TRITON),
        ("fp8", "b300", MoeRunnerBackend.TRITON),
        ("modelopt_fp8", "h200", MoeRunnerBackend.TRITON),
        ("modelopt_fp4", "h200", MoeRunnerBackend.MARLIN),
    ],
)
def test_family_of_experts(quantization, gpu, family):
    assert runner.family_of(quantization, KNOWN_GPUS[gpu]) is family


@pytest.mark.parametrize(
    ("quantization", "fp4", "gpu"), [("modelopt_fp4", False, "b200"), ("awq", False, "h200"), ("fp8", True, "h200")]
)
def test_experts_of_no_family_are_refused_with_a_way_out(quantization, fp4, gpu):
    with pytest.raises(runner.UnsupportedExperts, match="SGLANG_ROUTER_EXT_GATE works under any") as refusal:
        runner.family_of(quantization, KNOWN_GPUS[gpu], fp4_experts=fp4)
    assert ("FP4 experts" if fp4 else quantization) in str(refusal.value)


FP8 = {"type": "float", "num_bits": 8}
INT4 = {"type": "int", "num_bits": 4}


@pytest.mark.parametrize(
    ("groups", "taken"),
    [
        ({"group_0": {"weights": FP8, "input_activations": FP8}}, True),
        ({"group_0": {"weights": INT4, "input_activations": None}}, False),
        ({"group_0": {"weights": FP8, "input_activations": None}}, False),
        ({"a": {"weights": FP8, "input_activations": FP8}, "b": {"weights": INT4, "input_activations": FP8}}, False),
        ({}, False),
        (None, False),
    ],
)
def test_compressed_tensors_are_taken_where_they_are_fp8(groups, taken, monkeypatch):
    monkeypatch.setattr(preflight, "detect_gpu", lambda index=None: Gpu("NVIDIA H200", 90))
    checkpoint = SimpleNamespace(quantization_config={"config_groups": groups})
    model = SimpleNamespace(quantization="compressed-tensors", is_fp4_experts=None, hf_config=checkpoint)
    if taken:
        assert runner.family_of_model(model) is MoeRunnerBackend.TRITON
    else:
        with pytest.raises(runner.UnsupportedExperts, match="compressed-tensors are not supported; supported are"):
            runner.family_of_model(model)


def test_fp8_experts_of_compressed_tensors_run_on_our_core():
    from compressed_tensors.quantization import QuantizationArgs
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8MoE

    get_flags().moe.runner_backend = runner.Family("router_ext", MoeRunnerBackend.TRITON)
    weights = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    scheme = CompressedTensorsW8A8Fp8MoE(weights, QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True))
    scheme.create_moe_runner(None, MoeRunnerConfig())
    assert isinstance(scheme.runner.runner_core, runner.Core)


@pytest.mark.parametrize("builtin", [MoeRunnerBackend.TRITON, MoeRunnerBackend.MARLIN])
def test_a_family_answers_every_question_as_its_builtin(builtin):
    family = runner.Family("router_ext", builtin)
    predicates = [name for name in dir(MoeRunnerBackend.AUTO) if name.startswith("is_")]
    assert len(predicates) > 15
    assert {name: getattr(family, name)() for name in predicates} == {name: getattr(builtin, name)() for name in predicates}
    assert family.value == family.name == "router_ext"
    assert utils.resolve_moe_runner_backend(family) is family


@pytest.mark.parametrize("name", BACKENDS)
def test_our_names_resolve_by_the_published_model(name, monkeypatch):
    import sglang.srt.runtime_context as context

    model = SimpleNamespace(quantization="modelopt_fp4", is_fp4_experts=None)
    monkeypatch.setattr(context, "process_model_config", lambda: model)
    monkeypatch.setattr(preflight, "detect_gpu", lambda index=None: Gpu("NVIDIA H200", 90))
    with get_exec().moe.override(moe_runner_backend=name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_flags(), "moe", type(get_flags().moe)())
        utils.initialize_moe_config()
        target, draft = utils.get_moe_runner_backend(), utils.get_speculative_moe_runner_backend()
    assert target == draft == runner.Family(name, MoeRunnerBackend.MARLIN)
    assert utils.resolve_moe_runner_backend("triton") is MoeRunnerBackend.TRITON
    with pytest.raises(ValueError, match="neither built in nor registered"):
        utils.resolve_moe_runner_backend("router_ext_foo")


def test_sglang_asks_for_no_builtin_of_a_family_by_name():
    """FlashInfer's autotune and the memory budget of CUDA graphs compare strings, which a name of ours would miss."""
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner.flashinfer_autotune import should_run_flashinfer_autotune

    for part in (should_run_flashinfer_autotune, cuda_graph_setup):
        assert not {'"triton"', '"marlin"'} & set(re.findall(r'"\w+"', inspect.getsource(part)))


def swapped(backend, *, lora_enabled=False):
    args, kwargs = runner.swap_builtin(None, backend, MoeRunnerConfig(), lora_enabled)
    assert kwargs == {"lora_enabled": lora_enabled}
    return args[1]


def test_only_the_family_in_force_is_swapped_in():
    get_flags().moe.runner_backend = family = runner.Family("router_ext", MoeRunnerBackend.TRITON)
    assert swapped(MoeRunnerBackend.TRITON) is family
    assert swapped(MoeRunnerBackend.MARLIN) is MoeRunnerBackend.MARLIN
    assert swapped(MoeRunnerBackend.TRITON, lora_enabled=True) is MoeRunnerBackend.TRITON
    get_flags().moe.runner_backend = MoeRunnerBackend.TRITON
    assert swapped(MoeRunnerBackend.TRITON) is MoeRunnerBackend.TRITON


@pytest.fixture
def stock_triton(monkeypatch):
    calls = []
    fused = lambda dispatch, quant, config: calls.append((dispatch, quant, config)) or "combined"  # noqa: E731
    monkeypatch.setitem(FusedOpPool._fused_funcs, ("none", "triton"), fused)
    return calls


def test_the_core_runs_the_stock_experts(stock_triton):
    get_flags().moe.runner_backend = runner.Family("router_ext", MoeRunnerBackend.TRITON)
    config = MoeRunnerConfig()
    built = moe_runner.MoeRunner(MoeRunnerBackend.TRITON, config)
    assert built.run("dispatched", "weights") == "combined"
    assert stock_triton == [("dispatched", "weights", config)]


def test_the_core_keeps_loras_hooks(monkeypatch):
    from sglang.srt.layers.moe.moe_runner.base import PermuteMethodPool
    from sglang.srt.layers.moe.moe_runner.triton import TritonRunnerCore

    monkeypatch.setitem(PermuteMethodPool._pre_permute_methods, ("standard", "triton"), lambda d, q, c, s: (d, q))
    monkeypatch.setitem(PermuteMethodPool._post_permute_methods, ("triton", "standard"), lambda out, q, c, s: [out])
    monkeypatch.setattr(TritonRunnerCore, "run", lambda self, given, quant, state, hooks=None: (given, hooks))
    core = runner.Core(MoeRunnerConfig(), runner.Family("router_ext", MoeRunnerBackend.TRITON))
    dispatch = SimpleNamespace(format=SimpleNamespace(value="standard"))
    assert core.run_from_dispatch(dispatch, "weights", MoeRunnerConfig(), hooks="adapter") == [
        ((dispatch, "weights"), "adapter")
    ]


def test_a_dispatcher_that_the_family_does_not_take_is_named(monkeypatch):
    monkeypatch.setattr(get_flags().moe, "a2a_backend", utils.MoeA2ABackend.DEEPEP)
    with pytest.raises(NotImplementedError, match="--moe-a2a-backend deepep; take --moe-a2a-backend none"):
        runner.Core(MoeRunnerConfig(), runner.Family("router_ext", MoeRunnerBackend.TRITON))


def test_a_name_keeps_the_family_whose_function_sglang_has(stock_triton, monkeypatch):
    """As a patched SGLang has it, which calls the function without asking the core."""
    family, name = runner.Family("router_ext", MoeRunnerBackend.TRITON), ("none", "router_ext")
    monkeypatch.setitem(FusedOpPool._fused_funcs, name, FusedOpPool._fused_funcs["none", "triton"])
    assert runner.Core(MoeRunnerConfig(), family).backend is family
    monkeypatch.setitem(FusedOpPool._fused_funcs, name, print)
    with pytest.raises(RuntimeError, match="experts of another family run under this name"):
        runner.Core(MoeRunnerConfig(), family)


def test_families_survive_the_registry():
    """A frozen dataclass: TopK compares the backend it is bound to by value."""
    family = runner.Family("router_ext", MoeRunnerBackend.TRITON)
    assert family == dataclasses.replace(family)
    assert family != runner.Family("router_ext", MoeRunnerBackend.MARLIN)
    assert hash(family) == hash(dataclasses.replace(family))
