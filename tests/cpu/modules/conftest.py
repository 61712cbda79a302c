"""Tests in this folder run SGLang's own modules on the CPU, with the plugin's hooks in place."""

from __future__ import annotations

import pytest
import sglang_layer


@pytest.fixture(scope="module", autouse=True)
def cpu():
    with sglang_layer.on_the_cpu():
        yield


@pytest.fixture(autouse=True)
def fresh(cpu):
    with sglang_layer.fresh():
        yield
