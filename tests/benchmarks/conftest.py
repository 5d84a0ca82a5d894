"""Measurements without a process around each."""

import lab_runs
import plan_runs
import pytest
from answered_here import answered_here

from benchmarks.advice.plan import arms, campaign, runs
from benchmarks.advice.plan.entry import Asked
from benchmarks.result import ROOT
from benchmarks.step import child


@pytest.fixture
def children(monkeypatch):
    """What a child would do, done here, since starting one takes seconds; a list of what was asked for.

    "prepare" or an arm's name. The machine's peaks are made up.
    """
    asked = []

    def here(request, kit=ROOT, **how):
        asked.append(request.get("arm", request["do"]))
        return answered_here(request)

    monkeypatch.setattr("benchmarks.step.run.in_a_child", here)
    monkeypatch.setattr("benchmarks.step.__main__.in_a_child", here)
    monkeypatch.setattr(child, "device_peaks", lambda *args: {"FLOP/s": 1e10, "bytes/s": 1e10})
    return asked


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A plan of one claim on the tiny model, in folders of its own."""
    base = lab_runs.base() | {"steps": 2}
    preset = base.pop("config")
    entry = Asked(
        "cold", "A4", "h", "cold", "control", "reward_mean", first=1, most=2, priority=1
    )
    monkeypatch.setattr(runs, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(campaign, "ASKED", [entry])
    small_arms = {"control": base, "cold": base | {"temperature": 0.5}}
    for module in (arms, runs):
        monkeypatch.setattr(module, "ARMS", small_arms)
        monkeypatch.setattr(module, "PRESET", preset)
    plan_runs.forget()
    yield small_arms
    plan_runs.forget()
