"""Which designs run for a layer at a row count, and why the others do not. Pure: no torch, no GPU.

``reasons`` gives every cause for not running a design, as text; covering a case means having no reason. There is no other
``if`` about coverage anywhere: launchers re-check and raise, they never fall back.
"""

from __future__ import annotations

import msgspec

from sglang_router_ext.backends import BACKENDS, GATE_MODES, GATES
from sglang_router_ext.contract import STAGES, Gpu, Problem, expect
from sglang_router_ext.designs import DESIGNS, SELECT_AND_PLAN, TABLE, Design, Rows

BATCHED = "deterministic inference: a row's bits depend on its batch, or other batches take another design"
HASH_LAYER = "a hash layer, where a table of tokens names the experts: takes layers that rank their experts"
NO_HASH_LAYER = "not a hash layer: takes only layers where a table of tokens names the experts"
ROUNDED = "logits of SGLang's own gate in its weight's type: takes float32"
ON_TRIAL = "on trial: runs only where it is named"
GROUPED = tuple(128 * width for width in (1, 2, 3, 4, 7, 8))
"""Experts of routers with groups: all warps of a team that owns a row are full then (see ``selection/warp_select.py``)."""
ORDER = tuple(
    design.name
    for design in sorted(DESIGNS, key=lambda design: (-len(design.stages), design.stages != ("selection",)))
    if design.name != "host"
)
"""In which designs are asked: longest stage cover first, a selection before a gate, then as the table has them."""


class Tuned(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Bands of one problem on one GPU that ``tune`` measured. At ``rows`` they stand in place of the table's, of every design:
    one that is not among them was fastest nowhere there. Of other row counts they say nothing. See ``tuned.py``.
    """

    bands: tuple[tuple[str, tuple[Rows, ...]], ...]
    """Where the experts take a plan."""
    bands_without_plan: tuple[tuple[str, tuple[Rows, ...]], ...]
    rows: Rows
    """From the smallest to the largest row count that was measured."""

    def of(self, design: str, *, plan: bool) -> tuple[Rows, ...]:
        """Where ``design`` is chosen without being named."""
        return dict(self.bands if plan else self.bands_without_plan).get(design, ())


def unmeasured(design: Design, problem: Problem, gpu: Gpu) -> list[str]:
    """What the bands of the table do not speak of, as reasons; empty: they say where ``design`` is fastest for ``problem``."""
    if gpu.name not in design.bands:
        return [f"not measured on {gpu.name}"]
    missing = []
    if "gate" in design.stages and problem.weight_dtype not in design.measured_dtypes:
        missing.append(f"{problem.weight_dtype} gate weight")
    if "selection" in design.stages and problem.score not in design.measured_scores:
        missing.append(f"{problem.score} scores")
    if design.stages == ("gate",) and problem.logits_dtype == "bfloat16":
        missing.append("bfloat16 logits")
    if "selection" in design.stages and problem.groups > 1 and not design.measured_groups:
        missing.append(f"{problem.groups} expert groups")
    if problem.experts < design.measured_experts:
        missing.append(f"{problem.experts} experts")
    return [f"{what}: not measured on {gpu.name}" for what in missing]


def other_layers(design: Design, problem: Problem) -> list[str]:
    """Why ``design`` selects in no layer of this kind, whatever else is asked: hash layers have designs of their own."""
    if "selection" not in design.stages or design.hashed == problem.hashed:
        return []
    return [HASH_LAYER if problem.hashed else NO_HASH_LAYER]


def groups_refused(design: Design, problem: Problem) -> str | None:
    """Why ``design`` does not select by the groups of ``problem``, or None: lanes of a warp share a group, warps do not."""
    if problem.groups == 1:
        return None
    if problem.score == "softmax":
        return f"{problem.groups} expert groups with softmax scores"
    size = problem.experts // problem.groups
    if design.group_experts != size or problem.experts not in GROUPED:
        return f"{problem.groups} expert groups of {size}"
    return (
        f"top-{problem.topk} of {problem.groups_kept} groups of {size}" if problem.topk > size * problem.groups_kept else None
    )


def reasons(
    design: Design,
    problem: Problem,
    rows: int,
    gpu: Gpu | None,
    *,
    named: bool = True,
    plan: bool = True,
    tuned: Tuned | None = None,
) -> list[str]:
    """Every reason why ``design`` does not run; empty: it runs. ``named``: the user asked for it, so no band is needed.
    ``plan``: the experts behind it take one. ``tuned``: bands that stand in place of the table's, at the rows that they are of.
    """
    if design.name == "host":
        return []
    if other := other_layers(design, problem):
        return other  # nothing else about it matters then
    if tuned is not None and rows not in tuned.rows:
        tuned = None
    found = []

    def refuse(bad: bool, text: str) -> None:
        if bad:
            found.append(text)

    if gpu is None:
        found.append("no CUDA GPU")
    elif design.archs is not None:
        refuse(gpu.arch not in design.archs, f"sm_{gpu.arch}: built for {design.archs_text}")
    if gpu is not None and gpu.processors is not None:
        few = gpu.processors < design.min_processors
        refuse(few, f"{gpu.processors} multiprocessors: takes {design.min_processors} or more")
    refuse(rows not in design.rows, f"{rows} rows: takes {design.rows}")
    if design.max_experts is not None:
        refuse(problem.experts > design.max_experts, f"{problem.experts} experts: takes at most {design.max_experts}")
    if "gate" in design.stages:
        refuse(
            problem.hidden % design.hidden_multiple != 0,
            f"hidden {problem.hidden}: takes multiples of {design.hidden_multiple}",
        )
        if design.max_hidden is not None:
            refuse(problem.hidden > design.max_hidden, f"hidden {problem.hidden}: takes at most {design.max_hidden}")
        refuse(problem.hidden_dtype != "bfloat16", f"{problem.hidden_dtype} hidden states: takes bfloat16")
        refuse(
            problem.weight_dtype not in design.weight_dtypes,
            f"{problem.weight_dtype} gate weight: takes {' or '.join(design.weight_dtypes)}",
        )
    if "selection" in design.stages:
        refuse(design.stages == SELECT_AND_PLAN and not plan, "the experts take no plan")
        if design.max_topk is not None:
            refuse(
                problem.slots > design.max_topk, f"{problem.slots} slots: takes at most top-{design.max_topk}, shared included"
            )
        refuse(problem.score not in design.scores, f"{problem.score} scores: takes {' or '.join(design.scores)}")
        refuse(problem.image_bias and not design.image_bias, "a bias for image tokens: takes one for all")
        unbiased = not problem.bias and problem.score != "softmax" and not problem.hashed
        refuse(unbiased, "no selection bias: takes routers with one")
        refuse(problem.bias and problem.bias_dtype != "float32", f"{problem.bias_dtype} bias: takes float32")
        groups = groups_refused(design, problem)
        takes = f"groups of {design.group_experts}" if design.group_experts else "ungrouped selection"
        refuse(groups is not None, f"{groups}: takes {takes}")
    if not named:
        refuse(design.status != "on", ON_TRIAL)
        if gpu is not None and design.status == "on":
            if tuned is None:
                found += unmeasured(design, problem, gpu)
                without = design.plans and not plan
                bands = (design.bands_without_plan if without else design.bands).get(gpu.name, ())
            else:
                without, bands = not plan, tuned.of(design.name, plan=plan)
            text = (", ".join(map(str, bands)) or "none") + (" without a plan" if without else "")
            known = tuned is not None or gpu.name in design.bands
            where = "measured" if tuned is None else "tuned here and"
            refuse(known and not any(rows in band for band in bands), f"{rows} rows: {where} fastest at {text}")
    return found


def in_force(problem: Problem, gate: str) -> tuple[Problem, str]:
    """``problem`` with the logits that ``SGLANG_ROUTER_EXT_GATE`` asks for, and what that says about the choice of a gate.

    A model that rounds its logits to bf16 keeps that, unless ``fp32`` or a design is asked for.
    """
    if gate in ("auto", "host"):
        return problem, gate
    return msgspec.structs.replace(problem, logits_dtype="float32"), "auto" if gate == "fp32" else gate


def never_deterministic(gate: str) -> str:
    """Why ``SGLANG_ROUTER_EXT_GATE`` = ``gate`` names a design that never runs in deterministic inference; "" if it may."""
    if gate in GATE_MODES or TABLE[gate].any_batch:
        return ""
    allowed = " | ".join(name for name in GATES if name in GATE_MODES or TABLE[name].any_batch)
    return f"got {gate}, which --enable-deterministic-inference rules out ({BATCHED}), allowed: {allowed}"


class Choice(msgspec.Struct, frozen=True):
    """The designs that run at one row count, and the reasons against every other candidate."""

    gate: str
    selection: str
    losers: dict[str, list[str]] = {}

    @property
    def fused(self) -> str | None:
        """The one design that covers both stages, if one does."""
        ours = self.gate == self.selection and self.gate != "host"
        return self.gate if ours else None

    def __str__(self) -> str:
        return self.gate if self.gate == self.selection else f"{self.gate} + {self.selection}"


def choose(
    problem: Problem,
    rows: int,
    gpu: Gpu | None,
    *,
    backend: str | None,
    gate: str = "auto",
    unavailable: dict[str, str] | None = None,
    plan: bool = True,
    tuned: Tuned | None = None,
    deterministic: bool = False,
) -> Choice:
    """The design of each stage at ``rows`` rows: longest stage cover first, gates with a band before those that are only named,
    then the order of the table; else ``host``.

    A backend's designs count as named for a selection, and for the gate in front of one. A gate before SGLang's own selection
    needs a band, whatever the backend: with nothing but the GEMM replaced, an unmeasured one may well lose.

    Pass the *global* row count, so that ranks agree. ``backend`` None is a stock backend: no selection of ours. ``gate``
    is ``SGLANG_ROUTER_EXT_GATE`` and overrides the backend's gate. ``unavailable`` (design -> reason) takes out designs that
    this machine cannot build. ``plan``: the experts take the plan of a design that makes one. ``tuned``: bands of ``problem``
    on ``gpu`` that stand in place of the table's, at the rows that they are of. ``deterministic``: no row may depend on its
    batch, so that one design has all row counts, whether or not it is the fastest at each.

    A model that rounds its logits to bf16 has no others behind SGLang's own gate, and selections alone take fp32.
    """
    choice = _choose(problem, rows, gpu, backend, gate, unavailable or {}, plan, tuned, deterministic)
    if problem.logits_dtype == "bfloat16" and choice.gate == "host" != choice.selection:
        alone = dict.fromkeys((d.name for d in DESIGNS if "selection" in d.stages and "gate" not in d.stages), ROUNDED)
        return _choose(problem, rows, gpu, backend, gate, {**alone, **(unavailable or {})}, plan, tuned, deterministic)
    return choice


def _choose(
    problem: Problem,
    rows: int,
    gpu: Gpu | None,
    backend: str | None,
    gate: str,
    unavailable: dict[str, str],
    plan: bool,
    tuned: Tuned | None,
    deterministic: bool,
) -> Choice:
    expect(backend is None or backend in BACKENDS, "backend", backend, " | ".join(BACKENDS))
    expect(gate in GATES, "SGLANG_ROUTER_EXT_GATE", gate, " | ".join(GATES))
    problem, gate = in_force(problem, gate)
    designs = BACKENDS[backend].designs if backend is not None else ()
    losers: dict[str, list[str]] = {}

    def runs(design: Design, *, named: bool) -> bool:
        if design.name not in losers:
            found = reasons(design, problem, rows, gpu, named=named or deterministic, plan=plan, tuned=tuned)
            if deterministic and not design.any_batch:
                found.append(BATCHED)
            if deterministic and not named and design.status != "on":
                found.append(ON_TRIAL)
            if deterministic:  # what goes on where it ends has its bits
                found += [unavailable[twin] for twin in design.twins if twin in unavailable]
            if design.name in unavailable:
                found.append(unavailable[design.name])
            if not found:
                return True
            losers[design.name] = found
        return False

    chosen = dict.fromkeys(STAGES, "host")
    if backend is not None:
        taken = {} if gate == "auto" else {"gate": f"SGLANG_ROUTER_EXT_GATE={gate}"}

        def late(design: Design) -> bool:  # a gate that is named, but not measured to be the fastest
            without = bool(designs) and design.stages == ("gate",)
            return without and bool(reasons(design, problem, rows, gpu, named=False, plan=plan, tuned=tuned))

        for design in sorted((TABLE[name] for name in ORDER), key=late):
            named = bool(designs) and (design.stages != ("gate",) or chosen["selection"] != "host")
            covered = [taken[stage] for stage in design.stages if stage in taken]
            if design.name == gate:
                continue
            if designs and design.name not in designs:
                losers[design.name] = [f"not part of {backend}"]
            elif other := other_layers(design, problem):
                losers[design.name] = other
            elif covered:
                losers[design.name] = [f"{covered[0]} covers its stage"]
            elif runs(design, named=named):
                chosen.update(dict.fromkeys(design.stages, design.name))
                taken.update(dict.fromkeys(design.stages, design.name))
    if gate not in ("auto", "host") and runs(TABLE[gate], named=True):
        chosen["gate"] = gate
    return Choice(chosen["gate"], chosen["selection"], losers)
