"""Times our designs and their peers on one case, row count by row count, in one process. Right first: see ``clock.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from sglang_router_ext.agreement import compare
from sglang_router_ext.bench import machine
from sglang_router_ext.bench.cases import Case
from sglang_router_ext.bench.clock import RAISED, REPLAYS, Clock, Timing, Variant
from sglang_router_ext.bench.inputs import Inputs, random_inputs
from sglang_router_ext.bench.launch import chain, launch, run_at_once, truth
from sglang_router_ext.bench.names import short
from sglang_router_ext.bench.peers import PEERS, Missing, note
from sglang_router_ext.bench.record import BenchRecord, Identity, current_hash
from sglang_router_ext.choose import reasons
from sglang_router_ext.contract import STAGES, ContractError, Gpu, Problem
from sglang_router_ext.designs import DESIGNS, PLAN_STAGE, SELECT_AND_PLAN, Design, Numerics
from sglang_router_ext.reference import Truth

DEFAULT_ROWS = (1, 2, 4, 6, 8, 16, 18, 32, 64, 96, 256, 1024, 8192)
CACHES = ("cold", "warm")
BUILD_ROWS = 16
"""Few enough for every design, enough for the count-and-sort kernels of ``sglang-pair+align``."""
COMPILED_PEERS = ("sglang-gemm", "sglang-pair+align", "flashinfer-gemm")
NOT_CHAINED = ("naive",)
"""Gates that no one would put before a selection of ours."""


_raised: dict[tuple[str, str], str] = {}
"""Peers that raised, by case and name, and what: not tried again, because it may be a build that takes a minute to fail."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one design or peer: a time, or words on why there is none."""

    case: str
    rows: int
    cache: str
    design: str
    stages: str
    """``gate``, ``selection``, ``selection+plan``, ``gate+selection``, ``gate+selection+plan`` or ``floor``."""
    ours: bool
    timing: Timing | None = None
    wrong: list[str] = []
    """One of ours raised or its result is wrong: a failure of the whole run."""
    missing: str = ""
    """Why one of ours does not cover this, or why there is no such peer here: absent, raising, or itself wrong."""
    note: str = ""
    kernels: list[tuple[str, float, float]] = []
    """Name, start and end (microseconds) of each kernel in a typical replay; empty for what was recorded."""

    @property
    def median_us(self) -> float:
        """Only of a line with a time."""
        assert self.timing is not None
        return self.timing.median_us


class _Candidate(NamedTuple):
    line: Line
    variant: Variant


class Batch(NamedTuple):
    """One row count of a case on the GPU, with the oracle of each set of stages (words where it has none)."""

    case: Case
    inputs: Inputs
    truths: dict[tuple[str, ...], Truth | str]

    @classmethod
    def make(cls, case: Case, rows: int, device: torch.device | str) -> Batch:
        inputs = random_inputs(case.problem, rows, device=device)
        truths: dict[tuple[str, ...], Truth | str] = {}
        for stages in (("gate",), ("selection",), SELECT_AND_PLAN, STAGES, (*STAGES, PLAN_STAGE)):
            try:
                truths[stages] = truth(stages, case.problem, inputs)
            except ContractError as error:
                truths[stages] = f"no oracle to judge it by: {error}"
        return cls(case, inputs, truths)


def chained(gate: Design, selection: Design) -> Design:
    """Two rows of the table, one after the other, as one thing to time."""
    return msgspec.structs.replace(
        gate,
        name=f"{gate.name}+{selection.name}",
        stages=(*gate.stages, *selection.stages),
        numerics=Numerics.NEAR_TIE,
        row_stable=gate.row_stable and selection.row_stable,
        sources=(*gate.sources, *selection.sources),
    )


def _ours(batch: Batch, gpu: Gpu | None, line: dict[str, Any]) -> Iterator[_Candidate | Line]:
    """Every row of the table, and every gate before every selection."""
    problem, inputs, rows = batch.case.problem, batch.inputs, len(batch.inputs.hidden)
    table = [design for design in DESIGNS if design.target]
    refused = {design.name: reasons(design, problem, rows, gpu) for design in table}

    def candidate(design: Design, call: Any) -> _Candidate | Line:
        want = batch.truths[design.stages]
        entry = Line(**line, design=design.name, stages="+".join(design.stages), ours=True)
        if isinstance(want, str):
            return msgspec.structs.replace(entry, missing=want)
        return _Candidate(entry, Variant(_label(entry), call, lambda result: compare(result, want, problem, design)))

    for design in table:
        if refused[design.name]:
            text = "; ".join(refused[design.name])
            yield Line(**line, design=design.name, stages="+".join(design.stages), ours=True, missing=text)
        else:
            yield candidate(design, lambda design=design: launch(design, problem, inputs))
            if design.plans and "gate" in design.stages:
                alone = msgspec.structs.replace(design, stages=STAGES)
                yield candidate(alone, lambda design=design: launch(design, problem, inputs, None))
    runnable = [design for design in table if not refused[design.name]]
    for gate in (d for d in runnable if d.stages == ("gate",) and d.name not in NOT_CHAINED):
        for selection in (d for d in runnable if "gate" not in d.stages):
            call = lambda gate=gate, selection=selection: chain((gate, selection), problem, inputs)  # noqa: E731
            yield candidate(chained(gate, selection), call)


def _theirs(batch: Batch, line: dict[str, Any]) -> Iterator[_Candidate | Line]:
    problem, inputs = batch.case.problem, batch.inputs
    for peer in PEERS.values():
        entry = Line(**line, design=peer.name, stages="+".join(peer.stages) or "floor", ours=False)
        want = batch.truths[peer.stages or ("gate",)]
        try:
            if isinstance(want, str):
                raise Missing(want)
            if (batch.case.name, peer.name) in _raised:
                raise Missing(_raised[batch.case.name, peer.name])
            call = peer.prepare(problem, inputs)
            entry = msgspec.structs.replace(entry, note=note(peer.name, problem, len(inputs.hidden)))
        except Missing as reason:
            yield msgspec.structs.replace(entry, missing=str(reason))
            continue
        except Exception as error:  # another release of a library: this peer is missing, the others are not
            yield msgspec.structs.replace(entry, missing=f"{type(error).__name__}: {error}")
            continue
        judge = lambda result, peer=peer, want=want: peer.judge(result, want, problem)  # noqa: E731
        yield _Candidate(entry, Variant(_label(entry), call, judge))


def _label(line: Line) -> str:
    return f"{line.stages}: {line.design}"


def measure(
    clock: Clock,
    case: Case,
    rows: int,
    gpu: Gpu | None,
    *,
    caches: Sequence[str] = CACHES,
    replays: int = REPLAYS,
    wanted: Callable[[Line], bool] = lambda line: True,
) -> list[Line]:
    """Time everything there is at one row count that is ``wanted``, interleaved, once per cache state."""
    batch = Batch.make(case, rows, clock.device)
    lines = []
    for cache in caches:
        fields = {"case": case.name, "rows": rows, "cache": cache}
        everything = [*_theirs(batch, fields), *_ours(batch, gpu, fields)]
        entries = [entry for entry in everything if wanted(entry.line if isinstance(entry, _Candidate) else entry)]
        variants = [entry.variant for entry in entries if isinstance(entry, _Candidate)]
        timed = clock.time(variants, cold=cache == "cold", replays=replays)
        for entry in entries:
            if isinstance(entry, _Candidate):
                timing, wrong, kernels = timed[entry.variant.name]
                found = {"wrong": wrong} if entry.line.ours else {"missing": "; ".join(wrong)}
                if not entry.line.ours and wrong and wrong[0].startswith(RAISED):
                    _raised[case.name, entry.line.design] = f"at {rows} rows it {wrong[0]}"
                shown = [(short(name), start / 1000, end / 1000) for start, end, name in kernels]
                lines.append(msgspec.structs.replace(entry.line, timing=timing, kernels=shown, **found))
            else:
                lines.append(entry)
    return lines


def build_ahead(case: Case, gpu: Gpu | None, device: torch.device | str, say: Callable[[str], None]) -> None:
    """Build the CUDA C++ that :func:`measure` launches for ``case``, several at a time. Errors wait for the measurement."""
    batch = Batch.make(case, BUILD_ROWS, device)
    fields = {"case": case.name, "rows": BUILD_ROWS, "cache": CACHES[0]}
    compiled = {design.name for design in DESIGNS if design.compiled}
    entries = [entry for entry in (*_ours(batch, gpu, fields), *_theirs(batch, fields)) if isinstance(entry, _Candidate)]
    run_at_once([entry.variant.call for entry in entries if entry.line.design in {*compiled, *COMPILED_PEERS}], say)


def recorded(times: Sequence[BenchRecord]) -> list[Line]:
    """What :func:`records` wrote, as :func:`measure` gave it."""
    return [
        Line(
            case=record.case,
            rows=record.rows,
            cache=record.cache,
            design=record.design,
            stages=record.stages,
            ours=bool(record.source_hash),
            timing=Timing(**{name: getattr(record, name) for name in Timing.__struct_fields__}),
            note=record.note,
        )
        for record in times
    ]


def records(lines: Sequence[Line], identity: Identity, problem: Problem) -> list[BenchRecord]:
    """The times among ``lines`` as records of one run."""
    clocks = machine.clocks()
    return [
        BenchRecord(
            **msgspec.structs.asdict(identity),
            case=line.case,
            experts=problem.experts,
            hidden=problem.hidden,
            topk=problem.topk,
            rows=line.rows,
            design=line.design,
            stages=line.stages,
            cache="cold" if line.cache == "cold" else "warm",
            **msgspec.structs.asdict(line.timing),
            correct=True,
            source_hash=(current_hash(line.design) or "") if line.ours else "",
            clocks=clocks,
            note=line.note,
        )
        for line in lines
        if line.timing is not None
    ]
