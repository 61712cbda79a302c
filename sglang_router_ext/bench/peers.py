"""What our designs are timed against, on the same inputs: PyTorch, SGLang's own kernels, FlashInfer's, and the floors.

A peer is a row of :data:`PEERS`. ``prepare`` imports what it needs and gives a function without arguments that launches it;
it raises :class:`Missing` with the reason where this machine or this problem has no such peer. Peers have tie and NaN rules
of their own, so they are judged on random inputs only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from sglang_router_ext.agreement import BF16_ROUNDING, Result, compare, logit_bound
from sglang_router_ext.bench import flush, machine
from sglang_router_ext.bench.inputs import Inputs, bias_of
from sglang_router_ext.contract import Problem
from sglang_router_ext.designs import PLAN_STAGE, Design, Numerics
from sglang_router_ext.reference import Truth

TINY_GEMM_MAX_ROWS = 16
"""``tiny_router_gemm_max_tokens`` of SGLang's MoEGate."""
ALIGN_BLOCK, ALIGN_BLOCK_MANY, ALIGN_MANY_ROWS = 16, 64, 1024
FLASHINFER_TINY_ROWS = 64


class Missing(RuntimeError):
    """This peer cannot run here; the text says why."""


class Aligned(NamedTuple):
    """A selection and its bookkeeping in SGLang's aligned-block form."""

    ids: torch.Tensor  # [rows, topk] int32
    weights: torch.Tensor  # [rows, topk] fp32
    sorted_token_ids: torch.Tensor  # [slots padded] int32
    expert_ids: torch.Tensor  # [blocks] int32, -1: no expert
    num_tokens_post_padded: torch.Tensor  # int32 [1] (or [2], of which the second is not used)


Stages = tuple[str, ...]
Call = Callable[[], Any]
Judge = Callable[[Any, Truth, Problem], list[str]]


class Peer(NamedTuple):
    """A row of the table of peers; ``stages`` empty: a floor."""

    name: str
    stages: Stages
    what: str
    prepare: Callable[[Problem, Inputs], Call]
    judge: Judge


def _import(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # an installed library may fail to import in many ways; all of them mean that it is missing
        raise Missing(f"{module}.{name}: {type(error).__name__}: {error}") from error


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Missing(reason)


def _logits_dtype(problem: Problem) -> torch.dtype:
    return getattr(torch, problem.logits_dtype)


# PyTorch


def _torch_selection(problem: Problem, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float()
    if problem.score == "softmax":
        scores, keys = torch.softmax(logits, -1), logits
    else:
        scores = torch.nn.functional.softplus(logits).sqrt() if problem.score == "sqrtsoftplus" else torch.sigmoid(logits)
        keys = scores if bias is None else scores + bias
    ids = torch.topk(keys, problem.topk, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    if problem.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * problem.scale if problem.scale != 1.0 else weights


def _plain(problem: Problem) -> None:
    """What the five lines of PyTorch are written for."""
    _require(problem.groups == 1, f"{problem.groups} expert groups: the five lines of PyTorch know none")
    _require(problem.shared == 0, f"{problem.shared} shared slots: the five lines of PyTorch know none")
    _require(not problem.reads_tokens, "experts or biases by token: the five lines of PyTorch know none")
    inside = problem.score == "softmax" and (problem.bias or problem.softcap > 0)
    _require(not inside, "a bias or softcap inside the softmax: the five lines of PyTorch know none")


def _naive(problem: Problem, inputs: Inputs) -> Call:
    _plain(problem)
    weight, bias = inputs.weight.float(), bias_of(problem, inputs)

    def call() -> Result:
        logits = (inputs.hidden.float() @ weight.t()).to(_logits_dtype(problem))
        return Result(logits, *_torch_selection(problem, logits, bias))

    return call


def _torch_bf16(problem: Problem, inputs: Inputs) -> Call:
    _plain(problem)
    _require(problem.weight_dtype == "bfloat16", f"{problem.weight_dtype} gate weight: takes bfloat16")
    bias = bias_of(problem, inputs)
    rounds, weight = problem.logits_dtype == "bfloat16", inputs.weight.t()

    def call() -> Result:
        logits = torch.mm(inputs.hidden, weight) if rounds else torch.mm(inputs.hidden, weight, out_dtype=torch.float32)
        return Result(logits, *_torch_selection(problem, logits, bias))

    return call


# SGLang


def _sglang_gate(problem: Problem, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """ReplicatedLinear's GEMM where logits are bf16; F.linear of fp32 weights, in TF32 as servers of GLM-4 and MiniMax-M2 have
    it; else MoEGate's choice: the tiny GEMM up to 16 rows, linear_bf16_fp32 above."""
    if problem.logits_dtype == "bfloat16":
        _require(problem.weight_dtype == "bfloat16", f"{problem}: SGLang has bf16 logits of bf16 gate weights only")
        return lambda: torch.nn.functional.linear(inputs.hidden, inputs.weight)
    if problem.weight_dtype == "float32":
        return machine.tf32(allowed=True)(lambda: torch.nn.functional.linear(inputs.hidden.float(), inputs.weight))
    tiny = "sglang.kernels.ops.gemm.tiny_gemm"
    fits = torch.cuda.get_device_capability(inputs.hidden.device)[0] >= 9 and _import(tiny, "can_use_tiny_gemm")(
        problem.experts, problem.hidden, max_m=TINY_GEMM_MAX_ROWS
    )
    if fits and len(inputs.hidden) <= TINY_GEMM_MAX_ROWS:
        gemm = _import(tiny, "tiny_gemm_bf16")
        return lambda: gemm(inputs.hidden, inputs.weight, out_dtype=torch.float32, max_m=TINY_GEMM_MAX_ROWS)
    linear = _import("sglang.kernels.ops.gemm.bf16_fp32", "linear_bf16_fp32")
    return lambda: linear(inputs.hidden, inputs.weight)


def _flashinfer_topk_takes(problem: Problem) -> bool:
    """The condition under which SGLang's biased_grouped_topk_gpu calls FlashInfer's fused_topk_deepseek."""
    per_group = problem.experts // problem.groups
    grouped_fits = per_group <= 32 and per_group * problem.groups_kept <= 128
    return (
        problem.score == "sigmoid"
        and problem.renormalize
        and problem.experts & (problem.experts - 1) == 0
        and problem.topk <= 8
        and problem.groups_kept * problem.groups >= problem.topk
        and (grouped_fits if problem.groups > 1 else problem.experts <= 384)
    )


def _sglang_takes(problem: Problem) -> None:
    """Raise :class:`Missing` where select_experts has no way to this selection, or one that is not timed here."""
    _require(problem.shared == 0, f"{problem.shared} shared slots: timed without")
    if problem.score == "sigmoid":
        _require(problem.bias, "no selection bias: timed with one where scores are sigmoids")
        return
    _require(problem.groups == 1, f"{problem.groups} expert groups: SGLang selects by groups from sigmoid scores only")
    if problem.score == "softmax":
        _require(not problem.bias, "a bias: SGLang's softmax selection reads none")
        _require(problem.softcap == 0, f"softcap {problem.softcap:g}: SGLang's softmax selection has none")
    else:
        _require(problem.bias or problem.hashed, "no selection bias: SGLang's sqrt-softplus selection wants one")


def _sglang_selection(problem: Problem, inputs: Inputs) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """What select_experts runs for the layer: FlashInfer's kernel for DeepSeek-V3's groups, else moe_fused_gate."""
    _sglang_takes(problem)
    if _flashinfer_topk_takes(problem) and importlib.util.find_spec("flashinfer") is not None:
        fused = _import("flashinfer.fused_moe", "fused_topk_deepseek")

        def flashinfer(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = logits.float()
            weights = logits.new_empty((len(logits), problem.topk))
            ids = torch.empty((len(logits), problem.topk), dtype=torch.int32, device=logits.device)
            groups = (problem.groups, problem.groups_kept, problem.topk)
            fused(logits, inputs.bias, *groups, problem.scale, weights, ids, launch_with_pdl=True)
            return ids, weights

        return flashinfer
    if problem.hashed:
        return _sglang_hash_selection(problem, inputs)
    gate = _import("sglang.kernels.ops.moe.moe_fused_gate", "moe_fused_gate")
    options: dict[str, Any] = {"scoring_func": problem.score, "renormalize": problem.renormalize}
    scaled = problem.scale != 1.0
    if problem.score != "softmax":
        options |= {"routed_scaling_factor": problem.scale, "apply_routed_scaling_factor_on_output": scaled}
    by_score: dict[str, dict[str, Any]] = {"sqrtsoftplus": {"sqrtsoftplus_log1p": problem.nan_first}}
    by_score["sigmoid"] = {"num_expert_group": problem.groups, "topk_group": problem.groups_kept}
    options |= by_score.get(problem.score, {})
    if (tokens := inputs.tokens) is not None:
        options |= {"bias_alt": tokens.image_bias, "input_ids": tokens.ids, "bias_alt_token_id": tokens.image}
    bias = bias_of(problem, inputs)

    def triton(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = gate(logits, bias, topk=problem.topk, **options)
        if problem.score == "softmax" and scaled:
            weights *= problem.scale  # fused_topk knows no factor, so select_experts multiplies
        return ids, weights

    return triton


def _sglang_hash_selection(problem: Problem, inputs: Inputs) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """HashTopK's kernel, which renormalises and knows sqrt-softplus scores only."""
    _require((problem.score, problem.renormalize, problem.scale) == ("sqrtsoftplus", True, 1.0), f"{problem}: not SGLang's")
    choose = _import("sglang.kernels.ops.moe.dsv4", "hash_topk")
    assert inputs.tokens is not None
    given = {"input_ids": inputs.tokens.ids.long(), "tid2eid": inputs.tokens.table, "routed_scaling_factor": problem.scale}
    return lambda logits: choose(router_logits=logits, **given)[::-1]


@functools.cache
def _align_module() -> ModuleType:
    """SGLang's wrapper, from its file alone: its package imports the whole engine."""
    spec = importlib.util.find_spec("sglang")
    _require(spec is not None and bool(spec.submodule_search_locations), "sglang is not installed")
    root = pathlib.Path(next(iter(spec.submodule_search_locations)))  # type: ignore[union-attr, arg-type]
    path = root / "srt/layers/moe/moe_runner/triton_utils/moe_align_block_size.py"
    file_spec = importlib.util.spec_from_file_location("sglang_moe_align_block_size", path)
    assert file_spec is not None and file_spec.loader is not None
    module = importlib.util.module_from_spec(file_spec)
    try:
        file_spec.loader.exec_module(module)
    except Exception as error:
        raise Missing(f"{path.name}: {type(error).__name__}: {error}") from error
    return module


@functools.cache
def aot_align_missing() -> str:
    """Why SGLang's prebuilt count-and-sort kernels do not load; "" where they do."""
    try:
        importlib.import_module("sgl_kernel")
    except Exception as error:
        return f"sgl_kernel: {type(error).__name__}: {error}"
    return ""


def _sglang_align(problem: Problem, rows: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The count-and-sort before the Triton and Marlin expert kernels. Where sgl_kernel does not load, the wrapper is asked for
    SGLang's JIT build of the same kernels, through the option that needs it; :func:`note` says so.
    """
    module = _align_module()
    block = ALIGN_BLOCK if rows < ALIGN_MANY_ROWS else ALIGN_BLOCK_MANY
    jit = rows * problem.topk > module.SMALL_NUMEL_LIMIT and bool(aot_align_missing())
    return lambda ids: module.moe_align_block_size(ids, block, problem.experts, return_inactive_prefix_count=jit)


def _sglang_gemm(problem: Problem, inputs: Inputs) -> Call:
    gate = _sglang_gate(problem, inputs)
    return lambda: Result(logits=gate())


def _sglang_topk(problem: Problem, inputs: Inputs) -> Call:
    select, logits = _sglang_selection(problem, inputs), inputs.logits.to(_logits_dtype(problem))
    return lambda: Result(None, *select(logits))


def _sglang_pair(problem: Problem, inputs: Inputs) -> Call:
    gate, select = _sglang_gate(problem, inputs), _sglang_selection(problem, inputs)

    def call() -> Result:
        logits = gate()
        return Result(logits, *select(logits))

    return call


def _sglang_pair_align(problem: Problem, inputs: Inputs) -> Call:
    gate, select = _sglang_gate(problem, inputs), _sglang_selection(problem, inputs)
    align = _sglang_align(problem, len(inputs.hidden))

    def call() -> Aligned:
        ids, weights = select(gate())
        return Aligned(ids, weights, *align(ids))

    return call


# FlashInfer


def _flashinfer_gemm(problem: Problem, inputs: Inputs) -> Call:
    rows = len(inputs.hidden)
    _require(rows <= FLASHINFER_TINY_ROWS, f"{rows} rows: timed up to {FLASHINFER_TINY_ROWS}")
    _require(problem.weight_dtype == "bfloat16", f"{problem.weight_dtype} gate weight: takes bfloat16")
    fits = problem.hidden % 64 == 0 and problem.experts % 16 == 0
    _require(fits, f"{problem}: takes hidden sizes in 64s and experts in 16s")
    gemm = _import("flashinfer.gemm", "tinygemm_bf16")

    def call() -> torch.Tensor:
        out = torch.empty((rows, problem.experts), dtype=torch.bfloat16, device=inputs.hidden.device)
        gemm(inputs.hidden, inputs.weight, out)
        return out

    return call


# Floors


def _floor_empty(problem: Problem, inputs: Inputs) -> Call:
    return lambda: flush.empty(inputs.bias)


def _floor_read(problem: Problem, inputs: Inputs) -> Call:
    scratch = torch.zeros(64, dtype=torch.int32, device=inputs.weight.device)
    return lambda: flush.read(inputs.weight, scratch)


_GATE: Stages = ("gate",)
_SELECTION: Stages = ("selection",)
_BOTH: Stages = ("gate", "selection")
_PLANNED: Stages = (*_BOTH, PLAN_STAGE)

# Judges. ``chain`` 1 is the longest chain of additions there can be, so the bound suits any order of summation.


def _standard(stages: Stages, numerics: Numerics) -> Design:
    return Design(name="peer", stages=stages, target="", what="", chain=1, numerics=numerics, row_stable=False)


def _judge_result(stages: Stages, numerics: Numerics = Numerics.NEAR_TIE) -> Judge:
    standard = _standard(stages, numerics)

    def judge(result: Result, truth: Truth, problem: Problem) -> list[str]:
        ids = None if result.ids is None else result.ids.int()
        logits = None if result.logits is None else result.logits.float()
        return compare(result._replace(logits=logits, ids=ids), truth, problem, standard)

    return judge


def _judge_aligned(result: Aligned, truth: Truth, problem: Problem) -> list[str]:
    found = _judge_result(_SELECTION)(Result(None, result.ids, result.weights), truth, problem)  # the logits are not kept
    rows = len(result.ids)
    block = ALIGN_BLOCK if rows < ALIGN_MANY_ROWS else ALIGN_BLOCK_MANY
    ids = result.ids.flatten().long()
    counts = torch.bincount(ids, minlength=problem.experts)
    want = int(((counts + block - 1) // block * block).sum())
    got = int(result.num_tokens_post_padded[0])
    if got != want:
        return [*found, f"num_tokens_post_padded: got {got}, wanted {want}"]
    slots = result.sorted_token_ids[:got].long()
    owners = result.expert_ids[: got // block].long().repeat_interleave(block)
    real = slots < len(ids)
    if not torch.equal(slots[real].sort().values, torch.arange(len(ids), device=ids.device)):
        found.append("sorted_token_ids: not every slot stands there exactly once")
    elif not torch.equal(ids[slots[real]], owners[real]):
        found.append("expert_ids: a slot stands in the block of another expert")
    return found


def _judge_bf16(logits: torch.Tensor, truth: Truth, problem: Problem) -> list[str]:
    allowed = logit_bound(problem, truth, _standard(_GATE, Numerics.LOGIT_BOUND)) + BF16_ROUNDING * truth.logits.abs()
    wrong = int(((logits.double() - truth.logits).abs() > allowed).sum() + logits.isnan().sum())
    return [f"{wrong} logits beyond the rounding of bf16"] if wrong else []


def _judge_nothing(result: None, truth: Truth, problem: Problem) -> list[str]:
    return []


PEERS = {
    peer.name: peer
    for peer in (
        Peer("floor-empty", (), "an empty kernel of one block", _floor_empty, _judge_nothing),
        Peer("floor-read", (), "a kernel that only reads the gate weight", _floor_read, _judge_nothing),
        Peer("naive", _BOTH, "five lines of PyTorch in fp32", _naive, _judge_result(_BOTH)),
        Peer("torch-bf16", _BOTH, "the same after a bf16 GEMM with fp32 output", _torch_bf16, _judge_result(_BOTH)),
        Peer("sglang-gemm", _GATE, "SGLang's gate", _sglang_gemm, _judge_result(_GATE)),
        Peer("sglang-topk", _SELECTION, "SGLang's selection", _sglang_topk, _judge_result(_SELECTION, Numerics.EXACT_IDS)),
        Peer("sglang-pair", _BOTH, "SGLang's gate and selection", _sglang_pair, _judge_result(_BOTH)),
        Peer("sglang-pair+align", _PLANNED, "the same and moe_align_block_size", _sglang_pair_align, _judge_aligned),
        Peer("flashinfer-gemm", _GATE, "FlashInfer's tinygemm_bf16; bf16 logits", _flashinfer_gemm, _judge_bf16),
    )
}


def note(peer: str, problem: Problem, rows: int) -> str:
    """What a reader of this peer's time must know; "" for nothing."""
    if peer == "flashinfer-gemm":
        return "bf16 logits"
    parts = ["TF32"] if problem.weight_dtype == "float32" and "gate" in PEERS[peer].stages and peer.startswith("sglang") else []
    if peer == "sglang-pair+align" and rows * problem.topk > _align_module().SMALL_NUMEL_LIMIT and aot_align_missing():
        parts.append(f"count-and-sort from SGLang's JIT ({aot_align_missing()})")
    return "; ".join(parts)
