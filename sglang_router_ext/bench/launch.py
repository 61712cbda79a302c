"""Runs a row of the design table on a batch, and says what the oracle wants for it."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from sglang_router_ext import reference
from sglang_router_ext.agreement import Planned, Result
from sglang_router_ext.bench.inputs import Inputs, bias_of
from sglang_router_ext.build import BuildError
from sglang_router_ext.contract import PlanForm, Problem
from sglang_router_ext.designs import SELECT_AND_PLAN, Design
from sglang_router_ext.reference import Truth
from sglang_router_ext.route import launcher

BUILDERS = 16
ALIGNED = PlanForm(kind="aligned", block=16)
"""The plan that is asked of a design that makes one: that of Triton experts for few rows."""
_unbuilt: dict[tuple[str, int, int], BuildError] = {}


def launch(
    design: Design,
    problem: Problem,
    inputs: Inputs,
    form: PlanForm | None = ALIGNED,
    packed: torch.Tensor | None = None,
) -> Result:
    """``design``'s function on the inputs that its stages read; the fields of stages that it does not cover are None.

    ``form``: of the plan, where the design makes one; None: none. ``packed``: where packed ids go, of a design with
    any.

    A build that failed for a shape is not tried again: it raises the same :class:`~sglang_router_ext.build.BuildError`.
    """
    key = (design.name, problem.experts, problem.hidden)
    if key in _unbuilt:
        raise _unbuilt[key]
    try:
        return _launch(design, problem, inputs, form, packed)
    except BuildError as error:
        _unbuilt[key] = error
        raise


def _launch(design: Design, problem: Problem, inputs: Inputs, form: PlanForm | None, packed: torch.Tensor | None) -> Result:
    function, bias = launcher(design.name), bias_of(problem, inputs)
    if design.stages == ("gate",):
        return Result(logits=function(inputs.hidden, inputs.weight))
    more: dict[str, Any] = {"num_token_non_padded": inputs.padding}
    more |= {} if inputs.tokens is None else {"tokens": inputs.tokens}
    more |= {} if packed is None else {"packed": packed}
    more |= {"form": form} if design.plans else {}
    gates = "gate" in design.stages
    found = list(function(problem, *((inputs.hidden, inputs.weight) if gates else (inputs.logits,)), bias, **more))
    plan = found.pop() if design.plans else None
    logits, ids, weights = found if gates else (None, *found)
    return Result(logits, ids, weights, None if form is None or plan is None else Planned(form, plan))


def least_form(design: Design) -> PlanForm | None:
    """The least plan that can be asked of ``design``: none, where it can leave that out."""
    return ALIGNED if design.stages == SELECT_AND_PLAN else None


def chain(designs: Sequence[Design], problem: Problem, inputs: Inputs) -> Result:
    """The results of one stage after the other: a gate's logits are what the selection behind it reads."""
    logits = None
    for design in designs:
        result = launch(design, problem, inputs if logits is None else inputs._replace(logits=logits))
        logits = result.logits if logits is None else logits
    return result._replace(logits=logits)


def run_at_once(jobs: Sequence[Callable[[], object]], say: Callable[[str], None]) -> None:
    """Run ``jobs``, which spend their time waiting for compilers, several at a time. What they raise is for their next run."""
    with contextlib.suppress(ImportError):
        importlib.import_module("sglang.kernels.jit.utils")  # not first in many threads: its package imports itself in circles

    def run(job: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            job()

    start, done = time.monotonic(), 0
    with ThreadPoolExecutor(BUILDERS) as pool:
        for _ in pool.map(run, jobs):
            done += 1
            if done % 10 == 0 or done == len(jobs):
                say(f"built {done} of {len(jobs)} shapes, {time.monotonic() - start:.0f} s")


def truth(stages: tuple[str, ...], problem: Problem, inputs: Inputs) -> Truth:
    """The oracle for designs of ``stages``: from the hidden states, or from given logits for a selection alone.

    A gate knows nothing of scores and groups, so it is judged by the ungrouped sigmoid problem of its shape.
    """
    given: dict[str, Any] = {"num_token_non_padded": None if inputs.padding is None else int(inputs.padding)}
    if stages == ("gate",):
        plain = {"score": "sigmoid", "softcap": 0.0, "nan_first": False, "logits_dtype": "float32"}
        plain |= {"hashed": False, "image_bias": False, "groups": 1, "groups_kept": 1, "shared": 0}
        problem, bias = msgspec.structs.replace(problem, **plain), bias_of(problem, inputs)
    else:
        bias, given["named"] = reference.by_token(problem, bias_of(problem, inputs), inputs.tokens)
    if "gate" not in stages:
        return reference.select(problem, inputs.logits, bias, **given)
    return reference.route(problem, inputs.hidden, inputs.weight, bias, **given)
