"""One MoE layer with the hooks in place: what its route runs, and what stays with SGLang and why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.shared_experts import SharedExpertsConfig
from sglang.srt.layers.moe import topk, utils
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.models import deepseek_v2, glm4_moe, glm4_moe_lite
from sglang.srt.runtime_context import get_exec, get_flags, get_model
from sglang_layer import EXPERTS, HIDDEN, SCALE, SHAPE, TOPK, build, paths, reasons, rows_of, select_as_on_cuda, truth_of

from sglang_router_ext import reference
from sglang_router_ext.contract import Problem
from sglang_router_ext.designs import TABLE
from sglang_router_ext.plugin import blocks, hooks, layer, problem, reference_mode, runner

FUSED = TABLE["pair"].rows


@pytest.mark.parametrize(
    ("rows", "gate", "selection"),
    [(1, "pair", "pair"), (FUSED.last, "pair", "pair"), (FUSED.last + 1, "tensor_core", "warp_select")],
)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("on_output", [True, False])
def test_sglangs_own_modules_select_what_the_oracle_selects(rows, gate, selection, renormalize, on_output):
    module, select = build(renormalize=renormalize, apply_routed_scaling_factor_on_output=on_output)
    hidden = rows_of(rows)
    logits = module(hidden)
    output = select(hidden, logits)
    truth = truth_of(module, hidden, renormalize=renormalize, scale=SCALE if on_output else 1.0)
    assert output.topk_ids.dtype == torch.int32
    assert torch.equal(output.topk_ids.long(), truth.ids)
    torch.testing.assert_close(output.topk_weights, truth.weights.float())
    assert logits.dtype == torch.float32
    assert type(output) is topk.StandardTopKOutput
    assert output.router_logits is logits
    assert paths() == [("gate", f"reference:{gate}"), ("selection", f"reference:{selection}")]


def test_the_gate_learns_nothing_that_a_checkpoint_would_see():
    module, _ = build()
    assert [name for name, _ in module.named_parameters()] == ["weight", "e_score_correction_bias"]
    assert [name for name, _ in module.named_modules()] == [""]
    assert set(module.state_dict()) == {"weight", "e_score_correction_bias"}


def test_weights_updated_in_place_are_seen():
    module, select = build()
    hidden = rows_of(4)
    before = select(hidden, module(hidden)).topk_ids.clone()
    module.weight.normal_(std=0.1)
    module.e_score_correction_bias.data = torch.randn(EXPERTS)  # as a weight loader swaps storage
    after = select(hidden, module(hidden)).topk_ids
    assert not torch.equal(before, after)
    assert torch.equal(after.long(), truth_of(module, hidden).ids)


@pytest.mark.parametrize(
    "kind",
    [deepseek_v2.DeepseekV2MoE, glm4_moe.Glm4MoeSparseMoeBlock, glm4_moe_lite.Glm4MoeLiteSparseMoeBlock],
    ids=lambda kind: kind.__name__,
)
def test_a_real_moe_block_is_linked_and_runs_on_our_core(kind: type):
    backend = runner.Family("router_ext_pair", MoeRunnerBackend.TRITON)
    get_flags().moe.runner_backend = backend
    with reference_mode.reference_mode():
        block = kind(SHAPE, layer_id=1)
    linked = block.gate.__dict__[layer.LINK]
    assert linked.request.backend == "router_ext_pair"
    assert linked.config is block.topk.topk_config
    assert isinstance(block.experts.runner.runner_core, runner.Core)
    assert block.experts.runner_backend == block.topk.topk_config.runner_backend == backend
    assert block.topk.topk_config.output_format == topk.TopKOutputFormat.STANDARD
    assert not any("router_ext" in name for name in [*dict(block.named_modules()), *dict(block.named_parameters())])


def test_a_draft_layer_keeps_the_backend_it_was_built_under(monkeypatch):
    """Speculative decoding swaps the global backend while the draft model is built, and swaps it back."""
    moe = get_flags().moe
    moe.runner_backend = MoeRunnerBackend.TRITON
    moe.speculative_runner_backend = runner.Family("router_ext", MoeRunnerBackend.TRITON)
    target = deepseek_v2.DeepseekV2MoE(SHAPE, layer_id=1)
    with utils.speculative_moe_backend_context():
        draft = deepseek_v2.DeepseekV2MoE(SHAPE, layer_id=1)
    assert draft.gate.__dict__[layer.LINK].request.backend == "router_ext"
    assert target.gate.__dict__[layer.LINK].refusal.startswith("stock backend")
    assert isinstance(draft.experts.runner.runner_core, runner.Core)
    assert not isinstance(target.experts.runner.runner_core, runner.Core)


# ------------------------------------------------------------------------------------------------ what stays with SGLang


def test_unmeasured_designs_of_router_ext_stay_with_sglang():
    module, select = build("router_ext", gpu="b300")
    hidden = rows_of(3)
    logits = module(hidden)
    output = select(hidden, logits)
    assert torch.equal(logits, torch.nn.functional.linear(hidden, module.weight))
    assert output.topk_ids.shape == (3, TOPK)
    (reason,) = reasons("gate")
    assert "pair: on trial: runs only where it is named" in reason or "pair: not measured on NVIDIA B300" in reason
    assert "warp_select" not in reason
    assert "warp_select: " in reasons("selection")[0]


def test_reasons_do_not_count_rows():
    """They are Prometheus labels: one for every prefill length would be thousands."""
    takes = TABLE["small_rows"].rows
    module, _ = build(None, gate="small_rows")
    for more in (1, 2, 24):
        module(rows_of(takes.last + more))
    assert reasons("gate") == [f"small_rows: rows: takes {takes}"]


def test_the_gate_alone_under_a_stock_backend():
    module, select = build(None, gate="small_rows")
    hidden = rows_of(2)
    output = select(hidden, module(hidden))
    assert paths() == [("gate", "reference:small_rows"), ("selection", "host")]
    assert reasons("selection") == ["stock backend"]
    assert torch.equal(output.topk_ids.long().sort(1).values, truth_of(module, hidden).ids.sort(1).values)


def test_our_selection_after_sglangs_gate():
    module, select = build(gate="host")
    hidden = rows_of(2)
    logits = module(hidden)
    output = select(hidden, logits)
    truth = reference.select(Problem(experts=EXPERTS, hidden=HIDDEN, topk=TOPK), logits, module.e_score_correction_bias)
    assert torch.equal(output.topk_ids.long(), truth.ids)
    assert paths() == [("gate", "host"), ("selection", "reference:warp_select")]
    assert reasons("gate") == ["SGLANG_ROUTER_EXT_GATE=host"]


@pytest.mark.parametrize("backend", ["router_ext_pair", "router_ext_single"])
def test_glm_4s_fp32_gate_is_routed_by_ours(backend: str):
    module, select = build(backend, fp32=True)
    hidden = rows_of(3)
    output = select(hidden, module(hidden))
    assert module.weight.dtype == torch.float32
    assert torch.equal(output.topk_ids.long(), truth_of(module, hidden, weight_dtype="float32").ids)
    name = f"reference:{backend.removeprefix('router_ext_')}"
    assert paths() == [("gate", name), ("selection", name)]


def test_an_fp32_gate_is_chosen_as_far_as_it_is_measured():
    module, select = build("router_ext", fp32=True)
    for rows in (3, 1024, 8193):
        hidden = rows_of(rows)
        select(hidden, module(hidden))
    gates = ("reference:pair", "host")
    selections = ("reference:pair", "reference:warp_select", "host")
    assert set(paths()) == {*(("gate", name) for name in gates), *(("selection", name) for name in selections)}
    assert "split_gemm: on trial: runs only where it is named" in reasons("gate")[0]


@pytest.mark.parametrize(("on_output", "weight"), [(True, 1.0), (False, 0.4)])
def test_fused_shared_experts_get_their_slot(on_output: bool, weight: float):
    """As SGLang's own router gives it: id past the experts, a weight that cancels a later scaling of the whole output."""
    with get_model().override(shared_experts=SharedExpertsConfig(num_fused_shared_experts=1)):
        module, select = build(routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=on_output)
        hidden = rows_of(2)
        output = select(hidden, module(hidden))
    assert output.topk_ids.shape == (2, TOPK + 1)
    assert (output.topk_ids[:, -1] == EXPERTS).all()
    assert output.topk_weights[:, -1].tolist() == pytest.approx([weight] * 2)
    assert output.topk_weights[:, :-1].sum(1).tolist() == pytest.approx([2.5 if on_output else 1.0] * 2)
    assert torch.equal(output.topk_ids[:, :-1].long(), truth_of(module, hidden).ids)
    assert paths() == [("gate", "reference:pair"), ("selection", "reference:pair")]


def test_expert_groups_leave_the_selection_to_sglang():
    module, select = build(num_expert_group=4, topk_group=2)
    hidden = rows_of(2)
    select(hidden, module(hidden))
    assert "pair: 4 expert groups of 16: takes groups of 32" in reasons("selection")[0]


def test_a_narrowed_bias_leaves_the_selection_to_sglang():
    module, select = build(bias_dtype=torch.bfloat16)
    hidden = rows_of(2)
    select(hidden, module(hidden))
    assert "pair: bfloat16 bias: takes float32" in reasons("selection")[0]


@pytest.mark.parametrize(
    "options", [{"correction_bias": None}, {"use_grouped_topk": False, "scoring_func": "softmax"}], ids=["no bias", "softmax"]
)
def test_a_selection_by_another_function_is_not_planned(options):
    module, _ = build(**options)
    logits = module(rows_of(6))
    assert paths() == [("gate", "reference:small_rows")]
    assert getattr(logits, blocks.HANDOVER) == problem.ELSEWHERE


def build_v4(backend="router_ext_pair", **options):
    """As DeepSeek V4 builds them: its groups are of its configuration, and of no selection."""
    return build(
        backend,
        **{"use_grouped_topk": False, "scoring_func": "sqrtsoftplus", "num_expert_group": 8, "topk_group": 8, **options},
    )


@pytest.mark.parametrize("log1p", [False, True], ids=["v4", "v4.1"])
@pytest.mark.parametrize("on_output", [True, False])
@pytest.mark.parametrize(("rows", "gate", "selection"), [(3, "pair", "pair"), (FUSED.last + 1, "tensor_core", "warp_select")])
def test_deepseek_v4s_modules_select_what_the_oracle_selects(log1p, on_output, rows, gate, selection):
    module, select = build_v4(sqrtsoftplus_log1p=log1p, apply_routed_scaling_factor_on_output=on_output)
    hidden = rows_of(rows)
    hidden[0, 0] = torch.nan
    output = select_as_on_cuda(select, hidden, module(hidden))
    truth = truth_of(module, hidden, score="sqrtsoftplus", nan_first=log1p, scale=SCALE if on_output else 1.0)
    assert torch.equal(output.topk_ids.long(), truth.ids)
    torch.testing.assert_close(output.topk_weights, truth.weights.float())
    assert paths() == [("gate", f"reference:{gate}"), ("selection", f"reference:{selection}")]


def test_sglangs_torch_code_gives_the_same_sqrt_softplus_weights():
    module, select = build_v4()
    hidden = rows_of(9)
    logits = module(hidden)
    ours = select_as_on_cuda(select, hidden, logits)
    bias = module.e_score_correction_bias
    weights, ids = topk.fused_topk_torch_native(hidden, logits, TOPK, True, bias, "sqrtsoftplus")
    order = ids.sort(1)
    assert torch.equal(ours.topk_ids.long().sort(1).values, order.values)
    mine = ours.topk_weights.gather(1, ours.topk_ids.long().sort(1).indices)
    torch.testing.assert_close(mine, weights.gather(1, order.indices))


def test_an_ungrouped_sigmoid_selection_is_handed_over():
    module, select = build(use_grouped_topk=False)
    hidden = rows_of(2)
    output = select_as_on_cuda(select, hidden, module(hidden))
    assert torch.equal(output.topk_ids.long(), truth_of(module, hidden).ids)
    assert paths() == [("gate", "reference:pair"), ("selection", "reference:pair")]


def test_padded_rows_of_sqrt_softplus_are_masked_where_sglangs_kernel_would_have(monkeypatch):
    """On CUDA select_experts relies on the kernel for it."""
    monkeypatch.setattr(topk, "_fused_gate_masks_padded_rows", lambda score: score == "sqrtsoftplus")
    module, select = build_v4("router_ext_single")
    hidden = rows_of(4)
    output = select_as_on_cuda(select, hidden, module(hidden), num_token_non_padded=torch.tensor([3]))
    truth = truth_of(module, hidden, score="sqrtsoftplus")
    assert torch.equal(output.topk_ids[:3].long(), truth.ids[:3])
    assert (output.topk_ids[3] == -1).all()
    assert (output.topk_weights[3] == 0).all()
    assert getattr(output.topk_ids, blocks.CARRIED) == blocks.PADDED


def test_a_v4_block_is_linked():
    shape = SimpleNamespace(
        **{**vars(SHAPE), "scoring_func": "sqrtsoftplus", "n_group": 8, "topk_group": 8, "model_type": "deepseek_v41"}
    )
    get_flags().moe.runner_backend = runner.Family("router_ext_pair", MoeRunnerBackend.TRITON)
    with reference_mode.reference_mode():
        block = deepseek_v2.DeepseekV2MoE(shape, layer_id=1, is_deepseek_v4=True)
    block.gate.weight.normal_(std=0.1)
    block.gate.e_score_correction_bias.normal_(std=0.1)
    hidden = rows_of(2)
    block.gate(hidden)
    asked = block.gate.__dict__[layer.LINK]._route.problem
    assert (asked.score, asked.nan_first, asked.groups, asked.bias) == ("sqrtsoftplus", True, 1, True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda gate: gate.__dict__.pop(layer.LINK), layer.NOT_LINKED),
        (lambda gate: gate.__dict__.update(weight=gate._parameters.pop("weight").data), "not a plain parameter"),
    ],
    ids=["unlinked", "offloaded or wrapped weight"],
)
def test_a_gate_that_no_design_takes_runs_as_ever(change, reason):
    module, _ = build()
    change(module)
    hidden = rows_of(2)
    logits = module(hidden)
    assert torch.equal(logits, torch.nn.functional.linear(hidden.to(module.weight.dtype), module.weight))
    assert reason in reasons("gate")[0]


def test_no_rows():
    module, _ = build()
    assert module(rows_of(4)[:0]).shape == (0, EXPERTS)
    assert reasons("gate") == ["no rows"]


def test_strided_hidden_states():
    module, _ = build()
    module(rows_of(4)[::2])
    assert reasons("gate") == ["hidden states are not contiguous rows"]


def test_kernels_take_cuda_tensors_only():
    module, select = build()
    layer.link(module, select, layer.Request("router_ext_pair", "auto"))
    module(rows_of(2))
    assert reasons("gate") == ["not on a CUDA device"]


def test_deterministic_inference_keeps_to_designs_whose_bits_no_batch_changes():
    with get_exec().deterministic.override(enable_deterministic_inference=True):
        module, select = build()
    for rows in (2, 17, 300):
        hidden = rows_of(rows)
        select_as_on_cuda(select, hidden, module(hidden))
    assert set(paths()) == {("gate", "reference:tensor_core"), ("selection", "reference:warp_select")}


def test_what_selects_in_an_unknown_way_is_sglangs():
    module, _select = build()
    layer.link(module, torch.nn.Identity(), reference_mode.request())
    assert module.__dict__[layer.LINK].refusal == "the selection is by Identity"


def test_hooks_of_this_process_are_proven_live():
    assert {hook.target for hook in hooks.needed(where=hooks.SCHEDULER)} <= set(hooks.live_targets())


def test_tensors_off_a_vector_boundary():
    """SGLang's own path takes them, so a server must not stop at them."""
    module, _ = build()
    odd = torch.zeros(2 * HIDDEN + 1, dtype=torch.bfloat16)[1:].view(2, HIDDEN)
    assert module(odd).shape == (2, EXPERTS)
    assert "16-byte boundary" in reasons("gate")[0]


def test_a_gate_weight_that_is_not_contiguous():
    module, _ = build()
    module.weight = torch.nn.Parameter(module.weight.t().contiguous().t())
    module(rows_of(2))
    assert reasons("gate") == ["the gate's weight is not contiguous rows"]
