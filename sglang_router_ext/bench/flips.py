"""Counts the rows that another batch size sends to other experts, or that it gives other bits.

SGLang's gate is one kernel up to 16 rows and another above, so a row's logits differ in their last bits by who else is in the
batch, and where two keys are nearly tied so do its experts: a flip. The same rows are cut into batches of each size, and what
a row gets in every size is held against what it gets in the first. Designs that are ``row_stable`` promise no difference, and
so does what a server with deterministic inference runs, whichever designs that are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from sglang_router_ext.agreement import Result
from sglang_router_ext.bench.inputs import Inputs, random_inputs
from sglang_router_ext.bench.launch import launch, truth
from sglang_router_ext.bench.peers import PEERS, Missing
from sglang_router_ext.choose import Choice, choose, reasons
from sglang_router_ext.contract import STAGES, Gpu, Problem, expect
from sglang_router_ext.designs import DESIGNS, TABLE

CHUNK = 2**15
"""Rows that are drawn at once, about."""
MOST_CHUNK = 2**16
EXAMINED = 1000
"""Flipped rows whose margin is asked of the oracle, per path and batch size."""
SGLANG = "sglang-pair"
CHOSEN_BY = "router_ext_single"
DETERMINISTIC = "deterministic"
"""The path of a server with --enable-deterministic-inference."""


class Path(NamedTuple):
    """A way through the router. ``route`` gives logits, ids and weights of the rows that it is given, in one batch."""

    name: str
    route: Callable[[Inputs], Result]
    row_stable: bool = False
    """Promised: a difference is a failure."""
    what: str = ""
    designs: str = ""
    """Those of it, joined by ``+``, where its name does not say so."""


class Flips(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one path that differ between two batch sizes. A row is in ``bits`` whatever differs."""

    path: str
    row_stable: bool
    designs: str = ""
    """As the path has it."""
    first: int
    """The batch size that ``batch`` is held against."""
    batch: int
    rows: int = 0
    bits: int = 0
    """Logits, ids or weights."""
    order: int = 0
    """The same experts in another order."""
    experts: int = 0
    """Another set of experts."""
    examined: int = 0
    """Of ``experts``, those whose margin was looked up."""
    margin: float | None = None
    """The largest gap between the last key taken and the first one left, in fp64, among those."""

    @property
    def broken(self) -> bool:
        return self.row_stable and self.bits > 0


class Counted(NamedTuple):
    """What came of all paths."""

    flips: list[Flips]
    missing: dict[str, str]
    """Path -> why there is no count of it."""


def rows_of(inputs: Inputs, which: slice | torch.Tensor) -> Inputs:
    """Some rows of a batch, as a batch of their own."""
    tokens = inputs.tokens
    if tokens is not None:
        tokens = tokens._replace(ids=tokens.ids[which])
    return inputs._replace(hidden=inputs.hidden[which], logits=inputs.logits[which], tokens=tokens)


def chunk_rows(batches: Sequence[int]) -> int:
    """Rows of a chunk: all batch sizes divide it, so that only the very last batch of a size may be smaller.

    Raises :class:`~sglang_router_ext.contract.ContractError` for batch sizes that have no such number within reason.
    """
    step = math.lcm(*batches)
    text = ",".join(map(str, batches))
    expect(step <= MOST_CHUNK, "batches", text, f"sizes whose least common multiple is at most {MOST_CHUNK}")
    return max(1, CHUNK // step) * step


def chunks(problem: Problem, rows: int, batches: Sequence[int], *, seed: int, device: torch.device | str) -> Iterator[Inputs]:
    """``rows`` random rows, chunk by chunk. Chunk n is drawn from ``seed + n``, with a gate weight and bias of its own."""
    size = chunk_rows(batches)
    for place, first in enumerate(range(0, rows, size)):
        yield random_inputs(problem, min(size, rows - first), seed=seed + place, device=device)


def sizes(rows: int, batches: Sequence[int]) -> list[int]:
    """Every row count that ``rows`` rows are cut into."""
    return sorted({*batches, *(rows % batch for batch in batches)} - {0})


def route(gate: str, selection: str, problem: Problem, batch: Inputs) -> Result:
    """``batch`` through two designs of the table, or through one that is both; ``host`` is SGLang's own kernel, which goes by
    the row count. Raises :class:`~sglang_router_ext.bench.peers.Missing` where there is none.
    """
    if gate == selection:
        return PEERS[SGLANG].prepare(problem, batch)() if gate == "host" else launch(TABLE[gate], problem, batch)
    gated = PEERS["sglang-gemm"].prepare(problem, batch)() if gate == "host" else launch(TABLE[gate], problem, batch)
    assert gated.logits is not None
    given = batch._replace(logits=gated.logits)
    chosen = PEERS["sglang-topk"].prepare(problem, given)() if selection == "host" else launch(TABLE[selection], problem, given)
    return chosen._replace(logits=gated.logits)


def paths(problem: Problem, counts: Sequence[int], gpu: Gpu | None) -> tuple[list[Path], dict[str, list[str]]]:
    """SGLang's router, what our backend would choose at each row count, also for a server with deterministic inference, and
    every row-stable way of ours that runs at all of ``counts``; and the reasons against what promises no flips and is left out.
    """
    promised = [design for design in DESIGNS if design.target and design.row_stable]
    against = {
        design.name: list(dict.fromkeys(text for count in counts for text in reasons(design, problem, count, gpu)))
        for design in promised
    }
    runs = [design for design in promised if not against[design.name]]
    ours = [(design.name, design.name) for design in runs if set(STAGES) <= set(design.stages)]
    gates = [design.name for design in runs if design.stages == ("gate",)]
    selections = [design.name for design in runs if "gate" not in design.stages]
    ours += [(gate, selection) for gate in gates for selection in selections]

    def fixed(gate: str, selection: str) -> Callable[[Inputs], Result]:
        return lambda batch: route(gate, selection, problem, batch)

    found = [Path(SGLANG, fixed("host", "host"), what="SGLang's gate and selection")]
    chosen = {count: choose(problem, count, gpu, backend=CHOSEN_BY) for count in counts}
    if any(choice.selection != "host" for choice in chosen.values()):
        what = f"{CHOSEN_BY}: {_at(chosen)}"
        changes = " (other designs at other row counts may flip rows)" if len({*map(str, chosen.values())}) > 1 else ""
        found.append(Path("as chosen", _as_chosen(problem, chosen), what=what + changes))
    alike = {count: choose(problem, count, gpu, backend=CHOSEN_BY, deterministic=True) for count in counts}
    used = [name for name in TABLE if any(name in (choice.gate, choice.selection) for choice in alike.values())]
    what = f"{CHOSEN_BY} with --enable-deterministic-inference: {_at(alike)}"
    if "host" in used:
        against[DETERMINISTIC] = [f"{what}; host is SGLang's deterministic kernel there, which is not among the peers"]
    else:
        found.append(Path(DETERMINISTIC, _as_chosen(problem, alike), True, what, "+".join(used)))
    names = ((gate if gate == selection else f"{gate}+{selection}", gate, selection) for gate, selection in ours)
    found += [Path(name, fixed(gate, selection), True, "row-stable") for name, gate, selection in names]
    return found, {name: texts for name, texts in against.items() if texts}


def _as_chosen(problem: Problem, chosen: Mapping[int, Choice]) -> Callable[[Inputs], Result]:
    def by_rows(batch: Inputs) -> Result:
        choice = chosen[len(batch.hidden)]
        return route(choice.gate, choice.selection, problem, batch)

    return by_rows


def _at(chosen: Mapping[int, Choice]) -> str:
    """Which choice at which row counts, in words."""
    found: dict[str, list[str]] = {}
    for count, choice in chosen.items():
        found.setdefault(str(choice), []).append(str(count))
    return "; ".join(f"{choice} at {', '.join(where)} rows" for choice, where in found.items())


def in_batches(one: Callable[[Inputs], Result], inputs: Inputs, size: int) -> Result:
    """All rows of ``inputs`` in batches of ``size``, the last of which may be smaller: logits [rows, experts] fp32, ids
    [rows, slots] int32 and weights [rows, slots] fp32. Wider types hold what narrower ones do, so none hides a difference.
    """
    parts: list[Any] = [one(rows_of(inputs, slice(first, first + size))) for first in range(0, len(inputs.hidden), size)]
    logits, ids, weights = (torch.cat(tensors) for tensors in list(zip(*parts, strict=True))[:3])
    return Result(logits.float(), ids.int(), weights.float())


def differences(one: Result, other: Result) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three [rows] bool: any bit differs; the same experts stand in another order; the set of experts is another."""
    assert one.ids is not None and other.ids is not None
    experts = (one.ids.sort(1).values != other.ids.sort(1).values).any(1)
    ids = (one.ids != other.ids).any(1)
    bits = ids.clone()
    for mine, its in ((one.logits, other.logits), (one.weights, other.weights)):
        assert mine is not None and its is not None
        bits |= (mine.view(torch.int32) != its.view(torch.int32)).any(1)
    return bits, ids & ~experts, experts


def _added(found: Flips, one: Result, other: Result, problem: Problem, inputs: Inputs) -> Flips:
    """``found`` and what differs between two results of ``inputs``."""
    bits, order, experts = differences(one, other)
    flipped = experts.nonzero()[: EXAMINED - found.examined, 0]
    margin = found.margin
    if len(flipped):
        margin = max(margin or 0.0, float(truth(STAGES, problem, rows_of(inputs, flipped)).margin.max()))
    return msgspec.structs.replace(
        found,
        rows=found.rows + len(bits),
        bits=found.bits + int(bits.sum()),
        order=found.order + int(order.sum()),
        experts=found.experts + int(experts.sum()),
        examined=found.examined + len(flipped),
        margin=margin,
    )


def count(
    ways: Sequence[Path],
    problem: Problem,
    drawn: Iterable[Inputs],
    batches: Sequence[int],
    say: Callable[[str], None] = lambda name: None,
) -> Counted:
    """Route every chunk of ``drawn`` by each of ``ways``, in batches of each size, and hold all sizes against the first one.

    ``say`` gets a path's name after each of its chunks. A path that raises has no count, but words.
    """
    first, *others = batches
    found = {
        way.name: [
            Flips(path=way.name, row_stable=way.row_stable, designs=way.designs, first=first, batch=batch) for batch in others
        ]
        for way in ways
    }
    missing: dict[str, str] = {}
    for inputs in drawn:
        for way in ways:
            if way.name not in missing:
                try:
                    at_first, *results = [in_batches(way.route, inputs, batch) for batch in batches]
                except Missing as reason:
                    missing[way.name] = str(reason)
                except Exception as error:  # another release of a library, a build that fails: the other paths go on
                    missing[way.name] = f"{type(error).__name__}: {error}"
                else:
                    pairs = zip(found[way.name], results, strict=True)
                    found[way.name] = [_added(before, at_first, result, problem, inputs) for before, result in pairs]
            say(way.name)
    return Counted([one for name, all_ in found.items() if name not in missing for one in all_], missing)
