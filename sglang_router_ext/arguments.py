"""Checks of tensors against the contract, before any launch. Each refusal names the argument, what came and what is allowed."""

from __future__ import annotations

import torch

from sglang_router_ext.choose import groups_refused
from sglang_router_ext.contract import Problem, Tokens, expect
from sglang_router_ext.designs import TABLE

VECTOR_BYTES = 16


def describe(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} strides {list(tensor.stride())} on {tensor.device}"


def check_tensor(name: str, tensor: object, dtype: torch.dtype, shape: tuple[int | None, ...], device: torch.device) -> None:
    """``tensor`` is of ``dtype`` and ``shape`` (None: any size) on ``device``, its last dimension dense."""
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    allowed = f"{str(dtype).removeprefix('torch.')} [{sizes}] on {device}, last dimension contiguous"
    fits = (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == dtype
        and tensor.dim() == len(shape)
        and all(want is None or size == want for size, want in zip(tensor.shape, shape, strict=True))
        and tensor.device == device
        and (tensor.numel() == 0 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1)
    )
    expect(fits, name, describe(tensor), allowed)


def vector_rows(tensor: torch.Tensor) -> bool:
    """Whether every row of ``tensor`` starts on a 16-byte boundary, as vector loads need."""
    stride_bytes = tensor.stride(0) * tensor.element_size() if len(tensor) > 1 else 0
    return tensor.data_ptr() % VECTOR_BYTES == 0 and stride_bytes % VECTOR_BYTES == 0


def check_vector_rows(name: str, tensor: torch.Tensor) -> None:
    got = f"{describe(tensor)} at address {tensor.data_ptr() % VECTOR_BYTES} modulo {VECTOR_BYTES}"
    expect(vector_rows(tensor), name, got, f"rows that start at multiples of {VECTOR_BYTES} bytes")
    apart = range(tensor.shape[1], 2**31)
    expect(
        len(tensor) == 1 or tensor.stride(0) in apart,
        name,
        describe(tensor),
        f"{apart[0]} to {apart[-1]} elements from row to row",
    )


def check_cuda(name: str, tensor: object) -> None:
    """``tensor`` is on the current CUDA device, which is the one that kernels are launched on."""
    expect(isinstance(tensor, torch.Tensor) and tensor.is_cuda, name, describe(tensor), "a CUDA tensor")
    assert isinstance(tensor, torch.Tensor)
    current = torch.cuda.current_device()
    expect(tensor.device.index == current, name, describe(tensor), f"a tensor on the current device, cuda:{current}")


def check_gate(
    design: str, hidden: torch.Tensor, weight: torch.Tensor, problem: Problem | None = None, *, interpreted: bool = False
) -> None:
    """``hidden`` [rows, hidden] and ``weight`` [experts, hidden] fit the contract, the row of ``design``, and ``problem``.
    ``interpreted``: by Triton's interpreter, which takes CPU tensors.
    """
    row = TABLE[design]
    if not interpreted:
        check_cuda("hidden", hidden)
    device = hidden.device if isinstance(hidden, torch.Tensor) else torch.device("cpu")
    check_tensor("hidden", hidden, torch.bfloat16, (None, None), device)
    allowed = [getattr(torch, name) for name in row.weight_dtypes]
    dtype = weight.dtype if isinstance(weight, torch.Tensor) and weight.dtype in allowed else allowed[0]
    check_tensor("weight", weight, dtype, (None, hidden.shape[1]), hidden.device)
    expect(len(weight) > 0, "weight", describe(weight), "one expert or more")
    if problem is not None:
        fits = tuple(weight.shape) == (problem.experts, problem.hidden)
        expect(fits and str(weight.dtype) == f"torch.{problem.weight_dtype}", "weight", describe(weight), f"that of {problem}")
    expect(len(hidden) in row.rows, "hidden", f"{len(hidden)} rows", f"{row.rows} rows for {design}")
    size, multiple = hidden.shape[1], row.hidden_multiple
    fits = size >= 1 and size % multiple == 0 and (row.max_hidden is None or size <= row.max_hidden)
    limit = "" if row.max_hidden is None else f", at most {row.max_hidden}"
    expect(fits, "hidden", f"hidden size {size}", f"multiples of {multiple}{limit} for {design}")
    if multiple > 1:
        check_vector_rows("hidden", hidden)
        check_vector_rows("weight", weight)


def check_selection(
    design: str,
    problem: Problem,
    logits: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_token_non_padded: torch.Tensor | None,
    device: torch.device,
) -> None:
    """``logits`` (None where the design makes them itself), ``bias`` and padding fit the contract and the row of ``design``."""
    row = TABLE[design]
    assert row.max_experts is not None and row.max_topk is not None
    expect(problem.experts <= row.max_experts, "experts", problem.experts, f"at most {row.max_experts} for {design}")
    expect(
        problem.slots <= row.max_topk,
        "topk",
        f"{problem.slots} slots",
        f"at most {row.max_topk}, shared included, for {design}",
    )
    expect(problem.score in row.scores, "score", problem.score, f"{' | '.join(row.scores)} for {design}")
    expect(row.hashed == problem.hashed, "hashed", problem.hashed, f"{row.hashed} for {design}")
    expect(row.image_bias or not problem.image_bias, "image_bias", problem.image_bias, f"False for {design}")
    why = groups_refused(row, problem)
    expect(why is None, "groups", why, f"{row.group_experts or 'no'} experts a group, of a multiple of 128, for {design}")
    if logits is not None:
        check_tensor("logits", logits, torch.float32, (None, problem.experts), device)
    if problem.bias or not (problem.hashed or problem.score == "softmax"):
        check_tensor("bias", bias, torch.float32, (problem.experts,), device)
    else:
        expect(bias is None, "bias", describe(bias), f"None for {problem}")
    if num_token_non_padded is not None:
        expect(
            isinstance(num_token_non_padded, torch.Tensor)
            and num_token_non_padded.dtype == torch.int32
            and num_token_non_padded.numel() == 1
            and num_token_non_padded.device == device,
            "num_token_non_padded",
            describe(num_token_non_padded),
            f"int32 [1] on {device}",
        )


def check_per_row(
    problem: Problem, rows: int, tokens: Tokens | None, packed: torch.Tensor | None, device: torch.device
) -> None:
    """``tokens`` are there where ``problem`` asks for them, and fit; so does ``packed``, if it is there."""
    asked = "Tokens, those of the rows," if problem.reads_tokens else "None"
    fits = isinstance(tokens, Tokens) if problem.reads_tokens else tokens is None
    expect(fits, "tokens", "None" if tokens is None else type(tokens).__name__, f"{asked} for {problem}")
    if tokens is not None:
        wide = isinstance(tokens.ids, torch.Tensor) and tokens.ids.dtype == torch.int64
        check_tensor("tokens.ids", tokens.ids, torch.int64 if wide else torch.int32, (rows,), device)
        for name, unused in (("image_bias", not problem.image_bias), ("table", not problem.hashed)):
            got = getattr(tokens, name)
            expect(got is None or not unused, f"tokens.{name}", describe(got), f"None for {problem}")
        if problem.image_bias:
            check_tensor("tokens.image_bias", tokens.image_bias, torch.float32, (problem.experts,), device)
            assert tokens.image_bias is not None
            check_vector_rows("tokens.image_bias", tokens.image_bias[None])
            known = type(tokens.image) is int and 0 <= tokens.image < 2**31
            expect(known, "tokens.image", repr(tokens.image), "an integer from 0 to 2^31 - 1")
        if problem.hashed:
            check_tensor("tokens.table", tokens.table, torch.int32, (None, problem.topk), device)
            assert tokens.table is not None
            expect(len(tokens.table) > 0, "tokens.table", describe(tokens.table), "a table of one token or more")
    if packed is not None:
        check_tensor("packed", packed, torch.int32, (rows, problem.slots), device)
        expect(packed.is_contiguous(), "packed", describe(packed), "dense rows")
        expect(problem.experts + problem.shared <= 2**15, "experts", problem.experts, "at most 2^15 with packed ids")
