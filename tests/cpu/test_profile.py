"""What a profile says of routers: torch traces, Nsight exports, eager steps, and what was expected."""

from __future__ import annotations

import gzip
import json
import pathlib
import sqlite3
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_router_ext import profile
from sglang_router_ext.cli import app
from sglang_router_ext.contract import ContractError
from sglang_router_ext.demo.trace import Kernel
from sglang_router_ext.designs import TABLE

NORM = Kernel(0, 2, "FusedAddRMSNormKernel", 7)
STOCK = [
    NORM,
    Kernel(2, 5, "void tiny_n_gemm_kernel<288, 4096, true>(Params)", 7),
    Kernel(5, 7, "_router_triton_kernel", 7),
    Kernel(7, 8, "moe_align_block_size_kernel", 7),
    Kernel(8, 10, "count_and_sort_expert_tokens_kernel", 7),
    Kernel(10, 30, "fused_moe_kernel", 7),
]
SINGLE = [
    NORM,
    Kernel(1, 7, "void rx::single_kernel<16, 2, 2, true>(rx::SingleParams)", 7),
    Kernel(7, 27, "fused_moe_kernel", 7),
]
MANY = [
    NORM,
    Kernel(2, 12, "void rx::tensor_core_kernel<96, 1>(CUtensorMap_st)", 7),
    Kernel(10, 14, "void rx::select_ranges_kernel<3, 1>(rx::SelectPlanParams)", 7),
    Kernel(14, 17, "void rx::many_blocks_kernel<384>(rx::ManyPlanParams)", 7),
]
LAYERS, STEPS, LAYER_US = 3, 4, 100.0


def served(layer: list[Kernel], prefill: list[Kernel] | None = None) -> list[Kernel]:
    """A prefill, if there is one, launched kernel by kernel; then steps, each a replay of LAYERS layers."""
    found, launch = [], 1
    for number in range(LAYERS if prefill else 0):
        for kernel in prefill or []:
            start = number * LAYER_US
            found.append(kernel._replace(start_us=kernel.start_us + start, end_us=kernel.end_us + start, launch=launch))
            launch += 1
    for step in range(STEPS):
        for number in range(LAYERS):
            start = 1000 + 1000 * step + number * LAYER_US
            found += [
                kernel._replace(start_us=kernel.start_us + start, end_us=kernel.end_us + start, launch=5000 + step)
                for kernel in layer
            ]
    return found


def torch_trace(path: pathlib.Path, kernels: list[Kernel]) -> pathlib.Path:
    events = [
        {
            "cat": "kernel",
            "name": one.name,
            "ts": one.start_us,
            "dur": one.end_us - one.start_us,
            "args": {"stream": one.stream, "correlation": one.launch},
        }
        for one in kernels
    ]
    data = json.dumps({"traceEvents": [*events, {"cat": "cpu_op", "name": "x", "ts": 0, "dur": 1}]}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def nsight(path: pathlib.Path, kernels: list[Kernel]) -> pathlib.Path:
    names = list(dict.fromkeys(one.name for one in kernels))
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        connection.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL "
            "(start INTEGER, end INTEGER, demangledName INTEGER, streamId INTEGER, correlationId INTEGER)"
        )
        connection.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(names)))
        rows = [
            (int(1000 * one.start_us), int(1000 * one.end_us), names.index(one.name), one.stream, one.launch) for one in kernels
        ]
        connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)", rows)
    connection.close()
    return path


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["profile", *arguments])


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.sqlite"])
def test_a_stock_server_from_every_kind_of_file(name: str, tmp_path: pathlib.Path) -> None:
    make = nsight if name.endswith(".sqlite") else torch_trace
    (steps,) = profile.look(profile.read(make(tmp_path / name, served(STOCK))))
    assert (steps.steps, steps.step_us, steps.router_us, steps.sorting_us) == (STEPS, 230.0, LAYERS * 5.0, LAYERS * 3.0)
    (path,) = steps.paths
    assert path.what == "SGLang's tiny GEMM + SGLang's Triton router"
    assert (path.kernels, path.calls, path.a_step) == (["tiny_n_gemm_kernel", "_router_triton_kernel"], STEPS * LAYERS, LAYERS)
    assert path.median_us == 5.0 and steps.share == pytest.approx(24 / 230)
    assert steps.sorting == {"count_and_sort_expert_tokens_kernel": LAYERS, "moe_align_block_size_kernel": LAYERS}


def test_prefills_and_decode_steps_are_apart(tmp_path: pathlib.Path) -> None:
    decode, prefill = profile.look(profile.read(torch_trace(tmp_path / "t.json", served(SINGLE, MANY))))
    assert [path.what for path in decode.paths] == ["single"] and decode.sorting == {} and decode.paths[0].median_us == 6.0
    assert [path.what for path in prefill.paths] == ["tensor_core + selection that counts"]
    assert prefill.sorting == {"many_blocks_kernel": LAYERS} and prefill.paths[0].median_us == 12.0


@pytest.mark.parametrize(
    ("kernels", "what"),
    [
        (["hash_rows_kernel"], "hash_rows"),
        (["small_rows_kernel", "warp_select_kernel"], "small_rows + warp_select"),
        (["split_weight_kernel", "nvjet_x", "add_parts_kernel", "warp_select_kernel"], "split_gemm + warp_select"),
        (["nvjet_sm90_tss", "splitKreduce_kernel", "moe_fused_gate_kernel"], "cuBLAS + SGLang's fused gate"),
        (["moeTopKFuncKernel"], "no gate seen + FlashInfer's routing"),
        (["who", "topkGatingSoftmax"], "another gate + SGLang's top-k"),
        (["route_radix_kernel"], "no gate seen + SGLang's radix select"),
    ],
)
def test_paths_have_words(kernels: list[str], what: str) -> None:
    assert profile.words(kernels) == what


def test_every_design_of_kernels_of_its_own_has_names() -> None:
    libraries = {"naive", "cublas_gemm", "host"}
    assert set(profile.KERNELS_OF) == set(TABLE) - libraries


@pytest.mark.parametrize(
    ("layer", "options", "said"),
    [
        (SINGLE, ("--rows", "6", "--moe-runner-backend", "router_ext_single"), ""),
        (STOCK, ("--rows", "6"), ""),
        (
            STOCK,
            ("--rows", "6", "--moe-runner-backend", "router_ext"),
            "expected single: SGLang's tiny GEMM + SGLang's Triton router",
        ),
        (SINGLE, ("--rows", "6"), "expected host: single, 12 calls: with single_kernel"),
        (
            SINGLE,
            ("--rows", "6", "--moe-runner-backend", "router_ext", "--no-plan"),
            "expected pair: single, 12 calls: without",
        ),
        (MANY, ("--rows", "200", "--moe-runner-backend", "router_ext"), ""),
    ],
)
def test_what_was_expected(layer: list[Kernel], options: tuple[str, ...], said: str, tmp_path: pathlib.Path) -> None:
    file = torch_trace(tmp_path / "t.json", served(layer))
    result = call(str(file), "--model", "glm-5.3-flash", *options)
    assert result.exit_code == (1 if said else 0), result.output
    assert said in result.output and ("as expected: " in result.output) == (not said)
    found = json.loads(call(str(tmp_path), "--model", "glm-5.3-flash", *options, "--json").stdout)
    assert bool(found["files"][0]["mismatches"]) == bool(said)


def test_a_trace_without_a_router_says_so(tmp_path: pathlib.Path) -> None:
    result = call(str(torch_trace(tmp_path / "t.json", served([NORM, Kernel(2, 9, "fused_moe_kernel", 7)]))))
    assert result.exit_code == 0 and "no router known by its kernels" in result.output


@pytest.mark.parametrize(
    ("data", "name", "text"),
    [
        (b"{", "t.json", "JSONDecodeError"),
        (b"[]", "t.json", "TypeError"),
        (b'{"traceEvents": []}', "t.json", "no kernel, allowed: a trace of GPU activity"),
        (b'{"traceEvents": [{"cat": "kernel"}]}', "t.json", "KeyError"),
        (b"\x1f\x8b", "t.json.gz", "EOFError"),
        (b"not a database at all", "t.sqlite", "DatabaseError"),
    ],
)
def test_what_is_no_trace(data: bytes, name: str, text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / name).write_bytes(data)
    result = call(str(tmp_path / name))
    assert result.exit_code == 2 and result.output.startswith("error: file: got ") and text in result.output, result.output


def test_a_folder_without_traces_and_a_file_that_is_not_there(tmp_path: pathlib.Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere.json"):
        with pytest.raises(ContractError, match=r"^file: got .*, allowed: a trace, or a folder"):
            profile.files_of([place])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--rows", "6"), "error: rows: got 6, allowed: none without --model"),
        (("--model", "glm-5.3-flash"), "error: model: got glm-5.3-flash, allowed: --rows beside it"),
        (("--model", "glm-5.3-flash", "--rows", "0"), "error: rows: got 0"),
        (
            ("--model", "glm-5.3-flash", "--rows", "6", "--moe-runner-backend", "triton"),
            "error: moe-runner-backend: got triton",
        ),
    ],
)
def test_bad_arguments(options: tuple[str, ...], text: str, tmp_path: pathlib.Path) -> None:
    result = call(str(tmp_path), *options)
    assert result.exit_code == 2 and result.output.startswith(text), result.output
