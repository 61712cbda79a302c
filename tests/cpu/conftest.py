"""What several files of this folder ask for."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    """A machine with a GPU, made up, and an empty configuration."""
    from made_up_gpu import Gpus

    return Gpus(monkeypatch, tmp_path)
