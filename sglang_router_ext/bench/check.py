"""Runs designs of the table on checks and says in words what is wrong. ``check``, the GPU tests and ``bench`` share it.

For each design and batch: the result against the oracle, the same bits again, the same bits for a row alone (where the table
promises it), and the same judgement of a CUDA graph that was captured before its inputs were there. Every buffer that a
design allocates holds junk first, so an element that nobody wrote shows.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from sglang_router_ext import reference
from sglang_router_ext.agreement import Result, compare
from sglang_router_ext.bench.checks import Check, inputs_of
from sglang_router_ext.bench.clock import POISON_INT, capture, poison
from sglang_router_ext.bench.inputs import KINDS, Inputs
from sglang_router_ext.bench.launch import ALIGNED, chain, launch, least_form, run_at_once, truth
from sglang_router_ext.bench.record import CheckRecord, Identity
from sglang_router_ext.choose import reasons
from sglang_router_ext.contract import ContractError, Gpu, PlanForm, Problem
from sglang_router_ext.designs import TABLE, Design
from sglang_router_ext.fused import words
from sglang_router_ext.reference import Truth

CHECKS_BETWEEN_FREES = 50
TILES = PlanForm(kind="tiles", block=8)
FIELDS = ("logits", "ids", "weights")
"""Of a :class:`Result`, those that one row has for itself."""


def plan_forms(design: Design, problem: Problem, rows: int) -> list[PlanForm | None]:
    """No plan, where ``design`` can leave it out, and plans of other forms than the usual one; which, goes with the row count,
    so that all come up.
    """
    if not design.plans:
        return []
    half = max(1, problem.experts // 2)
    forms = [
        TILES,
        PlanForm(kind="aligned", block=48, counts_elsewhere=True),
        PlanForm(kind="tiles", block=128, first_local=problem.experts - half, locals=half),
        PlanForm(kind="aligned", block=8, first_local=0, locals=half, counts_elsewhere=True),
        PlanForm(kind="aligned", block=128),
        PlanForm(kind="tiles", block=32, first_local=problem.experts // 3, locals=1),
        PlanForm(kind="aligned", block=64, first_local=half - 1, locals=problem.experts - half + 1),
    ]
    chosen = (least_form(design), forms[rows % len(forms)], forms[(rows + 3) % len(forms)])
    return [form for form in chosen if form != ALIGNED]


class GpuLost(RuntimeError):
    """The GPU itself reports an error, so nothing that runs after it would mean anything."""


class Outcome(NamedTuple):
    """What came of one design on one batch: it was refused, it was right (both lists empty), or it failed."""

    case: str
    check: str
    design: str
    refused: list[str]
    failures: list[str]


@contextlib.contextmanager
def junk_memory() -> Iterator[None]:
    """Inside, PyTorch fills new uninitialised tensors with NaN or the largest integer. Graphs captured inside do so too."""
    settings: Any = torch.utils.deterministic
    mode, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def examine(design: Design, problem: Problem, inputs: Inputs, want: Truth) -> list[str]:
    """Everything wrong with ``design`` on one batch, in words; empty: right."""
    with junk_memory():
        first = launch(design, problem, inputs)
        second = launch(design, problem, inputs)
        found = compare(first, want, problem, design)
        for form in plan_forms(design, problem, len(inputs.hidden)):
            again = launch(design, problem, inputs, form)
            found += [f"{form}: {line}" for line in (*compare(again, want, problem, design), *_differences(first, again))]
        if design.twins:
            twin = chain([TABLE[name] for name in design.twins], problem, inputs)
            if problem.logits_dtype == "bfloat16" and twin.logits is not None:  # a gate alone leaves them as they are
                twin = twin._replace(logits=twin.logits.bfloat16().float())
            found += [f"not what {'+'.join(design.twins)} gives: {line}" for line in _differences(twin, first)]
        found += [f"not repeatable: {line}" for line in _differences(first, second)]
        if design.packs:
            found += _packing(design, problem, inputs, first)
        if design.row_stable and inputs.padding is None:
            found += _row_stability(design, problem, inputs, first)
        if design.graph_safe and inputs.hidden.is_cuda:
            found += [f"in a CUDA graph: {line}" for line in _graph(design, problem, inputs, want)]
    return found


def _differences(one: Result, other: Result) -> list[str]:
    """Fields whose bits differ, NaN included."""
    return [
        f"{name} differs at {(a.view(torch.int32) != b.view(torch.int32)).nonzero()[0].tolist()}"
        for name, a, b in zip(FIELDS, one[:3], other[:3], strict=True)
        if a is not None and b is not None and not torch.equal(a.view(torch.int32), b.view(torch.int32))
    ]


def _packing(design: Design, problem: Problem, inputs: Inputs, want: Result) -> list[str]:
    """The same result where packed ids are asked for too, and they are those of its ids and weights."""
    packed = torch.full((len(inputs.hidden), problem.slots), POISON_INT, dtype=torch.int32, device=inputs.hidden.device)
    result = launch(design, problem, inputs, least_form(design), packed)
    assert result.ids is not None and result.weights is not None
    wrong = packed != reference.pack(result.ids, result.weights)
    found = [f"packed differs at {wrong.nonzero()[0].tolist()}"] if wrong.any() else []
    return found + [f"with packed ids: {line}" for line in _differences(want, result)]


def _row_stability(design: Design, problem: Problem, inputs: Inputs, batch: Result) -> list[str]:
    rows = len(inputs.hidden)
    found = []
    for row in sorted({0, rows // 2, rows - 1}) if rows > 1 else ():
        one = slice(row, row + 1)
        tokens = None if inputs.tokens is None else inputs.tokens._replace(ids=inputs.tokens.ids[one])
        own = inputs._replace(hidden=inputs.hidden[one], logits=inputs.logits[one], tokens=tokens)
        alone = launch(design, problem, own)
        logits, ids, weights = (None if field is None else field[one] for field in batch[:3])
        here = Result(logits, ids, weights)
        found += [f"row {row} alone is another row: {line}" for line in _differences(alone, here)]
    return found


def _graph(design: Design, problem: Problem, inputs: Inputs, want: Truth) -> list[str]:
    """Capture on zeros, then put the inputs in place and replay twice. A kernel right before the launch writes the bias, which
    holds junk until then."""
    changing = (inputs.hidden, inputs.logits)
    bias = torch.empty_like(inputs.bias)

    def produce_and_launch() -> Result:
        torch.mul(inputs.bias, 1.0, out=bias)
        return launch(design, problem, inputs._replace(bias=bias))

    saved = [tensor.clone() for tensor in changing]
    stream = torch.cuda.Stream(inputs.hidden.device)
    try:
        for tensor in changing:
            tensor.zero_()
        graph, result = capture(produce_and_launch, stream)
    finally:
        for tensor, value in zip(changing, saved, strict=True):
            tensor.copy_(value)
    torch.cuda.synchronize(inputs.hidden.device)
    with torch.cuda.stream(stream):
        for _ in range(2):
            poison((*result[:3], bias, tuple(() if result.plan is None else result.plan.tensors.values())))
            graph.replay()
    torch.cuda.synchronize(inputs.hidden.device)
    return compare(result, want, problem, design)


def run(
    designs: Sequence[Design],
    checks: Iterable[Check],
    gpu: Gpu | None,
    device: torch.device | str,
    *,
    seed: int = 0,
) -> Iterator[Outcome]:
    """Every design on every check that concerns it; one that raises has failed, and the others go on.

    Raises :class:`GpuLost` where the GPU reports an error that no later launch can recover from.
    """
    on_gpu = torch.device(device).type == "cuda"
    for number, check in enumerate(checks):
        if on_gpu and number % CHECKS_BETWEEN_FREES == 0:
            torch.cuda.empty_cache()  # graphs keep pools of their own
        concerned = [design for design in designs if KINDS[check.kind].concerns(design.stages)]
        if check.problem.hashed:  # whose gate alone is any other layer's
            concerned = [design for design in concerned if design.stages != ("gate",)]
        refused = [reasons(design, check.problem, check.rows, gpu) for design in concerned]
        runnable = {design.stages for design, why_not in zip(concerned, refused, strict=True) if not why_not}
        if runnable:
            inputs = inputs_of(check, seed=seed, device=device)
            wanted = {stages: truth(stages, check.problem, inputs) for stages in runnable}
        for design, why_not in zip(concerned, refused, strict=True):
            failures = []
            if not why_not:
                try:
                    with words.passing_graphs():
                        failures = examine(design, check.problem, inputs, wanted[design.stages])
                except Exception as error:
                    failures = [f"raised {type(error).__name__}: {error}"]
                    _still_alive(device, f"{design.name} on {check.name}")
            yield Outcome(check.case, check.name, design.name, why_not, failures)


def concerning(design: Design, checks: Iterable[Check]) -> list[Check]:
    """Those of ``checks`` that differ, for ``design``, from checks on random inputs."""
    return [check for check in checks if KINDS[check.kind].concerns(design.stages)]


def summary(design: Design, outcomes: Sequence[Outcome], identity: Identity) -> CheckRecord:
    """All outcomes of one design as a record."""
    judged = [outcome for outcome in outcomes if outcome.design == design.name and not outcome.refused]
    return CheckRecord(
        **msgspec.structs.asdict(identity),
        kind="check",
        design=design.name,
        stages="+".join(design.stages),
        cases=len(judged),
        failures=sum(bool(outcome.failures) for outcome in judged),
        source_hash=design.source_hash,
    )


def _still_alive(device: torch.device | str, where: str) -> None:
    if torch.device(device).type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as error:
            raise GpuLost(f"{where}: {error}") from error


def build_ahead(
    designs: Sequence[Design], checks: Iterable[Check], gpu: Gpu | None, device: torch.device | str, say: Callable[[str], None]
) -> None:
    """Build what ``checks`` need, several at a time: launch each CUDA C++ design once a shape. Errors wait for the check."""
    jobs: dict[tuple[Any, ...], Callable[[], object]] = {}
    for check in checks:
        for design in designs:
            if design.compiled and not reasons(design, check.problem, 1, gpu) and check.kind in ("random", "odd-strides"):
                shape = (check.problem.experts, check.problem.hidden if "gate" in design.stages else 0)
                kind = check.kind if KINDS[check.kind].concerns(design.stages) else "random"
                one = msgspec.structs.replace(check, rows=1, kind=kind)
                for form in dict.fromkeys((least_form(design), ALIGNED, TILES)) if design.plans else (None,):
                    jobs[design.name, shape, kind, form] = functools.partial(_launch_once, design, one, device, form)
    run_at_once(list(jobs.values()), say)


def _launch_once(design: Design, check: Check, device: torch.device | str, form: PlanForm | None) -> None:
    launch(design, check.problem, inputs_of(check, device=device), form)


class BadInput(NamedTuple):
    """An argument outside the contract, and the name that the refusal must begin with."""

    name: str
    argument: str
    change: Callable[[Inputs], Inputs]
    vectors_only: bool = False
    unless: str = ""
    """A type of the gate weight, of designs that take this."""


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros((len(tensor), tensor.shape[1] + 8), dtype=tensor.dtype, device=tensor.device)
    return wide[:, 1 : tensor.shape[1] + 1]


def _column_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


BAD_INPUTS = (
    BadInput("hidden fp32", "hidden", lambda i: i._replace(hidden=i.hidden.float())),
    BadInput("hidden fp16", "hidden", lambda i: i._replace(hidden=i.hidden.half())),
    BadInput("hidden of one dimension", "hidden", lambda i: i._replace(hidden=i.hidden[0])),
    BadInput("hidden column-major", "hidden", lambda i: i._replace(hidden=_column_major(i.hidden))),
    BadInput("hidden on the CPU", "hidden", lambda i: i._replace(hidden=i.hidden.cpu())),
    BadInput("hidden misaligned", "hidden", lambda i: i._replace(hidden=_misaligned(i.hidden)), vectors_only=True),
    BadInput("weight fp16", "weight", lambda i: i._replace(weight=i.weight.half())),
    BadInput("weight bf16", "weight", lambda i: i._replace(weight=i.weight.bfloat16()), unless="bfloat16"),
    BadInput("weight fp32", "weight", lambda i: i._replace(weight=i.weight.float()), unless="float32"),
    BadInput("weight too narrow", "weight", lambda i: i._replace(weight=i.weight[:, :-8])),
    BadInput("weight column-major", "weight", lambda i: i._replace(weight=_column_major(i.weight))),
    BadInput("weight on the CPU", "weight", lambda i: i._replace(weight=i.weight.cpu())),
    BadInput("weight misaligned", "weight", lambda i: i._replace(weight=_misaligned(i.weight)), vectors_only=True),
    BadInput("logits bf16", "logits", lambda i: i._replace(logits=i.logits.bfloat16())),
    BadInput("logits of one dimension", "logits", lambda i: i._replace(logits=i.logits[0])),
    BadInput("logits of too few experts", "logits", lambda i: i._replace(logits=i.logits[:, :-1])),
    BadInput("logits column-major", "logits", lambda i: i._replace(logits=_column_major(i.logits))),
    BadInput("logits on the CPU", "logits", lambda i: i._replace(logits=i.logits.cpu())),
    BadInput("bias bf16", "bias", lambda i: i._replace(bias=i.bias.bfloat16())),
    BadInput("bias too short", "bias", lambda i: i._replace(bias=i.bias[:-1])),
    BadInput("bias strided", "bias", lambda i: i._replace(bias=i.bias.repeat(2)[::2])),
    BadInput("bias on the CPU", "bias", lambda i: i._replace(bias=i.bias.cpu())),
    BadInput("padding int64", "num_token_non_padded", lambda i: i._replace(padding=torch.ones_like(i.bias[:1]).long())),
    BadInput("padding of two", "num_token_non_padded", lambda i: i._replace(padding=torch.ones_like(i.bias[:2]).int())),
    BadInput("padding on the CPU", "num_token_non_padded", lambda i: i._replace(padding=torch.ones(1, dtype=torch.int32))),
)


def run_bad_inputs(
    designs: Sequence[Design], case: str, problem: Problem, gpu: Gpu | None, device: torch.device | str
) -> Iterator[Outcome]:
    """Every design on every :data:`BAD_INPUTS` that it reads: it must raise ContractError naming the argument. The gate weight
    of ``problem`` is of a type that the design takes.
    """
    rows = 4
    on_gpu = torch.device(device).type == "cuda"
    for design in designs:
        mine = msgspec.structs.replace(problem, weight_dtype=design.weight_dtypes[0])
        if reasons(design, mine, rows, gpu):
            continue
        inputs = inputs_of(Check(case=case, problem=mine, rows=rows), device=device)
        reads = {"hidden", "weight"} if "gate" in design.stages else {"logits"}
        reads |= {"bias", "num_token_non_padded"} if "selection" in design.stages else set()
        for bad in BAD_INPUTS:
            skip = (bad.vectors_only and design.hidden_multiple == 1) or ("CPU" in bad.name and not on_gpu)
            if bad.argument not in reads or bad.unless in design.weight_dtypes or skip:
                continue
            yield Outcome(case, f"{case} bad input: {bad.name}", design.name, [], _refusal(design, mine, inputs, bad))


def _refusal(design: Design, problem: Problem, inputs: Inputs, bad: BadInput) -> list[str]:
    try:
        launch(design, problem, bad.change(inputs))
    except ContractError as error:
        named = str(error).startswith(f"{bad.argument}:")
        return [] if named else [f"the refusal does not begin with {bad.argument!r}: {error}"]
    except Exception as error:
        return [f"raised {type(error).__name__}, wanted ContractError: {error}"]
    return ["was accepted, wanted ContractError"]
