"""Without a GPU these tests would all be skipped, and that would look like success."""

from __future__ import annotations

import pytest
import torch


def pytest_sessionstart(session: pytest.Session) -> None:
    if not torch.cuda.is_available():
        pytest.exit("tests/gpu: got no CUDA GPU here, allowed: a machine with one", returncode=2)
