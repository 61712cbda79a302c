"""One SGLang engine in a process of its own: ``python -m sglang_router_ext.demo.engine PLAN OUTCOME``.

It starts, says ``ready`` in its event file, waits for a line on standard input (so that two engines may start together and
yet be measured one after the other), does what the plan says, and writes the outcome. ``serve.py`` is the only caller.
"""

from __future__ import annotations

import pathlib
import random
import statistics
import sys
import time
from typing import Any

import msgspec

from sglang_router_ext.demo.compare import Run

TOPS = 5
PROMPT_TOKENS = 16
SHORT, LONG = 8, 72
"""Tokens of the two generations whose difference in time is that of LONG - SHORT decode steps."""
PROFILED_TOKENS = 16


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    arguments: dict[str, Any]
    """Of SGLang's Engine."""
    batches: list[int]
    sequences: int
    """Prompts that are compared, in batches of each size; 0: only times are wanted."""
    tokens: int
    repeats: int
    vocabulary: int
    changed: str | None
    """Folder with other selection biases, loaded at the end."""
    work: str
    """Folder for events and traces."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    start_s: float
    runs: dict[int, Run]
    """Batch size -> what was generated."""
    step_ms: dict[int, float]
    """Batch size -> milliseconds of a decode step, median of the repeats."""
    traces: dict[int, str]
    """Batch size -> profiler trace of a few decode steps."""
    changed: Run | None
    """As ``runs`` at the largest small batch, after loading ``changed``."""


def prompts(plan: Plan, count: int) -> list[list[int]]:
    """The same for every engine: token ids from a fixed seed."""
    chosen = random.Random(7)
    return [[chosen.randrange(2, plan.vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class Session:
    """A started engine and the plan for it."""

    def __init__(self, plan: Plan) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self.plan = plan
        self.work = pathlib.Path(plan.work)
        started = time.monotonic()
        self.engine = Engine(**plan.arguments)
        self.start_s = time.monotonic() - started

    def say(self, text: str) -> None:
        with (self.work / "events").open("a") as events:
            events.write(f"{text}\n")

    def generate(self, batch: list[list[int]], tokens: int, *, tops: bool = False) -> list[dict]:
        """Exactly ``tokens`` greedy tokens for each prompt of ``batch``, which runs as one."""
        wanted = {"return_logprob": True, "top_logprobs_num": TOPS} if tops else {}
        greedy = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        return self.engine.generate(input_ids=batch, sampling_params=greedy, **wanted)

    def run(self, size: int, sequences: int) -> Run:
        """Greedy tokens of ``sequences`` prompts, ``size`` at a time."""
        listed = prompts(self.plan, sequences)
        answers: list[dict] = []
        for first in range(0, sequences, size):
            answers += self.generate(listed[first : first + size], self.plan.tokens, tops=True)
        return Run(
            [answer["output_ids"] for answer in answers],
            [[{entry[1]: entry[0] for entry in step} for step in _tops(answer)] for answer in answers],
        )

    def step_ms(self, size: int) -> float:
        """The time that LONG tokens take more than SHORT ones, by step: prefill and start-up of a request cancel out."""
        batch, found = prompts(self.plan, size), []
        for _ in range(self.plan.repeats):
            marks = [time.perf_counter()]
            for tokens in (SHORT, LONG):
                self.generate(batch, tokens)
                marks.append(time.perf_counter())
            short, long = marks[1] - marks[0], marks[2] - marks[1]
            found.append((long - short) * 1000 / (LONG - SHORT))
        return statistics.median(found)

    def trace(self, size: int) -> str:
        """A torch profiler trace, GPU activity only, of a short generation."""
        folder = self.work / f"trace-{size}"
        self.engine.start_profile(output_dir=str(folder), activities=["GPU"], with_stack=False, record_shapes=False)
        self.generate(prompts(self.plan, size), PROFILED_TOKENS)
        self.engine.stop_profile()
        (file,) = folder.glob("*.trace.json.gz")
        return str(file)

    def load_changed(self, folder: str) -> None:
        done, message = self.engine.update_weights_from_disk(folder)[:2]
        if not done:
            raise RuntimeError(f"update_weights_from_disk({folder}): {message}")

    def outcome(self) -> Outcome:
        plan = self.plan
        for size in plan.batches:
            self.generate(prompts(plan, size), SHORT)  # the first request of a kind compiles
        runs, steps, traces = {}, {}, {}
        for size in plan.batches if plan.sequences else []:
            count = min(plan.sequences, 16 * size)
            self.say(f"{count} sequences in batches of {size}")
            runs[size] = self.run(size, count)
        for size in plan.batches:
            self.say(f"timing decode steps of {size}")
            steps[size] = self.step_ms(size)
        for size in plan.batches:
            self.say(f"profiling decode steps of {size}")
            traces[size] = self.trace(size)
        changed = None
        if plan.changed is not None:
            self.say("the same with changed selection biases")
            self.load_changed(plan.changed)
            size = changed_batch(plan.batches)
            changed = self.run(size, min(plan.sequences, 16 * size))
        return Outcome(start_s=self.start_s, runs=runs, step_ms=steps, traces=traces, changed=changed)


def _tops(answer: dict) -> list[list]:
    """[step][token] (log-probability, token id, ...)"""
    return answer["meta_info"]["output_top_logprobs"]


def changed_batch(batches: list[int]) -> int:
    """The batch size at which the changed biases are run: the middle of the list."""
    return batches[len(batches) // 2]


def main(plan_file: str, outcome_file: str) -> None:
    plan = msgspec.json.decode(pathlib.Path(plan_file).read_bytes(), type=Plan)
    session = Session(plan)
    session.say("ready")
    try:
        if sys.stdin.readline():  # empty: the parent has gone
            draft = pathlib.Path(outcome_file).with_suffix(".draft")
            draft.write_bytes(msgspec.json.encode(session.outcome()))
            draft.replace(outcome_file)
    finally:
        session.engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
