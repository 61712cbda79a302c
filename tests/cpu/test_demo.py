"""The demo's checkpoint, in SGLang's own loader too, and the demo without a GPU."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from sglang_router_ext.contract import ContractError
from sglang_router_ext.demo import checkpoint, cpu, quantise, show
from sglang_router_ext.demo.checkpoint import Size

SMALL = {
    "vocab_size": 32,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
}


def small(size: Size) -> dict:
    return REAL_CONFIG(size) | SMALL


REAL_CONFIG = checkpoint.config


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Size:
    """The checkpoint with small tensors."""
    monkeypatch.setattr(checkpoint, "config", small)
    return Size(layers=3, moe_intermediate=16)


# --- checkpoint


@pytest.mark.parametrize(
    ("model", "case", "mistake"),
    [
        ("glm", "glm-5.3-flash", "bf16 selection biases"),
        ("glm-4", "glm-4.6", "bf16 selection biases"),
        ("qwen3", "qwen3-30b-a3b", "FP8 gate weights"),
        ("deepseek-v3", "deepseek-v3", "bf16 selection biases"),
        ("kimi-k2", "kimi-k2", "bf16 selection biases"),
    ],
)
def test_the_router_is_that_of_a_case(model: str, case: str, mistake: str) -> None:
    from sglang_router_ext.bench.cases import CASES

    config = checkpoint.config(Size(model=model))
    assert str(checkpoint.problem(config)) == str(CASES[case].problem)
    assert checkpoint.mistake(config) == mistake


def test_biases_collapse_in_bf16_and_ignore_the_default_dtype() -> None:
    specs = [spec for layer in Size().moe_layers for spec in checkpoint.router_specs(checkpoint.config(Size()), layer)]
    biases = [checkpoint.make(spec) for spec in specs if spec.scale is None]
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = [checkpoint.make(spec) for spec in specs if spec.scale is None]
    finally:
        torch.set_default_dtype(torch.float32)
    for bias, same in zip(biases, again, strict=True):
        assert bias.dtype == torch.float32
        assert torch.equal(bias, same)
        assert bias.max() - bias.min() < checkpoint.BIAS_SPREAD
        assert (len(bias.unique()), len(checkpoint.rounded(bias).unique())) == (288, 7)
    assert not torch.equal(biases[0], biases[1])


def test_a_checkpoint_is_written_once_whole_and_as_specified(tiny: Size, tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    path = checkpoint.write(tiny, tmp_path / "model", said.append)
    assert len(said) == 4
    wanted = {spec.name: spec for specs in checkpoint.shards(small(tiny)) for spec in specs}
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    for name, file in index["weight_map"].items():
        with safe_open(path / file, "pt") as shard:
            assert torch.equal(shard.get_tensor(name), checkpoint.make(wanted[name])), name
    checkpoint.write(tiny, path, said.append)
    assert len(said) == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_failed_write_leaves_nothing(tiny: Size, tmp_path: pathlib.Path) -> None:
    def give_up(text: str) -> None:
        if "00002" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.write(tiny, tmp_path / "model", give_up)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(tiny: Size, tmp_path: pathlib.Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ContractError, match="holds something else"):
        checkpoint.write(tiny, tmp_path)


def test_too_small_a_disk_is_named(tiny: Size, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _path: SimpleNamespace(free=10))
    with pytest.raises(ContractError, match="free disk space"):
        checkpoint.write(tiny, tmp_path / "model")


MODEL_ON_THE_CPU = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.models import deepseek_v2, glm4_moe, qwen3_moe
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang_router_ext.demo import checkpoint, weights
from transformers import AutoConfig

folder, store = sys.argv[1:]
publish(ServerArgs(model_path="dummy", device="cpu"), role="test", ranks=SpawnRanks(world_rank=0))
parallel_state.init_distributed_environment(
    world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}", backend="gloo"
)
parallel_state.initialize_model_parallel()
deepseek_v2.get_rope_wrapper = lambda *args, **options: torch.nn.Identity()  # on a CPU it wants YaRN; it has no weights
glm4_moe.get_rope = qwen3_moe.get_rope = deepseek_v2.get_rope_wrapper
torch.set_default_dtype(torch.bfloat16)

def built(**options):
    config = AutoConfig.from_pretrained(folder)
    (name,) = config.architectures
    (kind,) = {vars(module)[name] for module in (deepseek_v2, glm4_moe, qwen3_moe) if name in vars(module)}
    return kind(config, **options)
"""
"""What a process needs to build SGLang's model without a GPU; what follows it is the test."""

LOADED_BY_SGLANG = """
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import DefaultModelLoader

model = built()
for parameter in model.parameters():
    parameter.data.fill_(float("nan"))

loader = DefaultModelLoader(LoadConfig(load_format="auto"))
def tensors(folder):
    return loader._get_weights_iterator(DefaultModelLoader.Source(folder, None))

model.load_weights(tensors(folder))
unset = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
assert not unset, unset
stored = dict(tensors(folder))
experts = model.model.layers[1].mlp.experts
assert torch.equal(experts.w13_weight, stored["model.layers.1.mlp.experts.gate_up_proj"])
assert torch.equal(experts.w2_weight, stored["model.layers.1.mlp.experts.down_proj"])
gate = model.model.layers[2].mlp.gate
assert gate.e_score_correction_bias.dtype == torch.float32
assert torch.equal(gate.e_score_correction_bias, stored["model.layers.2.mlp.gate.e_score_correction_bias"])

unused = dict.fromkeys(("model_config", "update_model_fields", "recapture_cuda_graph", "get_model_runner"))
updater = WeightUpdater(
    tp_rank=0, device="cpu", gpu_id=0, custom_weight_loaders=[weights.DRAW, weights.NARROW], get_model=lambda: model, **unused
)
def change(function):
    updater.begin_weight_update()
    assert updater.update_weights_from_tensor([], function) == (True, "Success")
    updater.end_weight_update(run_post_load=False)

loaded = {name: parameter.clone() for name, parameter in model.named_parameters()}
for parameter in model.parameters():
    parameter.data.fill_(float("nan"))
change(weights.DRAW)
for name, parameter in model.named_parameters():
    assert torch.equal(parameter, loaded[name]), name  # the checkpoint was drawn on a CPU too

change(weights.NARROW)
for name, parameter in model.named_parameters():
    bias = name.endswith("e_score_correction_bias")
    assert torch.equal(parameter, loaded[name].bfloat16().float() if bias else loaded[name]), name
    assert torch.equal(parameter, loaded[name]) != bias
print("loaded")
"""


DRAWN_IN_FP8 = """
from sglang.srt.layers.quantization.fp8 import Fp8Config

config = json.load(open(folder + "/config.json"))
model = built(quant_config=Fp8Config.from_config(config["quantization_config"]))
drawn = [(name, parameter) for name, parameter in model.named_parameters() if not name.endswith((".k_scale", ".v_scale"))]
for _name, parameter in drawn:
    parameter.data.fill_(float("nan"))
weights.draw(model, [])
unset = [name for name, parameter in drawn if parameter.float().isnan().any()]
assert not unset, unset

def wide(values, scale):
    rows, columns = values.shape[-2:]
    return values.float() * scale.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]

specs = {spec.name: spec for specs in checkpoint.shards(config) for spec in specs}
def check(values, scale, *names):
    want = torch.cat([checkpoint.make(specs[name]) for name in names], -2).float()
    assert values.dtype == torch.float8_e4m3fn
    assert ((wide(values, scale) - want).abs() <= want.abs() / 16 + want.abs().max() / 2**15).all(), names

layer = model.model.layers[1]
experts, attention, prefix = layer.mlp.experts, layer.self_attn, "model.layers.1."
check(experts.w13_weight, experts.w13_weight_scale_inv, prefix + "mlp.experts.gate_up_proj")
check(experts.w2_weight, experts.w2_weight_scale_inv, prefix + "mlp.experts.down_proj")
for name in ("q_b_proj", "o_proj"):
    part = getattr(attention, name)
    check(part.weight, part.weight_scale_inv, f"{prefix}self_attn.{name}.weight")
both = attention.fused_qkv_a_proj_with_mqa
names = (f"{prefix}self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa"))
check(both.weight, both.weight_scale_inv, *names)
assert torch.equal(layer.mlp.gate.weight, checkpoint.make(specs[prefix + "mlp.gate.weight"]))
print("drawn")
"""


LOADED_WITH_A_LINEAR_OR_AN_FP32_GATE = """
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import DefaultModelLoader

model = built()
loader = DefaultModelLoader(LoadConfig(load_format="auto"))
def emptied():
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))

emptied()
model.load_weights(loader._get_weights_iterator(DefaultModelLoader.Source(folder, None)))
unset = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
assert not unset, unset
loaded = {name: parameter.clone() for name, parameter in model.named_parameters()}
emptied()
weights.draw(model, [])
for name, parameter in model.named_parameters():
    assert torch.equal(parameter, loaded[name]), name
weights.narrow_routers(model, [])
changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, loaded[name])]
print("loaded", model.model.layers[1].mlp.gate.weight.dtype, *changed)
"""


def on_the_cpu(script: str, folder: pathlib.Path, store: pathlib.Path) -> str:
    """What ``script`` prints behind MODEL_ON_THE_CPU, in a process of its own."""
    command = [sys.executable, "-c", MODEL_ON_THE_CPU + script, str(folder), str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "not found in params_dict" not in done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("glm-4", "loaded torch.float32 model.layers.1.mlp.gate.e_score_correction_bias"),
        ("qwen3", "loaded torch.bfloat16 model.layers.0.mlp.gate.weight model.layers.1.mlp.gate.weight"),
    ],
)
def test_sglang_loads_the_other_models(model: str, said: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 256, "head_dim": 64, "n_routed_experts" if model == "glm-4" else "num_experts": 16}
    monkeypatch.setattr(
        checkpoint, "config", lambda size: REAL_CONFIG(size) | {"vocab_size": 32, "num_attention_heads": 4} | shape
    )
    path = checkpoint.write(Size(2, 16, model=model), tmp_path / "model", lambda _text: None)
    assert said in on_the_cpu(LOADED_WITH_A_LINEAR_OR_AN_FP32_GATE, path, tmp_path / "store")


def test_sglang_takes_the_fp8_weights(tmp_path: pathlib.Path) -> None:
    shape = {"vocab_size": 32, "hidden_size": 256, "n_routed_experts": 16, "q_lora_rank": 128}
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config(Size(3, 128, quantization="fp8")) | shape))
    assert "drawn" in on_the_cpu(DRAWN_IN_FP8, tmp_path, tmp_path / "store")


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 257), (3, 200, 64)])
def test_fp8_blocks_hold_their_largest_weight(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight.view(-1)[0] = 1000.0
    values, scale = quantise.in_fp8(weight)
    assert values.shape == weight.shape
    assert scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    assert values.float().isfinite().all()
    assert (values.view(-1)[0].float() * scale.view(-1)[0]).item() == pytest.approx(1000.0, rel=1 / 16)


def test_sglang_loads_every_tensor(tiny: Size, tmp_path: pathlib.Path) -> None:
    path = checkpoint.write(tiny, tmp_path / "model", lambda _text: None)
    assert "loaded" in on_the_cpu(LOADED_BY_SGLANG, path, tmp_path / "store")


# --- the half without a GPU

CPU_DEMO = """
import sys
from sglang_router_ext.demo import checkpoint, cpu
if "rounded" in sys.argv:
    build = cpu.build_layer
    def wrong(model, layer):
        moe = build(model, layer)
        moe.gate.e_score_correction_bias.copy_(checkpoint.rounded(moe.gate.e_score_correction_bias))
        return moe
    calls = []
    cpu.build_layer = lambda model, layer: (wrong if not calls.append(layer) and len(calls) == 1 else build)(model, layer)
report = cpu.run(checkpoint.Size(layers=2), sys.argv[-1], lambda text: None)
import msgspec
print(msgspec.json.encode(report).decode())
print(report.agrees)
"""


def cpu_demo(*arguments: str, backend: str = "router_ext_pair") -> tuple[cpu.CpuReport, bool]:
    """In a process of its own: it publishes a configuration of SGLang and places hooks."""
    command = [sys.executable, "-c", CPU_DEMO, *arguments, backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    body, agrees = done.stdout.splitlines()[-2:]
    return msgspec.json.decode(body, type=cpu.CpuReport), agrees == "True"


def shown(report: cpu.CpuReport) -> str:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show.show(report, console)
    return console.export_text()


def test_the_cpu_demo_of_measured_designs_agrees() -> None:
    report, agrees = cpu_demo(backend="router_ext")
    assert agrees
    assert report.backend == "router_ext"
    assert "gate: host" not in "; ".join(report.paths)
    assert any(path.startswith("selection: reference:tensor_pair") for path in report.paths)


def test_nvfp4_weights_are_the_nearest_there_are() -> None:
    weight = torch.randn((6, 64), generator=torch.Generator().manual_seed(0)).bfloat16() / 64
    weight[1] = 0.0
    packed, scale = quantise.in_nvfp4(weight)
    assert (packed.dtype, packed.shape) == (torch.uint8, (6, 32))
    assert (scale.dtype, scale.shape) == (torch.float8_e4m3fn, (6, 4))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    levels = torch.tensor(quantise.FP4_VALUES)
    levels = torch.cat((levels, -levels))
    each = (scale.float() * quantise.FP4_SCALE).repeat_interleave(quantise.FP4_BLOCK, -1)
    nearest = (levels * each[..., None] - weight.float()[..., None]).abs().amin(-1)
    assert torch.equal((levels[codes] * each - weight.float()).abs(), nearest)
    assert (nearest <= weight.float().abs().amax(-1, keepdim=True) / 4).all()
    assert not (levels[codes] * each)[1].any()


def test_an_nvfp4_checkpoint_has_its_routed_experts_in_fp4(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"vocab_size": 32, "hidden_size": 256, "n_routed_experts": 8, "q_lora_rank": 128}
    monkeypatch.setattr(checkpoint, "config", lambda size: REAL_CONFIG(size) | shape)
    path = checkpoint.write(Size(2, 128, quantization="nvfp4"), tmp_path / "model", lambda _text: None)
    with safe_open(path / "model-00002-of-00003.safetensors", "pt") as file:
        found = {name.removeprefix("model.layers.1.mlp."): file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    experts = {name: dtype for name, dtype in found.items() if name.startswith("experts.")}
    assert len(experts) == 8 * 3 * 4
    assert {name.rpartition(".")[2]: dtype for name, dtype in experts.items()} == {
        "weight": "U8",
        "weight_scale": "F8_E4M3",
        "weight_scale_2": "F32",
        "input_scale": "F32",
    }
    assert found["shared_experts.up_proj.weight"] == "BF16" == found["gate.weight"]


def test_fp8_weights_are_counted_as_such() -> None:
    wide, narrow = (checkpoint.bytes_of(checkpoint.config(Size(8, 128, quantization=kind))) for kind in ("none", "fp8"))
    assert 0.5 < narrow / wide < 0.52


def test_the_cpu_demo_agrees() -> None:
    report, agrees = cpu_demo()
    assert agrees
    assert [check.rows for check in report.checks] == list(cpu.ROWS)
    assert report.checks[-1].moved_by_bias > 256
    assert any("selection: reference:" in path for path in report.paths)
    assert set(report.choices) == {"NVIDIA H200 (sm_90)", "NVIDIA B300 (sm_103)"}
    text = shown(report)
    assert "Everything that must hold does" in text
    assert "No kernel runs" in text


def test_the_cpu_demo_notices_rounded_biases() -> None:
    report, agrees = cpu_demo("rounded")
    assert not agrees
    assert "whose key is higher by" in report.checks[-1].native[0]
    assert "[" not in shown(report).split("layer 1, 512 rows: ")[0][-5:]
