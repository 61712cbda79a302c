"""One SGLang engine in a process of its own: ``python -m sglang_router_ext.demo.engine PLAN ANSWER``.

It starts, warms up, answers with the seconds that the start took, and then answers one :data:`Request` after the other: each
is a line of JSON on standard input, each answer the file ANSWER, which is there once it is whole. The end of the input ends
the process. ``worker.py`` is the only caller.
"""

from __future__ import annotations

import base64
import os
import pathlib
import random
import sys
import time
from typing import Any

import msgspec

from sglang_router_ext.demo.compare import Run

TOPS = 5
PROMPT_TOKENS = 16
SHORT, LONG = 8, 104
"""Tokens of the two generations whose difference in time is that of LONG - SHORT decode steps."""
HOLD = 1e4
"""Added to a token's logit so that it wins."""
PROFILED_TOKENS = 16
PROFILED_STEPS = PROFILED_TOKENS - 1
"""Decode steps in a profile: the first token comes from the prefill."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    arguments: dict[str, Any]
    """Of SGLang's Engine."""
    batches: list[int]
    """Sizes that will be asked for; each is run once before the first request."""
    tokens: int
    """To generate for each prompt that is compared."""
    vocabulary: int
    work: str
    """Folder for traces."""
    prompt_tokens: int = PROMPT_TOKENS


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Greedy tokens of ``sequences`` prompts, ``size`` at a time; the answer is a :class:`~.compare.Run`.

    ``shifted``: behind the first prompt of a batch comes a short one, so that the chunks of those after it end elsewhere. It
    comes second since a scheduler that is idle takes the first one alone.
    """

    size: int
    sequences: int
    shifted: bool = False


class Routed(msgspec.Struct, frozen=True, tag=True):
    """As :class:`Tokens`, with the experts of every token; the answer is :class:`Routes`."""

    size: int
    sequences: int


class Routes(msgspec.Struct, frozen=True):
    """Greedy tokens, and where SGLang's capture saw each token go."""

    tokens: list[list[int]]
    """[sequence][step]"""
    experts: list[bytes]
    """[sequence]: int32 ids of [row, layer, slot], layers without experts too. A row is a token that was read: all but the
    last."""


class Time(msgspec.Struct, frozen=True, tag=True):
    """Milliseconds of a decode step of ``size`` requests, by the clock, in one round."""

    size: int


class First(msgspec.Struct, frozen=True, tag=True):
    """Milliseconds to the first token of one prompt, which is served alone, by the clock of the caller."""

    number: int
    """Which of the prompts."""


class Profile(msgspec.Struct, frozen=True, tag=True):
    """A torch profiler trace of a prefill and the decode steps after it, GPU activity only; the answer is the file."""

    size: int
    tokens: int = PROFILED_TOKENS
    """Of each sequence; 1: the prefill alone."""


class Change(msgspec.Struct, frozen=True, tag=True):
    """Call ``function``, one of ``weights.py``, on the model; the answer is null. ``layouts``: it changes weights whose layout
    SGLang undoes before and makes again after."""

    function: str
    layouts: bool = True


class Paths(msgspec.Struct, frozen=True, tag=True):
    """What the plugin's counters saw since the start, a text for each path; none where it is not loaded."""


Request = Tokens | Routed | Time | First | Profile | Change | Paths
Answer = Run | Routes | list[str] | float | str | None


def prompts(plan: Plan, count: int) -> list[list[int]]:
    """The same for every engine: token ids from a fixed seed."""
    chosen = random.Random(7)
    return [[chosen.randrange(2, plan.vocabulary) for _ in range(plan.prompt_tokens)] for _ in range(count)]


class Session:
    """A started engine and the plan for it."""

    def __init__(self, plan: Plan) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self.plan = plan
        started = time.monotonic()
        self.engine = Engine(**plan.arguments)
        self.start_s = time.monotonic() - started

    def warm_up(self) -> None:
        """The first request of a kind compiles."""
        for size in self.plan.batches:
            self._generate(prompts(self.plan, size), SHORT)

    def answer(self, request: Request) -> Answer:
        match request:
            case Tokens():
                return self._tokens(request.size, request.sequences, shifted=request.shifted)
            case Routed():
                return self._routed(request.size, request.sequences)
            case Time():
                return self._step_ms(request.size)
            case First():
                return self._first_ms(request.number)
            case Profile():
                return self._profile(request.size, request.tokens)
            case Change():
                self._change(request.function, layouts=request.layouts)
                return None
            case Paths():
                return _paths()

    def _generate(
        self, batch: list[list[int]], tokens: int, *, tops: bool = False, held: bool = False, routed: bool = False
    ) -> list[dict]:
        """Exactly ``tokens`` greedy tokens for each prompt of ``batch``, which runs as one; ``routed``: with their experts.

        ``held``: the prompt's last token every time, whatever the model says. Engines whose near-ties fall differently part
        soon, and other tokens mean other experts, and more or fewer of them to read: their times would not compare.
        """
        wanted = {"return_logprob": True, "top_logprobs_num": TOPS} if tops else {}
        wanted |= {"return_routed_experts": True} if routed else {}
        greedy = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        held_to = [{"logit_bias": {str(prompt[-1]): HOLD}} if held else {} for prompt in batch]
        return self.engine.generate(input_ids=batch, sampling_params=[greedy | more for more in held_to], **wanted)

    def _tokens(self, size: int, sequences: int, *, shifted: bool) -> Run:
        answers: list[dict] = []
        for batch in self._batches(size, sequences):
            between = [batch[0][:PROMPT_TOKENS]] if shifted else []
            found = self._generate([*batch[:1], *between, *batch[1:]], self.plan.tokens, tops=True)
            answers += [*found[:1], *found[1 + len(between) :]]
        return Run(
            [answer["output_ids"] for answer in answers],
            [[{entry[1]: entry[0] for entry in step} for step in _tops(answer)] for answer in answers],
        )

    def _routed(self, size: int, sequences: int) -> Routes:
        batches = self._batches(size, sequences)
        answers = [one for batch in batches for one in self._generate(batch, self.plan.tokens, routed=True)]
        experts = [base64.b64decode(answer["meta_info"]["routed_experts"]) for answer in answers]
        return Routes([answer["output_ids"] for answer in answers], experts)

    def _batches(self, size: int, sequences: int) -> list[list[list[int]]]:
        listed = prompts(self.plan, sequences)
        return [listed[first : first + size] for first in range(0, sequences, size)]

    def _first_ms(self, number: int) -> float:
        prompt = prompts(self.plan, number + 1)[number]
        started = time.perf_counter()
        self._generate([prompt], 1)
        return (time.perf_counter() - started) * 1000

    def _step_ms(self, size: int) -> float:
        """The time that LONG tokens take more than SHORT ones, by step: prefill and start-up of a request cancel out."""
        batch, marks = prompts(self.plan, size), [time.perf_counter()]
        for tokens in (SHORT, LONG):
            self._generate(batch, tokens, held=True)
            marks.append(time.perf_counter())
        short, long = marks[1] - marks[0], marks[2] - marks[1]
        return (long - short) * 1000 / (LONG - SHORT)

    def _profile(self, size: int, tokens: int) -> str:
        folder = pathlib.Path(self.plan.work) / f"trace-{size}"
        before = {*folder.glob("*.trace.json.gz")}
        self.engine.start_profile(output_dir=str(folder), activities=["GPU"], with_stack=False, record_shapes=False)
        self._generate(prompts(self.plan, size), tokens, held=True)
        self.engine.stop_profile()
        (file,) = {*folder.glob("*.trace.json.gz")} - before
        return str(file)

    def _change(self, function: str, *, layouts: bool) -> None:
        steps: dict[str, Any] = {"begin_weight_update": self.engine.begin_weight_update} if layouts else {}
        steps["update_weights_from_tensor"] = lambda: self.engine.update_weights_from_tensor([], load_format=function)
        if layouts:
            steps["end_weight_update"] = self.engine.end_weight_update
        for name, step in steps.items():
            done, message = step()[:2]
            if not done:
                raise RuntimeError(f"{name} ({function}): {message}")


def _tops(answer: dict) -> list[list]:
    """[step][token] (log-probability, token id, ...)"""
    return answer["meta_info"]["output_top_logprobs"]


def _paths() -> list[str]:
    """From the status files of this engine's processes, which are of one session (of the operating system)."""
    from sglang_router_ext.plugin import counters

    time.sleep(2 * counters.PERIOD_S)  # a status file is so much behind
    mine = [status for status in counters.read_live() if os.getsid(status.identity.pid) == os.getsid(0)]
    listed = [count for status in mine for count in status.counts]
    return [f"{one.stage}: {one.design} x {one.calls}{f' ({one.reason})' if one.reason else ''}" for one in listed]


def main(plan_file: str, answer_file: str) -> None:
    session = Session(msgspec.json.decode(pathlib.Path(plan_file).read_bytes(), type=Plan))
    whole = pathlib.Path(answer_file)
    draft = whole.with_suffix(".draft")

    def put(answer: Answer) -> None:
        draft.write_bytes(msgspec.json.encode(answer))
        draft.replace(whole)

    try:
        session.warm_up()
        put(session.start_s)
        for line in sys.stdin:
            put(session.answer(msgspec.json.decode(line, type=Request)))
    finally:
        session.engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
