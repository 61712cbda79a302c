"""The contract of the router: every shape, dtype, unit, sentinel and special value, stated once.

One MoE layer routes each row (token) of ``hidden`` to ``topk`` of its ``experts``::

    logits  = hidden @ weight.T                     fp32; rounded to bf16 only where the model's own gate is asked for
    score   = rule(logit)                           fp32; sigmoid, or sqrt(log(1 + exp(logit)))
    key     = score + bias                          fp32; ranks, and does nothing else
    ids     = the topk largest keys, the lower id wins ties; with groups, of the groups_kept groups of neighbouring experts
              whose two best keys have the largest sum, the lower group wins ties
    weights = score(ids) [/ sum of score(ids)] * scale

Tensors, in the order in which they appear::

    hidden   [rows, hidden]          bfloat16, rows 16-byte aligned
    weight   [experts, hidden]       bfloat16, rows 16-byte aligned
    bias     [experts]               float32, never narrowed
    logits   [rows, experts]         float32
    ids      [rows, topk + shared]   int32, in descending order of the key; -1 in a padded row
    weights  [rows, topk + shared]   float32; 0 in a padded row

Two more rules look at a row's token. ``image_bias``: rows of image tokens rank by a bias of their own. ``hashed``: no row is
ranked; the experts of a token stand in a table [vocabulary, topk] int32, in whose order they are the row's ids, and logits are
NaN but for theirs. There, an expert that does not exist has id -1 and weight 0, and a row is padding if it has no other or its
token is outside of the table.

Packed ids are the same selection in one int32 a slot: the id times 2^16, plus the bits of the weight as bf16.

Fused shared experts stand behind the routed ones: slot topk + i has id experts + i and weight ``shared_weight``, and takes no
part in ranking or renormalising.

Softmax: the bias, if there is one, is inside; key = softcap * tanh(logit / softcap) + bias (no softcap: logit + bias), and
score = exp(key - largest key) / sum over all experts, which ranks as the key does. Keys that are equal are 0 apart, so that an
infinite one weighs something. It knows no groups.

Special values. A NaN key ranks as ``NAN_KEY``, below every key that a model has and above minus infinity, as SGLang ranks it;
``nan_first``: as infinity, as DeepSeek-V4.1 has it. A NaN score weighs 0, and so does a softmax key of ``NAN_KEY``. A score
below ``MIN_SCORE`` (the smallest normal float32) counts as 0. Where all chosen scores are 0 the weights are 0 and not NaN.
Every row, degenerate or not, gives ``topk`` distinct ids and finite weights. Rows at or past ``num_token_non_padded`` are
padding.

A plan is the same selection as an expert kernel reads it: the slots (row x (topk + shared) + k) of each expert, in blocks of
equal size, experts ascending and slots ascending inside an expert, so that it is reproducible. Slots of padded rows and of
other ranks' experts are elsewhere. See :class:`PlanForm` for the formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    import torch

NAN_KEY = -1e30
DROPPED_KEY = float("-inf")
"""Of an expert whose group is not kept. It is never taken: the kept groups have topk experts or more."""
MIN_SCORE = 2.0**-126
LARGEST = 2.0**128 - 2.0**104
"""Of float32's finite numbers."""
MOST_SQRT_SOFTPLUS = 2.0**64
"""Of an infinite logit, so that weights stay finite: the root of the largest float32."""
PAD_ID = -1

SCORES = ("sigmoid", "softmax", "sqrtsoftplus")
DTYPES = ("bfloat16", "float16", "float32")
STAGES = ("gate", "selection")
BLOCKS = (8, 16, 32, 48, 64, 128)
PLAN_ROWS, PLAN_SLOTS = 128, 24
"""The most rows of a plan that one launch writes, and the most slots of a row."""


class ContractError(ValueError):
    """An argument is outside the contract. The text names the argument, what came and what is allowed."""


def expect(condition: bool, argument: str, got: object, allowed: str) -> None:
    """Raise :class:`ContractError` unless ``condition`` holds; the one way in which arguments are refused."""
    if not condition:
        shown = "''" if got == "" else got  # nothing at all would be overlooked
        raise ContractError(f"{argument}: got {shown}, allowed: {allowed}")


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What one MoE layer asks of its router; everything but the number of rows.

    ``scale`` multiplies the weights once, here or nowhere: a layer whose expert kernel applies the routed scaling factor
    says 1.0. ``shared`` counts the fused shared-expert slots that the router itself appends, with ``shared_weight`` each.
    """

    experts: int
    hidden: int
    topk: int
    score: str = "sigmoid"
    bias: bool = True
    groups: int = 1
    groups_kept: int = 1
    renormalize: bool = True
    scale: float = 1.0
    softcap: float = 0.0
    nan_first: bool = False
    image_bias: bool = False
    hashed: bool = False
    logits_dtype: str = "float32"
    shared: int = 0
    shared_weight: float = 1.0
    hidden_dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    bias_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("experts", "hidden", "topk", "groups", "groups_kept", "shared"):
            least, got = 0 if name == "shared" else 1, getattr(self, name)
            fits = isinstance(got, int) and not isinstance(got, bool) and got >= least
            expect(fits, name, repr(got), f"an integer of at least {least}")
        for name in ("scale", "softcap", "shared_weight"):
            got = getattr(self, name)
            expect(isinstance(got, int | float) and abs(got) <= LARGEST, name, repr(got), "a finite fp32 number")
        expect(self.topk <= self.experts, "topk", self.topk, f"at most experts = {self.experts}")
        expect(self.score in SCORES, "score", self.score, " | ".join(SCORES))
        expect(self.groups_kept <= self.groups, "groups_kept", self.groups_kept, f"at most groups = {self.groups}")
        expect(self.experts % self.groups == 0, "groups", self.groups, f"a divisor of experts = {self.experts}")
        enough = self.experts // self.groups * self.groups_kept
        expect(self.topk <= enough, "topk", self.topk, f"at most the {enough} experts of the groups kept")
        expect(self.softcap >= 0, "softcap", self.softcap, "0 for none, or more")
        expect(self.softcap == 0 or self.score == "softmax", "softcap", self.softcap, f"0 with {self.score} scores")
        expect(
            not self.nan_first or self.score == "sqrtsoftplus", "nan_first", self.nan_first, f"False with {self.score} scores"
        )
        text = f"False with {self.score} scores"
        expect(not self.image_bias or self.score == "sqrtsoftplus", "image_bias", True, text)
        expect(not self.image_bias or self.bias, "image_bias", True, "False without a bias")
        expect(not self.hashed or self.score != "softmax", "hashed", self.hashed, text)
        expect(not self.image_bias or self.groups == 1, "image_bias", True, "False with groups")
        ranks = self.bias or self.groups > 1 or self.image_bias
        expect(not self.hashed or not ranks, "hashed", self.hashed, "False with a bias or groups, which rank")
        rounded = self.logits_dtype != "float32"
        expect(not (self.hashed and rounded), "logits_dtype", self.logits_dtype, "float32 where a table names the experts")
        expect(self.logits_dtype in ("float32", "bfloat16"), "logits_dtype", self.logits_dtype, "float32 | bfloat16")
        for name in ("hidden_dtype", "weight_dtype", "bias_dtype"):
            expect(getattr(self, name) in DTYPES, name, getattr(self, name), " | ".join(DTYPES))

    def __str__(self) -> str:
        grouped = f", {self.groups} groups keep {self.groups_kept}" if self.groups > 1 else ""
        bias = f" + {self.bias_dtype} bias" if self.bias else ""
        shared = f" + {self.shared} shared" if self.shared else ""
        bias += " + image bias" if self.image_bias else ", by a table of tokens" if self.hashed else ""
        logits = f", {self.logits_dtype} logits" if self.logits_dtype != "float32" else ""
        shape = f"{self.experts} x {self.hidden} ({self.weight_dtype})"
        return f"{shape}, top-{self.topk}{shared}, {self.score}{bias}{grouped}{logits}"

    @property
    def reads_tokens(self) -> bool:
        """Whether a row's token has a say."""
        return self.image_bias or self.hashed

    @property
    def wide(self) -> bool:
        """Whether the gate weight is fp32."""
        return self.weight_dtype == "float32"

    @property
    def slots(self) -> int:
        """Columns of ids and weights: routed and shared."""
        return self.topk + self.shared


class Tokens(NamedTuple):
    """The tokens behind a batch's rows, for problems with an ``image_bias`` or a table of experts (``hashed``)."""

    ids: torch.Tensor  # [rows] int32 or int64, from 0 to 2^31 - 1, or -1 for padding; kernels read the low 32 bits
    image: int = 0  # the id that all image tokens have
    image_bias: torch.Tensor | None = None  # [experts] fp32, of rows with that token
    table: torch.Tensor | None = None  # [vocabulary, topk] int32, the experts of a token


class PlanForm(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a plan, and whose experts it is for.

    ``aligned``: what ``moe_align_block_size`` gives SGLang's Triton and Marlin kernels. Blocks of slots elsewhere come first,
    as expert -1; a block that is not full ends with the number of all slots; past ``num_tokens_post_padded`` nothing is said.

    ``tiles``: trtllm-gen's tables. Slots elsewhere are in no tile.
    """

    kind: str
    block: int
    """Slots of a block or tile."""
    first_local: int = 0
    """This rank's first expert."""
    locals: int | None = None
    """How many experts this rank has; None: all, shared ones included."""
    counts_elsewhere: bool = False
    """``aligned``: num_tokens_post_padded is int32[2] and ends with the number of blocks elsewhere, as Marlin reads it."""

    def __post_init__(self) -> None:
        expect(self.kind in ("aligned", "tiles"), "kind", self.kind, "aligned | tiles")
        expect(self.block in BLOCKS, "block", self.block, " | ".join(map(str, BLOCKS)))
        expect(self.first_local >= 0, "first_local", self.first_local, "0 or more")
        expect(self.locals is None or self.locals >= 1, "locals", self.locals, "at least 1")

    def local_experts(self, problem: Problem) -> int:
        return problem.experts + problem.shared if self.locals is None else self.locals


class Gpu(msgspec.Struct, frozen=True):
    """A GPU as the table sees it: ``name`` as the driver gives it, ``arch`` = 10 x compute capability (90, 100, 103)."""

    name: str
    arch: int
    processors: int | None = None
    """Multiprocessors; a part of a GPU (MIG) has fewer. None: those of a whole one."""

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.arch})"


KNOWN_GPUS = {
    gpu.name.split()[-1].lower(): gpu
    for gpu in (
        Gpu("NVIDIA A100", 80),
        Gpu("NVIDIA L40S", 89),
        Gpu("NVIDIA H100", 90),
        Gpu("NVIDIA H200", 90),
        Gpu("NVIDIA B200", 100),
        Gpu("NVIDIA B300", 103),
    )
}
"""GPUs that ``explain`` can speak of without having one, by short name."""


def gpu_by_name(name: str) -> Gpu:
    """``h200`` -> ``Gpu("NVIDIA H200", 90)``. Raises :class:`ContractError` for a name that is not listed."""
    key = name.lower().removeprefix("nvidia").strip()
    expect(key in KNOWN_GPUS, "gpu", name, " | ".join(sorted(KNOWN_GPUS)))
    return KNOWN_GPUS[key]
