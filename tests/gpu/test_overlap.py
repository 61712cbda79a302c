"""When the shared experts start, in a real CUDA graph. Needs a CUDA GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_router_ext.plugin import overlap


@pytest.mark.parametrize("waits", [True, False])
def test_a_captured_second_stream_waits_for_the_selection(waits: bool) -> None:
    """The "selection" writes late; the second stream sees what it wrote if, and only if, it waits."""
    main, second = torch.cuda.Stream(), torch.cuda.Stream()
    hidden = torch.ones(16, 64, device="cuda")
    selected, seen = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(main):
        graph.capture_begin()
        second.wait_stream(main)
        torch.cuda._sleep(2_000_000)
        selected.fill_(1)
        if waits:
            overlap.mark(hidden)
        with torch.cuda.stream(second):
            overlap.shared_after_routing(SimpleNamespace(), hidden)
            seen.copy_(selected)
        main.wait_stream(second)
        graph.capture_end()
    for _ in range(3):
        selected.zero_()
        seen.fill_(7)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert seen.item() == (1 if waits else 0)
