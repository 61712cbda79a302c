"""What ``precision`` found as one picture: a bias, distinct biases, gaps against errors, and changed rows over layers."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from sglang_router_ext.bench.draw import new_figure, save
from sglang_router_ext.bench.precision import BINS, HIGHEST, LOWEST, LayerReport, Phase, middle

COLOURS = {"fp32": "black", "bf16 logits": "tab:blue", "bf16 bias": "tab:orange", "both": "tab:red"}
WIDTHS = {"fp32": 1.5, "bf16 logits": 1.5, "bf16 bias": 4.0, "both": 1.5}
"""``both`` is nearly what the bias alone is, and drawn on it."""
STYLES = ("-", "--", ":", "-.")
"""Of phases."""


def plot(title: str, layers: Sequence[LayerReport], bias: torch.Tensor | None, file: pathlib.Path) -> None:
    """``bias`` [experts] is that of the layer in the middle of ``layers``, to be shown as it is."""
    figure, axes = new_figure(2, 2, 6.4, 4.2)
    _bias(axes[0, 0], bias, layers[len(layers) // 2].number)
    _distinct(axes[0, 1], layers)
    _gaps(axes[1, 0], layers)
    _changed(axes[1, 1], layers)
    figure.suptitle(title)
    save(figure, file)


def _nothing(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes, color="slategray")
    axis.set_xticks([])
    axis.set_yticks([])


def _bias(axis: Any, bias: torch.Tensor | None, number: int) -> None:
    axis.set_title(f"Selection bias of layer {number}")
    if bias is None:
        return _nothing(axis, "no selection bias")
    order = bias.argsort()
    axis.plot(bias[order].tolist(), ".", markersize=3, color="black", label="fp32")
    axis.plot(bias.bfloat16().float()[order].tolist(), ".", markersize=3, color="tab:orange", label="cast to bf16")
    axis.set_xlabel("experts, by their bias")
    axis.set_ylabel("bias")
    axis.legend(fontsize="small")
    return None


def _distinct(axis: Any, layers: Sequence[LayerReport]) -> None:
    axis.set_title("Distinct biases of a layer")
    some = [(layer.number, layer.bias) for layer in layers if layer.bias is not None]
    if not some:
        return _nothing(axis, "no selection bias")
    numbers = [number for number, _ in some]
    axis.plot(numbers, [bias.distinct for _, bias in some], ".-", color="black", label="fp32")
    axis.plot(numbers, [bias.distinct_bf16 for _, bias in some], ".-", color="tab:orange", label="cast to bf16")
    axis.set_yscale("log")
    _over_layers(axis, numbers)
    axis.set_ylabel("distinct values")
    axis.legend(fontsize="small")
    return None


def _phases(layers: Sequence[LayerReport]) -> dict[str, list[tuple[int, Phase]]]:
    found: dict[str, list[tuple[int, Phase]]] = {}
    for layer in layers:
        for phase in layer.phases:
            found.setdefault(phase.phase, []).append((layer.number, phase))
    return found


def _gaps(axis: Any, layers: Sequence[LayerReport]) -> None:
    axis.set_title("Gap at the cut, and what rounding adds to a rank key")
    phases = _phases(layers)
    if not phases:
        return _nothing(axis, "no hidden states")
    middles = [10 ** (LOWEST + (place + 0.5) * (HIGHEST - LOWEST) / BINS) for place in range(BINS)]
    for (name, some), style in zip(phases.items(), STYLES * len(phases), strict=False):
        counts = [sum(column) for column in zip(*(phase.histogram for _, phase in some), strict=True)]
        share = [100 * count / sum(counts) for count in counts]
        axis.plot(middles, share, style, color="slategray", label=f"gap, {name}")
    first = next(iter(phases.values()))
    for place, effect in enumerate(first[0][1].effects):
        error = middle(phase.effects[place].key_error for _, phase in first)
        if error > 0:
            drawn: dict[str, Any] = {"color": COLOURS[effect.arithmetic], "linewidth": WIDTHS[effect.arithmetic]}
            axis.axvline(error, label=f"median error, {effect.arithmetic}", **drawn)
    axis.set_xscale("log")
    axis.set_xlabel("distance of rank keys")
    axis.set_ylabel("rows (%)")
    axis.legend(fontsize="x-small", loc="upper left")
    return None


def _changed(axis: Any, layers: Sequence[LayerReport]) -> None:
    axis.set_title("Rows with other experts than in fp64")
    phases = _phases(layers)
    if not phases:
        return _nothing(axis, "no hidden states")
    for (name, some), style in zip(phases.items(), STYLES * len(phases), strict=False):
        numbers = [number for number, _ in some]
        for place, effect in enumerate(some[0][1].effects):
            share = [100 * phase.effects[place].rows_changed for _, phase in some]
            text = f"{effect.arithmetic}, {name}"
            width = WIDTHS[effect.arithmetic]
            axis.plot(numbers, share, style, marker=".", color=COLOURS[effect.arithmetic], linewidth=width, label=text)
    axis.set_yscale("symlog", linthresh=0.001)
    _over_layers(axis, [layer.number for layer in layers])
    axis.set_ylabel("rows (%)")
    axis.legend(fontsize="x-small")
    return None


def _over_layers(axis: Any, numbers: Sequence[int]) -> None:
    from matplotlib import ticker

    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    if len(set(numbers)) == 1:
        axis.set_xlim(numbers[0] - 1, numbers[0] + 1)
