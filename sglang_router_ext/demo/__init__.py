"""``sglang-router-ext demo``: stock SGLang and the plugin side by side. Imports no torch until it runs.

checkpoint.py   small models with the routers of GLM-5.3-Flash and others, from seeds; weights.py draws it inside an engine
quantise.py     their weights in FP8 and NVFP4
serve.py        with a GPU: two real engines, same prompts; worker.py is a process of one, engine.py runs in it
prefill.py      the time to the first token of long prompts: ``--prefill``
determinism.py  whether experts depend on the batch: ``--deterministic``
launches.py     engines launched several times in mixed order: ``serve-bench``
compare.py      whether their tokens agree
pace.py         which is faster, by the clock and on the GPU; trace.py reads the profiles
cpu.py          without one: SGLang's own modules on the CPU, with the oracle behind the plugin's hooks
show.py         the report as tables
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_router_ext.demo.checkpoint import Size
    from sglang_router_ext.demo.cpu import CpuReport
    from sglang_router_ext.demo.determinism import DeterminismReport
    from sglang_router_ext.demo.launches import LaunchReport
    from sglang_router_ext.demo.prefill import PrefillReport
    from sglang_router_ext.demo.serve import ServeReport

MODEL, LAYERS, MOE_INTERMEDIATE, BACKEND = "glm", 4, 64, "router_ext_pair"
MAX_LAYERS, MAX_INTERMEDIATE = 256, 8192
LAUNCHES, MAX_LAUNCHES = 3, 100


def size_of(
    layers: int,
    moe_intermediate: int,
    backends: Sequence[str],
    *,
    quantization: str = "none",
    in_memory: bool,
    model: str = MODEL,
) -> Size:
    """The model that is asked for. Raises :class:`~sglang_router_ext.contract.ContractError`."""
    from sglang_router_ext.backends import BACKENDS
    from sglang_router_ext.contract import expect
    from sglang_router_ext.demo import quantise
    from sglang_router_ext.demo.checkpoint import MODELS, Size

    expect(model in MODELS, "model", model, " | ".join(MODELS))
    expect(2 <= layers <= MAX_LAYERS, "layers", layers, f"2 to {MAX_LAYERS}: the first has no experts")
    fits = 16 <= moe_intermediate <= MAX_INTERMEDIATE and moe_intermediate % 16 == 0
    expect(fits, "moe-intermediate", moe_intermediate, f"multiples of 16 up to {MAX_INTERMEDIATE}")
    for backend in backends:
        expect(backend in BACKENDS, "moe-runner-backend", backend, " | ".join(BACKENDS))
    expect(quantization in quantise.KINDS, "quantization", quantization, " | ".join(quantise.KINDS))
    block = quantise.BLOCKS.get(quantization, 1)
    expect(moe_intermediate % block == 0, "moe-intermediate", moe_intermediate, f"multiples of {block} in {quantization}")
    drawn = not in_memory or quantization != "nvfp4"  # Marlin's layout is not undone for weights that come later
    expect(drawn, "in-memory", f"{quantization} experts", "a checkpoint on disk for these")
    return Size(layers, moe_intermediate, quantization, model)


def launch(
    *,
    model: str = MODEL,
    layers: int = LAYERS,
    moe_intermediate: int = MOE_INTERMEDIATE,
    backends: Sequence[str] = (BACKEND,),
    launches: int = LAUNCHES,
    quantization: str = "none",
    keep: pathlib.Path | None = None,
    in_memory: bool = False,
    record: bool = False,
    say: Callable[[str], None] = print,
) -> LaunchReport:
    """Launch stock and ``backends`` ``launches`` times each, in mixed order; the rest as :func:`run`, but a GPU is needed.

    ``record`` writes the times to the records of this GPU, if the tokens agree.
    """
    import torch

    from sglang_router_ext.contract import expect

    size = size_of(layers, moe_intermediate, backends, quantization=quantization, in_memory=in_memory, model=model)
    expect(1 <= launches <= MAX_LAUNCHES, "launches", launches, f"1 to {MAX_LAUNCHES}")
    expect(bool(backends) and len({*backends}) == len(backends), "moe-runner-backend", list(backends), "each one once")
    expect(torch.cuda.is_available(), "serve-bench", "no CUDA GPU here", "a machine with one")
    from sglang_router_ext.bench import record as records
    from sglang_router_ext.demo import launches as launching

    if record:
        records.check_writable(torch.cuda.get_device_name())
    report = launching.run(size, backends, launches, say, keep=keep, in_memory=in_memory)
    if record and report.agrees:
        records.write([launching.record_of(report)])
    return report


def first_tokens(
    *,
    model: str = MODEL,
    layers: int = LAYERS,
    moe_intermediate: int = MOE_INTERMEDIATE,
    backend: str = BACKEND,
    prompts: int | None = None,
    quantization: str = "none",
    keep: pathlib.Path | None = None,
    in_memory: bool = False,
    record: bool = False,
    say: Callable[[str], None] = print,
) -> PrefillReport:
    """Time to the first token of ``prompts`` long prompts; the rest as :func:`run`, but a GPU is needed."""
    from sglang_router_ext.contract import expect
    from sglang_router_ext.demo import prefill

    size = size_of(layers, moe_intermediate, [backend], quantization=quantization, in_memory=in_memory, model=model)
    count = prefill.PROMPTS if prompts is None else prompts
    expect(prefill.FEWEST <= count <= prefill.MOST, "prompts", count, f"{prefill.FEWEST} to {prefill.MOST}")
    records = _records("prefill", record=record)
    report = prefill.run(size, backend, count, say, keep=keep, in_memory=in_memory)
    if record and report.agrees:
        records.write([prefill.record_of(report)])
    return report


def alone_and_among(
    *,
    model: str = MODEL,
    layers: int = LAYERS,
    moe_intermediate: int = MOE_INTERMEDIATE,
    backend: str = BACKEND,
    quantization: str = "none",
    keep: pathlib.Path | None = None,
    in_memory: bool = False,
    record: bool = False,
    say: Callable[[str], None] = print,
) -> DeterminismReport:
    """Whether experts depend on the batch under deterministic inference; the rest as :func:`run`, but a GPU is needed."""
    from sglang_router_ext.demo import determinism

    size = size_of(layers, moe_intermediate, [backend], quantization=quantization, in_memory=in_memory, model=model)
    records = _records("deterministic", record=record)
    report = determinism.run(size, backend, say, keep=keep, in_memory=in_memory)
    if record and report.agrees:
        records.write([determinism.record_of(report)])
    return report


def _records(option: str, *, record: bool) -> ModuleType:
    """Where results go; refuses ``option`` without a GPU, and records that could not be written."""
    import torch

    from sglang_router_ext.bench import record as records
    from sglang_router_ext.contract import expect

    expect(torch.cuda.is_available(), option, "no CUDA GPU", "a machine with one: nothing is served without")
    if record:
        records.check_writable(torch.cuda.get_device_name())
    return records


def run(
    *,
    model: str = MODEL,
    layers: int = LAYERS,
    moe_intermediate: int = MOE_INTERMEDIATE,
    backend: str = BACKEND,
    quantization: str = "none",
    keep: pathlib.Path | None = None,
    in_memory: bool = False,
    record: bool = False,
    say: Callable[[str], None] = print,
) -> CpuReport | ServeReport:
    """Run the demo that fits this machine; ``report.agrees`` says whether everything agreed that must.

    ``model``: whose router, by name. ``backend``: of ours, what runs beside stock. With a GPU only: any but the first model;
    ``in_memory`` draws the weights on the GPU instead of writing them, so that a model of any size can be served;
    ``quantization``: of the weights, one of ``quantise.KINDS``; ``keep`` is a folder for checkpoint, logs and traces;
    ``record`` writes the times to the records of this GPU, slower ones too, if all else holds. ``say`` gets a line of progress
    at a time.
    Raises :class:`~sglang_router_ext.contract.ContractError`.
    """
    import torch

    from sglang_router_ext.contract import expect

    size = size_of(layers, moe_intermediate, [backend], quantization=quantization, in_memory=in_memory, model=model)
    if not torch.cuda.is_available():
        expect(model == MODEL, "model", f"{model}, no CUDA GPU", f"a machine with one, or {MODEL}")
        for option, given in (
            ("record", record),
            ("in-memory", in_memory),
            ("keep", keep is not None),
            ("quantization", quantization != "none"),
        ):
            expect(not given, option, "no CUDA GPU", "a machine with one: nothing is served without")
        from sglang_router_ext.demo import cpu

        return cpu.run(size, backend, say)
    from sglang_router_ext.bench import record as records
    from sglang_router_ext.demo import serve

    if record:
        records.check_writable(torch.cuda.get_device_name())
    report = serve.run(size, backend, say, keep=keep, in_memory=in_memory)
    if record and report.right:
        records.write([serve.record_of(report)])
    return report
