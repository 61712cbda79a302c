"""``single`` as a server runs it: graphs, streams, changing row counts, a busy neighbour. Needs a CUDA GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sglang_router_ext.agreement import Result, compare
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.clock import capture, poison
from sglang_router_ext.bench.inputs import Inputs, random_inputs
from sglang_router_ext.bench.launch import launch, truth
from sglang_router_ext.contract import ContractError
from sglang_router_ext.designs import TABLE
from sglang_router_ext.fused import words

SINGLE, PROBLEM = TABLE["single"], CASES["glm-5.3-flash"].problem
TIMES = 200


def wrong(result: Result, inputs: Inputs) -> list[str]:
    return compare(result, truth(SINGLE.stages, PROBLEM, inputs), PROBLEM, SINGLE)


def empty(result: Result) -> None:
    poison((*result[:3], tuple(result.plan.tensors.values()) if result.plan is not None else ()))


def captured(rows: int, stream: torch.cuda.Stream, seed: int = 0) -> tuple[torch.cuda.CUDAGraph, Result, Inputs]:
    inputs = random_inputs(PROBLEM, rows, seed=seed, device="cuda")
    graph, result = capture(lambda: launch(SINGLE, PROBLEM, inputs), stream)
    torch.cuda.synchronize()
    return graph, result, inputs


@pytest.mark.parametrize("rows", [(1, 96), (16, 16), (128, 5)])
def test_two_graphs_of_one_stream_replay_at_once(rows: tuple[int, int]) -> None:
    made_on, (one, other) = torch.cuda.Stream(), (torch.cuda.Stream(), torch.cuda.Stream())
    graphs = [captured(count, made_on, seed) for seed, count in enumerate(rows)]
    for _graph, result, _inputs in graphs:
        empty(result)
    torch.cuda.synchronize()
    for _ in range(TIMES):
        for stream, (graph, _result, _inputs) in zip((one, other), graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert [wrong(result, inputs) for _graph, result, inputs in graphs] == [[], []]


def test_every_graph_has_words_of_its_own() -> None:
    stream = torch.cuda.Stream()
    pools = words._pools
    device = torch.device("cuda", torch.cuda.current_device())
    captured(4, stream)
    before = set(pools[device]._owned)
    for _ in range(2):
        captured(4, stream)
    new = set(pools[device]._owned) - before
    assert len(new) == 2 and all(kind == "graph" and number > 0 for kind, number in new)


def test_a_graph_and_eager_launches_at_once() -> None:
    stream, eager = torch.cuda.Stream(), torch.cuda.Stream()
    graph, result, inputs = captured(6, stream)
    others = [random_inputs(PROBLEM, rows, seed=rows, device="cuda") for rows in (1, 7, 40)]
    torch.cuda.synchronize()
    found = []
    for _ in range(TIMES // len(others)):
        with torch.cuda.stream(stream):
            graph.replay()
        with torch.cuda.stream(eager):
            found = [launch(SINGLE, PROBLEM, batch) for batch in others]
    torch.cuda.synchronize()
    assert wrong(result, inputs) == []
    assert [wrong(one, batch) for one, batch in zip(found, others, strict=True)] == [[]] * len(others)


def test_row_counts_that_shrink_and_grow() -> None:
    batches = [random_inputs(PROBLEM, rows, seed=rows, device="cuda") for rows in (128, 1, 17, 16, 96, 8, 9, 128)]
    for _ in range(10):
        results = [launch(SINGLE, PROBLEM, batch) for batch in batches]
        assert [wrong(result, batch) for result, batch in zip(results, batches, strict=True)] == [[]] * len(batches)


def test_no_rows_are_refused_and_leave_the_words_empty() -> None:
    inputs = random_inputs(PROBLEM, 3, device="cuda")
    with pytest.raises(ContractError, match=r"^hidden: got 0 rows"):
        launch(SINGLE, PROBLEM, inputs._replace(hidden=inputs.hidden[:0]))
    assert wrong(launch(SINGLE, PROBLEM, inputs), inputs) == []


@pytest.mark.parametrize("rows", [1, 16, 128])
def test_a_neighbour_that_fills_the_gpu(rows: int) -> None:
    """Blocks of another stream take every multiprocessor again and again; a launch waits for its turn, and ends."""
    stream, neighbour = torch.cuda.Stream(), torch.cuda.Stream()
    graph, result, inputs = captured(rows, stream)
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(TIMES):
        with torch.cuda.stream(neighbour):
            matrix @ matrix
        with torch.cuda.stream(stream):
            graph.replay()
    torch.cuda.synchronize()
    assert wrong(result, inputs) == []


def test_a_first_launch_inside_a_capture_is_refused() -> None:
    """In a process of its own: here there are words already."""
    code = """
import torch
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.inputs import random_inputs
from sglang_router_ext.bench.launch import launch
from sglang_router_ext.contract import ContractError
from sglang_router_ext.designs import TABLE
problem = CASES["glm-5.3-flash"].problem
inputs = random_inputs(problem, 4, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.stream(torch.cuda.Stream()):
    graph.capture_begin()
    try:
        launch(TABLE["single"], problem, inputs)
    except ContractError as error:
        print(error)
    graph.capture_end()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stream: got single in a CUDA graph's capture" in done.stdout


def test_a_launch_that_was_killed_leaves_nothing_behind() -> None:
    """Words belong to a process: one that dies in the middle of a replay takes them with it."""
    code = """
import torch
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.clock import capture
from sglang_router_ext.bench.inputs import random_inputs
from sglang_router_ext.bench.launch import launch
from sglang_router_ext.designs import TABLE
problem = CASES["glm-5.3-flash"].problem
inputs = random_inputs(problem, 96, device="cuda")
stream = torch.cuda.Stream()
graph, _ = capture(lambda: launch(TABLE["single"], problem, inputs), stream)
print("replaying", flush=True)
with torch.cuda.stream(stream):
    while True:
        graph.replay()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "replaying\n"
        process.kill()
    inputs = random_inputs(PROBLEM, 96, device="cuda")
    assert wrong(launch(SINGLE, PROBLEM, inputs), inputs) == []


def test_a_launch_waits_for_nothing_on_the_host() -> None:
    batches = [random_inputs(PROBLEM, rows, device="cuda") for rows in (1, 16, 96)]
    for batch in batches:
        launch(SINGLE, PROBLEM, batch)  # builds, and sets words aside
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [launch(SINGLE, PROBLEM, batch) for batch in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [wrong(result, batch) for result, batch in zip(results, batches, strict=True)] == [[], [], []]
