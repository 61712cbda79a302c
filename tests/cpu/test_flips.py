"""The count of flips on the CPU: rows that a path sends elsewhere in other batches are counted exactly, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from sglang_router_ext import reference
from sglang_router_ext.agreement import Result
from sglang_router_ext.bench import flips, record
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.flips import Flips, Path
from sglang_router_ext.bench.inputs import Inputs, random_inputs
from sglang_router_ext.bench.peers import Missing
from sglang_router_ext.bench.record import Identity, OtherRecord
from sglang_router_ext.cli import app
from sglang_router_ext.cli import flips as command
from sglang_router_ext.contract import ContractError, Problem, gpu_by_name

PROBLEM = Problem(experts=16, hidden=64, topk=4)
IDENTITY = Identity(schema=1, run="0123456789ab", time="2026-11-30T00:00:00Z", gpu="NVIDIA H200", commit="dirty", versions={})
H200 = gpu_by_name("h200")


def stable(batch: Inputs) -> Result:
    """Row by row, so that no sum depends on who else is there."""
    rows = [flips.rows_of(batch, slice(row, row + 1)) for row in range(len(batch.hidden))]
    truths = [reference.route(PROBLEM, row.hidden, row.weight, row.bias) for row in rows]
    logits = torch.cat([truth.logits.float() for truth in truths])
    ids, weights = zip(*(reference.outputs(PROBLEM, truth) for truth in truths), strict=True)
    return Result(logits, torch.cat(ids), torch.cat(weights))


def changed(**edits: Callable[[torch.Tensor], object]) -> Callable[[Inputs], Result]:
    """As ``stable`` in batches of up to 4 rows; in larger ones, the first row of each batch is edited by field."""

    def route(batch: Inputs) -> Result:
        result = stable(batch)
        if len(batch.hidden) > 4:
            for name, edit in edits.items():
                edit(getattr(result, name)[0])
        return result

    return route


def other_expert(ids: torch.Tensor) -> None:
    ids[-1] = next(expert for expert in range(PROBLEM.experts) if expert not in ids.tolist())


def last_bit(values: torch.Tensor) -> None:
    values[0] = torch.nextafter(values[0], torch.tensor(100.0))


def swap(ids: torch.Tensor) -> None:
    ids[:2] = ids[:2].flip(0)


def counted(*ways: Path, rows: int = 50, batches: tuple[int, ...] = (4, 12)) -> flips.Counted:
    return flips.count(ways, PROBLEM, flips.chunks(PROBLEM, rows, batches, seed=0, device="cpu"), batches)


def test_a_stable_path_has_no_flips() -> None:
    assert counted(Path("stable", stable, True)).flips == [
        Flips(path="stable", row_stable=True, first=4, batch=12, rows=50)  # the last batch of 12 holds 2 rows
    ]


@pytest.mark.parametrize(
    ("edits", "bits", "order", "experts"),
    [
        ({"ids": other_expert}, 4, 0, 4),
        ({"ids": swap}, 4, 4, 0),
        ({"logits": last_bit}, 4, 0, 0),
        ({"weights": last_bit}, 4, 0, 0),
        ({"ids": other_expert, "logits": last_bit}, 4, 0, 4),
    ],
)
def test_rows_are_counted_by_what_differs(edits: dict[str, Any], bits: int, order: int, experts: int) -> None:
    (found,) = counted(Path("changed", changed(**edits), True)).flips
    assert (found.rows, found.bits, found.order, found.experts) == (50, bits, order, experts)
    assert found.broken
    assert (found.examined, found.margin is None) == (experts, experts == 0)


def test_a_path_that_promises_nothing_is_not_broken() -> None:
    (found,) = counted(Path("changed", changed(ids=swap))).flips
    assert found.bits and not found.broken


def test_the_margin_is_that_of_the_rows_that_flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(PROBLEM, 50, seed=0)
    margin = reference.route(PROBLEM, inputs.hidden, inputs.weight, inputs.bias).margin
    (found,) = counted(Path("changed", changed(ids=other_expert))).flips
    assert found.margin == pytest.approx(float(margin[:48:12].max()), rel=1e-9)
    monkeypatch.setattr(flips, "EXAMINED", 3)
    (found,) = counted(Path("changed", changed(ids=other_expert))).flips
    assert (found.experts, found.examined) == (4, 3)
    assert found.margin == pytest.approx(float(margin[:36:12].max()), rel=1e-9)


def test_every_size_is_held_against_the_first_and_chunks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flips, "CHUNK", 24)
    told: list[str] = []
    ways = [Path("stable", stable, True), Path("changed", changed(ids=other_expert))]
    drawn = list(flips.chunks(PROBLEM, 58, (4, 6, 12), seed=3, device="cpu"))
    assert [len(chunk.hidden) for chunk in drawn] == [24, 24, 10]
    assert not torch.equal(drawn[0].hidden, drawn[1].hidden)
    found = flips.count(ways, PROBLEM, drawn, (4, 6, 12), told.append).flips
    assert [(one.path, one.first, one.batch, one.rows, one.experts) for one in found] == [
        ("stable", 4, 6, 58, 0),
        ("stable", 4, 12, 58, 0),
        ("changed", 4, 6, 58, 9),  # the last 4 rows are a batch that the fake leaves alone
        ("changed", 4, 12, 58, 5),
    ]
    assert told == ["stable", "changed"] * 3


def test_a_path_that_raises_has_words_and_the_others_a_count() -> None:
    def absent(batch: Inputs) -> Result:
        raise Missing("no such kernel")

    def broken(batch: Inputs) -> Result:
        raise RuntimeError("no build")

    found, missing = counted(Path("absent", absent), Path("stable", stable, True), Path("broken", broken, True))
    assert missing == {"absent": "no such kernel", "broken": "RuntimeError: no build"}
    assert [one.path for one in found] == ["stable"]


def test_rows_keep_their_tokens() -> None:
    inputs = random_inputs(CASES["deepseek-v4-hash"].problem, 6)
    some = flips.rows_of(inputs, torch.tensor([5, 1]))
    assert inputs.tokens is not None and some.tokens is not None
    assert some.tokens.ids.tolist() == [inputs.tokens.ids[5].item(), inputs.tokens.ids[1].item()]
    assert torch.equal(some.hidden, inputs.hidden[[5, 1]])
    assert some.tokens.table is inputs.tokens.table


def test_all_sizes_divide_a_chunk() -> None:
    assert flips.chunk_rows((6, 96, 1024)) == 30720
    assert flips.sizes(500_000, (6, 96, 1024)) == [2, 6, 32, 96, 288, 1024]
    assert flips.sizes(12, (3, 4)) == [3, 4]
    with pytest.raises(ContractError, match=r"^batches: got 7,97,1024, allowed: sizes whose least common multiple"):
        flips.chunk_rows((7, 97, 1024))


def test_the_paths_are_those_that_run_at_every_row_count() -> None:
    problem = CASES["glm-5.3-flash"].problem
    ways, against = flips.paths(problem, [1, 6, 16], H200)
    assert {way.name for way in ways if way.row_stable} >= {"single", "pair", "small_rows+warp_select"}
    assert [way.name for way in ways if not way.row_stable] == ["sglang-pair", "as chosen"]
    assert against.keys() == {"hash_rows"}
    ways, against = flips.paths(problem, [6, 96, 1024], H200)
    assert "1024 rows: takes 1-128" in against["single"]
    chosen = next(way for way in ways if way.name == "as chosen")
    assert chosen.what.startswith("router_ext_single: single at 6, 96 rows; ")
    assert "may flip" in chosen.what
    assert "pair" in {way.name for way in flips.paths(problem, [2, 16], H200)[0]}


def test_what_a_deterministic_server_runs_is_a_path_that_promises_no_flip(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, counts = CASES["glm-5.3-flash"].problem, [6, 96, 4096]
    way = next(way for way in flips.paths(problem, counts, H200)[0] if way.name == "deterministic")
    assert way.row_stable
    assert way.what.endswith("inference: tensor_pair at 6, 96 rows; tensor_core + select_plan at 4096 rows")
    assert way.designs == "tensor_pair+select_plan+tensor_core"
    routed: list[Any] = []
    monkeypatch.setattr(flips, "route", lambda gate, selection, *given: routed.append((gate, selection)))
    for count in counts:
        way.route(random_inputs(msgspec.structs.replace(problem, hidden=8), count))
    assert routed == [*[("tensor_pair", "tensor_pair")] * 2, ("tensor_core", "select_plan")]


@pytest.mark.parametrize("case", ["glm-4.6", "deepseek-v4-hash"])
def test_sglangs_deterministic_kernels_are_not_counted(case: str) -> None:
    ways, against = flips.paths(CASES[case].problem, [6, 96], H200)
    assert "deterministic" not in {way.name for way in ways}
    (text,) = command._left_out({"deterministic": against["deterministic"]})
    assert text.startswith("deterministic: not counted: router_ext_single with --enable-deterministic-inference: ")
    assert "host" in text and "SGLang's deterministic kernel" in text


def test_a_deterministic_path_that_flips_is_broken_and_its_record_is_of_its_designs() -> None:
    (found,) = counted(Path("deterministic", changed(ids=other_expert), True, "", "tensor_pair+select_plan")).flips
    assert found.broken
    one = record.flips_record(IDENTITY, "glm-5.3-flash", 50, 0, [4, 12], [found])
    assert msgspec.json.decode(record.encode(one))["sources"] == [record.current_hash("tensor_pair+select_plan")]


def test_the_designs_of_a_chain_get_the_logits_of_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(PROBLEM, 3)
    made = torch.full((3, 16), 2.0)

    def launch(design: Any, problem: Problem, batch: Inputs) -> Result:
        if design.stages == ("gate",):
            return Result(made)
        assert batch.logits is made
        return Result(None, torch.zeros(3, 4, dtype=torch.int32), torch.ones(3, 4))

    monkeypatch.setattr(flips, "launch", launch)
    assert flips.route("small_rows", "warp_select", PROBLEM, inputs).logits is made


def test_a_record_keeps_the_counts_and_a_newer_one_takes_its_place() -> None:
    found = counted(Path("small_rows+warp_select", stable, True), Path("sglang-pair", changed(ids=other_expert))).flips
    one = record.flips_record(IDENTITY, "glm-5.3-flash", 50, 0, [4, 12], found)
    assert record.decode(record.encode(one)) == one
    assert isinstance(one, OtherRecord)
    line = msgspec.json.decode(one.line)
    assert (line["kind"], line["batches"], line["sources"]) == ("flips", "4,12", [record.current_hash(found[0].path)])
    assert [msgspec.convert(entry, Flips) for entry in line["flips"]] == found
    assert record.flips_record(IDENTITY, "glm-5.3-flash", 50, 0, [4, 12], found[:1]).key == one.key
    assert record.flips_record(IDENTITY, "glm-5.3-flash", 50, 0, [4, 24], found).key != one.key


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--case", "x"), "error: case: got x, allowed: glm-5.3-flash | "),
        (("--batches", "6,,96"), "error: batches: got '6,,96', allowed: row counts from 1"),
        (("--batches", "6"), "error: batches: got 6, allowed: 2 to 16 different sizes"),
        (("--batches", "1-17"), "error: batches: got 1-17, allowed: 2 to 16 different sizes"),
        (("--batches", "6,6"), "error: batches: got 6,6, allowed: 2 to 16 different sizes"),
        (("--batches", "1000,1001"), "error: batches: got 1000,1001, allowed: sizes whose least common multiple"),
        (("--rows", "1023"), "error: rows: got 1023, allowed: 1024, the largest batch, to "),
        (("--seed", "-1"), "error: seed: got -1, allowed: 0 to 2^31 - 1"),
        ((), "error: flips: got no CUDA GPU here, allowed: a machine with one"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(app, ["flips", *arguments])
    assert result.exit_code == 2
    assert result.output.startswith(text)
    assert len(result.output.strip().splitlines()) == 1


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command as if there were a GPU, with given paths."""
    drawn = flips.chunks

    def call(*ways: Path, arguments: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr(command, "this_gpu", lambda name: H200)
        monkeypatch.setattr(command, "CASES", {"glm-5.3-flash": msgspec.structs.replace(CASES["kimi-k2"], problem=PROBLEM)})
        monkeypatch.setattr(flips, "chunks", lambda *given, seed, device: drawn(*given, seed=seed, device="cpu"))
        monkeypatch.setattr(flips, "paths", lambda *given: (list(ways), {"pair": ["96 rows: takes 1-16"]}))
        return CliRunner().invoke(app, ["flips", "--rows", "50", "--batches", "4,12", *arguments])

    return call


def test_the_command_shows_counts_and_what_was_left_out(on_a_gpu: Callable[..., Any]) -> None:
    result = on_a_gpu(Path("single", stable, True), Path("sglang-pair", changed(ids=other_expert)))
    assert result.exit_code == 0, result.output
    assert "4 (8 %)" in result.stdout
    assert "pair: row-stable, but not run at all of these row counts: 96 rows: takes 1-16" in result.stdout
    shown = msgspec.json.decode(on_a_gpu(Path("sglang-pair", changed(ids=other_expert)), arguments=("--json",)).stdout.encode())
    assert shown["flips"][0]["experts"] == 4


def test_a_broken_promise_is_status_1(on_a_gpu: Callable[..., Any]) -> None:
    result = on_a_gpu(Path("single", changed(weights=last_bit), True))
    assert result.exit_code == 1
    assert "FAILED   single: 4 rows differ in batches of 12" in result.stdout


def test_nothing_counted_is_status_1(on_a_gpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(batch: Inputs) -> Result:
        raise Missing("no such kernel")

    written: list[Any] = []
    monkeypatch.setattr(record, "write", written.append)
    monkeypatch.setattr(record, "check_writable", lambda name: None)
    result = on_a_gpu(Path("sglang-pair", raises), arguments=("--record",))
    assert result.exit_code == 1
    assert "nothing was counted" in result.output and "sglang-pair: no count: no such kernel" in result.output
    assert written == []
    assert on_a_gpu(Path("single", stable, True), arguments=("--record",)).exit_code == 0
    assert len(written) == 1
