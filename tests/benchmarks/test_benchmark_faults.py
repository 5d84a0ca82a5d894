"""The campaign of faults: what is drawn, and what an ending is called. The runs themselves are the benchmark."""

import json

import pytest

from benchmarks.faults.campaign import ARMS as NAMES
from benchmarks.faults.campaign import KINDS, drawn, ended
from benchmarks.faults.runs import ARMS
from benchmarks.result import RESULTS

WHOLE = {"weights": "a", "rows": "b", "completions": "c"}


def test_faults_are_a_function_of_seed_and_number():
    faults = [drawn(0, number) for number in range(128)]
    assert (
        faults == [drawn(0, number) for number in range(128)] != [drawn(1, number) for number in range(128)]
    )
    assert NAMES == tuple(ARMS)
    assert {f["arm"] for f in faults} == set(ARMS) and {f["kind"] for f in faults} == set(KINDS)
    presses = {f["moment"] for f in faults if "press" in f["kind"]}
    assert presses == {f["moment"] for f in faults if f["kind"] == "kill"} == {"any", "evaluation", "saving"}


@pytest.mark.parametrize(
    "first, last, outcome",
    [
        ({"killed": True}, WHOLE, "equal"),
        ({"hit": [3], "said": []} | WHOLE, None, "equal"),
        ({"hit": [3], "said": ["full"]} | WHOLE, None, "words, then equal"),
        ({"hit": [], "said": []} | WHOLE, None, "equal; the fault came after the end"),
        ({"killed": True}, {"nothing_yet": "holds no checkpoint"}, "nothing saved yet, in words"),
        ({"killed": True}, WHOLE | {"rows": "x"}, "different rows"),
        ({"hit": [3], "said": []} | WHOLE | {"weights": "x"}, None, "different weights"),
        ({"killed": True}, {"error": "Traceback"}, "a raw error"),
        ({"hung": True}, None, "hung"),
    ],
)
def test_an_ending_has_one_name(first, last, outcome):
    assert ended(first, last or first, WHOLE) == outcome


def test_the_committed_campaign_adds_up():
    result = json.loads((RESULTS / "faults.json").read_text())
    assert result["n"] >= 100 and sum(result["outcomes"].values()) == result["n"]
    assert sum(row["n"] for row in result["counts"]) == result["n"]
    assert sum(sum(by.values()) for by in result["by_arm"].values()) == result["n"]
    fine = {
        "equal",
        "words, then equal",
        "equal; the fault came after the end",
        "nothing saved yet, in words",
    }
    assert set(result["outcomes"]) <= fine
