"""Measurements without a process around each."""

import json

import pytest

from benchmarks.result import ROOT
from benchmarks.step import child


@pytest.fixture
def children(monkeypatch):
    """What a child would do, done here, since starting one takes seconds; a list of what was asked for.

    "prepare" or an arm's name. The machine's peaks are made up.
    """
    asked = []

    def here(request, kit=ROOT):
        request = json.loads(json.dumps(request))
        asked.append(request.get("arm", request["do"]))
        answer = {"prepare": child.prepare, "measure": child.measure_once}[request.pop("do")](**request)
        return json.loads(json.dumps(answer))

    monkeypatch.setattr("benchmarks.step.run.in_a_child", here)
    monkeypatch.setattr("benchmarks.step.__main__.in_a_child", here)
    monkeypatch.setattr(child, "device_peaks", lambda *args: {"FLOP/s": 1e10, "bytes/s": 1e10})
    return asked
