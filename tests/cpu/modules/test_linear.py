"""Gates that are linear layers, with softmax scores: Qwen's and Mixtral's blocks, and what stays with SGLang."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe import topk
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.models import granitemoe, hunyuan, minimax_m2, mixtral, olmoe, qwen2_moe, qwen3_moe, sdar_moe, step3_vl
from sglang.srt.runtime_context import get_exec, get_flags
from sglang_layer import EXPERTS, HIDDEN, TOPK, build_linear, paths, reasons, rows_of, select_as_on_cuda

from sglang_router_ext import choose, reference, route
from sglang_router_ext.choose import ROUNDED
from sglang_router_ext.contract import Problem
from sglang_router_ext.designs import TABLE
from sglang_router_ext.plugin import blocks, handover, layer, linear, reference_mode, runner

SOFTMAX = {"experts": EXPERTS, "hidden": HIDDEN, "topk": TOPK, "score": "softmax", "bias": False}
LAST = TABLE["pair"].rows.last


def truth_of(module, hidden, **changes) -> reference.Truth:
    problem = Problem(**{**SOFTMAX, "logits_dtype": "bfloat16", **changes})
    return reference.route(problem, hidden, module.weight, None)


@pytest.fixture
def host(monkeypatch):
    """SGLang's own softmax kernel, which needs a GPU, by its torch code; the logits that it saw."""
    seen = []

    def topk_softmax(weights, ids, logits, renormalize):
        seen.append(logits)
        found = topk.fused_topk_torch_native(logits, logits, ids.shape[1], renormalize)
        weights.copy_(found[0])
        ids.copy_(found[1])

    monkeypatch.setattr(topk, "topk_softmax", topk_softmax, raising=False)
    return seen


@pytest.mark.parametrize(
    ("rows", "gate", "selection"),
    [(1, "pair", "pair"), (LAST, "pair", "pair"), (LAST + 1, "cublas_gemm", "warp_select")],
)
@pytest.mark.parametrize("renormalize", [True, False])
def test_sglangs_own_modules_select_what_the_oracle_selects(rows, gate, selection, renormalize):
    module, select = build_linear(renormalize=renormalize)
    hidden = rows_of(rows)
    logits, left = module(hidden)
    output = select_as_on_cuda(select, hidden, logits)
    truth = truth_of(module, hidden, renormalize=renormalize)
    assert left is None
    assert torch.equal(output.topk_ids.long(), truth.ids)
    torch.testing.assert_close(output.topk_weights, truth.weights.float())
    assert logits.dtype == torch.float32
    assert torch.equal(logits.bfloat16().double(), truth.read)
    assert output.router_logits is logits
    assert paths() == [("gate", f"reference:{gate}"), ("selection", f"reference:{selection}")]


@pytest.mark.parametrize("renormalize", [True, False])
def test_sglangs_torch_code_selects_the_same(renormalize):
    module, select = build_linear(renormalize=renormalize)
    hidden = rows_of(9)
    logits, _ = module(hidden)
    ours = select_as_on_cuda(select, hidden, logits)
    weights, ids = topk.fused_topk_torch_native(hidden, logits.bfloat16(), TOPK, renormalize)
    torch.testing.assert_close(ours.topk_weights, weights)
    torch.testing.assert_close(ours.topk_weights.sum(1), weights.sum(1))
    assert torch.equal(ours.topk_ids.long().sort(1).values, ids.sort(1).values)


@pytest.mark.parametrize(("gate", "ran"), [("fp32", ("pair", "pair")), ("cublas_gemm", ("cublas_gemm", "warp_select"))])
def test_logits_stay_in_fp32_where_that_is_asked_for(gate, ran):
    module, select = build_linear("router_ext_pair", gate=gate)
    hidden = rows_of(3)
    logits, _ = module(hidden)
    output = select_as_on_cuda(select, hidden, logits)
    truth = truth_of(module, hidden, logits_dtype="float32")
    assert logits.dtype == torch.float32
    assert torch.equal(logits, truth.logits.float())
    assert torch.equal(output.topk_ids.long(), truth.ids)
    torch.testing.assert_close(output.topk_weights, truth.weights.float())
    assert [design for _, design in paths()] == [f"reference:{name}" for name in ran]


@pytest.mark.parametrize("rows", [2, LAST + 1])
def test_sglangs_selection_sees_bf16_logits_where_it_asks_for_something_else(host, rows):
    module, select = build_linear()
    hidden = rows_of(rows)
    logits, _ = module(hidden)
    select.topk_config.top_k = TOPK - 1
    select_as_on_cuda(select, hidden, logits)
    (seen,) = host
    assert seen.dtype == torch.bfloat16
    assert torch.equal(seen.double(), truth_of(module, hidden).read)


@pytest.mark.parametrize("rows", [2, LAST + 1])
def test_sglangs_selection_sees_bf16_logits_of_inference_tensors(host, rows):
    module, select = build_linear()
    hidden = rows_of(rows)
    with torch.inference_mode():
        select_as_on_cuda(select, hidden, module(hidden)[0])
    (seen,) = host
    assert seen.dtype == torch.bfloat16
    assert torch.equal(seen.double(), truth_of(module, hidden).read)
    assert "inference-mode tensors" in reasons("selection")[0]


@pytest.mark.parametrize("rows", [2, LAST + 1])
def test_a_routing_function_of_the_models_own_sees_bf16_logits(rows):
    module, select = build_linear()
    hidden, seen = rows_of(rows), []

    def route_by_itself(hidden_states, gating_output, topk, renormalize):
        seen.append(gating_output)
        return host_selection(gating_output, topk)

    def host_selection(logits, count):
        found = torch.topk(torch.softmax(logits.float(), 1), count)
        return found.values, found.indices.int()

    logits, _ = module(hidden)
    select.topk_config.custom_routing_function = route_by_itself
    select_as_on_cuda(select, hidden, logits)
    assert seen[0].dtype == torch.bfloat16
    assert torch.equal(seen[0].double(), truth_of(module, hidden).read)
    assert ("selection", "host") in paths()


def test_the_factor_is_sglangs(host):
    module, select = build_linear(routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=True)
    hidden = rows_of(2)
    output = select_as_on_cuda(select, hidden, module(hidden)[0])
    torch.testing.assert_close(output.topk_weights, 2.5 * truth_of(module, hidden).weights.float())
    assert ("selection", "reference:pair") in paths()


def test_sglangs_selection_sees_bf16_logits_of_our_gate(host, monkeypatch):
    """Should a gate alone be measured fastest in front of it."""
    monkeypatch.setattr(choose, "reasons", lambda design, *_, **__: [] if design.name == "small_rows" else ["not now"])
    module, select = build_linear()
    hidden = rows_of(LAST - 1)
    route._choose.cache_clear()
    logits, _ = module(hidden)
    route._choose.cache_clear()
    select_as_on_cuda(select, hidden, logits)
    assert host == [logits]
    assert torch.equal(logits, truth_of(module, hidden).read.bfloat16())
    assert paths() == [("gate", "reference:small_rows"), ("selection", "host")]


def test_logits_of_sglangs_gate_go_to_sglangs_selection_as_they_are(host):
    module, select = build_linear(gate="host")
    hidden = rows_of(2)
    logits, _ = module(hidden)
    assert torch.equal(logits, torch.nn.functional.linear(hidden, module.weight))
    select_as_on_cuda(select, hidden, logits)
    assert host[0] is logits
    assert reasons("gate") == ["SGLANG_ROUTER_EXT_GATE=host"]
    assert f"warp_select: {ROUNDED}" in reasons("selection")[0]


def test_what_is_measured_is_chosen_and_nothing_else(host):
    module, select = build_linear("router_ext")
    for rows in (7, 97):
        hidden = rows_of(rows)
        select_as_on_cuda(select, hidden, module(hidden)[0])
    measured = {("gate", "reference:pair"), ("selection", "reference:pair")}
    assert set(paths()) == {*measured, ("gate", "host"), ("selection", "host")}
    assert "cublas_gemm: on trial" in reasons("gate")[0]
    assert "warp_select: softmax scores: not measured on NVIDIA H200" in reasons("selection")[0]


class Quantized(UnquantizedLinearMethod):
    pass


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda gate: setattr(gate, "quant_method", Quantized()), "the gate is quantized"),
        (
            lambda gate: setattr(gate, "bias", torch.nn.Parameter(torch.ones(EXPERTS).bfloat16())),
            "the gate has a bias of its own",
        ),
        (lambda gate: setattr(gate, "__class__", type("Other", (ReplicatedLinear,), {})), "the gate is no ReplicatedLinear"),
    ],
    ids=["quantized", "bias", "subclass"],
)
def test_a_gate_that_is_more_than_a_product_runs_as_ever(host, change, reason):
    module, select = build_linear()
    change(module)
    hidden = rows_of(2)
    logits, left = module(hidden)
    assert left is None
    assert torch.equal(logits, torch.nn.functional.linear(hidden, module.weight, module.bias))
    select_as_on_cuda(select, hidden, logits)
    assert reasons("gate") == reasons("selection") == [reason]


def test_an_adapter_on_the_gate_has_no_plan(host):
    """It calls the linear's quantisation method, not its forward, and adds to what that gives."""
    module, select = build_linear()
    hidden = rows_of(2)
    logits = module.quant_method.apply(module, hidden, None)
    select_as_on_cuda(select, hidden, logits)
    assert reasons("selection") == [handover.NO_PLAN]


def test_other_linears_are_untouched():
    build_linear()
    other = ReplicatedLinear(HIDDEN, EXPERTS, bias=False)
    assert "forward" not in other.__dict__
    other(rows_of(2).float())
    assert paths() == []


def test_the_gate_learns_nothing_that_a_checkpoint_would_see():
    module, _ = build_linear()
    assert [name for name, _ in module.named_parameters()] == list(module.state_dict()) == ["weight"]
    assert [name for name, _ in module.named_modules()] == [""]


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
def test_a_copy_routes_by_its_own_weight(clone):
    module, _ = build_linear()
    hidden = rows_of(2)
    other = clone(module)
    other.weight.data.zero_()
    assert other.forward.args == (other,)
    assert module(hidden)[0].any()
    assert not other(hidden)[0].any()


def test_a_compiler_traces_sglangs_own_gate():
    module, _ = build_linear()
    with torch.no_grad(), torch.compiler.set_stance("default"):
        run = torch.compile(lambda hidden: module(hidden)[0], backend="eager", fullgraph=True)
        hidden = rows_of(3)
        logits = run(hidden)
    assert torch.equal(logits, torch.nn.functional.linear(hidden, module.weight))
    assert blocks.HANDOVER not in logits.__dict__
    assert paths() == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"correction_bias": torch.zeros(EXPERTS)}, "another function of SGLang"),
        ({"custom_routing_function": lambda **call: topk.fused_topk_torch_native(**call)}, "another function of SGLang"),
    ],
    ids=["a bias that fused_topk ignores", "the model's own routing"],
)
def test_selections_that_are_not_fused_topks_are_not_planned(host, options, reason):
    module, _ = build_linear(**options)
    logits, _ = module(rows_of(2))
    assert reason in getattr(logits, blocks.HANDOVER)


def test_a_plan_that_nobody_asks_for_is_counted():
    """A model that puts another TopK in after its block was linked, as Intern-S1-Pro does, or SGLang's torch code."""
    module, select = build_linear()
    hidden = rows_of(2)
    select(hidden, module(hidden)[0])
    assert paths() == [("gate", "reference:pair"), ("selection", "host")]
    assert reasons("selection") == [blocks.NOT_ASKED]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"topk": TOPK + 1}, "topk: asked 7, planned 6"),
        ({"num_fused_shared_experts": 1, "topk": TOPK + 1}, "shared: asked 1, planned 0"),
        ({"scoring_func": "sigmoid"}, "score: asked sigmoid, planned softmax"),
        ({"correction_bias": torch.zeros(EXPERTS)}, "another selection bias"),
        ({"packed_out": torch.zeros(2, TOPK)}, "packed ids are asked for"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_for_another_question_is_refused(changes, reason):
    module, _ = build_linear()
    hidden = rows_of(2)
    logits, _ = module(hidden)
    call = {"hidden_states": hidden, "gating_output": logits, "topk": TOPK, "renormalize": True, "scoring_func": "softmax"}
    assert handover.take_softmax(lambda **_: "SGLang's", **{**call, **changes}) == "SGLang's"
    assert reasons("selection") == [f"plan refused: {reason}"]


CONFIG = SimpleNamespace(
    num_experts=EXPERTS,
    num_local_experts=EXPERTS,
    moe_num_experts=EXPERTS,
    num_experts_per_tok=TOPK,
    moe_top_k=TOPK,
    moe_topk=TOPK,
    hidden_size=HIDDEN,
    intermediate_size=64,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    num_shared_expert=1,
    use_mixed_mlp_moe=0,
    hidden_act="silu",
    norm_topk_prob=True,
    norm_expert_weight=True,
    model_type="",
    use_routing_bias=True,
    scoring_func="sigmoid",
)
NUMBERS = {"num_experts": EXPERTS, "top_k": TOPK, "hidden_size": HIDDEN, "intermediate_size": 64, "layer_id": 1}
BLOCKS = {
    qwen3_moe.Qwen3MoeSparseMoeBlock: {"layer_id": 1, "config": CONFIG},
    qwen2_moe.Qwen2MoeSparseMoeBlock: {"layer_id": 1, "config": CONFIG},
    sdar_moe.SDARMoeSparseMoeBlock: {"layer_id": 1, "config": CONFIG},
    step3_vl.Step3TextMoEMLP: {"layer_id": 1, "config": CONFIG},
    hunyuan.HunYuanSparseMoeBlock: {"layer_id": 1, "config": CONFIG},
    mixtral.MixtralMoE: NUMBERS,
    granitemoe.GraniteMoeMoE: NUMBERS,
    olmoe.OlmoeMoE: NUMBERS,
    minimax_m2.MiniMaxM2MoE: {"layer_id": 1, "config": CONFIG},
}


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.__name__)
def test_a_real_moe_block_is_linked_and_runs_on_our_core(kind: type):
    get_flags().moe.runner_backend = backend = runner.Family("router_ext_pair", MoeRunnerBackend.TRITON)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with reference_mode.reference_mode():
            block = kind(**BLOCKS[kind])
    finally:
        torch.set_default_dtype(before)
    linked = block.gate.__dict__[layer.LINK]
    assert linked.request.backend == "router_ext_pair"
    assert linked.config is block.topk.topk_config
    assert isinstance(block.experts.runner.runner_core, runner.Core)
    assert block.experts.runner_backend == block.topk.topk_config.runner_backend == backend
    assert block.topk.topk_config.output_format == topk.TopKOutputFormat.STANDARD
    block.gate.weight.data.normal_(std=0.1)
    hidden = rows_of(3)
    if kind is minimax_m2.MiniMaxM2MoE:
        block.e_score_correction_bias.data.normal_(std=0.1)
        output = routed_by(block, hidden)
        problem = Problem(experts=EXPERTS, hidden=HIDDEN, topk=TOPK, weight_dtype="float32")
        truth = reference.route(problem, hidden, block.gate.weight, block.e_score_correction_bias)
        assert paths() == [("gate", "reference:pair"), ("selection", "reference:pair")]
    else:
        output = select_as_on_cuda(block.topk, hidden, block.gate(hidden)[0])
        truth = truth_of(block.gate, hidden, renormalize=block.topk.topk_config.renormalize)
        assert paths() == [("gate", "reference:pair"), ("selection", "reference:pair")]
    assert torch.equal(output.topk_ids.long(), truth.ids)
    torch.testing.assert_close(output.topk_weights, truth.weights.float())


def routed_by(block, hidden, forward="forward_normal"):
    """What a MoE block's own ``forward`` hands its experts."""
    select, seen = block.topk, []
    del block.topk, block.experts
    block.topk = lambda states, logits: select_as_on_cuda(select, states, logits)
    block.experts = lambda hidden_states, topk_output: seen.append(topk_output) or hidden_states
    getattr(block, forward)(hidden, *[None] * (forward == "forward_deepep"))
    return seen[0]


@pytest.mark.parametrize("forward", ["forward_normal", "forward_deepep"])
def test_a_gate_reads_hidden_states_as_they_were_before_the_block_cast_them(forward, monkeypatch):
    with reference_mode.reference_mode():
        block = minimax_m2.MiniMaxM2MoE(**BLOCKS[minimax_m2.MiniMaxM2MoE])
    block.gate.weight.data.normal_(std=0.1)
    block.e_score_correction_bias.data.normal_(std=0.1)
    hidden, linked = rows_of(5), block.gate.__dict__[layer.LINK]
    output = routed_by(block, hidden, forward)
    truth = reference.route(
        Problem(experts=EXPERTS, hidden=HIDDEN, topk=TOPK, weight_dtype="float32"),
        hidden,
        block.gate.weight,
        block.e_score_correction_bias,
    )
    assert torch.equal(output.topk_ids.long(), truth.ids)
    torch.testing.assert_close(output.topk_weights, truth.weights.float())
    assert paths() == [("gate", "reference:pair"), ("selection", "reference:pair")]
    assert linked.before_cast is None
    linear.before_cast(block, hidden[:0])
    assert linked.before_cast is None
    block.gate(hidden.float())  # of nobody who said what it was
    assert "float32 hidden states: takes bfloat16" in reasons("gate")[0]


def test_deterministic_inference_keeps_to_designs_whose_bits_no_batch_changes(host):
    with get_exec().deterministic.override(enable_deterministic_inference=True):
        module, select = build_linear()
    hidden = rows_of(2)
    select_as_on_cuda(select, hidden, module(hidden)[0])
    assert paths() == [("gate", "reference:tensor_core"), ("selection", "reference:warp_select")]
