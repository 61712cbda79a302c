"""A fused function may belong to a backend name that an extension registered. Runs on a CPU."""

from __future__ import annotations

import unittest
from unittest import mock

from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig, register_moe_runner_core
from sglang.srt.layers.moe.moe_runner.base import FusedOpPool, register_fused_func
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

NAME = "fused_extension"
register_moe_runner_core(NAME, lambda config: mock.Mock())


class TestFusedFuncNames(unittest.TestCase):
    def setUp(self) -> None:
        self.enterContext(mock.patch.dict(FusedOpPool._fused_funcs))

    def test_a_runner_calls_the_fused_function_of_its_registered_name(self) -> None:
        fused = register_fused_func("none", NAME)(lambda dispatched, weights, config: (dispatched, weights))
        self.assertIs(FusedOpPool.get_fused_func("none", NAME), fused)
        runner = MoeRunner(resolve_moe_runner_backend(NAME), MoeRunnerConfig())
        self.assertEqual(runner.run("dispatched", "weights"), ("dispatched", "weights"))

    def test_an_unknown_name_is_refused(self) -> None:
        for names in (("none", "nobodys_extension"), ("nobodys_dispatcher", NAME)):
            with self.assertRaises(ValueError):
                register_fused_func(*names)(lambda *_: None)


if __name__ == "__main__":
    unittest.main()
