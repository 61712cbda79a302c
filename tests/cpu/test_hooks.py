"""The table of hooks against the installed SGLang, and how rows are checked, applied and proven."""

from __future__ import annotations

import sys
import types
from collections import defaultdict

import msgspec
import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_router_ext import TESTED_SGLANG
from sglang_router_ext.plugin import hooks, preflight
from sglang_router_ext.plugin.hooks import EVERY_PROCESS, HOOKS, SCHEDULER, Hook, HookError
from sglang_router_ext.plugin.preflight import Demand

TARGET = "router_ext_fake_host.work"


def outer(original, number):
    return original(number) + 100


def outer_of_another(original, number):
    return -original(number)


@pytest.fixture
def host(monkeypatch):
    """A module of a pretended SGLang, an importer of it, and a registry of its own."""
    module, importer = types.ModuleType("router_ext_fake_host"), types.ModuleType("router_ext_fake_importer")
    exec("def work(number):\n    return number", module.__dict__)
    importer.work = module.work
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, importer.__name__, importer)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(hooks, "function_of", lambda hook: outer)
    return module


def row(**changes) -> Hook:
    base = Hook(
        target=TARGET,
        kind="around",
        where=SCHEDULER,
        for_backend=False,
        function="layer:gate_forward",
        parameters=("number",),
        why="a test",
        remove_when="never",
    )
    return msgspec.structs.replace(base, **changes)


def test_every_row_fits_the_installed_sglang():
    assert preflight.sglang_version() == TESTED_SGLANG
    assert hooks.problems(HOOKS) == {}


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition("sglang.srt.")[2])
def test_every_row_is_complete(hook):
    assert callable(hooks.function_of(hook))
    assert hook.where in (EVERY_PROCESS, SCHEDULER)
    assert len(hook.why.split()) > 4
    assert len(hook.remove_when.split()) > 4


def test_the_table_refuses_duplicates_and_unknown_kinds():
    assert set(hooks.table()) == {hook.target for hook in HOOKS}
    with pytest.raises(ValueError, match="stands twice"):
        hooks.table((row(), row()))
    with pytest.raises(ValueError, match="got instead, allowed: before"):
        hooks.table((row(kind="instead"),))


def test_a_gate_alone_leaves_selection_and_runner_untouched():
    targets = {hook.target for hook in hooks.needed(where=SCHEDULER, for_backend=False)}
    linked = ("deepseek_v2.DeepseekV2MoE", "glm4_moe.Glm4MoeSparseMoeBlock", "glm4_moe_lite.Glm4MoeLiteSparseMoeBlock")
    gates = ("deepseek_v2.MoEGate", "glm4_moe.Glm4MoeGate", "glm4_moe_lite.Glm4MoeLiteGate")
    linear = {hook.target for hook in HOOKS if hook.function == "linear:link_moe"}
    assert len(linear) == 9
    names = {f"{block}.__init__" for block in linked} | {f"{gate}.forward" for gate in gates}
    names |= {f"minimax_m2.MiniMaxM2MoE.{forward}" for forward in ("forward_normal", "forward_deepep")}
    assert targets == {f"sglang.srt.models.{name}" for name in names} | linear


def test_a_changed_signature_is_named(host):
    assert hooks.problems([row()]) == {}
    assert hooks.problems([row(parameters=("number", "rows"))]) == {TARGET: "takes (number), known is (number, rows)"}


@pytest.mark.parametrize("target", ["router_ext_fake_host.gone", "router_ext_no_such_module.work"])
def test_a_missing_target_is_named(host, target):
    assert "not there" in hooks.problems([row(target=target)])[target]


def test_install_reaches_importers_and_is_proven(host):
    assert not hooks.live(row())
    hooks.install([row()])
    assert host.work(1) == 101
    assert sys.modules["router_ext_fake_importer"].work(1) == 101
    assert hooks.live(row())


def test_install_again_changes_nothing(host):
    hooks.install([row()])
    hooks.install([row()])
    assert host.work(1) == 101


def test_a_target_that_cannot_be_hooked_stops_the_install(host):
    with pytest.raises(HookError, match=r"gone: not there"):
        hooks.install([row(), row(target="router_ext_fake_host.gone")])


def test_a_target_that_another_plugin_changed_before_stops_the_install(host):
    """The registry records such a target as done, and never adds the later hook."""
    HookRegistry.register(TARGET, outer_of_another, HookType.AROUND)
    HookRegistry.apply_hooks()
    with pytest.raises(HookError, match="changed before by another plugin"):
        hooks.install([row()])
    assert TARGET in HookRegistry._patched
    assert not hooks.live(row())


def test_a_target_shared_with_another_plugin_works(host):
    HookRegistry.register(TARGET, outer_of_another, HookType.AROUND)
    hooks.install([row()])
    assert host.work(1) == 99


def test_a_hook_that_was_undone_is_not_live(host):
    original = host.work
    hooks.install([row()])
    host.work = original
    assert not hooks.live(row())


@pytest.fixture
def changed_sglang(monkeypatch):
    """The gate of this SGLang takes one more parameter than the table knows."""
    from sglang.srt.models.deepseek_v2 import MoEGate

    def forward(self, hidden_states, gemm_output_zero_allocator=None, forward_batch=None, input_ids=None):
        raise AssertionError

    monkeypatch.setattr(MoEGate, "forward", forward)
    monkeypatch.setattr(preflight, "unavailable", dict)
    preflight._check_here.cache_clear()
    yield
    preflight._check_here.cache_clear()


def test_a_changed_signature_stops_the_start_with_all_reasons(changed_sglang, monkeypatch):
    monkeypatch.setattr(preflight, "detect_gpu", lambda index=None: None)
    with pytest.raises(SystemExit) as stop:
        preflight.require(Demand(("router_ext_pair",)))
    message = str(stop.value.code)
    assert "MoEGate.forward: takes (self, hidden_states, gemm_output_zero_allocator, forward_batch, input_ids)" in message
    assert "no CUDA GPU" in message


def test_another_version_passes_only_where_every_signature_is_the_same(monkeypatch):
    from sglang_router_ext.contract import gpu_by_name

    monkeypatch.setattr(preflight, "unavailable", dict)
    monkeypatch.setattr(preflight, "sglang_version", lambda: "0.5.99")
    (finding,) = preflight.check(gpu_by_name("h200"), Demand(("router_ext_pair",)))
    assert not finding.blocks
    assert "0.5.99 is not tested" in str(finding)
    assert "every hooked signature is the same" in str(finding)
    monkeypatch.setattr(hooks, "problems", lambda rows: {TARGET: "takes (), known is (number)"})
    blocking = [str(finding) for finding in preflight.check(gpu_by_name("h200")) if finding.blocks]
    assert blocking == [
        f"SGLang: 0.5.99 is not tested ({TESTED_SGLANG} is); it differs as listed",
        f"hook {TARGET}: takes (), known is (number)",
    ]
