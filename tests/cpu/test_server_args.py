"""How a server that asks for ours starts, or refuses to: SGLang's own parser, its ServerArgs and its process roles.

What changes SGLang for good runs in processes of its own; each of them loads plugins as SGLang does.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sglang_router_ext import build
from sglang_router_ext.backends import BACKENDS, GATE_MODES, GATES
from sglang_router_ext.contract import ContractError, gpu_by_name
from sglang_router_ext.designs import TABLE
from sglang_router_ext.plugin import entry, hooks, preflight
from sglang_router_ext.plugin.preflight import Demand

H200 = gpu_by_name("h200")
MODEL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}

LIFE = """
import json, sys, time
from sglang.srt.plugins import load_plugins

load_plugins()
load_plugins()
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang_router_ext.contract import Gpu
from sglang_router_ext.plugin import hooks, preflight

seen = {"models imported": "sglang.srt.models.deepseek_v2" in sys.modules, "live": hooks.live_targets()}
model = sys.argv[1]


def outcome(run):
    try:
        return run()
    except BaseException as error:
        return [type(error).__name__, str(error)]


def parsed(*words):
    args = prepare_server_args(["--model-path", model, "--device", "cuda", "--skip-tokenizer-init", *words])
    return [args.moe_runner_backend, args.speculative_moe_runner_backend]


def resolved(**options):
    args = ServerArgs(model_path=model, device="cuda", skip_tokenizer_init=True, **options)
    args.resolve_once()
    return "resolved"


names = ("router_ext", "router_ext_pair", "router_ext_single")
seen["parsed"] = {name: outcome(lambda: parsed("--moe-runner-backend", name)) for name in names}
seen["draft"] = outcome(lambda: parsed("--speculative-moe-runner-backend=router_ext_pair"))
seen["typo"] = outcome(lambda: parsed("--moe-runner-backend", "router_ext_pear"))
seen["engine typo"] = outcome(lambda: resolved(moe_runner_backend="router_ext_pear"))
seen["engine draft typo"] = outcome(lambda: resolved(speculative_moe_runner_backend="router_ext_pear"))
seen["engine without a GPU"] = outcome(lambda: resolved(moe_runner_backend="router_ext"))
seen["stock"] = outcome(lambda: resolved(moe_runner_backend="triton"))
preflight.detect_gpu = lambda index=None: Gpu("NVIDIA H200", 90)
preflight.unavailable = dict
preflight._check_here.cache_clear()
seen["bf16"] = outcome(lambda: resolved(moe_runner_backend="router_ext"))
seen["pdmux"] = outcome(lambda: resolved(moe_runner_backend="router_ext", enable_pdmux=True))
seen["mxfp8"] = outcome(lambda: resolved(moe_runner_backend="router_ext", quantization="mxfp8"))
preflight.require_alike = lambda demand, nodes: sys.exit(f"{demand} on {nodes}")
seen["nodes"] = outcome(lambda: resolved(moe_runner_backend="router_ext", nnodes=2))
preflight.require_alike = lambda demand, nodes: None
live, hooks.live = hooks.live, lambda hook: False
seen["kept out"] = outcome(lambda: resolved(moe_runner_backend="router_ext"))
hooks.live = live
seen["awq"] = outcome(lambda: resolved(moe_runner_backend="router_ext", quantization="awq"))

# As a scheduler is told its role, in a process that has not been told one yet.
from sglang.srt.layers.moe import utils
from sglang.srt.layers.moe.moe_runner import runner as sglang_runner
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang_router_ext.plugin import counters

args = ServerArgs(
    model_path=model,
    device="cuda",
    skip_tokenizer_init=True,
    moe_runner_backend="router_ext_pair",
    speculative_moe_runner_backend="router_ext",
)
publish(args, role="detokenizer")
seen["detokenizer"] = hooks.live_targets()
publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
seen["scheduler"] = hooks.live_targets()
utils.initialize_moe_config()
backends = utils.get_moe_runner_backend(), utils.get_speculative_moe_runner_backend()
seen["backends"] = [[backend.value, backend.family.value] for backend in backends]
seen["cores"] = sorted(name for name in sglang_runner._CUSTOM_RUNNER_CORE_FACTORIES if name.startswith("router_ext"))
counters.PERIOD_S = 0.02
counters.count("gate", "pair")
counters.count("selection", "host", "no rows")
(status,) = counters.read_live()
seen["status"] = [status.identity.role, status.identity.rank, status.identity.backends, status.hooks]
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

registry = CollectorRegistry()
MultiProcessCollector(registry)
for _ in range(500):  # the reporter is a thread of its own
    seen["metrics"] = generate_latest(registry).decode().splitlines()
    if sum("calls_total{" in line for line in seen["metrics"]) == 2:
        break
    time.sleep(0.02)
print("SEEN " + json.dumps(seen))
"""

SPAWNED = """
import multiprocessing, sys


def scheduler(model):
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path=model, device="cuda", moe_runner_backend="router_ext"), role="scheduler")
    print("started half-hooked")


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=scheduler, args=(sys.argv[1],))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


class Started:
    """A process of its own, without a GPU and with its own temporary folder."""

    def __init__(self, folder: pathlib.Path, *command: str, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
        env = {**inherited, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1", **environment}
        self.process = subprocess.Popen(
            [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
        )

    @functools.cached_property
    def result(self) -> tuple[int, str, str]:
        """Exit status, stdout, stderr; waits for the end."""
        stdout, stderr = self.process.communicate(timeout=240)
        return self.process.returncode, stdout, stderr

    @functools.cached_property
    def seen(self) -> dict:
        """What the script reported."""
        _, stdout, stderr = self.result
        lines = [line for line in stdout.splitlines() if line.startswith("SEEN ")]
        assert lines, stdout + stderr
        return json.loads(lines[0].removeprefix("SEEN "))


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Iterator[dict[str, Started]]:
    """All of them at once: each spends its time importing SGLang."""
    root = tmp_path_factory.mktemp("processes")
    (root / "config.json").write_text(json.dumps(MODEL))
    scripts = {"life": LIFE, "spawned": SPAWNED}
    folders = {name: root / name for name in [*scripts, "server", "metrics"]}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "script.py").write_text(scripts.get(name, ""))
    metrics = {"PROMETHEUS_MULTIPROC_DIR": str(folders["metrics"])}
    server = ["-m", "sglang.launch_server", "--model-path", str(root), "--moe-runner-backend", "router_ext"]
    running = {
        "life": Started(folders["life"], "script.py", str(root), **metrics),
        "spawned": Started(folders["spawned"], "script.py", str(root)),
        "server": Started(folders["server"], *server),
    }
    yield running
    for process in running.values():
        process.process.kill()


@pytest.fixture(scope="module")
def seen(started) -> dict:
    return started["life"].seen


# ------------------------------------------------------------------------------------------------ the main process


def test_a_process_without_models_is_hooked_lightly(seen):
    assert not seen["models imported"]
    assert seen["live"] == [hook.target for hook in hooks.HOOKS if hook.where == hooks.EVERY_PROCESS]


@pytest.mark.parametrize("name", BACKENDS)
def test_sglangs_parser_takes_our_names(seen, name):
    assert seen["parsed"][name] == [name, None]


def test_sglangs_parser_takes_our_names_for_draft_models(seen):
    assert seen["draft"] == ["auto", "router_ext_pair"]


def test_sglangs_parser_refuses_a_typo(seen):
    assert seen["typo"] == ["SystemExit", "2"]


@pytest.mark.parametrize("case", ["engine typo", "engine draft typo"])
def test_engine_refuses_a_typo_and_names_what_is_allowed(seen, case):
    text = "moe_runner_backend: got 'router_ext_pear', allowed: router_ext | router_ext_pair | router_ext_single"
    assert seen[case] == ["ContractError", text]


def test_engine_stops_on_a_machine_that_cannot_run_ours(seen):
    kind, text = seen["engine without a GPU"]
    assert kind == "SystemExit"
    assert "cannot run router_ext here" in text
    assert "GPU: no CUDA GPU" in text


def test_stock_servers_are_left_alone(seen):
    assert seen["stock"] == "resolved"


def test_experts_are_checked_before_a_process_is_spawned(seen):
    assert seen["bf16"] == "resolved"
    assert seen["mxfp8"][0] == "ContractError"
    assert "SGLang replaces router_ext by flashinfer_trtllm" in seen["mxfp8"][1]
    assert seen["awq"][0] == "UnsupportedExperts"


def test_a_divided_gpu_is_refused(seen):
    kind, text = seen["pdmux"]
    assert kind == "SystemExit" and "--enable-pdmux divides the GPU's multiprocessors" in text


def test_nodes_and_hooks_are_checked_before_a_process_is_spawned(seen):
    assert seen["nodes"] == ["SystemExit", "router_ext on 2"]
    assert "publish: not live" in seen["kept out"][1]


# ------------------------------------------------------------------------------------------------ the scheduler


def test_only_a_process_that_runs_models_gets_every_hook(seen):
    assert seen["detokenizer"] == [hook.target for hook in hooks.HOOKS if hook.where == hooks.EVERY_PROCESS]
    assert seen["scheduler"] == [hook.target for hook in hooks.HOOKS]


def test_both_models_get_a_family_and_a_core(seen):
    assert seen["backends"] == [["router_ext_pair", "triton"], ["router_ext", "triton"]]
    assert seen["cores"] == sorted(BACKENDS)


def test_the_scheduler_shows_its_status(seen):
    assert seen["status"] == ["scheduler", 0, ["router_ext_pair", "router_ext"], [hook.target for hook in hooks.HOOKS]]


def test_the_scheduler_counts_for_prometheus_across_processes(seen):
    name = "sglang_router_ext_calls_total"
    assert f'{name}{{design="pair",reason="",stage="gate"}} 1.0' in seen["metrics"]
    assert f'{name}{{design="host",reason="no rows",stage="selection"}} 1.0' in seen["metrics"]


# ------------------------------------------------------------------------------------------------ servers that must not start


@pytest.mark.parametrize("name", ["server", "spawned"])
def test_a_process_never_starts_without_what_it_asks_for(started, name):
    status, stdout, stderr = started[name].result
    assert status == 1, stdout + stderr
    assert "cannot run router_ext here" in stderr
    assert "GPU: no CUDA GPU" in stderr
    assert "Traceback" not in stderr
    assert "half-hooked" not in stdout


# ------------------------------------------------------------------------------------------------ the entry point


def test_the_entry_point_costs_nothing_to_import():
    """SGLang imports it in processes that never route. doctor reads the status of live servers as cheaply."""
    code = "import sys, sglang_router_ext.plugin.entry; sys.exit(any(name in sys.modules for name in ('torch', 'sglang')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def refuse(*args, **kwargs):
    raise AssertionError("hooked although it should not be")


def test_off_hooks_nothing(monkeypatch, caplog):
    monkeypatch.setenv("SGLANG_ROUTER_EXT", "0")
    monkeypatch.setattr(hooks, "register", refuse)
    monkeypatch.setattr(entry, "add_choices", refuse)
    caplog.set_level("INFO")
    entry.register()
    assert [record.getMessage() for record in caplog.records] == [
        "sglang-router-ext: off (SGLANG_ROUTER_EXT=0); SGLang runs stock"
    ]


def test_a_wrong_setting_ends_the_process(monkeypatch):
    monkeypatch.setenv("SGLANG_ROUTER_EXT_GATE", "smal_rows")
    with pytest.raises(SystemExit, match="SGLANG_ROUTER_EXT_GATE: got 'smal_rows', allowed: auto"):
        entry.register()


def test_a_named_gate_that_cannot_run_ends_the_process(monkeypatch):
    monkeypatch.setenv("SGLANG_ROUTER_EXT_GATE", "small_rows")
    monkeypatch.setattr(preflight, "detect_gpu", lambda index=None: None)
    monkeypatch.setattr(hooks, "register", refuse)
    preflight._check_here.cache_clear()
    with pytest.raises(SystemExit, match="cannot run SGLANG_ROUTER_EXT_GATE=small_rows here"):
        entry.register()


def test_a_changed_sglang_ends_a_process_that_asks_for_ours_and_no_other(monkeypatch):
    monkeypatch.setattr(hooks, "problems", lambda rows: {"sglang.x": "takes (), known is (self)"})
    monkeypatch.setattr(hooks, "register", refuse)
    monkeypatch.setattr(sys, "argv", ["sglang", "serve", "--moe-runner-backend=triton"])
    with pytest.raises(hooks.HookError, match=r"off, because.*hook sglang\.x: takes \(\), known is \(self\)"):
        entry.register()  # SGLang logs it and runs stock
    monkeypatch.setattr(sys, "argv", ["sglang", "serve", "--moe-runner-backend=router_ext"])
    with pytest.raises(SystemExit, match=r"hook sglang\.x: takes"):
        entry.register()


def test_a_hook_that_another_plugin_keeps_out_stops_a_server(monkeypatch):
    monkeypatch.setattr(hooks, "live", lambda hook: "publish" not in hook.target)
    with pytest.raises(
        SystemExit, match=r"cannot run router_ext here[^\n]*\n  hook sglang\.srt\.runtime_context\.publish: not live"
    ):
        entry.require_live(Demand(("router_ext",)))


def test_what_is_asked_for(monkeypatch):
    assert not Demand.of_options(["auto", None], "auto")
    assert not Demand.of_options(["triton", "marlin"], "host")
    assert Demand.of_options(["triton", "router_ext"], "auto").backends == ("router_ext",)
    assert Demand.of_options(["router_ext", "router_ext"], "auto").backends == ("router_ext",)
    assert str(Demand.of_options(["router_ext", None], "naive")) == "router_ext and SGLANG_ROUTER_EXT_GATE=naive"
    with pytest.raises(ContractError, match="got 'router_ext_double'"):
        Demand.of_options(["router_ext_double"], "auto")
    monkeypatch.setattr(sys, "argv", ["sglang", "--speculative-moe-runner-backend", "router_ext_pair"])
    assert Demand.of_command_line("auto").backends == ("router_ext_pair",)


# ------------------------------------------------------------------------------------------------ preflight


@pytest.fixture
def no_compiler(monkeypatch):
    def missing():
        raise build.BuildError("no nvcc in CUDA_HOME or PATH")

    monkeypatch.setattr(build, "find_toolchain", missing)
    preflight.unavailable.cache_clear()
    yield
    preflight.unavailable.cache_clear()


def test_without_a_compiler_the_designs_in_cuda_are_taken_out(no_compiler):
    in_cuda = {design.name for design in TABLE.values() if any(name.endswith(".cuh") for name in design.sources)}
    assert {"pair", "small_rows", "warp_select"} <= in_cuda
    assert preflight.unavailable() == dict.fromkeys(in_cuda, "cannot be built: no nvcc in CUDA_HOME or PATH")
    findings = preflight.check(H200, Demand(("router_ext_pair",)))
    assert {finding.subject for finding in findings} == {f"design {name}" for name in in_cuda}
    assert not any(finding.blocks for finding in findings)


def test_several_nodes_must_all_be_able_to_build(no_compiler):
    preflight.require_alike(Demand(("router_ext_pair",)), 1)
    with pytest.raises(SystemExit, match=r"2 nodes: every node must be able to build the kernels\n  cannot be built: no nvcc"):
        preflight.require_alike(Demand(("router_ext_pair",)), 2)


def test_a_gate_that_is_named_must_be_there(no_compiler):
    blocking = [str(finding) for finding in preflight.check(H200, Demand(gate="small_rows")) if finding.blocks]
    assert blocking == ["SGLANG_ROUTER_EXT_GATE: small_rows: cannot be built: no nvcc in CUDA_HOME or PATH"]


def test_a_backend_needs_one_design_that_can_run(monkeypatch):
    monkeypatch.setattr(preflight, "_lost", lambda design, gpu: "broken" if design.name != "host" else None)
    blocking = [str(finding) for finding in preflight.check(H200, Demand(("router_ext_pair",))) if finding.blocks]
    assert blocking == ["router_ext_pair: none of its designs can run here"]


def test_designs_of_another_architecture_are_listed(monkeypatch):
    monkeypatch.setattr(preflight, "unavailable", dict)
    findings = {finding.subject: finding for finding in preflight.check(gpu_by_name("a100"), Demand(("router_ext_pair",)))}
    assert findings["design pair"].text == "sm_80: built for sm_90, sm_100, sm_103"
    assert "design triton_select" not in findings


def test_a_missing_call_is_named(monkeypatch):
    monkeypatch.setattr(preflight, "API", ("sglang.srt.arg_groups.choices:add_router_choices",))
    monkeypatch.setattr(preflight, "unavailable", dict)
    (finding,) = preflight.check(H200)
    assert finding.blocks
    assert str(finding).startswith("call sglang.srt.arg_groups.choices:add_router_choices: not there")


def server_args(**options: object) -> SimpleNamespace:
    """What the entry point reads of SGLang's."""
    defaults = {"moe_runner_backend": "auto", "speculative_moe_runner_backend": None, "nnodes": 1}
    return SimpleNamespace(**defaults | {"enable_deterministic_inference": False, "rl_on_policy_target": None} | options)


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate not in GATE_MODES])
def test_a_named_gate_that_deterministic_inference_rules_out_stops_a_server(gate, monkeypatch):
    monkeypatch.setattr(preflight, "unavailable", dict)
    assert not [one for one in preflight.check(H200, Demand(gate=gate)) if one.blocks]
    blocking = [str(one) for one in preflight.check(H200, Demand(gate=gate, deterministic=True)) if one.blocks]
    assert bool(blocking) == (gate != "tensor_core")
    text = f"SGLANG_ROUTER_EXT_GATE: got {gate}, which --enable-deterministic-inference rules out (deterministic inference: "
    assert all(one.startswith(text) and one.endswith("allowed: auto | host | fp32 | tensor_core") for one in blocking)


def test_deterministic_inference_is_read_of_the_command_line_and_the_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sglang", "--enable-deterministic-inference"])
    assert Demand.of_command_line("naive") == Demand(gate="naive", deterministic=True)
    monkeypatch.setattr(sys, "argv", ["sglang"])
    assert not Demand.of_command_line("naive").deterministic
    monkeypatch.setenv("SGLANG_ROUTER_EXT_GATE", "naive")
    assert not entry.demand_of(server_args()).deterministic
    assert entry.demand_of(server_args(rl_on_policy_target="fsdp")).deterministic
    monkeypatch.setattr(preflight, "detect_gpu", lambda index=None: H200)
    monkeypatch.setattr(preflight, "unavailable", dict)
    with pytest.raises(SystemExit, match="GATE: got naive, which --enable-deterministic-inference rules out"):
        entry.check_arguments(refuse, server_args(enable_deterministic_inference=True))


@pytest.mark.parametrize("backend", ["triton", None])
def test_fp32_logits_without_a_backend_of_ours_are_warned_of(backend, monkeypatch, caplog) -> None:
    monkeypatch.setenv("SGLANG_ROUTER_EXT_GATE", "fp32")
    args = server_args(moe_runner_backend=backend)
    entry.check_arguments(lambda _args: None, args)
    assert "SGLANG_ROUTER_EXT_GATE=fp32 changes nothing without a backend of ours" in caplog.text
    caplog.clear()
    monkeypatch.setenv("SGLANG_ROUTER_EXT_GATE", "auto")
    entry.check_arguments(lambda _args: None, args)
    assert not caplog.text
