"""Counts of what ran, and the status files by which a live process shows them."""

from __future__ import annotations

import functools
import json
import logging
import os
import stat

import pytest

from sglang_router_ext.plugin import counters


@pytest.fixture(autouse=True)
def fresh():
    counters.reset()
    yield
    counters.reset()


@pytest.fixture
def private(monkeypatch, tmp_path):
    """A status directory and a process state of this test's own."""
    monkeypatch.setattr(counters.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(counters, "_announced", None)
    monkeypatch.setattr(counters, "_reporter", None)
    monkeypatch.setattr(counters, "_prometheus", lambda: None)
    monkeypatch.setattr(counters.atexit, "register", lambda function, *args: None)
    return functools.partial(
        counters.announce,
        role="scheduler",
        rank=1,
        gpu="NVIDIA H200 (sm_90)",
        backends=["router_ext"],
        gate="auto",
        sglang="0.5.23",
        hooks=["a", "b"],
        runs_models=False,
    )


def test_counts_are_kept_by_path():
    for _ in range(3):
        counters.count("gate", "pair")
    counters.count("selection", "host", "plan refused: topk: asked 9, planned 8")
    assert counters.summary() == "gate: pair x 3; selection: host x 1 (plan refused: topk: asked 9, planned 8)"


def test_a_live_process_shows_its_status(private):
    counters.count("gate", "pair")
    private()
    (status,) = counters.read_live()
    assert status.identity.pid == os.getpid()
    assert (status.identity.role, status.identity.rank, status.identity.backends) == ("scheduler", 1, ["router_ext"])
    assert status.hooks == ["a", "b"]
    assert status.counts == [counters.Count("gate", "pair", "", 1)]
    assert stat.S_IMODE(counters.directory().stat().st_mode) == 0o700
    counters._withdraw(os.getpid() + 1)  # a fork ends
    assert len(counters.read_live()) == 1
    counters._withdraw(os.getpid())
    assert counters.read_live() == []


def test_ended_processes_and_broken_files_are_left_out(private):
    private()
    folder, own = counters.directory(), counters.directory() / f"{os.getpid()}.json"
    status = json.loads(own.read_bytes())
    for name, change in (("reused", {"started": status["identity"]["started"] + 1}), ("ended", {"pid": 2**22 + 1})):
        (folder / f"{name}.json").write_text(json.dumps({**status, "identity": {**status["identity"], **change}}))
    (folder / "broken.json").write_text("{")
    assert [found.identity.pid for found in counters.read_live()] == [os.getpid()]


def test_a_directory_that_others_can_enter_is_not_used(private, caplog):
    counters.directory().mkdir(mode=0o755)
    counters.directory().chmod(0o755)
    counters._warn_once.cache_clear()
    private()
    assert counters.read_live() == []
    assert list(counters.directory().iterdir()) == []
    assert "not a directory of this user with mode 0700" in caplog.text


def test_the_summary_is_logged_once_and_the_status_follows(private, monkeypatch, caplog):
    for name, seconds in (("PERIOD_S", 0.01), ("QUIET_S", 0.05)):
        monkeypatch.setattr(counters, name, seconds)
    caplog.set_level(logging.INFO)
    counters.link()
    private(runs_models=True)
    counters.count("gate", "pair")
    for _ in range(500):
        if "gate: pair x 1" in caplog.text:
            break
        counters.time.sleep(0.01)
    assert caplog.text.count("gate: pair x 1") == 1
    (status,) = counters.read_live()
    assert (status.linked, status.counts) == (1, [counters.Count("gate", "pair", "", 1)])
    assert counters.UNLINKED not in caplog.text


def test_a_model_without_a_layer_for_us_is_an_error_in_the_log(private, monkeypatch, caplog):
    for name, seconds in (("PERIOD_S", 0.01), ("LATEST_S", 0.05)):
        monkeypatch.setattr(counters, name, seconds)
    private(runs_models=True)
    for _ in range(500):
        if counters.UNLINKED in caplog.text:
            break
        counters.time.sleep(0.01)
    assert caplog.text.count(counters.UNLINKED) == 1
    assert "no MoE layer ran" not in caplog.text
