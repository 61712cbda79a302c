"""What runs at a row count and what that choice rests on, as ``explain`` says it. Pure: no torch and no GPU."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from sglang_router_ext.choose import Choice, Tuned, choose, in_force, reasons, unmeasured
from sglang_router_ext.contract import Gpu, Problem
from sglang_router_ext.designs import DESIGNS, MOST_ROWS, TABLE, Design, Rows

SLOWER, SLOWER_HERE, UNMEASURED = "not fastest on record", "not fastest here", "not measured"
HOST_IS_BEST = {SLOWER_HERE: "tuned here", SLOWER: "on record", UNMEASURED: UNMEASURED}
"""What is known of a design that could run -> what that says of SGLang's path, which runs instead."""


class Explanation(msgspec.Struct, frozen=True):
    """The choice for a range of row counts."""

    rows: Rows
    choice: Choice
    measured: str = ""
    """What the choice rests on; see :func:`evidence`."""


def _verdict(design: Design, problem: Problem, rows: int, gpu: Gpu, bands: Tuned | None, *, plan: bool) -> str:
    """What bands say of ``design``, which can run."""
    if design.status != "on":
        return "on trial"
    if bands is not None and rows not in bands.rows:
        bands = None
    if not reasons(design, problem, rows, gpu, named=False, plan=plan, tuned=bands):
        return "on record" if bands is None else "tuned here"
    if bands is not None:
        return SLOWER_HERE
    far = rows > MOST_ROWS.get(gpu.name, 0)
    return UNMEASURED if far or unmeasured(design, problem, gpu) else SLOWER


def stage_evidence(
    problem: Problem,
    rows: int,
    gpu: Gpu,
    choice: Choice,
    bands: Tuned | None,
    *,
    plan: bool = True,
    deterministic: bool = False,
) -> dict[str, str]:
    """:func:`evidence` of gate and selection by themselves, where a design of ours runs."""
    found = {}
    for stage, name in (("gate", choice.gate), ("selection", choice.selection)):
        if name != "host":
            text = _verdict(TABLE[name], problem, rows, gpu, bands, plan=plan)
            why = "deterministic" if deterministic else "named"
            found[stage] = f"{why} ({text})" if text in (SLOWER, SLOWER_HERE, UNMEASURED) else text
    return found


def evidence(
    problem: Problem,
    rows: int,
    gpu: Gpu | None,
    choice: Choice,
    bands: Tuned | None,
    *,
    plan: bool = True,
    deterministic: bool = False,
) -> str:
    """What says that ``choice`` is a good one at ``rows`` rows: bands that were ``tuned here``, or those of the package (``on
    record``). A design without such a band runs because it is ``named`` or ``deterministic``, and what is known of it follows;
    one that is ``on trial`` has none anywhere. Of SGLang's path alone: what kept the designs out that could have run, and ``-``
    where none could, or they were kept out by something else. ``problem`` has the logits that are asked for.
    """
    if gpu is None:
        return "-"
    found = stage_evidence(problem, rows, gpu, choice, bands, plan=plan, deterministic=deterministic)
    if len(set(found.values())) > 1:
        return ", ".join(f"{stage} {text}" for stage, text in found.items())
    if found:
        return next(iter(found.values()))
    beaten = set()
    for name, why_not in choice.losers.items():
        asked = functools.partial(reasons, TABLE[name], problem, rows, gpu, plan=plan)
        if TABLE[name].status == "on" and not asked() and why_not == asked(named=False, tuned=bands):
            beaten.add(_verdict(TABLE[name], problem, rows, gpu, bands, plan=plan))
    return next((text for verdict, text in HOST_IS_BEST.items() if verdict in beaten), "-")


def explain_rows(
    problem: Problem,
    gpu: Gpu | None,
    backend: str | None,
    gate: str,
    rows: list[int] | None,
    unavailable: dict[str, str],
    *,
    plan: bool = True,
    bands: Tuned | None = None,
    deterministic: bool = False,
) -> list[Explanation]:
    """The choice at each of ``rows``, or at every range of row counts in which it is the same. ``bands``: tuned ones."""
    asked: dict[str, Any] = {"backend": backend, "gate": gate, "unavailable": unavailable, "tuned": bands}
    how = {"plan": plan, "deterministic": deterministic}

    def at(first: int, last: int | None) -> Explanation:
        choice = choose(problem, first, gpu, **(asked | how))
        return Explanation(Rows(first, last), choice, evidence(in_force(problem, gate)[0], first, gpu, choice, bands, **how))

    if rows is not None:
        return [at(count, count) for count in rows]
    known = [band for design in DESIGNS for band in (*design.bands.values(), *design.bands_without_plan.values())]
    known += [] if bands is None else [band for _, band in (*bands.bands, *bands.bands_without_plan)]
    spans = [*(design.rows for design in DESIGNS), *(span for band in known for span in band)]
    spans += [] if bands is None else [bands.rows]
    edges = {1} | {span.first for span in spans} | {span.last + 1 for span in spans if span.last is not None}
    starts = sorted(edges)
    found: list[Explanation] = []
    for first, following in zip(starts, [*starts[1:], None], strict=True):
        new = at(first, None if following is None else following - 1)
        if found and (str(found[-1].choice), found[-1].measured) == (str(new.choice), new.measured):
            found[-1] = msgspec.structs.replace(found[-1], rows=Rows(found[-1].rows.first, new.rows.last))
        else:
            found.append(new)
    return found
