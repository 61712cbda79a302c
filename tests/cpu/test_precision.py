"""What rounding does to a selection: an example by hand, sizes of errors, sources, the command and its picture."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sglang_router_ext import reference
from sglang_router_ext.bench import layers, precision
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.inputs import SMALL_BIAS, random_inputs
from sglang_router_ext.bench.layers import Layer
from sglang_router_ext.bench.precision import ARITHMETICS, look, rounded
from sglang_router_ext.bench.precision_plot import plot
from sglang_router_ext.cli import app
from sglang_router_ext.contract import ContractError, Problem

CPU = torch.device("cpu")
SMALL = Problem(experts=16, hidden=32, topk=4)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["precision", "--device", "cpu", *arguments])


def small(problem: Problem = SMALL, *, rows: int = 20, seed: int = 0) -> Layer:
    inputs = random_inputs(problem, rows, seed=seed)
    return Layer(3, inputs.weight, inputs.bias if problem.bias else None, {"prefill": inputs.hidden})


def test_a_bias_in_bf16_swaps_two_experts_whose_keys_are_near() -> None:
    """Keys 8.900 and 8.899 are selected before 8.881. Cast, the biases 8.03 and 8.13 are 8.0 and 8.125."""
    scores = torch.tensor([0.769, 0.1, 0.881, 0.2, 0.3, 0.870, 0.4, 0.5])
    bias = torch.tensor([8.13, 8.0, 8.0, 8.0, 8.0, 8.03, 8.0, 8.0])
    problem = Problem(experts=8, hidden=8, topk=2)
    logits = torch.logit(scores.double())[None].float()
    found = {name: rounded(problem, logits, bias, name) for name in ARITHMETICS}
    assert found["fp32"].ids.tolist() == found["bf16 logits"].ids.tolist() == [[5, 0]]
    assert found["bf16 bias"].ids.tolist() == [[0, 2]]
    assert found["fp32"].weights[0].tolist() == pytest.approx([0.870 / 1.639, 0.769 / 1.639])
    assert found["bf16 bias"].keys[0, [0, 2, 5]].tolist() == pytest.approx([8.894, 8.881, 8.870])
    assert precision.moved(found["bf16 bias"].ids, found["fp32"].ids, 8).tolist() == [[False, True]]


def test_biases_near_twelve_fall_onto_seven_values_and_small_ones_do_not() -> None:
    layer = look(CASES["glm-5.3-flash"].problem, layers.Layer(24, None, torch.linspace(11.54, 11.96, 288), {})).bias
    assert layer is not None and (layer.distinct, layer.distinct_bf16) == (288, 7)
    assert 0.03 < layer.largest_error <= 2**-5
    few = precision.bias_of(torch.linspace(*SMALL_BIAS, 896))
    assert 302 <= few.distinct_bf16 <= 644 and few.largest_error <= 2**-9


def test_a_rounded_logit_shows_in_a_rank_key_by_a_quarter_at_most() -> None:
    logits = torch.linspace(-8, 8, 4001)[None]
    problem = Problem(experts=4001, hidden=8, topk=1, bias=False)
    keys = rounded(problem, logits, None, "bf16 logits").keys.double() - torch.sigmoid(logits.double())
    error = (logits.bfloat16().double() - logits.double()).abs()
    assert bool((keys.abs() <= error / 4 + 2**-24).all()) and keys.abs().max() > 1e-4


@pytest.mark.parametrize(
    "problem",
    [
        SMALL,
        Problem(experts=16, hidden=32, topk=4, groups=4, groups_kept=2, scale=2.5),
        Problem(experts=16, hidden=32, topk=3, score="sqrtsoftplus", nan_first=True, renormalize=False),
        Problem(experts=16, hidden=32, topk=4, score="softmax", softcap=5.0),
        Problem(experts=16, hidden=32, topk=4, score="softmax", bias=False, logits_dtype="bfloat16"),
    ],
    ids=str,
)
def test_in_fp32_experts_and_weights_are_the_oracles(problem: Problem) -> None:
    layer = small(problem, rows=300)
    assert layer.weight is not None
    exact = msgspec.structs.replace(problem, logits_dtype="float32")
    truth = reference.route(exact, layer.rows["prefill"], layer.weight, layer.bias)
    found = rounded(exact, truth.logits.float(), layer.bias, "fp32")
    clear = truth.margin > 1e-5
    assert clear.sum() > 290
    assert torch.equal(found.ids[clear].sort(1).values, truth.ids[clear].sort(1).values)
    torch.testing.assert_close(found.weights[clear].sort(1).values, truth.weights[clear].sort(1).values, rtol=1e-5, atol=1e-7)


def test_shares_are_counted_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = small(rows=40)
    assert layer.weight is not None and layer.bias is not None
    (phase,) = look(SMALL, layer).phases
    hidden = layer.rows["prefill"]
    truth = reference.route(SMALL, hidden, layer.weight, layer.bias)
    for effect in phase.effects:
        found = rounded(SMALL, hidden.float() @ layer.weight.float().t(), layer.bias, effect.arithmetic)
        changed = moved = 0.0
        for ids, weights, wanted in zip(found.ids.tolist(), found.weights.tolist(), truth.ids.tolist(), strict=True):
            changed += set(ids) != set(wanted)
            moved += sum(weight for one, weight in zip(ids, weights, strict=True) if one not in wanted) / sum(weights)
        assert (effect.rows_changed, effect.weight_moved) == (pytest.approx(changed / 40), pytest.approx(moved / 40))
        errors = (found.keys.double() - truth.keys).abs().flatten().sort().values
        assert effect.key_error == pytest.approx(float(errors[(len(errors) - 1) // 2]), rel=1e-4)
    changed = {effect.arithmetic: effect.rows_changed for effect in phase.effects}
    assert changed["fp32"] == 0 < changed["bf16 bias"]
    assert sum(phase.histogram) == phase.rows == 40 and phase.gap.p10 < phase.gap.median < phase.gap.p90
    monkeypatch.setattr(precision, "CHUNK", 7)
    (again,) = look(SMALL, layer).phases
    assert (again.gap, again.histogram, again.rows) == (phase.gap, phase.histogram, phase.rows)
    for one, other in zip(again.effects, phase.effects, strict=True):
        assert msgspec.structs.astuple(one) == pytest.approx(msgspec.structs.astuple(other))


def test_all_experts_selected_leaves_no_gap() -> None:
    (phase,) = look(msgspec.structs.replace(SMALL, topk=16), small()).phases
    assert phase.gap.median == math.inf and phase.effects[-1].rows_changed == 0


def write(path: pathlib.Path, tensors: dict[str, torch.Tensor], problem: Problem | None = SMALL) -> pathlib.Path:
    metadata = {} if problem is None else {"problem": msgspec.json.encode(problem).decode()}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata)
    return path


def tensors_of(numbers: tuple[int, ...] = (3, 10)) -> dict[str, torch.Tensor]:
    found = {}
    for number in numbers:
        layer = small(seed=number)
        assert layer.weight is not None and layer.bias is not None
        found[f"layers.{number}.weight"], found[f"layers.{number}.bias"] = layer.weight, layer.bias
        found[f"layers.{number}.prefill"] = layer.rows["prefill"]
        found[f"layers.{number}.decode"] = layer.rows["prefill"][:5]
    return found


def test_a_file_has_phases_apart(tmp_path: pathlib.Path) -> None:
    file = write(tmp_path / "some.safetensors", tensors_of())
    found = json.loads(call("--file", str(file), "--json").stdout)
    assert [layer["number"] for layer in found["layers"]] == [3, 10] and found["missing"] == ""
    rows = {(one["phase"], one["arithmetic"]): one["rows"] for one in found["average"]}
    assert rows == {**{("decode", name): 10 for name in ARITHMETICS}, **{("prefill", name): 40 for name in ARITHMETICS}}
    mine = msgspec.to_builtins(look(SMALL, small(seed=3)).phases[0])
    assert found["layers"][0]["phases"][1] == mine


def test_a_file_without_hidden_states_says_what_needs_them(tmp_path: pathlib.Path) -> None:
    some = {name: tensor for name, tensor in tensors_of().items() if name.endswith("bias")}
    result = call("--file", str(write(tmp_path / "b.safetensors", some)))
    assert result.exit_code == 0 and "selection bias" in result.output and "average layer" not in result.output
    assert "the file has no hidden states: gaps" in result.output


@pytest.mark.parametrize(
    ("change", "problem", "text"),
    [
        ({}, None, "no problem in its metadata"),
        ({"layers.3.weight": torch.zeros(16, 31)}, SMALL, "layers.3.weight: float32 [16, 31], allowed: "),
        ({"layers.3.bias": torch.zeros(15)}, SMALL, "layers.3.bias: float32 [15], allowed: "),
        ({"layers.3.prefill": torch.zeros(4, 33).bfloat16()}, SMALL, "layers.3.prefill: bfloat16 [4, 33], allowed: "),
        ({"layers.3.prefill": torch.zeros(32).bfloat16()}, SMALL, "layers.3.prefill: bfloat16 [32], allowed: "),
        ({"layers.3.prefill": torch.zeros(4, 32).half()}, SMALL, "layers.3.prefill: float16 [4, 32], allowed: "),
        ({"layers.3.prefill": torch.zeros(0, 32).bfloat16()}, SMALL, "layers.3.prefill: no row"),
        ({"layers.4.prefill": torch.zeros(4, 32).bfloat16()}, SMALL, "layers.4: no weight"),
        ({"lm_head.weight": torch.zeros(2)}, SMALL, "lm_head.weight, allowed: layers.N.weight"),
    ],
)
def test_a_file_that_does_not_fit(
    change: dict[str, torch.Tensor], problem: Problem | None, text: str, tmp_path: pathlib.Path
) -> None:
    file = write(tmp_path / "x.safetensors", {**tensors_of((3,)), **change}, problem)
    result = call("--file", str(file))
    assert result.exit_code == 2 and result.output.splitlines()[-1].startswith("error: file: got ")
    assert text in result.output


def checkpoint(folder: pathlib.Path, names: dict[str, torch.Tensor], *, index: bool, config: dict[str, Any]) -> pathlib.Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(names, folder / "model-00001-of-00001.safetensors")
    if index:
        places = dict.fromkeys(names, "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


GLM = {"model_type": "glm4_moe", "n_routed_experts": 16, "hidden_size": 32, "num_experts_per_tok": 4}
MINIMAX = {
    "model_type": "minimax_m2",
    "use_routing_bias": True,
    "num_local_experts": 16,
    "hidden_size": 32,
    "num_experts_per_tok": 4,
}


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GLM, "model.layers.{}.mlp.gate.e_score_correction_bias"),
        (MINIMAX, "model.layers.{}.block_sparse_moe.e_score_correction_bias"),
        (GLM, "model.language_model.layers.{}.mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_checkpoint_shows_its_biases(index: bool, config: dict[str, Any], name: str, tmp_path: pathlib.Path) -> None:
    tensors = {name.format(number): torch.linspace(11.54, 11.96, 16) + number for number in (1, 2)}
    tensors |= {"model.layers.1.mlp.gate_proj.weight": torch.zeros(4, 4), "model.norm.weight": torch.zeros(4)}
    result = call("--model", str(checkpoint(tmp_path, tensors, index=index, config=config)), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(layer["number"], layer["bias"]["distinct"]) for layer in found["layers"]] == [(1, 16), (2, 16)]
    assert "a checkpoint has no hidden states" in found["missing"] and found["average"] == []


def test_a_checkpoint_without_biases(tmp_path: pathlib.Path) -> None:
    folder = checkpoint(tmp_path, {"model.norm.weight": torch.zeros(4)}, index=False, config=GLM)
    assert f"error: model: got {folder}: no selection bias, allowed: " in call("--model", str(folder)).output
    (folder / "config.json").write_text(json.dumps({**MINIMAX, "use_routing_bias": False}))
    assert "allowed: a router with a selection bias, or --file" in call("--model", str(folder)).output
    (folder / "config.json").write_text(json.dumps(GLM))
    (folder / "model-00001-of-00001.safetensors").unlink()
    assert f"error: model: got {folder}: no safetensors file, allowed: " in call("--model", str(folder)).output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--case", "x"), "error: case: got x"),
        (("--layers", "0"), "error: layers: got 0"),
        (("--rows", "-1"), "error: rows: got -1"),
        (("--rows", "5", "--file", "x"), "error: rows: got 5, allowed: none with --file"),
        (("--case", "glm-4.6", "--model", "x"), "error: case: got glm-4.6, allowed: none with --model"),
        (("--case", "deepseek-v4-hash"), "error: case: got deepseek-v4-hash, allowed: a router that ranks"),
        (("--file", "nowhere.safetensors", "--case", "glm-4.6"), "error: file: got nowhere.safetensors: "),
        (("--device", "tpu"), "error: device: got tpu, allowed: auto | cpu | cuda"),
        (("--plot", "/nowhere/x.png"), "error: plot: got /nowhere/x.png"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], text: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and result.output.startswith(text), result.output


@pytest.mark.parametrize("what", [("--case", "qwen3-30b-a3b"), ("--case", "deepseek-v3"), ("--each",)])
def test_drawn_layers_give_a_table_and_a_picture(what: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "p.png"
    result = call(*what, "--layers", "2", "--rows", "30", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "60 drawn in 2 layers" in result.output and picture.read_bytes().startswith(b"\x89PNG")
    assert ("bf16 bias" in result.output) == ("qwen3-30b-a3b" not in what)


def test_a_picture_of_biases_alone_and_of_nothing_else(tmp_path: pathlib.Path) -> None:
    found = [look(SMALL, Layer(number, None, torch.rand(16), {})) for number in range(2)]
    plot("biases", found, torch.rand(16), tmp_path / "a.png")
    plot("none", [precision.LayerReport(0, None, [])], None, tmp_path / "b.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("a.png", "b.png"))


def test_an_average_of_layers() -> None:
    reports = [look(SMALL, small(seed=seed)) for seed in range(3)]
    shares = [[effect.rows_changed for effect in report.phases[0].effects] for report in reports]
    for place, average in enumerate(precision.averages(reports)):
        assert average.rows_changed == pytest.approx(sum(share[place] for share in shares) / 3)
        assert (average.layers, average.rows) == (3, 60)
    assert [precision.middle(values) for values in ([3.0], [1.0, 2.0], [3.0, 1.0, 2.0])] == [3.0, 1.0, 2.0]


def test_a_broken_file_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ContractError, match=r"^file: got .*x.safetensors: .*, allowed: a safetensors file"):
        layers.from_file(tmp_path / "x.safetensors", SMALL, CPU)
