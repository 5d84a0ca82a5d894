"""Proofs without a process around each, which loads torch anew and takes seconds."""

import json
from pathlib import Path

import pytest

from grpo_kit.exports import reader, verify


@pytest.fixture
def read_here(monkeypatch):
    """The same reader, on the same folder, in this process; a list of what it was asked."""
    asked = []

    def ask(request, path):
        asked.append(json.loads(json.dumps(request)))
        Path(request["answer"]).write_text(json.dumps(reader.read(asked[-1])), encoding="utf-8")

    monkeypatch.setattr(verify, "_ask", ask)
    return asked
