"""The demo with a GPU, on a machine without one: all of it, with an engine that is not SGLang's."""

from __future__ import annotations

import os
import pathlib

import msgspec
import pytest
import torch
from rich.console import Console

from sglang_router_ext.contract import ContractError
from sglang_router_ext.demo import checkpoint, engine, launches, serve, show
from sglang_router_ext.demo.checkpoint import Size
from sglang_router_ext.demo.pace import Spread
from sglang_router_ext.demo.trace import RouterTime
from sglang_router_ext.demo.worker import EngineFailed

OURS = "router_ext_pair"
ENGINE = '''
"""Greedy tokens that follow from prompt, biases and, at near-ties, the batch size, as in a real engine."""
import gzip, json, os, pathlib, random, time

class Engine:
    def __init__(self, *, model_path, moe_runner_backend, load_format, custom_weight_loader, **options):
        if os.environ.get("BROKEN_ENGINE"):
            raise RuntimeError("out of memory, say")
        self.ours = moe_runner_backend != "triton"
        assert os.environ["SGLANG_ROUTER_EXT"] == ("1" if self.ours else "0")
        self.open = False
        self.biases, self.drawn = "fp32", load_format == "auto"
        assert custom_weight_loader == [f"sglang_router_ext.demo.weights.{name}" for name in ("draw", "narrow_routers")]

    def generate(self, input_ids, sampling_params, return_logprob=False, top_logprobs_num=0):
        answers = []
        assert not self.open, "requests while weights are updated"
        assert self.drawn or not return_logprob, "tokens of dummy weights"
        for prompt, params in zip(input_ids, sampling_params, strict=True):
            count = params["max_new_tokens"]
            held = params.get("logit_bias")
            assert held is None or held == {str(prompt[-1]): 10000.0}
            if held is None and not return_logprob and count != 8:
                raise RuntimeError("timed while the tokens are free")  # of what is not compared, only the warm-up is
            wrong = self.ours and "WRONG_ROUTER" in os.environ
            chosen = random.Random(f"{prompt} {self.biases} {wrong}")
            tokens = [chosen.randrange(100) for _ in range(count)]
            tie = random.Random(f"{prompt} {len(input_ids)} {self.ours}").random() < 0.05
            if tie:
                tokens[count // 2] += 100
            tops = [[[-1.0, t, None], [-1.01, (t + 100) % 200, None]] for t in tokens]
            answers.append({"output_ids": tokens, "meta_info": {"output_top_logprobs": tops} if return_logprob else {}})
        slower = float(os.environ.get("SLOWER_CLOCK", "1")) if self.ours else 1
        time.sleep(0.0001 * count * slower)
        if count > 1 and "ORDER" in os.environ:
            with open(os.environ["ORDER"], "a") as order:
                order.write(f"{'B' if self.ours else 'A'}{len(input_ids)}:{count} ")
        return answers

    def start_profile(self, output_dir, **options):
        self.folder = pathlib.Path(output_dir)

    def stop_profile(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        slower = float(os.environ.get("SLOWER_GPU", "1")) if self.ours else 1
        name = "small_rows_kernel" if self.ours else "tiny_n_gemm_kernel"
        rows = [("norm", 0), (name, 3), ("warp_select_kernel" if self.ours else "_router_triton_kernel", 6), ("experts", 98)]
        events = [
            {"cat": "kernel", "name": n, "ts": 1000 * i + t * slower, "dur": 2, "args": {"stream": 7, "correlation": 7 + i}}
            for i in range(int(os.environ.get("STEPS", "15")))
            for n, t in rows
        ]
        number = len([*self.folder.iterdir()])
        body = gzip.compress(json.dumps({"traceEvents": events}).encode())
        (self.folder / f"{number}-TP-0.trace.json.gz").write_bytes(body)

    def begin_weight_update(self):
        self.open = True
        return "FROZEN_ENGINE" not in os.environ, "weights are frozen"

    def end_weight_update(self):
        assert self.open
        self.open = False
        return True, "done"

    def update_weights_from_tensor(self, named_tensors, load_format):
        assert self.open and named_tensors == []
        self.drawn |= load_format.endswith("draw")
        self.biases = load_format
        return True, "done"

    def shutdown(self):
        pass
'''


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Size:
    """A checkpoint of few and small tensors."""
    real, small = checkpoint.config, {"vocab_size": 32, "hidden_size": 64, "n_routed_experts": 16, "q_lora_rank": 16}
    monkeypatch.setattr(checkpoint, "config", lambda size: real(size) | small)
    return Size(layers=3, moe_intermediate=16)


@pytest.fixture
def fake_engine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tiny: Size) -> pathlib.Path:
    package = tmp_path / "fake/sglang/srt/entrypoints"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):  # without these SGLang's own package would win
        (folder / "__init__.py").touch()
    (package / "engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "fake"), str(pathlib.Path(serve.__file__).parents[2])]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 * 2**30, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return tmp_path / "kept"


def served(tiny: Size, keep: pathlib.Path, *, in_memory: bool = False) -> serve.ServeReport:
    return serve.run(tiny, OURS, lambda _text: None, keep=keep, in_memory=in_memory)


def shown(report: serve.ServeReport | launches.LaunchReport) -> str:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show.show(report, console)
    return console.export_text()


def test_two_engines_that_agree(tiny: Size, fake_engine: pathlib.Path) -> None:
    report = served(tiny, fake_engine)
    assert report.agrees
    assert [judged.against for judged in report.same] == [[]] * 4
    assert [judged.found.sequences for judged in report.same] == [16, 96, 96, 96]
    noticed, followed = report.changed
    assert noticed.found.equal == 0
    assert followed.found.equal > 80
    assert report.together
    ours = report.served[OURS]
    assert ours.router[6] == RouterTime(["small_rows_kernel", "warp_select_kernel"], 5.0, 30)
    step = ours.gpu[6]
    assert step is not None
    assert (step.span_us, step.busy_us, step.sum_us, step.kernels) == (Spread(100.0, 100.0, 100.0, 30), 8.0, 8.0, 4)
    assert step.profiles_us == [100.0, 100.0]
    assert step.kernel_us == {"norm": 2.0, "small_rows_kernel": 2.0, "warp_select_kernel": 2.0, "experts": 2.0}
    assert all(0.05 < clock.median < 5 and clock.count == 8 for clock in ours.clock_ms.values())
    assert not any("gpu" in measures for measures in report.slower.values())
    text = shown(report)
    assert "Everything that must hold does" in text
    assert "noticed" in text
    assert "What differs in a step" in text
    assert "small_rows_kernel │" in text
    assert "of 8 rounds each, in turn" in text
    assert "+0.0%, within 1%" in text
    fields = msgspec.json.decode(serve.record_of(report).line)
    assert fields["served"]["stock"]["router"]["96"]["median_us"] == 5.0
    assert fields["slower"].keys() == {"1", "6", "16", "96"}
    assert [one["sequences"] for one in fields["tokens"]] == [16, 96, 96, 96, 96, 96]
    assert [bool(one["against"]) for one in fields["tokens"]] == [False, False, False, False, True, False]
    assert (fields["moe_layers"], fields["moe_intermediate"]) == (2, 16)
    assert msgspec.json.decode(msgspec.json.encode(report))["slower"] == fields["slower"]


def test_a_record_takes_the_place_of_one_with_other_findings(tiny: Size, fake_engine: pathlib.Path) -> None:
    report = served(tiny, fake_engine)
    other = msgspec.structs.replace(report, together=False, slower={1: ["clock"]})
    assert serve.record_of(report).key == serve.record_of(other).key


def order_of(tiny: Size, keep: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> tuple[serve.ServeReport, list[str]]:
    order = keep.parent / "order"
    monkeypatch.setenv("ORDER", str(order))
    report = served(tiny, keep)
    timed = [entry for entry in order.read_text().split() if entry.endswith(f":{engine.LONG}")]
    return report, [entry.partition(":")[0] for entry in timed]


def test_rounds_alternate(tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _report, timed = order_of(tiny, fake_engine, monkeypatch)
    wanted = [f"{who}{size}" for size in serve.BATCHES for who in "ABBA" * (serve.ROUNDS // 2)]
    assert timed == wanted


def test_engines_that_do_not_fit_together_run_one_after_the_other(
    tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (12 * 2**30, 140 * 2**30))
    report, timed = order_of(tiny, fake_engine, monkeypatch)
    assert timed == [f"{who}{size}" for who in "AB" for size in serve.BATCHES for _ in range(serve.ROUNDS)]
    assert report.agrees
    text = shown(report)
    assert "of 8 rounds each, one engine after the other" in text
    assert "does not hold both engines" in text


@pytest.mark.parametrize(("factor", "agrees", "change"), [("1.02", True, "+2.0%, slower"), ("1.05", False, "+4.9%, slower")])
def test_a_slower_step_on_the_gpu_is_said_and_may_fail(
    tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch, factor: str, agrees: bool, change: str
) -> None:
    monkeypatch.setenv("SLOWER_GPU", factor)
    report = served(tiny, fake_engine)
    assert report.agrees == agrees
    assert report.right  # so a slower run is recorded too
    assert report.too_slow == ([] if agrees else serve.BATCHES)
    assert all("gpu" in measures for measures in report.slower.values())
    text = shown(report)
    assert change in text
    assert ("slower than stock by more than 3% with 1, 6, 16, 96 requests" in text) != agrees


def test_a_slower_step_by_the_clock_is_said(tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOWER_CLOCK", "5")
    report = served(tiny, fake_engine)
    assert report.slower[1] == ["clock"]
    assert report.agrees
    assert "%, slower" in shown(report)


def test_profiles_without_the_steps_do_not_pass(tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "7")
    report = served(tiny, fake_engine)
    assert report.replaced and not report.timed and not report.agrees
    assert "do not show the decode steps" in shown(report)


def test_a_folder_can_be_used_again(tiny: Size, fake_engine: pathlib.Path) -> None:
    served(tiny, fake_engine)
    assert served(tiny, fake_engine).agrees
    assert len([*fake_engine.glob("stock/trace-1/*")]) == 2 * serve.PROFILES
    assert msgspec.json.decode((fake_engine / "stock/outcome.json").read_bytes(), type=serve.Outcome).traces.keys() == {
        1,
        6,
        16,
        96,
    }


def test_a_wrong_router_is_noticed(tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_ROUTER", "1")
    report = served(tiny, fake_engine)
    assert not report.agrees
    assert all(judged.against for judged in report.same)
    assert "Something that must hold does not" in shown(report)


def test_a_comparison_that_cannot_fail_does_not_pass(tiny: Size, fake_engine: pathlib.Path) -> None:
    report = served(tiny, fake_engine)
    _noticed, followed = report.changed
    unnoticed = msgspec.structs.replace(report, changed=[followed, followed])
    assert not unnoticed.agrees


def test_weights_can_be_drawn_in_memory(tiny: Size, fake_engine: pathlib.Path) -> None:
    assert served(tiny, fake_engine, in_memory=True).agrees
    assert not [*fake_engine.rglob("*.safetensors")]


def test_an_engine_that_keeps_its_weights_fails(tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROZEN_ENGINE", "1")
    with pytest.raises(EngineFailed, match="weights are frozen"):
        served(tiny, fake_engine, in_memory=True)


def test_a_profile_without_our_kernels_does_not_pass(tiny: Size, fake_engine: pathlib.Path) -> None:
    report = served(tiny, fake_engine)
    stock = report.served[serve.STOCK]
    assert not msgspec.structs.replace(report, served={serve.STOCK: stock, OURS: stock}).agrees


def test_a_folder_with_other_things_is_left_alone(tiny: Size, fake_engine: pathlib.Path) -> None:
    theirs = fake_engine / "model/config.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("precious")
    with pytest.raises(ContractError, match=r"^keep: got .*, which holds something else, allowed: a new or an empty folder"):
        served(tiny, fake_engine, in_memory=True)
    assert theirs.read_text() == "precious"


@pytest.mark.parametrize("where", ["file", "file/sub", "/proc/nosuch"])
def test_a_folder_that_cannot_be_made_is_named(
    tiny: Size, fake_engine: pathlib.Path, tmp_path: pathlib.Path, where: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ContractError, match=r"^keep: got .*, allowed: a folder that can be made and written"):
        served(tiny, tmp_path / where)


@pytest.mark.parametrize("free", [0, 8 * 2**30])
def test_too_little_memory_is_named_before_an_engine_starts(
    tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 140 * 2**30))
    with pytest.raises(ContractError, match=r"^free GPU memory: got .* GB, allowed: at least"):
        served(tiny, fake_engine)
    assert not fake_engine.exists()


def test_an_engine_that_fails_shows_its_log(tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN_ENGINE", "1")
    with pytest.raises(EngineFailed, match=r"(?s)the engine stock ended with status 1.*out of memory, say"):
        served(tiny, fake_engine)


def test_an_engine_that_fails_at_work_shows_its_log(
    tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS", "none")
    with pytest.raises(EngineFailed, match=r"(?s)the engine stock ended with status 1.*invalid literal for int"):
        served(tiny, fake_engine)


GIB = 2**30


@pytest.mark.parametrize(
    ("engines", "layers", "intermediate", "free", "fits"),
    [
        (2, 4, 64, 138 * GIB, True),
        (2, 43, 128, 138 * GIB, True),
        (2, 43, 128, 79 * GIB, False),
        (2, 43, 256, 138 * GIB, False),
        (3, 43, 64, 138 * GIB, True),
        (3, 43, 128, 138 * GIB, False),
    ],
)
def test_engines_start_where_sglang_lets_all_have_their_cache(
    engines: int, layers: int, intermediate: int, free: int, fits: bool
) -> None:
    model = checkpoint.config(Size(layers, intermediate))
    assert serve.fits(engines, model, free) == fits
    if fits:
        # SGLang's rule, for an engine that saw all memory free at its start and finds the others complete after loading.
        weights, cache = checkpoint.bytes_of(model), serve.cache_bytes(model)
        available = free - engines * weights - (engines - 1) * cache - serve.RESERVE
        assert available - free * (1 - serve.memory_fraction(free)) >= 0.999 * cache


def test_a_cache_of_grouped_queries_is_counted_as_such() -> None:
    model = checkpoint.config(Size(2, model="qwen3"))
    assert serve.cache_bytes(model) == 2 * serve.CACHE_TOKENS * 2 * 2 * 4 * 128


def test_a_small_gpu_keeps_half_for_weights_and_cache() -> None:
    assert serve.memory_fraction(8 * GIB) == 0.5


def test_engine_arguments_are_sglangs() -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    plan = serve.engine_plan(OURS, pathlib.Path("x"), checkpoint.config(Size()), pathlib.Path("y"), 100 * GIB, in_memory=False)
    assert set(plan.arguments) <= set(ServerArgs.__struct_fields__)
    for method in (
        *("generate", "start_profile", "stop_profile", "shutdown"),
        *("begin_weight_update", "update_weights_from_tensor", "end_weight_update"),
    ):
        assert callable(getattr(Engine, method))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=engine.Plan) == plan


def test_prompts_are_the_same_for_every_engine() -> None:
    plan = serve.engine_plan(OURS, pathlib.Path("x"), checkpoint.config(Size()), pathlib.Path("y"), 100 * GIB, in_memory=False)
    assert engine.prompts(plan, 96)[:16] == engine.prompts(plan, 16)
    assert all(2 <= token < 1024 for prompt in engine.prompts(plan, 96) for token in prompt)


def launched(
    tiny: Size, keep: pathlib.Path, backends: list[str], count: int, said: list[str] | None = None
) -> launches.LaunchReport:
    return launches.run(tiny, backends, count, [].append if said is None else said.append, keep=keep)


@pytest.mark.parametrize("together", [True, False])
def test_launches_in_mixed_order(
    tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    if not together:
        monkeypatch.setattr(launches, "fits", lambda *_: False)
    said: list[str] = []
    report = launched(tiny, fake_engine, [OURS, "router_ext"], 2, said)
    order = [launch.variant for launch in report.launches]
    assert order == ["stock", OURS, "router_ext", OURS, "router_ext", "stock"]
    starts = [text.split(":")[0] for text in said if text.endswith(": starting")]
    assert starts == order
    assert (f"launch 4 ({OURS}) and 5 (router_ext) and 6 (stock) of 6" in said) == together
    assert ("launch 4 (router_ext_pair) of 6" in said) != together
    assert report.agrees
    assert len(report.same) == 2 * len(serve.BATCHES)
    assert report.over_launches(OURS, 6).count == 2
    ours, stock = report.router[OURS][6], report.router["stock"][6]
    assert ours is not None and stock is not None
    assert (ours.kernels, stock.kernels) == (
        ["small_rows_kernel", "warp_select_kernel"],
        ["tiny_n_gemm_kernel", "_router_triton_kernel"],
    )
    text = shown(report)
    assert "of 2 launches each" in text and "equal" in text and "small_rows_kernel" in text
    record = launches.record_of(report)
    assert b'"backends":"router_ext_pair router_ext"' in record.line and b'"kind":"launches"' in record.line


def test_a_comparison_cut_short_goes_on(tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = launched(tiny, fake_engine, [OURS], 2)
    said: list[str] = []
    assert launched(tiny, fake_engine, [OURS], 2, said).launches == whole.launches
    assert not [text for text in said if text.endswith("starting")]
    (fake_engine / "2-router_ext_pair" / launches.KEPT).write_text("{")  # as a full disk leaves it
    (fake_engine / "4-stock" / launches.KEPT).unlink()
    said.clear()
    again = launched(tiny, fake_engine, [OURS], 2, said)
    starts = [text.split(":")[0] for text in said if text.endswith("starting")]
    assert starts == [OURS, "stock"]
    assert [launch.variant for launch in again.launches] == [launch.variant for launch in whole.launches]
    assert again.agrees and again.router[OURS][6] is not None
    first = fake_engine / "1-stock" / launches.KEPT
    first.write_bytes(msgspec.json.encode(msgspec.json.decode(first.read_bytes()) | {"runs": None}))
    said.clear()
    assert launched(tiny, fake_engine, [OURS], 2, said).agrees
    assert [text for text in said if text.endswith("starting")] == ["stock: starting"]
    monkeypatch.setattr(launches, "source_hash", lambda _sources: "others")
    said.clear()
    launched(tiny, fake_engine, [OURS], 2, said)
    assert len([text for text in said if text.endswith("starting")]) == 4


def test_a_slower_or_wrong_engine_shows_over_launches(
    tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOWER_CLOCK", "3")
    monkeypatch.setenv("WRONG_ROUTER", "1")
    report = launched(tiny, fake_engine, [OURS], 1)
    assert not report.agrees and all(one.against for one in report.same)
    assert report.over_launches(OURS, 16).median > 1.5 * report.over_launches("stock", 16).median
    text = shown(report)
    assert "slower" in text and "Something that must hold does not." in text


@pytest.mark.parametrize(("variants", "count"), [(["a"], 3), (["a", "b"], 2), (["a", "b", "c"], 3)])
def test_every_variant_stands_at_every_place(variants: list[str], count: int) -> None:
    order = launches.mixed(variants, count)
    rounds = [order[i : i + len(variants)] for i in range(0, len(order), len(variants))]
    assert all(sorted(one) == sorted(variants) for one in rounds)
    for place in range(len(variants)):
        assert {one[place] for one in rounds} == {*variants} or count < len(variants)
