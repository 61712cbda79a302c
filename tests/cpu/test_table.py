"""The design table and what is built from it: no duplicates, no dangling targets, settings in one place."""

from __future__ import annotations

import ast
import importlib.util

import msgspec
import pytest

from sglang_router_ext import settings
from sglang_router_ext.backends import BACKENDS, GATES
from sglang_router_ext.contract import ContractError
from sglang_router_ext.designs import DESIGNS, PACKAGE, TABLE, Design, Numerics, Rows, by_name, source_hash


def test_duplicates_raise() -> None:
    with pytest.raises(ValueError, match="pair: stands twice"):
        by_name((*DESIGNS, TABLE["pair"]))


def test_an_unknown_stage_or_status_raises() -> None:
    odd = msgspec.structs.replace(TABLE["naive"], name="odd", stages=("gate", "attention"))
    with pytest.raises(ValueError, match="odd: stages: got"):
        by_name((odd,))
    with pytest.raises(ValueError, match=r"status: got maybe, allowed: on \| trial"):
        Design(name="x", stages=("gate",), target="", what="", numerics=Numerics.EXACT_IDS, row_stable=True, status="maybe")


@pytest.mark.parametrize("design", [design for design in DESIGNS if design.target], ids=lambda design: design.name)
def test_targets_exist_and_are_among_the_sources(design: Design) -> None:
    module, _, function = design.target.partition(":")
    assert importlib.util.find_spec(f"sglang_router_ext.{module}") is not None
    file = module.replace(".", "/") + ".py"
    assert file in design.sources
    defined = {node.name for node in ast.parse((PACKAGE / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert function in defined
    for source in design.sources:
        assert (PACKAGE / source).is_file(), source


@pytest.mark.parametrize("design", [design for design in DESIGNS if design.target], ids=lambda design: design.name)
def test_every_header_that_a_source_includes_is_a_source(design: Design) -> None:
    """Else a changed header would leave a record looking fresh."""
    for source in design.sources:
        if source.endswith(".cuh"):
            lines = (PACKAGE / source).read_text().splitlines()
            for included in (line.split('"')[1] for line in lines if line.startswith('#include "')):
                path = (PACKAGE / source).parent.joinpath(included).resolve().relative_to(PACKAGE)
                assert path.as_posix() in design.sources, f"{source} includes {path}"


def test_the_hash_follows_the_sources() -> None:
    assert source_hash(("gate/naive.py",)) != source_hash(("gate/cublas_gemm.py",))
    assert source_hash(("gate/naive.py", "gate/naive.py")) == source_hash(("gate/naive.py",))
    assert source_hash(()) == ""
    assert len({design.source_hash for design in DESIGNS if design.target}) == len(DESIGNS) - 1


def test_rows_are_closed_ranges() -> None:
    assert 1 in Rows(1, 16) and 16 in Rows(1, 16) and 17 not in Rows(1, 16) and 0 not in Rows(1)
    assert (str(Rows(1, 16)), str(Rows(17)), str(Rows(6, 6))) == ("1-16", "17+", "6")


def test_backends_and_gates_name_rows_of_the_table() -> None:
    for backend in BACKENDS.values():
        assert set(backend.designs) <= set(TABLE)
    assert set(GATES) - {"auto", "host", "fp32"} == {design.name for design in DESIGNS if design.stages == ("gate",)}


def test_a_trial_design_has_no_band() -> None:
    """A band says that a record shows it fastest, and such a design is on."""
    for design in DESIGNS:
        assert design.status == "on" or not design.bands, design.name


@pytest.mark.parametrize("setting", settings.SETTINGS, ids=lambda setting: setting.name)
def test_settings_have_defaults_and_refuse_what_is_not_allowed(setting: settings.Setting) -> None:
    assert setting.default in setting.allowed
    for value in setting.allowed:
        settings.read({setting.name: value})
    with pytest.raises(ContractError, match=f"{setting.name}: got 'nonsense', allowed: "):
        settings.read({setting.name: "nonsense"})
    assert settings.read({setting.name: "  "}) == settings.read({})


def test_there_are_at_most_six_settings_and_one_reader() -> None:
    assert len(settings.SETTINGS) <= 6
    for file in PACKAGE.rglob("*.py"):
        if file.name != "settings.py":
            text = file.read_text()
            for setting in settings.SETTINGS:
                assert f'environ["{setting.name}"]' not in text and f'environ.get("{setting.name}"' not in text, file
