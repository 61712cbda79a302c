"""SGLANG_REQUIRE_PLUGINS: an error of a plugin is raised, not only logged. Runs on a CPU."""

from __future__ import annotations

import os
import unittest
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

from sglang.srt import plugins
from sglang.srt.plugins.hook_registry import HookRegistry


class Broken(Exception):
    pass


def fail() -> None:
    raise Broken


def hook_nothing() -> None:
    HookRegistry.register("sglang.srt.plugins.no_such_function", lambda *_: None)


def entry_point(load: object) -> SimpleNamespace:
    return SimpleNamespace(name="plugin", value="module:function", dist=None, load=load)


CASES = {
    "import": (entry_point(fail), Broken),
    "call": (entry_point(lambda: fail), Broken),
    "hook": (entry_point(lambda: hook_nothing), AttributeError),
}


class TestPluginErrors(unittest.TestCase):
    def load(self, point: SimpleNamespace, **environment: str) -> None:
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(plugins, "entry_points", lambda group: [point]),
            mock.patch.object(plugins, "_plugins_loaded", False),
            mock.patch.object(HookRegistry, "_hooks", defaultdict(list)),
            self.assertLogs("sglang.srt.plugins", "ERROR"),
        ):
            for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_REQUIRE_PLUGINS"):
                os.environ.pop(name, None)
            os.environ.update(environment)
            plugins.load_plugins()

    def test_errors_are_only_logged_by_default(self) -> None:
        for name, (point, _) in CASES.items():
            with self.subTest(name):
                self.load(point)

    def test_errors_are_raised_where_plugins_are_required(self) -> None:
        for name, (point, error) in CASES.items():
            with self.subTest(name), self.assertRaises(error):
                self.load(point, SGLANG_REQUIRE_PLUGINS="1")


if __name__ == "__main__":
    unittest.main()
