"""``demo --prefill`` on a machine without a GPU: traces, judgement, table, record, and two engines that are not SGLang's."""

from __future__ import annotations

import json
import os
import pathlib

import msgspec
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sglang_router_ext.cli import app
from sglang_router_ext.demo import checkpoint, engine, prefill, serve, show, trace
from sglang_router_ext.demo.checkpoint import Size
from sglang_router_ext.demo.compare import Run
from sglang_router_ext.demo.pace import Spread
from sglang_router_ext.demo.trace import Kernel, RouterTime

OURS = "router_ext_pair"
ENGINE = '''
"""First tokens that follow from the prompt and, at near-ties, from where its chunks end."""
import gzip, json, os, pathlib, random

class Engine:
    def __init__(self, *, moe_runner_backend, json_model_override_args, chunked_prefill_size, disable_radix_cache, **options):
        self.ours = moe_runner_backend != "triton"
        assert os.environ["SGLANG_ROUTER_EXT"] == ("1" if self.ours else "0")
        assert disable_radix_cache and json.loads(json_model_override_args)["max_position_embeddings"] > chunked_prefill_size
        self.chunk = chunked_prefill_size

    def generate(self, input_ids, sampling_params, return_logprob=False, top_logprobs_num=0):
        answers, shift = [], 0
        for prompt, params in zip(input_ids, sampling_params, strict=True):
            assert len(prompt) in (16, self.chunk)
            chosen = random.Random(str(prompt))
            token, near = chosen.randrange(1000), 0.02 * chosen.random() * shift
            token += 5000 * (self.ours and "WRONG_ROUTER" in os.environ)
            near += 3.0 * (self.ours and "WRONG_ROUTER" in os.environ)
            shift |= len(prompt) == 16
            tops = [[[-1.0 - near, token, None], [-1.01 + near, token + 1, None]]] * params["max_new_tokens"]
            answer = {"output_ids": [token] * params["max_new_tokens"], "meta_info": {"output_top_logprobs": tops}}
            answers.append(answer)
        return answers

    def start_profile(self, output_dir, **options):
        self.folder = pathlib.Path(output_dir)

    def stop_profile(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        selection = "warp_select_kernel" if self.ours else "_router_triton_kernel"
        layer = ["norm", "shared_up", "act_and_mul_kernel", "shared_down", "nvjet_gate", selection, "fused_moe_kernel"]
        chunks = 2 if "CHUNKED" in os.environ else 1
        names = layer * 2 * chunks
        events = [
            {"cat": "kernel", "name": n, "ts": 10 * i, "dur": 10, "args": {"stream": 7, "correlation": 1 + i}}
            for i, n in enumerate(names)
        ]
        events += [
            {"cat": "kernel", "name": n, "ts": 1000 + i, "dur": 1, "args": {"stream": 7, "correlation": 99}}
            for i, n in enumerate(["norm", "single_kernel", "experts"])
        ]
        number = len([*self.folder.iterdir()])
        body = gzip.compress(json.dumps({"traceEvents": events}).encode())
        (self.folder / f"{number}-TP-0.trace.json.gz").write_bytes(body)

    def shutdown(self):
        pass
'''


@pytest.fixture
def fake_engine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    package = tmp_path / "fake/sglang/srt/entrypoints"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "fake"), str(pathlib.Path(serve.__file__).parents[2])]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 * 2**30, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    real, small = checkpoint.config, {"hidden_size": 64, "n_routed_experts": 16, "q_lora_rank": 16}
    monkeypatch.setattr(checkpoint, "config", lambda size: real(size) | small)
    return tmp_path / "kept"


def served(keep: pathlib.Path, prompts: int = 3) -> prefill.PrefillReport:
    return prefill.run(Size(layers=3, moe_intermediate=16), OURS, prompts, lambda _text: None, keep=keep)


def shown(report: show.Report) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show.show(report, console)
    return console.export_text()


def test_two_engines_that_agree(fake_engine: pathlib.Path) -> None:
    report = served(fake_engine)
    assert report.agrees and report.whole and report.together
    assert 0 < report.stock.shift < 0.03
    assert [judged.found.sequences for judged in report.same] == [3, 3]
    stock, ours = report.served[serve.STOCK], report.served[OURS]
    assert stock.clock_ms.count == ours.clock_ms.count == 3
    assert ours.router == RouterTime(["nvjet_gate", "warp_select_kernel"], 20.0, 4)
    assert stock.gpu is not None and stock.gpu.span_us == Spread(140.0, 140.0, 140.0, 2)
    text = shown(report)
    assert "A prompt of 8,192 tokens: median (p10 to p90) of 3 prompts by the clock, in turn" in text
    assert "_router_triton_kernel" in text and "single_kernel" not in text
    assert "Everything that must hold does" in text and "may not be one chunk" not in text
    record = prefill.record_of(report)
    fields = msgspec.json.decode(record.line)
    assert (fields["kind"], fields["prompt_tokens"], fields["how"]["one_chunk"]) == ("prefill", 8192, True)
    assert fields["served"][OURS]["router"]["median_us"] == 20.0
    other = msgspec.structs.replace(report, together=False, prompts=5, stock=msgspec.structs.replace(report.stock, shift=1.0))
    assert prefill.record_of(other).key == record.key


def test_first_tokens_of_a_wrong_router_are_noticed(fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_ROUTER", "1")
    monkeypatch.setenv("CHUNKED", "1")
    report = served(fake_engine)
    assert not report.agrees and not report.whole
    text = shown(report)
    assert "Something that must hold does not" in text
    assert "prompts may not be one chunk" in text


def outcome(tokens: list[int], second: float = -1.5) -> prefill.Outcome:
    run = Run([[token] for token in tokens], [[{token: -1.0, token + 1: second}] for token in tokens])
    return prefill.Outcome(start_s=1.0, alone=run, queued=run, first_ms=[20.0], traces=[])


def test_a_first_token_that_differs_is_held_against_what_stock_differs_by() -> None:
    stock = outcome([1, 2, 3])
    measure, same = prefill.judge(stock, outcome([1, 2, 3]), OURS)
    assert measure.shift == 0.0
    assert [judged.against for judged in same] == [[], []]
    stock.queued = outcome([1, 2, 3], -1.3).alone
    assert prefill.judge(stock, outcome([1, 2, 3]), OURS)[0].shift == pytest.approx(0.2)
    _measure, (alone, _queued) = prefill.judge(stock, outcome([1, 9, 3]), OURS)
    assert alone.against[0].startswith("sequence 1, step 0: a log-probability differs by")


LAYER = ["RMSNorm", "up", "silu_and_mul", "per_token_quant", "down", "split", "gemm_a", "gemm_b", "gemm_c", "sum"]


def kernels(names: list[str]) -> list[Kernel]:
    return [Kernel(10.0 * i, 10.0 * i + 8, name, 7, i + 1) for i, name in enumerate(names)]


@pytest.mark.parametrize(("before", "gate"), [(LAYER, LAYER[5:]), (["RMSNorm", "nvjet"], ["nvjet"])])
def test_a_gate_is_told_from_a_shared_expert_before_it(before: list[str], gate: list[str]) -> None:
    """A gate of many kernels behind a shared expert whose activations are quantised, and one that follows the norm."""
    found = trace.prefill_router_time([kernels([*before, "warp_select_kernel"])])
    assert found is not None and found.kernels == [*gate, "warp_select_kernel"]


def test_a_prefill_ends_where_a_graph_is_replayed() -> None:
    replay = [Kernel(500.0 + i, 501.0 + i, "norm", 7, 77) for i in range(3)]
    listed = [*kernels(["RMSNorm", "nvjet", "warp_select_kernel"]), *replay, Kernel(600.0, 601.0, "argmax", 7, 78)]
    found = trace.prefill_time([listed, listed])
    assert found is not None and found.kernels == 3 and found.span_us == Spread(28.0, 28.0, 28.0, 2)
    assert trace.prefill_time([listed, replay]) is None
    assert trace.prefill_time([]) is None and trace.prefill_router_time([replay]) is None


@pytest.mark.parametrize("model", checkpoint.MODELS)
def test_engine_arguments_are_sglangs_and_take_a_prompt_in_one_chunk(model: str) -> None:
    from sglang.srt.server_args import ServerArgs

    config = checkpoint.config(Size(model=model))
    plan = prefill.prefill_plan(OURS, pathlib.Path("x"), config, pathlib.Path("y"), 100 * 2**30, in_memory=False)
    assert set(plan.arguments) <= set(ServerArgs.__struct_fields__)
    wanted = {"chunked_prefill_size": 8192, "disable_radix_cache": True, "moe_runner_backend": OURS}
    assert wanted.items() <= plan.arguments.items()
    assert plan.arguments["max_total_tokens"] >= 8192 + 16
    assert json.loads(plan.arguments["json_model_override_args"]) == {"max_position_embeddings": 16384}
    assert (plan.batches, plan.tokens, plan.prompt_tokens) == ([1], 1, 8192)
    prompts = engine.prompts(plan, 2)
    assert [len(prompt) for prompt in prompts] == [8192] * 2 and prompts[0] != prompts[1]
    assert max(prompts[0]) < config["vocab_size"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--prefill",), "error: prefill: got no CUDA GPU"),
        (("--prefill", "--prompts", "1"), "error: prompts: got 1, allowed: 2 to 64"),
        (("--prefill", "--prompts", "65"), "error: prompts: got 65, allowed: 2 to 64"),
        (("--prompts", "4"), "error: prompts: got 4, allowed: none without --prefill"),
        (("--prefill", "--model", "x"), "error: model: got x"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert result.output.startswith(text)
