"""SGLang's own router modules on the CPU, with the plugin's hooks and the oracle behind them; shared by tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe import topk
from sglang.srt.models import deepseek_v2, glm4_moe
from sglang.srt.runtime_context import SpawnRanks, get_flags, publish, reset_context
from sglang.srt.server_args import ServerArgs

from sglang_router_ext import reference
from sglang_router_ext.contract import Problem
from sglang_router_ext.plugin import counters, layer, linear, reference_mode

EXPERTS, HIDDEN, TOPK, SCALE = 64, 256, 6, 2.5
SHAPE = SimpleNamespace(
    n_routed_experts=EXPERTS,
    hidden_size=HIDDEN,
    num_experts_per_tok=TOPK,
    moe_intermediate_size=64,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=SCALE,
    hidden_act="silu",
    architectures=["DeepseekV3ForCausalLM"],
)


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """A published configuration for one rank, a scheduler's registrations and hooks, and SGLang's torch code uncompiled."""
    reset_context()
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test", ranks=SpawnRanks(world_rank=0))
    with reference_mode.reference_mode():
        pass
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield
    reset_context()


@contextmanager
def fresh() -> Iterator[None]:
    """Nothing counted yet, and SGLang's active backend put back afterwards."""
    counters.reset()
    moe = get_flags().moe
    before = moe.runner_backend
    yield
    moe.runner_backend = before


def build(backend="router_ext_pair", *, gate="auto", gpu="h200", bias_dtype=torch.float32, fp32=False, **options):
    """SGLang's MoEGate (``fp32``: Glm4MoeGate) and TopK, linked in reference mode, with weights that leave no near-ties."""
    torch.manual_seed(5)
    module = glm4_moe.Glm4MoeGate(SHAPE) if fp32 else deepseek_v2.MoEGate(SHAPE, None).to(torch.bfloat16)
    module.weight.normal_(std=0.1)
    bias = torch.randn(EXPERTS, dtype=torch.float32) * 0.2
    module.e_score_correction_bias = torch.nn.Parameter(bias.to(bias_dtype))
    config = {
        "layer_id": 3,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "renormalize": True,
        "scoring_func": "sigmoid",
        "correction_bias": module.e_score_correction_bias,
        "routed_scaling_factor": SCALE,
        "output_format": topk.TopKOutputFormat.STANDARD,
    }
    selection = topk.TopK(TOPK, **{**config, **options})
    layer.link(module, selection, reference_mode.request(backend, gate=gate, gpu=gpu))
    return module, selection


def build_linear(backend="router_ext_pair", *, gate="auto", gpu="h200", dtype=torch.bfloat16, quant=None, **options):
    """As ``build``, with a ReplicatedLinear and softmax scores, as Qwen3-MoE and Mixtral have them."""
    torch.manual_seed(5)
    module = ReplicatedLinear(HIDDEN, EXPERTS, bias=False, params_dtype=dtype, quant_config=quant)
    module.weight.data.normal_(std=0.1)
    config = {"layer_id": 3, "renormalize": True, "output_format": topk.TopKOutputFormat.STANDARD}
    selection = topk.TopK(TOPK, **{**config, **options})
    with reading(reference_mode.request(backend, gate=gate, gpu=gpu)):
        linear.link_moe(None, SimpleNamespace(gate=module, topk=selection))
    return module, selection


@contextmanager
def reading(request: layer.Request) -> Iterator[None]:
    """Layers that are linked inside are asked for ``request``."""
    before, layer.reader = layer.reader, lambda: request
    yield
    layer.reader = before


def select_as_on_cuda(selection, hidden: torch.Tensor, logits: torch.Tensor, **options):
    """As TopK.forward_cuda does; on a CPU, ``selection(...)`` takes SGLang's torch code for ungrouped routers."""
    selection.topk_config.torch_native = False
    return topk.select_experts(hidden, logits, selection.topk_config, layer_id=selection.layer_id, **options)


def rows_of(count: int) -> torch.Tensor:
    """[count, hidden] bf16."""
    torch.manual_seed(1000 + count)  # not a seed of a module's weights
    return torch.randn(count, HIDDEN, dtype=torch.bfloat16)


def truth_of(module, hidden: torch.Tensor, **changes) -> reference.Truth:
    """What the oracle says, for the problem of ``build`` with ``changes``."""
    problem = msgspec.structs.replace(Problem(experts=EXPERTS, hidden=HIDDEN, topk=TOPK), **changes)
    return reference.route(problem, hidden, module.weight, module.e_score_correction_bias)


def paths() -> list[tuple[str, str]]:
    """(stage, design) of every path counted."""
    return [(entry.stage, entry.design) for entry in counters.counts()]


def reasons(stage: str) -> list[str]:
    """Why ``stage`` was left to SGLang."""
    return [entry.reason for entry in counters.counts() if entry.stage == stage and entry.design == counters.HOST]
