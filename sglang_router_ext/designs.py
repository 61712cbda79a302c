"""THE table of router designs. A kernel that is not a row here cannot be launched; the README and the CLI print this table.

A row is frozen, holds text and numbers only (no torch), and names its code as ``module:function``. Adding a design: write
``<stage>/<design>.py`` (and ``.cuh``), add a row with status ``trial``, run ``sglang-router-ext check`` and ``bench --record``
on a GPU, then enter the bands that the record supports and set the status to ``on``.
"""

from __future__ import annotations

import hashlib
import pathlib
from enum import Enum
from typing import Any

import msgspec

from sglang_router_ext.contract import SCORES

PACKAGE = pathlib.Path(__file__).parent
HOPPER_UP = (90, 100, 103)
MOST_ROWS = {"NVIDIA H200": 8192}
"""GPU name -> the most rows on record: of more, bands say nothing."""


class Numerics(Enum):
    """What a design promises; ``agreement.py`` holds it to that."""

    LOGIT_BOUND = "logits within the error bound of their longest chain of fp32 additions"
    EXACT_IDS = "ids as fp64 ranks them, but for gaps below the rounding of one fp32 key"
    NEAR_TIE = "ids as fp64 ranks them, but for gaps below the logit bound"


class Rows(msgspec.Struct, frozen=True):
    """A closed range of row counts; ``last`` None has no end."""

    first: int
    last: int | None = None

    def __contains__(self, rows: int) -> bool:
        return rows >= self.first and (self.last is None or rows <= self.last)

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first}+"
        return str(self.first) if self.last == self.first else f"{self.first}-{self.last}"


PLAN_STAGE = "plan"
"""Of designs that also write the plan, if they are asked for one."""


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    name: str
    stages: tuple[str, ...]
    target: str
    """``module:function`` inside this package, or "" for SGLang's own path."""
    what: str
    archs: tuple[int, ...] | None = None
    """10 x compute capability; None: any GPU that the host supports."""
    min_processors: int = 1
    """Multiprocessors that it needs."""
    max_experts: int | None = None
    max_topk: int | None = None
    hidden_multiple: int = 1
    max_hidden: int | None = None
    scores: tuple[str, ...] = ("sigmoid",)
    weight_dtypes: tuple[str, ...] = ("bfloat16",)
    measured_dtypes: tuple[str, ...] = ("bfloat16",)
    """Of the gate weight: what the bands speak of."""
    measured_scores: tuple[str, ...] = ("sigmoid",)
    """The same of the score rule."""
    measured_groups: bool = False
    """Whether the bands speak of selection by groups too."""
    measured_experts: int = 1
    """The fewest that the bands speak of."""
    image_bias: bool = False
    """Takes problems whose image tokens rank by a bias of their own."""
    hashed: bool = False
    """Takes problems whose experts a table names, and no others."""
    packs: bool = False
    """Writes packed ids too, if it is given room for them."""
    group_experts: int | None = None
    """Experts of a group, where it selects by groups; None: it does not."""
    rows: Rows = Rows(1)
    """Row counts that the code can run."""
    bands: dict[str, tuple[Rows, ...]] = {}
    """GPU name -> row counts at which a record shows it fastest; only these are chosen without being named. Of a design that
    plans: with its plan, which saves the experts theirs.
    """
    bands_without_plan: dict[str, tuple[Rows, ...]] = {}
    """The same of a design that plans, where the experts ask for no plan."""
    numerics: Numerics
    chain: int = 1
    """The longest chain of fp32 additions behind a logit is hidden / chain + 64 (see agreement.py)."""
    row_stable: bool
    """A row's result is bitwise the same whatever else is in the batch."""
    graph_safe: bool = True
    status: str = "trial"
    twins: tuple[str, ...] = ()
    """Designs that give the same bits one after the other, whatever the batch."""
    sources: tuple[str, ...] = ()
    """Files, relative to this package, whose change makes its records stale."""

    def __post_init__(self) -> None:
        if self.status not in ("on", "trial"):
            raise ValueError(f"design {self.name}: status: got {self.status}, allowed: on | trial")

    @property
    def plans(self) -> bool:
        return PLAN_STAGE in self.stages

    @property
    def any_batch(self) -> bool:
        """Whether a row's result is bitwise the same in every batch there can be."""
        return self.row_stable and (self.rows == Rows(1) or bool(self.twins))

    @property
    def compiled(self) -> bool:
        """Holds CUDA C++, so that it needs a compiler before it runs."""
        return any(source.endswith(".cuh") for source in self.sources)

    @property
    def archs_text(self) -> str:
        return "any" if self.archs is None else ", ".join(f"sm_{arch}" for arch in self.archs)

    @property
    def source_hash(self) -> str:
        """SHA-256 over the sources' names and bytes, 16 hex digits; "" where a design has no source of its own."""
        return source_hash(self.sources)


def source_hash(sources: tuple[str, ...]) -> str:
    if not sources:
        return ""
    digest = hashlib.sha256()
    for name in sorted(set(sources)):
        digest.update(name.encode() + b"\0" + (PACKAGE / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


SELECT_AND_PLAN = ("selection", PLAN_STAGE)
"""Stages of a design that selects from anyone's logits and makes the plan."""

_DEVICE = ("device/launch.cuh", "device/order.cuh", "device/score.cuh")
_SMALL_ROWS = ("gate/small_rows.cuh", "gate/small_rows.py", *_DEVICE)
_WARP_SELECT = (
    *("selection/warp_select.cuh", "selection/groups.cuh", "selection/row.cuh", "selection/warp_select.py"),
    *_DEVICE,
)
_TENSOR_CORE = ("gate/tensor_core.cuh", "gate/tensor_core.py", "device/hopper.cuh", "device/launch.cuh")
_SELECT_PLAN = (
    *("fused/select_plan.cuh", "fused/select_plan.py", "plan/many_blocks.cuh", "plan/one_block.cuh"),
    *("fused/single.py", *_WARP_SELECT),
)
_ALL_SELECTIONS: dict[str, Any] = {
    "max_experts": 1024,
    "group_experts": 32,
    "scores": SCORES,
    "image_bias": True,
    "packs": True,
}
"""What a design takes that selects by ``select_row``."""

DESIGNS: tuple[Design, ...] = (
    Design(
        name="single",
        stages=("gate", "selection", PLAN_STAGE),
        target="fused.single:single",
        what="one launch: small_rows' blocks, blocks that select from their sums as they come, and the plan by some of those",
        archs=HOPPER_UP,
        min_processors=32,  # four launches' planners, which wait, leave some free
        **_ALL_SELECTIONS,
        max_topk=24,
        weight_dtypes=("bfloat16", "float32"),
        hidden_multiple=8,
        max_hidden=65536,
        rows=Rows(1, 128),
        numerics=Numerics.NEAR_TIE,
        chain=32,
        row_stable=True,
        sources=(
            *("fused/single.cuh", "fused/single.py", "fused/words.py", "plan/one_block.cuh"),
            *_SMALL_ROWS,
            *_WARP_SELECT,
        ),
        status="on",
        bands={"NVIDIA H200": (Rows(1, 128),)},
        bands_without_plan={"NVIDIA H200": (Rows(17, 96),)},
        measured_dtypes=("bfloat16", "float32"),
        measured_scores=SCORES,
        measured_groups=True,
    ),
    Design(
        name="tensor_pair",
        stages=("gate", "selection", PLAN_STAGE),
        target="fused.tensor_pair:tensor_pair",
        what="tensor_core and warp_select chained by PDL, K slices handed over unreduced; the plan in a third launch",
        archs=(90,),
        **_ALL_SELECTIONS,
        max_topk=24,
        hidden_multiple=8,
        max_hidden=65536,
        rows=Rows(1, 1024),  # 2,048 rows: 26.9 us, SGLang's pair 21.7
        numerics=Numerics.NEAR_TIE,
        chain=8,
        row_stable=True,
        twins=("tensor_core", "warp_select"),
        status="on",
        bands={"NVIDIA H200": (Rows(129, 1024),)},
        bands_without_plan={"NVIDIA H200": (Rows(97, 1024),)},
        measured_scores=("sigmoid", "softmax"),
        measured_experts=128,  # of 8 experts, 1,024 rows: 16.2 us, SGLang's 14.9
        sources=("fused/tensor_pair.cuh", "fused/tensor_pair.py", *_SELECT_PLAN, *_TENSOR_CORE),
    ),
    Design(
        name="pair",
        stages=("gate", "selection"),
        target="fused.pair:pair",
        what="small_rows and warp_select chained by PDL; K slices handed over unreduced",
        archs=HOPPER_UP,
        **_ALL_SELECTIONS,
        max_topk=32,
        weight_dtypes=("bfloat16", "float32"),
        hidden_multiple=8,
        max_hidden=65536,
        rows=Rows(1, 16),
        numerics=Numerics.NEAR_TIE,
        chain=32,
        row_stable=True,
        status="on",
        bands={"NVIDIA H200": (Rows(1, 16),)},
        measured_dtypes=("bfloat16", "float32"),
        measured_scores=SCORES,
        measured_groups=True,
        sources=("fused/pair.cuh", "fused/pair.py", *_SMALL_ROWS, *_WARP_SELECT),
    ),
    Design(
        name="hash_rows",
        stages=("gate", "selection"),
        target="fused.hash_rows:hash_rows",
        what="hash layers: reads only the rows of the gate weight that a token's experts have",
        archs=HOPPER_UP,
        max_experts=1024,
        max_topk=16,
        scores=("sigmoid", "sqrtsoftplus"),
        hashed=True,
        packs=True,
        hidden_multiple=8,
        max_hidden=65536,
        rows=Rows(1, 256),  # 512 rows: 18.2 us, SGLang's 14.2
        numerics=Numerics.NEAR_TIE,
        chain=32,
        row_stable=True,
        status="on",
        bands={"NVIDIA H200": (Rows(1, 256),)},
        measured_scores=("sqrtsoftplus",),
        sources=("fused/hash_rows.cuh", "fused/hash_rows.py", *_WARP_SELECT),
    ),
    Design(
        name="select_plan",
        stages=SELECT_AND_PLAN,
        target="fused.select_plan:select_plan",
        what="warp_select that counts, and the experts' plan from these counts: two launches for any number of rows",
        archs=HOPPER_UP,
        **_ALL_SELECTIONS,
        max_topk=24,
        numerics=Numerics.EXACT_IDS,
        row_stable=True,
        twins=("warp_select",),
        status="on",
        bands={"NVIDIA H200": (Rows(129, 8192),)},
        measured_experts=128,
        sources=_SELECT_PLAN,
    ),
    Design(
        name="small_rows",
        stages=("gate",),
        target="gate.small_rows:small_rows",
        what="tensor-core GEMM for few rows, K split over a cluster, weight read before the PDL wait",
        archs=HOPPER_UP,
        weight_dtypes=("bfloat16", "float32"),
        hidden_multiple=8,
        max_hidden=65536,
        rows=Rows(1, 16),
        numerics=Numerics.LOGIT_BOUND,
        chain=32,
        row_stable=True,
        status="on",
        bands={"NVIDIA H200": (Rows(6, 8),)},
        measured_dtypes=("bfloat16", "float32"),
        sources=_SMALL_ROWS,
    ),
    Design(
        name="cublas_gemm",
        stages=("gate",),
        target="gate.cublas_gemm:cublas_gemm",
        what="cuBLAS, bf16 in and fp32 out; any shape",
        numerics=Numerics.LOGIT_BOUND,
        chain=4,
        row_stable=False,
        sources=("gate/cublas_gemm.py",),
    ),
    Design(
        name="tensor_core",
        stages=("gate",),
        target="gate.tensor_core:tensor_core",
        what="GEMM of warpgroups for any number of rows, one order of additions for all of them",
        archs=(90,),
        hidden_multiple=8,
        max_hidden=65536,
        numerics=Numerics.LOGIT_BOUND,
        chain=8,
        row_stable=True,
        status="on",
        bands={"NVIDIA H200": (Rows(17, 128),)},
        sources=_TENSOR_CORE,
    ),
    Design(
        name="split_gemm",
        stages=("gate",),
        target="gate.split_gemm:split_gemm",
        what="an fp32 weight split into three bf16 at every call, cuBLAS on these, their sums added; any shape",
        weight_dtypes=("float32",),
        measured_dtypes=("float32",),
        numerics=Numerics.LOGIT_BOUND,
        chain=4,
        row_stable=False,
        sources=("gate/split_gemm.py",),
    ),  # on trial: SGLang's was timed in fp32, and its servers of GLM-4 and MiniMax-M2 multiply in TF32
    Design(
        name="naive",
        stages=("gate",),
        target="gate.naive:naive",
        what="the model's reference code: cast both to fp32 and multiply; for comparison only",
        weight_dtypes=("bfloat16", "float32"),
        numerics=Numerics.LOGIT_BOUND,
        chain=1,
        row_stable=False,
        sources=("gate/naive.py",),
    ),
    Design(
        name="warp_select",
        stages=("selection",),
        target="selection.warp_select:warp_select",
        what="a row by its own warps, keys in registers, the few that can win ranked all at once",
        archs=HOPPER_UP,
        **_ALL_SELECTIONS,
        max_topk=32,
        numerics=Numerics.EXACT_IDS,
        row_stable=True,
        status="on",
        bands={"NVIDIA H200": (Rows(1, 8192),)},
        measured_scores=("sigmoid", "sqrtsoftplus"),  # softmax of 8 experts: 2.4 us, SGLang's 1.8
        measured_groups=True,
        sources=_WARP_SELECT,
    ),
    Design(
        name="triton_select",
        stages=("selection",),
        target="selection.triton_select:triton_select",
        what="Triton, one program a row; for GPUs or machines where CUDA C++ cannot be built",
        max_experts=1024,
        max_topk=32,
        numerics=Numerics.EXACT_IDS,
        row_stable=True,
        sources=("selection/triton_select.py",),
    ),
    Design(
        name="host",
        stages=("gate", "selection"),
        target="",
        what="SGLang's own path; takes whatever no design above takes",
        scores=SCORES,
        weight_dtypes=("bfloat16", "float16", "float32"),
        numerics=Numerics.NEAR_TIE,
        row_stable=False,
        status="on",
    ),
)


def by_name(designs: tuple[Design, ...] = DESIGNS) -> dict[str, Design]:
    """Name -> row. Raises on a duplicate name or a design that covers no known stage."""
    table: dict[str, Design] = {}
    for design in designs:
        if design.name in table:
            raise ValueError(f"design {design.name}: stands twice in the table")
        if not design.stages or any(stage not in ("gate", "selection", PLAN_STAGE) for stage in design.stages):
            raise ValueError(f"design {design.name}: stages: got {design.stages}, allowed: gate, selection, plan")
        table[design.name] = design
    return table


TABLE = by_name()
