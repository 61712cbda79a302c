"""README.md: its generated parts are current, and the commands, targets, files and settings that it names exist."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from sglang_router_ext import readme
from sglang_router_ext.backends import BACKENDS
from sglang_router_ext.bench.record import BenchRecord, CheckRecord, OtherRecord, decode
from sglang_router_ext.choose import reasons
from sglang_router_ext.cli import app
from sglang_router_ext.contract import Problem, gpu_by_name
from sglang_router_ext.designs import DESIGNS, TABLE
from sglang_router_ext.settings import SETTINGS

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
MEASURED = (ROOT / "docs/measured.md").read_text()
IDENTITY: dict[str, Any] = {
    "schema": 1,
    "run": "0123456789ab",
    "time": "2026-11-30T10:00:00Z",
    "gpu": "NVIDIA H200",
    "commit": "unknown",
    "versions": {},
}


def test_generated_parts_are_current() -> None:
    assert readme.rendered(TEXT) == TEXT, "make readme"
    assert readme.rendered(MEASURED) == MEASURED, "make readme"


def test_every_part_stands_in_the_readme() -> None:
    assert [match[2] for match in readme.MARK.finditer(TEXT)] == ["backends", "settings", "designs", "results"]
    assert [match[2] for match in readme.MARK.finditer(MEASURED)] == ["cases"]
    assert set(readme.PARTS) == {"backends", "settings", "designs", "results", "cases"}


def test_the_first_lines_say_what_it_is_not() -> None:
    assert "sglang-router`, the load balancer" in "\n".join(TEXT.splitlines()[:6])


def test_tables_name_every_row() -> None:
    for name in (*(design.name for design in DESIGNS), *BACKENDS, *(setting.name for setting in SETTINGS)):
        assert f"| `{name}` |" in TEXT


def test_commands_exist() -> None:
    named = set(re.findall(r"sglang-router-ext ([a-z-]*[a-z])", TEXT)) - {"in"}
    assert {"demo", "doctor", "explain", "list", "check", "bench", "build"} <= named | {"demo"}
    for command in named:
        shown = CliRunner().invoke(app, [command, "--help"])
        assert shown.exit_code == 0, command
    for command, options in re.findall(r"sglang-router-ext ([a-z-]*[a-z])((?: --[a-z-]+(?: [^\s`#-]\S*)?)+)", TEXT):
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        for option in re.findall(r"--[a-z-]+", options):
            assert option in shown, (command, option)


def test_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("name", re.findall(r"^\| (`[^|]*`) \| [^|]* \|$", TEXT.partition("| where | what |")[2], re.MULTILINE))
def test_files_exist(name: str) -> None:
    for path in re.findall(r"`([^`]+)`", name):
        assert (ROOT / "sglang_router_ext" / path).exists(), path


BASE = Problem(experts=256, hidden=4096, topk=8)
PROBES = {
    "softmax scores": ("selection", msgspec.structs.replace(BASE, score="softmax")),
    "square-root-softplus scores": ("selection", msgspec.structs.replace(BASE, score="sqrtsoftplus")),
    "expert groups": ("selection", msgspec.structs.replace(BASE, groups=8, groups_kept=4)),
    "shared-expert slots": ("selection", msgspec.structs.replace(BASE, shared=1)),
    "fp32 gate weights": ("gate", msgspec.structs.replace(BASE, weight_dtype="float32")),
}


@pytest.mark.parametrize("what", PROBES)
def test_what_no_design_covers_is_said_and_nothing_else(what: str) -> None:
    stage, problem = PROBES[what]
    designs = [design for design in DESIGNS if stage in design.stages and design.name not in ("host", "naive")]
    covered = any(not reasons(design, problem, 6, gpu_by_name("h200")) for design in designs)
    section = TEXT.partition("## What is not covered")[2].partition("\n## ")[0]
    assert (what in section) != covered


def test_variables_are_settings_or_other_tools() -> None:
    others = {"SGLANG_PLUGINS", "SGLANG_REQUIRE_PLUGINS", "CUDA_HOME"}
    named = set(re.findall(r"\b((?:SGLANG|CUDA)_[A-Z_]+)\b", TEXT))
    assert named - others == {setting.name for setting in SETTINGS}


# --- the generator, on records that are not there yet


def bench(design: str, rows: int, median_us: float, *, stages: str = readme.ROUTER, **changes: Any) -> BenchRecord:
    source_hash = TABLE[design].source_hash if design in TABLE else ""
    line = {
        **IDENTITY,
        "case": "glm-5.3-flash",
        "experts": 288,
        "hidden": 4096,
        "topk": 8,
        "rows": rows,
        "design": design,
        "stages": stages,
        "cache": "cold",
        "median_us": median_us,
        "p10_us": median_us,
        "p90_us": median_us,
        "kernels": 2,
        "replays": 60,
        "correct": True,
        "source_hash": source_hash,
        "clocks": {},
    }
    return msgspec.convert({**line, **changes}, BenchRecord)


RECORDS = [
    bench("pair", 1, 5.0),
    bench("pair", 6, 5.5),
    bench("sglang-pair", 1, 6.2),
    bench("sglang-pair", 6, 7.7),
    bench("flashinfer-pair", 6, 7.2),
    bench("sglang-pair+align", 6, 1.0),
    bench("naive", 1, 27.0),
    bench("floor-read", 1, 2.6, stages="floor"),
    bench("pair", 1, 0.1, cache="warm"),
]


def test_results_show_sglang_and_the_fastest_of_ours_in_a_line() -> None:
    text = readme.results([*RECORDS, bench("cublas_gemm+warp_select", 1024, 15.0), bench("sglang-pair", 1024, 14.0)])
    line = "| glm-5.3-flash: 288 experts, hidden 4096, top-8 | 6.2 > 5.0 (1.24x) | 7.7 > 5.5 (1.40x) | - | - | 14.0 > 15.0"
    assert line in text
    assert "with the plan" not in text


def test_cases_show_the_fastest_of_each_side() -> None:
    text = readme.cases(RECORDS)
    assert "| 1 | 2.60 | 6.20 | 6.20 `sglang-pair` | 5.00 `pair` | 1.24x |" in text
    assert "| 6 | - | 7.70 | 7.20 `flashinfer-pair` | 5.50 `pair` | 1.40x |" in text
    assert "0123456789ab (2026-11-30)" in text


def test_a_plan_is_raced_against_sglangs_count_and_sort() -> None:
    planned = {"stages": "gate+selection+plan"}
    lines = [bench("single", 6, 5.0, kernels=1, **planned), bench("sglang-pair+align", 6, 9.0, kernels=3, **planned)]
    text = readme.cases([*RECORDS, *lines])
    assert "| 6 | - | 9.00, 3 kernels | 9.00 `sglang-pair+align`, 3 kernels | 5.00 `single`, 1 kernel | 1.80x |" in text


def test_results_of_older_sources_are_marked() -> None:
    old = [bench("pair", 1, 5.0, source_hash="0" * 16), bench("sglang-pair", 1, 6.0)]
    for text, cell in ((readme.cases(old), "5.00 `pair` * |"), (readme.results(old), "6.0 > 5.0 (1.20x) * |")):
        assert cell in text
        assert "older sources" in text


def test_checks_and_served_steps_are_listed() -> None:
    check = msgspec.convert(
        {
            **IDENTITY,
            "kind": "check",
            "design": "pair",
            "stages": readme.ROUTER,
            "cases": 90,
            "failures": 0,
            "source_hash": "x",
        },
        CheckRecord,
    )
    router = {"kernels": ["a"], "median_us": 5.25, "layers": 3}
    spread = {"median": 4.5, "p10": 4.25, "p90": 5.0, "count": 8}
    engine = {
        "start_s": 1.0,
        "clock_ms": {"1": spread, "16": spread},
        "gpu": {"1": {"span_us": spread}, "16": None},
        "router": {"1": router, "16": None},
    }
    line = {**IDENTITY, "kind": "served", "moe_layers": 42, "problem": "p", "weights": "dummy"}
    older = decode(msgspec.json.encode({**line, "time": "2026-01-01T00:00:00Z", "served": {}}))
    newer = decode(msgspec.json.encode({**line, "served": {"stock": engine, "router_ext_pair": engine}}))
    assert isinstance(newer, OtherRecord)
    sized = {
        **line,
        "time": "2027-01-01T00:00:00Z",
        "moe_intermediate": 128,
        "experts": "bf16",
        "served": {"stock": engine, "router_ext_pair": engine},
    }
    judged = [{"what": w, "equal": 90, "sequences": 96, "against": a} for w, a in (("a", []), ("b", ["x"]), ("c", []))]
    told = readme.results([newer, decode(msgspec.json.encode({**sized, "tokens": judged}))])
    assert told.count("The router in decode steps") == 1  # the record of before said nothing of the experts' size
    assert "bf16 experts of 128" in told
    assert "Greedy tokens, differences are near-ties: a: 90 of 96 sequences equal; c: 90 of 96" in told
    other = decode(msgspec.json.encode({**sized, "problem": "q", "tokens": judged}))
    both = readme.results([decode(msgspec.json.encode({**sized, "tokens": judged})), other])
    assert both.count("The router in decode steps") == 2  # two models of one depth
    judged[0]["against"] = ["wrong"]
    assert "Greedy tokens, NOT equal" in readme.results([decode(msgspec.json.encode({**sized, "tokens": judged}))])
    text = readme.results([check, newer, older])
    assert "`pair` on NVIDIA H200, 90 of 90 checks passed" in text
    assert "42 MoE layers" in text
    clock = "4.500 (4.250 to 5.000)"
    assert f"| 1 | 5.25 | 5.25 | 4 (4 to 5) | 4 (4 to 5) | {clock} | {clock} |" in text
    assert f"| 16 | - | - | - | - | {clock} | {clock} |" in text


def test_steps_without_a_spread_are_not_shown() -> None:
    engine = {"step_ms": {"1": 4.5}, "router": {"1": {"kernels": ["a"], "median_us": 5.25, "layers": 3}}}
    line = {**IDENTITY, "kind": "served", "moe_layers": 3, "problem": "p", "weights": "demo", "served": {"stock": engine}}
    text = readme.results([decode(msgspec.json.encode(line))])
    assert "| 1 | 5.25 |" in text
    assert "4.5" not in text


def test_without_records_it_says_so() -> None:
    assert readme.results([]) == readme.cases([]) == "Nothing is recorded yet.\n"


def test_cells_are_escaped() -> None:
    assert readme.table(("a",), [("x | y",)]) == "| a |\n| --- |\n| x \\| y |\n"
