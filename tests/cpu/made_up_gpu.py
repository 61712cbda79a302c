"""A machine with a GPU and times that are made up, for ``tune``."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sglang_router_ext.bench import clock, machine, run
from sglang_router_ext.bench.cases import Case
from sglang_router_ext.bench.clock import Timing
from sglang_router_ext.bench.record import HOST, PLANNED, ROUTER
from sglang_router_ext.bench.run import Line
from sglang_router_ext.cli import app
from sglang_router_ext.contract import Gpu
from sglang_router_ext.plugin import preflight

H200 = Gpu("NVIDIA H200", 90, 132)
KIMI = {
    "model_type": "kimi_k2",
    "n_routed_experts": 384,
    "hidden_size": 7168,
    "num_experts_per_tok": 8,
    "topk_method": "noaux_tc",
}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def call_json(*arguments: str) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def times(rows: int) -> dict[tuple[str, str, bool], float]:
    """(design, stages, ours) -> microseconds: up to 16 rows `pair` alone and `single` with a plan, at 64 SGLang's."""
    found = {
        (HOST[stages], stages, False): us for stages, us in (("gate", 3.0), ("selection", 4.0), (ROUTER, 6.0), (PLANNED, 9.0))
    }
    if rows <= 16:
        found |= {("pair", ROUTER, True): 4.0, ("single", ROUTER, True): 4.5, ("single", PLANNED, True): 5.0}
    return {**found, ("warp_select", "selection", True): 2.0 if rows > 64 else 4.5}


class Gpus:
    """What a machine with a GPU would do; every call of ``measure`` is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: pathlib.Path) -> None:
        self.calls: list[dict[str, Any]] = []
        self.spoil: Callable[[list[Line]], list[Line]] = lambda lines: lines
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
        monkeypatch.delenv("SGLANG_ROUTER_EXT_TABLE")
        monkeypatch.setattr(machine, "gpu", lambda index=None: H200)
        monkeypatch.setattr(preflight, "unavailable", dict)
        monkeypatch.setattr(clock, "Clock", lambda: type("NoClock", (), {"device": "cpu"}))
        monkeypatch.setattr(run, "build_ahead", lambda *_: None)
        monkeypatch.setattr(run, "measure", self.measure)

    def measure(self, the_clock: Any, case: Case, rows: int, gpu: Gpu, **asked: Any) -> list[Line]:
        self.calls.append({"case": case.name, "rows": rows, **asked})
        lines = []
        for (design, stages, ours), us in {**times(rows), ("naive", "gate", True): 0.1, ("naive", "gate", False): 0.1}.items():
            timing = Timing(median_us=us, p10_us=us, p90_us=us, kernels=1, replays=60)
            line = Line(case=case.name, rows=rows, cache="cold", design=design, stages=stages, ours=ours, timing=timing)
            lines += [line] if asked["wanted"](line) else []
        return self.spoil(lines)
