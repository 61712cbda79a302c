"""Lanes by directory: everything in tests/gpu is skipped, by name and with the reason, where there is no CUDA GPU."""

from __future__ import annotations

import pathlib

import hypothesis
import pytest

# A busy machine takes any time for one example, which says nothing of what is tested.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

GPU_LANE = pathlib.Path(__file__).parent / "gpu"


@pytest.fixture(autouse=True)
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have tuned this machine: what is chosen must not depend on it."""
    monkeypatch.setenv("SGLANG_ROUTER_EXT_TABLE", "off")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if GPU_LANE in item.path.parents]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
