"""Presets: every one is well formed, rests on a record, and is what SGLang's own parser takes; bad ones are named."""

from __future__ import annotations

import configparser
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import msgspec
import pytest
from typer.testing import CliRunner

from sglang_router_ext import launch
from sglang_router_ext.backends import BACKENDS
from sglang_router_ext.bench import machine
from sglang_router_ext.bench.record import read_all
from sglang_router_ext.cli import app
from sglang_router_ext.cli.launch import _against
from sglang_router_ext.contract import ContractError, gpu_by_name
from sglang_router_ext.plugin import preflight, runner
from sglang_router_ext.plugin.preflight import Demand

GOOD = b"""
model: some/model
sglang: 0.5.23
gpus: 8 x NVIDIA H200
goal: throughput
why: because
measured: not measured
flags:
  tp-size: 8
  moe-runner-backend: router_ext
"""

PARSED = """
import json, sys
from sglang.srt.plugins import load_plugins

load_plugins()
from sglang.srt.server_args import prepare_server_args

for words in json.loads(sys.stdin.read()):
    args = prepare_server_args(["--device", "cuda", "--skip-tokenizer-init", *words])
    print("PARSED", args.model_path, args.moe_runner_backend, args.tp_size, args.speculative_num_steps)
"""


def call(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["launch", *words])
    return done.exit_code, done.output


@pytest.mark.parametrize("name", launch.names())
def test_a_preset_is_well_formed_and_rests_on_a_record(name: str) -> None:
    preset = launch.read(name)
    assert launch.evidence(preset, read_all())
    assert preset.name == name


def test_sglangs_own_parser_takes_every_preset() -> None:
    presets = [launch.read(name) for name in launch.names()]
    words = [launch.command(preset, more=["--tp-size", "2"])[3:] for preset in presets]
    done = subprocess.run([sys.executable, "-c", PARSED], input=json.dumps(words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("PARSED ")]
    steps = [preset.flags.get("speculative-num-steps") for preset in presets]
    backends = [preset.flags.get("moe-runner-backend", "auto") for preset in presets]
    assert told == [[p.model, b, "2", str(s)] for p, b, s in zip(presets, backends, steps, strict=True)]


@pytest.mark.parametrize("name", launch.names())
def test_nothing_speaks_against_a_preset_on_its_own_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "unavailable", dict)
    preset = launch.read(name)
    monkeypatch.setattr(preflight, "detect_gpu", lambda index=None: preset.gpu)
    monkeypatch.setattr(machine, "gpus", lambda: 8)  # as many as one node has
    missing = launch.not_written(launch.flags_of(preset, ()))  # the demo's checkpoint
    assert _against(launch.flags_of(preset, ()), preset.environment) == missing
    if preset.flags.get("moe-runner-backend") in BACKENDS:
        quantization = preset.flags.get("quantization")
        assert runner.family_of(None if quantization is None else str(quantization), preset.gpu)


def test_what_a_preset_leaves_to_sglang_is_what_our_backends_refuse() -> None:
    preset = launch.read("glm-5.3-flash-nvfp4-b300-low-latency")
    assert (preset.gate, preset.flags["moe-runner-backend"], preset.tokens) == ("small_rows", "flashinfer_trtllm", 6)
    with pytest.raises(runner.UnsupportedExperts, match="experts quantized as modelopt_fp4 are not supported"):
        runner.family_of(str(preset.flags["quantization"]), preset.gpu)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"goal: throughput", b"goal: speed", "x.yaml: goal: got speed, allowed: low latency | throughput | deterministic"),
        (
            b"goal: throughput",
            b"goal: deterministic",
            "x.yaml: goal: got deterministic, allowed: another goal, or the flag enable",
        ),
        (
            b"flags:",
            b"flags:\n  enable-deterministic-inference: true",
            "x.yaml: goal: got throughput, allowed: the goal determ",
        ),
        (b"8 x NVIDIA H200", b"8 x H200", "x.yaml: gpus: got 8 x H200, allowed: a number, x, and one of NVIDIA A100 |"),
        (b"8 x NVIDIA H200", b"4 x NVIDIA H200", "x.yaml: flags: tp-size: got 8, allowed: a size that takes 4 GPUs"),
        (b"why:", b"case: glm\nwhy:", "x.yaml: case: got glm, allowed: glm-5.3-flash |"),
        (b"flags:", b"environment:\n  SGLANG_ROUTER_EXT_GATE: x\nflags:", "x.yaml: environment: SGLANG_ROUTER_EXT_GATE: got x"),
        (b"sglang: 0.5.23", b"sglang: 0.5.22", "x.yaml: sglang: got 0.5.22, allowed: 0.5.23"),
        (b"why:", b"reason:", "x.yaml: got Object contains unknown field `reason`"),
        (b"tp-size: 8", b"tp-size: [8]", "x.yaml: got Expected `bool | int | float | str`, got `array`"),
        (b"tp-size: 8", b"--tp-size: 8", "x.yaml: flags: got --tp-size, allowed: names without dashes"),
        (b"tp-size: 8", b"tp-size: false", "x.yaml: flags: tp-size: got False"),
        (b"backend: router_ext", b"backend: triton", "x.yaml: flags: moe-runner-backend: got triton, allowed: router_ext |"),
        (b"  moe-runner-backend: router_ext", b"", "x.yaml: flags: moe-runner-backend: got auto, allowed: router_ext |"),
        (b"model: some/model", b"", "x.yaml: got Object missing required field `model`"),
        (b"flags:", b"flags: [", "x.yaml: got"),
    ],
)
def test_a_bad_preset_is_named_with_its_key(old: bytes, new: bytes, words: str) -> None:
    assert launch.parse(GOOD, "x.yaml").flags == {"tp-size": 8, "moe-runner-backend": "router_ext"}
    with pytest.raises(ContractError) as raised:
        launch.parse(GOOD.replace(old, new), "x.yaml")
    assert str(raised.value).startswith(words)


def test_a_preset_may_name_a_gate_and_leave_the_backend_to_sglang() -> None:
    text = GOOD.replace(b"backend: router_ext", b"backend: flashinfer_trtllm")
    gated = launch.parse(text + b"environment:\n  SGLANG_ROUTER_EXT_GATE: small_rows\n", "x.yaml")
    assert (gated.gate, gated.ours) == ("small_rows", "flashinfer_trtllm, gate small_rows")
    with pytest.raises(ContractError, match=r"got flashinfer_trtllm, allowed: .* SGLANG_ROUTER_EXT_GATE of small_rows"):
        launch.parse(text + b"environment:\n  SGLANG_ROUTER_EXT_GATE: fp32\n", "x.yaml")


@pytest.mark.parametrize("case", ["glm-5.3-flash", ""])
def test_a_run_that_is_not_on_record_is_refused(case: str) -> None:
    text = GOOD.replace(b"not measured", b"0123456789ab").replace(b"goal:", f"case: '{case}'\ngoal:".encode())
    timed = f"a run that timed {case or 'the case that it names'}: "
    with pytest.raises(ContractError, match=f"measured: got 0123456789ab, allowed: not measured, or {timed}"):
        launch.evidence(launch.parse(text, "x.yaml"), read_all())


def test_a_run_of_another_models_router_justifies_nothing() -> None:
    preset = launch.read("glm-4.6-h200")
    other = msgspec.structs.replace(preset, case="glm-5.3-flash")
    assert launch.evidence(preset, read_all())
    with pytest.raises(ContractError, match=f"measured: got {preset.measured}"):
        launch.evidence(other, read_all())


def test_the_demos_model_is_served_once_it_is_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "not here: model-path: got ./demo/checkpoint, allowed: a folder with a checkpoint"
    assert text in call("demo-h200", "--dry-run")[1]
    folder = pathlib.Path(str(launch.read("demo-h200").model))
    assert folder == pathlib.Path("demo") / "checkpoint"  # where `demo --keep demo` writes it
    folder.mkdir(parents=True)
    assert text not in call("demo-h200", "--dry-run")[1]
    assert text not in call("demo-h200", "--dry-run", "--model-path", "some/model")[1]


def test_the_command_is_shown_as_a_shell_takes_it_and_the_machine_judged() -> None:
    code, output = call("glm-4.6-h200", "--dry-run", "--tp-size", "4", "--served-model-name", "two words")
    assert code == 0
    command = output.replace("\\\n", " ").split()
    assert command[1:5] == ["-m", "sglang.launch_server", "--model-path", "zai-org/GLM-4.6-FP8"]
    assert output.index("--tp-size 8") < output.index("--tp-size 4")
    assert "--served-model-name 'two words'" in output
    assert "not here: GPU: no CUDA GPU" in output


def test_a_server_that_cannot_run_here_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execvpe", lambda file, words, environment: started.append(words))
    code, _ = call("glm-4.6-h200")
    assert code == 1 and not started
    monkeypatch.setattr("sglang_router_ext.cli.launch._against", lambda *given: [])
    assert call("glm-4.6-h200", "--way", "serve")[0] == 0
    assert started[0][:3] == ["sglang", "serve", "--model-path"]


GOOD_ONE = launch.parse(GOOD, "x.yaml")


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--tp-size 4", "tp-size", "4"),
        ("--tp-size=4", "tp-size", "4"),
        ("--tp 4", "tp-size", "4"),
        ("--tensor-parallel-size 2 --tp-size 4", "tp-size", "4"),
        ("--model other/model", "model-path", "other/model"),
        ("--moe-runner-backend triton --port 1", "moe-runner-backend", "triton"),
    ],
)
def test_an_option_that_contradicts_the_preset_is_named(words: str, name: str, value: str) -> None:
    assert launch.flags_of(GOOD_ONE, words.split())[name] == value
    own = launch.flags_of(GOOD_ONE, ())[name]
    text = f"--{name}: got {value}, which takes the place of the preset's {own}"
    assert launch.contradictions(GOOD_ONE, words.split()) == [text]


@pytest.mark.parametrize("words", ["", "--port 8000 --enable-metrics", "--tp 8", "--max-running-requests -1 --nnodes 1"])
def test_an_option_that_adds_to_the_preset_is_no_contradiction(words: str) -> None:
    assert launch.contradictions(GOOD_ONE, words.split()) == []


def test_options_are_read_as_they_are_given() -> None:
    more = ["--trust-remote-code", "--port", "80", "--served-model-name", "two words", "--enable-metrics"]
    found = {"trust-remote-code": True, "port": "80", "served-model-name": "two words", "enable-metrics": True}
    assert launch.given(GOOD_ONE, more) == found
    assert not launch.contradictions(launch.read("deepseek-v3-h200"), ["--trust-remote-code"])


@pytest.mark.parametrize(
    ("words", "gpus", "needed"),
    [
        ("", 7, "8 or more, for --tp-size 8"),
        ("", 8, ""),
        ("--tp 4", 4, ""),
        ("--tp 16 --nnodes 2", 7, "8 or more, for --tp-size 16 over 2 nodes"),
        ("--tp 16 --nnodes 2", 8, ""),
        ("--tp 4 --pp-size 2", 4, "8 or more, for --tp-size 4 and --pp-size 2"),
        ("--tp many", 1, ""),  # SGLang's to refuse
        ("--nnodes 0", 1, ""),
    ],
)
def test_a_server_takes_as_many_gpus_as_its_sizes_say(words: str, gpus: int, needed: str) -> None:
    text = [f"GPUs: got {gpus}, allowed: {needed}"] if needed else []
    assert launch.too_few(launch.flags_of(GOOD_ONE, words.split()), gpus) == text


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine that has two, whatever else it has, and the servers that are started on it."""
    started: list[list[str]] = []
    monkeypatch.setattr("os.execvpe", lambda file, words, environment: started.append(words))
    monkeypatch.setattr(preflight, "detect_gpu", lambda index=None: gpu_by_name("h200"))
    monkeypatch.setattr(preflight, "unavailable", dict)
    monkeypatch.setattr(machine, "gpus", lambda: 2)
    return started


def test_too_few_gpus_are_said_and_stop_a_start(two_gpus: list[list[str]]) -> None:
    text = "not here: GPUs: got 2, allowed: 8 or more, for --tp-size 8"
    code, output = call("glm-4.6-h200", "--dry-run")
    assert code == 0 and text in output
    code, output = call("glm-4.6-h200")
    assert code == 1 and text in output and not two_gpus
    code, output = call("glm-4.6-h200", "--tp", "2")
    assert code == 0 and len(two_gpus) == 1
    assert "note: --tp-size: got 2, which takes the place of the preset's 8" in output


def test_what_is_judged_is_what_the_server_gets(two_gpus: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Demand] = []
    check = preflight.check
    monkeypatch.setattr(preflight, "check", lambda gpu, demand: judged.append(demand) or check(gpu, demand))
    assert call("glm-4.6-h200", "--tp", "2", "--moe-runner-backend", "triton")[0] == 0
    assert judged == []
    assert call("glm-4.6-h200", "--tp", "2", "--moe-runner-backend=router_ext_pair")[0] == 0
    assert judged == [Demand(("router_ext_pair",))]
    monkeypatch.setenv("SGLANG_ROUTER_EXT_GATE", "small_rows")
    code, output = call("glm-4.6-h200", "--tp", "2", "--enable-deterministic-inference")
    assert code == 1 and "SGLANG_ROUTER_EXT_GATE: got small_rows, which --enable-deterministic-inference rules out" in output
    code, output = call("glm-4.6-h200", "--moe-runner-backend", "router_ext_x")
    assert (code, "error: moe_runner_backend: got 'router_ext_x', allowed: router_ext |" in output) == (2, True)


def test_presets_are_listed() -> None:
    code, output = call("--list")
    assert code == 0
    assert all(name in output for name in launch.names())
    assert [one["name"] for one in json.loads(call("--list", "--json")[1])] == launch.names()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("nonsense", "--dry-run"), "error: preset: got nonsense, allowed: deepseek-v3-h200 |"),
        (("glm-4.6-h200", "--list"), "error: name: got glm-4.6-h200, allowed: none with --list"),
        (("glm-4.6-h200", "--dry-run", "--way", "docker"), "error: way: got docker, allowed: launch_server | serve"),
        ((), "error: preset: got '', allowed: "),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(words: tuple[str, ...], text: str) -> None:
    code, output = call(*words)
    assert code == 2
    assert text in output


SERVING = pathlib.Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_recipes_of_the_documentation_name_what_there_is() -> None:
    text = SERVING.read_text().replace("\\\n", " ")
    commands = re.findall(r"sglang-router-ext launch (.*)", text) + re.findall(r"docker run .*IMAGE ([^`]*)", text)
    assert len(commands) == 4
    for command in commands:
        code, output = call(*command.split(), "--dry-run")
        assert code == 0, output
        assert "--model-path" in output


def test_the_image_gets_what_the_package_needs() -> None:
    (wanted,) = re.findall(r"pip install (m.*) \\", SERVING.read_text())
    needed = tomllib.loads((SERVING.parents[1] / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {*wanted.split()} == {"ninja", *(name for name in needed if not name.startswith("sglang"))}


def test_the_unit_is_one_and_prevents_what_a_restart_cannot_mend() -> None:
    (text,) = re.findall(r"```ini\n(.*?)```", SERVING.read_text(), re.DOTALL)
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    assert [*unit] == ["DEFAULT", "Unit", "Service", "Install"]
    assert unit["Service"]["RestartPreventExitStatus"] == "1 2"
    assert unit["Service"]["ExecStart"].startswith("/opt/sglang/bin/sglang-router-ext launch ")


def test_presets_are_files_of_the_package() -> None:
    folder = pathlib.Path(launch.__file__).parent / "launch_configs"
    assert sorted(file.stem for file in folder.glob("*.yaml")) == launch.names() != []
