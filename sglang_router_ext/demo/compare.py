"""Whether two served runs gave the same tokens, and if not, whether the first difference is a near-tie. Pure; no torch.

Greedy decoding is chaotic: once one token differs, so does all that follows, and a batch of another size is enough for that,
since it takes other kernels with other roundings. So a run is held against what SGLang does against itself:

* no more sequences may differ than between two stock runs of other batch sizes, but for chance;
* at the first difference of a sequence both runs have the same prefix, and there the log-probabilities of the two runs may be
  no further apart than :data:`SLACK` times the most that two stock runs were apart at any step with an equal prefix.
"""

from __future__ import annotations

import math

import msgspec

SLACK = 1.5
"""The largest of a sample is itself uncertain; a routing mistake moves many sequences, and is seen by their number."""


class Run(msgspec.Struct, frozen=True):
    """What one engine generated for a list of prompts."""

    tokens: list[list[int]]
    """[sequence][step]"""
    tops: list[list[dict[int, float]]]
    """[sequence][step]: log-probabilities of the most likely tokens."""


class Difference(msgspec.Struct, frozen=True):
    """Where a sequence first differs."""

    sequence: int
    step: int
    tokens: tuple[int, int]
    shift: float
    """The most by which a log-probability differs there; the prefix is the same."""
    lead: float
    """How far the first run's token was ahead of the other's, in the first run; 0 is a tie."""


class Comparison(msgspec.Struct, frozen=True):
    sequences: int
    differences: list[Difference]
    largest: float
    """The largest shift at any step with an equal prefix, first differences included."""

    @property
    def equal(self) -> int:
        return self.sequences - len(self.differences)


def shift_between(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference of a log-probability; infinite where one is NaN. A token that one side does not list has at most
    its lowest listed value."""
    floors = min(one.values()), min(other.values())
    shifts = [0.0]
    for token in one.keys() | other.keys():
        if token in one and token in other:
            shifts.append(abs(one[token] - other[token]))
        elif token in one:
            shifts.append(one[token] - floors[1])
        else:
            shifts.append(other[token] - floors[0])
    return math.inf if any(math.isnan(shift) for shift in shifts) else max(shifts)


def compare(one: Run, other: Run) -> Comparison:
    """Sequence by sequence up to the first difference; one may have fewer sequences, as a smaller batch has."""
    found, largest, sequences = [], 0.0, min(len(one.tokens), len(other.tokens))
    for i in range(sequences):
        for step, (a, b) in enumerate(zip(one.tokens[i], other.tokens[i], strict=True)):
            mine, theirs = one.tops[i][step], other.tops[i][step]
            shift = shift_between(mine, theirs)
            largest = max(largest, shift)
            if a != b:
                lead = mine[a] - mine.get(b, min(mine.values()))
                found.append(Difference(i, step, (a, b), shift, lead))
                break
    return Comparison(sequences, found, largest)


class Yardstick(msgspec.Struct, frozen=True):
    """How far stock runs are from each other."""

    differing: float
    """The largest share of sequences that differ."""
    shift: float

    def allowed(self, sequences: int) -> int:
        """Sequences that may differ: the stock share, and three standard deviations of the difference of two such counts."""
        expected = self.differing * sequences
        return math.floor(expected + 3 * math.sqrt(2 * expected * (1 - self.differing) + 1))


def yardstick(stock: list[Comparison]) -> Yardstick:
    """From comparisons of stock runs with each other."""
    return Yardstick(max(len(found.differences) / found.sequences for found in stock), max(found.largest for found in stock))


def more_than(found: Comparison, other: Comparison) -> list[str]:
    """That ``found`` differs in more sequences than ``other``, by three standard deviations; in words, empty: it does not."""
    one, two = len(found.differences) / found.sequences, len(other.differences) / other.sequences
    both = (len(found.differences) + len(other.differences)) / (found.sequences + other.sequences)
    chance = 3 * math.sqrt(both * (1 - both) * (1 / found.sequences + 1 / other.sequences))
    return [f"{one:.0%} of the sequences differ, and {two:.0%} with the plugin"] if one - two > chance else []


def verdict(found: Comparison, stock: Yardstick) -> list[str]:
    """Everything that speaks against the two runs being the same computation, in words; empty: nothing does."""
    against = []
    allowed = stock.allowed(found.sequences)
    if len(found.differences) > allowed:
        against.append(f"{len(found.differences)} of {found.sequences} sequences differ, at most {allowed} by chance")
    limit = SLACK * stock.shift
    for difference in found.differences:
        if difference.shift > limit:
            against.append(
                f"sequence {difference.sequence}, step {difference.step}: a log-probability differs by {difference.shift:.3f},"
                f" at most {limit:.3f} between stock runs"
            )
    return against
