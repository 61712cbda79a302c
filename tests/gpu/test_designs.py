"""Every design of the table on every check, through the functions that ``sglang-router-ext check`` runs. Needs a CUDA GPU.

A test is one design on one model's shape (or on all odd sizes), so that a failure names both; ``check`` shows more at once.
"""

from __future__ import annotations

import pytest
import torch

from sglang_router_ext.bench import check as checks
from sglang_router_ext.bench import clock, machine
from sglang_router_ext.bench.cases import CASES
from sglang_router_ext.bench.checks import Check, inputs_of, model_checks, odd_checks
from sglang_router_ext.bench.launch import launch
from sglang_router_ext.designs import DESIGNS, TABLE, Design

OURS = [design for design in DESIGNS if design.target]
GROUPS: dict[str, list[Check]] = {}
for _entry in (*model_checks(), *odd_checks()):
    GROUPS.setdefault(_entry.case, []).append(_entry)


@pytest.fixture(scope="session", autouse=True)
def builds() -> None:
    """Kernels of all shapes, built several at a time."""
    every = [entry for group in GROUPS.values() for entry in group]
    checks.build_ahead(OURS, every, machine.gpu(), "cuda", lambda text: print(text, flush=True))


@pytest.mark.parametrize("design", OURS, ids=lambda design: design.name)
@pytest.mark.parametrize("group", GROUPS)
def test_design(design: Design, group: str) -> None:
    outcomes = list(checks.run([design], checks.concerning(design, GROUPS[group]), machine.gpu(), "cuda"))
    failures = [f"{outcome.check}: {text}" for outcome in outcomes for text in outcome.failures]
    assert not failures, "\n".join(failures)
    if all(outcome.refused for outcome in outcomes):
        pytest.skip("; ".join(sorted({text for outcome in outcomes for text in outcome.refused})))


@pytest.mark.parametrize("design", OURS, ids=lambda design: design.name)
def test_bad_arguments_are_refused_by_name(design: Design) -> None:
    outcomes = list(checks.run_bad_inputs([design], "bad inputs", CASES["glm-5.3-flash"].problem, machine.gpu(), "cuda"))
    failures = [f"{outcome.check}: {text}" for outcome in outcomes for text in outcome.failures]
    assert not failures, "\n".join(failures)


def test_uninitialised_memory_is_junk_during_a_check() -> None:
    with checks.junk_memory():
        assert torch.empty(1000, device="cuda").isnan().all()
        assert (torch.empty(1000, dtype=torch.int32, device="cuda") > 2**30).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_clock_gives_times_to_right_results_only() -> None:
    check = Check(case="glm-5.3-flash", problem=CASES["glm-5.3-flash"].problem, rows=4)
    inputs = inputs_of(check, device="cuda")
    design = TABLE["cublas_gemm"]

    def wrong() -> None:
        raise RuntimeError("as asked")

    right = clock.Variant("right", lambda: launch(design, check.problem, inputs), lambda result: [])
    judged = clock.Variant("judged", lambda: launch(design, check.problem, inputs), lambda result: ["wrong, it says"])
    raising = clock.Variant("raising", wrong, lambda result: [])
    the_clock = clock.Clock()
    for cold in (True, False):
        timed = the_clock.time([right, judged, raising], cold=cold)
        timing = timed["right"].timing
        assert timing is not None
        assert 1.0 < timing.p10_us <= timing.median_us <= timing.p90_us < 100.0
        assert timing.replays == clock.REPLAYS
        assert timed["judged"] == clock.Timed(None, ["wrong, it says"])
        assert timed["raising"] == clock.Timed(None, ["raised RuntimeError: as asked"])
