"""``demo --deterministic``: whether the experts of a token depend on what else is in its batch.

With SGLang's deterministic inference a prompt must get the same answer alone and among others, to the bit. So every prompt is
served alone and among others, in prefill and in decode, and of every token that was read the expert ids of every MoE layer are
compared in their order, as SGLang's own capture returns them. Nothing is allowed to differ. Among the most others the prompts
are more than one chunk of SGLang's prefill, so that some are read in two parts. No prefix is kept from one batch to the next.

Stock SGLang runs beside ours twice: as it is, which shows that the comparison can fail, and deterministic, which shows what
everything but our router contributes. Rows are compared while the tokens before them are equal: after that they are of another
text.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_router_ext.bench.record import OtherRecord
from sglang_router_ext.demo import checkpoint, weights
from sglang_router_ext.demo.checkpoint import Size
from sglang_router_ext.demo.engine import Change, Paths, Plan, Routed, Routes
from sglang_router_ext.demo.serve import (
    BATCHES,
    SEQUENCES,
    STOCK,
    TOKENS,
    engine_plan,
    fits,
    folder,
    free_memory,
    model_path,
    served_record,
)
from sglang_router_ext.demo.worker import EngineFailed, Worker, started

RECORD_KIND = "determinism"
STOCK_DETERMINISTIC = "stock-deterministic"
PROMPT_TOKENS, CHUNK = 100, 8192
"""SEQUENCES prompts are more tokens than a chunk."""
ATTENTION = "triton"
"""Of the backends that SGLang allows for this (fa3 and FlashInfer too), the one that needs no library beside SGLang; it allows
it for absorbed MLA too, as DeepSeek's models have it then."""
ID_BYTES = 4


class Alike(msgspec.Struct, frozen=True):
    """The same prompts served one at a time and ``size`` at a time. An id is one expert of one token in one layer, a row all
    ids of one token in one layer."""

    size: int
    tokens: int
    """Compared, up to the first that differs in a sequence and with it."""
    tokens_apart: int
    """Sequences whose tokens part, therefore."""
    ids: int
    ids_apart: int
    rows: int
    rows_apart: int
    first: str
    """Where ids first differ; "" where they do not."""

    @property
    def equal(self) -> bool:
        return not (self.tokens_apart or self.ids_apart)


class DeterminismReport(msgspec.Struct, frozen=True):
    gpu: str
    problem: str
    size: Size
    backend: str
    """Of ours; the name of its engine too."""
    together: bool
    """Whether the engines ran at the same time."""
    found: dict[str, list[Alike]]
    """Engine -> its comparisons."""
    ran: list[str]
    """What the plugin's counters saw, start included: designs, and SGLang's own path with its reason."""
    seconds: float

    @property
    def noticed(self) -> bool:
        """Stock as it is differs somewhere, so the comparison can see that."""
        return not all(alike.equal for alike in self.found[STOCK])

    @property
    def agrees(self) -> bool:
        """Nothing of ours differs."""
        return all(alike.equal for alike in self.found[self.backend])


def run(
    size: Size, backend: str, say: Callable[[str], None], *, keep: pathlib.Path | None = None, in_memory: bool = False
) -> DeterminismReport:
    """Serve stock, stock deterministic and ``backend`` deterministic; the rest as :func:`~sglang_router_ext.demo.serve.run`."""
    import torch

    began = time.monotonic()
    model = checkpoint.config(size)
    free = free_memory(size, model)
    names = [STOCK, STOCK_DETERMINISTIC, backend]
    together = fits(len(names), model, free)
    with folder(keep) as work:
        path = model_path(size, model, work, say, keep=keep is not None, in_memory=in_memory)
        workers = [
            Worker(name, routed_plan(name, path, model, work / name, free, in_memory=in_memory), say, plugin=name == backend)
            for name in names
        ]
        found: dict[str, list[Alike]] = {}
        ran: list[str] = []
        for group in [workers] if together else [[worker] for worker in workers]:
            with started(group):
                for worker in group:
                    found[worker.name] = _compared(worker, size, model, say, in_memory=in_memory)
                    if worker.plugin:
                        ran = worker.ask(Paths(), list[str])
                    worker.finish()
    return DeterminismReport(
        torch.cuda.get_device_name(),
        str(checkpoint.problem(model)),
        size,
        backend,
        together,
        found,
        ran,
        time.monotonic() - began,
    )


def routed_plan(name: str, path: pathlib.Path, model: dict, work: pathlib.Path, free: int, *, in_memory: bool) -> Plan:
    """As for the comparison of tokens; all engines differ in determinism and in the backend alone."""
    stock = name in (STOCK, STOCK_DETERMINISTIC)
    plan = engine_plan(STOCK if stock else name, path, model, work, free, in_memory=in_memory)
    more: dict[str, Any] = {
        "attention_backend": ATTENTION,
        "enable_deterministic_inference": name != STOCK,
        "enable_return_routed_experts": True,
        "chunked_prefill_size": CHUNK,
        "enable_fp32_lm_head": False,  # its GEMM writes into a buffer, which deterministic inference leaves to cuBLAS
    }
    return msgspec.structs.replace(plan, arguments=plan.arguments | more, prompt_tokens=PROMPT_TOKENS)


def _compared(worker: Worker, size: Size, model: dict, say: Callable[[str], None], *, in_memory: bool) -> list[Alike]:
    """Every prompt alone against the same among others, in each batch size."""
    if in_memory:
        say(f"{worker.name}: drawing weights")
        worker.ask(Change(weights.DRAW), type(None))
    one, *others = BATCHES
    slots = checkpoint.problem(model).topk
    answers = {}
    for batch in (one, *others):
        say(f"{worker.name}: {SEQUENCES} prompts of {PROMPT_TOKENS} tokens, {batch} at a time")
        answers[batch] = worker.ask(Routed(batch, SEQUENCES), Routes)
        missing = lacking(answers[batch], size, slots)
        if missing:
            raise EngineFailed(f"the engine {worker.name} did not return the experts of every token: {missing}")
    return [alike(batch, answers[one], answers[batch], size, slots) for batch in others]


def lacking(routes: Routes, size: Size, slots: int) -> str:
    """What is missing in the captured ids, in words; "": nothing is."""
    if len(routes.tokens) != SEQUENCES or len(routes.experts) != SEQUENCES:
        return f"{len(routes.experts)} of {SEQUENCES} sequences came back"
    if {len(tokens) for tokens in routes.tokens} != {TOKENS}:
        return f"sequences of other lengths than {TOKENS} tokens"
    row = slots * ID_BYTES
    whole = (PROMPT_TOKENS + TOKENS - 1) * size.layers * row
    for number, ids in enumerate(routes.experts):
        if len(ids) != whole:
            return f"sequence {number} has {len(ids)} bytes of them, not {whole}"
        for layer in size.moe_layers:  # a buffer that nobody wrote to is zero
            if not any(ids[layer * row : (layer + 1) * row]):
                return f"sequence {number}, layer {layer}: no ids"
    return ""


def alike(batch: int, alone: Routes, among: Routes, size: Size, slots: int) -> Alike:
    """Compare the same sequences, ids in their order, while the tokens before them are equal."""
    tokens = tokens_apart = ids_apart = rows = rows_apart = 0
    first = ""
    width, layer_width = size.layers * slots * ID_BYTES, slots * ID_BYTES
    for number, (mine, theirs) in enumerate(zip(alone.tokens, among.tokens, strict=True)):
        same = next((step for step, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), len(mine))
        parts = same < len(mine)
        tokens, tokens_apart = tokens + same + parts, tokens_apart + parts
        one, other = alone.experts[number], among.experts[number]
        read = min(PROMPT_TOKENS + same, len(one) // width)
        rows += read * len(size.moe_layers)
        for position in range(read):
            place = position * width
            if one[place : place + width] == other[place : place + width]:
                continue
            for layer in size.moe_layers:
                start = place + layer * layer_width
                slices = ((one[i : i + ID_BYTES], other[i : i + ID_BYTES]) for i in range(start, start + layer_width, ID_BYTES))
                apart = sum(a != b for a, b in slices)
                ids_apart, rows_apart = ids_apart + apart, rows_apart + (apart > 0)
                if apart and not first:
                    where = "prompt" if position < PROMPT_TOKENS else "answer"
                    first = f"sequence {number}, token {position} ({where}), layer {layer}: {apart} of {slots} ids"
    return Alike(batch, tokens, tokens_apart, rows * slots, ids_apart, rows, rows_apart, first)


def record_of(report: DeterminismReport) -> OtherRecord:
    """A report as a line of ``records/``. What was compared stands in its texts and whole numbers alone."""
    found = {
        "backend": report.backend,
        "weights": "demo",
        "attention": ATTENTION,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": TOKENS,
        "sequences": SEQUENCES,
        "ran": report.ran,
        "compared": msgspec.to_builtins(report.found),
    }
    return served_record(RECORD_KIND, report.gpu, report.problem, report.size, [], found)
