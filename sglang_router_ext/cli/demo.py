"""``demo`` and ``serve-bench``: stock SGLang and the plugin side by side."""

from __future__ import annotations

import functools
import pathlib
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from sglang_router_ext import demo as demonstration
from sglang_router_ext import settings
from sglang_router_ext.cli.app import Ticker, app, console, print_json
from sglang_router_ext.contract import expect

if TYPE_CHECKING:
    from sglang_router_ext.demo.show import Report


Model = Annotated[
    str,
    typer.Option(
        help="whose router: glm (GLM-5.3-Flash's), glm-4 (GLM-4.6's, fp32 gate), qwen3 (Qwen3-30B-A3B's, softmax), deepseek-v3"
        " (groups) or kimi-k2"
    ),
]
Layers = Annotated[int, typer.Option(help="of the model; the first has no experts, but for Qwen3's")]
Intermediate = Annotated[int, typer.Option(help="size of an expert")]
Quantization = Annotated[
    str, typer.Option(help="of the weights: none, fp8 (linear layers and experts), nvfp4 (routed experts)")
]
Record = Annotated[bool, typer.Option("--record", help="write the times to the records of this GPU")]
AsJson = Annotated[bool, typer.Option("--json")]


def _stop(*_: object) -> None:
    """End the command, so that engines and temporary files go with it. Not by typer's Exit: an Exception may be caught."""
    raise SystemExit(128 + signal.SIGTERM)


def _report(name: str, run: Callable[..., Report], *, as_json: bool) -> None:
    """Do ``run`` with progress and show what comes of it. Ends the command: status 1 where something does not agree."""
    from sglang_router_ext.demo.worker import EngineFailed

    signal.signal(signal.SIGTERM, _stop)
    with Ticker(name) as ticker:
        try:
            report = run(say=ticker.say)
        except EngineFailed as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
    if as_json:
        print_json({**msgspec.to_builtins(report), "agrees": report.agrees})
    else:
        from sglang_router_ext.demo.show import show

        show(report, console())
    raise typer.Exit(0 if report.agrees else 1)


@app.command()
def demo(
    *,
    model: Model = demonstration.MODEL,
    layers: Layers = demonstration.LAYERS,
    moe_intermediate: Intermediate = demonstration.MOE_INTERMEDIATE,
    backend: Annotated[str, typer.Option("--moe-runner-backend", help="of ours, served beside stock")] = demonstration.BACKEND,
    quantization: Quantization = "none",
    keep: Annotated[
        pathlib.Path | None,
        typer.Option(help="folder for checkpoint, logs and traces: new, empty, or of a demo of the same model"),
    ] = None,
    in_memory: Annotated[
        bool, typer.Option("--in-memory", help="draw the weights on the GPU, for more than a disk takes")
    ] = False,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="the time to the first token of prompts of 8,192 tokens, instead of decode steps")
    ] = False,
    prompts: Annotated[int | None, typer.Option(help="with --prefill: how many; else 8")] = None,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="whether tokens keep their experts in other batches, instead of decode steps"),
    ] = False,
    record: Record = False,
    as_json: AsJson = False,
) -> None:
    """Serve a small model twice, stock and with the plugin, and compare; without a GPU, compare SGLang's modules on the CPU."""
    expect(not (prefill and deterministic), "deterministic", "prefill beside it", "one of the two")
    expect(prefill or prompts is None, "prompts", prompts, "none without --prefill")
    if not settings.read().enabled:
        typer.echo("SGLANG_ROUTER_EXT=0 does not hold here: the demo runs SGLang with the plugin and without it", err=True)
    run: Callable[..., Report] = demonstration.alone_and_among if deterministic else demonstration.run
    if prefill:
        run = functools.partial(demonstration.first_tokens, prompts=prompts)
    call = functools.partial(
        run,
        model=model,
        layers=layers,
        moe_intermediate=moe_intermediate,
        backend=backend,
        quantization=quantization,
        keep=keep,
        in_memory=in_memory,
        record=record,
    )
    _report("demo", call, as_json=as_json)


@app.command()
def serve_bench(
    *,
    model: Model = demonstration.MODEL,
    layers: Layers = demonstration.LAYERS,
    moe_intermediate: Intermediate = demonstration.MOE_INTERMEDIATE,
    backend: Annotated[
        list[str] | None, typer.Option("--moe-runner-backend", help=f"of ours; may be repeated; else {demonstration.BACKEND}")
    ] = None,
    launches: Annotated[int, typer.Option(help="of stock and of each backend")] = demonstration.LAUNCHES,
    quantization: Quantization = "none",
    keep: Annotated[pathlib.Path | None, typer.Option(help="folder for checkpoint, logs and traces, as in demo")] = None,
    in_memory: Annotated[bool, typer.Option("--in-memory", help="draw the weights on the GPU")] = False,
    record: Record = False,
    as_json: AsJson = False,
) -> None:
    """Launch stock SGLang and backends of ours several times in mixed order, and compare the time of a decode step."""
    call = functools.partial(
        demonstration.launch,
        model=model,
        layers=layers,
        moe_intermediate=moe_intermediate,
        backends=backend or [demonstration.BACKEND],
        launches=launches,
        quantization=quantization,
        keep=keep,
        in_memory=in_memory,
        record=record,
    )
    _report("serve-bench", call, as_json=as_json)
