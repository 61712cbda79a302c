"""The soak's loop on the CPU, with a launch that can go wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from sglang_router_ext import reference
from sglang_router_ext.agreement import Result
from sglang_router_ext.bench import record, soak
from sglang_router_ext.bench.record import Identity, OtherRecord
from sglang_router_ext.contract import Problem
from sglang_router_ext.designs import TABLE

PROBLEM = Problem(experts=16, hidden=64, topk=4)
PAIR = TABLE["pair"]
IDENTITY = Identity(schema=1, run="0123456789ab", time="2026-11-30T00:00:00Z", gpu="NVIDIA H200", commit="dirty", versions={})


class Launches:
    """The oracle as a launch. Number ``stale_at`` gives the result of the one before it."""

    def __init__(self) -> None:
        self.made: list[Result] = []
        self.stale_at = -1

    def __call__(self, design: Any, problem: Problem, inputs: Any) -> Result:
        truth = reference.route(problem, inputs.hidden, inputs.weight, inputs.bias)
        right = Result(truth.logits.float(), *reference.outputs(problem, truth))
        self.made.append(self.made[-1] if len(self.made) == self.stale_at else right)
        return self.made[-1]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    fake = Launches()
    monkeypatch.setattr(soak, "launch", fake)
    return fake


def test_every_judgement_is_of_the_batch_that_ran(launches: Launches) -> None:
    told: list[tuple[int, int]] = []
    found = soak.soak(PAIR, PROBLEM, 3, "cpu", replays=50, between=9, say=lambda done, failed: told.append((done, failed)))
    assert (found.rows, found.replays, found.judged, found.failures) == (3, 50, 6, [])
    assert told[-1] == (50, 0)
    first, second = launches.made[:2]
    assert first.logits is not None and second.logits is not None
    assert len(launches.made) == 50 and not torch.equal(first.logits, second.logits)


def test_a_result_of_the_replay_before_is_a_failure(launches: Launches) -> None:
    launches.stale_at = 8
    found = soak.soak(PAIR, PROBLEM, 3, "cpu", replays=18, between=9)
    assert found.judged == 2
    assert found.failures[0].startswith("rows 3, replay 9: logits")
    assert not any("replay 18" in text for text in found.failures)


def test_a_newer_soak_takes_the_place_of_an_older_one() -> None:
    one = record.soak_record(IDENTITY, "single", "glm-5.3-flash", [soak.Soaked(1, 500, 5, 0.5, [])], "x")
    other = record.soak_record(IDENTITY, "single", "glm-5.3-flash", [soak.Soaked(6, 900, 9, 0.7, ["wrong"])], "y")
    assert isinstance(one, OtherRecord)
    assert one.key == other.key
    assert msgspec.json.decode(other.line)["failures"] == [1]
