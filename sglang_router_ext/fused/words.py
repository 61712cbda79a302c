"""Words that blocks of one launch send each other: empty (-1) between launches, and never moved. ``single`` uses them.

Launches that may run at the same time must not share words. Those of one stream cannot, nor those of one graph, which is
replayed in order with itself; a graph has words of its own, since it may be replayed on another stream than it was captured on.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sglang_router_ext.contract import expect

EMPTY = -1
"""The bits of an empty word: a NaN that no arithmetic gives, and no pair of ids."""
RESERVE = 16 * 2**20
"""Words that are set aside at the first launch outside a capture, since none can be emptied in one: 64 MB."""
ALIGN = 64


Owner = tuple[str, int]


class Pool:
    """The words of one device."""

    def __init__(self) -> None:
        self._free: torch.Tensor | None = None
        self._returned: list[torch.Tensor] = []
        self._owned: dict[
            Owner, list[torch.Tensor]
        ] = {}  # the last is in use; the others were too small, but launches know them

    def has(self, owner: Owner, count: int) -> bool:
        """Whether ``owner`` can have ``count`` words without any being made."""
        return any(len(words) >= count for words in self._owned.get(owner, ())) or bool(self._places(_size(owner, count)))

    def take(self, device: torch.device, owner: Owner, count: int) -> torch.Tensor:
        """``count`` int32 words of ``owner``, the same ones at every call that needs no more of them."""
        mine = self._owned.get(owner, [])
        if not mine or len(mine[-1]) < count:
            size = _size(owner, count)
            if not self._places(size):
                none = self._free is None
                allowed = "a launch before it, outside of any capture" if none else f"at most {RESERVE} words in all"
                expect(owner[0] != "graph", "stream", "single in a CUDA graph's capture, without words left", allowed)
                self._free = torch.full((max(RESERVE, size),), EMPTY, dtype=torch.int32, device=device)
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()  # other streams take of them too; once
            mine = self._owned[owner] = [*mine, self._part(size)]
        return mine[-1][:count]

    def graphs(self) -> set[Owner]:
        return {owner for owner in self._owned if owner[0] == "graph"}

    def take_back(self, owners: Iterable[Owner]) -> None:
        """``owners`` launch no more: others may have their words."""
        for owner in owners:
            self._returned += self._owned.pop(owner)

    def _places(self, size: int) -> list[torch.Tensor]:
        free = [] if self._free is None else [self._free]
        return [words for words in (*self._returned, *free) if len(words) >= size]

    def _part(self, size: int) -> torch.Tensor:
        """At least ``size`` words, of the smallest place that has them. What came back stays whole, so that it is not whittled
        down to pieces that serve nobody.
        """
        place = min(self._places(size), key=len)
        if place is self._free:
            place, self._free = place[:size], place[size:]
        else:
            self._returned = [words for words in self._returned if words is not place]
        return place


def _size(owner: Owner, count: int) -> int:
    """Words to set aside; twice as many each time for a stream, whose launches come in all sizes."""
    return max(ALIGN, 1 << (count - 1).bit_length() if owner[0] == "stream" else -(-count // ALIGN) * ALIGN)


def reserve(device: torch.device) -> None:
    """Set words aside before any capture, so that the first launch may be inside one. Does nothing the second time."""
    pool = _pools.setdefault(device, Pool())
    if not torch.cuda.is_current_stream_capturing():
        pool.take(device, ("stream", torch.cuda.current_stream(device).cuda_stream), ALIGN)


@contextlib.contextmanager
def passing_graphs() -> Iterator[None]:
    """CUDA graphs captured inside give their words back at the end; none of them may be replayed after it."""
    before = {device: pool.graphs() for device, pool in _pools.items()}
    try:
        yield
    finally:
        for device, pool in _pools.items():
            pool.take_back(pool.graphs() - before.get(device, set()))


_pools: dict[torch.device, Pool] = {}


def room(module: Any, device: torch.device, sums: tuple[int, ...], told: tuple[int, ...]) -> bool:
    """Whether the current launch, which is captured, finds words; :func:`take` raises if not."""
    return _pools.setdefault(device, Pool()).has(owner_of(module, device), _count(sums, told))


def take(module: Any, device: torch.device, sums: tuple[int, ...], told: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The words of the current launch: ``sums`` fp32 and ``told`` int32, of these shapes.

    ``module`` holds the C++ function ``capture_id``. Raises :class:`~sglang_router_ext.contract.ContractError`.
    """
    first = _first(sums)
    pool = _pools.setdefault(device, Pool())
    both = pool.take(device, owner_of(module, device), _count(sums, told))
    return both[: math.prod(sums)].view(torch.float32).view(sums), both[first:].view(told)


def _first(sums: tuple[int, ...]) -> int:
    return -(-math.prod(sums) // 4) * 4


def _count(sums: tuple[int, ...], told: tuple[int, ...]) -> int:
    return _first(sums) + math.prod(told)


def owner_of(module: Any, device: torch.device) -> Owner:
    """Which launches the current one shares its words with: those of its graph, or of its stream."""
    stream = torch.cuda.current_stream(device).cuda_stream
    if not torch.cuda.is_current_stream_capturing():
        return "stream", stream
    graph = module.capture_id(stream)
    expect(graph != 0, "stream", "a capture without a graph", "a stream that is captured into one")
    return "graph", graph
