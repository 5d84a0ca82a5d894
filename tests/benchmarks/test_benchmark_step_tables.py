"""What is printed of one step's result: the committed ones, as numbers and as a page shows them."""

import copy
import json

import pytest

from benchmarks.result import RESULTS
from benchmarks.step.phases import PHASES
from benchmarks.step.tables import rate_table, seconds_table, tables

COMMITTED = sorted(RESULTS.glob("step_cpu_*.json"))


def _read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_lines_are_about_as_wide_as_a_page(path):
    """92 characters are; with quartiles a few more."""
    assert max(map(len, tables(_read(path)).splitlines())) <= 96


def test_a_phase_that_takes_nothing_has_no_column():
    result = copy.deepcopy(_read(COMMITTED[0]))
    head = seconds_table(result).splitlines()[0].split()
    for phase in PHASES:
        most = max(row["phases"][phase]["median"] for row in result["arms"].values())
        assert (phase in head) == (most >= 0.005), phase
    list(result["arms"].values())[-1]["phases"]["log-probs"]["median"] = 0.3
    assert "log-probs" in seconds_table(result).splitlines()[0], "one arm is enough"


def test_quartiles_are_of_several_rounds():
    one = _read(COMMITTED[0]) | {"n": 1}
    several = one | {"n": 2}
    assert "[" not in seconds_table(one) and "[q1, q3]" in seconds_table(several)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_ratios_are_to_the_references_that_were_run(path):
    arms = _read(path)["arms"]
    names = {"trl-hf": "x trl-hf", "trl-hf-tuned": "x tuned", "kit-before": "x before"}
    head, *lines = rate_table(_read(path)).splitlines()
    assert [short in head for short in names.values()] == [name in arms for name in names]
    run = [name for name in names if name in arms]
    for line in lines:
        mine = arms[line.split()[0]]["seconds"]["median"]
        shown = list(map(float, line.split()[4:]))  # behind the arm, two rates and the memory
        assert shown == pytest.approx(
            [arms[name]["seconds"]["median"] / mine for name in run], abs=0.005
        )


def test_a_result_without_arms_says_so():
    none = _read(COMMITTED[0]) | {
        "arms": {},
        "not run": {"kit": "killed, most likely for want of memory"},
    }
    assert tables(none) == "no arm was measured (kit: killed, most likely for want of memory)"
