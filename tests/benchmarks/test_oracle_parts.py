"""The oracle's accuracy: what passes, what fails, and that the record is whole."""

import json
import math
import subprocess
import sys
from statistics import fmean, stdev

import pytest

from benchmarks.oracle import accuracy
from benchmarks.oracle.accuracy import check_accuracy, compare_accuracy
from benchmarks.result import ROOT
from grpo_kit.evaluation.intervals import wilson_interval


def passes(differences):
    return [d.passes for d in differences]


def test_accuracies_inside_and_outside():
    """Prediction intervals by hand: Student's t of n - 1 degrees of freedom at 97.5 %, times s sqrt(1/n + 1/runs)."""
    assert passes(compare_accuracy("main job, full", [0.88, 0.80, 0.90], 256)) == [True] * 4
    jobs = json.loads(accuracy.PATH.read_text())["jobs"]
    right = [226 / 256, 202 / 256, 234 / 256]  # three seeds: t = 4.3027
    half = 4.3027 * stdev(right) * math.sqrt(1 / 3 + 1 / 3)
    assert jobs["main job, full"]["mean within"] == pytest.approx(
        [fmean(right) - half, 1.0], abs=1e-4
    )
    lora = [run["accuracy"] for run in jobs["main job, LoRA"]["seeds"]]  # nine: t = 2.3060
    one, three = (2.3060 * stdev(lora) * math.sqrt(1 / 9 + 1 / runs) for runs in (1, 3))
    within = jobs["main job, LoRA"]["mean within"]
    assert within == pytest.approx([fmean(lora) - three, fmean(lora) + three], abs=1e-4)
    assert jobs["main job, LoRA"]["each"][0] == pytest.approx(fmean(lora) - one, abs=1e-4)
    assert passes(compare_accuracy("main job, LoRA", [0.40, 0.80, 0.80], 256)) == [
        False,
        True,
        True,
        False,
    ]
    assert passes(compare_accuracy("grid episodes", [1.0, 1.0, 0.5], 256))[2] is False


@pytest.mark.parametrize(
    "job, three, n", [("main job", [1] * 3, 256), ("grid episodes", [1] * 2, 256)]
)
def test_an_unknown_job_and_too_few_runs_are_refused(job, three, n):
    with pytest.raises(ValueError, match="job=|accuracies="):
        compare_accuracy(job, three, n)
    with pytest.raises(ValueError, match="n=64"):
        compare_accuracy("grid episodes", [1.0] * 3, 64)


def test_the_recorded_accuracies_are_those_of_their_sources(monkeypatch):
    assert all(passes(check_accuracy()))
    job = json.loads(accuracy.PATH.read_text())["jobs"]["main job, LoRA"]
    for run, source in zip(
        job["seeds"], accuracy._read("main_job_lora_cpu.json")["runs"], strict=True
    ):
        low, high = wilson_interval(run["right"], job["n"])
        assert (
            source["after"]
            == f"{100 * run['right'] / job['n']:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"
        )
    others = {
        name: accuracy._read(name)
        for name in ("main_job_before_cpu.json", "main_job_lora_cpu.json")
    }
    others["main_job_lora_cpu.json"]["runs"][0]["after"] = "67.6% [61.6, 73.0]"
    others["agents_smollm2-135m-instruct.json"] = accuracy._read(
        "agents_smollm2-135m-instruct.json"
    )
    monkeypatch.setattr(accuracy, "_read", others.__getitem__)
    assert not all(passes(check_accuracy()))


def test_what_compares_imports_no_trl():
    code = "import sys; from benchmarks.oracle import accuracy, loop, losses, steps; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert "benchmarks.oracle.steps" in loaded
    assert "trl" not in loaded
