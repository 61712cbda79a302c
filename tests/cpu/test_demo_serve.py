"""The demo with a GPU, on a machine without one: its judge, its reading of traces, and all of it with a fake engine."""

from __future__ import annotations

import gzip
import json
import os
import pathlib

import msgspec
import pytest
import torch
from rich.console import Console

from sglang_router_ext.demo import checkpoint, compare, engine, serve, show, trace
from sglang_router_ext.demo.checkpoint import Size
from sglang_router_ext.demo.compare import Comparison, Difference, Run, Yardstick
from sglang_router_ext.demo.trace import Kernel, RouterTime

# --- compare


def runs_of(*sequences: list[int], best: float = -0.5, second: float = -1.5) -> Run:
    tops = [[{token: best, token + 1: second} for token in sequence] for sequence in sequences]
    return Run([list(sequence) for sequence in sequences], tops)


def test_equal_runs_have_no_difference() -> None:
    found = compare.compare(runs_of([1, 2, 3], [4, 5, 6]), runs_of([1, 2, 3]))
    assert (found.equal, found.sequences, found.differences, found.largest) == (1, 1, [], 0.0)


def test_what_follows_a_difference_does_not_count() -> None:
    one, other = runs_of([1, 2, 3]), runs_of([1, 3, 9])
    found = compare.compare(one, other)
    (difference,) = found.differences
    assert (difference.step, difference.tokens) == (1, (2, 3))
    assert difference.lead == pytest.approx(1.0)
    # {2: -0.5, 3: -1.5} against {3: -0.5, 4: -1.5}: token 3 moved by 1, token 2 from -0.5 to at most -1.5.
    assert difference.shift == pytest.approx(1.0)
    assert found.largest == pytest.approx(1.0)


def test_a_shift_without_another_token_raises_the_yardstick() -> None:
    found = compare.compare(runs_of([1, 2]), runs_of([1, 2], best=-0.6))
    assert found.equal == 1
    assert found.largest == pytest.approx(0.1)
    assert compare.yardstick([found, Comparison(4, [], 0.02)]) == Yardstick(0.0, pytest.approx(0.1))


def differing(count: int, shift: float) -> Comparison:
    return Comparison(96, [Difference(i, 3, (1, 2), shift, 0.01) for i in range(count)], shift)


STOCK = Yardstick(differing=0.15, shift=0.3)


@pytest.mark.parametrize(("count", "shift"), [(0, 0.0), (14, 0.3), (20, 0.44)])
def test_near_ties_as_often_as_between_stock_runs_pass(count: int, shift: float) -> None:
    assert compare.verdict(differing(count, shift), STOCK) == []


@pytest.mark.parametrize(
    ("count", "shift", "words"), [(96, 0.1, "96 of 96 sequences differ"), (1, 0.5, "a log-probability differs by 0.500")]
)
def test_too_many_or_too_far_does_not_pass(count: int, shift: float, words: str) -> None:
    assert words in compare.verdict(differing(count, shift), STOCK)[0]


def test_equal_stock_runs_still_allow_a_difference_by_chance() -> None:
    exact = Yardstick(differing=0.0, shift=0.0)
    assert 1 <= exact.allowed(96) <= 4
    assert compare.verdict(differing(96, 0.0), exact)


# --- trace

STOCK_LAYER = [
    Kernel(0, 2, "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)", 7),
    Kernel(2, 9, "void (anonymous namespace)::shared_gate_up<(int)3>(float*)", 13),
    Kernel(2.5, 5, "void tiny_n_gemm_kernel<288, 4096, true>(Params)", 7),
    Kernel(5, 7, "_router_triton_kernel", 7),
    Kernel(7, 9, "void sgl::moe_align<(bool)1>(int)", 7),
]
OUR_LAYER = [
    Kernel(0, 2, "FusedAddRMSNormKernel", 7),
    Kernel(1, 4, "void rx::small_rows_kernel<4, 1, 2, false, false>(rx::SmallRowsParams)", 7),
    Kernel(1.5, 4.5, "void rx::warp_select_kernel<3, 8, 1, true, true>(rx::WarpSelectParams)", 7),
]
PREFILL_LAYER = [
    Kernel(0, 2, "norm", 7),
    Kernel(2, 9, "nvjet_tst_128x64", 7),
    Kernel(9, 10, "void cublasLt::splitKreduce_kernel<32>(int)", 7),
    Kernel(10, 14, "_router_triton_kernel", 7),
]


def repeated(layer: list[Kernel], times: int, offset: float = 0.0) -> list[Kernel]:
    return [
        k._replace(start_us=k.start_us + offset + 100 * i, end_us=k.end_us + offset + 100 * i)
        for i in range(times)
        for k in layer
    ]


def test_the_router_of_a_decode_step_is_found_by_place() -> None:
    kernels = sorted(repeated(STOCK_LAYER, 6) + repeated(PREFILL_LAYER, 3, offset=1000))
    assert trace.router_time(kernels) == RouterTime(["tiny_n_gemm_kernel", "_router_triton_kernel"], 4.5, 6)
    split = trace.router_time(repeated(PREFILL_LAYER, 3))
    assert split == RouterTime(["nvjet_tst_128x64", "splitKreduce_kernel", "_router_triton_kernel"], 12.0, 3)


def test_overlapping_kernels_count_once() -> None:
    assert trace.router_time(repeated(OUR_LAYER, 2)) == RouterTime(["small_rows_kernel", "warp_select_kernel"], 3.5, 2)


def test_a_trace_without_a_known_selection_gives_none() -> None:
    assert trace.router_time([Kernel(0, 1, "something_else", 7)]) is None


@pytest.mark.parametrize("compress", [False, True])
def test_traces_are_read(tmp_path: pathlib.Path, compress: bool) -> None:
    file = tmp_path / "x.trace.json.gz"
    write_trace(file, STOCK_LAYER, compress=compress)
    assert trace.kernels(file) == sorted(STOCK_LAYER)


def write_trace(file: pathlib.Path, kernels: list[Kernel], *, compress: bool = True) -> None:
    events = [
        {"cat": "kernel", "name": k.name, "ts": k.start_us, "dur": k.end_us - k.start_us, "args": {"stream": k.stream}}
        for k in kernels
    ]
    body = json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}).encode()
    file.write_bytes(gzip.compress(body) if compress else body)


# --- the half with a GPU, with an engine that is not SGLang's

ENGINE = '''
"""Greedy tokens that follow from prompt, biases and, at near-ties, the batch size, as in a real engine."""
import gzip, json, os, pathlib, random, time

class Engine:
    def __init__(self, *, model_path, moe_runner_backend, **options):
        if os.environ.get("BROKEN_ENGINE"):
            raise RuntimeError("out of memory, say")
        self.ours = moe_runner_backend != "triton"
        assert os.environ["SGLANG_ROUTER_EXT"] == ("1" if self.ours else "0")
        self.biases = "fp32"

    def generate(self, input_ids, sampling_params, return_logprob=False, top_logprobs_num=0):
        answers = []
        for prompt in input_ids:
            count = sampling_params["max_new_tokens"]
            wrong = self.ours and "WRONG_ROUTER" in os.environ
            chosen = random.Random(f"{prompt} {self.biases} {wrong}")
            tokens = [chosen.randrange(100) for _ in range(count)]
            tie = random.Random(f"{prompt} {len(input_ids)} {self.ours}").random() < 0.05
            if tie:
                tokens[count // 2] += 100
            tops = [[[-1.0, t, None], [-1.01, (t + 100) % 200, None]] for t in tokens]
            answers.append({"output_ids": tokens, "meta_info": {"output_top_logprobs": tops} if return_logprob else {}})
        time.sleep(0.0001 * count)
        return answers

    def start_profile(self, output_dir, **options):
        self.folder = pathlib.Path(output_dir)

    def stop_profile(self):
        self.folder.mkdir(parents=True)
        name = "small_rows_kernel" if self.ours else "tiny_n_gemm_kernel"
        rows = [("norm", 0), (name, 3), ("warp_select_kernel" if self.ours else "_router_triton_kernel", 6)]
        events = [{"cat": "kernel", "name": n, "ts": t, "dur": 2, "args": {"stream": 7}} for n, t in rows]
        (self.folder / "1-TP-0.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))

    def update_weights_from_disk(self, folder):
        self.biases = folder
        return True, "done", 0

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


def served(tiny: Size, keep: pathlib.Path, *, dummy: bool = False) -> serve.ServeReport:
    return serve.run(tiny, lambda _text: None, keep=keep, dummy=dummy)


def shown(report: serve.ServeReport) -> str:
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
    assert report.served[serve.OURS].router[6] == RouterTime(["small_rows_kernel", "warp_select_kernel"], 5.0, 1)
    assert all(0.05 < ms < 5 for ms in report.served[serve.STOCK].step_ms.values())
    text = shown(report)
    assert "Everything that must agree does" in text
    assert "noticed" in text
    line = serve.record_of(report)
    assert msgspec.json.decode(line.line)["served"]["stock"]["router"]["96"]["median_us"] == 5.0
    msgspec.json.encode(report)


def test_a_wrong_router_is_noticed(tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_ROUTER", "1")
    report = served(tiny, fake_engine)
    assert not report.agrees
    assert all(judged.against for judged in report.same)
    assert "Something that must agree does not" in shown(report)


def test_a_comparison_that_cannot_fail_does_not_pass(tiny: Size, fake_engine: pathlib.Path) -> None:
    report = served(tiny, fake_engine)
    _noticed, followed = report.changed
    unnoticed = msgspec.structs.replace(report, changed=[followed, followed])
    assert not unnoticed.agrees


def test_dummy_weights_give_times_only(tiny: Size, fake_engine: pathlib.Path) -> None:
    report = served(tiny, fake_engine, dummy=True)
    assert report.agrees
    assert report.stock is None
    assert set(report.served[serve.OURS].step_ms) == set(serve.BATCHES)
    assert "Dummy weights" in shown(report)
    stock = report.served[serve.STOCK]
    assert not msgspec.structs.replace(report, served={serve.STOCK: stock, serve.OURS: stock}).agrees


def test_an_engine_that_fails_shows_its_log(tiny: Size, fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN_ENGINE", "1")
    with pytest.raises(serve.EngineFailed, match=r"(?s)the engine stock ended with status 1.*out of memory, say"):
        served(tiny, fake_engine)


def test_engine_arguments_are_sglangs() -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    plan = serve._plan(serve.OURS, pathlib.Path("x"), checkpoint.config(Size()), pathlib.Path("y"), dummy=False)
    assert set(plan.arguments) <= set(ServerArgs.__struct_fields__)
    for method in ("generate", "start_profile", "stop_profile", "update_weights_from_disk", "shutdown"):
        assert callable(getattr(Engine, method))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=engine.Plan) == plan


def test_prompts_are_the_same_for_every_engine() -> None:
    plan = serve._plan(serve.OURS, pathlib.Path("x"), checkpoint.config(Size()), pathlib.Path("y"), dummy=False)
    assert engine.prompts(plan, 96)[:16] == engine.prompts(plan, 16)
    assert all(2 <= token < 1024 for prompt in engine.prompts(plan, 96) for token in prompt)
