"""From logits to SGLang's selection: which plans are taken, which are refused, and what SGLang still does afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo
from sglang.srt.layers.moe import topk
from sglang.srt.runtime_context import get_resources
from sglang_layer import EXPERTS, HIDDEN, SCALE, TOPK, build, reasons, rows_of, truth_of

from sglang_router_ext.plugin import handover


def call_of(module, hidden, logits, **changes):
    call = {
        "hidden_states": hidden,
        "gating_output": logits,
        "correction_bias": module.e_score_correction_bias,
        "topk": TOPK,
        "renormalize": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_fused_shared_experts": 0,
        "routed_scaling_factor": SCALE,
        "apply_routed_scaling_factor_on_output": False,
    }
    return call | changes


def original(**call):
    return "SGLang's own", "selection"


def test_a_plan_that_answers_the_question_is_taken_once():
    module, _ = build()
    hidden = rows_of(2)
    call = call_of(module, hidden, module(hidden))
    weights, ids = handover.take_grouped(original, **call)
    assert torch.equal(ids.long(), truth_of(module, hidden).ids)
    assert weights.shape == ids.shape
    assert handover.take_grouped(original, **call) == original()
    assert reasons("selection") == ["plan refused: taken before"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"topk": TOPK + 1}, "topk: asked 7, planned 6"),
        ({"topk": TOPK + 1, "num_fused_shared_experts": 1}, "shared: asked 1, planned 0"),
        ({"renormalize": False}, "renormalize: asked False, planned True"),
        ({"num_expert_group": 4}, "groups: asked 4, planned 1"),
        ({"topk_group": 2}, "groups_kept: asked 2, planned 1"),
        ({"apply_routed_scaling_factor_on_output": True}, "scale: asked 2.5, planned 1.0"),
        ({"correction_bias": torch.zeros(EXPERTS)}, "another selection bias"),
        ({"correction_bias": torch.zeros(2, EXPERTS)}, "another selection bias"),
        ({"hidden_states": torch.zeros(3, HIDDEN)}, "another number of rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_for_another_question_is_refused(changes, reason):
    module, _ = build()
    hidden = rows_of(2)
    assert handover.take_grouped(original, **call_of(module, hidden, module(hidden), **changes)) == original()
    assert reasons("selection") == [f"plan refused: {reason}"]


def test_a_plan_is_refused_after_the_logits_changed():
    module, _ = build()
    hidden = rows_of(2)
    logits = module(hidden)
    logits.uniform_(5, 10)  # what EPLB's "fake" dispatch does
    assert handover.take_grouped(original, **call_of(module, hidden, logits)) == original()
    assert reasons("selection") == ["plan refused: the logits were changed since"]


@pytest.mark.parametrize("change", [lambda logits: logits + 0.5, lambda logits: logits[:1], lambda logits: logits.bfloat16()])
def test_logits_made_from_ours_carry_no_plan(change):
    """An adapter on the gate, a slice, a cast: the selection must see what SGLang made of the logits."""
    module, _ = build()
    hidden = rows_of(2)
    assert handover.take_grouped(original, **call_of(module, hidden, change(module(hidden)))) == original()
    assert reasons("selection") == [handover.NO_PLAN]


def test_inference_mode_hides_changes_and_so_gets_no_plan():
    module, _ = build()
    with torch.inference_mode():
        hidden = rows_of(2)
        logits = module(hidden)
    assert handover.take_grouped(original, **call_of(module, hidden, logits)) == original()
    assert "inference-mode" in reasons("selection")[0]


def test_a_parameter_that_is_not_known_raises():
    module, _ = build()
    hidden = rows_of(2)
    with pytest.raises(TypeError, match="input_ids"):
        handover.take_grouped(original, **call_of(module, hidden, module(hidden)), input_ids=None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scoring_func": "sigmoid"}, "score: asked sigmoid, planned sqrtsoftplus"),
        ({"sqrtsoftplus_log1p": True}, "nan_first: asked True, planned False"),
        ({"packed_out": torch.zeros(2, TOPK)}, "packed ids are asked for"),
        ({"router_logits_partials": torch.zeros(2, EXPERTS)}, "the logits are partial sums"),
        ({"correction_bias": None}, "another selection bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_for_another_question_of_deepseek_v4_is_refused(changes, reason):
    module, _ = build(use_grouped_topk=False, scoring_func="sqrtsoftplus")
    hidden = rows_of(2)
    call = call_of(module, hidden, module(hidden), **{"scoring_func": "sqrtsoftplus", "num_token_non_padded": None, **changes})
    del call["num_expert_group"], call["topk_group"]
    assert handover.take_biased(original, **call) == original()
    assert reasons("selection") == [f"plan refused: {reason}"]


def test_two_batches_between_gate_and_selection():
    """Two-batch overlap gates both micro-batches before it selects for either."""
    module, select = build()
    first, second = rows_of(3), rows_of(5)
    logits = module(first), module(second)
    for hidden, made in zip((first, second), logits, strict=True):
        assert torch.equal(select(hidden, made).topk_ids.long(), truth_of(module, hidden).ids)


# ------------------------------------------------------------------------------------------------ what SGLang does after


def test_padded_rows_are_masked_by_sglang():
    module, select = build()
    hidden = rows_of(4)
    output = select(hidden, module(hidden), num_token_non_padded=torch.tensor(3))
    assert torch.equal(output.topk_ids[:3].long(), truth_of(module, hidden).ids[:3])
    assert (output.topk_ids[3] == -1).all()


def test_expert_placement_is_applied_once():
    module, select = build()
    hidden = rows_of(3)
    moved = (torch.arange(EXPERTS) + 4).int()
    info = ExpertLocationDispatchInfo("static", moved, moved[:, None], torch.ones(EXPERTS), EXPERTS + 4)
    output = select(hidden, module(hidden), expert_location_dispatch_info=info)
    assert torch.equal(output.topk_ids.long(), truth_of(module, hidden).ids + 4)


def test_a_simulated_routing_overrides_ours(monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_UNIFORM_EXPERTS", "1")
    seen = []
    monkeypatch.setattr(topk, "apply_routing_simulation", lambda ids, *_, **__: (seen.append(ids.clone()), ids.fill_(7)))
    module, select = build()
    hidden = rows_of(3)
    output = select(hidden, module(hidden))
    assert torch.equal(seen[0].long(), truth_of(module, hidden).ids)
    assert (output.topk_ids == 7).all()


def test_routed_experts_are_captured(monkeypatch):
    captured = {}
    capturer = SimpleNamespace(capture=lambda layer_id, topk_indices: captured.update({layer_id: topk_indices.clone()}))
    monkeypatch.setattr(get_resources(), "experts_capturer", capturer)
    module, select = build()
    hidden = rows_of(3)
    select(hidden, module(hidden))
    assert torch.equal(captured[3].long(), truth_of(module, hidden).ids)
