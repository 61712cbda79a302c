"""When the shared experts start, with streams that only write down what they are asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.models.deepseek_v2 import DeepseekV2MoE
from sglang_layer import HIDDEN, build, rows_of

from sglang_router_ext.plugin import overlap


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says that it is not."""

    is_cuda = True


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    log: list[str] = []
    state = SimpleNamespace(log=log, main=Stream("main", log), second=Stream("second", log), capturing=True)
    state.current = state.main
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: state.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


class Block(torch.nn.Module):
    num_fused_shared_experts = 0

    def shared_experts(self, hidden: torch.Tensor, **_options: object) -> torch.Tensor:
        return 2 * hidden


BLOCK = Block()


def shared_experts(hidden: torch.Tensor) -> torch.Tensor:
    """SGLang's own method, hooked, on a block that has no more than it needs."""
    return DeepseekV2MoE._forward_shared_experts(BLOCK, hidden)


def hidden_of(rows: int) -> torch.Tensor:
    return torch.ones(rows, HIDDEN, dtype=torch.bfloat16).as_subclass(OnCuda)


def test_a_second_stream_waits_for_the_selection(cuda: SimpleNamespace) -> None:
    hidden = hidden_of(16)
    overlap.mark(hidden)
    cuda.current = cuda.second
    assert torch.equal(shared_experts(hidden), 2 * hidden)
    assert cuda.log == ["main records", "second waits for event of main"]
    shared_experts(hidden)  # another call of the same tensor has no event of its own
    assert len(cuda.log) == 2


def test_the_routers_stream_does_not_wait_for_itself(cuda: SimpleNamespace) -> None:
    hidden = hidden_of(16)
    overlap.mark(hidden)
    shared_experts(hidden)
    assert cuda.log == ["main records"]


@pytest.mark.parametrize("rows", [0, 64, 65])
@pytest.mark.parametrize("capturing", [True, False])
def test_graphs_of_few_rows_only(cuda: SimpleNamespace, rows: int, capturing: bool) -> None:
    cuda.capturing = capturing
    overlap.mark(hidden_of(rows))
    assert cuda.log == (["main records"] if capturing and rows <= 64 else [])


def test_shared_experts_of_unrouted_rows_run_as_ever(cuda: SimpleNamespace) -> None:
    cuda.current = cuda.second
    shared_experts(hidden_of(16))
    assert cuda.log == []


@pytest.mark.parametrize(("backend", "marked"), [("router_ext_pair", True), (None, False)])
def test_rows_are_marked_where_the_plugin_selects(monkeypatch: pytest.MonkeyPatch, backend: str | None, marked: bool) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(overlap, "mark", seen.append)
    module, _select = build(backend, gate="cublas_gemm")
    hidden = rows_of(3)
    module(hidden)
    assert [hidden is tensor for tensor in seen] == [True] * marked


def test_a_mark_of_before_does_not_outlive_a_new_routing(cuda: SimpleNamespace) -> None:
    hidden = hidden_of(16)
    overlap.mark(hidden)
    cuda.capturing = False
    overlap.mark(hidden)
    cuda.current = cuda.second
    shared_experts(hidden)
    assert cuda.log == ["main records"]


def test_a_compiler_sees_nothing_of_it() -> None:
    torch._dynamo.reset()
    with torch.compiler.set_stance("default"):
        compiled = torch.compile(shared_experts, backend="eager", fullgraph=True)
        hidden = torch.ones(4, HIDDEN)
        assert torch.equal(compiled(hidden), 2 * hidden)
