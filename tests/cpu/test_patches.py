"""Patches of SGLang: on a small tree in every state, on a copy of the installed SGLang, and the hooks that they replace."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import pathlib
import py_compile
import subprocess
import sys
from base64 import urlsafe_b64decode

import pytest
from typer.testing import CliRunner

from sglang_router_ext import TESTED_SGLANG, doctor, patch_trial, patches
from sglang_router_ext.cli import app
from sglang_router_ext.contract import ContractError
from sglang_router_ext.plugin import hooks

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ["fused_func_names", "runner_family", "plugin_errors"]

OLD = {"srt/a.py": b"one\ntwo\nthree\n", "srt/b.py": b"first\nsecond"}
NEW = {"srt/a.py": b"zero\none\nTWO\n2.5\n", "srt/b.py": b"second"}
DIFF = """\
--- a/python/sglang/srt/a.py
+++ b/python/sglang/srt/a.py
@@ -0,0 +1 @@
+zero
@@ -2,2 +3,2 @@
-two
-three
+TWO
+2.5
--- a/python/sglang/srt/b.py
+++ b/python/sglang/srt/b.py
@@ -1 +0,0 @@
-first
"""
TARGETS = "\n".join(
    f'[[patch.target]]\npath = "{path}"\nbefore = "{patches._sha(OLD[path])}"\nafter = "{patches._sha(NEW[path])}"'
    for path in OLD
)
SERIES = f"""
sglang = "{TESTED_SGLANG}"

[[patch]]
name = "small"
why = "because"
test = "test_small.py"
upstream = ""
remove-when = "never"

{TARGETS}
"""


@pytest.fixture
def small(tmp_path, monkeypatch) -> patches.Tree:
    """A tree of two files that one patch changes, and one that none does."""
    folder, root = tmp_path / "series", tmp_path / "site" / "sglang"
    folder.mkdir()
    (folder / "small.diff").write_text(DIFF)
    (folder / "test_small.py").write_text(
        "import sglang.srt.other, pathlib as p\nassert p.Path('sglang/srt/b.py').stat().st_size < 9"
    )
    for path, data in {
        **OLD,
        "srt/other.py": b"",
        "__init__.py": b"",
        "_version.py": f"__version__ = '{TESTED_SGLANG}'\n".encode(),
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    series = patches.parse(SERIES.encode(), "series.toml")
    monkeypatch.setattr(patches, "FOLDER", folder)
    monkeypatch.setattr(patches, "series", lambda: series)
    return patches.find_tree(root)


def state(tree: patches.Tree) -> str:
    (patch,) = patches.pick()
    return str(patches.look(patch, tree))


def has(tree: patches.Tree, files: dict[str, bytes]) -> bool:
    return all((tree.root / path).read_bytes() == data for path, data in files.items())


def everything(tree: patches.Tree) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in tree.root.parent.rglob("*") if path.is_file()}


def call(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["patches", *words])
    return done.exit_code, done.output


# ------------------------------------------------------------------------------------------------------- any tree


def test_a_patch_is_applied_and_reverted_to_the_byte(small):
    before = everything(small)
    assert state(small) == "not applied"
    assert [change.path.name for change in patches.apply(patches.pick(), small)] == ["a.py", "b.py"]
    assert state(small) == "applied"
    assert has(small, NEW)
    assert patches.apply(patches.pick(), small) == []
    backup = small.root.parent / patches.BACKUP / "sglang"
    assert {path: (backup / path).read_bytes() for path in OLD} == OLD
    patches.revert(patches.pick(), small)
    assert everything(small) == before
    assert not backup.parent.exists()
    assert patches.revert(patches.pick(), small) == []


@pytest.mark.parametrize("change", [patches.apply, patches.revert])
@pytest.mark.parametrize("content", [b"edited\n", None])
def test_a_changed_tree_is_named_and_left_alone(small, change, content):
    if change is patches.revert:
        patches.apply(patches.pick(), small)
    file = small.root / "srt/b.py"
    file.unlink() if content is None else file.write_bytes(content)
    before = everything(small)
    assert state(small) == "changed tree: srt/b.py"
    with pytest.raises(ContractError, match=r"small: got changed tree: srt/b\.py, allowed: SGLang 0\.5\.23 as its wheel"):
        change(patches.pick(), small)
    assert everything(small) == before


def test_another_version_is_named_and_left_alone(small):
    (small.root / "_version.py").write_text("__version__ = version = '0.5.24'\n")
    tree = patches.find_tree(small.root.parent)
    assert tree.root == small.root
    assert state(tree) == "another SGLang version: 0.5.24"
    with pytest.raises(ContractError, match=r"another SGLang version: 0\.5\.24"):
        patches.apply(patches.pick(), tree)
    assert has(tree, OLD)


KILLED = """
import os, pathlib, sys
from sglang_router_ext import patches

series = patches.parse(pathlib.Path(sys.argv[2]).read_bytes(), "series.toml")
patches.series, patches.FOLDER = lambda: series, pathlib.Path(sys.argv[2]).parent
put = patches._put
patches._put = lambda path, data: put(path, data) if path.name == "a.py" else os._exit(9)
getattr(patches, sys.argv[3])(patches.pick(), patches.find_tree(pathlib.Path(sys.argv[1])))
"""


@pytest.mark.parametrize("killed", ["apply", "revert"])
def test_what_a_kill_leaves_is_named_and_mended_either_way(small, killed, tmp_path):
    before = everything(small)
    (tmp_path / "series" / "series.toml").write_text(SERIES)
    for mend in (patches.apply, patches.revert):
        (patches.revert if killed == "apply" else patches.apply)(patches.pick(), small)
        words = [str(small.root), str(tmp_path / "series" / "series.toml"), killed]
        assert subprocess.run([sys.executable, "-c", KILLED, *words], cwd=ROOT, check=False).returncode == 9
        assert state(small) == f"partly applied: srt/{'a' if killed == 'apply' else 'b'}.py"
        mend(patches.pick(), small)
        assert has(small, NEW if mend is patches.apply else OLD)
    assert everything(small) == before


def test_a_failed_write_leaves_the_old_tree(small, monkeypatch):
    write = patches.write_whole

    def full(path, data):
        if path == small.root / "srt/b.py":
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(patches, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        patches.apply(patches.pick(), small)
    assert has(small, OLD)


def test_files_that_a_cache_shares_stay_as_they_are_there(small, tmp_path):
    cached = tmp_path / "cached.py"
    os.link(small.root / "srt/a.py", cached)
    patches.apply(patches.pick(), small)
    assert cached.read_bytes() == OLD["srt/a.py"]
    assert has(small, NEW)


def test_a_linked_file_is_refused(small, tmp_path):
    cached = tmp_path / "cached.py"
    (small.root / "srt/b.py").rename(cached)
    (small.root / "srt/b.py").symlink_to(cached)
    with pytest.raises(ContractError, match=r"srt/b\.py, behind a symbolic link, allowed: an installation that owns"):
        patches.apply(patches.pick(), small)
    assert has(small, OLD)


def test_a_folder_without_permission_is_named(small, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != small.root / "srt")
    with pytest.raises(ContractError, match=r"target: got \S+/srt, without the permission to write there"):
        patches.apply(patches.pick(), small)
    assert has(small, OLD)


def test_a_dry_run_verifies_and_changes_nothing(small):
    before = everything(small)
    assert len(patches.apply(patches.pick(), small, dry_run=True)) == 2
    assert everything(small) == before
    patches.apply(patches.pick(), small)
    assert len(patches.revert(patches.pick(), small, dry_run=True)) == 2
    assert has(small, NEW)


@pytest.mark.parametrize("backup", [b"damaged", None])
def test_originals_come_back_without_a_good_backup(small, backup):
    patches.apply(patches.pick(), small)
    for path in OLD:
        kept = small.root.parent / patches.BACKUP / "sglang" / path
        kept.unlink() if backup is None else kept.write_bytes(backup)
    patches.revert(patches.pick(), small)
    assert has(small, OLD)


def test_a_backup_that_is_whole_is_what_comes_back(small, tmp_path):
    patches.apply(patches.pick(), small)
    (tmp_path / "series" / "small.diff").write_text(DIFF.replace("-first", "-other"))
    patches.revert(patches.pick(), small)
    assert has(small, OLD)


def test_a_diff_that_is_not_of_the_series_changes_nothing(small, tmp_path):
    for text, words in (
        (DIFF.replace("+TWO", "+two"), "diff: got a file of hash"),
        (DIFF.replace("-two", "-too"), "diff, line 2: got other lines"),
        (DIFF.replace("-two", " two"), r"small\.diff:6: got ' two', allowed: a diff of python/sglang/ without context"),
        (DIFF.replace("srt/b.py", "srt/c.py"), r"small\.diff: got srt/a\.py, srt/c\.py, allowed: the files of the series"),
    ):
        (tmp_path / "series" / "small.diff").write_text(text)
        with pytest.raises(ContractError, match=words):
            patches.apply(patches.pick(), small)
        assert has(small, OLD)


def test_nothing_that_was_compiled_before_is_left(small):
    file = small.root / "srt/a.py"
    file.chmod(0o664)
    for other in (file, small.root / "srt/other.py"):
        other.write_bytes(other.read_bytes())
        compiled = other.parent / "__pycache__" / f"{other.stem}.cpython-311.pyc"
        py_compile.compile(
            str(small.root / "srt/other.py"), str(compiled), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
    patches.apply(patches.pick(), small)
    assert [path.name for path in (small.root / "srt/__pycache__").iterdir()] == ["other.cpython-311.pyc"]
    assert file.stat().st_mode & 0o777 == 0o664


def test_check_tells_what_passed_and_touches_nothing(small, tmp_path):
    patches.apply(patches.pick(), small)  # the copy is without
    before = everything(small)
    code, output = call("check", "--target", str(small.root), "--json")
    assert (code, json.loads(output[output.index("[\n") :])) == (
        0,
        [{"name": "small", "passed": True, "identical": True, "output": ""}],
    )
    (tmp_path / "series" / "test_small.py").write_text(
        "import pathlib; pathlib.Path('left').write_text(''); raise SystemExit('no')"
    )
    code, output = call("check", "--target", str(small.root))
    assert code == 1
    assert "FAILED" in output
    assert "DIFFERS" in output
    assert everything(small) == before


def test_the_commands_say_what_they_did(small):
    target = ["--target", str(small.root)]
    code, output = call("status", *target, "--json")
    (told,) = json.loads(output)["patches"]
    assert (code, told) == (0, {"name": "small", "state": "not applied", "files": [], "upstream": ""})
    assert "would change" in call("apply", *target, "--dry-run")[1]
    code, output = call("apply", "small", *target)
    assert code == 0
    assert f"changed {small.root / 'srt/a.py'}\n" in output
    assert str(small.root.parent / patches.BACKUP) in output
    assert "nothing to do: applied already" in call("apply", *target)[1]
    assert "│ applied" in call("status", *target)[1]
    assert call("revert", *target)[0] == 0
    assert has(small, OLD)
    assert call("apply", "smal", *target) == (2, "error: patch: got smal, allowed: small\n")
    code, output = call("status", "--target", str(small.root / "srt"))
    assert (code, output) == (2, f"error: target: got {small.root / 'srt'}, allowed: SGLang's package, or a folder with it\n")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("why =", "because =", "x.toml: got Object contains unknown field `because`"),
        ('why = "because"', "why = 3", "x.toml: got Expected `str`, got `int`"),
        (
            'remove-when = "never"',
            "",
            r"x.toml: got Object missing required field `remove-when`.*allowed: sglang, patch, name,",
        ),
        ('name = "small"', 'name = "../small"', r"x.toml: name: got ../small, allowed: an identifier, once"),
        ('before = "', 'before = "g', "x.toml: small: before: got g"),
        ("srt/b.py", "srt/a.py", "x.toml: small: path: got srt/a.py, allowed: a file of the package, in one patch"),
        ("srt/b.py", "../b.py", "x.toml: small: path: got ../b.py"),
        (TARGETS, "target = []", "x.toml: small: target: got none, allowed: one file or more"),
        ("[[patch]]", "[[patch", "x.toml: got"),
    ],
)
def test_a_bad_series_is_refused_by_file_key_and_what_is_allowed(old, new, words):
    with pytest.raises(ContractError, match=words):
        patches.parse(SERIES.replace(old, new).encode(), "x.toml")


# -------------------------------------------------------------------------------------------- the installed SGLang


def test_the_series_is_complete_and_of_the_wheel():
    assert [patch.name for patch in patches.pick()] == NAMES
    assert patches.series().sglang == TESTED_SGLANG
    wheel = {str(file): file.hash for file in importlib.metadata.files("sglang") or ()}
    for patch in patches.pick():
        assert (patches.FOLDER / patch.test).is_file()
        assert (patches.FOLDER / f"{patch.name}.md").read_text().startswith("# [")
        for target in patch.target:
            assert urlsafe_b64decode(wheel[f"sglang/{target.path}"].value + "=").hex() == target.before


def test_each_applies_alone_and_all_together_to_a_copy(tmp_path):
    copy = patch_trial.copy_of(patches.find_tree(), tmp_path.resolve() / "sglang")
    before = patch_trial._contents(copy)
    assert len(before) == 6
    for chosen in ([patch] for patch in patches.pick()):
        patches.apply(chosen, copy)
        assert [patch.name for patch in patches.pick() if str(patches.look(patch, copy)) == "applied"] == [chosen[0].name]
        patches.revert(chosen, copy)
        assert patch_trial._contents(copy) == before
    patches.apply(patches.pick(), copy)
    assert {str(patches.look(patch, copy)) for patch in patches.pick()} == {"applied"}
    patches.revert(patches.pick(), copy)
    assert patch_trial._contents(copy) == before


SERVED = """
import json, os, sys, unittest
from types import SimpleNamespace

seen = {"tests": {}}
for name in sys.argv[1:]:
    done = unittest.TextTestRunner(verbosity=0).run(unittest.defaultTestLoader.loadTestsFromName(f"test_{name}"))
    seen["tests"][name] = [done.testsRun > 1, done.wasSuccessful()]

import sglang.srt.runtime_context as context
from sglang.srt import plugins
from sglang_router_ext.contract import Gpu
from sglang_router_ext.plugin import hooks, preflight

seen["sglang"] = plugins.__file__
problems, hooks.problems = hooks.problems, lambda rows: {"a.function": "takes (), known is (self)"}
try:
    plugins.load_plugins()
    seen["misfit"] = "served stock"
except Exception as error:
    seen["misfit"] = str(error)
hooks.problems, plugins._plugins_loaded = problems, False
plugins.load_plugins()

from compressed_tensors.quantization import QuantizationArgs
from sglang.srt.layers.moe import utils
from sglang.srt.layers.moe.moe_runner import triton
from sglang.srt.layers.moe.moe_runner.base import FusedOpPool, MoeRunnerConfig
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8MoE
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.server_args import ServerArgs
from sglang_router_ext.plugin import runner

model = SimpleNamespace(quantization=None, is_fp4_experts=None)
preflight.detect_gpu = lambda index=None: Gpu("NVIDIA H200", 90)
context.publish(ServerArgs(model_path="dummy", device="cpu"), role="test", ranks=context.SpawnRanks(world_rank=0))
context.process_model_config = lambda: model
runner.register_cores()
rows = [hook for hook in hooks.needed(where=hooks.SCHEDULER) if hook.function.startswith("runner:")]
hooks.install(rows)
seen["hooks"] = [hook.function for hook in rows]
through = []
run = runner.Core.run_from_dispatch
runner.Core.run_from_dispatch = lambda self, *args, **options: through.append(self) or run(self, *args, **options)
FusedOpPool._fused_funcs["none", "triton"] = lambda dispatched, weights, config: [dispatched, weights, config.top_k]


def answers(backend):
    asked = [name for name in dir(backend) if name.startswith("is_")]
    return [backend.value, backend.name, *(name for name in asked if getattr(backend, name)())]


fp8 = {"num_bits": 8, "type": "float"}
method = UnquantizedFusedMoEMethod()
scheme = CompressedTensorsW8A8Fp8MoE(
    QuantizationArgs(**fp8, strategy="channel"), QuantizationArgs(**fp8, strategy="token", dynamic=True)
)
seen["served"] = []
for name in ("router_ext", "router_ext_single"):
    model.quantization = None
    backend = context.get_flags().moe.runner_backend = utils.resolve_moe_runner_backend(name)
    for made in (method, scheme):
        made.create_moe_runner(SimpleNamespace(), MoeRunnerConfig(top_k=8))
        built = made.runner
        ran = built.run("dispatched", "weights")
        seen["served"].append([answers(backend), answers(built.runner_backend), type(built.runner_core).__name__, ran])
    model.quantization = "modelopt_fp4"
    seen["served"].append(answers(utils.resolve_moe_runner_backend(name)))
model.quantization = "awq"
try:
    utils.resolve_moe_runner_backend("router_ext")
except Exception as error:
    seen["served"].append([type(error).__name__, str(error)])
seen["through the core"] = len(through)
print("SEEN " + json.dumps(seen))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """What the plugin does in stock SGLang and in a patched one, where the patches' own tests run too."""
    copy = patch_trial.copy_of(patches.find_tree(), tmp_path_factory.mktemp("copy").resolve() / "sglang")
    patches.apply(patches.pick(), copy)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    asked = {"SGLANG_REQUIRE_PLUGINS": "1", "SGLANG_PLUGINS": "router_ext", "CUDA_VISIBLE_DEVICES": ""}
    running = {}
    for name, first in (("stock", []), ("patched", [str(copy.root.parent)])):
        path = os.pathsep.join([*first, str(ROOT), str(ROOT / "patches")])
        running[name] = subprocess.Popen(
            [sys.executable, "-B", "-c", SERVED, *NAMES],
            env={**inherited, **asked, "PYTHONPATH": path},
            cwd=tmp_path_factory.mktemp(name),  # where no folder is called sglang
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    seen = {}
    for name, process in running.items():
        stdout, stderr = process.communicate(timeout=240)
        lines = [line for line in stdout.splitlines() if line.startswith("SEEN ")]
        assert lines, stdout + stderr
        seen[name] = json.loads(lines[0].removeprefix("SEEN "))
    assert seen["patched"]["sglang"].startswith(str(copy.root))
    assert not seen["stock"]["sglang"].startswith(str(copy.root))
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_its_own_test_passes_with_it_and_fails_without(served, name):
    assert served["patched"]["tests"][name] == [True, True]
    assert not served["stock"]["tests"][name][1]


def test_experts_run_the_same_with_patches_and_with_hooks(served):
    assert served["patched"]["served"] == served["stock"]["served"]
    (bf16, fp8, fp4), refused = served["stock"]["served"][:3], served["stock"]["served"][-1]
    ours = ["router_ext", "router_ext", "is_triton"]
    assert bf16 == fp8 == [ours, ours, "Core", ["dispatched", "weights", 8]]
    assert fp4 == ["router_ext", "router_ext", "is_marlin"]
    assert refused[0] == "UnsupportedExperts"


def test_runner_family_keeps_both_hooks_of_the_runner_away(served):
    assert served["stock"]["hooks"] == ["runner:resolve_backend", "runner:swap_builtin"]
    assert served["patched"]["hooks"] == []


def test_fused_func_names_lets_sglang_call_the_experts_itself(served):
    assert served["stock"]["through the core"] == 4
    assert served["patched"]["through the core"] == 0


def test_plugin_errors_stops_a_server_where_a_hook_does_not_fit(served):
    assert served["stock"]["misfit"] == "served stock"
    assert "a.function: takes (), known is (self)" in served["patched"]["misfit"]


def test_a_row_that_this_sglang_makes_superfluous_is_not_needed(monkeypatch):
    monkeypatch.setattr(hooks, "_function", lambda text: lambda: text == "runner:takes_family")
    rows = hooks.needed(where=hooks.SCHEDULER)
    left_out = {hook.function for hook in hooks.HOOKS if hook.where == hooks.SCHEDULER and hook not in rows}
    assert left_out == {"runner:resolve_backend", "runner:swap_builtin"}
    monkeypatch.setattr(hooks, "_function", lambda text: lambda: False)
    assert len(hooks.needed(where=hooks.SCHEDULER)) == len(rows) + 2


def test_doctor_says_how_far_patches_are(small, monkeypatch) -> None:
    monkeypatch.setattr(patches, "find_tree", lambda: small)

    def said() -> tuple[str, str]:
        (finding,) = doctor._patches()
        return finding.state, finding.text.partition(";")[0]

    assert said() == ("ok", "not applied")
    (small.root / "srt/a.py").write_bytes(NEW["srt/a.py"])
    assert said() == ("problem", "partly applied: srt/a.py")
    patches.apply(patches.pick(), small)
    assert said() == ("ok", "applied")
    (small.root / "srt/b.py").write_bytes(b"mine")
    assert said() == ("note", "changed tree: srt/b.py")
    monkeypatch.setattr(patches, "find_tree", functools.partial(patches.Tree, small.root, "0.5.22"))
    assert said() == ("note", "another SGLang version: 0.5.22")


def test_a_folder_of_originals_that_is_none_is_refused_before_anything_is_written(small, tmp_path) -> None:
    kept = small.root.parent / patches.BACKUP
    for make in (lambda: kept.symlink_to(tmp_path), lambda: kept.write_text("x")):
        make()
        with pytest.raises(ContractError, match="which is no folder"):
            patches.apply(patches.pick(), small)
        assert patches.look(patches.pick()[0], small).state == patches.NOT_APPLIED
        kept.unlink()


def test_what_cannot_be_read_or_removed_is_refused_in_words(small, monkeypatch) -> None:
    compiled = small.root / "srt/__pycache__"
    compiled.mkdir(exist_ok=True)
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: pathlib.Path(path) != compiled and allowed(path, mode))
    with pytest.raises(ContractError, match="__pycache__, without the permission to write there"):
        patches.apply(patches.pick(), small)

    def closed(_path: pathlib.Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "read_bytes", closed)
    with pytest.raises(ContractError, match=r"^target: got .*srt/a.py: Permission denied, allowed: a file that can be read"):
        patches._digest(small.root / "srt/a.py")


def test_root_leaves_files_to_whom_they_were(small, monkeypatch) -> None:
    owners: dict[str, tuple[int, int]] = {}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, user, group: owners.update({pathlib.Path(path).name: (user, group)}))
    patches.apply(patches.pick(), small)
    mine = small.root.stat()
    assert owners == dict.fromkeys(("a.py", "b.py", "srt", "sglang", patches.BACKUP), (mine.st_uid, mine.st_gid))


def test_tests_that_run_end_where_a_later_patch_cannot_be_tried(monkeypatch) -> None:
    started = []

    def run(_patch: patches.Patch, _tree: patches.Tree) -> subprocess.Popen[str]:
        if started:
            raise ContractError("no more")
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], text=True))
        return started[0]

    monkeypatch.setattr(patch_trial, "run_test", run)
    with pytest.raises(ContractError, match="no more"):
        patch_trial.check(patches.pick(), patches.find_tree())
    assert started[0].poll() is not None
