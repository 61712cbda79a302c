"""A registered backend answers as the family that it names, and its runners are its own. Runs on a CPU."""

from __future__ import annotations

import unittest
from unittest import mock

from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig, register_moe_runner_core
from sglang.srt.layers.moe.utils import MoeRunnerBackend, resolve_moe_runner_backend
from sglang.srt.runtime_context import get_flags

TRITON, MARLIN = MoeRunnerBackend.TRITON, MoeRunnerBackend.MARLIN
PREDICATES = [name for name in dir(TRITON) if name.startswith("is_")]


def answers(backend: object) -> list[bool]:
    return [getattr(backend, name)() for name in PREDICATES]


class TestRunnerFamily(unittest.TestCase):
    core = mock.Mock()
    model_family = TRITON

    @classmethod
    def setUpClass(cls) -> None:
        register_moe_runner_core("family_fixed", lambda config: cls.core, family=TRITON)
        register_moe_runner_core("family_by_model", lambda config: cls.core, family=lambda: cls.model_family)
        register_moe_runner_core("family_none", lambda config: cls.core)

    def test_answers_are_the_familys(self) -> None:
        self.assertEqual(answers(resolve_moe_runner_backend("family_fixed")), answers(TRITON))
        for family in (MARLIN, TRITON):
            type(self).model_family = family
            self.assertEqual(answers(resolve_moe_runner_backend("family_by_model")), answers(family))

    def test_the_name_stays_its_own(self) -> None:
        backend = resolve_moe_runner_backend("family_fixed")
        self.assertEqual((backend.value, backend.name, backend.family), ("family_fixed", "family_fixed", TRITON))

    def test_without_a_family_all_answers_are_no(self) -> None:
        self.assertFalse(any(answers(resolve_moe_runner_backend("family_none"))))

    def test_a_built_in_name_has_no_other_family(self) -> None:
        with self.assertRaisesRegex(ValueError, "already built in"):
            register_moe_runner_core("cutlass", lambda config: self.core, family=TRITON)

    def core_of(self, chosen: object, asked: MoeRunnerBackend, *, lora: bool = False) -> object:
        """What runs where a quantization method asks for ``asked`` while ``chosen`` is in force."""
        with mock.patch.object(get_flags().moe, "runner_backend", chosen):
            return MoeRunner(asked, MoeRunnerConfig(), lora_enabled=lora).runner_core

    def test_a_hard_coded_built_in_gives_way_to_its_family(self) -> None:
        chosen = resolve_moe_runner_backend("family_fixed")
        self.assertIs(self.core_of(chosen, TRITON), self.core)
        self.assertIsNot(self.core_of(chosen, MoeRunnerBackend.TRITON_KERNELS), self.core)
        self.assertIsNot(self.core_of(chosen, TRITON, lora=True), self.core)
        self.assertIsNot(self.core_of(resolve_moe_runner_backend("family_none"), TRITON), self.core)
        self.assertIsNot(self.core_of(TRITON, TRITON), self.core)


if __name__ == "__main__":
    unittest.main()
