"""The demo without a GPU: SGLang's real MoEGate and TopK on the CPU, over the router of every MoE layer of the checkpoint.

No kernel runs here. What is shown is that the plugin's hooks take effect inside SGLang's modules and hand over exactly what
the oracle says (the hooks run the oracle, see ``plugin/reference_mode.py``); that SGLang's own selection and the oracle agree
on the same fp32 logits; and what rounding would do, since SGLang's gate gives bf16 logits on a CPU.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from sglang_router_ext import reference
from sglang_router_ext.agreement import Result, compare
from sglang_router_ext.contract import STAGES, Problem, gpu_by_name
from sglang_router_ext.demo import checkpoint
from sglang_router_ext.demo.checkpoint import Size
from sglang_router_ext.designs import TABLE

ROWS = (1, 6, 16, 96, 512)
GPUS = ("h200", "b300")


class RowCheck(msgspec.Struct, frozen=True):
    """One layer at one row count. The lists hold differences in words; empty means that everything agrees."""

    layer: int
    rows: int
    hooked: list[str]
    """The plugin's hooks inside SGLang's gate and top-k, against the oracle."""
    native: list[str]
    """SGLang's own selection, from the same fp32 logits, against the oracle."""
    moved_by_logits: int
    """Rows that go to other experts because SGLang's gate rounds its logits to bf16 on a CPU."""
    moved_by_bias: int
    """Rows that would go to other experts if the selection bias were rounded to bf16."""


class CpuReport(msgspec.Struct, frozen=True):
    problem: str
    backend: str
    checks: list[RowCheck]
    paths: list[str]
    """What the hooks counted."""
    choices: dict[str, dict[str, str]]
    """GPU -> row counts -> what would run there, as ``sglang-router-ext explain`` says."""
    seconds: float

    @property
    def agrees(self) -> bool:
        """Nothing differs, the hooks were on the path, and rounding the bias, which must change the routing, did."""
        same = not any(check.hooked or check.native for check in self.checks)
        return same and len(self.paths) >= len(STAGES) and any(check.moved_by_bias for check in self.checks)


def run(size: Size, backend: str, say: Callable[[str], None]) -> CpuReport:
    """Compare every MoE layer of the checkpoint of ``size``. Publishes a SGLang configuration in this process."""
    started = time.monotonic()
    say("importing SGLang's model code")
    _publish()
    from sglang_router_ext.plugin import counters
    from sglang_router_ext.plugin.reference_mode import reference_mode

    model = checkpoint.config(size)
    hidden = hidden_states(model, max(ROWS))
    checks = []
    counters.reset()
    with torch.no_grad():
        stock = {layer: build_layer(model, layer) for layer in size.moe_layers}
        with reference_mode(backend):
            hooked = {layer: build_layer(model, layer) for layer in size.moe_layers}
        for layer in size.moe_layers:
            say(f"layer {layer} of {size.layers - 1}")
            checks += [check_rows(layer, stock[layer], hooked[layer], hidden[:rows]) for rows in ROWS]
    paths = [f"{entry.stage}: {entry.design} x {entry.calls}" for entry in counters.counts() if not entry.reason]
    problem = checkpoint.problem(model)
    return CpuReport(str(problem), backend, checks, paths, explained(problem, backend), time.monotonic() - started)


def explained(problem: Problem, backend: str) -> dict[str, dict[str, str]]:
    """What would run on GPUs that are not here; nothing is built or launched."""
    from sglang_router_ext.cli.evidence import explain_rows

    found: dict[str, dict[str, str]] = {}
    for gpu in map(gpu_by_name, GPUS):
        ranges = explain_rows(problem, gpu, backend, "auto", None, {})
        found[str(gpu)] = {str(entry.rows): str(entry.choice) for entry in ranges}
    return found


def _publish() -> None:
    """The configuration that SGLang's modules read, for one rank on the CPU. Its native top-k needs no compiler here."""
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    torch._dynamo.config.disable = True
    reset_context()
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test", ranks=SpawnRanks(world_rank=0))


def build_layer(model: dict, layer: int) -> Any:
    """SGLang's MoE layer with the checkpoint's router; its experts are allocated and never touched."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE
    from transformers import PretrainedConfig

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        moe = DeepseekV2MoE(PretrainedConfig.from_dict(model), layer)
    finally:
        torch.set_default_dtype(before)
    weight, bias = (checkpoint.make(spec) for spec in checkpoint.router_specs(model, layer))
    moe.gate.weight.copy_(weight)
    moe.gate.e_score_correction_bias.copy_(bias)
    return moe


def hidden_states(model: dict, rows: int) -> torch.Tensor:
    """[rows, hidden] bf16: embeddings of the checkpoint as its first norm leaves them."""
    *_, last = checkpoint.shards(model)
    table = checkpoint.make(next(spec for spec in last if "embed_tokens" in spec.name))[:rows].float()
    return (table * table.square().mean(1, keepdim=True).rsqrt()).bfloat16()


def check_rows(layer: int, stock: Any, hooked: Any, hidden: torch.Tensor) -> RowCheck:
    """Route ``hidden`` [rows, hidden] through both layers and judge what comes out."""
    from sglang_router_ext.plugin.problem import problem_of

    weight, bias = hooked.gate.weight, hooked.gate.e_score_correction_bias
    problem = problem_of(weight, hooked.topk.topk_config, hidden.dtype)
    truth = reference.route(problem, hidden, weight, bias)

    logits = hooked.gate(hidden)
    plain = logits.float().clone()  # carries no plan, so that SGLang selects from it
    ours = hooked.topk(hidden, logits)
    native = stock.topk(hidden, plain)
    if logits.dtype is torch.float32:
        want, given, ours_as, native_as = truth, plain, TABLE["pair"], TABLE["host"]
    else:  # the gate is SGLang's, which rounds on a CPU: the selection alone is judged, by these logits
        want, given, ours_as = reference.select(problem, plain, bias), None, TABLE["warp_select"]
        native_as = msgspec.structs.replace(ours_as, target="")  # its ids are in no order
    found = compare(Result(given, ours.topk_ids, ours.topk_weights), want, problem, ours_as)
    if not torch.equal(ours.topk_ids.long(), want.ids):
        found.append("ids are not the oracle's, in its order")
    differences = compare(Result(given, native.topk_ids, native.topk_weights), want, problem, native_as)

    rounded = stock.topk(hidden, stock.gate(hidden)).topk_ids
    narrow = reference.select(problem, truth.logits, checkpoint.rounded(bias)).ids
    return RowCheck(layer, len(hidden), found, differences, moved(rounded, truth.ids), moved(narrow, truth.ids))


def moved(ids: torch.Tensor, others: torch.Tensor) -> int:
    """Rows whose sets of experts differ; both [rows, topk]."""
    return int((ids.long().sort(1).values != others.long().sort(1).values).any(1).sum())
