"""A report of a card: beside which row it stands, what is kept, what is said; it runs on the pretend card."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.card import report
from benchmarks.result import ROOT

RIG = ROOT / "tests" / "pretend_card"


def test_the_row_is_the_cards_own_or_the_nearest_in_bandwidth():
    names = {
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "NVIDIA A10G": "A10G",
        "NVIDIA L4": "L4",
        "Tesla T4": "T4",
    }
    assert {name: report.row_of(name, None)[0] for name in names} == names
    assert report.row_of("NVIDIA GeForce RTX 4080", 0.85 * 0.717e12)[0] == "A10G"
    assert report.row_of("NVIDIA RTX A6000", 0.85 * 0.768e12)[0] == "RTX 3090"


def test_a_report_stands_beside_its_row():
    parts = {
        "decode": {"full": {"8x8": {"ms a token": 7.5}}, "peaks": {"bytes/s": 9e11}},
        "step full": {"seconds": 11.0, "reserved ever": 21.0},
        "step lora": {"failed": "one line\nno memory"},
        "main job": {
            "measure": "accuracy",
            "before": {"accuracy": 0.2},
            "after": {"accuracy": 0.875},
        },
        "tests": {"summary": "25 passed, 3 skipped in 50.1s"},
    }
    text = report.beside({"hardware": "NVIDIA GeForce RTX 4090", "parts": parts})
    cell = report.row_of("NVIDIA GeForce RTX 4090", None)[1]["full"]["512"]
    lines = {line[:34].strip(): line[34:].split() for line in text.splitlines()}
    assert lines["ms a token of 64 rows, full"] == ["7.5", f"{cell['ms a token at 288']:.4g}"]
    assert lines["s a step of 64 x 512, full"] == ["11", f"{cell['step']:.4g}"]
    assert (
        "0.200 -> 0.875" in text
        and "25 passed, 3 skipped" in text
        and "step lora: failed: no memory" in text
    )


@pytest.fixture
def with_a_card(tmp_path, monkeypatch):
    """Every Python that starts from here on has a pretend card."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a real card: `make card` runs the report on it")
    monkeypatch.syspath_prepend(str(RIG))
    import build

    try:
        build.library()
    except build.NotHere as reason:
        pytest.skip(str(reason))
    (tmp_path / "sitecustomize.py").write_text("import card\n\ncard.install()\n")
    paths = [str(tmp_path), str(RIG), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PRETEND_CARD": "rtx4090",
        "OMP_NUM_THREADS": "1",
    }


def test_a_report_of_another_card_is_not_gone_on_with(tmp_path, monkeypatch, capsys):
    out = tmp_path / "card_report.json"
    assert report.begun(out, "NVIDIA L4") == {"parts": {}}
    out.write_text(json.dumps({"hardware": "NVIDIA L4", "parts": {}}))
    assert report.begun(out, "NVIDIA L4")["hardware"] == "NVIDIA L4"
    with pytest.raises(ValueError, match="report of NVIDIA L4, this is NVIDIA A10G"):
        report.begun(out, "NVIDIA A10G")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["report", str(out)])
    with pytest.raises(SystemExit):
        report.main()
    assert "no CUDA card on this machine" in capsys.readouterr().err


@pytest.mark.campaign
def test_it_runs_on_the_pretend_card_and_goes_on_where_it_ended(with_a_card, tmp_path):
    """Tiny shapes; its seconds are nobody's. Two parts are there already, one failed before."""
    out = tmp_path / "card_report.json"
    kept = {"seconds": 1.5, "reserved ever": 2.0}
    rows = {kind: {"8x8": {"ms a token": 1.25}} for kind in ("full", "lora")}
    parts = {"decode": rows, "step lora": kept, "step full": {"failed": "out of memory"}}
    out.write_text(json.dumps({"parts": parts}))
    command = [sys.executable, "-m", "benchmarks.card.report", str(out), "--small"]
    command += ["--tests", "tests/test_cuda_card.py::test_everybody_asks_this_one_function"]
    done = subprocess.run(command, cwd=ROOT, env=with_a_card, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    parts = found["parts"]
    assert found["hardware"] == "NVIDIA GeForce RTX 4090" and parts.keys() == set(report.PARTS)
    assert not [part for part in parts.values() if "failed" in part], parts
    assert parts["step lora"] == kept and parts["step full"]["seconds"] > 0
    assert parts["decode"] == rows and "passed" in parts["tests"]["summary"]
    assert {"before", "after"} <= parts["main job"].keys()
    for word in (
        "step lora: kept from before",
        "ms a token of 64 rows, LoRA",
        "main job, accuracy",
        str(out),
    ):
        assert word in done.stdout
