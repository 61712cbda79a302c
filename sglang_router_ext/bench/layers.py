"""The routers of a model, layer by layer: drawn, from a file of tensors, or from a checkpoint. What ``precision`` looks at.

A file of tensors has ``layers.N.weight`` [experts, hidden], ``layers.N.bias`` [experts] and, of each phase that there is
something of, ``layers.N.PHASE`` [rows, hidden] (``prefill``, ``decode``, or any other name): the hidden states that arrived at
layer N's router. Its metadata may have ``problem``, the JSON of a :class:`~sglang_router_ext.contract.Problem`.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch

from sglang_router_ext.bench.inputs import bias_of, random_inputs
from sglang_router_ext.contract import Problem, expect

DRAWN = "drawn"
NAME = re.compile(r"layers\.(\d+)\.(\w+)")
GATE = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:mlp|block_sparse_moe|feed_forward|moe|ffn)\.(?:gate\.|router\.)?(\w+)")
"""Of a checkpoint, whichever model it is of: layer, and what it is."""
WEIGHTS, BIASES = ("weight",), ("e_score_correction_bias", "bias", "expert_bias")
FLOATS = (torch.bfloat16, torch.float32)


class Layer(NamedTuple):
    """One router."""

    number: int
    weight: torch.Tensor | None  # [experts, hidden] bf16 or fp32; None where there are no hidden states to multiply
    bias: torch.Tensor | None  # [experts] fp32
    rows: dict[str, torch.Tensor]  # phase -> hidden states [rows, hidden] bf16


class Source(NamedTuple):
    """Layers, each read when its turn comes."""

    what: str
    problem: Problem
    total: int
    layers: Iterator[Layer]
    missing: str = ""
    """What needs hidden states that are not there."""


def drawn(name: str, problem: Problem, layers: int, rows: int, seed: int, device: torch.device) -> Source:
    """Random layers: hidden states ~ N(0, 1), logits ~ N(0, 1.2), a bias as GLM-5.3-Flash's layer 24 has it."""

    def draw() -> Iterator[Layer]:
        for number in range(layers):
            inputs = random_inputs(problem, rows, seed=seed + number, device=device)
            yield Layer(number, inputs.weight, bias_of(problem, inputs), {DRAWN: inputs.hidden})

    return Source(f"{name}, {DRAWN}", problem, layers, draw())


def from_file(path: pathlib.Path, problem: Problem | None, device: torch.device) -> Source:
    """Layers of a file of tensors. Raises :class:`~sglang_router_ext.contract.ContractError` naming the tensor that does not
    fit ``problem``, or the file's own where that is None.
    """
    with _opened(path) as file:
        metadata, names = file.metadata() or {}, list(file.keys())
    if problem is None:
        expect("problem" in metadata, "file", f"{path}: no problem in its metadata", "one, or --case or --model beside it")
        try:
            problem = msgspec.json.decode(metadata["problem"], type=Problem)
        except msgspec.DecodeError as error:
            expect(False, "file", f"{path}: problem: {error}", "the JSON of a Problem")
            raise
    numbers: dict[int, list[str]] = {}
    for name in names:
        match = NAME.fullmatch(name)
        expect(match is not None, "file", f"{path}: {name}", "layers.N.weight, layers.N.bias, and layers.N.PHASE")
        assert match is not None
        numbers.setdefault(int(match[1]), []).append(match[2])
    expect(bool(numbers), "file", f"{path}: no tensor", "layers.N.weight, layers.N.bias, and layers.N.PHASE")
    asked = problem

    def read() -> Iterator[Layer]:
        with _opened(path) as file:
            for number, parts in sorted(numbers.items()):
                found = {part: file.get_tensor(f"layers.{number}.{part}").to(device) for part in parts}
                rows = {part: found[part] for part in sorted(parts) if part not in ("weight", "bias")}
                yield _checked(Layer(number, found.get("weight"), found.get("bias"), rows), asked, str(path))

    some = any(set(parts) - {"weight", "bias"} for parts in numbers.values())
    return Source(path.name, problem, len(numbers), read(), "" if some else _needs("the file"))


def from_checkpoint(folder: pathlib.Path, problem: Problem, device: torch.device) -> Source:
    """Gate weights and biases of a checkpoint's safetensors files; nothing else of it is read."""
    expect(problem.bias, "model", f"{folder}: {problem}", "a router with a selection bias, or --file")
    files = sorted(folder.glob("*.safetensors"))
    expect(bool(files), "model", f"{folder}: no safetensors file", "a folder with a checkpoint")
    index = folder / "model.safetensors.index.json"
    places: dict[str, pathlib.Path] = {}
    if index.is_file():
        try:
            places = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            expect(False, "model", f"{index}: {type(error).__name__}: {error}", "an index of a checkpoint")
    else:
        for one in files:
            with _opened(one) as file:
                places |= dict.fromkeys(file.keys(), one)
    biases: dict[int, str] = {}
    for name in places:
        match = GATE.fullmatch(name)
        if match is not None and match[2] in BIASES:
            biases[int(match[1])] = name
    expect(bool(biases), "model", f"{folder}: no selection bias", "a checkpoint whose routers have one, or --file")

    def read() -> Iterator[Layer]:
        for number, name in sorted(biases.items()):
            with _opened(places[name]) as file:
                bias = file.get_tensor(name).to(device)
            yield _checked(Layer(number, None, bias, {}), problem, str(folder))

    return Source(folder.name, problem, len(biases), read(), _needs("a checkpoint"))


def _needs(what: str) -> str:
    return f"{what} has no hidden states: gaps, errors of rank keys and changed experts need some (--file with layers.N.PHASE)"


def _opened(path: pathlib.Path) -> Any:
    import safetensors

    try:
        return safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        expect(False, "file", f"{path}: {error}", "a safetensors file")
        raise


def _checked(layer: Layer, problem: Problem, file: str) -> Layer:
    """``layer`` as ``problem`` has it, its bias in fp32."""

    def fits(part: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        sizes = tuple(tensor.shape[-len(shape) :]) if tensor.dim() >= len(shape) else ()
        good = tensor.dim() == (2 if len(shape) == 2 or part not in ("weight", "bias") else 1) and sizes == shape
        got = f"{file}: layers.{layer.number}.{part}: {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        expect(good and tensor.dtype in FLOATS, "file", got, f"bfloat16 or float32, {list(shape)} at its end")

    if layer.bias is not None:
        fits("bias", layer.bias, (problem.experts,))
    if layer.weight is not None:
        fits("weight", layer.weight, (problem.experts, problem.hidden))
    for phase, hidden in layer.rows.items():
        fits(phase, hidden, (problem.hidden,))
        expect(layer.weight is not None, "file", f"{file}: layers.{layer.number}: no weight", f"one, beside {phase}")
        expect(len(hidden) > 0, "file", f"{file}: layers.{layer.number}.{phase}: no row", "one row or more")
    expect(not (problem.bias and layer.bias is None), "file", f"{file}: layers.{layer.number}: no bias", f"that of {problem}")
    return layer._replace(bias=layer.bias.float() if layer.bias is not None and problem.bias else None)
