"""Layers whose tokens have a say: hash layers of DeepSeek V4, and image tokens of V4.1, by SGLang's own modules."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.moe import topk
from sglang.srt.layers.moe.hash_topk import HashTopK
from sglang.srt.models import deepseek_v2
from sglang.srt.multimodal.dsv41 import vl_routing
from sglang_layer import EXPERTS, HIDDEN, SCALE, SHAPE, TOPK, build, fresh, on_the_cpu, paths, reasons, rows_of

from sglang_router_ext import reference
from sglang_router_ext.contract import PlanForm, Problem, Tokens
from sglang_router_ext.plugin import blocks, handover, layer, reference_mode, tokens

VOCABULARY, IMAGE = 50, 3


@pytest.fixture(autouse=True, scope="module")
def context():
    with on_the_cpu():
        yield


@pytest.fixture(autouse=True)
def clean():
    with fresh():
        yield


def hash_layer(backend="router_ext_pair", **options):
    """What DeepseekV2MoE's forward holds of a hash layer."""
    torch.manual_seed(5)
    gate = deepseek_v2.MoEGate(SHAPE, None, is_hash_moe=True).to(torch.bfloat16)
    gate.weight.normal_(std=0.1)
    choice = HashTopK(TOPK, EXPERTS, vocab_size=VOCABULARY, routed_scaling_factor=SCALE, layer_id=0, is_draft=False)
    choice.tid2eid.copy_(torch.rand(VOCABULARY, EXPERTS).argsort(1)[:, :TOPK].int())
    layer.link(gate, choice, reference_mode.request(backend, **options))
    return SimpleNamespace(gate=gate, topk=choice, config=SHAPE)


def image_layer(backend="router_ext_pair", **options):
    """The same of a layer with two biases."""
    gate, choice = build(backend, use_grouped_topk=False, scoring_func="sqrtsoftplus", sqrtsoftplus_log1p=True, **options)
    gate.e_score_correction_bias_vl = torch.nn.Parameter(torch.randn(EXPERTS) * 0.2)
    layer.link(gate, choice, reference_mode.request(backend))
    return SimpleNamespace(gate=gate, topk=choice, config=SimpleNamespace(image_token_id=IMAGE), layer_id=3)


def ids_of(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(IMAGE + 1, VOCABULARY, (rows,), generator=generator)
    ids[::2] = IMAGE
    return ids


def forward(moe, hidden: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """DeepseekV2MoE's way to the logits: its forward is given the tokens, and calls the gate."""
    tokens.note(moe, hidden, input_ids=ids, input_ids_global=ids)
    return moe.gate(hidden)


def test_a_hash_layer_takes_our_weights():
    moe, hidden, ids = hash_layer(), rows_of(5), ids_of(5)
    logits = forward(moe, hidden, ids)
    chosen = moe.topk(hidden, logits, ids)
    problem = Problem(experts=EXPERTS, hidden=HIDDEN, topk=TOPK, score="sqrtsoftplus", bias=False, hashed=True)
    assert moe.gate.__dict__[layer.LINK]._route.problem == msgspec.structs.replace(problem, shared_weight=1 / SCALE)
    named = reference.named_experts(problem, Tokens(ids, table=moe.topk.tid2eid))
    truth = reference.route(problem, hidden, moe.gate.weight, None, named=named)
    assert torch.equal(chosen.topk_ids, moe.topk.tid2eid[ids])
    torch.testing.assert_close(chosen.topk_weights, truth.weights.float())
    assert paths() == [("gate", "reference:hash_rows"), ("selection", "reference:hash_rows")]
    expected, _ids = moe.topk._forward_torch(moe.gate.weight.float().matmul(hidden.float().T).T, ids)
    torch.testing.assert_close(chosen.topk_weights, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["no tokens", "others' tokens", "other hidden states", "another gate before"])
def test_rows_of_unknown_tokens_are_selected_by_sglang(how):
    moe, hidden, ids = hash_layer(), rows_of(5), ids_of(5)
    tokens.note(moe, hidden, None, None, ids, {"no tokens": None, "others' tokens": ids_of(6)}.get(how, ids))
    if how == "other hidden states":
        hidden = hidden.clone()
    if how == "another gate before":
        moe.gate(hidden)
    logits = moe.gate(hidden)
    assert not logits.isnan().any()
    want = {("gate", "host")} if how != "another gate before" else {("gate", "reference:hash_rows"), ("gate", "host")}
    assert set(paths()) == want
    assert all(layer.NO_TOKENS in reason for reason in reasons("gate"))
    weights, chosen = handover.take_hash(asked_of([]), router_logits=logits, input_ids=ids, tid2eid=moe.topk.tid2eid)
    assert (weights, chosen) == ("weights", "ids")


def asked_of(calls: list):
    def original(**call):
        calls.append(call)
        return "weights", "ids"

    return original


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_ids": ids_of(5)}, "other tokens"),
        ({"tid2eid": torch.zeros(VOCABULARY, TOPK, dtype=torch.int32)}, "other tokens"),
        ({"scoring_func": "sigmoid"}, "score: asked sigmoid, planned sqrtsoftplus"),
        ({"num_fused_shared_experts": 1}, "shared: asked 1, planned 0"),
        ({"routed_scaling_factor": 1.0}, "shared_weight: asked 1.0, planned 0.4"),
    ],
)
def test_another_question_gets_sglangs_own_logits(change, said):
    moe, hidden, ids = hash_layer(), rows_of(5), ids_of(5)
    logits = forward(moe, hidden, ids)
    same = {"input_ids": ids, "tid2eid": moe.topk.tid2eid, "num_fused_shared_experts": 0, "routed_scaling_factor": SCALE}
    calls: list = []
    handover.take_hash(asked_of(calls), router_logits=logits, **{**same, "scoring_func": "sqrtsoftplus", **change})
    assert reasons("selection") == [f"plan refused: {said}"]
    (call,) = calls
    want = hidden.float() @ moe.gate.weight.float().T
    torch.testing.assert_close(call["router_logits"].float(), want, rtol=2**-7, atol=1e-3)  # bf16 on a CPU


def test_a_hash_layer_under_a_stock_backend_keeps_to_its_gate():
    moe, hidden, ids = hash_layer(None, gate="small_rows"), rows_of(5), ids_of(5)
    logits = forward(moe, hidden, ids)
    assert paths() == [("gate", "reference:small_rows")]
    assert getattr(logits, handover.HANDOVER) == "stock backend"


def test_hash_layers_that_sglang_selects_otherwise(monkeypatch):
    with envs.SGLANG_OPT_USE_FUSED_HASH_TOPK.override(False):
        assert hash_layer().gate.__dict__[layer.LINK].refusal == "SGLANG_OPT_USE_FUSED_HASH_TOPK is off"
    monkeypatch.setattr(HashTopK, "num_shared_topk_slots", 0)
    softmax = HashTopK(TOPK, EXPERTS, vocab_size=8, scoring_func="softmax", layer_id=0, is_draft=False)
    linked = layer.link(torch.nn.Identity(), softmax, reference_mode.request())
    assert linked.refusal == "a hash layer with softmax scores"
    with torch.inference_mode():
        moe = hash_layer()
        forward(moe, rows_of(2), ids_of(2))
    assert reasons("gate") == [layer.INFERENCE]


@pytest.mark.parametrize("rows", [1, 5])
def test_image_tokens_rank_by_their_own_bias(rows, monkeypatch):
    monkeypatch.setattr(vl_routing, "is_cuda", lambda: True)
    moe, hidden, ids = image_layer(), rows_of(rows), ids_of(rows)
    logits = forward(moe, hidden, ids)
    chosen = vl_routing.vision_topk(moe, logits, ids)
    gate = moe.gate
    problem = Problem(experts=EXPERTS, hidden=HIDDEN, topk=TOPK, score="sqrtsoftplus", nan_first=True, image_bias=True)
    bias, _ = reference.by_token(problem, gate.e_score_correction_bias, Tokens(ids, IMAGE, gate.e_score_correction_bias_vl))
    truth = reference.route(problem, hidden, gate.weight, bias)
    assert torch.equal(chosen.topk_ids.long(), truth.ids)
    torch.testing.assert_close(chosen.topk_weights, truth.weights.float())
    assert paths() == [("gate", "reference:pair"), ("selection", "reference:pair")]
    plain = reference.route(
        msgspec.structs.replace(problem, image_bias=False), hidden, gate.weight, gate.e_score_correction_bias
    )
    assert not torch.equal(plain.ids, truth.ids)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_ids": None}, "two biases in another way"),
        ({"bias_alt_token_id": IMAGE + 1}, "other tokens"),
        ({"bias_alt": torch.zeros(EXPERTS)}, "other tokens"),
        ({"sqrtsoftplus_log1p": False}, "nan_first: asked False, planned True"),
        ({"packed_out": torch.zeros(5, TOPK, dtype=torch.int32)}, "packed ids are asked for"),
        ({"renormalize_epsilon": 1.0}, "two biases in another way"),
        ({"input_ids": ids_of(5).repeat_interleave(2)[::2]}, "other tokens"),
    ],
)
def test_other_questions_about_images_are_sglangs(change, said):
    moe, hidden, ids = image_layer(), rows_of(5), ids_of(5)
    logits, gate = forward(moe, hidden, ids), moe.gate
    same = {
        "topk": TOPK,
        "scoring_func": "sqrtsoftplus",
        "bias_alt": gate.e_score_correction_bias_vl,
        "input_ids": ids,
        "bias_alt_token_id": IMAGE,
        "sqrtsoftplus_log1p": True,
        "routed_scaling_factor": SCALE,
    }
    calls: list = []

    def original(scores, bias, **call):
        calls.append((scores, bias, call))

    handover.take_image(original, logits, gate.e_score_correction_bias, **{**same, **change})
    assert reasons("selection") == [f"plan refused: {said}"]
    ((scores, bias, call),) = calls
    assert scores is logits
    assert bias is gate.e_score_correction_bias
    assert call == {**same, **change}


def test_one_bias_for_all_is_not_ours_to_answer():
    calls: list = []
    handover.take_image(lambda *args, **call: calls.append((args, call)), 1, 2, topk=3)
    assert calls == [((1, 2), {"topk": 3})]
    assert paths() == []


def packed_layer(backend="router_ext_pair"):
    gate, choice = build(backend, use_grouped_topk=False, scoring_func="sqrtsoftplus", sqrtsoftplus_log1p=True)
    choice.topk_config.fused_gate_packed_ids = True
    return gate, choice


def test_packed_ids_come_with_the_selection(monkeypatch):
    monkeypatch.setattr(topk, "_fused_gate_masks_padded_rows", lambda _score: True)
    gate, choice = packed_layer()
    hidden = rows_of(5)
    choice.topk_config.torch_native = False
    padding = torch.tensor([3], dtype=torch.int32)
    logits = gate(hidden)
    chosen = topk.select_experts(hidden, logits, choice.topk_config, layer_id=3, num_token_non_padded=padding)
    assert paths() == [("gate", "reference:pair"), ("selection", "reference:pair")]
    assert torch.equal(chosen.packed_topk_ids, reference.pack(chosen.topk_ids, chosen.topk_weights))
    assert (chosen.packed_topk_ids[3:] == handover.PACKED_PADDING).all()
    assert (chosen.topk_ids[3:] == -1).all()


def write_without_a_version(ids: torch.Tensor, padding: torch.Tensor | None = None, fill_value: int = -1) -> None:
    """As SGLang's CUDA kernel masks padded rows."""
    if padding is not None:
        ids.data[int(padding) :] = fill_value


@pytest.mark.parametrize("how", ["padded", "simulated", "as they are"])
def test_a_plan_of_image_rows_goes_with_what_is_written_into_the_ids(how, monkeypatch):
    monkeypatch.setattr(vl_routing, "is_cuda", lambda: True)
    monkeypatch.setattr(topk, "_mask_topk_ids_padded_region", write_without_a_version)
    monkeypatch.setattr(topk, "routing_simulation_enabled", lambda: how == "simulated")
    moe, hidden, ids = image_layer("router_ext_single"), rows_of(5), ids_of(5)
    moe.gate.__dict__[layer.LINK].forms[5] = PlanForm(kind="aligned", block=16)
    logits = forward(moe, hidden, ids)
    padding = torch.tensor([3], dtype=torch.int32) if how == "padded" else None
    chosen = vl_routing.vision_topk(moe, logits, ids, num_token_non_padded=padding)
    assert paths() == [("gate", "reference:single"), ("selection", "reference:single")]
    carried = chosen.topk_ids.__dict__[blocks.CARRIED]
    assert {"padded": blocks.PADDED, "simulated": blocks.SIMULATED}.get(how, carried) == carried
    assert isinstance(carried, str) == (how != "as they are")
    if how == "padded":
        assert (chosen.topk_ids[3:] == -1).all()


def test_layers_that_ask_for_what_no_contract_knows_are_left_alone():
    gate, choice = build("router_ext_pair")
    gate.e_score_correction_bias_vl = torch.nn.Parameter(torch.zeros(EXPERTS))
    linked = layer.link(gate, choice, reference_mode.request())
    assert linked.refusal == "a selection bias for images with other scores than sqrt-softplus"
    moe = hash_layer()
    moe.gate.e_score_correction_bias_vl = torch.nn.Parameter(torch.zeros(EXPERTS))
    layer.link(moe.gate, moe.topk, reference_mode.request())
    forward(moe, rows_of(5), ids_of(5))
    assert paths() == [("gate", "reference:hash_rows")]


@pytest.mark.parametrize("ids", [ids_of(10)[::2], ids_of(5).short(), ids_of(5)[:, None]])
def test_tokens_in_another_form_are_not_known(ids):
    moe, hidden = hash_layer(), rows_of(5)
    forward(moe, hidden, ids)
    assert paths() == [("gate", "host")]
    assert moe.gate.__dict__[layer.LINK].noted is None


@pytest.mark.parametrize(
    "rule",
    [
        lambda table: table.long(),
        lambda table: table.repeat(1, 2)[:, :TOPK],
    ],
    ids=["int64", "not dense"],
)
def test_a_table_in_another_form_is_sglangs(rule):
    moe = hash_layer()
    moe.topk.tid2eid = torch.nn.Parameter(rule(moe.topk.tid2eid.data), requires_grad=False)
    forward(moe, rows_of(5), ids_of(5))
    assert paths() == [("gate", "host")]


@pytest.mark.parametrize(
    "rule", [torch.zeros(EXPERTS, dtype=torch.bfloat16), torch.zeros(EXPERTS + 1)[1:]], ids=["bf16", "between boundaries"]
)
def test_an_image_bias_in_another_form_is_sglangs(rule):
    moe = image_layer()
    moe.gate.e_score_correction_bias_vl = torch.nn.Parameter(rule)
    forward(moe, rows_of(5), ids_of(5))
    assert paths() == [("gate", "host")]


def noted_plan() -> handover.Plan:
    gate, _choice = packed_layer()
    return getattr(gate(rows_of(5)), handover.HANDOVER)


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (torch.zeros(9, TOPK, dtype=torch.int32)[:5], "packed ids of another form are asked for"),
        (torch.zeros(5, TOPK), "packed ids of another form are asked for"),
        (torch.zeros(9, TOPK, dtype=torch.int32), "packed ids of another form are asked for"),
        (torch.zeros(5, TOPK, dtype=torch.int32), None),
        (None, None),
    ],
)
def test_packed_ids_take_the_place_of_their_like(packed, why):
    assert handover._packs(noted_plan(), packed_out=packed) == why


def test_packed_softmax_ids_of_padded_rows_are_sglangs():
    plan = noted_plan()
    softmax = msgspec.structs.replace(plan.problem, score="softmax", nan_first=False, bias=False)
    padded = {"packed_out": torch.zeros_like(plan.packed), "num_token_non_padded": torch.tensor([3])}
    assert handover._packs(plan, **padded) is None
    assert handover._packs(plan._replace(problem=softmax), **padded) == "packed ids with padded rows"
