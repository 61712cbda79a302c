"""``demo --deterministic`` on a machine without a GPU: the comparison to the bit, table, record, and engines not SGLang's."""

from __future__ import annotations

import os
import pathlib
import struct

import msgspec
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sglang_router_ext.cli import app
from sglang_router_ext.demo import checkpoint, determinism, engine, serve, show
from sglang_router_ext.demo.checkpoint import Size
from sglang_router_ext.demo.determinism import Alike, DeterminismReport
from sglang_router_ext.demo.engine import Routes
from sglang_router_ext.demo.worker import EngineFailed

OURS = "router_ext_single"
SIZE = Size(layers=3, moe_intermediate=16)
SLOTS = 8
ROWS = determinism.PROMPT_TOKENS + determinism.TOKENS - 1
ENGINE = '''
"""Tokens and experts that follow from the prompt alone if deterministic, and from the batch too if not."""
import base64, os, random, struct

class Engine:
    def __init__(self, *, moe_runner_backend, attention_backend, enable_deterministic_inference, **options):
        self.ours = moe_runner_backend != "triton"
        assert os.environ["SGLANG_ROUTER_EXT"] == ("1" if self.ours else "0")
        assert attention_backend == "triton" and options["disable_radix_cache"] and options["enable_return_routed_experts"]
        self.deterministic = enable_deterministic_inference and not (self.ours and "SWAYED" in os.environ)

    def generate(self, input_ids, sampling_params, return_routed_experts=False):
        answers = []
        for prompt, params in zip(input_ids, sampling_params, strict=True):
            count = params["max_new_tokens"]
            ids = [0] * 8 + [*range(1, 17)]
            if not self.deterministic and len(input_ids) == 96:
                ids[16:18] = ids[17], ids[16]
            rows = len(prompt) + count - 1 - ("SHORT" in os.environ)
            body = base64.b64encode(struct.pack("24i", *ids) * rows).decode()
            tokens = [random.Random(f"{prompt} {i}").randrange(100) for i in range(count)]
            answers.append({"output_ids": tokens, "meta_info": {"routed_experts": body} if return_routed_experts else {}})
        return answers

    def shutdown(self):
        pass
'''


def routes(sequences: int = determinism.SEQUENCES) -> Routes:
    """Of every sequence the same: layer 0 has no experts, in the others they count up."""
    row = struct.pack("24i", *[0] * 8, *range(1, 17))
    return Routes([list(range(determinism.TOKENS))] * sequences, [row * ROWS] * sequences)


def changed(made: Routes, sequence: int, row: int, layer: int, slots: list[int]) -> Routes:
    ids = bytearray(made.experts[sequence])
    for slot in slots:
        ids[4 * ((row * SIZE.layers + layer) * SLOTS + slot)] += 100
    experts = [*made.experts]
    experts[sequence] = bytes(ids)
    return Routes(made.tokens, experts)


def parted(made: Routes, sequence: int, step: int) -> Routes:
    tokens = [list(one) for one in made.tokens]
    tokens[sequence][step] += 1000
    return Routes(tokens, made.experts)


def compared(other: Routes) -> Alike:
    return determinism.alike(96, routes(), other, SIZE, SLOTS)


def test_equal_answers_are_equal() -> None:
    found = compared(routes())
    rows = determinism.SEQUENCES * ROWS * 2
    assert found == Alike(96, determinism.SEQUENCES * determinism.TOKENS, 0, rows * SLOTS, 0, rows, 0, "")
    assert found.equal


def test_a_difference_is_counted_and_named() -> None:
    other = changed(changed(routes(), 5, 7, 1, [2]), 9, 120, 2, [0, 1, 7])
    found = compared(other)
    assert (found.ids_apart, found.rows_apart, found.tokens_apart, found.equal) == (4, 2, 0, False)
    assert found.first == "sequence 5, token 7 (prompt), layer 1: 1 of 8 ids"


def test_ids_that_changed_places_differ() -> None:
    row = struct.pack("24i", *[0] * 8, 2, 1, *range(3, 17))
    made = routes()
    found = compared(Routes(made.tokens, [row * ROWS, *made.experts[1:]]))
    assert (found.ids_apart, found.rows_apart) == (2 * ROWS, ROWS)


def test_layers_without_experts_do_not_count() -> None:
    assert compared(changed(routes(), 0, 0, 0, [0])).equal


def test_what_follows_another_token_is_not_compared() -> None:
    other = parted(changed(changed(routes(), 3, 103, 1, [0]), 3, 104, 1, [0]), 3, 4)
    found = compared(other)  # the token of step 4 comes from row 103, and is read in row 104
    assert (found.tokens_apart, found.ids_apart, found.equal) == (1, 1, False)
    assert found.tokens == determinism.SEQUENCES * determinism.TOKENS - (determinism.TOKENS - 5)
    assert found.rows == 2 * (determinism.SEQUENCES * ROWS - (ROWS - 104))
    assert found.first == "sequence 3, token 103 (answer), layer 1: 1 of 8 ids"
    last = compared(parted(routes(), 0, determinism.TOKENS - 1))
    assert (last.tokens_apart, last.rows) == (1, 2 * determinism.SEQUENCES * ROWS)


def test_ids_that_are_not_there_are_named() -> None:
    assert determinism.lacking(routes(), SIZE, SLOTS) == ""
    assert "95 of 96 sequences" in determinism.lacking(routes(95), SIZE, SLOTS)
    made = routes()
    assert "sequence 0 has 0 bytes" in determinism.lacking(Routes(made.tokens, [b"", *made.experts[1:]]), SIZE, SLOTS)
    unwritten = [made.experts[0], struct.pack("24i", *range(16), *[0] * 8) * ROWS, *made.experts[2:]]
    assert determinism.lacking(Routes(made.tokens, unwritten), SIZE, SLOTS) == "sequence 1, layer 2: no ids"
    short = [made.tokens[0][:-1], *made.tokens[1:]]
    assert "other lengths" in determinism.lacking(Routes(short, made.experts), SIZE, SLOTS)


def report_of(stock: Routes, ours: Routes) -> DeterminismReport:
    found = {
        serve.STOCK: [compared(stock)],
        determinism.STOCK_DETERMINISTIC: [compared(routes())],
        OURS: [compared(ours)],
    }
    ran = ["gate: host x 3 (deterministic inference)"]
    return DeterminismReport("NVIDIA H200", "a router", SIZE, OURS, True, found, ran, 60.0)


def shown(report: DeterminismReport) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show.show(report, console)
    return console.export_text()


def test_a_report_of_answers_that_differ_in_stock_alone() -> None:
    report = report_of(changed(routes(), 1, 2, 1, [3]), routes())
    assert report.agrees and report.noticed
    text = shown(report)
    assert "Everything that must hold does" in text
    assert "stock, 96 at a time, differs first in sequence 1, token 2 (prompt), layer 1: 1 of 8 ids" in text
    assert "gate: host x 3 (deterministic inference)" in text
    assert "says little" not in text
    record = determinism.record_of(report)
    fields = msgspec.json.decode(record.line)
    assert (fields["kind"], fields["attention"], fields["sequences"]) == ("determinism", "triton", 96)
    assert fields["compared"]["stock"][0]["ids_apart"] == 1
    assert fields["ran"] == report.ran
    assert record.key == determinism.record_of(report_of(routes(), routes())).key


def test_a_report_of_a_difference_of_ours_fails() -> None:
    report = report_of(routes(), parted(routes(), 0, 0))
    assert not report.agrees and not report.noticed
    text = shown(report)
    assert "Something that must hold does not" in text
    assert "Stock as it is does not differ either" in text


def test_engine_arguments_are_those_that_sglang_allows() -> None:
    from sglang.srt.server_args import (
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        ServerArgs,
    )

    model = checkpoint.config(Size())
    names = [serve.STOCK, determinism.STOCK_DETERMINISTIC, OURS]
    plans = [
        determinism.routed_plan(name, pathlib.Path("x"), model, pathlib.Path("y"), 2**37, in_memory=False) for name in names
    ]
    stock, deterministic, ours = (plan.arguments for plan in plans)
    assert set(ours) <= set(ServerArgs.__struct_fields__)
    assert [one["enable_deterministic_inference"] for one in (stock, deterministic, ours)] == [False, True, True]
    assert stock | {"enable_deterministic_inference": True} == deterministic
    assert deterministic | {"moe_runner_backend": OURS} == ours
    assert ours["attention_backend"] in DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert ours["attention_backend"] in RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND  # what absorbed MLA takes
    assert ours["enable_return_routed_experts"] and ours["disable_radix_cache"]
    assert not ours["enable_fp32_lm_head"]
    assert plans[0].prompt_tokens * determinism.SEQUENCES > ours["chunked_prefill_size"]
    assert engine.prompts(plans[0], 96)[0] == engine.prompts(plans[2], 1)[0]


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
    real, small = checkpoint.config, {"vocab_size": 32, "hidden_size": 64, "n_routed_experts": 16, "q_lora_rank": 16}
    monkeypatch.setattr(checkpoint, "config", lambda size: real(size) | small)
    return tmp_path / "kept"


@pytest.mark.parametrize("swayed", [False, True])
def test_three_engines(fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch, swayed: bool) -> None:
    if swayed:
        monkeypatch.setenv("SWAYED", "1")
    report = determinism.run(SIZE, OURS, lambda _text: None, keep=fake_engine)
    assert report.noticed and report.together and report.ran == []
    assert report.agrees != swayed
    assert [one.size for one in report.found[OURS]] == [6, 16, 96]
    assert [one.rows_apart for one in report.found[serve.STOCK]] == [0, 0, 96 * ROWS]
    assert all(one.equal for one in report.found[determinism.STOCK_DETERMINISTIC])


def test_an_engine_that_loses_ids_fails(fake_engine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT", "1")
    with pytest.raises(EngineFailed, match="the engine stock did not return the experts of every token: sequence 0 has"):
        determinism.run(SIZE, OURS, lambda _text: None, keep=fake_engine)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--deterministic",), "error: deterministic: got no CUDA GPU"),
        (("--deterministic", "--prefill"), "error: deterministic: got prefill beside it, allowed: one of the two"),
        (("--deterministic", "--prompts", "4"), "error: prompts: got 4, allowed: none without --prefill"),
        (("--deterministic", "--moe-runner-backend", "triton"), "error: moe-runner-backend: got triton"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert result.output.startswith(text)
